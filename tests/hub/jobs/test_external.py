"""Providers of other packages: one whose launch waits and says why, and one that takes machines back."""

from __future__ import annotations

import os
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

import skyward as sky
from skyward import hub
from skyward.hub.model.jobs import AttemptEnd
from skyward.hub.runner.attempt_run import AttemptRun
from skyward.testing import QueuedProvider
from tests.hub.jobs.calls import node, train
from tests.hub.jobs.hub_process import HubProcess
from tests.waiting import until

SPOT = """
import threading
from dataclasses import dataclass
from pathlib import Path

from skyward.events import PreemptionNotice
from skyward.providers.local import Local
from tests.waiting import until


@dataclass(frozen=True, kw_only=True)
class Spot(Local):
    takes: str  # file that lets it announce that it takes the first machine back

    def launch(self, spec, offers, pool, nodes, emit):
        machines = super().launch(spec, offers, pool, nodes, emit)

        def take():
            until(Path(self.takes).exists, 300)
            emit(PreemptionNotice(node=0, notice="terminate"))

        threading.Thread(target=take, daemon=True).start()
        return machines
"""


def install_provider(folder: Path, line: str = "queued = skyward.testing.queued:QueuedProvider") -> None:
    """Write what pip writes for a package that brings a provider."""
    made = folder / "skyward_queued-1.0.dist-info"
    made.mkdir()
    (made / "METADATA").write_text("Metadata-Version: 2.1\nName: skyward-queued\nVersion: 1.0\n")
    (made / "entry_points.txt").write_text(f"[skyward.providers]\n{line}\n")


def test_gang_waits_in_the_queue_of_its_provider_says_why_and_can_be_cancelled_there(
    own_hub: HubProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_provider(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    own_hub.restart()
    queue = tmp_path / "queue"
    queue.write_text("Priority: 3 jobs are ahead")
    provider = {"type": "queued", "queue": str(queue)}
    machines = {"name": "cluster", "kind": "external", "provider": provider, "nodes": 4, "labels": ["cluster"]}
    with own_hub.client() as client:
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
    own_hub.until_clean()


def test_order_that_comes_before_the_start_ends_it_too(tmp_path: Path) -> None:
    queue = tmp_path / "queue"
    queue.write_text("Resources")
    pool = sky.ComputePool(QueuedProvider(queue=str(queue)), console=False)
    launch = {"job": "j", "attempt": 1, "name": "train", "nodes": [0], "spec": {"command": [], "sweep": None}}
    run = AttemptRun(tmp_path, launch, lambda: pytest.fail("no message is due"), lambda: 0.0)
    run.abort()
    outcome = run.open(pool)
    assert outcome is not None
    assert (outcome.end, pool.is_active) == (AttemptEnd.STOPPED, False)
    run.close()


@pytest.mark.timeout(400)  # hub, runner, node and torch begin in turn: three minutes where 25 processes share two cores
def test_training_saves_when_its_machine_is_about_to_go_also_in_the_middle_of_a_save(
    own_hub: HubProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    install_provider(tmp_path, "spot = spot_machines:Spot")
    (tmp_path / "spot_machines.py").write_text(SPOT)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), os.getcwd())))
    own_hub.restart()
    takes, marker, gate = (tmp_path / name for name in ("takes", "step", "gate"))
    provider = {"type": "spot", "takes": str(takes)}
    machines = {"name": "spot", "kind": "elastic", "provider": provider, "nodes": 1, "labels": ["spot"]}
    with own_hub.client() as client:
        assert client.post("/v1/capacity", json=machines).status_code == 201
        job = hub.submit(train("", 100_000, str(marker), 0.02, str(gate)), labels=["spot"], type="training")

        def saved_steps() -> list[int]:
            events = client.get(f"/v1/jobs/{job.id}/history").json()["events"]
            return [event["save"]["step"] for event in events if event["kind"] == "saved" and event["save"]]

        until(lambda: marker.exists() and int(marker.read_text() or 0) >= 5, 120)
        until(lambda: job.status == "running")  # its runner says so while the call begins
        job.save()
        until(saved_steps, 60)
        # Two orders at the same step are one save. This one has begun, and does not end before the next order.
        takes.touch()
        notice = "[skyward] node 0: its provider takes the machine back (terminate)"
        until(lambda: notice in list(job.logs(follow=False)), 60)
        gate.touch()
        until(lambda: len(saved_steps()) == 2, 60)
        first, second = saved_steps()
        assert first < second
    assert job.status == "running"
    assert job.cancel()
    with pytest.raises(CancelledError):
        job.result(60)
    own_hub.until_clean()
