"""Dictionaries, lists, sets and counters. Each operation is done at once."""

from __future__ import annotations

from typing import Any, ClassVar, Final

from .messages import size_of
from .thing import ENTRY_BYTES, RequestRefused, StoreShelf, Thing

_LONGEST_BITS: Final = 4096
"""Most bits of a counter. A count of atoms has fewer; a program that multiplies by accident has more."""

Pairs = list[tuple[Any, bytes]]


class DictState(Thing):
    """Keys with a value and a version each."""

    def __init__(self, key: tuple[str, str], options: tuple[Any, ...], shelf: StoreShelf) -> None:
        super().__init__(key, options, shelf)
        self._entries: dict[Any, tuple[bytes, int]] = {}

    @property
    def is_idle(self) -> bool:
        return not self._entries

    def _get(self, key: Any) -> bytes | None:
        entry = self._entries.get(key)
        return None if entry is None else entry[0]

    def _set(self, key: Any, value: bytes) -> None:
        self._update([(key, value)])

    def _update(self, pairs: Pairs) -> None:
        new = dict(pairs)
        self.shelf.memory.take(sum(self._growth(key, value) for key, value in new.items()))
        version = next(self.shelf.numbers)
        for key, value in new.items():
            self._entries[key] = value, version

    def _growth(self, key: Any, value: bytes) -> int:
        old = self._entries.get(key)
        return len(value) + ENTRY_BYTES + size_of(key) if old is None else len(value) - len(old[0])

    def _setdefault(self, key: Any, value: bytes) -> bytes:
        if key not in self._entries:
            self._set(key, value)
        return self._entries[key][0]

    def _pop(self, key: Any) -> bytes | None:
        if key not in self._entries:
            return None
        value, _ = self._entries.pop(key)
        self.shelf.memory.take(-(len(value) + ENTRY_BYTES + size_of(key)))
        return value

    def _delete(self, key: Any) -> bool:
        return self._pop(key) is not None

    def _clear(self) -> None:
        for key in list(self._entries):
            self._pop(key)

    def _contains(self, key: Any) -> bool:
        return key in self._entries

    def _count(self) -> int:
        return len(self._entries)

    def _keys(self) -> list[Any]:
        return list(self._entries)

    def _items(self) -> Pairs:
        return [(key, value) for key, (value, _) in self._entries.items()]

    def _read(self, key: Any) -> tuple[bytes | None, int]:
        """Return value and version; version 0 stands for a missing key."""
        return self._entries.get(key, (None, 0))

    def _replace(self, key: Any, version: int, value: bytes) -> bool:
        """Set a value if the key still has that version."""
        if self._read(key)[1] != version:
            return False
        self._set(key, value)
        return True

    def _compare_and_set(self, key: Any, expected: bytes, value: bytes) -> tuple[bool, bytes | None, int]:
        """Set a value if the present one has those bytes. Otherwise return it, because other bytes may be equal."""
        present, version = self._read(key)
        if present != expected:
            return False, present, version
        self._set(key, value)
        return True, None, 0

    verbs: ClassVar = {
        "get": _get,
        "set": _set,
        "update": _update,
        "setdefault": _setdefault,
        "pop": _pop,
        "delete": _delete,
        "clear": _clear,
        "contains": _contains,
        "count": _count,
        "keys": _keys,
        "items": _items,
        "read": _read,
        "replace": _replace,
        "compare_and_set": _compare_and_set,
    }


class ListState(Thing):
    """Values in an order. Indexes are Python's."""

    def __init__(self, key: tuple[str, str], options: tuple[Any, ...], shelf: StoreShelf) -> None:
        super().__init__(key, options, shelf)
        self._values: list[bytes] = []

    @property
    def is_idle(self) -> bool:
        return not self._values

    def _extend(self, values: list[bytes]) -> int:
        """Append the values together; return the new length."""
        self.shelf.memory.take(sum(map(len, values)) + ENTRY_BYTES * len(values))
        self._values += values
        return len(self._values)

    def _insert(self, index: int, value: bytes) -> None:
        self.shelf.memory.take(len(value) + ENTRY_BYTES)
        self._values.insert(index, value)

    def _get(self, index: int) -> bytes:
        return self._values[self._check(index)]

    def _set(self, index: int, value: bytes) -> None:
        self.shelf.memory.take(len(value) - len(self._values[self._check(index)]))
        self._values[index] = value

    def _pop(self, index: int) -> bytes:
        value = self._values.pop(self._check(index))
        self.shelf.memory.take(-(len(value) + ENTRY_BYTES))
        return value

    def _slice(self, start: int | None, stop: int | None, step: int | None) -> list[bytes]:
        return self._values[start:stop:step]

    def _clear(self) -> None:
        while self._values:
            self._pop(-1)

    def _count(self) -> int:
        return len(self._values)

    def _check(self, index: int) -> int:
        if not -len(self._values) <= index < len(self._values):
            raise RequestRefused(
                "IndexError",
                f"{self.title}: index={index}: is out of range; there are {len(self._values)} values",
            )
        return index

    verbs: ClassVar = {
        "extend": _extend,
        "insert": _insert,
        "get": _get,
        "set": _set,
        "pop": _pop,
        "slice": _slice,
        "clear": _clear,
        "count": _count,
    }


class SetState(Thing):
    """Members, which are keys."""

    def __init__(self, key: tuple[str, str], options: tuple[Any, ...], shelf: StoreShelf) -> None:
        super().__init__(key, options, shelf)
        self._members: set[Any] = set()

    @property
    def is_idle(self) -> bool:
        return not self._members

    def _update(self, members: list[Any]) -> int:
        """Add the members together; return how many are new."""
        new = set(members) - self._members
        self.shelf.memory.take(sum(size_of(member) + ENTRY_BYTES for member in new))
        self._members |= new
        return len(new)

    def _discard(self, member: Any) -> bool:
        if member not in self._members:
            return False
        self._members.remove(member)
        self.shelf.memory.take(-(size_of(member) + ENTRY_BYTES))
        return True

    def _clear(self) -> None:
        for member in list(self._members):
            self._discard(member)

    def _contains(self, member: Any) -> bool:
        return member in self._members

    def _count(self) -> int:
        return len(self._members)

    def _members_now(self) -> list[Any]:
        return list(self._members)

    verbs: ClassVar = {
        "update": _update,
        "discard": _discard,
        "clear": _clear,
        "contains": _contains,
        "count": _count,
        "members": _members_now,
    }


class CounterState(Thing):
    """A whole number, 0 at first."""

    def __init__(self, key: tuple[str, str], options: tuple[Any, ...], shelf: StoreShelf) -> None:
        super().__init__(key, options, shelf)
        self._value = 0

    @property
    def is_idle(self) -> bool:
        return self._value == 0

    def _get(self) -> int:
        return self._value

    def _add(self, amount: int) -> int:
        self._swap(self._value + amount)
        return self._value

    def _swap(self, value: int) -> int:
        """Set the value; return the one before."""
        if value.bit_length() > _LONGEST_BITS:
            raise RequestRefused("UsageError", f"{self.title}: the value exceeds {_LONGEST_BITS} bits; count less")
        old, self._value = self._value, value
        return old

    def _compare_and_set(self, expected: int, value: int) -> bool:
        if self._value != expected:
            return False
        self._swap(value)
        return True

    verbs: ClassVar = {"get": _get, "add": _add, "swap": _swap, "compare_and_set": _compare_and_set}
