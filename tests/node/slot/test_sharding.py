"""`shard`: the share of each part, by type, and the source of the part's number."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, assert_type

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyward.errors import UsageError
from skyward.node.slot import sharding
from skyward.node.slot.runtime import RunningCall, current_call, enter_call
from skyward.node.slot.sharding import shard
from skyward.values.topology import InstanceInfo, Rank
from tests.doctests import run_examples

Kind = Literal["plain", "broadcast", "gang"]


def parts_of(*data: Any, total: int, **options: Any) -> list[Any]:
    return [shard(*data, node=node, total_nodes=total, **options) for node in range(total)]


@contextmanager
def call(kind: Kind, *, node: int = 0, total_nodes: int = 1, rank: Rank | None = None) -> Iterator[None]:
    info = InstanceInfo(
        part=rank.rank if rank else None if kind == "plain" else node,
        parts=rank.world_size if rank else None if kind == "plain" else total_nodes,
        node=node,
        worker=0,
        total_nodes=total_nodes,
        workers_per_node=1,
        accelerators=0,
        total_accelerators=0,
        head_addr="127.0.0.1",
        head_port=0,
        job_id="test",
    )
    before = current_call()
    enter_call(RunningCall(task=1, info=info, rank=rank), whole_process=False)
    try:
        yield
    finally:
        enter_call(before, whole_process=False)


def rank_of(rank: int, world_size: int) -> Rank:
    return Rank(
        rank=rank,
        world_size=world_size,
        local_rank=rank % 2,
        local_world_size=2,
        node=rank // 2,
        node_rank=rank // 2,
        nodes=world_size // 2,
        head_addr="127.0.0.1",
        head_port=20_000,
        local_addr="127.0.0.1",
    )


def test_examples_in_docstrings_run() -> None:
    run_examples(sharding)


# --- the rule ---------------------------------------------------------------------------------------------------


@given(n=st.integers(0, 200), total=st.integers(1, 20), shuffle=st.booleans(), seed=st.integers())
def test_parts_are_disjoint_and_complete(n: int, total: int, shuffle: bool, seed: int) -> None:
    parts = parts_of(list(range(n)), total=total, shuffle=shuffle, seed=seed)
    assert sorted(item for part in parts for item in part) == list(range(n))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(n=st.integers(0, 200), total=st.integers(1, 20), shuffle=st.booleans(), seed=st.integers())
def test_drop_last_makes_equal_disjoint_parts(n: int, total: int, shuffle: bool, seed: int) -> None:
    parts = parts_of(list(range(n)), total=total, shuffle=shuffle, seed=seed, drop_last=True)
    assert {len(part) for part in parts} == {n // total}
    kept = [item for part in parts for item in part]
    assert len(set(kept)) == len(kept) == total * (n // total)


@given(
    n=st.integers(0, 120),
    total=st.integers(1, 9),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    seed=st.integers(),
)
def test_aligned_data_of_all_types_stay_aligned(n: int, total: int, shuffle: bool, drop_last: bool, seed: int) -> None:
    import torch

    numbers = list(range(n))
    data = (
        numbers,
        tuple(numbers),
        range(n),
        np.arange(n),
        torch.arange(n),
        pd.Series(numbers, dtype="int64"),
        pd.Index(numbers, dtype="int64"),
    )
    for part in parts_of(*data, total=total, shuffle=shuffle, drop_last=drop_last, seed=seed):
        first, *others = [list(map(int, one)) for one in part]
        assert all(other == first for other in others)


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"shuffle": True, "drop_last": True}])
def test_frames_and_series_of_polars_keep_their_type(options: dict[str, bool]) -> None:
    polars = pytest.importorskip("polars")
    frame = polars.DataFrame({"number": range(7), "text": list("abcdefg")})
    for numbers, rows, series in parts_of(list(range(7)), frame, frame["text"], total=3, **options):
        assert (type(rows), type(series)) == (polars.DataFrame, polars.Series)
        assert rows["number"].to_list() == numbers
        assert series.to_list() == rows["text"].to_list() == ["abcdefg"[number] for number in numbers]


def test_strided_without_shuffle_and_contiguous_with_drop_last() -> None:
    assert parts_of(list(range(7)), total=3) == [[0, 3, 6], [1, 4], [2, 5]]
    assert parts_of(list(range(7)), total=3, drop_last=True) == [[0, 1], [2, 3], [4, 5]]


def test_shuffle_gives_another_order_for_another_seed() -> None:
    orders = {tuple(shard(list(range(20)), shuffle=True, seed=seed)) for seed in range(10)}
    assert len(orders) == 10
    assert tuple(range(20)) not in orders


def test_list_and_array_are_shuffled_alike_in_a_process_without_numpy() -> None:
    program = (
        "import sys\nfrom skyward.node.slot.sharding import shard\n"
        "print(shard(list(range(50)), shuffle=True, seed=9, node=1, total_nodes=3))\n"
        "assert not {'numpy', 'torch', 'pandas', 'datasets'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(shard(np.arange(50), shuffle=True, seed=9, node=1, total_nodes=3).tolist())


# --- types ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [False, True])
def test_each_type_survives(shuffle: bool) -> None:
    import torch
    from scipy import sparse  # type: ignore[import-untyped]

    data: tuple[Any, ...] = (
        [0, 1, 2, 3, 4],
        (0, 1, 2, 3, 4),
        np.zeros((5, 3), dtype=np.float32),
        torch.zeros(5, 2, dtype=torch.bfloat16),
        pd.DataFrame({"a": range(5), "b": list("vwxyz")}, index=list("fghij")),
        pd.Series(range(5), name="s"),
        sparse.csr_matrix(np.eye(5)),
    )
    for whole, part in zip(data, shard(*data, shuffle=shuffle, node=1, total_nodes=2), strict=True):
        assert type(part) is type(whole)
        assert (part.shape[0] if hasattr(part, "shape") else len(part)) == 2
    _, _, array, tensor, frame, series, _ = shard(*data, shuffle=shuffle, node=1, total_nodes=2)
    assert (array.shape, array.dtype) == ((2, 3), np.float32)
    assert (tuple(tensor.shape), tensor.dtype) == ((2, 2), torch.bfloat16)
    assert frame.columns.tolist() == ["a", "b"]
    assert series.name == "s"
    assert [list("fghij")[i] for i in frame["a"]] == frame.index.tolist()


@pytest.mark.parametrize("shuffle", [False, True])
def test_hugging_face_datasets_stay_datasets(shuffle: bool) -> None:
    datasets = pytest.importorskip("datasets")
    numbers = list(range(10))
    whole = datasets.Dataset.from_dict({"x": numbers})
    for part, same in parts_of(whole, numbers, total=3, shuffle=shuffle, seed=4):
        assert isinstance(part, datasets.Dataset)
        assert list(part["x"]) == same


@pytest.mark.parametrize("shuffle", [False, True])
def test_map_style_torch_datasets_become_subsets(shuffle: bool) -> None:
    import torch
    from torch.utils.data import Dataset, TensorDataset

    whole = TensorDataset(torch.arange(10))
    part, same = shard(whole, list(range(10)), shuffle=shuffle, node=1, total_nodes=3)
    assert isinstance(part, Dataset)
    assert [int(part[i][0]) for i in range(len(part))] == same


def test_arrays_are_views_without_shuffle() -> None:
    import torch

    array, tensor = np.arange(6), torch.arange(6)
    shard(array, node=1, total_nodes=2)[:] = -1
    shard(tensor, node=1, total_nodes=2)[:] = -1
    assert array.tolist() == tensor.tolist() == [0, -1, 2, -1, 4, -1]


def test_an_object_with_only_length_and_positions_becomes_a_list() -> None:
    class Squares:
        def __len__(self) -> int:
            return 5

        def __getitem__(self, i: int) -> int:
            if not 0 <= i < 5:
                raise IndexError(i)
            return i * i

    squares: Any = Squares()
    assert shard(squares, node=1, total_nodes=2) == [1, 9]


def test_types_are_kept_by_the_type_checker() -> None:
    one = shard([1, 2, 3])
    assert_type(one, list[int])
    two = shard([1, 2, 3], ("a", "b", "c"), shuffle=True)
    assert_type(two, tuple[list[int], tuple[str, str, str]])
    assert len(shard([1], [2], [3], [4])) == 4


# --- source of the part -----------------------------------------------------------------------------------------


def test_outside_a_pool_everything_is_returned() -> None:
    assert shard([1, 2, 3]) == [1, 2, 3]
    assert sorted(shard([1, 2, 3], shuffle=True)) == [1, 2, 3]
    assert shard([1, 2, 3], drop_last=True) == [1, 2, 3]


def test_plain_call_gets_everything_on_any_node() -> None:
    with call("plain", node=1, total_nodes=2):
        assert shard([1, 2, 3]) == [1, 2, 3]


def test_broadcast_divides_by_node() -> None:
    with call("broadcast", node=1, total_nodes=2):
        assert shard([1, 2, 3]) == [2]


def test_gang_divides_by_rank_and_not_by_node() -> None:
    seen = []
    for rank in range(4):
        with call("gang", node=rank // 2, total_nodes=2, rank=rank_of(rank, 4)):
            seen.append(shard(list(range(8))))
    assert seen == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_explicit_part_wins_over_the_call() -> None:
    with call("broadcast", node=1, total_nodes=2):
        assert shard([1, 2, 3], node=0, total_nodes=3) == [1]


# --- refusals ---------------------------------------------------------------------------------------------------


def test_lengths_that_differ_are_named() -> None:
    with pytest.raises(UsageError, match=r"list 3, ndarray 2"):
        shard([1, 2, 3], np.zeros(2))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"node": 1}, "total_nodes=None"),
        ({"total_nodes": 2}, "node=None"),
        ({"node": 2, "total_nodes": 2}, "below total_nodes="),
        ({"node": -1, "total_nodes": 2}, "below total_nodes="),
        ({"node": 0, "total_nodes": 0}, "below total_nodes="),
        ({"node": 0.0, "total_nodes": 2}, "node=0.0"),
        ({"seed": None}, "seed=None"),
    ],
)
def test_illegal_parts_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        shard([1, 2], **options)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"x": [1]}, "separate arguments"),
        ({1, 2}, "make a list"),
        ("text", "make a list"),
        (iter([1]), "has no length"),
        (3, "has no length"),
        (np.array(1.0), "no axis to divide"),
    ],
)
def test_objects_that_cannot_be_divided_are_refused(data: object, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        shard(data)


def test_nothing_to_divide_is_refused() -> None:
    with pytest.raises(UsageError, match="nothing to divide; pass one"):
        shard()  # type: ignore[call-overload]
