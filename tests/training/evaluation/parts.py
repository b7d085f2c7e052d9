"""A model whose evaluation can be held, counted and made to fail, and a dispatcher that the test controls by hand."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import Any

import torch
from torch import nn

from skyward.training.evaluation import Job, Outcome

__all__ = ["ByHand", "make_model", "norm_of", "scored"]


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))


def scored(model: nn.Module, data: torch.Tensor) -> dict[str, Any]:
    with torch.no_grad():
        return {"loss": model(data).square().mean(), "count": len(data)}


def norm_of(model: nn.Module, payload: object) -> dict[str, float]:
    return {"norm": sum(each.double().abs().sum().item() for each in model.parameters())}


class ByHand:
    """Dispatcher whose jobs end when the test says so. It reports no shared memory, so contents are pickled."""

    name = "by hand"
    slots = 1

    def __init__(self, *, shares_memory: bool = True) -> None:
        self.shares_memory = shares_memory
        self.jobs: list[tuple[Job, Future[Outcome]]] = []
        self.behind_s = 0.0
        self.was_closed = False
        self.came = threading.Condition()

    def submit(self, job: Job) -> Future[Outcome]:
        future: Future[Outcome] = Future()
        with self.came:
            self.jobs.append((job, future))
            self.came.notify_all()
        return future

    def pressure(self) -> float:
        return self.behind_s

    def close(self, *, cancel: bool = False) -> None:
        self.was_closed = True

    def job(self, at: int) -> Job:
        """Return job number `at`, after a wait for it."""
        with self.came:
            assert self.came.wait_for(lambda: len(self.jobs) > at, 20)
        return self.jobs[at][0]

    def end(self, at: int, value: Any) -> None:
        self.job(at)
        now = time.time()
        if isinstance(value, BaseException):
            self.jobs[at][1].set_exception(value)
        else:
            self.jobs[at][1].set_result(Outcome(value=value, worker="hand", started_at=now, finished_at=now))
