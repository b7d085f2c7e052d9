"""Several attempts of one job that save in one folder: only the newest commits, wherever an older one stood still."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skyward.errors import CheckpointNotFound, CheckpointSuperseded, UsageError
from skyward.training.checkpoint import CheckpointCoordinator, checkpoints_in, keep_checkpoint, prune
from skyward.training.checkpoint.fence import WRITER, writer_here
from tests.training.checkpoint.crew import error_of
from tests.training.checkpoint.killing import Suicide
from tests.training.checkpoint.s3_server import S3, s3_server
from tests.training.checkpoint.states import Box, part, shard

LIMIT_S = 60


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    with s3_server(tmp_path_factory.mktemp("fence")) as server:
        yield server


@pytest.fixture(params=["disk", "store"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, s3: S3) -> str:
    return str(tmp_path / "run") if request.param == "disk" else f"{s3.bucket()}/run"


class Attempt:
    """An attempt that saves in a folder."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: str, name: str) -> None:
        self._patch, self._name = patch, name
        self._coordinator = CheckpointCoordinator([part("model", Box(shard(0)), "global")], output_dir=folder)

    def save(self, step: int) -> str:
        self._patch.setenv(WRITER, self._name)
        return self._coordinator.save_checkpoint(checkpoint_id=step)

    def latest(self) -> str | None:
        self._patch.setenv(WRITER, self._name)
        return self._coordinator.latest()


def test_older_attempt_commits_nothing_once_the_next_one_has_looked(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, other = (Attempt(monkeypatch, folder, name) for name in ("fit:1", "fit:2", "test:1"))
    begun = first.save(1)
    assert second.latest() == begun
    for act in (lambda: first.save(2), first.latest):
        with pytest.raises(CheckpointSuperseded, match=r"attempt=1: attempt 2 of fit saves in .*; end this process"):
            act()
    second.save(2)
    other.save(3)  # a job of another name has attempts of its own
    second.save(4)
    monkeypatch.delenv(WRITER)
    CheckpointCoordinator([part("model", Box(shard(0)), "global")], output_dir=folder).save_checkpoint(checkpoint_id=5)
    assert [checkpoint.step for checkpoint in checkpoints_in(folder)] == [1, 2, 3, 4, 5]


def test_variable_of_another_form_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WRITER, "fit")
    with pytest.raises(UsageError, match=r"SKYWARD_CHECKPOINT_WRITER='fit': .*; write it as nightly:3"):
        writer_here()


def _save_twice(folder: str, at: int | None, answers: Any) -> None:
    """Save steps 7 and 8 as attempt 1, and stand still before an operation of the second save."""
    os.environ[WRITER] = "fit:1"
    coordinator = CheckpointCoordinator([part("model", Box(shard(0)), "global")], output_dir=folder)
    coordinator.save_checkpoint(checkpoint_id=7)
    pause = Suicide(folder, at, by=signal.SIGSTOP)
    answers.put(error_of(lambda: coordinator.save_checkpoint(checkpoint_id=8)))
    answers.put(pause.count)


@pytest.mark.parametrize("replaces", [False, True])
def test_attempt_that_stood_still_at_any_operation_commits_nothing_behind_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaces: bool
) -> None:
    """Step 8 is new, or the next attempt has saved it too."""
    context = multiprocessing.get_context("fork")
    at, count, refused = 0, 1, 0
    while at < count:
        folder, answers = str(tmp_path / f"{at}"), context.SimpleQueue()
        stopped = context.Process(target=_save_twice, args=(folder, at, answers))
        stopped.start()
        assert stopped.pid is not None
        _, status = os.waitpid(stopped.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), "it ended instead"
        second = Attempt(monkeypatch, folder, "fit:2")
        seen = second.latest()
        after = second.save(8 if replaces else 9)
        saved = {checkpoint.path: checkpoint.manifest.commit_id for checkpoint in checkpoints_in(folder)}
        os.kill(stopped.pid, signal.SIGCONT)
        stopped.join(LIMIT_S)
        error, count = answers.get(), answers.get()
        is_refused = error.startswith("CheckpointSuperseded: attempt=1: attempt 2 of fit saves in")
        refused += is_refused
        assert is_refused or (error == "nothing" and seen == f"{folder}/checkpoint-8"), (at, error)
        assert {checkpoint.path: checkpoint.manifest.commit_id for checkpoint in checkpoints_in(folder)} == saved
        assert second.latest() == after
        at += 1
    assert count > 5
    assert refused >= count - 2  # all but those behind the rename


def test_checkpoint_that_another_job_has_loaded_is_never_pruned(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Attempt(monkeypatch, folder, "fit:1")
    first = training.save(1)
    second = training.save(2)
    monkeypatch.setenv(WRITER, "judge:1")  # an evaluation that reads the checkpoint of the training
    CheckpointCoordinator([part("model", Box(shard(0)), "global")]).load_checkpoint(first)
    keep_checkpoint(second, "digits-3")
    monkeypatch.setenv(WRITER, "fit:1")
    training.save(3)
    training.save(4)
    prune(folder, keep=1, protect=())
    assert [checkpoint.step for checkpoint in checkpoints_in(folder)] == [1, 2, 4]
    with pytest.raises(CheckpointNotFound, match=r"path='.*/checkpoint-3': no checkpoint is there; check the path"):
        keep_checkpoint(f"{folder}/checkpoint-3", "digits-4")
    with pytest.raises(UsageError, match="name='a/b': not 1 to 100 letters"):
        keep_checkpoint(first, "a/b")
