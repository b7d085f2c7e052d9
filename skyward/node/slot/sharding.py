"""`shard`: selects the part of a data set that belongs to this node or rank.

One rule over positions selects the elements, whatever type holds them. So a list of labels and an array of images that
are sharded alike stay aligned. Each library's data is read through the library's own indexing. Libraries are looked up
in `sys.modules`: their data cannot exist before they are imported, so this module imports none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple, TypeVar, overload

from ...core.records import dataclass
from ...errors import UsageError
from .permutation import Permutation
from .runtime import instance_info

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")


@overload
def shard(
    data: A,
    /,
    *,
    shuffle: bool = ...,
    seed: int = ...,
    drop_last: bool = ...,
    node: int | None = ...,
    total_nodes: int | None = ...,
) -> A: ...
@overload
def shard(
    data: A,
    other: B,
    /,
    *,
    shuffle: bool = ...,
    seed: int = ...,
    drop_last: bool = ...,
    node: int | None = ...,
    total_nodes: int | None = ...,
) -> tuple[A, B]: ...
@overload
def shard(
    data: A,
    other: B,
    third: C,
    /,
    *,
    shuffle: bool = ...,
    seed: int = ...,
    drop_last: bool = ...,
    node: int | None = ...,
    total_nodes: int | None = ...,
) -> tuple[A, B, C]: ...
@overload
def shard(
    data: A,
    other: B,
    third: C,
    fourth: D,
    /,
    *more: Any,
    shuffle: bool = ...,
    seed: int = ...,
    drop_last: bool = ...,
    node: int | None = ...,
    total_nodes: int | None = ...,
) -> tuple[Any, ...]: ...
def shard(
    *data: Any,
    shuffle: bool = False,
    seed: int = 0,
    drop_last: bool = False,
    node: int | None = None,
    total_nodes: int | None = None,
) -> Any:
    """Return the part of `data` that belongs here: one of W disjoint parts that together are everything.

    In a gang, W is the world size and the part is the rank's. In a broadcast (`@`), W is the number of its nodes and
    the part is the node's. In a plain call (`>>`) and outside a pool W is 1, so everything is returned.

    Args:
        *data: one or more collections of the same length n: lists, tuples, numpy arrays, torch tensors and map-style
            datasets, jax arrays, pandas and polars frames and series, Hugging Face datasets. Arrays are divided along
            the first axis, from (n, ...) to (about n / W, ...). Anything else with a length and whole-number indexing
            becomes a list.
        shuffle: divide a shuffled order. All parts must pass the same `seed`. The order depends only on n and `seed`,
            not on the types, and is not stored as a list.
        seed: any whole number; use another one per epoch for another order.
        drop_last: make all parts exactly n // W long, and leave out the rest of the order.
        node: index of the part, 0 <= node < total_nodes; only together with `total_nodes`.
        total_nodes: number of parts W; only together with `node`.

    Returns:
        For one argument, a part of the same type. For several, a tuple of parts, all divided alike. Part i has the
        places i, i + W, i + 2W, ... of the order; with `drop_last`, n // W places from i * (n // W) on. Without
        `shuffle`, parts of arrays and tensors are views: writing to one writes to the data.

    Raises:
        UsageError: lengths differ (the message names them), an argument has no length or no order, or the part is out
            of range.

    Example:
        >>> shard([10, 11, 12, 13, 14], node=1, total_nodes=2)
        [11, 13]
        >>> x, y = shard(["a", "b", "c"], (1, 2, 3), shuffle=True)
        >>> sorted(zip(x, y))
        [('a', 1), ('b', 2), ('c', 3)]
    """
    if not data:
        raise UsageError("shard(): nothing to divide; pass one or more arrays, such as shard(x, y)", field="data")
    # No seed=None: numpy takes it as "any seed", and parts that disagree on the order are not disjoint.
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise UsageError(f"seed={seed!r}: must be a whole number; pass the same one in every part", field="seed")
    part, parts = _place(node, total_nodes)
    n = _common_length(data)
    rule = _Rule(places=_places(n, part, parts, drop_last), order=Permutation(n, seed=seed) if shuffle else None)
    shards = tuple(_taker(collection)(collection, rule) for collection in data)
    return shards[0] if len(data) == 1 else shards


@dataclass(frozen=True, kw_only=True)
class _Rule:
    """Rule that selects positions: `places` of the order, or of the data itself if there is no order."""

    places: range
    order: Permutation | None

    def __iter__(self) -> Iterator[int]:
        if self.order is None:
            return iter(self.places)
        if "numpy" in sys.modules:
            return iter(self.order.take_array(self.places).tolist())
        return self.order.take(self.places)

    def index(self) -> Any:
        """Return an index for numpy-like indexing: a slice, which makes a view, or an array of positions."""
        if self.order is not None:
            return self.order.take_array(self.places)
        return slice(self.places.start, self.places.stop, self.places.step)

    def positions(self) -> range | list[int]:
        return self.places if self.order is None else list(self)


def _place(node: int | None, total_nodes: int | None) -> tuple[int, int]:
    """Return (part, parts) from the arguments, or from the running call."""
    if node is None and total_nodes is None:
        info = instance_info()
        return (0, 1) if info is None or info.part is None else (info.part, info.parts or 1)
    for name, value in (("node", node), ("total_nodes", total_nodes)):
        if isinstance(value, bool) or not isinstance(value, int):
            message = f"{name}={value!r}: must be a whole number; pass both node and total_nodes, or neither"
            raise UsageError(message, field=name, value=value)
    assert node is not None
    assert total_nodes is not None
    if not 0 <= node < total_nodes:
        raise UsageError(
            f"node={node}: must be >= 0 and below total_nodes={total_nodes}; pass the index of the part", field="node"
        )
    return node, total_nodes


def _places(n: int, part: int, parts: int, drop_last: bool) -> range:
    if not drop_last:
        return range(part, n, parts)
    size = n // parts
    return range(part * size, (part + 1) * size)


def _common_length(data: tuple[Any, ...]) -> int:
    lengths = [_length(collection) for collection in data]
    if len(set(lengths)) > 1:
        shown = ", ".join(f"{type(collection).__name__} {n}" for collection, n in zip(data, lengths, strict=True))
        raise UsageError(f"shard(): lengths differ ({shown}); pass data of one length", field="data", value=lengths)
    return lengths[0]


def _length(data: object) -> int:
    kind = type(data).__name__
    if isinstance(data, Mapping | AbstractSet | str | bytes):
        advice = "pass its values as separate arguments" if isinstance(data, Mapping) else "make a list of it first"
        raise UsageError(f"shard(): cannot divide a {kind} by position; {advice}", field="data", value=kind)
    # Look at the shape first: a sparse matrix has a shape but refuses len().
    shape = getattr(data, "shape", None)
    if shape == ():
        message = f"shard(): this {kind} has no axis to divide; pass an array with one dimension or more"
        raise UsageError(message, field="data", value=kind)
    if isinstance(shape, tuple):
        return int(shape[0])
    if not isinstance(data, Sized):
        message = f"shard(): a {kind} has no length; make a list of it, or use itertools.islice"
        raise UsageError(message, field="data", value=kind)
    return len(data)


_Taker = Callable[[Any, _Rule], Any]


def _take_list(data: Sequence[Any], rule: _Rule) -> list[Any]:
    return data[rule.index()] if rule.order is None and type(data) is list else [data[i] for i in rule]


def _take_tuple(data: tuple[Any, ...], rule: _Rule) -> tuple[Any, ...]:
    return data[rule.index()] if rule.order is None else tuple(data[i] for i in rule)


def _take_array(data: Any, rule: _Rule) -> Any:
    return data[rule.index()]


def _take_tensor(data: Any, rule: _Rule) -> Any:
    if rule.order is None:
        return data[rule.index()]
    # Without numpy, build the index from a list: torch works without it, but torch.from_numpy does not.
    torch = sys.modules["torch"]
    index = torch.from_numpy(rule.index()) if "numpy" in sys.modules else torch.tensor(list(rule), dtype=torch.int64)
    return data[index.to(data.device)]


def _take_rows(data: Any, rule: _Rule) -> Any:
    return data.iloc[rule.index()]


def _take_polars(data: Any, rule: _Rule) -> Any:
    # Without numpy, build the index from a list, because polars does not need numpy.
    return data[rule.index() if rule.order is None or "numpy" in sys.modules else list(rule)]


def _take_selection(data: Any, rule: _Rule) -> Any:
    return data.select(rule.places if rule.order is None else rule.index())


def _take_subset(data: Any, rule: _Rule) -> Any:
    return sys.modules["torch.utils.data"].Subset(data, rule.positions())


class _Library(NamedTuple):
    """Types of a library, by name, with the function that takes a part of their data."""

    module: str
    types: tuple[str, ...]
    take: _Taker


_LIBRARIES = (
    _Library("numpy", ("ndarray",), _take_array),
    _Library("torch", ("Tensor",), _take_tensor),
    _Library("torch.utils.data", ("Dataset",), _take_subset),
    _Library("jax", ("Array",), _take_array),
    _Library("pandas", ("DataFrame", "Series"), _take_rows),
    _Library("pandas", ("Index",), _take_array),
    _Library("polars", ("DataFrame", "Series"), _take_polars),
    _Library("scipy.sparse", ("csr_matrix", "csr_array"), _take_array),
    _Library("datasets", ("Dataset",), _take_selection),
)


def _taker(data: object) -> _Taker:
    if isinstance(data, tuple):
        return _take_tuple
    for library in _LIBRARIES:
        module = sys.modules.get(library.module)
        types = tuple(t for name in library.types if isinstance(t := getattr(module, name, None), type))
        if isinstance(data, types):
            return library.take
    return _take_list
