"""Pending calls, their groups, and the operators that send them.

Nothing runs here: a pending call is a frozen value. A target runs it: an open pool, some of its nodes, or the module
`skyward`, which stands for the innermost open pool.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import Future as StdFuture
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from ..core.html import card
from ..core.unrun import Unrun, short
from ..core.user_lines import drop_our_frames
from ..errors import UsageError
from ..values.launch import RankValues
from ..values.ref import Ref
from .active import GangTarget, Target, resolve_target
from .futures import Future
from .options import CallOptions, proper_options

if TYPE_CHECKING:
    from .compute import ComputeFunction

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

_writing = threading.local()
"""`depth`: number of calls whose source form is being made in this thread, each an argument of the one before."""
_DEEPEST = 2
"""Most calls within each other in a source form: a graph may be a long chain, or use each call twice."""


@dataclass(frozen=True, slots=True, repr=False)
class PendingCompute(Unrun, Generic[T_co]):
    """Call that has not run yet, made by calling a `@compute` function.

    Operators send it: `>> pool` runs it on one node, `@ pool` on all nodes, `> pool` returns a future. `&` joins calls
    into a group. As an argument of another call, also inside lists, tuples and dictionaries, it runs before that call,
    once for each send, and the function gets its value. Every other use raises NotRun, because the call has no value
    yet.

    Args:
        fn: The function.
        args: Positional arguments.
        kwargs: Keyword arguments.
        options: Options of this call.
        is_kept: Whether the value stays on its node, and the caller gets a `Ref`; see `keep`.

    Example:
        >>> import skyward as sky
        >>> @sky.compute
        ... def add(a: int, b: int) -> int:
        ...     return a + b
        >>> call = add(1, 2)
        >>> call.with_timeout(60).options.timeout_s
        60
    """

    fn: ComputeFunction[..., T_co]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    options: CallOptions = field(default_factory=CallOptions)
    is_kept: bool = False

    def keep(self) -> PendingCompute[Ref[T_co]]:
        """Return a copy whose value stays on the node that computes it. The caller gets a `Ref` instead.

        `>>` returns one reference, `@` a list of one for each node.

        Example:
            >>> import skyward as sky
            >>> @sky.compute
            ... def squares(count: int) -> list[int]:
            ...     return [number * number for number in range(count)]
            >>> with sky.ComputePool(provider=sky.Local()) as pool:
            ...     kept = squares(4).keep() >> pool
            ...     sky.compute(sum)(kept) >> pool
            14
        """
        kept: PendingCompute[Any] = replace(self, is_kept=True)
        return kept

    @property
    def name(self) -> str:
        """Name of the call in logs and errors."""
        return self.options.name or self.fn.__name__

    @overload
    def with_options(
        self: PendingCompute[RankValues[T]], *, nodes: int, **options: Any
    ) -> PendingCompute[RankValues[T]]: ...
    @overload
    def with_options(self, *, nodes: int, **options: Any) -> PendingCompute[list[T_co]]: ...
    @overload
    def with_options(self, **options: Any) -> PendingCompute[T_co]: ...
    def with_options(self, **options: Any) -> PendingCompute[Any]:
        """Return a copy with other options; see `CallOptions`. Raises UsageError."""
        return replace(self, options=replace(self.options, **proper_options(options)))

    def with_timeout(self, timeout_s: float) -> PendingCompute[T_co]:
        """Return a copy that may run `timeout_s` seconds."""
        return self.with_options(timeout_s=timeout_s)

    @overload
    def __rshift__(self: PendingCompute[RankValues[T]], target: GangTarget) -> RankValues[T]: ...
    @overload  # a target of the next one, too; a call that already has nodes= gets one list, not two
    def __rshift__(self, target: GangTarget) -> list[T_co]: ...
    @overload
    def __rshift__(self, target: Target) -> T_co: ...
    def __rshift__(self, target: Target) -> Any:
        try:
            value: Any = resolve_target(target).run(self)
        except Exception as error:
            drop_our_frames(error)
            raise
        return value

    @overload
    def __gt__(self: PendingCompute[RankValues[T]], target: GangTarget) -> Future[RankValues[T]]: ...
    @overload
    def __gt__(self, target: GangTarget) -> Future[list[T_co]]: ...
    @overload
    def __gt__(self, target: Target) -> Future[T_co]: ...
    def __gt__(self, target: Target) -> Future[Any]:
        return resolve_target(target).submit(self)

    @overload  # one value of all ranks is a list already, so it is not put in another one
    def __matmul__(self: PendingCompute[RankValues[T]], target: Target) -> RankValues[T]: ...
    @overload
    def __matmul__(self, target: Target) -> list[T_co]: ...
    def __matmul__(self, target: Target) -> list[Any]:
        try:
            return resolve_target(target).broadcast(self)
        except Exception as error:
            drop_our_frames(error)
            raise

    def __and__(self, other: PendingCompute[Any] | PendingComputeGroup) -> PendingComputeGroup:
        return PendingComputeGroup((self,)) & other

    __hash__ = Unrun.__hash__

    def __eq__(self, other: object) -> bool:
        if isinstance(other, PendingCompute):
            mine, others = ((call.fn, call.args, call.kwargs, call.options, call.is_kept) for call in (self, other))
            return mine == others
        return self.refuse_equality(other)

    @property
    def as_written(self) -> str:
        depth = getattr(_writing, "depth", 0)
        if depth == _DEEPEST:
            return f"{self.name}(...)"
        _writing.depth = depth + 1
        try:
            args = [short(a) for a in self.args] + [f"{k}={short(v)}" for k, v in self.kwargs.items()]
        finally:
            _writing.depth = depth
        return f"{self.name}({', '.join(args)})"

    def __repr__(self) -> str:
        return f"<{self.as_written}, not run: send it with `>> pool`>"

    def _repr_html_(self) -> str:
        return card(
            self.as_written,
            "has not run",
            hint="`>> pool` runs it on one node, `@ pool` on every node; `> pool` returns a future",
        )


@dataclass(frozen=True, slots=True, repr=False)
class PendingComputeGroup(Unrun):
    """Calls that run in parallel: `>>` returns their values in order, `>` a future of all values.

    Made by `a & b` or `gather`. With `stream`, `>>` returns an iterator that yields values as soon as possible: in the
    order of the calls, or with `ordered=False` in the order of completion.

    Args:
        items: The calls.
        stream: Whether `>>` returns an iterator.
        ordered: Whether that iterator keeps the order of the calls.

    Example:
        >>> import skyward as sky
        >>> @sky.compute
        ... def add(a: int, b: int) -> int:
        ...     return a + b
        >>> add(1, 2) & add(3, 4)
        <(add(1, 2) & add(3, 4)), 2 calls that have not run: send them with `>> pool`>
    """

    items: tuple[PendingCompute[Any], ...]
    stream: bool = False
    ordered: bool = True

    def __and__(self, other: PendingCompute[Any] | PendingComputeGroup) -> PendingComputeGroup:
        if isinstance(other, PendingCompute):
            return replace(self, items=(*self.items, other))
        if isinstance(other, PendingComputeGroup):
            return replace(self, items=self.items + other.items)
        raise UsageError(f"`&`: {other!r} is not a pending call; write `(a & b) >> pool`, because `>>` binds tighter")

    def with_options(self, **options: Any) -> PendingComputeGroup:
        """Return a copy whose calls have other options; see `CallOptions`."""
        return replace(self, items=tuple(p.with_options(**options) for p in self.items))

    def with_timeout(self, timeout_s: float) -> PendingComputeGroup:
        """Return a copy whose calls may run `timeout_s` seconds each."""
        return self.with_options(timeout_s=timeout_s)

    def __rshift__(self, target: Target) -> Any:
        try:
            return resolve_target(target).run_group(self)
        except Exception as error:
            drop_our_frames(error)
            raise

    def __gt__(self, target: Target) -> Future[tuple[Any, ...]]:
        return resolve_target(target).submit_group(self)

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[PendingCompute[Any]]:
        return iter(self.items)

    @property
    def as_written(self) -> str:
        shown = [pending.as_written for pending in self.items[:3]]
        return f"({' & '.join(shown)}{' & ...' if len(self) > 3 else ''})"

    def __repr__(self) -> str:
        return f"<{self.as_written}, {len(self)} calls that have not run: send them with `>> pool`>"

    def _repr_html_(self) -> str:
        names = Counter(pending.name for pending in self.items)
        return card(
            self.as_written,
            "has not run",
            [("calls", ", ".join(f"{name} ×{count}" if count > 1 else name for name, count in names.items()))],
            "`>> pool` runs them in parallel and returns their values in order; `> pool` returns a future",
        )


def gather(*pendings: PendingCompute[Any], stream: bool = False, ordered: bool = True) -> PendingComputeGroup:
    """Group calls to run in parallel, like `a & b & c`.

    Args:
        pendings: The calls.
        stream: Make `>>` return an iterator instead of a tuple.
        ordered: With `stream`, yield values in the order of the calls (default) or of their completion.

    Raises:
        UsageError: An argument is not a pending call.

    Example:
        >>> import skyward as sky
        >>> @sky.compute
        ... def square(x: int) -> int:
        ...     return x * x
        >>> len(sky.gather(*[square(x) for x in range(10)]))
        10
    """
    for pending in pendings:
        if not isinstance(pending, PendingCompute):
            raise UsageError(f"gather(): {short(pending)} is not a pending call; {_for_gather(pending)}")
    return PendingComputeGroup(pendings, stream=stream, ordered=ordered)


def _for_gather(value: object) -> str:
    """Return advice for a value that is not a pending call."""
    if isinstance(value, PendingComputeGroup):
        return "join groups with &"
    if isinstance(value, StdFuture):
        return "read the value of this call with .result(), because it was sent already"
    if isinstance(value, Iterable):
        return "unpack several calls: sky.gather(*calls)"
    return "call a @compute function to make one"
