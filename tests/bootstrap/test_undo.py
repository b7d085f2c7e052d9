"""What was begun for a node is ended by its folder's name, with nothing else that runs there."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyward.bootstrap.undo import marked, undo
from skyward.errors import ProviderError
from skyward.ssh.command import Completed
from tests.waiting import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a node is Linux: its processes are found in /proc")


def run(command: str, *, input: object = None, timeout_s: float, on_line: object = None) -> Completed:  # noqa: A002
    done = subprocess.run(["sh", "-c", command], input=input, capture_output=True, timeout=timeout_s, check=False)  # type: ignore[call-overload]
    return Completed(code=done.returncode, stdout=done.stdout, stderr=done.stderr)


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(f"/tmp/skyward-{os.getuid()}") / f"undo.-{uuid.uuid4().hex[:6]}"
    path.mkdir(parents=True)
    yield path
    assert not path.exists()


def test_processes_of_the_node_are_ended_however_they_detached_themselves(folder: Path) -> None:
    other = folder.with_name(folder.name.replace("undo.", "undox"))
    other.mkdir()
    waits = f"exec {sys.executable} -c 'import os, time; os.fork() or os.setsid(); time.sleep(60)'"
    process, spared = (
        subprocess.Popen(["sh", "-c", marked(waits, path.name)], start_new_session=True) for path in (folder, other)
    )
    until(lambda: len(_of(folder)) == len(_of(other)) == 2)
    undo(run, [folder.name, "never-begun"])
    process.wait(10)
    assert _of(folder) == []
    assert len(_of(other)) == 2
    undo(run, [folder.name])
    undo(run, [other.name])
    spared.wait(10)
    assert not other.exists()


def test_a_shell_that_does_not_answer_is_an_error(folder: Path) -> None:
    def dumb(command: str, **options: object) -> Completed:
        return Completed(code=127, stdout=b"", stderr=b"sh: not found")

    with pytest.raises(ProviderError, match=r"code 127.*sh: not found"):
        undo(dumb, [folder.name])
    folder.rmdir()


def _of(folder: Path) -> list[int]:
    mark = f"SKYWARD_NODE={folder.name}\0".encode()
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            if mark in Path(f"/proc/{entry}/environ").read_bytes():
                found.append(int(entry))
        except OSError:
            continue
    return found
