"""Functions whose calls are pending, those calls and groups of them, and the operators that send them.

Nothing runs here: `train(10)` is a frozen value. A target runs it: an open pool, some of its nodes, or the module
`skyward`, which stands for the innermost open pool.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import field, replace
from types import FunctionType, MethodType
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    NoReturn,
    ParamSpec,
    Protocol,
    Self,
    TypeAlias,
    TypeVar,
    Union,
    get_origin,
    overload,
)

from ..core.html import card
from ..core.records import dataclass
from ..core.signatures import check_arguments, innermost, name_of
from ..core.spellings import no_attribute
from ..core.unrun import Unrun, short
from ..core.user_lines import drop_our_frames, warn_user
from ..errors import UsageError
from ..values.launch import ProcessLaunch, RankValues
from ..values.ref import Ref
from .active import GangTarget, Target, activity, resolve_target
from .futures import Future
from .importable import find_by_name, is_importable
from .options import CallOptions, proper_options

P = ParamSpec("P")
T = TypeVar("T")
Q = ParamSpec("Q")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
A_contra = TypeVar("A_contra", contravariant=True)
B_contra = TypeVar("B_contra", contravariant=True)
C_contra = TypeVar("C_contra", contravariant=True)
T_co = TypeVar("T_co", covariant=True)


class _Takes1(Protocol[A_contra, Q, T_co]):
    """Compute function with at least one positional parameter, for type checkers."""

    @property
    def fn(self) -> Callable[Concatenate[A_contra, Q], T_co]: ...


class _Takes2(Protocol[A_contra, B_contra, Q, T_co]):
    """Compute function with at least two positional parameters, for type checkers."""

    @property
    def fn(self) -> Callable[Concatenate[A_contra, B_contra, Q], T_co]: ...


class _Takes3(Protocol[A_contra, B_contra, C_contra, Q, T_co]):
    """Compute function with at least three positional parameters, for type checkers."""

    @property
    def fn(self) -> Callable[Concatenate[A_contra, B_contra, C_contra, Q], T_co]: ...


class MethodHere(functools.partial[Any]):
    """Method of an actor in the process of its object. It runs at once, also by `.local(...)`."""

    @property
    def local(self) -> Callable[..., Any]:
        return self


class ComputeFunction(Generic[P, T_co]):
    """Function whose calls are pending until an operator sends them. Made by `@compute`.

    `fn` is the original function, and `options` are the options of its calls.

    Example:
        >>> import skyward as sky
        >>> @sky.compute
        ... def add(a: int, b: int) -> int:
        ...     return a + b
        >>> add.fn(1, 2)
        3
        >>> add.with_options(retries=2)(1, 2)
        <add(1, 2), not run: send it with `>> pool`>
    """

    fn: Callable[P, T_co]
    options: CallOptions
    __name__: str
    __qualname__: str
    _has_warned = False

    def __init__(self, fn: Callable[P, T_co], options: CallOptions) -> None:
        _wear_names_of(self, fn)
        self.fn = fn
        self.options = options
        self.launch = ProcessLaunch(integrations=getattr(_without_partials(fn), "__skyward_integrations__", ()))
        self._fitting: set[tuple[int | str, ...]] = set()
        """Shapes of arguments that fit the signature: the number of positional ones, and the names of the others."""

    @functools.cached_property
    def is_generator(self) -> bool:
        """Return whether a call returns a stream of values."""
        return inspect.isgeneratorfunction(innermost(self.fn))

    @functools.cached_property
    def iterator_parameters(self) -> tuple[str, ...]:
        """Parameters annotated `Iterator[T]`. Their arguments are streamed to the node."""
        hints = getattr(innermost(self.fn), "__annotations__", {})
        return tuple(name for name, hint in hints.items() if name != "return" and _is_iterator(hint))

    # Each of the first positional arguments may come later. A type checker finds the parameters by the protocols below,
    # because it does not infer them from `ComputeFunction[Concatenate[A, Q], T]`.
    @overload
    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> PendingCompute[T_co]: ...
    @overload
    def __call__(self: _Takes1[A, Q, T], a: Later[A], /, *args: Q.args, **kwargs: Q.kwargs) -> PendingCompute[T]: ...
    @overload
    def __call__(
        self: _Takes2[A, B, Q, T], a: A | Later[A], b: Later[B], /, *args: Q.args, **kwargs: Q.kwargs
    ) -> PendingCompute[T]: ...
    @overload
    def __call__(
        self: _Takes3[A, B, C, Q, T],
        a: A | Later[A],
        b: B | Later[B],
        c: Later[C],
        /,
        *args: Q.args,
        **kwargs: Q.kwargs,
    ) -> PendingCompute[T]: ...
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if (len(args), *kwargs) not in self._fitting:
            self._check(args, kwargs)
        return PendingCompute(self, args, kwargs, self.options)

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise WrongArguments if the arguments do not fit the signature."""
        # Each shape is checked once: binding costs more than everything else here.
        check_arguments(self.fn, args, kwargs)
        activity.calls_made += 1
        activity.last_made = self.__name__
        if len(self._fitting) == _SHAPES:
            self._fitting.clear()
        self._fitting.add((len(args), *kwargs))

    def local(self, /, *args: P.args, **kwargs: P.kwargs) -> T_co:
        """Run the original function here and now, and return its value."""
        return self.fn(*args, **kwargs)

    @overload
    def with_options(
        self: ComputeFunction[P, RankValues[T]], *, nodes: int, **options: Any
    ) -> ComputeFunction[P, RankValues[T]]: ...
    @overload
    def with_options(self, *, nodes: int, **options: Any) -> GangFunction[P, T_co]: ...
    @overload
    def with_options(self, **options: Any) -> ComputeFunction[P, T_co]: ...
    def with_options(self, **options: Any) -> ComputeFunction[P, Any]:
        """Return a copy with other options; see `CallOptions`. Raises UsageError."""
        return ComputeFunction(self.fn, replace(self.options, **proper_options(options)))

    def with_timeout(self, timeout_s: float) -> ComputeFunction[P, T_co]:
        """Return a copy whose calls may run `timeout_s` seconds."""
        return self.with_options(timeout_s=timeout_s)

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Self: ...
    @overload
    def __get__(self: _Takes1[A, Q, T], instance: A, owner: type | None = None) -> ComputeFunction[Q, T]: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Bind a method. That of an actor runs here and now, because the object is here."""
        if instance is None:
            return self
        if getattr(instance, "__skyward_actor__", False):
            return MethodHere(self.fn, instance)
        if not self._has_warned:
            self._has_warned = True
            warn_user(
                f"{self.__qualname__}: @sky.compute on a method sends a copy of its object, so changes to it stay on "
                "the node; decorate the class with @sky.actor to keep the object there"
            )
        bound: Any = functools.partial(self, instance)
        return bound

    def __repr__(self) -> str:
        return f"<compute {self.__module__}.{self.__qualname__}>"

    if not TYPE_CHECKING:  # type checkers must find these mistakes themselves

        def __getattr__(self, name: str) -> NoReturn:
            raise no_attribute(self, name, "function", ("local", "with_options", "with_timeout"))

    def __reduce__(self) -> Any:
        # By name if the name leads back here, otherwise by value.
        if is_importable(self, self):
            return find_by_name, (self.__module__, self.__qualname__)
        return ComputeFunction, (self.fn, self.options)


Later: TypeAlias = Union["PendingCompute[T]", Ref[T]]
"""Argument whose value comes later: a call that runs first, or a reference."""

_SHAPES = 64
"""Most shapes of arguments that a function remembers. A function with **kwargs has any number of them."""


def _wear_names_of(wrapper: ComputeFunction[..., Any], function: Callable[..., Any]) -> None:
    """Copy names like `functools.update_wrapper`, also from builtins and partials, which lack some of them."""
    has_dict = isinstance(function, FunctionType | MethodType)
    functools.update_wrapper(wrapper, function, updated=("__dict__",) if has_dict else ())
    module, qualname = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    wrapper.__name__ = name_of(function)
    wrapper.__qualname__ = qualname if isinstance(qualname, str) else wrapper.__name__
    wrapper.__module__ = module if isinstance(module, str) else "builtins"


def _without_partials(function: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _is_iterator(hint: Any) -> bool:
    if isinstance(hint, str):  # from __future__ import annotations
        return hint.partition("[")[0].strip().rpartition(".")[2] == "Iterator"
    return hint is Iterator or get_origin(hint) is Iterator


if TYPE_CHECKING:

    class GangFunction(ComputeFunction[P, list[T]]):
        """Compute function for several nodes, for type checkers: `.local()` has one value, not a list."""

        def local(self, /, *args: P.args, **kwargs: P.kwargs) -> T: ...  # type: ignore[override]
        def with_options(self, **options: Any) -> GangFunction[P, T]: ...  # type: ignore[override]
        def with_timeout(self, timeout_s: float) -> GangFunction[P, T]: ...


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
