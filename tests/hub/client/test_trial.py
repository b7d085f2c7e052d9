"""Trials and their driver, where the driver says something that a trial does not understand."""

from __future__ import annotations

from pathlib import Path

import pytest

import skyward as sky
from skyward.hub.client.trial import CHANNEL, Trial, TrialTask, run_trial
from skyward.training.checkpoint import keep_checkpoint
from skyward.training.checkpoint.manifest import MANIFEST
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
        assert pending.result(60) is not None


def test_folders_of_old_trials_stay_while_a_model_needs_a_checkpoint_in_them(tmp_path: Path) -> None:
    folders = [tmp_path / f"trial-{number:05d}" for number in range(2)]
    for folder, keeper in zip(folders, ("0" * 32, "model-digits"), strict=True):  # a job of another member, a model
        checkpoint = folder / "checkpoint-2"
        checkpoint.mkdir(parents=True)
        (checkpoint / MANIFEST).touch()
        keep_checkpoint(checkpoint, keeper)
    run_trial(lambda trial: 1.0, TrialTask(sweep="s", number=2, params={}, obsolete=[str(each) for each in folders]))
    assert [folder.exists() for folder in folders] == [False, True]
