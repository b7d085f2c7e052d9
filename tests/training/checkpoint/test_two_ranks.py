"""Two real ranks: saves behind training, cadence and retention, termination, sharded tensors."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from skyward.training.checkpoint import (
    CheckpointCoordinator,
    CheckpointManager,
    ModelState,
    OptimizerState,
    RunTerminated,
    checkpoints_in,
)
from tests.training.checkpoint.crew import Said, error_of, run_cases
from tests.training.checkpoint.states import Box, Refuses, Unwritable, part, same, shard
from tests.waiting import until

WORLD = 2


class Gate:
    """Component whose writing waits until a file exists."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __deepcopy__(self, memo: Any) -> Gate:
        return self

    def __reduce__(self) -> Any:
        until(self.file.exists, within_s=60)
        return (int, ())


def coordinator(ranks: Any, folder: Path, box: Box, pattern: str = "per_rank", **options: Any) -> CheckpointCoordinator:
    return CheckpointCoordinator([part("model", box, pattern)], None, ranks, folder, allow_pickle=True, **options)


def training_goes_on_while_a_save_is_written(ranks: Any, folder: Path) -> Any:
    folder.mkdir(exist_ok=True)
    weight = torch.full((1000,), float(ranks.rank))
    box = Box({"weight": weight, "alias": weight, "gate": Gate(folder / "open") if ranks.rank == 1 else None})
    saves = coordinator(ranks, folder, box)
    begun = saves.save_checkpoint_async(checkpoint_id=1)
    weight.add_(100)  # training goes on
    polled = [saves.poll(), saves.poll()]
    before = [each.step for each in checkpoints_in(folder)]
    ranks.exchange(None)
    (folder / "open").touch()
    path = saves.wait()
    fresh = Box(None)
    coordinator(ranks, folder, fresh).load_checkpoint(path)
    is_as_it_was = fresh.state["weight"].eq(ranks.rank).all().item()
    is_tied = fresh.state["weight"].data_ptr() == fresh.state["alias"].data_ptr()
    return begun, polled, before, Path(str(path)).name, is_as_it_was, is_tied


def a_busy_writer_is_waited_for_or_passed_by(ranks: Any, folder: Path) -> Any:
    folder.mkdir(exist_ok=True)
    box = Box({"gate": Gate(folder / "open") if ranks.rank == 0 else None})
    saves = coordinator(ranks, folder, box, on_busy="skip")
    said = [saves.save_checkpoint_async(checkpoint_id=1), saves.save_checkpoint_async(checkpoint_id=2)]
    ranks.exchange(None)
    if ranks.rank == 0:
        (folder / "open").touch()
    said.append(saves.save_checkpoint_async(checkpoint_id=3, is_needed=True))
    saves.close()
    return said, [each.step for each in checkpoints_in(folder)]


def errors_surface_at_the_next_step_on_all_ranks(ranks: Any, folder: Path) -> Any:
    said = []
    for bad in (Unwritable(None), Refuses(None)):
        saves = coordinator(ranks, folder, bad if ranks.rank == 1 else Box(shard(0)))
        saves.save_checkpoint_async(checkpoint_id=1)

        def steps(saves: CheckpointCoordinator = saves) -> None:
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline and saves.poll() is None:
                time.sleep(0.001)  # a step

        said.append(error_of(steps))
        said.append(error_of(saves.close))  # it was raised; the run may go on
    return said, sorted(each.name for each in folder.glob("*"))


def cadence_limit_and_best(ranks: Any, folder: Path) -> Any:
    box = Box({"step": 0})
    losses = {2: 0.5, 4: 0.0, 6: 0.3, 8: float("nan"), 10: 0.4, 12: 0.2}
    with CheckpointManager(
        coordinator(ranks, folder, box), save_steps=2, save_total_limit=3, metric="eval_loss", keep_best=2
    ) as manager:
        for step in range(1, 13):
            box.state = {"step": step}
            manager.step(step, metrics={"eval_loss": losses[step]} if step in losses else None)
    ranks.exchange(None)
    kept = [each.step for each in checkpoints_in(folder)]
    best = manager.best()
    fresh = Box(None)
    again = CheckpointManager(coordinator(ranks, folder, fresh))
    resumed = []
    for where in (True, 4, best):
        report = again.resume(where)
        resumed.append((report.step if report else None, fresh.state["step"]))
    return kept, Path(str(best)).name, resumed, error_of(lambda: again.resume(5))


def nothing_to_resume(ranks: Any, folder: Path) -> Any:
    return CheckpointManager(coordinator(ranks, folder, Box({}))).resume()


def a_sigterm_of_one_rank(ranks: Any, folder: Path) -> Any:
    """Send SIGTERM to one rank. All ranks save, and end as the signal says."""
    box = Box({"step": 0})
    with CheckpointManager(coordinator(ranks, folder, box), handle_sigterm=True, grace_s=30) as manager:
        try:
            for step in range(1, 100):
                box.state = {"step": step}
                if step == 5 and ranks.rank == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                manager.step(step)
        except RunTerminated as end:
            name = Path(str(end.checkpoint)).name
            return name, end.code, [each.step for each in checkpoints_in(folder)]
    return "went on"


def sharded_tensors(ranks: Any, folder: Path) -> Any:
    """Save FSDP2 on gloo in the background and load it again. A world of one loads it below."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def model_and_optimizer(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return model, optimizer

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
        loss = model(torch.ones(4, 6)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    def saved(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> CheckpointCoordinator:
        return CheckpointCoordinator(
            [
                part("model", ModelState(model), "per_rank"),
                part("optimizer", OptimizerState(model, optimizer), "per_rank"),
                part("trainer", Box({"step": 3}), "global"),
            ],
            None,
            ranks,
            folder,
        )

    model, optimizer = model_and_optimizer(1)
    for _ in range(3):
        step(model, optimizer)
    saves = saved(model, optimizer)
    saves.save_checkpoint_async(checkpoint_id=3)
    expected: list[float] = [step(model, optimizer) for _ in range(2)]
    saves.close()
    model, optimizer = model_and_optimizer(2)
    loaded = saved(model, optimizer).load_checkpoint().loaded
    return [step(model, optimizer) for _ in range(2)] == expected, sorted(loaded), expected


CASES = [
    training_goes_on_while_a_save_is_written,
    a_busy_writer_is_waited_for_or_passed_by,
    errors_surface_at_the_next_step_on_all_ranks,
    cadence_limit_and_best,
    nothing_to_resume,
    a_sigterm_of_one_rank,
    sharded_tensors,
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def said(folder: Path) -> Said:
    return run_cases(CASES, world=WORLD, folder=folder)


def test_training_goes_on_during_a_save_and_its_changes_are_not_in_it(said: Said) -> None:
    expected: tuple[Any, ...] = (True, [None, None], [], "checkpoint-1", True, True)
    assert said["training_goes_on_while_a_save_is_written"] == [expected] * 2


def test_a_save_is_skipped_if_the_writer_is_busy_unless_it_is_required(said: Said) -> None:
    assert said["a_busy_writer_is_waited_for_or_passed_by"] == [([True, False, True], [1, 3])] * 2


def test_errors_of_a_background_save_surface_at_the_next_step_on_all_ranks(said: Said) -> None:
    for answer in said["errors_surface_at_the_next_step_on_all_ranks"]:
        (written, then, taken, after), names = answer
        assert written.startswith("CheckpointSaveFailed: saving checkpoint-1: failed on rank 1: OSError: [Errno 28]")
        assert taken == (
            "CheckpointSaveFailed: saving checkpoint-1: failed on rank 1: ValueError: no state today; "
            "read its own error there"
        )
        assert (then, after) == ("nothing", "nothing")
        assert names == []


def test_the_newest_and_the_best_stay_and_any_can_be_resumed(said: Said) -> None:
    for kept, best, resumed, missing in said["cadence_limit_and_best"]:
        assert kept == [4, 10, 12], "0.0 is the best, that of 12 the second best, 12 the newest, 10 the next newest"
        assert best == "checkpoint-4"
        assert resumed == [(12, 12), (4, 4), (4, 4)]
        assert "where=5: no checkpoint of this step" in missing
    assert said["nothing_to_resume"] == [None, None]


def test_a_sigterm_of_one_rank_saves_on_all_and_ends_them(said: Said) -> None:
    assert said["a_sigterm_of_one_rank"] == [("checkpoint-5", 143, [5])] * 2


def test_sharded_tensors_resume_to_the_bit_and_in_another_world(said: Said, folder: Path) -> None:
    for goes_on, loaded, _ in said["sharded_tensors"]:
        assert goes_on
        assert loaded == ["model", "optimizer", "trainer"]
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    components = [
        part("model", ModelState(model), "per_rank"),
        part("optimizer", OptimizerState(model, optimizer), "per_rank"),
    ]
    CheckpointCoordinator(components, output_dir=folder / "sharded_tensors").load_checkpoint()
    losses = []
    for _ in range(2):
        loss = model(torch.ones(4, 6)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses == pytest.approx(said["sharded_tensors"][0][2], rel=1e-5)


def test_states_equal_themselves() -> None:
    assert same(shard(1), shard(1))
    assert not same(shard(1), shard(2))
