"""Dictionaries, lists, sets and counters of a pool."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar, overload

from ....errors import UsageError
from ....shared.messages import StoreRequest
from .operation import Plan, SharedThing, check_key, operation

K = TypeVar("K")
V = TypeVar("V")

_MISSING: Any = object()


class SharedDict(SharedThing, Generic[K, V]):
    """Dictionary that all tasks of a pool and its program share; `sky.dict(name)` in a task, `pool.dict(name)` outside.

    Each operation is atomic and costs one round trip to the program. Values are pickled; send large data as arguments
    or files instead. It lives as long as the pool. Thread-safe.

    Args:
        name: 1 to 200 characters. Keys are plain data: str, bytes, int, float, bool, None, and tuples of these.

    Raises:
        UsageError: This code does not run in a task, or the name is not legal. Operations raise it for illegal keys,
            and if the values of the pool would exceed 1 GiB.

    Example:
        >>> import skyward as sky
        >>> @sky.compute
        ... def score(name: str) -> None:
        ...     sky.dict[str, int]("scores")[name] = len(name)
        >>> with sky.ComputePool(provider=sky.Local()) as pool:
        ...     _ = pool.map(score, ["ab", "abc"])
        ...     sorted(pool.dict("scores").items())
        [('ab', 2), ('abc', 3)]
    """

    kind = "dict"

    @operation
    def get(self, key: K, default: V | None = None) -> Plan[V | None]:
        """Return the value of a key, or the default."""
        data = yield self._request("get", check_key("key", key))
        return default if data is None else self._load(data)

    @operation
    def set(self, key: K, value: V) -> Plan[None]:
        """Set the value of a key."""
        yield self._request("set", check_key("key", key), self._dump(value))

    @operation
    def setdefault(self, key: K, value: V) -> Plan[V]:
        """Set the value of a key that has none. Return the value that it has then."""
        data = yield self._request("setdefault", check_key("key", key), self._dump(value))
        loaded: V = self._load(data)
        return loaded

    @operation
    def pop(self, key: K, default: V = _MISSING) -> Plan[V]:
        """Remove a key and return its value, or the default.

        Raises:
            KeyError: There is no such key, and no default.
        """
        data = yield self._request("pop", check_key("key", key))
        if data is None:
            if default is _MISSING:
                raise KeyError(key)
            return default
        loaded: V = self._load(data)
        return loaded

    @operation
    def discard(self, key: K) -> Plan[bool]:
        """Remove a key. Return whether it was there."""
        was_there: bool = yield self._request("delete", check_key("key", key))
        return was_there

    @operation
    def update(self, entries: Mapping[K, V]) -> Plan[None]:
        """Set the values of several keys, all at once."""
        pairs = [(check_key("key", key), self._dump(value)) for key, value in entries.items()]
        yield self._request("update", pairs)

    @operation
    def clear(self) -> Plan[None]:
        """Remove all keys."""
        yield self._request("clear")

    @operation
    def contains(self, key: K) -> Plan[bool]:
        """Return whether there is such a key."""
        is_there: bool = yield self._request("contains", check_key("key", key))
        return is_there

    @operation
    def count(self) -> Plan[int]:
        """Return the number of keys."""
        count: int = yield self._request("count")
        return count

    @operation
    def keys(self) -> Plan[list[K]]:
        """Return all keys, in the order in which they were first set."""
        keys: list[K] = yield self._request("keys")
        return keys

    @operation
    def values(self) -> Plan[list[V]]:
        """Return all values, in the order of their keys."""
        pairs = yield self._request("items")
        return [self._load(data) for _, data in pairs]

    @operation
    def items(self) -> Plan[list[tuple[K, V]]]:
        """Return all keys with their values, as they were at one moment."""
        pairs = yield self._request("items")
        return [(key, self._load(data)) for key, data in pairs]

    @operation
    def compare_and_set(self, key: K, expected: V, value: V) -> Plan[bool]:
        """Set the value of a key if it equals `expected`. Return whether it did.

        Args:
            key: The key. One that is missing equals nothing; see `setdefault`.
            expected: Compared by `==`.
            value: The new value.
        """
        key, wanted, new = check_key("key", key), self._dump(expected), self._dump(value)
        is_set, present, version = yield self._request("compare_and_set", key, wanted, new)
        while not is_set:
            if present is None or self._load(present) != expected:
                return False
            is_set = yield self._request("replace", key, version, new)
            if not is_set:
                present, version = yield self._request("read", key)
        return True

    @operation
    def change(self, key: K, function: Callable[[V], V], default: V = _MISSING) -> Plan[V]:
        """Replace the value of a key by `function(value)`, atomically. Return the new value.

        Args:
            key: The key.
            function: Called here with the present value, and again if another task changed the key meanwhile.
            default: Value of a missing key.

        Raises:
            KeyError: There is no such key, and no default.
        """
        key = check_key("key", key)
        while True:
            data, version = yield self._request("read", key)
            if data is None and default is _MISSING:
                raise KeyError(key)
            value = function(default if data is None else self._load(data))
            if (yield self._request("replace", key, version, self._dump(value))):
                return value

    def __getitem__(self, key: K) -> V:
        data = self.run(_single(self._request("get", check_key("key", key))))
        if data is None:
            raise KeyError(key)
        value: V = self._load(data)
        return value

    def __setitem__(self, key: K, value: V) -> None:
        self.set(key, value)

    def __delitem__(self, key: K) -> None:
        if not self.discard(key):
            raise KeyError(key)

    def __contains__(self, key: object) -> bool:
        return bool(self.run(_single(self._request("contains", check_key("key", key)))))

    def __len__(self) -> int:
        return self.count()

    def __iter__(self) -> Iterator[K]:
        return iter(self.keys())

    def __bool__(self) -> bool:
        return self.count() > 0


class SharedList(SharedThing, Generic[V]):
    """List that all tasks of a pool and its program share; `sky.list(name)` in a task, `pool.list(name)` outside.

    Each operation is atomic and costs one round trip. Indexes and slices are Python's. It lives as long as the pool.
    Thread-safe.

    Args:
        name: 1 to 200 characters.

    Raises:
        UsageError: This code does not run in a task, or the name is not legal. Operations raise it if the values of the
            pool would exceed 1 GiB.

    Example:
        >>> import skyward as sky
        >>> with sky.ComputePool(provider=sky.Local()) as pool:
        ...     losses = pool.list("losses")
        ...     losses.append(0.5)
        ...     losses.extend([0.4, 0.3])
        ...     losses[-1], losses[:2]
        (0.3, [0.5, 0.4])
    """

    kind = "list"

    @operation
    def append(self, value: V) -> Plan[None]:
        """Add a value at the end."""
        yield self._request("extend", [self._dump(value)])

    @operation
    def extend(self, values: Iterable[V]) -> Plan[None]:
        """Add several values at the end, next to each other."""
        yield self._request("extend", [self._dump(value) for value in values])

    @operation
    def insert(self, index: int, value: V) -> Plan[None]:
        """Insert a value before an index."""
        yield self._request("insert", _index(index), self._dump(value))

    @operation
    def get(self, index: int) -> Plan[V]:
        """Return the value at an index. Raises IndexError."""
        value: V = self._load((yield self._request("get", _index(index))))
        return value

    @operation
    def set(self, index: int, value: V) -> Plan[None]:
        """Replace the value at an index. Raises IndexError."""
        yield self._request("set", _index(index), self._dump(value))

    @operation
    def pop(self, index: int = -1) -> Plan[V]:
        """Remove the value at an index and return it. Raises IndexError."""
        value: V = self._load((yield self._request("pop", _index(index))))
        return value

    @operation
    def values(self, start: int | None = None, stop: int | None = None, step: int | None = None) -> Plan[list[V]]:
        """Return the values of a slice, as they were at one moment; by default all."""
        if step is not None and _index(step) == 0:
            raise UsageError("step=0: must not be 0; pass 1 or -1", field="step", value=step)
        ends = (None if end is None else _index(end) for end in (start, stop, step))
        found = yield self._request("slice", *ends)
        return [self._load(data) for data in found]

    @operation
    def clear(self) -> Plan[None]:
        """Remove all values."""
        yield self._request("clear")

    @operation
    def count(self) -> Plan[int]:
        """Return the number of values."""
        count: int = yield self._request("count")
        return count

    @overload
    def __getitem__(self, index: int) -> V: ...
    @overload
    def __getitem__(self, index: slice) -> list[V]: ...
    def __getitem__(self, index: int | slice) -> V | list[V]:
        if isinstance(index, slice):
            return self.values(index.start, index.stop, index.step)
        return self.get(index)

    def __setitem__(self, index: int, value: V) -> None:
        self.set(index, value)

    def __len__(self) -> int:
        return self.count()

    def __iter__(self) -> Iterator[V]:
        return iter(self.values())

    def __bool__(self) -> bool:
        return self.count() > 0


class SharedSet(SharedThing, Generic[K]):
    """Set that all tasks of a pool and its program share; `sky.set(name)` in a task, `pool.set(name)` outside.

    Each operation is atomic and costs one round trip. It lives as long as the pool. Thread-safe.

    Args:
        name: 1 to 200 characters. Members are plain data: str, bytes, int, float, bool, None, and tuples of these.

    Raises:
        UsageError: This code does not run in a task, or the name is not legal. Operations raise it for illegal members,
            and if the values of the pool would exceed 1 GiB.

    Example:
        >>> import skyward as sky
        >>> with sky.ComputePool(provider=sky.Local()) as pool:
        ...     seen = pool.set("seen")
        ...     seen.add("a"), seen.add("a"), "a" in seen
        (True, False, True)
    """

    kind = "set"

    @operation
    def add(self, member: K) -> Plan[bool]:
        """Add a member. Return whether it is new: of all who add it, one gets True."""
        new = yield self._request("update", [check_key("member", member)])
        return bool(new)

    @operation
    def update(self, members: Iterable[K]) -> Plan[int]:
        """Add several members, all at once. Return how many are new."""
        new: int = yield self._request("update", [check_key("member", member) for member in members])
        return new

    @operation
    def discard(self, member: K) -> Plan[bool]:
        """Remove a member. Return whether it was there."""
        was_there: bool = yield self._request("discard", check_key("member", member))
        return was_there

    @operation
    def contains(self, member: K) -> Plan[bool]:
        """Return whether there is such a member."""
        is_there: bool = yield self._request("contains", check_key("member", member))
        return is_there

    @operation
    def clear(self) -> Plan[None]:
        """Remove all members."""
        yield self._request("clear")

    @operation
    def count(self) -> Plan[int]:
        """Return the number of members."""
        count: int = yield self._request("count")
        return count

    @operation
    def members(self) -> Plan[set[K]]:
        """Return all members, as they were at one moment."""
        found = yield self._request("members")
        return set(found)

    def __contains__(self, member: object) -> bool:
        return bool(self.run(_single(self._request("contains", check_key("member", member)))))

    def __len__(self) -> int:
        return self.count()

    def __iter__(self) -> Iterator[K]:
        return iter(self.members())

    def __bool__(self) -> bool:
        return self.count() > 0


class SharedCounter(SharedThing):
    """Whole number that tasks count with; `sky.counter(name)` in a task, `pool.counter(name)` outside. It begins at 0.

    Each operation is atomic and costs one round trip. It lives as long as the pool. Thread-safe.

    Args:
        name: 1 to 200 characters.

    Raises:
        UsageError: This code does not run in a task, or the name is not legal.

    Example:
        >>> import skyward as sky
        >>> with sky.ComputePool(provider=sky.Local(), concurrency=2) as pool:
        ...     _ = pool.map(lambda _: sky.counter("done").increment(), range(100))
        ...     pool.counter("done").value()
        100
    """

    kind = "counter"

    @operation
    def value(self) -> Plan[int]:
        """Return the value."""
        value: int = yield self._request("get")
        return value

    @operation
    def increment(self, amount: int = 1) -> Plan[int]:
        """Add a whole number. Return the new value, which no other increment returns."""
        value: int = yield self._request("add", _index(amount, "amount"))
        return value

    @operation
    def decrement(self, amount: int = 1) -> Plan[int]:
        """Subtract a whole number. Return the new value."""
        value: int = yield self._request("add", -_index(amount, "amount"))
        return value

    @operation
    def reset(self, value: int = 0) -> Plan[int]:
        """Set the value. Return the one before, so that no count is lost."""
        old: int = yield self._request("swap", _index(value, "value"))
        return old

    @operation
    def compare_and_set(self, expected: int, value: int) -> Plan[bool]:
        """Set the value if it equals `expected`. Return whether it did."""
        is_set: bool = yield self._request("compare_and_set", _index(expected, "expected"), _index(value, "value"))
        return is_set

    def __int__(self) -> int:
        return self.value()


def _single(request: StoreRequest) -> Generator[StoreRequest, Any, Any]:
    return (yield request)


def _index(value: Any, field: str = "index") -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise UsageError(f"{field}={value!r:.60}: must be a whole number; pass an int", field=field, value=value)
    return int(value.__index__())
