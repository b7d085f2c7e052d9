"""The arithmetic equals torch's optimizer and the papers' formulas, to the bit where that is possible."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyward.errors import UsageError
from skyward.training.diloco.algorithm import (
    DelayedNesterov,
    OuterOptimizer,
    OuterSGD,
    mix,
    pseudo_gradient,
)

SHAPES = {"weight": (37, 19), "bias": (19,), "scale": ()}


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def are_equal(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_pseudo_gradient_is_base_minus_local() -> None:
    assert pseudo_gradient(torch.tensor([3.0, 1.0]), torch.tensor([1.0, 2.0])).tolist() == [2.0, -1.0]
    narrow = pseudo_gradient(torch.tensor([3.0]), torch.tensor([1.5], dtype=torch.bfloat16))
    assert (narrow.dtype, narrow.tolist()) == (torch.float32, [1.5])


# The outer optimizer --------------------------------------------------------------------------------------------------

SGD: dict[str, dict[str, Any]] = {
    "nesterov": {"lr": 0.7, "momentum": 0.9, "nesterov": True},
    "momentum": {"lr": 0.3, "momentum": 0.8, "nesterov": False},
    "plain": {"lr": 1.0, "momentum": 0.0, "nesterov": False},
}


def run_torch(settings: dict[str, Any], rounds: int) -> dict[str, torch.Tensor]:
    parameters = {name: torch.nn.Parameter(value) for name, value in tensors(0).items()}
    optimizer = torch.optim.SGD(parameters.values(), **settings)
    for number in range(1, rounds + 1):
        for name, gradient in tensors(number).items():
            parameters[name].grad = gradient
        optimizer.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


def run(optimizer: OuterOptimizer, rounds: int) -> dict[str, torch.Tensor]:
    parameters = tensors(0)
    for number in range(1, rounds + 1):
        gradients = tensors(number)
        optimizer.step(parameters, gradients)
        assert are_equal(gradients, tensors(number))  # they belong to the caller
    return parameters


@pytest.mark.parametrize("name", SGD)
def test_outer_sgd_equals_torchs_to_the_bit(name: str) -> None:
    assert are_equal(run(OuterSGD(**SGD[name]), 20), run_torch(SGD[name], 20))


def test_defaults_are_those_of_the_paper() -> None:
    assert are_equal(run(OuterSGD(), 3), run_torch(SGD["nesterov"], 3))


def test_delayed_nesterov_of_one_equals_nesterov_to_the_bit() -> None:
    assert are_equal(run(DelayedNesterov(every=1), 20), run_torch(SGD["nesterov"], 20))


def test_delayed_nesterov_follows_the_paper() -> None:
    """By hand, with lr 1, momentum 0.5 and N = 2.

    Gradients 2, 4, 6, 8. Each step moves by -g/2: -1, -2, -3, -4. Step 2 also moves by -0.5 * m with m = 6/2 = 3, and
    step 4 with m = 0.5 * 3 + 14/2 = 8.5.
    """
    parameters, optimizer = {"p": torch.zeros(1)}, DelayedNesterov(lr=1.0, momentum=0.5, every=2)
    values = []
    for gradient in (2.0, 4.0, 6.0, 8.0):
        optimizer.step(parameters, {"p": torch.tensor([gradient])})
        values.append(parameters["p"].item())
    assert values == [-1.0, -4.5, -7.5, -15.75]


def test_fragments_have_momenta_and_delays_of_their_own() -> None:
    one, two = DelayedNesterov(every=2), OuterSGD()
    for optimizer in (one, two):
        parameters, alone = tensors(0), tensors(0)
        copy = type(optimizer)(every=2) if isinstance(optimizer, DelayedNesterov) else OuterSGD()
        for number in range(1, 7):
            gradients = tensors(number)
            names = ("weight",) if number % 3 == 0 else ("bias", "scale")
            before = {name: parameters[name].clone() for name in SHAPES if name not in names}
            optimizer.step(parameters, {name: gradients[name] for name in names})
            assert all(torch.equal(parameters[name], value) for name, value in before.items())
            if names == ("weight",):
                copy.step(alone, {"weight": gradients["weight"]})
        assert torch.equal(parameters["weight"], alone["weight"])


@pytest.mark.parametrize("make", [OuterSGD, lambda: DelayedNesterov(every=3)])
def test_a_restored_optimizer_continues_to_the_bit(make: Any) -> None:
    whole, first, second = make(), make(), make()
    expected, parameters = tensors(0), tensors(0)
    for number in range(1, 9):
        whole.step(expected, tensors(number))
        if number == 5:
            second.load_state_dict(first.state_dict())
        (first if number < 5 else second).step(parameters, tensors(number))
    assert are_equal(parameters, expected)


@pytest.mark.parametrize("make", [OuterSGD, lambda: DelayedNesterov(every=3)])
def test_numpy_arrays_give_the_same_up_to_rounding(make: Any) -> None:
    expected = run(make(), 9)
    optimizer, parameters = make(), {name: value.numpy() for name, value in tensors(0).items()}
    for number in range(1, 10):
        optimizer.step(parameters, {name: value.numpy() for name, value in tensors(number).items()})
    for name, value in parameters.items():
        assert value.dtype == np.float32
        np.testing.assert_allclose(value, expected[name].numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OuterSGD(lr=0), "lr=0: must be"),
        (lambda: OuterSGD(lr=math.nan), "lr=nan: must be"),
        (lambda: OuterSGD(momentum=1), "momentum=1: must be"),
        (lambda: OuterSGD(momentum=0), "nesterov=True: has no meaning"),
        (lambda: DelayedNesterov(every=0), "every=0: must be"),
    ],
)
def test_settings_out_of_range_are_refused(make: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


# The mean -------------------------------------------------------------------------------------------------------------

values = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**60), max_value=2.0**60)


eighths = st.integers(-(2**12), 2**12).map(lambda number: number / 8)


@settings(max_examples=50)
@given(eighths, st.lists(eighths, min_size=4, max_size=4))
def test_rate_1_without_momentum_equals_averaging_to_the_bit(base: float, locals_: list[float]) -> None:
    """Eighths, and four workers: no step rounds. The parameters of real models differ from it by their last bit."""
    parameters = {"p": torch.tensor([base])}
    deltas = [pseudo_gradient(parameters["p"], torch.tensor([local])) for local in locals_]
    OuterSGD(**SGD["plain"]).step(parameters, {"p": torch.stack(deltas).mean(0)})
    assert parameters["p"].item() == sum(locals_) / 4


# Mixing ---------------------------------------------------------------------------------------------------------------


def test_mixing_weighs_the_local_values_by_alpha() -> None:
    local = torch.tensor([4.0, math.nan, 1.0])
    whole = local.clone()
    mix(local, torch.tensor([2.0, 2.0, math.inf]), 1)
    assert torch.equal(local[::2], whole[::2])
    mix(local, torch.tensor([2.0, 2.0, 3.0]), 0.25)
    assert local.tolist() == [2.5, pytest.approx(math.nan, nan_ok=True), 2.5]
    mix(local, torch.tensor([2.0, 2.0, 3.0]), 0)
    assert local.tolist() == [2.0, 2.0, 3.0]
    array = np.array([4.0, 8.0], np.float32)
    mix(array, np.array([2.0, 0.0], np.float32), 0.5)
    assert array.tolist() == [3.0, 4.0]
    with pytest.raises(UsageError, match=r"alpha=1\.5"):
        mix(local, local, 1.5)
