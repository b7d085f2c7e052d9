"""Trials and their driver, where the driver says something that a trial does not understand."""

from __future__ import annotations

import pytest

import skyward as sky
from skyward.hub.client.trial import CHANNEL, Trial, TrialTask, run_trial
from skyward.wire.task_channel import TaskChannel, services


def report_once(trial: Trial) -> str:
    trial.report(0.5, step=1)
    return trial.stopped_by


def measure(trial: Trial) -> float:
    assert report_once(trial) == "lost"
    return 1.0


@sky.compute
def run(task: TrialTask) -> object:
    return run_trial(measure, task)


def send_unknown_message(channel: TaskChannel) -> None:
    channel.receive(30)
    channel.send(b"{}")
    for _ in channel:  # until the trial ends
        pass


def test_trial_that_reads_an_unknown_message_reports_its_driver_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(services, CHANNEL, send_unknown_message)
    with sky.ComputePool(provider=sky.Local(), console=False) as pool:
        pending = run(TrialTask(token="t", sweep="s", number=0, params={})) > pool
        assert pending.result(30) is not None
