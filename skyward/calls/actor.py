"""`@actor`: classes whose objects live on a node, in a process of their own, and the handles of such objects.

Nothing runs here, as with `@compute`: `Model("weights.pt")` is a frozen value, and so is `model.predict(x)`. A pool
runs them.
"""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Callable
from concurrent.futures import Future as StdFuture
from dataclasses import field
from typing import TYPE_CHECKING, Any, Generic, NoReturn, ParamSpec, Protocol, Self, TypeVar, cast, overload

from ..accelerators import Accelerator
from ..core.records import dataclass
from ..core.signatures import check_arguments, checked_options
from ..core.spellings import no_attribute
from ..core.unrun import Unrun, short
from ..core.user_lines import drop_our_frames
from ..errors import UsageError
from ..schedule.resources import Need
from .active import Target, resolve_target
from .batching import check_concurrency
from .importable import find_by_name, is_importable
from .needs import need_of

P = ParamSpec("P")
C = TypeVar("C")
C_co = TypeVar("C_co", covariant=True)
T_co = TypeVar("T_co", covariant=True)

HANDLE_NAMES = ("close",)
"""Names that handles have themselves."""


def _check_options(options: Any) -> None:
    count, name = options["max_restarts"], options["name"]
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise _refused("max_restarts", count, "must be a whole number >= 0; set max_restarts=3, for example")
    count = options["concurrency"]
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise _refused("concurrency", count, "must be a whole number >= 1; set concurrency=4, for example")
    if name is not None and not (isinstance(name, str) and name):
        raise _refused("name", name, 'must be text that is not empty; set name="model", for example')
    need_of(options["cpus"], options["gpus"], options["memory_gib"], options["accelerator"])


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
        cpus: Processors that it books on its node for its life, > 0. None: none.
        gpus: Devices that it books for its life and sees: a whole number, a share of one below 1, or 0 to hide all.
            None: it books none, and sees all devices of its node.
        memory_gib: Memory that it books for its life, in GiB, > 0. None: none.
        accelerator: Kind of these devices, such as "A100". Without `gpus`, it books one.

    Raises:
        UsageError: An option is unknown or outside its range.

    Example:
        >>> ActorOptions(max_restarts=2).concurrency
        1
    """

    max_restarts: int = 0
    name: str | None = None
    concurrency: int = 1
    cpus: float | None = None
    gpus: float | None = None
    memory_gib: float | None = None
    accelerator: str | Accelerator | None = None

    @property
    def need(self) -> Need | None:
        """Return the resources that the actor books; None if it says no numbers."""
        need = need_of(self.cpus, self.gpus, self.memory_gib, self.accelerator)
        return None if need is None else need._replace(slots=0)


class ActorClass(Generic[P, C_co]):
    """Class whose objects live on a node. Made by `@actor`.

    `cls` is the original class, and `options` are the options of its actors. A call makes a `PendingActor`. Other
    names are those of the original class, to read and to set. A subclass derives from the original class, and needs a
    decorator of its own.

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
        # Subclasses write Base.__init__(self). It is looked up late, because a class that travels is filled after this.
        vars(self)["__init__"] = lambda *args, **kwargs: cast(Any, cls).__init__(*args, **kwargs)

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> PendingActor[C_co]:
        init = cast(Any, self.cls).__init__
        if isinstance(init, types.FunctionType):
            check_arguments(types.MethodType(_named(init, self.__name__), object()), args, kwargs)
        check_concurrency(cast(Any, self.cls), self.options.concurrency)
        return PendingActor(self, args, kwargs)

    def local(self, /, *args: P.args, **kwargs: P.kwargs) -> C_co:
        """Make an object here and now. Its methods run here, too."""
        return cast(C_co, construct(cast(Any, self.cls), *args, **kwargs))

    def with_options(self, **options: Any) -> ActorClass[P, C_co]:
        """Return a copy with other options; see `ActorOptions`. Raises UsageError."""
        return ActorClass(self.cls, _changed(self.options, options))

    def __repr__(self) -> str:
        return f"<actor class {self.__module__}.{self.__name__}>"

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

        def __getattr__(self, name: str) -> Any:
            # Not the special names: libraries would take a method of the class for one of this object.
            if not _is_special(name):
                with contextlib.suppress(AttributeError):
                    return getattr(vars(self)["cls"], name)
            raise no_attribute(self, name, "class", ("local", "with_options"))

        def __setattr__(self, name: str, value: Any) -> None:
            is_own = _is_special(name) or name in ("cls", "options") or hasattr(ActorClass, name)
            if is_own:
                super().__setattr__(name, value)
            else:
                setattr(self.cls, name, value)

        def __mro_entries__(self, _bases: tuple[Any, ...]) -> tuple[type]:
            return (self.cls,)

        def __instancecheck__(self, instance: object) -> bool:
            return isinstance(instance, self.cls)

        def __subclasscheck__(self, subclass: Any) -> bool:
            return issubclass(subclass.cls if isinstance(subclass, ActorClass) else subclass, self.cls)


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


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
    *,
    max_restarts: int = 0,
    name: str | None = None,
    concurrency: int = 1,
    cpus: float | None = None,
    gpus: float | None = None,
    memory_gib: float | None = None,
    accelerator: str | Accelerator | None = None,
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
            with contextlib.suppress(TypeError):  # a built-in class, which has no decorated methods either
                made.__skyward_actor__ = True  # type: ignore[attr-defined]
        return ActorClass(made, checked)

    return decorate if cls is None else decorate(cls)


def _check_class(cls: type) -> None:
    for name in HANDLE_NAMES:
        if inspect.isroutine(getattr(cls, name, None)) and getattr(cls, name) is not getattr(ActorBase, name, None):
            raise UsageError(f"{cls.__name__}.{name}: is a name of the handle; use another, or __exit__ for the end")


class ActorBase:
    """Base of classes whose objects live on a node, for programs that are type-checked; see `actor`.

    Others may call the methods that have `@compute`.

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
        return f"{self.cls.__name__}({', '.join(args)})"

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
