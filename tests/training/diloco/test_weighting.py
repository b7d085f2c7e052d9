"""The mean of a round is weighted by samples or tokens, if the server says so."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

from skyward.errors import UsageError
from skyward.training import DiLoCoCallback
from skyward.training.diloco import DiLoCoServer, DiLoCoWorker, OuterSGD
from tests.training.diloco.runs import serving, together, worker_of

AVERAGING = OuterSGD(lr=1.0, momentum=0.0, nesterov=False)
"""Outer optimizer whose parameters become the mean of the workers'."""


def line() -> torch.nn.Linear:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    return model


def move(worker: DiLoCoWorker, model: torch.nn.Linear, by: float, *, tokens: int = 0, rows: int = 0) -> float:
    """Move the model as a round of training does, exchange it, and return the result."""
    with torch.no_grad():
        model.weight += by
    worker.count_tokens(tokens)
    for _ in range(rows):
        worker.hand.draw()
    assert worker.force_sync()
    return model.weight.item()


@pytest.mark.parametrize(("weighting", "share"), [("equal", 0.5), ("tokens", 0.25), ("samples", 0.75)])
def test_a_mean_is_weighted(weighting: str, share: float) -> None:
    """Worker a moves by 4 and 8, with a quarter of the tokens and three quarters of the samples. Worker b stays."""
    ends: dict[str, list[float]] = {}

    def train(server: DiLoCoServer, name: str, steps: tuple[float, float], tokens: int, rows: int) -> None:
        model = line()
        with worker_of(server, model, None, name) as worker:
            ends[name] = [move(worker, model, by, tokens=tokens, rows=rows) for by in steps]

    with serving(line(), 2, outer_optimizer=AVERAGING, weighting=weighting) as server:
        together(
            partial(train, server, "a", (4.0, 8.0), 100, 3),
            partial(train, server, "b", (0.0, 0.0), 300, 1),
        )
    assert ends["a"] == ends["b"] == [4 * share, 12 * share]


@pytest.mark.parametrize("weighting", ["tokens", "samples"])
def test_a_worker_that_counts_nothing_is_refused(weighting: str, caplog: pytest.LogCaptureFixture) -> None:
    model = line()
    with serving(line(), weighting=weighting) as server, worker_of(server, model, None, "a") as worker:
        assert move(worker, model, 6.0) == 0.0
    assert f"weighting='{weighting}': worker 'a' has counted no {weighting} since its base round" in caplog.text


def test_tokens_of_a_checkpoint_are_counted() -> None:
    """The inner steps of the checkpoint are part of the delta, and so are their tokens."""
    with serving(line(), weighting="tokens") as server:
        first = worker_of(server, line(), None, "a")
        first.start()
        first.count_tokens(7)
        resumed = worker_of(server, model := line(), None, "a")
        resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
        with resumed:
            move(resumed, model, 1.0)
            assert server.status()["round"] == 1
            assert resumed.state_dict()["tokens"] == 0


def test_a_callback_without_a_server_counts_no_tokens() -> None:
    callback = DiLoCoCallback()
    callback.count_tokens(5)
    assert callback.state_dict() == {}


def test_rounds_without_a_weighted_mean_are_refused() -> None:
    with pytest.raises(UsageError, match="weighting='rows': is unknown; use one of 'equal', 'samples', 'tokens'"):
        DiLoCoServer(weighting="rows")
    with pytest.raises(UsageError, match="weighting='tokens': each update is applied alone in async_mode"):
        DiLoCoServer(weighting="tokens", async_mode=True)
    with serving(weighting="samples") as server:
        model = torch.nn.Linear(1, 1)
        with pytest.raises(UsageError, match="num_fragments=2 of worker 'a': weighting='samples' of the server needs"):
            worker_of(server, model, None, "a", num_fragments=2).start()
