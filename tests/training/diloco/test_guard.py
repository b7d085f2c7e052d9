"""A broken delta is refused by the name of its worker, and one broken worker cannot move the guard."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch

from skyward.training.diloco.guard import NormGuard, check_shapes
from skyward.training.diloco.refusal import RefusalKind, WorkerRefused


def refusal(guard: NormGuard, worker: str, norm: float) -> str:
    with pytest.raises(WorkerRefused) as refused:
        guard.check(worker, norm)
    assert refused.value.kind is RefusalKind.BAD_DELTA
    return refused.value.message


def test_a_norm_over_10_times_the_median_is_refused_by_name() -> None:
    guard = NormGuard()
    guard.record([1.0, 3.0, 2.0])
    guard.check("w3", 20.0)
    assert refusal(guard, "w3", 20.1).startswith(
        "worker='w3': the norm of its delta is 20.1, over 10 times the running"
    )


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_is_refused_from_the_first_round_on(norm: float) -> None:
    guard = NormGuard()
    assert refusal(guard, "w3", norm).startswith(f"worker='w3': the norm of its delta is {norm}")
    guard.record([norm])
    assert guard.state_dict() == {"norms": []}


def test_a_few_norms_make_no_median() -> None:
    guard = NormGuard()
    guard.record([1.0, 1.0])
    guard.check("w3", 1e9)
    guard.record([1.0])
    assert refusal(guard, "w3", 1e9)


def test_deltas_of_zero_refuse_nobody() -> None:
    guard = NormGuard()
    guard.record([0.0] * 5)
    guard.check("w3", 1.0)


def test_one_broken_worker_of_three_stays_refused() -> None:
    guard = NormGuard()
    guard.record([1.0, 1.0, 1.0])
    for _ in range(100):
        refusal(guard, "w3", 1000.0)
        guard.record([1.0, 1.0, 1000.0])


def test_a_lasting_change_of_all_workers_is_accepted_in_time() -> None:
    guard = NormGuard()
    guard.record([1.0] * 64)
    for _ in range(32):
        refusal(guard, "w3", 100.0)
        guard.record([100.0])
    guard.check("w3", 100.0)


def test_a_restored_guard_decides_as_before() -> None:
    guard, restored = NormGuard(), NormGuard()
    guard.record([1.0, 2.0, 3.0])
    restored.load_state_dict(json.loads(json.dumps(guard.state_dict())))
    assert refusal(restored, "w3", 21.0) == refusal(guard, "w3", 21.0)


KINDS = [torch.tensor, lambda values: np.array(values, np.float32)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_delta_of_another_model_is_refused_with_all_that_differs(kind: Any) -> None:
    model = {"a": kind([1.0]), "b": kind([1.0]), "c": kind([1.0])}
    check_shapes("w3", model, model)
    with pytest.raises(WorkerRefused) as refused:
        check_shapes("w3", {"a": kind([1.0]), "b": kind([1.0, 2.0]), "d": kind([1.0])}, model)
    assert refused.value.kind is RefusalKind.BAD_DELTA
    assert refused.value.message == (
        "worker='w3': its delta does not fit the model (missing c; unexpected d; other shapes for b); "
        "give it the server's model"
    )
