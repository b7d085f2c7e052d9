"""The cache on a node is bounded, is cleared on request, and never loses an environment that is in use."""

from __future__ import annotations

import fcntl
import os
import subprocess
import time
from pathlib import Path

import pytest

from skyward.bootstrap.prepare import Ready, prepare
from skyward.bootstrap.scripts import clear_cache
from skyward.errors import ProviderError
from skyward.events import ignore
from skyward.values.image import Image
from tests.bootstrap.packages import Index
from tests.bootstrap.scratch import ScratchNode


def make_ready(node: ScratchNode, image: Image, limit_gib: float = 20.0) -> Ready:
    return prepare(node, image, emit=ignore, node=0, folder="test-0", cache_limit_gib=limit_gib)


def environment_of(ready: Ready) -> Path:
    return Path(ready.python).parents[1]


def let_age(environment: Path, hours: float) -> None:
    then = time.time() - hours * 3600
    os.utime(environment / "used", (then, then))


def test_beyond_the_limit_the_least_recently_used_environments_are_removed(scratch: ScratchNode, index: Index) -> None:
    oldest = environment_of(make_ready(scratch, Image(pip=["alpha==1.0"], pip_index_url=index.url)))
    used = environment_of(make_ready(scratch, Image(pip=["alpha==2.0"], pip_index_url=index.url)))
    recent = environment_of(make_ready(scratch, Image(pip=["beta"], pip_index_url=index.url)))
    let_age(oldest, 30)
    let_age(used, 20)
    process = subprocess.Popen([used / "bin" / "python", "-c", "input()"], stdin=subprocess.PIPE)
    try:
        last = environment_of(make_ready(scratch, Image(pip_index_url=index.url), limit_gib=0.001))
    finally:
        process.communicate(b"\n", timeout=60)
    assert not oldest.exists()
    assert (used / "ready.json").exists()
    assert (recent / "ready.json").exists()
    assert (last / "ready.json").exists()


def test_below_the_limit_nothing_is_removed(scratch: ScratchNode, index: Index) -> None:
    old = environment_of(make_ready(scratch, Image(pip=["alpha"], pip_index_url=index.url)))
    let_age(old, 10_000)
    make_ready(scratch, Image(pip_index_url=index.url))
    assert (old / "ready.json").exists()


def test_a_removed_environment_is_made_again(scratch: ScratchNode, index: Index) -> None:
    image = Image(pip=["alpha"], pip_index_url=index.url)
    first = make_ready(scratch, image)
    let_age(environment_of(first), 30)
    make_ready(scratch, Image(pip_index_url=index.url), limit_gib=0.001)
    assert not environment_of(first).exists()
    assert make_ready(scratch, image).python == first.python


def test_clearing_keeps_used_environments_and_reports_the_removed_ones(scratch: ScratchNode, index: Index) -> None:
    old = environment_of(make_ready(scratch, Image(pip=["alpha"], pip_index_url=index.url)))
    let_age(old, 1)
    folder = os.open(scratch.cache.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_SH)
        kept = make_ready(scratch, Image(pip_index_url=index.url))  # several at a time
        with pytest.raises(ProviderError, match="pools are starting there"):
            clear_cache(scratch, patience_s=0)
        assert old.exists()
    finally:
        os.close(folder)
    cleared = clear_cache(scratch)
    assert str(old) in cleared.removed
    assert str(environment_of(kept)) in cleared.kept
    assert not old.exists()

    for environment in scratch.platform.glob("*-*/used"):
        let_age(environment.parent, 1)
    process = subprocess.Popen([kept.python, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        cleared = clear_cache(scratch)  # of this pool only one of the two environments is in use
    finally:
        process.communicate(b"\n", timeout=60)
    assert cleared.kept == (str(environment_of(kept)),)
    assert Path(kept.python).exists()

    cleared = clear_cache(scratch)
    assert cleared.kept == ()
    assert cleared.freed_gib > 0
    assert not scratch.cache.exists()
    assert clear_cache(scratch).removed == ()
