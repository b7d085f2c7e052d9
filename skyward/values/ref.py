"""References to values that stay on nodes, and the pickles that stand in for such values in the arguments of a call.

A value that stays is pickled once, where it was made. From then on only its pickle travels: into the arguments of a
call as it is (`Spliced`), so that neither the client nor a node between unpickles it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, NoReturn, Protocol, TypeVar

from ..core.by_value import loads
from ..core.records import dataclass
from ..errors import UsageError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Pickled(NamedTuple):
    """Pickle of a value: the pickle itself, and its large buffers, which may be on other machines.

    If `data` is None, the pickle was too large for a frame and is the last buffer.
    """

    data: bytes | None
    buffers: tuple[Any, ...] = ()
    names: tuple[bytes, ...] = ()
    """Names by which the program knows the buffers, if this process got them from there."""


class Elsewhere:
    """Buffer of a value that stays on nodes: it stands for bytes that this process does not have."""

    def held(self, pickled: Pickled) -> Held:
        """Return the value behind a reference that consists of such buffers."""
        raise NotImplementedError


class Held(Protocol):
    """Value behind a reference, as this process has it."""

    @property
    def pickled(self) -> Pickled:
        """Return the pickle, to be sent."""
        ...

    @property
    def nbytes(self) -> int:
        """Size of the pickle and its buffers in bytes."""
        ...

    @property
    def nodes(self) -> tuple[int, ...]:
        """Nodes that have all of its buffers."""
        ...

    def get(self) -> Any:
        """Unpickle the value, and get its buffers first if they are elsewhere."""
        ...


class Ref(Generic[T_co]):
    """Reference to a value that stays on the nodes of a pool. Made by `pool.put(value)` and `f(x).keep() >> pool`.

    As an argument of a call it arrives as the value. Inside a list, tuple, dictionary or object it arrives as a `Ref`,
    whose `get()` returns the value there. Calls prefer the nodes where the bytes lie; other nodes get them on the way.
    Values below 256 KiB are part of the reference itself, and travel with it.

    The value is freed when nothing refers to it: the reference was dropped or garbage-collected, and calls
    that use it have ended. The end of the pool frees it in any case. Every thread may use a reference. `with ref:`
    drops it at the end of the block.

    In a task, `pool.put(value)` and `f(x).keep() >> target` make references too. They end with the task, unless it
    returns them.

    Example:
        >>> import skyward as sky
        >>> with sky.ComputePool(provider=sky.Local()) as pool:
        ...     with pool.put(list(range(5))) as numbers:
        ...         sky.compute(sum)(numbers) >> pool
        10
    """

    __slots__ = ("__weakref__", "_held")

    def __init__(self, held: Held) -> None:
        self._held: Held | None = held

    def get(self) -> T_co:
        """Return the value: a new copy with each call.

        Raises:
            RefLost: The nodes that held the value are gone.
            UsageError: The reference was dropped.
        """
        value: T_co = held_by(self).get()
        return value

    @property
    def nbytes(self) -> int:
        """Size of the pickled value in bytes."""
        return held_by(self).nbytes

    @property
    def nodes(self) -> tuple[int, ...]:
        """Nodes where the value lies now. Empty if no node has it yet, if it is small, and in a task."""
        return held_by(self).nodes

    def drop(self) -> None:
        """Let go of the value. Calls that were sent with it still get it. Idempotent."""
        self._held = None

    def __enter__(self) -> Ref[T_co]:
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()

    def __repr__(self) -> str:
        if self._held is None:
            return "<Ref, dropped>"
        places = ", ".join(map(str, self._held.nodes))
        return f"<Ref, {self._held.nbytes} bytes{f' on node {places}' if places else ''}: .get() returns the value>"

    def __copy__(self) -> Ref[T_co]:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Ref[T_co]:
        return self

    def __reduce__(self) -> NoReturn:
        raise UsageError("ref: only calls of its pool can take it along; pickle its value, ref.get()")


def held_by(ref: Ref[Any]) -> Held:
    """Return the value behind a reference. Raises UsageError if it was dropped."""
    held = ref._held
    if held is None:
        raise UsageError("ref: was dropped, so it has no value; use it before drop(), or put the value again")
    return held


@dataclass(frozen=True, slots=True, eq=False)
class Spliced:
    """Placeholder for a value in the arguments of a call. The function gets the value."""

    pickled: Pickled


def splice(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace arguments that are references by their values. One reference remains one object."""
    if Ref not in map(type, args) and not (kwargs and Ref in map(type, kwargs.values())):
        return args, kwargs
    made: dict[int, Spliced] = {}
    return tuple(_value(argument, made) for argument in args), {name: _value(a, made) for name, a in kwargs.items()}


def splice_items(items: Sequence[Any], *, is_star: bool) -> Sequence[Any]:
    """Replace references by their values in the items of a map. `is_star`: each item is a tuple of arguments."""
    if type(items) is range:
        return items
    made: dict[int, Spliced] = {}
    if is_star:
        if not any(Ref in map(type, item) for item in items):
            return items
        return [tuple(_value(argument, made) for argument in item) for item in items]
    return [_value(item, made) for item in items] if Ref in set(map(type, items)) else items


def _value(argument: Any, made: dict[int, Spliced]) -> Any:
    if type(argument) is not Ref:
        return argument
    if id(argument) not in made:
        made[id(argument)] = Spliced(held_by(argument).pickled)
    return made[id(argument)]


# In the process that receives them ------------------------------------------------------------------------------------


def load(data: Any, *buffers: Any) -> Any:
    """Unpickle a spliced value."""
    if data is None:
        *buffers, data = buffers  # type: ignore[assignment]  # a list will do
    return loads(data, buffers)


def carried(names: tuple[bytes, ...], data: Any, *buffers: Any) -> Ref[Any]:
    """Make a reference that arrived: with its bytes, or as names of buffers that lie elsewhere."""
    pickled = Pickled(data, buffers, names)
    elsewhere = next((buffer for buffer in buffers if isinstance(buffer, Elsewhere)), None)
    return Ref(_Carried(pickled) if elsewhere is None else elsewhere.held(pickled))


@dataclass(frozen=True, slots=True)
class _Carried:
    """Value of a reference in a task. The buffers are mapped, so those that nobody reads cost no memory."""

    pickled: Pickled

    @property
    def nbytes(self) -> int:
        return sum(memoryview(part).nbytes for part in (self.pickled.data or b"", *self.pickled.buffers))

    @property
    def nodes(self) -> tuple[int, ...]:
        return ()

    def get(self) -> Any:
        # Copies, because each `get` returns a new value, and an array would write into the buffers of the others.
        data, buffers, _ = self.pickled
        return load(data, *(bytearray(buffer) for buffer in buffers))
