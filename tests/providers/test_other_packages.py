"""Providers of other packages, and machines that wait in a queue."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

import skyward as sky
from skyward.errors import PoolClosed, UsageError
from skyward.events import Event, PhaseStarted
from skyward.pool.config import provider_of
from skyward.providers import load, provider_names
from skyward.testing import QueuedProvider
from tests.hub.jobs.test_external import install_provider
from tests.waiting import until


def test_package_brings_a_provider_by_its_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_provider(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert provider_names() == ["aws", "local", "ray_cluster", "ssh", "queued"]
    assert load("queued") is QueuedProvider
    assert provider_of({"type": "queued", "queue": "q"}) == QueuedProvider(queue="q")
    with pytest.raises(UsageError, match=r"'queud': unknown provider; did you mean 'queued'\?"):
        provider_of({"type": "queud"})
    with pytest.raises(UsageError, match="use one of 'aws', 'local', 'ray_cluster', 'ssh', 'queued'"):
        load("slurm")


def test_entry_points_are_not_read_for_providers_of_our_own() -> None:
    code = "import sys; from skyward.providers import load; load('local'); print('importlib.metadata' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_pool_that_waits_in_a_queue_says_so_and_is_closed_from_another_thread(tmp_path: Path) -> None:
    queue = tmp_path / "queue"
    queue.write_text("Resources\n")
    events: list[Event] = []
    pool = sky.ComputePool(QueuedProvider(queue=str(queue)), on_event=events.append, console=False)
    reasons: list[BaseException] = []

    def start() -> None:
        with pytest.raises(PoolClosed, match="closed in its start; start it again") as caught:
            pool.start()
        reasons.append(caught.value)

    starter = threading.Thread(target=start)
    starter.start()
    try:
        until(lambda: any(isinstance(event, PhaseStarted) and event.detail == "Resources" for event in events))
    finally:
        pool.close(cancel=True)
        starter.join(60)
    assert len(reasons) == 1
    assert not pool.is_active
    queue.unlink()
    with pool:
        assert (sky.compute(len)([1]) >> pool) == 1
