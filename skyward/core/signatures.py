"""Argument checks against a signature, before anything is sent or created."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

from ..errors import UsageError, WrongArguments
from .spellings import advice, foreign, suggestion

C = TypeVar("C")

_NO_ALIASES: Mapping[str, str] = types.MappingProxyType({})


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a callable; for a partial its function's, for a callable object its class's."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", None)
    return name if isinstance(name, str) else type(function).__name__


def innermost(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function below decorators and partials; for a callable object, its `__call__`."""
    function = inspect.unwrap(function)
    while isinstance(function, functools.partial):
        function = inspect.unwrap(function.func)
    if isinstance(function, type) or inspect.isroutine(function):
        return function
    method: Callable[..., Any] = getattr(type(function), "__call__", function)  # noqa: B004  # the method, not a test
    return method


def check_arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise WrongArguments where Python itself would raise TypeError, before the function runs.

    Only plain Python functions and methods are checked. For other callables, and for functions that set
    `__signature__`, `inspect` may report a signature that differs from the real one.
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
        raise WrongArguments(f"{name}(): {error}; call it as {takes}{hint}") from None


def _below_ours(function: Callable[..., Any]) -> Callable[..., Any]:
    """Unwrap skyward's own decorators, which pass all arguments on. A user's decorator may not, so it stays."""
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


@overload
def checked_options(thing: C, /) -> C: ...
@overload
def checked_options(
    *,
    place: str = "",
    aliases: Mapping[str, str] = _NO_ALIASES,
    check: Callable[[Mapping[str, Any]], None] | None = None,
) -> Callable[[C], C]: ...
def checked_options(
    thing: Any = None,
    /,
    *,
    place: str = "",
    aliases: Mapping[str, str] = _NO_ALIASES,
    check: Callable[[Mapping[str, Any]], None] | None = None,
) -> Any:
    """Make a class or function refuse unknown options with a UsageError that suggests the right name.

    Args:
        thing: The class or function, when the decorator is used without arguments.
        place: Owner of the options in messages. Default: the name of the class or function.
        aliases: Other names of options. With aliases, a `**aliases` parameter serves type checkers only.
        check: Called before the function with all arguments by name, defaults included.
    """
    if thing is None:
        return functools.partial(_checked, place=place, aliases=aliases, check=check)
    return _checked(thing, place=place, aliases=aliases, check=check)


def _checked(
    thing: Any, *, place: str, aliases: Mapping[str, str], check: Callable[[Mapping[str, Any]], None] | None
) -> Any:
    function: Any = thing.__init__ if isinstance(thing, type) else thing  # type: ignore[misc]
    place = place or getattr(thing, "__name__", "")
    signature = inspect.signature(function)
    if aliases:
        signature = signature.replace(
            parameters=[p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        )
    takes_more = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    options = [p.name for p in signature.parameters.values() if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    options = [name for name in options if name not in ("self", "cls")]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs = _with_proper_names(kwargs, aliases)
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            unknown = None if takes_more else next((name for name in kwargs if name not in options), None)
            raise _wrong_option(place, error, unknown, options) from None
        if check is not None:
            bound.apply_defaults()
            check(bound.arguments)
        return function(*args, **kwargs)

    if not isinstance(thing, type):
        return call
    thing.__init__ = call  # type: ignore[misc]
    return thing


def _with_proper_names(kwargs: dict[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    """Rename aliases to their options. Raises UsageError if an option was passed under two names."""
    for name in aliases.keys() & kwargs.keys():
        if aliases[name] in kwargs:
            raise UsageError(repeated(name, aliases[name]), field=name)
    return {aliases.get(name, name): value for name, value in kwargs.items()}


def repeated(alias: str, name: str) -> str:
    """Message for an option that was passed under its name and under an alias."""
    return f"{alias}: given twice, because {name} is the same option; pass only {name}="


def _wrong_option(place: str, error: TypeError, unknown: str | None, options: list[str]) -> WrongArguments:
    # The value of an unknown option stays out of the message: it may be a password or a key.
    if unknown is not None:
        text = f"{unknown}: not an option of {place}; {advice(place, unknown, options)}"
        return WrongArguments(text, field=unknown)
    if "missing" in str(error):
        name = str(error).split("'")[1]
        hint = foreign(place, name) or f"write {place}({name}=...)"
        return WrongArguments(f"{name}: {place} requires it; {hint}", field=name)
    hint = foreign(place, "*") or f"pass options by name: {', '.join(f'{name}=' for name in options)}"
    return WrongArguments(f"{place}: {error}; {hint}")
