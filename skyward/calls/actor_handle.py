"""Handles of actors: what `Model(...) >> pool` returns, and the pending calls of its methods."""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, Protocol, Self, TypeVar, cast

from ..core.records import dataclass
from ..core.signatures import check_arguments
from ..core.spellings import no_attribute
from ..errors import UsageError
from ..values.launch import ProcessLaunch
from ..values.pinned import Pinned
from .actor import HANDLE_NAMES, ActorBase, ActorClass
from .hosted import CallMethod
from .options import CallOptions, proper_options
from .pending import ComputeFunction

P = ParamSpec("P")
T_co = TypeVar("T_co", covariant=True)

_RERUNS = ("retries", "retries_on_loss", "retry_on", "max_restarts", "hang_timeout_s")
"""Options of calls that a method cannot have, because its object may not be as before."""


class ActorLife(Protocol):
    """Actor as its handle sees it. Thread-safe."""

    @property
    def pool(self) -> str:
        """Name of its pool: the pool's `job_id`."""
        ...

    @property
    def number(self) -> int: ...
    @property
    def node(self) -> int | None:
        """Node that it lives on; None while it waits for one, or is gone."""
        ...

    @property
    def state(self) -> str:
        """State in a few words: "starting", "alive", "gone", or where a handle that travelled came from."""
        ...

    def close(self) -> None:
        """End it when its calls have ended, and wait for that. Idempotent."""
        ...

    def forget(self) -> None:
        """End it soon, in another thread, because its last handle is gone."""
        ...


class ActorHandle(Pinned):
    """Handle of an actor, made by `Model(...) >> pool`. It has the methods of the class, and their calls are pending.

    Every thread may use it. `close()`, or the end of `with handle:`, ends the actor after its calls. So does the
    garbage collection of the last handle, unless the actor has a name.

    A handle may be an argument of a call, or captured by its function. The task calls the actor with
    `model.predict(x) >> pool`, where `pool` is a handle too. The actor lives at least as long as that call, or as the
    actor whose constructor got the handle. Only the program can close it.

    Args:
        cls: Class of the object.
        args: Shown arguments of its constructor.
        life: The actor in its pool.

    Example:
        with Model("weights.pt") >> pool as model:
            score = model.predict(1.0) >> pool
    """

    def __init__(self, cls: ActorClass[..., Any], life: ActorLife) -> None:
        self._cls = cls
        self._life = life

    def close(self) -> None:
        """Wait for the calls that were sent, then end the actor. Idempotent. Raises the error of its `__exit__`."""
        self._life.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        life = getattr(self, "_life", None)
        if life is not None and self._cls.options.name is None:
            life.forget()

    def __repr__(self) -> str:
        life, name = self._life, self._cls.options.name or self._cls.__name__
        where = "" if life.node is None else f" on node {life.node}"
        return f"<actor {name}{where}, {life.state}>"

    def __reduce__(self) -> Any:
        return _restored, (self._cls, self._life.pool, self._life.number)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            prototypes = _prototypes(self._cls.cls)
            prototype = prototypes.get(name)
            if prototype is None:
                raise _no_method(self, name, prototypes)
            return prototype.of(self)

        def __dir__(self) -> Iterable[str]:
            return [*_prototypes(self._cls.cls), *HANDLE_NAMES]


def _no_method(handle: ActorHandle, name: str, known: Iterable[str]) -> AttributeError:
    """Return the error for a name that is no public method of the class."""
    cls = handle._cls
    missing = no_attribute(handle, name, "actor", known, problem=f"{cls.__name__!r} has no method {name!r}")
    value = inspect.getattr_static(cls.cls, name, missing)
    if name.startswith("_") or value is missing or inspect.isroutine(value):
        return missing
    kind = "a property" if isinstance(value, property | functools.cached_property) else "an attribute"
    return AttributeError(
        f"{cls.__name__}.{name}: is {kind}, and only methods can be called; add a method that uses it, such as "
        f"`def get_{name}(self): return self.{name}`",
        name=name,
        obj=None,  # with it, Python adds a suggestion of its own
    )


def life_of(handle: ActorHandle) -> ActorLife:
    """Return the actor behind a handle, whose own public names are those of the user's class."""
    return handle._life


_here: weakref.WeakValueDictionary[tuple[str, int], ActorHandle] = weakref.WeakValueDictionary()
"""Handles of the pools of this process, by pool and actor."""


def remember(handle: ActorHandle) -> None:
    """Let a handle that comes back to this process be this one."""
    _here[handle._life.pool, handle._life.number] = handle


def _restored(cls: ActorClass[..., Any], pool: str, number: int) -> ActorHandle:
    """Return the handle that was pickled."""
    handle = _here.get((pool, number))
    return ActorHandle(cls, DistantActor(pool, number)) if handle is None else handle


@dataclass(frozen=True)
class DistantActor:
    """Actor of a pool of another process; see `ActorLife`. Its calls go through the task that this code runs in."""

    pool: str
    number: int

    @property
    def node(self) -> int | None:
        return None

    @property
    def state(self) -> str:
        return f"of pool {self.pool}"

    def close(self) -> None:
        """Refuse: others may use it."""
        raise UsageError("close(): a task cannot end an actor; close it in the program that made it")

    def forget(self) -> None:
        """Do nothing: handles of tasks are not counted."""


@functools.lru_cache(maxsize=256)
def _prototypes(cls: type) -> dict[str, ActorMethod[..., Any]]:
    """Return the public methods of a class, without an actor."""
    found: dict[str, ActorMethod[..., Any]] = {}
    for name in dir(cls):
        value = inspect.getattr_static(cls, name)
        if name.startswith("_") or name in HANDLE_NAMES or (name in vars(ActorBase) and issubclass(cls, ActorBase)):
            continue
        if isinstance(value, ComputeFunction):
            found[name] = ActorMethod(name, value.fn, value.options)
        elif inspect.isroutine(value):
            found[name] = ActorMethod(name, value, CallOptions())
    return found


class ActorMethod(ComputeFunction[P, T_co]):
    """Method of an actor. Its calls are pending; an operator sends them to the actor.

    Example:
        score = model.predict(1.0) >> pool
        best = model.predict.with_timeout(60)(1.0) >> pool
    """

    actor: ActorHandle
    wire: Any = None
    """Its function as it travels, once it was packed."""

    def __init__(self, name: str, function: Any, options: CallOptions) -> None:
        self.fn = cast(Any, CallMethod(name))
        self.options = options
        self.launch = ProcessLaunch()
        self.function = function
        self._fitting = set()
        self.__name__ = name
        self.__qualname__ = str(getattr(function, "__qualname__", name))
        self.__module__ = str(getattr(function, "__module__", ""))
        self.__doc__ = getattr(function, "__doc__", None)
        inner = ComputeFunction(function, options) if callable(function) else None
        self.is_generator = inner is not None and inner.is_generator
        self.iterator_parameters = () if inner is None else inner.iterator_parameters
        self.prototype = self

    def of(self, handle: ActorHandle, **changes: Any) -> ActorMethod[P, T_co]:
        """Return the method of an actor."""
        made: ActorMethod[P, T_co] = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        made.actor = handle
        made.__dict__.update(changes)
        return made

    def with_options(self, **options: Any) -> ActorMethod[P, T_co]:  # type: ignore[override]  # no option changes its type
        """Return a copy with other options; see `CallOptions`. Raises UsageError."""
        return self.of(self.actor, options=replace(self.options, **proper_options(options)))

    def local(self, /, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: the object is not here."""
        raise UsageError(
            f"{self.__name__}.local(): the object lives on a node; send the call with `>> pool`, or make an object "
            f"here: {self.actor._cls.__name__}.local(...)"
        )

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if isinstance(self.function, types.FunctionType):
            check_arguments(types.MethodType(self.function, self.actor), args, kwargs)
        self._fitting.add((len(args), *kwargs))

    def __reduce__(self) -> Any:
        return _method_of, (self.actor, self.__name__, self.options)

    def __repr__(self) -> str:
        return f"<method {self.__name__} of {self.actor!r}>"


def _method_of(handle: ActorHandle, name: str, options: CallOptions) -> ActorMethod[..., Any]:
    method: ActorMethod[..., Any] = getattr(handle, name)
    return method.of(handle, options=options)


def actor_of_call(method: ActorMethod[..., Any], options: CallOptions, pool: str) -> int:
    """Return the number of the actor that a call with these options goes to in a pool.

    Raises:
        UsageError: The actor lives in another pool, or the call has options that a method cannot have.
    """
    name = options.name or method.__name__
    _check_method_options(options, name)
    life = method.actor._life
    if life.pool != pool:
        raise UsageError(f"{name!r}: {method.actor!r} lives in another pool; send the call to that one")
    return life.number


def refuse_broadcast(name: str) -> NoReturn:
    """Raise UsageError: a method runs where its object is."""
    raise UsageError(f"`@`: {name!r} is a method of one object on one node; send it with `>> pool`")


def _check_method_options(options: CallOptions, name: str) -> None:
    for option in ("nodes", "cpus", "gpus", "memory_gib", "accelerator"):
        if (value := getattr(options, option)) is not None:
            raise UsageError(
                f"{option}={value!r}: {name!r} is a method of an actor and runs where that lives; leave it out",
                field=option,
                value=value,
            )
    for option in _RERUNS:
        if value := getattr(options, option):
            raise UsageError(
                f"{option}={value!r}: {name!r} is a method of an actor and runs at most once; catch ActorLost, and "
                "call it again if it may run twice",
                field=option,
                value=value,
            )
