"""Rank 0 of two: its exchanges with the other, beside the events of a framework and of our bus."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from skyward.training.agree import RankFailure
from skyward.training.evaluation import AsyncEvaluator
from skyward.training.evaluation.ranks import Evaluations
from tests.training.evaluation.parts import make_model, scored

X = torch.ones(2, 4)


class Recording:
    """Rank 0 of a world of two, whose other rank always agrees."""

    rank, world_size, local_rank = 0, 2, 0

    def __init__(self) -> None:
        self.calls: list[str] = []

    def exchange(self, value: Any) -> list[Any]:
        self.calls.append("exchange")
        return [value, value]

    def fail(self, failure: RankFailure) -> None:
        self.calls.append("fail")

    def flags(self, bits: int) -> int:
        self.calls.append("flags")
        return bits

    def share(self, value: Any, *, source: int = 0) -> Any:
        self.calls.append("share")
        return value


def evaluator(eval_fn: Any = scored, **options: Any) -> AsyncEvaluator:
    return AsyncEvaluator(make_model, eval_fn, X, gate="sync", **options)


@pytest.mark.parametrize(
    ("is_collective", "calls"),
    [(True, ["share"]), (False, ["exchange", "exchange", "flags", "exchange", "share"])],
)
def test_a_result_takes_one_exchange_if_events_are_collective(is_collective: bool, calls: list[str]) -> None:
    ranks, evaluations = Recording(), Evaluations("Ours", has_collective_events=is_collective)
    evaluations.open(evaluator, ranks=ranks)
    evaluations.submit(make_model(), step=1, epoch=None)
    assert [record.step for record in evaluations.poll(step=1)] == [1]
    assert evaluations.poll(step=2) == [], "nothing is open: no rank asks the others"
    evaluations.close()
    assert ranks.calls == calls


@pytest.mark.parametrize("is_collective", [True, False])
def test_an_error_is_reported_to_the_other_ranks_once(is_collective: bool) -> None:
    def fails(model: Any, payload: Any) -> Any:
        raise ZeroDivisionError("no rows")

    ranks, evaluations = Recording(), Evaluations("Ours", has_collective_events=is_collective)
    evaluations.open(lambda: evaluator(fails, on_error="raise"), ranks=ranks)
    evaluations.submit(make_model(), step=1, epoch=None)
    with pytest.raises(ZeroDivisionError, match="no rows"):
        evaluations.poll(step=1)
    evaluations.close()
    # The bus reports an exception of a collective handler, so a second report would meet no exchange of the others.
    assert ranks.calls.count("fail") == (0 if is_collective else 1)
