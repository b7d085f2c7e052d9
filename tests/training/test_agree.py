"""Ranks agree on requests, and none waits for one that has raised.

They use real gloo. Every case runs in the same three processes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from skyward.training import CallbackHandler, RankFailed, TrainerCallback, TrainerControl, TrainerState
from tests.training.checkpoint.crew import WARM, warm_process

WORLD = 3


class Together(TrainerCallback):
    """Callback with two exchanges in one handler. One rank may raise before, between or after them."""

    collective_events = frozenset({"on_evaluate"})

    def __init__(self, rank: int, moment: int) -> None:
        self.rank, self.moment = rank, moment

    def on_evaluate(self, ranks: Any, **kwargs: Any) -> None:
        for turn in range(3):
            if ranks.rank == self.rank and turn == self.moment:
                raise ValueError(f"at {turn}")
            if turn < 2:
                assert ranks.exchange((ranks.rank, turn)) == [(each, turn) for each in range(WORLD)]


class Alone(TrainerCallback):
    def on_step_end(self, ranks: Any, **kwargs: Any) -> None:
        if ranks.rank == 1:
            raise OSError("disk full")


class Watcher(TrainerCallback):
    """Callback that fails on one rank in an event without an exchange, and meets the others in another."""

    on_error = "disable"
    collective_events = frozenset({"on_evaluate"})
    steps = meetings = 0

    def on_step_end(self, ranks: Any, **kwargs: Any) -> None:
        self.steps += 1
        if ranks.rank == 1:
            raise OSError("disk full")

    def on_evaluate(self, ranks: Any, **kwargs: Any) -> None:
        ranks.exchange(ranks.rank)
        self.meetings += 1


def fire(handler: CallbackHandler, event: str, control: TrainerControl) -> None:
    handler.fire(event, args=None, state=TrainerState(), control=control)


def a_rank_that_raises_raises_on_all(ranks: Any) -> str:
    said = []
    for moment in range(3):
        try:
            fire(CallbackHandler([Together(1, moment)], ranks=ranks), "on_evaluate", TrainerControl())
        except (ValueError, RankFailed) as error:
            said.append(f"{type(error).__name__} {error}")
    return "; ".join(said)


def an_error_of_one_rank_is_raised_on_all_at_the_next_agreement(ranks: Any) -> str:
    handler = CallbackHandler([Alone()], ranks=ranks)
    fire(handler, "on_step_end", TrainerControl())
    try:
        handler.agree(TrainerControl())
    except (OSError, RankFailed) as error:
        return f"{type(error).__name__} {error}"
    return "nothing"


def a_watcher_that_failed_on_one_rank_is_left_out_on_all(ranks: Any) -> str:
    watcher = Watcher()
    handler = CallbackHandler([watcher], ranks=ranks)
    for event in ("on_step_end", "on_step_end", "on_evaluate", "on_step_end", "on_evaluate"):
        fire(handler, event, TrainerControl())
    return f"{watcher.steps} steps, {watcher.meetings} meetings"


def what_one_asks_for_all_do(ranks: Any) -> str:
    handler = CallbackHandler(ranks=ranks)
    control = TrainerControl(should_save=ranks.rank == 0, should_training_stop=ranks.rank == 2)
    handler.agree(control)
    first = (control.should_save, control.should_training_stop, control.should_log)
    if ranks.rank == 1:
        control.abort()
    handler.agree(control)
    return f"{first} {control.should_save} {control.should_abort_without_save}"


def values_are_shared(ranks: Any) -> str:
    return str((ranks.exchange(ranks.rank), ranks.share(f"from {ranks.rank}", source=2), ranks.flags(1 << ranks.rank)))


CASES: list[Callable[[Any], str]] = [
    a_rank_that_raises_raises_on_all,
    an_error_of_one_rank_is_raised_on_all_at_the_next_agreement,
    a_watcher_that_failed_on_one_rank_is_left_out_on_all,
    what_one_asks_for_all_do,
    values_are_shared,
]


def _rank(rank: int, meeting: str, answers: Any) -> None:
    import torch
    import torch.distributed as dist

    from skyward.training import TorchRanks

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=WORLD)
    ranks = TorchRanks(timeout_s=30.0)
    for case in CASES:
        answers.put((case.__name__, rank, case(ranks)))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], str]:
    answers = WARM.Queue()
    meeting = f"file://{tmp_path_factory.mktemp('ranks')}/meeting"
    ranks = [warm_process(_rank, rank, meeting, answers) for rank in range(WORLD)]
    for process in ranks:
        process.start()
    found = [answers.get(timeout=60) for _ in range(len(CASES) * WORLD)]
    for process in ranks:
        process.join(60)
    return {(case, rank): text for case, rank, text in found}


def of(said: dict[tuple[str, int], str], case: Callable[[Any], str]) -> list[str]:
    return [said[case.__name__, rank] for rank in range(WORLD)]


def test_a_rank_that_raises_in_a_collective_handler_raises_on_all(said: dict[tuple[str, int], str]) -> None:
    mine = "; ".join(f"ValueError at {moment}" for moment in range(3))
    theirs = "; ".join(
        f"RankFailed rank 1: failed in Together.on_evaluate (ValueError: at {moment}); read its own error there"
        for moment in range(3)
    )
    assert of(said, a_rank_that_raises_raises_on_all) == [theirs, mine, theirs]


def test_an_error_of_one_rank_is_raised_on_all(said: dict[tuple[str, int], str]) -> None:
    theirs = "RankFailed rank 1: failed in Alone.on_step_end (OSError: disk full); read its own error there"
    got = of(said, an_error_of_one_rank_is_raised_on_all_at_the_next_agreement)
    assert got == [theirs, "OSError disk full", theirs]


def test_a_callback_that_failed_on_one_rank_keeps_no_rank_waiting(said: dict[tuple[str, int], str]) -> None:
    got = of(said, a_watcher_that_failed_on_one_rank_is_left_out_on_all)
    assert got == ["2 steps, 0 meetings", "1 steps, 0 meetings", "2 steps, 0 meetings"]


def test_a_request_of_one_rank_is_obeyed_by_all_and_an_abort_saves_nothing(said: dict[tuple[str, int], str]) -> None:
    assert of(said, what_one_asks_for_all_do) == ["(True, True, False) False True"] * WORLD


def test_values_are_shared(said: dict[tuple[str, int], str]) -> None:
    assert of(said, values_are_shared) == ["([0, 1, 2], 'from 2', 7)"] * WORLD
