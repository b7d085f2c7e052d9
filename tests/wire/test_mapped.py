"""Memory-mapped arrays travel as the name of their file."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skyward.wire.blobs import Blob
from skyward.wire.mapped import reduce_mapped
from skyward.wire.payloads import decode, encode
from skyward.wire.tasks import parse

Array = np.ndarray[Any, Any]

VIEWS: dict[str, Callable[[Any], Any]] = {
    "whole": lambda x: x,
    "rows": lambda x: x[3:7],
    "one row": lambda x: x[4],
    "columns": lambda x: x[:, 2:5],
    "every other": lambda x: x[::2, ::3],
    "backwards": lambda x: x[::-1, ::-2],
    "transposed": lambda x: x.T,
    "plain": lambda x: np.asarray(x)[2:],
    "other dtype": lambda x: x.view(np.int64)[1:],
    "broadcast": lambda x: np.broadcast_to(x[1], (4, 8)),
    "empty": lambda x: x[5:5],
    "no dimension": lambda x: x[2:3, 1:2].reshape(()),
}


def travelled(value: Any) -> Any:
    encoded = encode(value, Blob.snapshot, reduce=reduce_mapped)
    assert not encoded.blobs
    return decode(parse(encoded.body), [])


@pytest.fixture(params=["C", "F"])
def mapped(request: pytest.FixtureRequest, tmp_path: Path) -> Array:
    x = np.memmap(tmp_path / "x", np.float64, "w+", offset=4104, shape=(10, 8), order=request.param)
    x[:] = np.arange(80).reshape(10, 8)
    return x


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_every_view_of_a_file_arrives_unchanged(mapped: Array, view: Callable[[Any], Any]) -> None:
    sent = view(mapped)
    found = travelled(sent)
    np.testing.assert_array_equal(found, sent)
    assert (found.dtype, found.shape, found.flags.writeable) == (sent.dtype, sent.shape, sent.flags.writeable)
    if sent.size:
        assert found.strides == sent.strides
        assert isinstance(found, np.memmap) == (isinstance(sent, np.memmap) and sent.flags.forc)


def test_writes_to_the_array_reach_the_file(mapped: Array) -> None:
    found = travelled([mapped[6], mapped[::-1]])
    found[0][:] = -1.0
    found[1][0, 0] = -2.0
    assert mapped[6].tolist() == [-1.0] * 8
    assert mapped[9, 0] == -2.0


@pytest.mark.parametrize(("mode", "writeable"), [("r", False), ("r+", True)])
def test_the_file_is_opened_in_the_same_mode_as_here(mapped: Array, tmp_path: Path, mode: Any, writeable: bool) -> None:
    found = travelled(np.memmap(tmp_path / "x", np.float64, mode, offset=4104, shape=(10, 8)))
    assert found.flags.writeable == writeable


def test_a_read_only_view_is_read_only_there(mapped: Array) -> None:
    view = mapped[2:]
    view.flags.writeable = False
    assert not travelled(view).flags.writeable


def test_changes_that_are_not_in_the_file_travel_with_the_data(mapped: Array, tmp_path: Path) -> None:
    private = np.memmap(tmp_path / "x", np.float64, "c", offset=4104, shape=(10, 8))
    private[:] = 5.0
    assert reduce_mapped(private) is None


def test_a_deleted_file_is_not_referred_to(mapped: Array, tmp_path: Path) -> None:
    (tmp_path / "x").unlink()
    assert reduce_mapped(mapped) is None


@pytest.mark.parametrize("value", [np.arange(5), np.array([None]), [1], "x"], ids=["array", "objects", "list", "text"])
def test_all_other_arrays_are_left_alone(value: Any) -> None:
    assert reduce_mapped(value) is None


def test_pickles_are_small(mapped: Array) -> None:
    assert len(pickle.dumps(reduce_mapped(mapped)[1])) < 500
