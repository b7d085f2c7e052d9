"""`shard`: the part of a data set that belongs to this node or rank.

Which elements those are is one rule over positions, independent of the type that holds them, so a list of labels and
an array of images that are sharded alike stay aligned. Each library is met through its own indexing and is looked up
in `sys.modules`: data of a library's type cannot exist before the library is imported, so nothing is imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, overload

from ...errors import UsageError
from .permutation import Permutation
from .runtime import instance_info

__all__ = ["shard"]

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
    """The part of `data` that belongs here: one of W parts that are disjoint and together are everything.

    In a gang W is the world size and the part is the rank's; in a broadcast (`@`) W is the nodes that it was
    sent to and the part is the node's; in a plain call (`>>`) and outside a pool W is 1, so everything is returned.

    Args:
        *data: lists, tuples, numpy arrays, torch tensors and map-style datasets, jax arrays, pandas and polars frames
            and series, Hugging Face datasets, all of one length n; arrays are divided along their first axis, (n, ...)
            to (about n / W, ...). Anything else that has a length and is indexed by whole numbers becomes a list.
        shuffle: divide a shuffled order; every part has to pass the same `seed`. The order depends on n and `seed`
            alone, not on the types, and is not kept as a list.
        seed: any whole number; another one in every epoch gives another order.
        drop_last: every part has exactly n // W elements, and the rest of the order is left out.
        node, total_nodes: the part and W themselves, both or neither; 0 <= node < total_nodes.

    Returns:
        One argument: the same type. Several: a tuple of them, all divided alike. Part i has the places i, i + W,
        i + 2W, ... of the order; with `drop_last` those from i * (n // W) on. Without `shuffle`, arrays and tensors
        are views of the data: writing to one writes to the other.

    Raises UsageError when lengths differ (the message names them), when something has no length or no order, or when
    the part is out of range.

        >>> shard([10, 11, 12, 13, 14], node=1, total_nodes=2)
        [11, 13]
        >>> x, y = shard(["a", "b", "c"], (1, 2, 3), shuffle=True)
        >>> sorted(zip(x, y))
        [('a', 1), ('b', 2), ('c', 3)]
    """
    if not data:
        raise UsageError("shard() needs something to divide, such as shard(x, y)", field="data")
    # None would mean "some seed" to numpy's users, and parts that disagree on the order are not disjoint.
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise UsageError(f"shard seed={seed!r}; expected a whole number, the same in every part", field="seed")
    part, parts = _place(node, total_nodes)
    n = _common_length(data)
    rule = _Rule(places=_places(n, part, parts, drop_last), order=Permutation(n, seed=seed) if shuffle else None)
    shards = tuple(_taker(one)(one, rule) for one in data)
    return shards[0] if len(data) == 1 else shards


@dataclass(frozen=True, kw_only=True)
class _Rule:
    """Which positions belong here: `places` of the order, or of the data itself where there is none."""

    places: range
    order: Permutation | None

    def __iter__(self) -> Iterator[int]:
        if self.order is None:
            return iter(self.places)
        if "numpy" in sys.modules:
            return iter(self.order.take_array(self.places).tolist())
        return self.order.take(self.places)

    def index(self) -> Any:
        """For numpy-like indexing: a slice (which makes a view), or an array of positions."""
        if self.order is not None:
            return self.order.take_array(self.places)
        return slice(self.places.start, self.places.stop, self.places.step)

    def positions(self) -> range | list[int]:
        return self.places if self.order is None else list(self)


def _place(node: int | None, total_nodes: int | None) -> tuple[int, int]:
    """(part, parts): what was asked for, or what the running call says."""
    if node is None and total_nodes is None:
        info = instance_info()
        return (0, 1) if info is None or info.part is None else (info.part, info.parts or 1)
    for name, value in (("node", node), ("total_nodes", total_nodes)):
        if isinstance(value, bool) or not isinstance(value, int):
            message = f"shard {name}={value!r}; give node and total_nodes together, as whole numbers, or neither"
            raise UsageError(message, field=name, value=value)
    assert node is not None
    assert total_nodes is not None
    if not 0 <= node < total_nodes:
        raise UsageError(
            f"shard node={node}, total_nodes={total_nodes}; expected 0 <= node < total_nodes", field="node"
        )
    return node, total_nodes


def _places(n: int, part: int, parts: int, drop_last: bool) -> range:
    if not drop_last:
        return range(part, n, parts)
    each = n // parts
    return range(part * each, (part + 1) * each)


def _common_length(data: tuple[Any, ...]) -> int:
    lengths = [_length(one) for one in data]
    if len(set(lengths)) > 1:
        shown = ", ".join(f"{type(one).__name__} {n}" for one, n in zip(data, lengths, strict=True))
        raise UsageError(f"shard() divides data of one length, and these differ: {shown}", field="data", value=lengths)
    return lengths[0]


def _length(data: object) -> int:
    kind = type(data).__name__
    if isinstance(data, Mapping | AbstractSet | str | bytes):
        why = "give its values as separate arguments" if isinstance(data, Mapping) else "make a list of it first"
        raise UsageError(f"shard() cannot divide a {kind} by position; {why}", field="data", value=kind)
    # The shape first: a sparse matrix has one but refuses len().
    shape = getattr(data, "shape", None)
    if shape == ():
        raise UsageError(f"shard() divides along the first axis, and this {kind} has none", field="data", value=kind)
    if isinstance(shape, tuple):
        return int(shape[0])
    if not isinstance(data, Sized):
        message = f"shard() needs a length, and a {kind} has none; make a list of it, or use itertools.islice"
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
    # Through a list where numpy is missing: torch does not need it, and must then not be asked for from_numpy.
    torch = sys.modules["torch"]
    index = torch.from_numpy(rule.index()) if "numpy" in sys.modules else torch.tensor(list(rule), dtype=torch.int64)
    return data[index.to(data.device)]


def _take_rows(data: Any, rule: _Rule) -> Any:
    return data.iloc[rule.index()]


def _take_polars(data: Any, rule: _Rule) -> Any:
    # Through a list where numpy is missing, which polars does not need.
    return data[rule.index() if rule.order is None or "numpy" in sys.modules else list(rule)]


def _take_selection(data: Any, rule: _Rule) -> Any:
    return data.select(rule.places if rule.order is None else rule.index())


def _take_subset(data: Any, rule: _Rule) -> Any:
    return sys.modules["torch.utils.data"].Subset(data, rule.positions())


class _Library(NamedTuple):
    """Types of a module, by name, and how data of them is taken."""

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
