"""Errors for every use of a pending call as if it were its value, with advice.

`f(x) + 1`, `f(x)[0]`, `f(x).shape` and `for item in f(x)` are what people write when they forget `>> pool`. The
operators that send a call are in `calls`. A class that derives from `Unrun` keeps the operators that it defines.
"""

from __future__ import annotations

import reprlib
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import NotRun

_ARITHMETIC = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**"}
_BITS = {"lshift": "<<", "rshift": ">>", "xor": "^", "or": "|", "and": "&", "matmul": "@"}
_FUNCTIONS = ("abs", "float", "int", "complex", "round", "len", "iter", "next", "hash")
_USES = {
    **{f"__{side}{name}__": symbol for name, symbol in {**_ARITHMETIC, **_BITS}.items() for side in ("", "r")},
    **{f"__{name}__": f"{name}()" for name in _FUNCTIONS},
    "__lt__": "<",
    "__le__": "<=",
    "__gt__": ">",
    "__ge__": ">=",
    "__neg__": "-",
    "__pos__": "+",
    "__invert__": "~",
    "__bool__": "if",  # `a > pool > b` ends up here too
    "__call__": "()",
    "__contains__": "in",
    "__getitem__": "[]",
    "__setitem__": "[]",
    "__index__": "use as an index",
    "__array__": "an array of it",
    "__enter__": "with",
    "__aenter__": "async with",
    "__aiter__": "async for",
}
"""Method -> the source form that called it."""


class Unrun:
    """One or several calls that have not run. Every use except sending them raises NotRun."""

    __slots__ = ()

    @property
    def as_written(self) -> str:
        """Source form of the call, as its caller wrote it."""
        raise NotImplementedError

    def refuse(self, use: str) -> NoReturn:
        call = self.as_written
        raise NotRun(
            f"`{use}`: {call} has not run, so it has no value yet; send it first: ({call} >> pool), "
            "or run the function here with its .local(...)"
        )

    def refuse_equality(self, other: object) -> bool:
        """Return False for None, which no call equals. Raises NotRun for anything else: users mean the value."""
        return False if other is None else self.refuse("==")

    def __await__(self) -> NoReturn:
        call = self.as_written
        raise NotRun(f"`await`: {call} has not been sent; write: await pool.run_async({call})")

    def __format__(self, spec: str) -> str:
        return repr(self) if not spec else self.refuse(f"format {spec!r}")

    def __reduce__(self) -> NoReturn:
        call = self.as_written
        raise NotRun(
            f"{call}: has not run, so it has no value to pass on; send it first: value = {call} >> pool. "
            "Inside a task, run the function in place with its .local(...)"
        )

    def __copy__(self) -> Any:
        return self  # a frozen value

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self

    if not TYPE_CHECKING:  # type checkers must find these mistakes themselves

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("_"):  # libraries probe for these names, and expect AttributeError
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            self.refuse(f".{name}")


def _refusal(use: str) -> Any:
    def refuse(self: Unrun, *_: object, **__: object) -> NoReturn:
        self.refuse(use)

    return refuse


for _method, _use in _USES.items():
    setattr(Unrun, _method, _refusal(_use))


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 40


def short(value: Any) -> str:
    """Describe a value in a few words on one line, for messages."""
    text = value.as_written if isinstance(value, Unrun) else _REPR.repr(value)
    return " ".join(text.split())
