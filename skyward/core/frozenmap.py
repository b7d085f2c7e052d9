"""A read-only, hashable mapping, for the dict-like fields of frozen values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

V_co = TypeVar("V_co", covariant=True)


class FrozenMap(Mapping[str, V_co]):
    """Immutable mapping from names to hashable values; equal to any mapping with the same items.

    Iteration keeps the order. Equality and the hash ignore it, as with `dict`. A map can be pickled and shared between
    threads. `types.MappingProxyType` is not enough: it can be neither hashed nor pickled.

    Raises:
        TypeError: A value cannot be hashed.

    Example:
        >>> FrozenMap({"a": 1})["a"]
        1
        >>> hash(FrozenMap({"a": 1, "b": 2})) == hash(FrozenMap({"b": 2, "a": 1}))
        True
    """

    __slots__ = ("_hash", "_items")

    def __init__(self, items: Mapping[str, V_co] | Iterable[tuple[str, V_co]] = ()) -> None:
        self._items: dict[str, V_co] = dict(items)
        self._hash = hash(frozenset(self._items.items()))

    def __getitem__(self, name: str) -> V_co:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self._items == dict(other) if isinstance(other, Mapping) else NotImplemented

    def __repr__(self) -> str:
        return repr(self._items)

    def __reduce__(self) -> tuple[type[FrozenMap[V_co]], tuple[dict[str, V_co]]]:
        # Strings hash differently in every process, so unpickling computes the hash again.
        return type(self), (self._items,)
