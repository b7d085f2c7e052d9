"""Refusals of values that stand beside an operator of a target and are no calls."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, NoReturn

from ..core.signatures import name_of
from ..core.unrun import Unrun, short
from ..errors import UsageError
from .compute import ComputeFunction

__all__ = ["refuse_operand"]


def refuse_operand(value: object, operator: str) -> NoReturn:
    """Raise UsageError: `value operator target`, where the value is no call."""
    raise UsageError(f"`{operator}`: {_problem(value, operator)}")


def _problem(value: Any, operator: str) -> str:
    if isinstance(value, ComputeFunction):
        return f"{value.__name__} is a function that was not called; write {value.__name__}(...) {operator} pool"
    if isinstance(value, list | tuple) and value and all(isinstance(item, Unrun) for item in value):
        return f"a {type(value).__name__} of {len(value)} calls; write sky.gather(*calls) >> pool"
    if isinstance(value, Future):
        return "the call of this future was sent already; its value is .result()"
    if callable(value):
        name = name_of(value)
        return f"{name} is a function, not a call of one; write sky.compute({name})(...) {operator} pool"
    return (
        f"{short(value)} is a value ({type(value).__name__}), not a call. A function without @sky.compute runs "
        f"here and at once: decorate it, or write pool.submit(function, ...)"
    )
