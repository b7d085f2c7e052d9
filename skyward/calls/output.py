"""Who may print: `@stdout(only="head")`, `@stderr(...)` and `@silent` quieten the calls that need not speak.

The decorators only decide. The muting is done by whoever runs the call (a slot), which installs a `Muter`: where none
is installed, so outside a pool, the function is called plainly.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack
from functools import partial, wraps
from typing import Any, Literal, ParamSpec, Protocol, TypeVar, cast, overload

from ..core.signatures import checked_options
from ..errors import UsageError
from ..values.topology import InstanceInfo
from .compute import ComputeFunction

__all__ = ["Muter", "OutputDecorator", "Speakers", "Stream", "install_muter", "silent", "stderr", "stdout"]

P = ParamSpec("P")
R = TypeVar("R")

Stream = Literal["stdout", "stderr"]

Speakers = Literal["head"] | Callable[[InstanceInfo], bool]
"""Whose output is kept: the head's, or that of the instances for which the predicate is true."""


class Muter(Protocol):
    """What a slot gives to the decorators; called in the thread of the call, and by several threads at once."""

    def info(self) -> InstanceInfo | None:
        """Where the call of this thread runs; None when this thread runs no call, and then nothing is muted."""
        ...

    def muted(self, stream: Stream) -> AbstractContextManager[None]:
        """Drops what this call writes to `stream` until the block ends. Blocks may nest, and may be entered often."""
        ...


class OutputDecorator(Protocol):
    """A decorator that keeps the function's signature and type."""

    def __call__(self, fn: Callable[P, R], /) -> Callable[P, R]: ...


_installed: Muter | None = None


# A module's variable and not a ContextVar: a thread that the user's function starts does not inherit the context, yet
# its prints are the call's too. Which call a thread belongs to is for the muter to know.
def install_muter(muter: Muter | None) -> Muter | None:
    """Makes `muter` the one that this process asks, and returns the one before it. None takes it away."""
    global _installed
    before, _installed = _installed, muter
    return before


@overload
def stdout(fn: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def stdout(*, only: Speakers = "head") -> OutputDecorator: ...
@checked_options
def stdout(fn: Any = None, /, *, only: Speakers = "head") -> Any:
    """Keeps standard output of the head only, or of the instances that `only` picks; the others' is dropped.

    Bare (`@sky.stdout`) is the same as `@sky.stdout(only="head")`. The predicate is asked once, when the call begins,
    and what it raises is raised by the call. Stacks with other decorators in any order, but stands below
    `@sky.compute`. Prints of C code and of child processes are dropped too, except with `executor="thread"`, where
    only Python's are. In a generator each step is quiet. Outside a pool the function is called plainly.

        >>> @stdout(only="head")
        ... def train(epochs: int) -> None:
        ...     print("epochs:", epochs)
        >>> train(3)
        epochs: 3

    Raises UsageError when `only` or what is decorated is not legal.
    """
    return _decorate(fn, ("stdout",), _checked(only), "stdout")


@overload
def stderr(fn: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def stderr(*, only: Speakers = "head") -> OutputDecorator: ...
@checked_options
def stderr(fn: Any = None, /, *, only: Speakers = "head") -> Any:
    """Keeps standard error of the head only, or of the instances that `only` picks; otherwise as `stdout`.

    >>> import sys
    >>> @stderr(only=lambda info: info.node < 2)
    ... def warn() -> None:
    ...     print("careful", file=sys.stderr)
    """
    return _decorate(fn, ("stderr",), _checked(only), "stderr")


@overload
def silent(fn: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def silent() -> OutputDecorator: ...
def silent(fn: Any = None, /) -> Any:
    """Drops standard output and standard error of every instance; otherwise as `stdout`.

    >>> @silent
    ... def chatty() -> int:
    ...     return 1
    >>> chatty()
    1
    """
    return _decorate(fn, ("stdout", "stderr"), _nobody, "silent")


def _decorate(fn: Any, streams: tuple[Stream, ...], only: Speakers, name: str) -> Any:
    if fn is None:
        return partial(_wrap, streams=streams, only=only, name=name)
    return _wrap(fn, streams=streams, only=only, name=name)


# The wrappers name functions of this module only, never its variables: functions of the user's `__main__` travel by
# value, and a variable would travel with them as it was on the client.
def _wrap(fn: Callable[P, R], /, *, streams: tuple[Stream, ...], only: Speakers, name: str) -> Callable[P, R]:
    _check_function(fn, name)
    if inspect.isgeneratorfunction(fn):

        @wraps(fn)
        def steps(*args: P.args, **kwargs: P.kwargs) -> Generator[Any, Any, Any]:
            return (yield from _quiet_steps(fn(*args, **kwargs), _quiet(streams, only)))

        return cast("Callable[P, R]", steps)

    @wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with _quiet(streams, only)():
            return fn(*args, **kwargs)

    return call


def _quiet(streams: tuple[Stream, ...], only: Speakers) -> Callable[[], AbstractContextManager[object]]:
    """Decides for the call that begins now; what it returns makes one block of quiet, or of nothing."""
    muter = _installed
    info = muter.info() if muter is not None else None
    if muter is None or info is None:
        return ExitStack
    speaks = info.is_head if only == "head" else only(info)
    return ExitStack if speaks else partial(_muted, muter, streams)


def _muted(muter: Muter, streams: tuple[Stream, ...]) -> ExitStack:
    with ExitStack() as stack:
        for stream in streams:
            stack.enter_context(muter.muted(stream))
        return stack.pop_all()


def _quiet_steps(
    steps: Generator[Any, Any, Any], quiet: Callable[[], AbstractContextManager[object]]
) -> Generator[Any, Any, Any]:
    """`steps`, with quiet while its own code runs and none while the consumer's does."""
    resume: Callable[[], Any] = partial(next, steps)
    while True:
        with quiet():
            try:
                item = resume()
            except StopIteration as stop:
                return stop.value
        try:
            resume = partial(steps.send, (yield item))
        except GeneratorExit:
            with quiet():
                steps.close()
            raise
        except BaseException as error:  # whatever the consumer throws in is the generator's to meet
            resume = partial(steps.throw, error)


def _nobody(info: InstanceInfo) -> bool:
    return False


def _checked(only: Speakers) -> Speakers:
    if only == "head" or (callable(only) and not isinstance(only, type)):
        return only
    message = f'only={only!r}; expected "head" or a function of InstanceInfo that returns a bool'
    raise UsageError(message, field="only", value=only)


def _check_function(fn: object, name: str) -> None:
    if not callable(fn):
        hint = f'; write @sky.{name}(only="head")' if name != "silent" else ""
        raise UsageError(f"@{name} decorates functions, not {fn!r}{hint}", field="fn", value=fn)
    if inspect.iscoroutinefunction(fn) or inspect.isasyncgenfunction(fn):
        raise UsageError(f"@{name} does not take async functions, and {_named(fn)} is one", field="fn", value=fn)
    if isinstance(fn, ComputeFunction):
        message = f"@{name} stands below @sky.compute: calling {_named(fn)} runs nothing yet, so nothing would be muted"
        raise UsageError(message, field="fn", value=fn)


def _named(fn: object) -> str:
    return getattr(fn, "__qualname__", None) or repr(fn)
