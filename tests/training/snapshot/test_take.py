"""Snapshots are real copies in reused buffers, shared by their readers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from skyward.training.snapshot import SnapshotPool


def state() -> dict[str, Any]:
    weight = torch.arange(6.0).reshape(2, 3)
    return {
        "weight": weight,
        "tied": weight,
        "turned": weight.T,
        "half": torch.ones(2).bfloat16(),
        "lr": [0.1, {"a": 1}],
    }


def test_later_changes_are_not_in_it() -> None:
    live = state()
    snapshot = SnapshotPool().take(live)
    live["weight"].add_(1)
    live["lr"][1]["a"] = 2
    assert snapshot.state["weight"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert snapshot.state["turned"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert snapshot.state["lr"] == [0.1, {"a": 1}]


def test_a_tensor_with_two_names_is_copied_once() -> None:
    taken = SnapshotPool().take(state()).state
    assert taken["weight"].data_ptr() == taken["tied"].data_ptr()
    assert taken["weight"].data_ptr() != taken["turned"].data_ptr()


def test_buffers_are_reused_after_the_last_release() -> None:
    pool, live = SnapshotPool(), state()
    first = pool.take(live)
    place = first.state["weight"].data_ptr()
    first.retain()
    first.release()
    second = pool.take(live)
    assert second.state["weight"].data_ptr() != place, "a reader holds it"
    first.release()
    with pool.take(live) as third:
        assert third.state["weight"].data_ptr() == place


def test_a_released_snapshot_is_refused() -> None:
    snapshot = SnapshotPool().take(state())
    snapshot.release()
    with pytest.raises(RuntimeError, match="was released"):
        snapshot.retain()
    with pytest.raises(RuntimeError, match="more often than retained"):
        snapshot.release()


def test_other_shapes_get_their_own_buffers() -> None:
    pool = SnapshotPool(keep=1)
    pool.take({"a": torch.zeros(3)}).release()
    taken = pool.take({"a": torch.ones(4), "empty": torch.zeros(0), "sparse": torch.eye(2).to_sparse()})
    assert taken.state["a"].tolist() == [1] * 4
    assert taken.state["empty"].shape == (0,)
    assert taken.state["sparse"].to_dense().tolist() == [[1, 0], [0, 1]]
    pool.clear()
