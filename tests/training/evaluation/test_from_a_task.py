"""A training on some nodes has its model evaluated on a node that is reserved for that."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import skyward as sky
from skyward.training.evaluation import AsyncEvaluator
from tests.few_modules import lean_frameworks

pytestmark = pytest.mark.usefixtures("by_value")


@pytest.fixture(scope="module")
def pool() -> Iterator[sky.ComputePool]:
    options: dict[str, Any] = {"roles": {"evaluation": [2]}, "logs": False}
    with lean_frameworks(), sky.ComputePool(sky.Local(), nodes=3, **options) as opened:
        yield opened


def make_model() -> torch.nn.Linear:
    return torch.nn.Linear(4, 1, bias=False)


def weight_and_node(model: Any, payload: object) -> dict[str, float]:
    info = sky.instance_info()
    assert info is not None
    return {"weight": model.weight.mean().item(), "node": info.node}


def train(evaluations: Any, steps: int) -> list[dict[str, float]]:
    """Train. Rank 0 evaluates, and meanwhile the gradients meet in a real process group."""
    model = make_model()
    evaluator = AsyncEvaluator(make_model, weight_and_node, None, compute=evaluations, gate="always", max_pending=steps)
    try:
        for step in range(steps):
            with torch.no_grad():
                mine = torch.tensor([float(dist.get_rank())])
                dist.all_reduce(mine)
                model.weight.data.fill_(step + mine.item())
            if dist.get_rank() == 0:
                evaluator.submit(model.state_dict(), step=step)
        return [dict(each.metrics or {}) for each in evaluator.drain()]
    finally:
        evaluator.close()


def test_evaluations_of_a_gang_go_to_the_node_of_their_role(pool: sky.ComputePool) -> None:
    gang = sky.compute(sky.integrations.torch(backend="gloo")(train))
    first, second = gang(pool.role("evaluation"), 4) @ pool
    assert first == [{"weight": step + 1.0, "node": 2.0} for step in range(4)]
    assert second == []
    assert pickle.loads(pickle.dumps(pool)).node_numbers == (0, 1)


def test_evaluations_of_a_plain_task_go_to_another_node(pool: sky.ComputePool) -> None:
    def plain(evaluations: Any) -> list[dict[str, float]]:
        with AsyncEvaluator(make_model, weight_and_node, None, compute=evaluations, gate="always") as evaluator:
            evaluator.submit({"weight": torch.full((1, 4), 7.0)}, step=1)
            return [dict(each.metrics or {}) for each in evaluator.drain()]

    assert sky.compute(plain)(pool.node(1)) >> pool.node(0) == [{"weight": 7.0, "node": 1.0}]
