"""A training that makes way for more urgent work, and ends as if nothing had happened."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from skyward import hub
from tests.hub.jobs.calls import add, lose_answer, train
from tests.hub.jobs.hub_process import HubProcess
from tests.waiting import until

pytest.importorskip("torch")


def test_preempted_training_saves_makes_way_and_ends_with_the_weights_of_one_that_was_not(
    hub_process: HubProcess, tmp_path: Path
) -> None:
    cores = os.cpu_count() or 1
    steps, marker = 300, tmp_path / "step"
    # It takes a minute, unless it may hurry: so it is not over before it has to make way.
    job = hub.submit(train("", steps, str(marker), 0.2), nodes=cores, preemptible=True, priority="low", type="training")
    until(lambda: marker.exists() and int(marker.read_text() or 0) >= 5, 120)
    until(lambda: job.status == "running")  # its runner says so while the call begins
    job.save()
    with hub_process.client() as client:  # the scheduler takes the job whose last checkpoint is the newest
        history = f"/v1/jobs/{job.id}/history"
        until(lambda: client.get(history).json()["attempts"][0]["saved_at"])
    urgent = hub.submit(add(1, 2), nodes=cores, priority="high")
    assert urgent.result(120) == 3
    marker.with_suffix(".hurry").touch()
    step, weights = job.result(120)
    assert [attempt.end for attempt in job.attempts] == ["stopped", "completed"]
    assert job.attempts[0].error == f"makes way for job {urgent.id}"
    assert (step, weights) == train.local(str(tmp_path / "whole"), steps, str(tmp_path / "other"), 0.0)
    hub_process.until_clean()


def test_training_that_does_not_answer_for_a_while_saves_before_it_makes_way(
    hub_process: HubProcess, tmp_path: Path
) -> None:
    cores, marker = os.cpu_count() or 1, tmp_path / "step"
    job = hub.submit(train("", 100_000, str(marker), 0.03), preemptible=True, priority="low", type="training")
    until(lambda: marker.exists() and int(marker.read_text() or 0) >= 5, 120)
    training = int(marker.with_suffix(".pid").read_text())
    os.kill(training, signal.SIGSTOP)
    try:
        urgent = hub.submit(add(1, 2), nodes=cores, priority="high")
        until(lambda: job.status == "preempting", 60)
        time.sleep(13.0)  # the first question got no answer within 10 s
    finally:
        os.kill(training, signal.SIGCONT)
    assert urgent.result(120) == 3
    with hub_process.client() as client:
        events = client.get(f"/v1/jobs/{job.id}/history").json()["events"]
    assert [event["attempt"] for event in events if event["kind"] == "saved"] == [1]
    assert job.attempts[0].end == "stopped"
    job.cancel()
    hub_process.until_clean()


@pytest.mark.parametrize("is_asked_again", [False, True])
def test_training_that_ends_although_its_answer_was_lost_is_not_complete(
    hub_process: HubProcess, tmp_path: Path, is_asked_again: bool
) -> None:
    marker = tmp_path / "trains"
    job = hub.submit(lose_answer(str(marker), is_asked_again), preemptible=True, priority="low", type="training")
    until(marker.exists, 120)
    until(lambda: job.status == "running")  # its runner says so while the call begins
    urgent = hub.submit(add(1, 2), nodes=os.cpu_count() or 1, priority="high")
    assert urgent.result(120) == 3
    assert job.result(120) == "whole"
    assert [attempt.end for attempt in job.attempts] == ["stopped", "completed"]
    hub_process.until_clean()
