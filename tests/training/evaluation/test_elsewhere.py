"""Evaluations in other processes: training waits for none, scores are the same, and a dead process does no harm."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import skyward as sky
from skyward.training.evaluation import AdaptiveCompute, AsyncEvaluator
from skyward.training.evaluation.dispatchers import PoolDispatcher, SubprocessDispatcher
from tests.training.evaluation.dispatchers.jobs import ends_badly, load, make, sleep_on


@pytest.fixture(scope="module")
def pool() -> Iterator[sky.ComputePool]:
    # As many threads as here, because their number changes the order of sums.
    image = sky.Image(env={"OMP_NUM_THREADS": str(torch.get_num_threads())})
    with sky.ComputePool(
        provider=sky.Local(), nodes=2, image=image, logs=False, console=False, cancel_grace_s=0.5
    ) as pool:
        yield pool


@pytest.fixture(scope="module")
def beside() -> Iterator[SubprocessDispatcher]:
    dispatcher = SubprocessDispatcher()
    yield dispatcher
    dispatcher.close(cancel=True)


def test_training_takes_as_long_as_alone_plus_one_evaluation(pool: sky.ComputePool) -> None:
    """N x T + E: evaluations on two nodes, each longer than an interval."""
    count, interval_s, evaluation_s = 10, 1.2, 1.8  # long, so that a slow machine adds little
    state = {"w": np.zeros(1_000_000, np.float32)}
    walls_s: list[float] = []
    with AsyncEvaluator(
        make, sleep_on, evaluation_s, compute=pool, load=load, gate="always", max_pending=count
    ) as evaluator:  # none is skipped, although a slow machine may let them pile up for a moment
        for step in range(2):  # the slots import their modules
            evaluator.submit(state, step=step)
        assert [record.status for record in evaluator.drain()] == ["ok", "ok"]
        while len(walls_s) < 8:  # other processes may take the cores from some rounds, but not from all
            state["w"][:] = 0.0
            first = 10 + count * len(walls_s)
            began = time.perf_counter()
            for step in range(first, first + count):
                time.sleep(interval_s)  # training
                state["w"] += 1
                evaluator.submit(state, step=step)
            evaluator.drain()
            walls_s.append(time.perf_counter() - began)
            records = evaluator.history[-count:]
            assert [record.status for record in records] == ["ok"] * count
            assert [record.metrics["value"] for record in records] == [float(n) for n in range(1, count + 1)]
            assert {record.worker for record in records} == {"node 0", "node 1"}
            if walls_s[-1] <= 1.05 * (count * interval_s + evaluation_s):
                break
    assert min(walls_s) == pytest.approx(count * interval_s + evaluation_s, rel=0.05)


@sky.compute
def _train(target: Any) -> list[tuple[str, int, str, float]]:
    """Train in a call to a node."""
    state = {"w": np.zeros(100_000, np.float32)}
    with AsyncEvaluator(make, sleep_on, 0.05, compute=target, load=load, gate="always") as evaluator:
        for step in range(1, 4):
            state["w"] += 1
            evaluator.submit(state, step=step)
    return [(each.worker, each.step, each.status, each.metrics.get("value", -1.0)) for each in evaluator.history]


def test_a_training_on_one_node_is_evaluated_on_another(pool: sky.ComputePool) -> None:
    expected = [("node 1", step, "ok", float(step)) for step in range(1, 4)]
    assert (_train(pool.node(1)) >> pool.node(0)) == expected


def make_network() -> nn.Module:
    """Make a network whose last weights are large enough to travel beside the pickle."""
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.Flatten(), nn.Linear(8 * 26 * 26, 50))


def measure(model: nn.Module, data: tuple[torch.Tensor, torch.Tensor]) -> dict[str, float]:
    images, labels = data
    with torch.no_grad():
        outputs = model(images)
    loss = nn.functional.cross_entropy(outputs, labels)
    return {"loss": loss.item(), "norm": outputs.norm().item(), "right": (outputs.argmax(1) == labels).sum().item()}


_WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "threads": lambda pool, beside: None,
    "subprocess": lambda pool, beside: beside,
    "pool": lambda pool, beside: pool,
    "node": lambda pool, beside: pool.node(1),
    "adaptive": lambda pool, beside: AdaptiveCompute([pool.node(0), beside, None]),
}


@pytest.mark.parametrize("way", _WAYS)
def test_scores_equal_those_of_an_evaluation_within_training_to_the_bit(
    way: str, pool: sky.ComputePool, beside: SubprocessDispatcher
) -> None:
    torch.manual_seed(0)
    images, labels = torch.randn(16, 1, 28, 28), torch.randint(50, (16,))
    model = make_network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    expected = []
    compute = _WAYS[way](pool, beside)
    with AsyncEvaluator(
        make_network, measure, (images, labels), compute=compute, gate="always", max_pending=10
    ) as evaluator:
        for step in range(4):
            model.train()
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            model.eval()
            evaluator.submit(model.state_dict(), step=step)
            expected.append(measure(model, (images, labels)))
        evaluator.drain()
    if isinstance(compute, AdaptiveCompute):
        compute.close()
    assert [record.metrics for record in evaluator.history] == expected
    assert len({record["loss"] for record in expected}) == 4
    if way in ("node", "subprocess"):
        assert {record.worker for record in evaluator.history} == {"node 1" if way == "node" else "subprocess"}


@pytest.mark.parametrize("way", ["subprocess", "pool"])
def test_training_goes_on_however_an_evaluation_ends_and_the_record_says_how(
    way: str, pool: sky.ComputePool, beside: SubprocessDispatcher
) -> None:
    # In a pool, the timeout includes the imports of a slot that replaces a killed one.
    timeout_s = 2.0 if way == "subprocess" else 20.0
    compute: Any = beside if way == "subprocess" else PoolDispatcher(pool, start_s=0)
    state = {"w": np.zeros(3, np.float32)}
    with AsyncEvaluator(
        make, ends_badly, compute=compute, load=load, gate="always", timeout_s=timeout_s, max_pending=10
    ) as evaluator:
        for step in range(6):
            state["w"][:] = step
            evaluator.submit(state, step=step)
        evaluator.drain()
    assert np.array_equal(state["w"], np.full(3, 5, np.float32))
    assert [(record.step, record.status) for record in evaluator.history] == [
        (0, "ok"),
        (1, "failed"),
        (2, "failed"),
        (3, "failed"),
        (4, "failed"),
        (5, "ok"),
    ]
    errors = [record.error for record in evaluator.history]
    assert "SIGKILL" in errors[1] or "signal 9" in errors[1]
    assert "no such label" in errors[2]
    assert "ran longer than its timeout_s" in errors[3]
    assert "list" in errors[4]
    assert evaluator.history[5].metrics == {"value": 5}
    if isinstance(compute, PoolDispatcher):
        compute.close()
