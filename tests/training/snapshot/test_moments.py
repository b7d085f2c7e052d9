"""Snapshots of one moment share tensors that neither has to copy twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from skyward.training.checkpoint import CheckpointCoordinator, SharingPattern, StateComponent
from skyward.training.snapshot import Snapshot, SnapshotPool, common_pool


def model_and_optimizer(kind: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    make: dict[str, Any] = {
        "sgd": lambda: torch.optim.SGD(model.parameters(), lr=0.1),
        "adamw": lambda: torch.optim.AdamW(model.parameters(), lr=0.1),
        "foreach": lambda: torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True),
        "fused": lambda: torch.optim.AdamW(model.parameters(), lr=0.1, fused=True),
    }
    return model, make[kind]()


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 3)).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("kind", ["sgd", "adamw", "foreach", "fused"])
def test_tensors_that_were_not_written_since_are_not_copied_again(kind: str) -> None:
    model, optimizer = model_and_optimizer(kind)
    step(model, optimizer)
    pool = SnapshotPool()
    whole = pool.take({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, moment=1)
    weights = pool.take(model.state_dict(), moment=1)
    for name, each in weights.state.items():
        assert each.data_ptr() == whole.state["model"][name].data_ptr()
    whole.release()
    kept = {name: each.clone() for name, each in weights.state.items()}
    step(model, optimizer)
    # Even at the same moment nothing is shared if torch has counted a write. It does not count those of fused
    # optimizers.
    for moment in (2,) if kind == "fused" else (1, 2):
        with pool.take(model.state_dict(), moment=moment) as after:
            assert torch.equal(after.state["0.weight"], model.state_dict()["0.weight"])
            assert not torch.equal(after.state["0.weight"], kept["0.weight"])
    assert all(torch.equal(each, kept[name]) for name, each in weights.state.items()), "it is held, and stays as it was"
    weights.release()


def test_only_buffers_that_are_held_and_of_this_moment_are_shared() -> None:
    pool, live = SnapshotPool(), {"w": torch.ones(3)}
    first = pool.take(live, moment=1)
    place = first.state["w"].data_ptr()
    with pool.take(live, moment=2) as other, pool.take(live) as without:
        assert place not in (other.state["w"].data_ptr(), without.state["w"].data_ptr())
    first.release()
    live["w"].data.add_(1)  # not seen by torch's count, and not needed: the copy is free again
    with pool.take(live, moment=2) as again:
        assert again.state["w"].tolist() == [2, 2, 2]


def test_buffers_are_free_when_all_that_share_them_are_released() -> None:
    pool, live = SnapshotPool(keep=2), {"w": torch.ones(3)}
    first, second = pool.take(live, moment=1), pool.take(live, moment=1)
    place = first.state["w"].data_ptr()
    first.release()
    with pool.take({"v": torch.zeros(3)}) as other:
        assert other.state["v"].data_ptr() != place
    second.release()
    with pool.take({"v": torch.zeros(3)}, moment=2) as one, pool.take({"v": torch.zeros(3)}) as two:
        assert place in (one.state["v"].data_ptr(), two.state["v"].data_ptr())


def test_states_that_take_turns_keep_their_buffers() -> None:
    pool = SnapshotPool(keep=1)
    small, large = {"a": torch.zeros(3)}, {"a": torch.zeros(3), "b": torch.zeros(5)}
    places = set()
    for _ in range(4):
        for each in (small, large):
            with pool.take(each) as taken:
                places |= {tensor.data_ptr() for tensor in taken.state.values()}
    assert len(places) == 2


def test_a_process_has_one_common_pool_while_somebody_holds_it() -> None:
    pool = common_pool()
    assert common_pool(keep=3) is pool


def test_saves_in_the_background_copy_into_the_buffers_of_the_save_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = SnapshotPool.take
    taken: list[list[torch.Tensor]] = []  # held, so that an address is not given out again

    def noted(pool: SnapshotPool, state: Any, **options: Any) -> Snapshot:
        snapshot = take(pool, state, **options)
        taken.append(list(snapshot.state["model"].values()))
        return snapshot

    monkeypatch.setattr(SnapshotPool, "take", noted)
    model = torch.nn.Linear(64, 64)
    coordinator = CheckpointCoordinator([StateComponent("model", model, SharingPattern.REPLICATED)])
    for step in range(3):
        coordinator.save_checkpoint_async(tmp_path / str(step))
        coordinator.wait()
    first, *others = [[tensor.data_ptr() for tensor in tensors] for tensors in taken]
    assert others == [first, first]
