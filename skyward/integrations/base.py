"""The seam between skyward and a framework: what an integration is, and the decorator that puts it on a function.

A framework's distributed runtime needs three things, and an integration gives each at its moment: variables that
stand before anything of the user's is imported (`environment`), a number of processes on each node
(`ranks_per_node`), and something to enter before the user's function and leave after it (`session`). `integrate`
records the integration on the function, where `@sky.compute` finds it, and enters the session in every rank.
"""

from __future__ import annotations

import inspect
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from typing import Any, ClassVar, ParamSpec, Protocol, TypeVar, cast, overload

from ..calls.compute import ComputeFunction
from ..core.signatures import checked_options
from ..errors import MissingDependency, UsageError
from ..node.slot.runtime import current_rank
from ..values.launch import Integration, RanksPerNode
from ..values.topology import Rank
from ..wire.failures import stamp_failure

__all__ = [
    "IntegrationBase",
    "IntegrationDecorator",
    "OptionalDecorator",
    "check_seed",
    "decorator_of",
    "integrate",
    "integrations_of",
    "load_framework",
    "numeric_threads",
]

P = ParamSpec("P")
R = TypeVar("R")
Options = ParamSpec("Options")
"""The fields of an integration, by keyword."""

_ATTRIBUTE = "__skyward_integrations__"
_MAX_SEED = 2**32 - 1
"""Of numpy's generator; torch and random take more."""
_entered: set[str] = set()
"""Names of the integrations whose sessions are open in this process; a rank runs one call."""


class IntegrationDecorator(Protocol):
    """A decorator that keeps the function's signature and type."""

    def __call__(self, fn: Callable[P, R], /) -> Callable[P, R]: ...


class OptionalDecorator(Protocol[Options]):
    """A decorator that is used bare, or with options by keyword."""

    @overload  # options are given by keyword, so no call fits both
    def __call__(self, fn: Callable[P, R], /) -> Callable[P, R]: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, *args: Options.args, **options: Options.kwargs) -> IntegrationDecorator: ...


@dataclass(frozen=True, kw_only=True)
class IntegrationBase(ABC):
    """What every integration shares. Instances travel to nodes, so a subclass imports its framework in methods only.

    processes_per_node: ranks on each node, >= 1; "auto" is one for each accelerator, and one where there is none.
    """

    name: ClassVar[str]
    extra: ClassVar[str]
    """The extra of skyward that brings the framework: `pip install 'skyward[<extra>]'`."""
    packages: ClassVar[tuple[str, ...]]
    """What a node must have installed, as requirements."""
    preload: ClassVar[tuple[str, ...]] = ()
    """Modules that a node may import once, before ranks are forked, and variables to set first; see `Integration`.
    Importing them must start no thread.
    """

    processes_per_node: RanksPerNode = 1

    def __post_init__(self) -> None:
        asked = self.processes_per_node
        is_number = isinstance(asked, int) and not isinstance(asked, bool) and asked >= 1
        if not (is_number or asked == "auto"):
            raise UsageError(f'{self.name}: processes_per_node={asked!r}; it is a whole number >= 1, or "auto"')

    @property
    def ranks_per_node(self) -> RanksPerNode:
        return self.processes_per_node

    def environment(self, rank: Rank) -> dict[str, str]:
        """Variables for the rank's process, set before anything of the user's is unpickled. Imports no framework."""
        return {}

    def prepare(self, rank: Rank) -> None:  # noqa: B027  # most have nothing to do here
        """Called in the rank when the variables of all integrations stand and nothing of the user's is unpickled, for
        what must come before the user's module and arguments. It is part of the call: its output is the call's, and
        what it raises is the rank's failure.
        """

    @abstractmethod
    def session(self, rank: Rank) -> AbstractContextManager[None]:
        """Entered around the user's function in every rank. Left also when the function raised, and then it must not
        wait for other ranks: they may be gone.
        """


def decorator_of(integration: Callable[Options, IntegrationBase]) -> OptionalDecorator[Options]:
    """Make the decorator of an integration's class: its name, its documentation, and its fields as options.

    Raises (the decorator): WrongArguments: an option that the class does not have.
    """
    kind = cast("type[IntegrationBase]", integration)

    def decorator(fn: Callable[..., Any] | None = None, /, **options: Any) -> Any:
        made = kind(**options)

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            return integrate(function, made)

        return decorate if fn is None else decorate(fn)

    decorator.__name__ = decorator.__qualname__ = kind.name
    decorator.__module__, decorator.__doc__ = kind.__module__, kind.__doc__
    function, _ = inspect.signature(decorator).parameters.values()
    signature = inspect.Signature([function, *inspect.signature(kind).parameters.values()])
    decorator.__signature__ = signature  # type: ignore[attr-defined]  # what `inspect` and `help` show
    return cast("OptionalDecorator[Options]", checked_options(decorator))


def integrate(fn: Callable[P, R], integration: Integration) -> Callable[P, R]:
    """`fn`, run in a session of `integration` in every rank of a gang, and plainly everywhere else.

    Integrations stack: all their environments are applied, and their sessions are entered from the outermost in.

    Raises:
        UsageError: `fn` is no function, is decorated by `@sky.compute` or by this integration already, or is a
            generator or async function.
    """
    _check_function(fn, integration.name)

    # It names functions of this module only: a function of the user's `__main__` travels by value, and what its
    # wrapper names would travel with it.
    @wraps(fn)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with _session(integration):
            return fn(*args, **kwargs)

    setattr(run, _ATTRIBUTE, (integration, *integrations_of(fn)))
    return run


def integrations_of(fn: Callable[..., Any]) -> tuple[Integration, ...]:
    """The integrations on a function, outermost first."""
    integrations: tuple[Integration, ...] = getattr(fn, _ATTRIBUTE, ())
    return integrations


@contextmanager
def _session(integration: Integration) -> Iterator[None]:
    rank = current_rank()
    # A decorated function that calls another one's `.local(...)` is in the session already.
    if rank is None or integration.name in _entered:
        yield
        return
    _entered.add(integration.name)
    try:
        with integration.session(rank):
            try:
                yield
            except BaseException as error:
                # Leaving the session may make other ranks fail: this one was first.
                stamp_failure(error)
                raise
    finally:
        _entered.discard(integration.name)


def load_framework(module: str, *, extra: str) -> Any:
    """The framework's module. Raises MissingDependency, naming the extra, where it is not installed."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise MissingDependency(
            f"{module} is not installed here ({error}); install it with `pip install 'skyward[{extra}]'`, "
            f"on remote nodes with `Image(pip=[{module!r}])`",
            name=module,
        ) from error


def check_seed(integration: str, seed: object) -> None:
    """Raises UsageError."""
    is_seed = isinstance(seed, int) and not isinstance(seed, bool) and 0 <= seed <= _MAX_SEED
    if seed is not None and not is_seed:
        raise UsageError(f"{integration}: seed={seed!r}; it is a whole number in [0, 2**32), or None")


def numeric_threads(rank: Rank) -> int:
    """The threads of a rank's numeric code, >= 1: what OMP_NUM_THREADS says, which may be a list with a number for
    each level of nesting; else its part of the cores.
    """
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return max(1, int(first) if first.isdecimal() else (os.cpu_count() or 1) // rank.local_world_size)


def _check_function(fn: object, name: str) -> None:
    if isinstance(fn, ComputeFunction):
        called = fn.__name__
        raise UsageError(
            f"@{name} stands below @sky.compute, not above it. Write:\n"
            f"    @sky.compute\n    @sky.integrations.{name}\n    def {called}(...): ..."
        )
    if not callable(fn) or isinstance(fn, type):
        raise UsageError(f"@{name} decorates functions, not {fn!r}; its options are given by keyword")
    named = getattr(fn, "__qualname__", repr(fn))
    if inspect.iscoroutinefunction(fn) or inspect.isasyncgenfunction(fn):
        raise UsageError(f"@{name} does not take async functions, and {named} is one")
    if inspect.isgeneratorfunction(fn):
        raise UsageError(f"@{name}: {named} is a generator function; ranks return values, they do not stream")
    if any(integration.name == name for integration in integrations_of(fn)):
        raise UsageError(f"@{name} stands twice on {named}; once is enough")
