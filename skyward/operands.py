"""The answer to what stands beside an operator, or behind a dot, of a target and is no call."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NoReturn

from .calls import ComputeFunction
from .errors import UsageError
from .signatures import name_of
from .spellings import advice
from .unrun import Unrun, short

__all__ = ["TargetOperators", "refuse_operand"]


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


class TargetOperators:
    """Of a target: the operators of values that are no calls, and names that it does not have."""

    if not TYPE_CHECKING:  # a checker is to find these mistakes itself
        __array_ufunc__ = None  # an array leaves the operator to us, instead of trying it with each element

        def __rrshift__(self, value: object) -> NoReturn:
            refuse_operand(value, ">>")

        def __rmatmul__(self, value: object) -> NoReturn:
            refuse_operand(value, "@")

        def __lt__(self, value: object) -> NoReturn:
            refuse_operand(value, ">")

        def __getattr__(self, name: str) -> NoReturn:
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            if not name.startswith("_"):
                known = [each for each in dir(type(self)) if not each.startswith("_")]
                text = f"{text}; {advice('pool', name, known, shown='{}')}"
            raise AttributeError(text, name=name, obj=self)
