"""Copies of a state from the device to host memory beside training: their order, their bytes and their cost."""

from __future__ import annotations

import time

import pytest
import torch

from skyward.training.snapshot import Snapshot, SnapshotPool
from tests.gpu.conftest import Device, Figures

pytestmark = pytest.mark.gpu


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def test_a_snapshot_holds_the_state_at_its_beginning(device: Device) -> None:
    """Earlier work of the stream is in it, and later work waits."""
    size = 4_000_000 if device == "cuda" else 10_000
    state = {"weight": torch.zeros(size, device=device), "strided": torch.zeros(64, 64, device=device).t()[::2]}
    pool, taken = SnapshotPool(), []
    for step in range(6):
        for tensor in state.values():
            tensor.fill_(step)
        taken.append(pool.take(state))
        for tensor in state.values():
            tensor.mul_(-1000).sub_(7)
    for step, snapshot in enumerate(taken):
        for name, tensor in snapshot.state.items():
            assert tensor.device.type == "cpu"
            assert bool((tensor == step).all()), (step, name)
        snapshot.release()


def test_bytes_of_every_type_arrive(device: Device) -> None:
    generator = torch.Generator(device).manual_seed(3)
    state = {
        str(dtype): torch.randn(1000, device=device, generator=generator).to(dtype)
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.bool)
    }
    with SnapshotPool().take({"nested": [state, 5]}) as snapshot:
        copies = snapshot.state["nested"][0]
        for name, tensor in state.items():
            assert torch.equal(copies[name], tensor.cpu()), name


def test_buffers_are_pinned_and_used_again(device: Device) -> None:
    state, pool = {"weight": torch.ones(1000, device=device)}, SnapshotPool()
    with pool.take(state) as first:
        address = first.state["weight"].data_ptr()
        assert first.state["weight"].is_pinned() == (device == "cuda")
    with pool.take(state) as second:
        assert second.state["weight"].data_ptr() == address


def test_the_host_is_not_blocked(device: Device, figures: Figures) -> None:
    """Time the second copy of 1 GiB, because the first one pins its memory. Steps go on meanwhile."""
    mib = 1024 if device == "cuda" else 16
    state = {str(at): torch.ones(mib * 2**20 // 4 // 32, device=device) for at in range(32)}
    pool = SnapshotPool()
    began = time.perf_counter()
    with pool.take(state) as snapshot:
        assert snapshot.state
    figures("first copy, s", round(time.perf_counter() - began, 3))
    synchronize(device)
    began = time.perf_counter()
    plain = {name: tensor.cpu() for name, tensor in state.items()}
    blocking_s = time.perf_counter() - began
    began = time.perf_counter()
    snapshot = pool.take(state)
    taken_s = time.perf_counter() - began
    copies = snapshot.state
    done_s = time.perf_counter() - began
    assert all(torch.equal(copies[name], plain[name]) for name in plain)
    snapshot.release()
    figures("MiB", mib)
    figures("state.cpu(), ms", round(blocking_s * 1e3, 2))
    figures("take() returns after, ms", round(taken_s * 1e3, 2))
    figures("copy done after, ms", round(done_s * 1e3, 2))
    figures("GB/s", round(mib * 2**20 / done_s / 1e9, 1))
    if device == "cuda":
        assert taken_s < blocking_s / 4


def test_steps_go_on_while_a_state_is_copied(device: Device, figures: Figures) -> None:
    """Compare training steps with a snapshot every tenth step and without."""
    width = 4096 if device == "cuda" else 128
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(4))).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x = torch.randn(512 if device == "cuda" else 16, width, device=device)
    pool = SnapshotPool()
    held: list[Snapshot] = []

    def run(steps: int, every: int) -> float:
        synchronize(device)
        began = time.perf_counter()
        for step in range(steps):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if every and step % every == 0:
                held.append(pool.take(model.state_dict()))
                if len(held) > 1:
                    held.pop(0).release()  # its copy was done long ago
        synchronize(device)
        return time.perf_counter() - began

    run(10, 5)  # warm up
    alone_s, beside_s = run(50, 0), run(50, 10)
    figures("50 steps, s", round(alone_s, 3))
    figures("with 5 snapshots, s", round(beside_s, 3))
    figures("MiB of a snapshot", round(sum(each.numel() * 4 for each in model.parameters()) / 2**20))
