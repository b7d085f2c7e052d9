"""Base class of integrations, and the decorator that attaches one to a function.

A framework's distributed runtime needs three things from skyward:

- environment variables that are set before any user code is imported (`environment`),
- a number of processes on each node (`ranks_per_node`),
- a context that is entered before the user's function and left after it (`session`).

`integrate` records the integration on the function, where `@sky.compute` reads it. In every rank it enters the session.
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
from typing import Any, ClassVar, Literal, ParamSpec, Protocol, Self, TypeVar, cast, overload

from ..calls.pending import ComputeFunction
from ..core.signatures import checked_options
from ..core.spellings import suggestion
from ..errors import MissingDependency, UsageError
from ..node.slot.groups import group_rank
from ..node.slot.runtime import current_rank
from ..values.launch import RETURNS, Integration, RanksPerNode, RankValues, Returns
from ..values.topology import Rank
from ..wire.failures import stamp_failure

P = ParamSpec("P")
R = TypeVar("R")
Options = ParamSpec("Options")
"""The fields of an integration, by keyword."""

_ATTRIBUTE = "__skyward_integrations__"
_MAX_SEED = 2**32 - 1
"""Largest seed that numpy's generator takes; torch and random take more."""
_entered: set[str] = set()
"""Names of the integrations whose sessions are open in this process. A rank runs one call, so one set is enough."""


class IntegrationDecorator(Protocol):
    """Decorator that keeps the function's signature and type."""

    def __call__(self, fn: Callable[P, R], /) -> Callable[P, R]: ...


class RankValuesDecorator(Protocol):
    """Decorator of a function whose callers get the values of all ranks."""

    def __call__(self, fn: Callable[P, R], /) -> Callable[P, RankValues[R]]: ...


class OptionalDecorator(Protocol[Options]):
    """Decorator that is used bare, or with options by keyword."""

    @overload  # options are passed by keyword, so no call fits both
    def __call__(self, fn: Callable[P, R], /) -> Callable[P, R]: ...  # type: ignore[overload-overlap]
    # A ParamSpec takes no further keyword, so the other options of this form are checked when it runs.
    @overload
    def __call__(self, *, returns: Literal["ranks"], **options: Any) -> RankValuesDecorator: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, *args: Options.args, **options: Options.kwargs) -> IntegrationDecorator: ...


@dataclass(frozen=True, kw_only=True)
class IntegrationBase(ABC):
    """Base class of every integration.

    Instances travel to nodes that may lack the framework. A subclass therefore imports it inside methods only.

    Args:
        processes_per_node: ranks on each node, >= 1. "auto" starts one per accelerator, or one on a node without any.
        returns: ranks whose values the caller gets: "nodes" for the first of each node, "ranks" for all, "head" for the
            first of all.

    Raises:
        UsageError: `processes_per_node` is neither a whole number >= 1 nor "auto", or `returns` is none of its three.

    Example:
        @dataclass(frozen=True, kw_only=True)
        class MpiIntegration(IntegrationBase):
            name: ClassVar[str] = "mpi"
            extra: ClassVar[str] = "mpi"
            packages: ClassVar[tuple[str, ...]] = ("mpi4py",)

            @contextmanager
            def session(self, rank: Rank) -> Iterator[None]:
                yield

        mpi = decorator_of(MpiIntegration)
    """

    name: ClassVar[str]
    extra: ClassVar[str]
    """The extra of skyward that brings the framework: `pip install 'skyward[<extra>]'`."""
    packages: ClassVar[tuple[str, ...]]
    """Packages that a node must have, as pip requirements."""
    preload: ClassVar[tuple[str, ...]] = ()
    """Modules that a node may import once, before it forks ranks, and variables to set first; see `Integration`.
    Importing them must not start a thread, because a process with threads cannot be forked safely.
    """

    sees_neighbours: ClassVar[bool] = False
    """Whether a rank also sees the devices of the gang's other ranks on its node, for frameworks that choose by
    `LOCAL_RANK`. The others see their own share only.
    """

    is_for_head: ClassVar[bool] = False
    """Whether only rank 0 runs the user's function. The other ranks just enter and leave the session."""

    processes_per_node: RanksPerNode = 1
    returns: Returns = "nodes"

    def __post_init__(self) -> None:
        value = self.processes_per_node
        is_number = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        if not (is_number or value == "auto"):
            raise UsageError(
                f'processes_per_node={value!r}: @{self.name} takes a whole number >= 1, or "auto"; '
                "set processes_per_node=1 or more"
            )
        check_returns(self.name, self.returns)

    @property
    def ranks_per_node(self) -> RanksPerNode:
        return self.processes_per_node

    @property
    def nodes_per_group(self) -> int | None:
        """Number of neighbouring nodes whose ranks all integrations of the function see as the whole gang; None: all.

        An override splits the gang into such groups. `sky.instance_info()` still tells of the whole gang.
        """
        return None

    def attached_to(self, fn: Callable[..., Any]) -> Self:
        """Return the integration for a function that the decorator is about to wrap, in the program and on its nodes.

        An override may complete its fields by the function. `fn` is whatever the user decorates.
        """
        return self

    def environment(self, rank: Rank) -> dict[str, str]:
        """Return variables for the rank's process. They are set before any user code is unpickled.

        An override must not import the framework.
        """
        return {}

    def prepare(self, rank: Rank) -> None:  # noqa: B027  # most have nothing to do here
        """Prepare the rank before the user's module and arguments are unpickled.

        It runs after the variables of all integrations are set. It is part of the call: its output is the call's
        output, and its exceptions fail the rank.
        """

    @abstractmethod
    def session(self, rank: Rank) -> AbstractContextManager[None]:
        """Return the context that surrounds the user's function in every rank.

        The context is left after an exception too. It must not wait for other ranks then: they may be gone.
        """


def decorator_of(integration: Callable[Options, IntegrationBase]) -> OptionalDecorator[Options]:
    """Make the decorator of an integration class, with its name, its documentation and its fields as options.

    Args:
        integration: a subclass of `IntegrationBase`.

    Returns:
        The decorator. It raises WrongArguments for an option that the class does not have.

    Example:
        torch = decorator_of(TorchIntegration)
    """
    kind = cast("type[IntegrationBase]", integration)

    def decorator(fn: Callable[..., Any] | None = None, /, **options: Any) -> Any:
        made = kind(**options)

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            return integrate(function, made.attached_to(function))

        return decorate if fn is None else decorate(fn)

    decorator.__name__ = decorator.__qualname__ = kind.name
    decorator.__module__, decorator.__doc__ = kind.__module__, kind.__doc__
    function, _ = inspect.signature(decorator).parameters.values()
    signature = inspect.Signature([function, *inspect.signature(kind).parameters.values()])
    decorator.__signature__ = signature  # type: ignore[attr-defined]  # what `inspect` and `help` show
    return cast("OptionalDecorator[Options]", checked_options(decorator))


def integrate(fn: Callable[P, R], integration: Integration) -> Callable[P, R]:
    """Wrap `fn` so that it runs in a session of `integration` in every rank of a gang, and plainly everywhere else.

    Integrations stack: all their environments apply, and their sessions are entered from the outermost inwards.

    Args:
        fn: a plain function.
        integration: the integration to attach.

    Returns:
        The wrapped function, with the signature of `fn`.

    Raises:
        UsageError: `fn` is not a function, already has `@sky.compute` or this integration, or is a generator or async
            function.

    Example:
        train = integrate(train, TorchIntegration(seed=0))
    """
    _check_function(fn, integration.name)
    _check_choice(fn, integration)

    # The wrapper may refer to functions of this module only. A function of the user's `__main__` is pickled by value,
    # and everything that its wrapper refers to is pickled with it.
    @wraps(fn)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with _session(integration):
            value = fn(*args, **kwargs) if _runs_here(integration) else cast("R", None)
        return value if integration.returns != "ranks" else cast("R", RankValues([value]))

    setattr(run, _ATTRIBUTE, (integration, *integrations_of(fn)))
    return run


def integrations_of(fn: Callable[..., Any]) -> tuple[Integration, ...]:
    """Return the integrations of a function, outermost first."""
    integrations: tuple[Integration, ...] = getattr(fn, _ATTRIBUTE, ())
    return integrations


def _runs_here(integration: Integration) -> bool:
    rank = _framework_rank()
    return rank is None or rank.rank == 0 or not integration.is_for_head


def _framework_rank() -> Rank | None:
    """Return this process's rank as the frameworks see it: in its group, if the gang is split into groups."""
    return group_rank() or current_rank()


@contextmanager
def _session(integration: Integration) -> Iterator[None]:
    rank = _framework_rank()
    # A decorated function may call `.local(...)` of another one. The session is open then, and is not entered twice.
    if rank is None or integration.name in _entered:
        yield
        return
    _entered.add(integration.name)
    try:
        with integration.session(rank):
            try:
                yield
            except BaseException as error:
                # Leaving the session can make other ranks fail. The stamp records that this failure came first.
                stamp_failure(error)
                raise
    finally:
        _entered.discard(integration.name)


def load_framework(module: str, *, extra: str) -> Any:
    """Import the framework's module. Raise MissingDependency, which names the extra, if it is not installed."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise MissingDependency(
            f"{module}: not installed here ({error}); run `pip install 'skyward[{extra}]'`, "
            f"or set Image(pip=[{module!r}]) for remote nodes",
            name=module,
        ) from error


def check_returns(integration: str, returns: object) -> None:
    """Raise UsageError, with the nearest of the legal values, unless `returns` is one of them."""
    if returns in RETURNS:
        return
    near = suggestion(returns, RETURNS) if isinstance(returns, str) else None
    raise UsageError(
        f'returns={returns!r}: @{integration} takes "nodes" (one value for each node), "ranks" (one for each rank) or '
        f'"head" (only that of rank 0); ' + (f"did you mean returns={near!r}?" if near else 'set returns="ranks"'),
        field="returns",
        value=returns,
    )


def check_seed(integration: str, seed: object) -> None:
    """Raise UsageError unless `seed` is None or fits in 32 bits."""
    is_seed = isinstance(seed, int) and not isinstance(seed, bool) and 0 <= seed <= _MAX_SEED
    if seed is not None and not is_seed:
        raise UsageError(f"seed={seed!r}: @{integration} takes a whole number in [0, 2**32), or None; set seed=0")


def numeric_threads(rank: Rank) -> int:
    """Return the number of threads for a rank's numeric code, >= 1.

    OMP_NUM_THREADS decides if it is set; of a list, which has one number per nesting level, the first one counts.
    Otherwise each rank gets an equal share of the cores.
    """
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return max(1, int(first) if first.isdecimal() else (os.cpu_count() or 1) // rank.local_world_size)


def _check_choice(fn: Callable[..., Any], integration: Integration) -> None:
    """Raise UsageError if two integrations of a function choose the ranks whose values its callers get."""
    for other in integrations_of(fn):
        if "nodes" not in (integration.returns, other.returns):
            raise UsageError(
                f"returns={integration.returns!r}: @{other.name} on the same function has returns={other.returns!r} "
                "already; remove one of the two",
                field="returns",
                value=integration.returns,
            )


def _check_function(fn: object, name: str) -> None:
    if isinstance(fn, ComputeFunction):
        function = fn.__name__
        raise UsageError(
            f"@{name}: stands above @sky.compute; move it below @sky.compute:\n"
            f"    @sky.compute\n    @sky.integrations.{name}\n    def {function}(...): ..."
        )
    if not callable(fn) or isinstance(fn, type):
        raise UsageError(f"@{name}: decorates functions, not {fn!r}; pass its options by keyword")
    function = getattr(fn, "__qualname__", repr(fn))
    if inspect.iscoroutinefunction(fn) or inspect.isasyncgenfunction(fn):
        raise UsageError(f"@{name}: {function} is an async function; decorate a plain function")
    if inspect.isgeneratorfunction(fn):
        raise UsageError(f"@{name}: {function} is a generator function, and ranks cannot stream; return a value")
    if any(integration.name == name for integration in integrations_of(fn)):
        raise UsageError(f"@{name}: decorates {function} twice; remove one of the two")
