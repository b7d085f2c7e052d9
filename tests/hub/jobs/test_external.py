"""Machines behind a queue of their own: a provider of another package, whose launch waits, and says why."""

from __future__ import annotations

from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from skyward import hub
from tests.hub.jobs.calls import node
from tests.hub.jobs.hub_process import HubProcess
from tests.waiting import until


def install_provider(folder: Path) -> None:
    """Write what pip writes for a package that brings a provider."""
    made = folder / "skyward_queued-1.0.dist-info"
    made.mkdir()
    (made / "METADATA").write_text("Metadata-Version: 2.1\nName: skyward-queued\nVersion: 1.0\n")
    (made / "entry_points.txt").write_text("[skyward.providers]\nqueued = skyward.testing.queued:QueuedProvider\n")


def test_gang_waits_in_the_queue_of_its_provider_says_why_and_can_be_cancelled_there(
    hub_process: HubProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_provider(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    hub_process.kill()
    hub_process.start()
    queue = tmp_path / "queue"
    queue.write_text("Priority: 3 jobs are ahead")
    provider = {"type": "queued", "queue": str(queue)}
    machines = {"name": "cluster", "kind": "external", "provider": provider, "nodes": 4, "labels": ["cluster"]}
    with hub_process.client() as client:
        assert client.post("/v1/capacity", json=machines).status_code == 201
    waiting = "starts: node 0, queue: Priority: 3 jobs are ahead"
    given_up, gang = (hub.submit(node(), nodes=2, on="all", labels=["cluster"]) for _ in range(2))
    until(lambda: [job.why_waiting for job in (given_up, gang)] == [waiting] * 2, 90)
    assert given_up.cancel()
    with pytest.raises(CancelledError):
        given_up.result(60)
    queue.write_text("Resources")
    until(lambda: gang.why_waiting == "starts: node 0, queue: Resources", 90)
    queue.unlink()
    assert gang.result(90) == [0, 1]
    hub_process.until_clean()
