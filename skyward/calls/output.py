"""Output filters: `@sky.stdout(only="head")`, `@sky.stderr(...)` and `@sky.silent` drop the output of some processes.

The decorators only decide. The process that runs the call (a slot) does the muting, with an installed `Muter`. Where
none is installed, that is outside a pool, the function is called unchanged.
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
from .pending import ComputeFunction

P = ParamSpec("P")
R = TypeVar("R")

Stream = Literal["stdout", "stderr"]

Speakers = Literal["head"] | Callable[[InstanceInfo], bool]
"""Processes whose output is kept: the head, or those for which the predicate is true."""


class Muter(Protocol):
    """Mutes the output of calls, on behalf of the decorators. Several threads may call it at once."""

    def info(self) -> InstanceInfo | None:
        """Return where this thread's call runs, or None if it runs no call; then nothing is muted."""
        ...

    def muted(self, stream: Stream) -> AbstractContextManager[None]:
        """Drop what this call writes to `stream` until the block ends. Blocks may nest and repeat."""
        ...


class OutputDecorator(Protocol):
    """Decorator that keeps the function's signature and type."""

    def __call__(self, fn: Callable[P, R], /) -> Callable[P, R]: ...


_installed: Muter | None = None


# A module variable, because a ContextVar would fail here: threads that the user's function starts do not inherit the
# context, yet their output belongs to the call. The muter knows which call a thread belongs to.
def install_muter(muter: Muter | None) -> Muter | None:
    """Install the muter of this process and return the previous one. None removes it."""
    global _installed
    before, _installed = _installed, muter
    return before


@overload
def stdout(fn: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def stdout(*, only: Speakers = "head") -> OutputDecorator: ...
@checked_options
def stdout(fn: Any = None, /, *, only: Speakers = "head") -> Any:
    """Keep standard output of one process only, and drop that of the others.

    `@sky.stdout` is the same as `@sky.stdout(only="head")`. It combines with other decorators in any order, but goes
    below `@sky.compute`. Output of C code and child processes is dropped too, except with `executor="thread"`, which
    filters only Python's. In a generator, each step is filtered. Outside a pool, the function is called unchanged.

    Args:
        fn: The function, when the decorator is used bare.
        only: "head", or a predicate of `InstanceInfo` for the processes to keep. It is called once per call, at the
            start; the call raises its exceptions.

    Raises:
        UsageError: `only` or the decorated object is illegal.

    Example:
        >>> @stdout(only="head")
        ... def train(epochs: int) -> None:
        ...     print("epochs:", epochs)
        >>> train(3)
        epochs: 3
    """
    return _decorate(fn, ("stdout",), _checked(only), "stdout")


@overload
def stderr(fn: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def stderr(*, only: Speakers = "head") -> OutputDecorator: ...
@checked_options
def stderr(fn: Any = None, /, *, only: Speakers = "head") -> Any:
    """Keep standard error of one process only, and drop that of the others; otherwise like `stdout`.

    Args:
        fn: The function, when the decorator is used bare.
        only: "head", or a predicate of `InstanceInfo` for the processes to keep.

    Example:
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
    """Drop standard output and standard error of every process; otherwise like `stdout`.

    Args:
        fn: The function, when the decorator is used bare.

    Example:
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


# The wrappers refer only to functions of this module, never to its variables. Functions of the user's `__main__` are
# pickled by value, and a variable would go with them in its state on the client.
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
    """Decide for the call that begins now. Calling the result makes one block, muted or not."""
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
    """Run a generator with its own code muted, and its consumer's code not."""
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
        except BaseException as error:  # the generator must see whatever the consumer throws in
            resume = partial(steps.throw, error)


def _nobody(info: InstanceInfo) -> bool:
    return False


def _checked(only: Speakers) -> Speakers:
    if only == "head" or (callable(only) and not isinstance(only, type)):
        return only
    message = f'only={only!r}: not supported; pass "head" or a function of InstanceInfo that returns a bool'
    raise UsageError(message, field="only", value=only)


def _check_function(fn: object, name: str) -> None:
    if not callable(fn):
        hint = f'@sky.{name}(only="head")' if name != "silent" else f"@sky.{name} above a function"
        raise UsageError(f"@{name}: decorates functions, not {fn!r}; write {hint}", field="fn", value=fn)
    if inspect.iscoroutinefunction(fn) or inspect.isasyncgenfunction(fn):
        raise UsageError(f"@{name}: {_named(fn)} is async; decorate a plain function", field="fn", value=fn)
    if isinstance(fn, ComputeFunction):
        message = f"@{name}: {_named(fn)} only makes pending calls, which print nothing; put it below @sky.compute"
        raise UsageError(message, field="fn", value=fn)


def _named(fn: object) -> str:
    return getattr(fn, "__qualname__", None) or repr(fn)
