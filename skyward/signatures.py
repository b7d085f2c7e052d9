"""Check the arguments of a call against the signature before anything is sent or made."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from .errors import WrongArguments
from .spellings import advice, foreign, suggestion

__all__ = ["check_arguments", "checked_options", "innermost", "name_of"]

C = TypeVar("C")


def name_of(function: Callable[..., Any]) -> str:
    """The name of any callable: of a partial, that of its function; of a callable object, that of its class."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", None)
    return name if isinstance(name, str) else type(function).__name__


def innermost(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function that runs in the end: below decorators and partials; of a callable object, its `__call__`."""
    function = inspect.unwrap(function)
    while isinstance(function, functools.partial):
        function = inspect.unwrap(function.func)
    if isinstance(function, type) or inspect.isroutine(function):
        return function
    method: Callable[..., Any] = getattr(type(function), "__call__", function)  # noqa: B004  # the method, not a test
    return method


def check_arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise WrongArguments where Python would raise TypeError, before it runs.

    Only functions and methods written in Python are checked. Of other callables, and of functions that carry a
    signature of their own choice, `inspect` may say something else than what they take.
    """
    function = _below_ours(function)
    if not isinstance(function, types.FunctionType | types.MethodType) or hasattr(function, "__signature__"):
        return
    signature = inspect.signature(function, follow_wrapped=False)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        name = name_of(function)
        takes = f"{name}({', '.join(_without_annotation(p) for p in signature.parameters.values())})"
        hint = _hint(kwargs, signature.parameters)
        raise WrongArguments(f"{name}(): {error}; the function is {takes}{hint}") from None


def _below_ours(function: Callable[..., Any]) -> Callable[..., Any]:
    """Below our own decorators, which pass all arguments on. What a user's decorator passes on is not known."""
    while isinstance(function, types.FunctionType) and hasattr(function, "__wrapped__"):
        if not str(function.__globals__.get("__name__")).startswith("skyward."):
            break
        function = function.__wrapped__
    return function


def _without_annotation(parameter: inspect.Parameter) -> str:
    bare = parameter.replace(annotation=inspect.Parameter.empty)
    is_long = bare.default is not inspect.Parameter.empty and len(repr(bare.default)) > 20
    return f"{bare.name}=..." if is_long else str(bare)


def _hint(kwargs: Mapping[str, Any], parameters: Mapping[str, inspect.Parameter]) -> str:
    unknown = next((name for name in kwargs if name not in parameters), None)
    near = None if unknown is None else suggestion(unknown, parameters)
    return "" if near is None else f"; did you mean {near}=?"


def checked_options(thing: C) -> C:
    """A class or function of ours that refuses options it does not have by a UsageError, with what was meant."""
    function: Any = thing.__init__ if isinstance(thing, type) else thing  # type: ignore[misc]
    place = getattr(thing, "__name__", "")
    signature = inspect.signature(function)
    takes_more = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    options = [p.name for p in signature.parameters.values() if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    options = [name for name in options if name != "self"]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            unknown = None if takes_more else next((name for name in kwargs if name not in options), None)
            raise _wrong_option(place, error, unknown, options) from None
        return function(*args, **kwargs)

    if not isinstance(thing, type):
        return call  # type: ignore[return-value]
    thing.__init__ = call  # type: ignore[misc]
    return thing


def _wrong_option(place: str, error: TypeError, unknown: str | None, options: list[str]) -> WrongArguments:
    if unknown is not None:
        text = f"{unknown}: not an option of {place}; {advice(place, unknown, options)}"
        return WrongArguments(text, field=unknown)
    if "missing" in str(error):
        name = str(error).split("'")[1]
        hint = foreign(place, name) or f"write {place}({name}=...)"
        return WrongArguments(f"{name}: {place} needs it; {hint}", field=name)
    hint = foreign(place, "*") or f"give options by name: {', '.join(f'{name}=' for name in options)}"
    return WrongArguments(f"{place}: {error}; {hint}")
