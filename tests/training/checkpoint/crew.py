"""Real gloo ranks that run many cases one after another, because a process costs seconds and a case milliseconds."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

Case = Callable[[Any, Path], Any]
"""What all ranks do: `(ranks, folder of the case) -> what this rank says`. What it raises is said as text."""

Said = dict[str, list[Any]]
"""By the case's name, what each rank said."""

WARM = multiprocessing.get_context("forkserver")
"""Context of processes that are forks of one that has imported torch. Its import costs more than most of them."""
WARM.set_forkserver_preload(["tests.training.checkpoint.warm"])


def warm_process(target: Callable[..., None], *arguments: Any) -> BaseProcess:
    """Return a process of `WARM`, to be started. It has the present environment: that of its origin may be older."""
    return WARM.Process(target=_with_environment, args=(dict(os.environ), target, arguments))


def _with_environment(environment: dict[str, str], target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    target(*arguments)


def run_cases(
    cases: Sequence[Case],
    *,
    world: int,
    folder: Path,
    environment: Callable[[int], Mapping[str, str]] = lambda rank: {},
    imports: Sequence[str] = (),
) -> Said:
    """Run the cases on real ranks.

    `imports` are modules that are imported once, before the ranks are forked, such as "torch._dynamo" for optimizers.

    Raises:
        queue.Empty: The ranks are silent for 90 seconds.
    """
    answers = WARM.Queue()
    environments = [dict(environment(rank)) for rank in range(world)]
    leader = warm_process(_lead, str(folder), list(cases), environments, list(imports), answers)
    leader.start()
    said: Said = {case.__name__: [None] * world for case in cases}
    try:
        for _ in range(len(cases) * world):
            name, rank, answer = answers.get(timeout=90)
            said[name][rank] = answer
        leader.join(60)
    finally:
        leader.terminate()  # it takes its ranks with it
        leader.join(60)
        leader.kill()
    return said


def _lead(folder: str, cases: list[Case], environments: list[dict[str, str]], imports: list[str], answers: Any) -> None:
    """Import once, and fork the ranks."""
    import torch.distributed

    for each in imports:
        importlib.import_module(each)

    gc.freeze()
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=_rank, args=(rank, len(environments), folder, cases, environment, answers), daemon=True)
        for rank, environment in enumerate(environments)
    ]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()


def error_of(act: Callable[[], Any]) -> str:
    """Return class and text of the exception that it raises, or "nothing"."""
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _rank(rank: int, world: int, folder: str, cases: list[Case], environment: dict[str, str], answers: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.update(environment)
    import torch
    import torch.distributed as dist

    from skyward.training import TorchRanks

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    ranks = TorchRanks(timeout_s=60.0)
    for case in cases:
        place = Path(folder, case.__name__)
        try:
            answer = case(ranks, place)
        except BaseException:
            answer = traceback.format_exc()
        answers.put((case.__name__, rank, answer))
        dist.barrier()
    dist.destroy_process_group()
