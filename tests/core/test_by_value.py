"""The module that stands in for a user's script on a node."""

from __future__ import annotations

import functools
import sys
import types
from typing import Any

import pytest

from skyward.core.by_value import set_running, stand_in_for_script


class Proxy:
    """Callable that has any name, and so no last `__wrapped__`."""

    def __getattr__(self, name: str) -> Any:
        return self


def wrapper_of(wrapped: object) -> Any:
    """Return a function that wraps an object, in its own words."""
    made: Any = types.FunctionType((lambda: None).__code__, {})
    made.__wrapped__ = wrapped
    return made


def test_names_are_those_below_the_wrappers_unless_these_have_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    stand_in_for_script()
    train = types.FunctionType((lambda: None).__code__, {"__name__": "__main__", "rate": 0.1})
    set_running(functools.wraps(train)(wrapper_of(train)))
    assert sys.modules["__main__"].rate == 0.1
    endless = wrapper_of(None)
    endless.__wrapped__ = endless
    for function in (endless, wrapper_of(Proxy()), Proxy()):
        set_running(function)
        assert sys.modules["__main__"].rate == 0.1
