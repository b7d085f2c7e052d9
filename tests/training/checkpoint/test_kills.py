"""A rank is killed, or its disk is full, at every step of a save: nothing hangs, and the run resumes to the bit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from skyward.errors import CheckpointError, CheckpointSaveFailed
from skyward.training.checkpoint import CheckpointCoordinator, RNGState, checkpoints_in, problems
from tests.training.checkpoint.crew import WARM, warm_process
from tests.training.checkpoint.killing import Suicide, run_world
from tests.training.checkpoint.states import Box, part, same, shard

WORLD = 2
STEPS = 6


class Walk:
    """A training whose steps use the generator, so that a rank's state depends on every step before."""

    def __init__(self, rank: int) -> None:
        self.position = torch.zeros(300) + rank
        self.step = 0

    def advance(self) -> None:
        self.position = self.position * 0.9 + torch.randn(300)
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.step = state["position"], state["step"]


def _run(rank: int, world: int, meeting: str, folder: str, at: int | None, answers: Any) -> None:
    """Resume, go on to the last step with a save at every second one, and report how far it got."""
    import torch.distributed as dist

    from skyward.training import TorchRanks

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    ranks = TorchRanks(timeout_s=30.0)
    torch.manual_seed(rank)
    walk = Walk(rank)
    components = [
        part("model", walk, "per_rank"),
        part("shared", Box(shard(0)), "replicated", validate_replication=True),
        part("rng", RNGState(), "per_rank"),
    ]
    run = CheckpointCoordinator(components, None, ranks, folder)
    if run.latest() is not None:
        run.load_checkpoint()
    counting = Suicide(folder, at)
    try:
        while walk.step < STEPS:
            walk.advance()
            if walk.step % 2 == 0:
                run.save_checkpoint(checkpoint_id="last" if walk.step == 4 else walk.step)  # replaced below
                if walk.step == 4:
                    run.save_checkpoint(checkpoint_id="last")
        answers.put((rank, "done", counting.count, walk.position.tolist()))
    except CheckpointError as error:
        answers.put((rank, type(error).__name__, counting.count, str(error)))
    answers.close()
    answers.join_thread()
    os._exit(0)


def _lead(folder: str, answers: Any) -> None:
    """Fork the ranks in a separate process: kill every rank at every point, then let the run go on."""
    import torch.distributed

    torch.set_num_threads(1)
    base = Path(folder)
    whole = run_world(_run, base / "whole", world=WORLD)
    ends = [each[2] for each in whole]
    points = [(rank, at) for rank in range(WORLD) for at in range(whole[rank][1])]
    for rank, at in points:
        run = base / f"killed-{rank}-{at}"
        killed = run_world(_run, run, world=WORLD, victim=rank, at=at)
        damaged = [text for each in checkpoints_in(run) for text in problems(each.path)]
        resumed = run_world(_run, run, world=WORLD)
        left = sorted(each.name for each in run.iterdir() if not each.name.startswith("checkpoint-"))
        is_same = [each[2] for each in resumed] == ends
        answers.put((rank, at, [each and each[0] for each in killed], damaged, is_same, left))
    answers.put(len(points))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_rank_killed_at_any_write_of_a_save_loses_no_checkpoint(tmp_path: Path) -> None:
    """The other ranks get an error, and the resumed run ends like one that was never killed."""
    answers = WARM.Queue()
    leader = warm_process(_lead, str(tmp_path), answers)
    leader.start()
    seen = 0
    try:
        while not isinstance(answer := answers.get(timeout=120), int):
            rank, at, killed, damaged, is_same, left = answer
            where = f"rank {rank} killed at {at}"
            assert killed[rank] is None, where
            assert killed[1 - rank] in ("CheckpointSaveFailed", "CheckpointError"), where
            assert damaged == [], where
            assert is_same, where
            assert left == [], where
            seen += 1
        leader.join(60)
    finally:
        leader.kill()
    assert seen == answer
    assert seen > 60


@pytest.mark.root
def test_a_full_disk_fails_the_save_and_keeps_the_last_checkpoint(small_disk: Path) -> None:
    box = Box(shard(1, size=30_000))
    run = CheckpointCoordinator([part("model", box, "global")], output_dir=small_disk)
    run.save_checkpoint(checkpoint_id=1)
    box.state = shard(2, size=80_000)
    for _ in range(2):
        with pytest.raises(CheckpointSaveFailed, match="No space left on device"):
            run.save_checkpoint(checkpoint_id=1)
        assert [each.name for each in small_disk.iterdir()] == ["checkpoint-1"]
    run.load_checkpoint()
    assert same(box.state, shard(1, size=30_000))
