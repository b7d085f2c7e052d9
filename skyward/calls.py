"""`@compute`, the lazy call it makes, and the operators that send the call somewhere.

Nothing runs here: `train(10)` is a frozen value. What runs it is a target: an open pool, or the module `skyward`
itself, which stands for the innermost open pool.
"""

from __future__ import annotations

import functools
import inspect
import reprlib
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import Future as StdFuture
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from types import FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, ParamSpec, Protocol, TypeVar, get_origin, overload

from .bounds import is_positive
from .errors import NoActivePool, UsageError
from .launch import Launch
from .signatures import check_arguments, innermost, name_of
from .spellings import advice
from .unrun import Unrun
from .user_lines import drop_our_frames

__all__ = [
    "CallOptions",
    "ComputeFunction",
    "Dispatcher",
    "PendingCompute",
    "PendingComputeGroup",
    "Target",
    "active_pool",
    "activity",
    "as_compute",
    "compute",
    "find_by_name",
    "gather",
    "is_importable",
    "open_pools",
    "pending_of",
    "pop_active",
    "push_active",
    "resolve_target",
    "short",
]

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, kw_only=True)
class CallOptions:
    """How one call is run.

    timeout_s: seconds from when the call begins on its slot, > 0; None: no limit.
    retries: how often the call may be run again after the loss of its node or slot, >= 0. With 0 (the default) a
        call runs at most once.
    retry_on: exception types of the user's own for which a retry is spent too.
    max_restarts: how often a gang (a function under an integration) is started again after any failure of a rank,
        >= 0: an exception, a signal, a lost node, a hang. What would fail the same way again is not: a UsageError, a
        timeout, a value that cannot be pickled. `instance_info().restart_count` says which start it is.
    hang_timeout_s: of a gang: seconds, > 0, that a rank may wait in one collective for the others, after which the
        gang is stopped with GangHung, which names the rank that does not come and has each rank's Python stack.
        None: it is never stopped; after 5 minutes the stacks are logged, once.
    name: what logs and errors call it; the function's name by default.
    """

    timeout_s: float | None = None
    retries: int = 0
    retry_on: tuple[type[BaseException], ...] = ()
    max_restarts: int = 0
    hang_timeout_s: float | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        for field_name, seconds in (("timeout_s", self.timeout_s), ("hang_timeout_s", self.hang_timeout_s)):
            if seconds is not None and not is_positive(seconds):
                raise UsageError(f"{field_name}: {seconds!r}; it is a number of seconds > 0, or None for no limit")
        for field_name, count in (("retries", self.retries), ("max_restarts", self.max_restarts)):
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                hint = "; a pause between tries does not exist yet" if isinstance(count, Mapping) else ""
                raise UsageError(f"{field_name}: {count!r}; it is a whole number >= 0{hint}")
        kinds = self.retry_on if isinstance(self.retry_on, tuple) else (self.retry_on,)
        for kind in kinds:
            if not (isinstance(kind, type) and issubclass(kind, BaseException)):
                raise UsageError(f"retry_on: {kind!r} is not an exception class; give one, or a tuple of them")
        object.__setattr__(self, "retry_on", kinds)


_ALIASES = {"timeout": "timeout_s"}


def _call_options(given: dict[str, Any]) -> dict[str, Any]:
    """`given` with the reference's spellings translated, and what is unknown refused by name."""
    known = CallOptions.__dataclass_fields__
    options: dict[str, Any] = {}
    for name, value in given.items():
        proper = _ALIASES.get(name, name)
        if proper not in known:
            raise UsageError(f"{name}: not an option of a call; {advice('a call', name, known)}", field=name)
        if proper in options:
            raise UsageError(f"{name}: given twice ({proper} is the same option)")
        options[proper] = value
    return options


class Dispatcher(Protocol):
    """What a pool offers to the operators."""

    def run(self, call: PendingCompute[T], /) -> T: ...
    def submit(self, call: PendingCompute[T], /) -> StdFuture[T]: ...
    def broadcast(self, call: PendingCompute[T], /) -> list[T]: ...
    def run_group(self, group: PendingComputeGroup) -> Any: ...
    def submit_group(self, group: PendingComputeGroup) -> StdFuture[tuple[Any, ...]]: ...
    def run_async(self, call: PendingCompute[T], /) -> Coroutine[Any, Any, T]: ...


Target = Dispatcher | ModuleType


class ComputeFunction(Generic[P, T_co]):
    """A function that gives lazy calls. Made by `@compute`; holds the original as `fn`."""

    fn: Callable[P, T_co]
    options: CallOptions
    __name__: str
    __qualname__: str

    def __init__(self, fn: Callable[P, T_co], options: CallOptions) -> None:
        _wear_names_of(self, fn)
        self.fn = fn
        self.options = options
        self.launch = Launch(integrations=getattr(_without_partials(fn), "__skyward_integrations__", ()))
        self._fitting: set[tuple[int | str, ...]] = set()
        """Shapes of arguments that fit the signature: how many by position, and the names of the others."""

    @functools.cached_property
    def is_generator(self) -> bool:
        """Whether a call gives a stream of values."""
        return inspect.isgeneratorfunction(innermost(self.fn))

    @functools.cached_property
    def iterator_parameters(self) -> tuple[str, ...]:
        """The parameters annotated `Iterator[T]`: their arguments are streamed in."""
        hints = getattr(innermost(self.fn), "__annotations__", {})
        return tuple(name for name, hint in hints.items() if name != "return" and _is_iterator(hint))

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> PendingCompute[T_co]:
        if (len(args), *kwargs) not in self._fitting:
            self._check(args, kwargs)
        return PendingCompute(self, args, kwargs, self.options)

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise WrongArguments. Arguments of one shape are checked once: binding costs more than the rest of a call."""
        check_arguments(self.fn, args, kwargs)
        activity.calls_made += 1
        activity.last_made = self.__name__
        if len(self._fitting) == _SHAPES:
            self._fitting.clear()
        self._fitting.add((len(args), *kwargs))

    def local(self, /, *args: P.args, **kwargs: P.kwargs) -> T_co:
        """Run the original function here and now."""
        return self.fn(*args, **kwargs)

    def with_options(self, **options: Any) -> ComputeFunction[P, T_co]:
        """A copy with other options; see `CallOptions`."""
        return ComputeFunction(self.fn, replace(self.options, **_call_options(options)))

    def with_timeout(self, timeout_s: float) -> ComputeFunction[P, T_co]:
        return self.with_options(timeout_s=timeout_s)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        # A decorated method: bind as a function would.
        if instance is None:
            return self
        bound: Any = functools.partial(self, instance)
        return bound

    def __repr__(self) -> str:
        return f"<compute {self.__module__}.{self.__qualname__}>"

    if not TYPE_CHECKING:  # a checker is to find these mistakes itself

        def __getattr__(self, name: str) -> NoReturn:
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            if not name.startswith("_"):
                text = f"{text}; {advice('function', name, ('local', 'with_options', 'with_timeout'), shown='{}')}"
            raise AttributeError(text, name=name, obj=self)

    def __reduce__(self) -> Any:
        # By name where the name leads back here; pickle checks that. Otherwise by value.
        if is_importable(self, self):
            return find_by_name, (self.__module__, self.__qualname__)
        return ComputeFunction, (self.fn, self.options)


_SHAPES = 64
"""Shapes of arguments that a function remembers: those of a function that takes any keyword have no end."""


def _wear_names_of(wrapper: ComputeFunction[..., Any], function: Callable[..., Any]) -> None:
    """`functools.update_wrapper` for any callable: builtins and partials lack names, and a class has no such dict."""
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


def is_importable(named: Any, value: object) -> bool:
    """Whether the names of one callable lead to the value in every process that can import its module."""
    module, name = getattr(named, "__module__", None), getattr(named, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module == "__main__" or "<" in name:
        return False
    try:
        return find_by_name(module, name) is value
    except ImportError:
        return False


def find_by_name(module: str, qualified_name: str) -> Any:
    """What stands under that name in a module that is imported if need be; None where there is no such name."""
    import importlib
    import sys

    found = _reach(sys.modules.get(module), qualified_name)
    if found is None:  # also where another thread is importing the module right now: this waits for it
        found = _reach(importlib.import_module(module), qualified_name)
    return found


def _reach(found: Any, qualified_name: str) -> Any:
    for part in qualified_name.split("."):
        found = getattr(found, part, None)
    return found


def _is_iterator(hint: Any) -> bool:
    if isinstance(hint, str):  # from __future__ import annotations
        return hint.partition("[")[0].strip().rpartition(".")[2] == "Iterator"
    return hint is Iterator or get_origin(hint) is Iterator


@overload
def compute(fn: Callable[P, T], /) -> ComputeFunction[P, T]: ...
@overload
def compute(
    *,
    timeout_s: float | None = None,
    retries: int = 0,
    retry_on: type[BaseException] | tuple[type[BaseException], ...] = (),
    max_restarts: int = 0,
    hang_timeout_s: float | None = None,
    name: str | None = None,
    timeout: float | None = None,
) -> Callable[[Callable[P, T]], ComputeFunction[P, T]]: ...
def compute(fn: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Make calls of a function lazy, so that an operator can send them to a pool.

    Use it bare or with the options of `CallOptions`. It goes on top of the integrations and output decorators. The
    function's signature and types stay; the original runs in place by `.local(...)`.

    Raises:
        UsageError: an option is unknown or out of its range, or what is decorated is not a function, or an `async def`.

    Example:
        >>> @compute(retries=2)
        ... def add(a: int, b: int) -> int:
        ...     return a + b
        >>> add.local(1, 2)
        3
        >>> add(1, 2)
        <add(1, 2), not run: send it with `>> pool`>
    """
    checked = CallOptions(**_call_options(options))

    def decorate(function: Callable[..., Any]) -> ComputeFunction[..., Any]:
        if isinstance(function, ComputeFunction):
            raise UsageError(f"compute: {function!r} is decorated already; use .with_options(...) to change it")
        if isinstance(function, functools.partial) and isinstance(function.func, ComputeFunction):
            inner = function.func
            bound = functools.partial(inner.fn, *function.args, **function.keywords)
            return ComputeFunction(bound, checked if options else inner.options)
        if isinstance(function, Unrun):
            raise UsageError(f"compute: {short(function)} is a call; give the function itself, without arguments")
        if not callable(function):
            raise UsageError(f"compute: {function!r} is not a function")
        code = innermost(function)
        if inspect.iscoroutinefunction(code) or inspect.isasyncgenfunction(code):
            raise UsageError(
                f"compute: {name_of(function)} is an `async def`, whose value is a coroutine, and none can travel; "
                "decorate a plain function that calls asyncio.run(...)"
            )
        return ComputeFunction(function, checked)

    return decorate if fn is None else decorate(fn)


def pending_of(
    call: PendingCompute[Any] | Callable[..., Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> PendingCompute[Any]:
    """The call that a method of a target was given: a pending one, or a function and its arguments.

    Raises UsageError: it is neither.
    """
    if isinstance(call, PendingCompute):
        if args or kwargs:
            raise UsageError(f"{call!r}: its arguments are in it already; pass nothing besides it")
        return call
    if isinstance(call, PendingComputeGroup):
        raise UsageError(f"{call!r}: several calls; use run_group() or submit_group(), or the operators >> and >")
    if not callable(call):
        raise UsageError(f"{short(call)} is neither a function nor a call of one; pass the function and its arguments")
    return as_compute(call)(*args, **(kwargs or {}))


def as_compute(function: Callable[..., Any]) -> ComputeFunction[..., Any]:
    """The function itself if it is a @compute function, so with its options; otherwise decorated now."""
    return function if isinstance(function, ComputeFunction) else compute(function)


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 40


def short(value: Any) -> str:
    """The value in a few words of one line, for messages."""
    text = value.as_written if isinstance(value, Unrun) else _REPR.repr(value)
    return " ".join(text.split())


@dataclass(frozen=True, slots=True, repr=False)
class PendingCompute(Unrun, Generic[T_co]):
    """A call that has not been made: `>> pool` runs it on one node, `@ pool` on all, `> pool` gives a future."""

    fn: ComputeFunction[..., T_co]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    options: CallOptions = field(default_factory=CallOptions)

    @property
    def name(self) -> str:
        return self.options.name or self.fn.__name__

    def with_options(self, **options: Any) -> PendingCompute[T_co]:
        """A copy with other options; see `CallOptions`."""
        return replace(self, options=replace(self.options, **_call_options(options)))

    def with_timeout(self, timeout_s: float) -> PendingCompute[T_co]:
        return self.with_options(timeout_s=timeout_s)

    def __rshift__(self, target: Target) -> T_co:
        try:
            return resolve_target(target).run(self)
        except Exception as error:
            drop_our_frames(error)
            raise

    def __gt__(self, target: Target) -> StdFuture[T_co]:
        return resolve_target(target).submit(self)

    def __matmul__(self, target: Target) -> list[T_co]:
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
            return (self.fn, self.args, self.kwargs, self.options) == (
                other.fn,
                other.args,
                other.kwargs,
                other.options,
            )
        return self.refuse_equality(other)

    @property
    def as_written(self) -> str:
        args = [short(a) for a in self.args] + [f"{k}={short(v)}" for k, v in self.kwargs.items()]
        return f"{self.name}({', '.join(args)})"

    def __repr__(self) -> str:
        return f"<{self.as_written}, not run: send it with `>> pool`>"


@dataclass(frozen=True, slots=True, repr=False)
class PendingComputeGroup(Unrun):
    """Calls that run in parallel: `>>` gives their values in order, `>` a future of them.

    With `stream`, `>>` gives an iterator of values as they come: in the order of the calls, or with `ordered=False`
    in the order of completion.
    """

    items: tuple[PendingCompute[Any], ...]
    stream: bool = False
    ordered: bool = True

    def __and__(self, other: PendingCompute[Any] | PendingComputeGroup) -> PendingComputeGroup:
        if isinstance(other, PendingCompute):
            return replace(self, items=(*self.items, other))
        if isinstance(other, PendingComputeGroup):
            return replace(self, items=self.items + other.items)
        raise UsageError(f"&: {other!r} is not a pending call; `>>` binds tighter than `&`: write `(a & b) >> pool`")

    def with_options(self, **options: Any) -> PendingComputeGroup:
        return replace(self, items=tuple(p.with_options(**options) for p in self.items))

    def with_timeout(self, timeout_s: float) -> PendingComputeGroup:
        return self.with_options(timeout_s=timeout_s)

    def __rshift__(self, target: Target) -> Any:
        try:
            return resolve_target(target).run_group(self)
        except Exception as error:
            drop_our_frames(error)
            raise

    def __gt__(self, target: Target) -> StdFuture[tuple[Any, ...]]:
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


def gather(*pendings: PendingCompute[Any], stream: bool = False, ordered: bool = True) -> PendingComputeGroup:
    """A group of calls to run in parallel; the same as `a & b & c`.

    Args:
        stream: `>>` gives an iterator of values as they come, instead of a tuple.
        ordered: with `stream`, in the order of the calls (the default) or of completion.
    """
    for pending in pendings:
        if not isinstance(pending, PendingCompute):
            raise UsageError(f"gather: {short(pending)} is not a pending call; {_for_gather(pending)}")
    return PendingComputeGroup(pendings, stream=stream, ordered=ordered)


def _for_gather(value: object) -> str:
    """What to write where a group was to be made of something else."""
    if isinstance(value, PendingComputeGroup):
        return "it is several; join them with &"
    if isinstance(value, StdFuture):
        return "it was sent already; its value is .result()"
    if isinstance(value, Iterable):
        return "of several calls write sky.gather(*calls)"
    return "call a @compute function to make one"


# Open pools. A context variable knows the innermost pool of this context; threads and notebook cells that the pool
# was not opened in have contexts of their own, and fall back to the innermost of the process.
_of_context: ContextVar[tuple[Dispatcher, ...]] = ContextVar("skyward_active_pools", default=())
_of_process: list[Dispatcher] = []
_lock = threading.Lock()


class Activity:
    """What happened in this process, so that a pool which closes can tell calls that were made and never sent.

    Counted without a lock, and calls only the first time that they have a shape: enough to tell none from some.
    """

    calls_made = 0
    last_made = ""
    pools_opened = 0


activity = Activity()


def push_active(pool: Dispatcher) -> None:
    activity.pools_opened += 1
    _of_context.set((*_of_context.get(), pool))
    with _lock:
        _of_process.append(pool)


def pop_active(pool: Dispatcher) -> None:
    _of_context.set(tuple(p for p in _of_context.get() if p is not pool))
    with _lock:
        if pool in _of_process:
            _of_process.remove(pool)


def open_pools() -> list[Dispatcher]:
    """Those of this process, in the order in which they were opened."""
    with _lock:
        return list(_of_process)


def active_pool() -> Dispatcher:
    """The innermost open pool. Raises NoActivePool."""
    still_open = open_pools()
    for pool in reversed(_of_context.get()):
        if pool in still_open:
            return pool
    if still_open:
        return still_open[-1]
    raise NoActivePool(
        "no pool is open here: write `with sky.ComputePool(provider=sky.Local()):` around the call, "
        "or name the pool: `f() >> pool`. Inside a task there is no pool: call the function's .local(...)"
    )


def resolve_target(target: Target | Literal["skyward"]) -> Dispatcher:
    """The pool that an operator's right side means."""
    if isinstance(target, ModuleType):
        if target.__name__ == "skyward":
            return active_pool()
    elif hasattr(target, "run_group") and not isinstance(target, type):
        return target  # type: ignore[return-value]
    hint = "; open a pool of it: sky.ComputePool(provider=...)" if hasattr(target, "launch") else ""
    raise UsageError(
        f"{short(target)} is not a pool; the right side of >>, >, @ is a ComputePool or the module skyward{hint}"
    )
