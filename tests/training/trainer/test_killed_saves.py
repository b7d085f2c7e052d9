"""A process is killed while its Trainer writes a checkpoint behind training: the run resumes from the last good one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from skyward.training.checkpoint import checkpoints_in, problems
from tests.training.checkpoint.crew import WARM, warm_process
from tests.training.checkpoint.killing import Suicide, run_world
from tests.training.trainer.regression import Line, Points, history, trainer

POINTS = {1: 6, 2: 4}
"""By the number of ranks: at how many points, from the first write to the last, each of them is killed."""


def _run(rank: int, world: int, meeting: str, folder: str, at: int | None, answers: Any) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    made = trainer(folder, model=Line(dropout=0.3), data=Points(24, noise=0.1), max_steps=8, save_steps=2,
                   per_device_train_batch_size=2, logging_steps=1, save_total_limit=2, async_save=True)  # fmt: skip
    counting = Suicide(folder, at)
    try:
        made.train(resume_from_checkpoint="auto")
        weights = [each.tolist() for each in made.model.parameters()]
        answers.put((rank, "done", counting.count, (weights, history(made))))
    except Exception as error:
        answers.put((rank, type(error).__name__, counting.count, str(error)))
    answers.close()
    answers.join_thread()
    os._exit(0)


def _lead(folder: str, answers: Any) -> None:
    """Import once and fork the ranks, in a separate process."""
    import torch._dynamo  # an optimizer imports it: seconds, for each process that has not
    import torch.distributed

    torch.set_num_threads(1)
    for world, points in POINTS.items():
        base = Path(folder, str(world))
        base.mkdir()
        whole = run_world(_run, base / "whole", world=world)
        for rank in range(world):
            for at in sorted({round(number * (whole[rank][1] - 1) / points) for number in range(points + 1)}):
                run = base / f"killed-{rank}-{at}"
                killed = run_world(_run, run, world=world, victim=rank, at=at)
                damaged = [text for each in checkpoints_in(run) for text in problems(each.path)]
                steps = [each.step for each in checkpoints_in(run)]
                resumed = run_world(_run, run, world=world)
                left = [each.name for each in run.iterdir() if not each.name.startswith(("checkpoint-", "logs"))]
                is_same = [each[2] for each in resumed] == [each[2] for each in whole]
                answers.put((world, rank, at, killed, damaged, steps, is_same, left))
    answers.put(None)


@pytest.mark.timeout(240)
def test_a_run_whose_rank_is_killed_during_a_save_resumes_to_the_bit(tmp_path: Path) -> None:
    answers = WARM.Queue()
    leader = warm_process(_lead, str(tmp_path), answers)
    leader.start()
    begun_from = set()
    seen = 0
    try:
        while (answer := answers.get(timeout=120)) is not None:
            world, rank, at, killed, damaged, steps, is_same, left = answer
            where = f"rank {rank} of {world} killed at {at}"
            assert killed[rank] is None, where
            assert "done" not in [each[0] for each in killed if each is not None], where
            assert damaged == [], where
            assert is_same, f"{where}, had {steps}"
            assert left == [], where
            begun_from.add(max(steps, default=None))
            seen += 1
        leader.join(60)
    finally:
        leader.kill()
    assert seen > 15
    assert {None, 2, 4} <= begun_from
