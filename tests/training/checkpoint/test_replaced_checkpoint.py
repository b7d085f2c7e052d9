"""A checkpoint that is replaced exists at every moment: the old one or the new one, whoever is killed or looks."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from skyward.cli import main
from skyward.errors import CheckpointSaveFailed
from skyward.training.checkpoint import (
    CheckpointCoordinator,
    CheckpointManager,
    best_of,
    checkpoints_in,
    latest_checkpoint,
    problems,
)
from skyward.training.checkpoint.commit import new_token
from tests.training.checkpoint.killing import Suicide
from tests.training.checkpoint.seccomp import refuse_exchange
from tests.training.checkpoint.states import Box, part, same, shard
from tests.training.trainer.regression import callback, run

# JAX, which another test of the process may have imported, warns of forks. The children here use nothing of it.
pytestmark = pytest.mark.filterwarnings("ignore:os.fork.. was called:RuntimeWarning")
_FORK = multiprocessing.get_context("fork")


def coordinator(folder: object, box: Box) -> CheckpointCoordinator:
    mine = part("mine", Box({"rank": 0}), "per_rank")
    return CheckpointCoordinator([part("model", box, "global"), mine], output_dir=str(folder), step=lambda: 4)


def state_in(folder: object) -> int:
    """Return the state from which a run would resume. Raises if it would have none."""
    box = Box(None)
    coordinator(folder, box).load_checkpoint()
    return next(index for index in range(100) if same(box.state, shard(index)))


def in_a_process(act: Callable[[], None], *, can_exchange: bool) -> int:
    """Return the exit status of the process, or minus the signal that killed it."""

    def child() -> None:
        torch.set_num_threads(1)
        if not can_exchange:
            refuse_exchange()
        act()

    process = _FORK.Process(target=child)
    process.start()
    process.join(60)
    process.kill()
    assert process.exitcode is not None
    return process.exitcode


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_process_killed_at_any_point_of_a_replacement_leaves_the_old_one_or_the_new_one(
    can_exchange: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for at in range(200):
        folder = tmp_path / str(at)
        coordinator(folder, Box(shard(1))).save_checkpoint(checkpoint_id=4)

        def replace(folder: Path = folder, at: int = at) -> None:
            saves = coordinator(folder, Box(shard(2)))
            Suicide(str(folder), at)
            saves.save_checkpoint(checkpoint_id=4)

        status = in_a_process(replace, can_exchange=can_exchange)
        (each,) = checkpoints_in(folder)
        assert each.path == latest_checkpoint(folder) == str(folder / "checkpoint-4")
        assert main(["checkpoint", "ls", str(folder)]) == 0
        found.append(state_in(folder))
        if status == 0:
            break
        assert status == -signal.SIGKILL
        coordinator(folder, Box(shard(3))).save_checkpoint(checkpoint_id=5)  # which sweeps first
        assert sorted(os.listdir(folder)) == ["checkpoint-4", "checkpoint-5"]
        assert problems(folder / "checkpoint-4") == []
        assert same_as(folder / "checkpoint-4", found[-1])
    else:
        pytest.fail("the save never ended")
    assert at > 10
    assert found == sorted(found), "first the old one, then the new one"
    assert set(found) == {1, 2}
    capsys.readouterr()


def same_as(path: Path, index: int) -> bool:
    box = Box(None)
    CheckpointCoordinator([part("model", box, "global")]).load_checkpoint(path)
    return same(box.state, shard(index))


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_reader_beside_a_run_that_replaces_its_checkpoint_always_finds_one(
    can_exchange: bool, tmp_path: Path
) -> None:
    coordinator(tmp_path, Box(shard(0))).save_checkpoint(checkpoint_id=4)

    def replace() -> None:
        for index in range(60):
            coordinator(tmp_path, Box(shard(index))).save_checkpoint(checkpoint_id=4)

    def child() -> None:
        if not can_exchange:
            refuse_exchange()
        torch.set_num_threads(1)
        replace()

    process = _FORK.Process(target=child)
    process.start()
    looks = 0
    try:
        while process.is_alive():
            (each,) = checkpoints_in(tmp_path)
            assert each.step == 4
            looks += 1
    finally:
        process.join(60)
        process.kill()
    assert process.exitcode == 0
    assert looks > 10
    assert state_in(tmp_path) == 59
    assert os.listdir(tmp_path) == ["checkpoint-4"]
    assert problems(tmp_path / "checkpoint-4") == []


def test_if_names_cannot_be_exchanged_the_new_files_are_in_the_checkpoint(tmp_path: Path) -> None:
    """The checkpoint is replaced as a whole: all its old contents go."""

    def save() -> None:
        for index in (1, 2):
            path = coordinator(tmp_path, Box(shard(index))).save_checkpoint(checkpoint_id=4)
            (Path(path) / f"note {index}").touch()

    assert in_a_process(save, can_exchange=False) == 0
    (data,) = (each for each in os.listdir(tmp_path / "checkpoint-4") if each.startswith("data-"))
    assert sorted(os.listdir(tmp_path / "checkpoint-4")) == ["checkpoint_manifest.json", data, "note 2"]
    assert state_in(tmp_path) == 2
    coordinator(tmp_path, Box(shard(3))).save_checkpoint(checkpoint_id=4)
    assert not (tmp_path / "checkpoint-4" / data).exists()
    assert state_in(tmp_path) == 3


def test_a_replacement_whose_manifest_cannot_be_put_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-4"
    (folder / "checkpoint_manifest.json").mkdir(parents=True)  # so that no file gets this name

    def fail() -> None:
        with pytest.raises(CheckpointSaveFailed):
            coordinator(tmp_path, Box(shard(2))).save_checkpoint(checkpoint_id=4)
        assert os.listdir(tmp_path) == ["checkpoint-4"]
        assert os.listdir(folder) == ["checkpoint_manifest.json"]

    assert in_a_process(fail, can_exchange=False) == 0


# Leftovers of older versions, which renamed the old one away before they renamed the new one in ----------------------


def interrupted(folder: Path, name: str) -> None:
    """Make a replacement that an older version had begun when it was killed."""
    os.rename(folder / name, folder / f".old-{name}-{new_token()}")


WAYS: dict[str, Callable[[Path], Any]] = {
    "checkpoints_in": lambda folder: checkpoints_in(folder)[0],
    "latest_checkpoint": latest_checkpoint,
    "best_of": lambda folder: best_of(checkpoints_in(folder), "loss")[0],
    "load": lambda folder: coordinator(folder, Box(None)).load_checkpoint(),
    "load a path": lambda folder: coordinator(folder, Box(None)).load_checkpoint(folder / "checkpoint-4"),
    "latest": lambda folder: coordinator(folder, Box(None)).latest(),
    "resume": lambda folder: CheckpointManager(coordinator(folder, Box(None))).resume(),
    "resume a step": lambda folder: CheckpointManager(coordinator(folder, Box(None))).resume(4),
    "ls": lambda folder: main(["checkpoint", "ls", str(folder)]) == 0,
    "verify": lambda folder: main(["checkpoint", "verify", str(folder / "checkpoint-4")]) == 0,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_checkpoint_renamed_away_by_an_older_version_is_put_back_first(way: str, tmp_path: Path) -> None:
    saves = coordinator(tmp_path, Box(shard(1)))
    saves.metadata["metrics"] = {"loss": 1.0}
    saves.save_checkpoint(checkpoint_id=4)
    interrupted(tmp_path, "checkpoint-4")
    assert WAYS[way](tmp_path)
    assert os.listdir(tmp_path) == ["checkpoint-4"]


def test_a_trainer_resumes_from_a_checkpoint_renamed_away_by_an_older_version(tmp_path: Path) -> None:
    run(tmp_path, max_steps=4, save_steps=4)
    interrupted(tmp_path, "checkpoint-4")
    begun_at: list[int] = []
    run(
        tmp_path,
        max_steps=6,
        save_steps=2,
        resume_from_checkpoint="auto",
        callbacks=[callback(on_train_begin=lambda state, **_: begun_at.append(state.global_step))],
    )
    assert begun_at == [4]
    assert [each.step for each in checkpoints_in(tmp_path)] == [4, 6]
