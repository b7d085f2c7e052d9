"""`@compute` and the values it makes, without a pool."""

from __future__ import annotations

import copy
import inspect
import pickle
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

import skyward as sky
from skyward.calls import options
from skyward.errors import UsageError
from tests.doctests import run_examples


@sky.compute
def add(a: int, b: int = 1) -> int:
    """Adds."""
    return a + b


class Scaled:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    @sky.compute
    def times(self, x: int) -> int:
        return self.factor * x


def test_a_call_runs_nothing() -> None:
    ran: list[int] = []
    sky.compute(ran.append)(1)
    assert ran == []


def test_local_runs_the_original_here() -> None:
    assert add.local(1, b=2) == 3


def test_name_doc_and_signature_are_kept() -> None:
    assert add.__name__ == "add"
    assert add.__doc__ == "Adds."
    assert list(inspect.signature(add).parameters) == ["a", "b"]


def test_a_pending_call_has_an_honest_repr() -> None:
    assert repr(add(1, b=2)) == "<add(1, b=2), not run: send it with `>> pool`>"
    assert "..." in repr(sky.compute(len)("x" * 1000))


def test_a_pending_call_has_no_truth_value() -> None:
    with pytest.raises(UsageError, match="has not run"):
        bool(add(1))


def test_an_operator_without_a_pool_says_how_to_open_one() -> None:
    # It runs in its own process, because pools of other tests may be open in this one.
    program = """
import skyward as sky
from skyward.errors import NoActivePool

call = sky.compute(abs)(-1)
for send in (lambda: call >> sky, lambda: call > sky, lambda: call @ sky):
    try:
        send()
    except NoActivePool as error:
        print(error)
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    beginning = "target=sky: no pool is open here; write `with sky.ComputePool(pr"
    assert [line[: len(beginning)] for line in said.splitlines()] == [beginning] * 3


@pytest.mark.parametrize("target", [None, 3, "pool", pytest])
def test_a_target_that_is_no_pool_is_named(target: Any) -> None:
    with pytest.raises(UsageError, match="is not a pool"):
        add(1) >> target


def test_options_come_from_the_decorator_or_from_the_copy() -> None:
    patient = sky.compute(timeout_s=5, retries=2, name="patient")(add.fn)
    assert patient(1).options == sky.CallOptions(timeout_s=5, retries=2, name="patient")
    assert patient(1).name == "patient"
    changed = patient.with_options(retries=0)
    assert (changed(1).options.retries, changed(1).options.timeout_s) == (0, 5)
    assert patient(1).options.retries == 2
    assert patient(1).with_options(timeout_s=None).options.timeout_s is None


def test_the_references_spellings_are_accepted() -> None:
    assert sky.compute(timeout=7)(add.fn)(1).options.timeout_s == 7
    assert add.with_timeout(3)(1).options.timeout_s == 3
    assert add(1).with_timeout(4).options.timeout_s == 4
    assert (add(1) & add(2)).with_timeout(6).items[1].options.timeout_s == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout_s": 0}, "timeout_s=0: must be a number of seconds > 0; pass None for no limit"),
        ({"timeout_s": -1.5}, "timeout_s=-1.5: "),
        ({"retries": -1}, "retries=-1: must be a whole number >= 0; set retries=3"),
        ({"retries": True}, "retries=True: "),
        ({"retries": 1.5}, "retries=1.5: "),
        ({"retries": {"delay": 2}}, "for a pause between retries, set retry_delay_s=2; set retries=3"),
        ({"retries_on_loss": -1}, "retries_on_loss=-1: must be a whole number >= 0; set retries_on_loss=3"),
        ({"retry_delay_s": -1}, "retry_delay_s=-1: must be a number of seconds >= 0; set retry_delay_s=2"),
        ({"retry_delay_s": float("inf")}, "retry_delay_s=inf: "),
        ({"retry_delay": 2}, "retry_delay: .* write retry_delay_s=2"),
        ({"retry_on": 3}, "retry_on=3: not an exception class"),
        ({"retry_on": (ValueError, "x")}, "retry_on='x': not an exception class"),
        ({"ttl": 600}, "ttl: not an option of a call; leave it out: leases replace it"),
        ({"tiemout": 1}, "tiemout: not an option of a call; did you mean timeout_s="),
        ({"timeout": 1, "timeout_s": 2}, "given twice"),
    ],
)
def test_a_wrong_option_is_refused_by_name_and_value(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        sky.compute(**options)
    with pytest.raises(UsageError, match=message):
        add.with_options(**options)


def test_timeout_of_the_wrong_kind_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="timeout_s='soon'"):
        add.with_options(timeout_s="soon")


def test_decorating_twice_is_refused_with_advice() -> None:
    with pytest.raises(UsageError, match="decorated already; use .with_options"):
        sky.compute(add)


def test_decorating_anything_except_a_function_is_refused() -> None:
    with pytest.raises(UsageError, match="3 is not a function; decorate a function"):
        sky.compute(3)  # type: ignore[call-overload]


def test_and_makes_a_group_and_so_does_gather() -> None:
    both = add(1) & add(2)
    assert len(both) == 2
    assert [p.args for p in both & add(3)] == [(1,), (2,), (3,)]
    assert [p.args for p in both & (add(3) & add(4))] == [(1,), (2,), (3,), (4,)]
    assert sky.gather(add(1), add(2)).items == both.items
    assert sky.gather(add(1), stream=True, ordered=False).stream


def test_a_group_takes_only_calls() -> None:
    with pytest.raises(UsageError, match="gather\\(\\): 3 is not a pending call; call a @compute function"):
        sky.gather(add(1), 3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"write `\(a & b\) >> pool`"):
        add(1) & 3  # type: ignore[operator]


def test_decorating_a_coroutine_function_is_refused() -> None:
    async def waits() -> int:
        return 1

    async def yields() -> AsyncIterator[int]:
        yield 1

    for function in (waits, yields):
        with pytest.raises(UsageError, match=rf"{function.__name__} is an `async def`.*asyncio\.run"):
            sky.compute(function)


def test_a_decorated_method_is_bound() -> None:
    with pytest.warns(UserWarning, match=r"sends a copy of its object.*@sky\.actor"):
        pending = Scaled(3).times(2)
    assert pending.fn.fn(*pending.args) == 6
    assert Scaled.times.local(Scaled(2), 5) == 10


def test_an_importable_function_is_pickled_by_name() -> None:
    assert pickle.loads(pickle.dumps(add)) is add
    assert len(pickle.dumps(add)) < 200


def test_a_pending_call_is_a_frozen_value() -> None:
    pending = add(1)
    with pytest.raises((AttributeError, TypeError)):
        pending.args = ()  # type: ignore[misc]
    assert copy.copy(pending) == pending


def test_the_examples_run() -> None:
    assert run_examples(sys.modules["skyward.calls.compute"])
    assert run_examples(sys.modules["skyward.calls.pending"])
    assert run_examples(options)
