"""`@actor`: classes whose objects live on a node, in a process of their own, and the handles of such objects.

Nothing runs here, as with `@compute`: `Model("weights.pt")` is a frozen value, and so is `model.predict(x)`. A pool
runs them.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable
from concurrent.futures import Future as StdFuture
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, NoReturn, ParamSpec, Protocol, Self, TypeVar, cast, overload

from ..core.signatures import check_arguments, checked_options
from ..core.spellings import advice
from ..core.unrun import Unrun, short
from ..core.user_lines import drop_our_frames
from ..errors import UsageError
from ..values.launch import ProcessLaunch
from .active import Target, resolve_target
from .batching import check_concurrency
from .compute import ComputeFunction, find_by_name, is_importable
from .hosted import CallMethod
from .options import CallOptions, proper_options

P = ParamSpec("P")
C = TypeVar("C")
C_co = TypeVar("C_co", covariant=True)
T_co = TypeVar("T_co", covariant=True)

_OF_HANDLES = ("close",)
"""Names that the handle has itself."""
_RERUNS = ("retries", "retries_on_loss", "retry_on", "max_restarts", "hang_timeout_s")
"""Options of calls that a method cannot have, because its object may not be as before."""


def _check_options(options: Any) -> None:
    count, name = options["max_restarts"], options["name"]
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise _refused("max_restarts", count, "must be a whole number >= 0; set max_restarts=3, for example")
    count = options["concurrency"]
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise _refused("concurrency", count, "must be a whole number >= 1; set concurrency=4, for example")
    if name is not None and not (isinstance(name, str) and name):
        raise _refused("name", name, 'must be text that is not empty; set name="model", for example')


def _refused(field_name: str, value: object, problem: str) -> UsageError:
    return UsageError(f"{field_name}={value!r}: {problem}", field=field_name, value=value)


@checked_options(place="an actor", check=_check_options)
@dataclass(frozen=True, kw_only=True)
class ActorOptions:
    """Options of an actor. Set them with `@actor(...)` or `.with_options(...)`.

    Args:
        max_restarts: Most restarts after the loss of its process or node, >= 0. Each begins with the constructor.
        name: Name for `pool.actor(name)`, logs and errors. An actor with a name lives until it is closed.
        concurrency: Calls that run at once, >= 1. With more than one, they run in threads of its process.

    Raises:
        UsageError: An option is unknown or outside its range.

    Example:
        >>> ActorOptions(max_restarts=2).concurrency
        1
    """

    max_restarts: int = 0
    name: str | None = None
    concurrency: int = 1


class ActorLife(Protocol):
    """Actor in an open pool, as its handle sees it. Thread-safe."""

    @property
    def number(self) -> int: ...
    @property
    def node(self) -> int | None:
        """Node that it lives on; None while it waits for one, or is gone."""
        ...

    @property
    def state(self) -> str:
        """State in one word: "starting", "alive" or "gone"."""
        ...

    def close(self) -> None:
        """End it when its calls have ended, and wait for that. Idempotent."""
        ...

    def forget(self) -> None:
        """End it soon, in another thread, because its last handle is gone."""
        ...


class ActorClass(Generic[P, C_co]):
    """Class whose objects live on a node. Made by `@actor`.

    `cls` is the original class, and `options` are the options of its actors. A call makes a `PendingActor`.

    Example:
        >>> @actor
        ... class Adder:
        ...     def __init__(self, base: int) -> None:
        ...         self.base = base
        ...     def add(self, number: int) -> int:
        ...         return self.base + number
        >>> Adder.local(1).add(2)
        3
        >>> Adder.with_options(max_restarts=1)(1)
        <Adder(1), not made: send it with `>> pool`>
    """

    __name__: str
    __qualname__: str

    def __init__(self, cls: Callable[P, C_co], options: ActorOptions) -> None:
        for name in ("__module__", "__name__", "__qualname__", "__doc__"):
            setattr(self, name, getattr(cls, name, None))
        self.cls = cls
        self.options = options

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> PendingActor[C_co]:
        init = cast(Any, self.cls).__init__
        if isinstance(init, types.FunctionType):
            check_arguments(types.MethodType(_named(init, self.name), object()), args, kwargs)
        check_concurrency(cast(Any, self.cls), self.options.concurrency)
        return PendingActor(self, args, kwargs)

    @property
    def name(self) -> str:
        """Name of the class."""
        return str(cast(Any, self.cls).__name__)

    def local(self, /, *args: P.args, **kwargs: P.kwargs) -> C_co:
        """Make an object here and now. Its methods run here, too."""
        return cast(C_co, construct(cast(Any, self.cls), *args, **kwargs))

    def with_options(self, **options: Any) -> ActorClass[P, C_co]:
        """Return a copy with other options; see `ActorOptions`. Raises UsageError."""
        return ActorClass(self.cls, _changed(self.options, options))

    def __repr__(self) -> str:
        return f"<actor class {self.__module__}.{self.name}>"

    def __reduce__(self) -> Any:
        # By name if the name leads back here, otherwise by value. The class below the decorator has no name.
        if is_importable(self, self):
            return find_by_name, (self.__module__, self.__qualname__)
        names = (self.__module__, self.__qualname__)
        try:
            original = None if self.__module__ == "__main__" else find_by_name(*names)
        except ImportError:  # no importable name, so it travels by value
            original = None
        if isinstance(original, ActorClass) and original.cls is self.cls:
            return _with_options, (*names, self.options)
        return ActorClass, (self.cls, self.options)

    if not TYPE_CHECKING:  # type checkers must find these mistakes themselves

        def __getattr__(self, name: str) -> NoReturn:
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            if not name.startswith("_"):
                text = f"{text}; {advice('class', name, ('local', 'with_options'), shown='{}')}"
            raise AttributeError(text, name=name, obj=self)


def _with_options(module: str, name: str, options: ActorOptions) -> ActorClass[..., Any]:
    return ActorClass(find_by_name(module, name).cls, options)


def _changed(options: ActorOptions, changes: dict[str, Any]) -> ActorOptions:
    fields = {name: getattr(options, name) for name in ActorOptions.__dataclass_fields__}
    return ActorOptions(**{**fields, **changes})


def _named(init: types.FunctionType, name: str) -> types.FunctionType:
    """Return a constructor that messages call by the name of its class."""
    named = types.FunctionType(init.__code__, init.__globals__, name, init.__defaults__, init.__closure__)
    named.__kwdefaults__ = init.__kwdefaults__
    return named


def construct(cls: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Make an object of an actor's class in this process."""
    if isinstance(cls, type) and issubclass(cls, ActorBase):
        made = super(ActorBase, cls).__new__(cls)
        cast(Any, made).__init__(*args, **kwargs)
        return made
    return cls(*args, **kwargs)


@overload
def actor(cls: Callable[P, C], /) -> ActorClass[P, C]: ...
@overload
def actor(
    *, max_restarts: int = 0, name: str | None = None, concurrency: int = 1
) -> Callable[[Callable[P, C]], ActorClass[P, C]]: ...
def actor(cls: Any = None, /, **options: Any) -> Any:
    """Make the objects of a class live on a node, in a process of their own.

    `model = Model("weights.pt") >> pool` makes one and returns its handle. Calls of its methods are pending like those
    of `@compute` functions: `model.predict(x) >> pool`. They run in the order in which they were sent, each at most
    once. The actor ends with `model.close()`, at the end of `with model:`, when the program forgets the handle, and
    with the pool. Its class may have `__enter__`, called after the constructor, and `__exit__`, called at the end.

    Methods with `@compute` are typed, and may have options. Type checkers such as mypy do not see what a decorator
    makes of a class. For them, derive the class from `ActorBase` instead.

    Args:
        cls: The class, when the decorator is used bare.
        options: Options of its actors; see `ActorOptions`.

    Returns:
        An `ActorClass`.

    Raises:
        UsageError: An option is unknown or outside its range, or the decorated object is not a class.

    Example:
        >>> import skyward as sky
        >>> @sky.actor
        ... class Tally:
        ...     def __init__(self) -> None:
        ...         self.count = 0
        ...     def add(self, number: int) -> int:
        ...         self.count += number
        ...         return self.count
        >>> with sky.ComputePool(provider=sky.Local()) as pool:
        ...     tally = Tally() >> pool
        ...     [tally.add(number) >> pool for number in (1, 2, 3)]
        [1, 3, 6]
    """
    checked = ActorOptions(**options)

    def decorate(made: Any) -> Any:
        if isinstance(made, ActorClass):
            raise UsageError(f"actor(): {made!r} is decorated already; use .with_options(...) to change it")
        if not isinstance(made, type):
            raise UsageError(
                f"actor(): {short(made)} is not a class; decorate a class, or a function with @sky.compute"
            )
        _check_class(made)
        if not issubclass(made, ActorBase):
            made.__skyward_actor__ = True  # type: ignore[attr-defined]
        return ActorClass(made, checked)

    return decorate if cls is None else decorate(cls)


def _check_class(cls: type) -> None:
    for name in _OF_HANDLES:
        if inspect.isroutine(getattr(cls, name, None)) and getattr(cls, name) is not getattr(ActorBase, name, None):
            raise UsageError(f"{cls.__name__}.{name}: is a name of the handle; use another, or __exit__ for the end")


class ActorBase:
    """Base of classes whose objects live on a node, for programs that are type-checked; see `actor`.

    Methods with `@compute` are what others may call.

    Example:
        class Model(sky.ActorBase):
            def __init__(self, path: str) -> None:
                self.weights = load(path)

            @sky.compute
            def predict(self, x: float) -> float:
                return self.weights(x)

        model = Model("weights.pt") >> pool
        score = model.predict(1.0) >> pool
    """

    __skyward_actor__ = True

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _check_class(cls)

    @classmethod
    def with_options(cls, **options: Any) -> type[Self]:
        """Return the class with other options; see `ActorOptions`. Raises UsageError."""
        return cast(type[Self], ActorClass(cls, ActorOptions(**options)))

    @classmethod
    def local(cls, /, *args: Any, **kwargs: Any) -> Self:
        """Make an object here and now. Its methods run here, too."""
        made: Self = construct(cls, *args, **kwargs)
        return made

    if TYPE_CHECKING:

        def __rshift__(self, target: Target) -> Self: ...
        def __gt__(self, target: Target) -> StdFuture[Self]: ...
        def close(self) -> None: ...
        def __enter__(self) -> Self: ...
        def __exit__(self, *_: object) -> None: ...

    else:

        def __new__(cls, /, *args, **kwargs):
            return ActorClass(cls, ActorOptions())(*args, **kwargs)


@dataclass(frozen=True, slots=True, repr=False)
class PendingActor(Unrun, Generic[C_co]):
    """Actor that was not made yet: `>> pool` makes it and returns its handle, `> pool` a future of the handle.

    Args:
        cls: Class of the object.
        args: Positional arguments of its constructor.
        kwargs: Keyword arguments of its constructor.

    Example:
        >>> actor(dict)(a=1)
        <dict(a=1), not made: send it with `>> pool`>
    """

    cls: ActorClass[..., C_co]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __rshift__(self, target: Target) -> C_co:
        try:
            made: C_co = _maker(target, self).make_actor(self)
        except Exception as error:
            drop_our_frames(error)
            raise
        return made

    def __gt__(self, target: Target) -> StdFuture[C_co]:
        return cast(StdFuture[C_co], _maker(target, self).submit_actor(self))

    def __matmul__(self, target: Target) -> NoReturn:
        raise UsageError(
            f"`@`: {self.as_written} is one object; make one on each node: "
            f"[{self.as_written} >> pool.node(n) for n in pool.node_numbers]"
        )

    @property
    def as_written(self) -> str:
        args = [short(a) for a in self.args] + [f"{k}={short(v)}" for k, v in self.kwargs.items()]
        return f"{self.cls.name}({', '.join(args)})"

    def __repr__(self) -> str:
        return f"<{self.as_written}, not made: send it with `>> pool`>"


class _Maker(Protocol):
    def make_actor(self, pending: PendingActor[Any], /) -> Any: ...
    def submit_actor(self, pending: PendingActor[Any], /) -> StdFuture[Any]: ...


def _maker(target: Target, pending: PendingActor[Any]) -> _Maker:
    pool = resolve_target(target)
    if not hasattr(pool, "make_actor"):
        raise UsageError(f"{pending.as_written}: actors are made by the program, not in a task; make it there")
    return cast(_Maker, pool)


class ActorHandle:
    """Handle of an actor, made by `Model(...) >> pool`. It has the methods of the class, and their calls are pending.

    Every thread may use it. `close()`, or the end of `with handle:`, ends the actor after its calls. So does the
    garbage collection of the last handle, unless the actor has a name.

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
        life, name = self._life, self._cls.options.name or self._cls.name
        where = "" if life.node is None else f" on node {life.node}"
        return f"<actor {name}{where}, {life.state}>"

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            f"{self!r}: the handle of an actor cannot travel to a task; call its methods in the program, and pass on "
            "their values"
        )

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            prototypes = _prototypes(self._cls.cls)
            prototype = prototypes.get(name)
            if prototype is None:
                text = f"{self._cls.name!r} has no method {name!r}"
                if not name.startswith("_"):
                    text = f"{text}; {advice('actor', name, tuple(prototypes), shown='{}')}"
                raise AttributeError(text, name=name, obj=self)
            return prototype.of(self)

        def __dir__(self) -> Iterable[str]:
            return [*_prototypes(self._cls.cls), *_OF_HANDLES]


def life_of(handle: ActorHandle) -> ActorLife:
    """Return the actor behind a handle, whose own public names are those of the user's class."""
    return handle._life


@functools.lru_cache(maxsize=256)
def _prototypes(cls: type) -> dict[str, ActorMethod[..., Any]]:
    """Return the public methods of a class, without an actor."""
    found: dict[str, ActorMethod[..., Any]] = {}
    for name in dir(cls):
        value = inspect.getattr_static(cls, name)
        if name.startswith("_") or name in _OF_HANDLES or (name in vars(ActorBase) and issubclass(cls, ActorBase)):
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
            f"here: {self.actor._cls.name}.local(...)"
        )

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if isinstance(self.function, types.FunctionType):
            check_arguments(types.MethodType(self.function, self.actor), args, kwargs)
        self._fitting.add((len(args), *kwargs))

    def __reduce__(self) -> Any:
        return self.actor.__reduce__()

    def __repr__(self) -> str:
        return f"<method {self.__name__} of {self.actor!r}>"


def check_method_options(options: CallOptions, name: str) -> None:
    """Raise UsageError for options that a method of an actor cannot have."""
    for option in ("nodes", "cpus", "gpus", "memory_gib", "accelerator"):
        if (value := getattr(options, option)) is not None:
            raise _refused(option, value, f"{name!r} is a method of an actor and runs where that lives; leave it out")
    for option in _RERUNS:
        if value := getattr(options, option):
            raise _refused(
                option,
                value,
                f"{name!r} is a method of an actor and runs at most once; catch ActorLost, and call it again if it may "
                "run twice",
            )
