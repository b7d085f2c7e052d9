"""PyTorch's integration: real process groups between real processes."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import skyward as sky
from skyward.errors import NodeLost, SlotLost, TaskTimeout, UsageError
from skyward.integrations.base import integrate, integrations_of
from skyward.integrations.torch import TorchIntegration
from skyward.pool.pool import ComputePool
from skyward.testing import Faults, IntegrationSuite
from skyward.values.topology import Rank
from tests.few_modules import lean_frameworks
from tests.waiting import until


@pytest.fixture(scope="module")
def torch_pool() -> Iterator[ComputePool]:
    """Open one pool for the whole file, so that its nodes import torch once."""
    with lean_frameworks(), sky.ComputePool(sky.Local(), nodes=2) as pool:
        yield pool


@pytest.fixture(scope="module")
def pool(torch_pool: ComputePool) -> ComputePool:
    return torch_pool


class TestTorchConforms(IntegrationSuite):
    decorator = staticmethod(sky.integrations.torch)
    framework = "torch"

    @pytest.fixture(scope="class")
    @classmethod
    def pool(cls, torch_pool: ComputePool) -> ComputePool:
        return torch_pool

    @staticmethod
    def is_initialized() -> bool:
        return dist.is_initialized()

    @staticmethod
    def place() -> tuple[int, int]:
        return dist.get_rank(), dist.get_world_size()

    @staticmethod
    def total(value: float) -> float:
        tensor = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(tensor)
        return tensor.item()


# Options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"backend": ""}, "backend"),
        ({"backend": 3}, "backend"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**32}, "seed"),
        ({"seed": 1.0}, "seed"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"processes_per_node": "two"}, "processes_per_node"),
    ],
)
def test_an_option_out_of_its_range_is_refused_by_name(options: dict[str, Any], field: str) -> None:
    with pytest.raises(UsageError, match=field):
        sky.integrations.torch(**options)


def test_options_are_shown_on_the_function() -> None:
    @sky.integrations.torch(backend="gloo", processes_per_node="auto", seed=7, timeout_s=60)
    def train() -> None: ...

    (integration,) = integrations_of(train)
    assert integration == TorchIntegration(backend="gloo", processes_per_node="auto", seed=7, timeout_s=60)
    assert integration.ranks_per_node == "auto"


# The environment --------------------------------------------------------------------------------------------------


def rank(**changes: Any) -> Rank:
    values: dict[str, Any] = {
        "rank": 5,
        "world_size": 8,
        "local_rank": 1,
        "local_world_size": 4,
        "node": 3,
        "node_rank": 1,
        "nodes": 2,
        "head_addr": "10.0.0.1",
        "head_port": 21_000,
        "local_addr": "10.0.0.4",
        "interface": "eth1",
    }
    return Rank(**{**values, **changes})


def test_the_environment_is_the_one_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    assert TorchIntegration().environment(rank()) == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "NODE_RANK": "1",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_RANK": "5",
        "ROLE_WORLD_SIZE": "8",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "21000",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": "4",
        "GLOO_SOCKET_IFNAME": "eth1",
        "NCCL_SOCKET_IFNAME": "eth1",
        "TP_SOCKET_IFNAME": "eth1",
    }


def test_the_users_choices_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    environment = TorchIntegration().environment(rank())
    assert "OMP_NUM_THREADS" not in environment
    assert "NCCL_SOCKET_IFNAME" not in environment
    assert environment["GLOO_SOCKET_IFNAME"] == "eth1"


def test_an_unknown_interface_is_not_named() -> None:
    assert not any("IFNAME" in name for name in TorchIntegration().environment(rank(interface="")))


# The group --------------------------------------------------------------------------------------------------------


def test_ranks_of_two_nodes_with_two_processes_know_their_places(pool: ComputePool) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")

    @sky.compute
    @sky.integrations.torch(processes_per_node=2)
    def places() -> list[Any]:
        info = sky.instance_info()
        assert info is not None
        mine: list[Any] = [int(os.environ[name]) for name in names]
        mine += [info.node, info.worker, info.rank, info.local_rank, info.world_size, info.workers_per_node]
        mine += [info.accelerators, (info.head_addr, info.head_port), len(info.peers), dist.get_backend()]
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, mine)
        return gathered

    first, second = places() @ pool
    assert first == second
    port = first[0][12][1]
    tail = [0, ("127.0.0.1", port), 2, "gloo"]
    assert port > 0
    assert first == [
        [0, 4, 0, 2, 0, 0, 0, 0, 0, 4, 2, *tail],
        [1, 4, 1, 2, 0, 0, 1, 1, 1, 4, 2, *tail],
        [2, 4, 0, 2, 1, 1, 0, 2, 0, 4, 2, *tail],
        [3, 4, 1, 2, 1, 1, 1, 3, 1, 4, 2, *tail],
    ]


def test_every_rank_returns_its_value_if_asked_to(pool: ComputePool) -> None:
    @sky.compute
    @sky.integrations.torch(processes_per_node=2, returns="ranks")
    def place() -> tuple[int, int]:
        return dist.get_rank(), dist.get_world_size()

    assert place() @ pool == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert place() >> pool == [(0, 2), (1, 2)]


def test_distributed_data_parallel_averages_gradients(pool: ComputePool) -> None:
    x = torch.linspace(-1, 1, 8 * 3, dtype=torch.float64).reshape(8, 3)
    y = x.sum(1, keepdim=True) ** 2

    @sky.compute
    @sky.integrations.torch(seed=3)
    def gradient() -> tuple[Any, Any]:
        model = torch.nn.Linear(3, 1).double()
        parallel = torch.nn.parallel.DistributedDataParallel(model)
        mine_x, mine_y = sky.shard(x, y)
        torch.nn.functional.mse_loss(parallel(mine_x), mine_y).backward()
        assert model.weight.grad is not None
        return model.weight.detach().numpy(), model.weight.grad.numpy()

    (weight, first), (same_weight, second) = gradient() @ pool
    assert (weight == same_weight).all()  # the seed is the same in every rank
    assert (first == second).all()
    torch.manual_seed(3)
    alone = torch.nn.Linear(3, 1).double()
    assert (alone.weight.detach().numpy() == weight).all()
    # The mean over equal shards is the mean over all.
    torch.nn.functional.mse_loss(alone(x), y).backward()
    assert alone.weight.grad is not None
    np.testing.assert_allclose(first, alone.weight.grad.numpy(), rtol=1e-12)


def test_the_group_is_destroyed_when_the_function_ends_or_raises(pool: ComputePool) -> None:
    def watched(function: Callable[[bool], None]) -> Callable[[bool], tuple[bool, str]]:
        def run(fails: bool) -> tuple[bool, str]:
            try:
                function(fails)
            except ZeroDivisionError:
                return dist.is_initialized(), "raised"
            return dist.is_initialized(), "ended"

        run.__dict__.update(function.__dict__)
        return run

    @sky.compute
    @watched
    @sky.integrations.torch
    def work(fails: bool) -> None:
        assert dist.is_initialized()
        if fails:
            _ = 1 / 0

    assert work(False) @ pool == [(False, "ended")] * 2
    assert work(True) @ pool == [(False, "raised")] * 2


def test_a_function_may_destroy_the_group_itself(pool: ComputePool) -> None:
    @sky.compute
    @sky.integrations.torch
    def work() -> int:
        dist.destroy_process_group()
        return 1

    assert work() @ pool == [1, 1]


def test_a_decorated_function_called_by_another_shares_its_group(pool: ComputePool) -> None:
    @sky.compute
    @sky.integrations.torch
    def evaluate() -> int:
        return dist.get_world_size()

    @sky.compute
    @sky.integrations.torch
    def train() -> tuple[int, bool]:
        return evaluate.local(), dist.is_initialized()

    assert train() @ pool == [(2, True), (2, True)]


def test_a_plain_call_has_no_group(pool: ComputePool) -> None:
    @sky.integrations.torch
    def work() -> bool:
        return dist.is_initialized()

    @sky.compute
    def plain() -> tuple[bool, bool]:
        return work(), "RANK" in os.environ

    assert plain() @ pool == [(False, False)] * 2


def test_a_seed_sets_every_generator_alike(pool: ComputePool) -> None:
    @sky.compute
    @sky.integrations.torch(seed=11)
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), torch.rand(1).item()

    first, second = draw() @ pool
    assert first == second
    assert first == draw() >> pool
    random.seed(11)
    np.random.seed(11)
    torch.manual_seed(11)
    assert first == (random.random(), float(np.random.rand()), torch.rand(1).item())


def test_without_a_seed_ranks_do_not_share_the_state_they_were_forked_with(pool: ComputePool) -> None:
    @sky.compute
    @sky.integrations.torch(processes_per_node=2)
    def draw() -> list[tuple[float, float, float]]:
        mine = (random.random(), float(np.random.rand()), torch.rand(1).item())
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, mine)
        return gathered

    draws = [numbers for _ in range(2) for numbers in (draw() @ pool)[0]]
    assert [len(set(of_one_generator)) for of_one_generator in zip(*draws, strict=True)] == [8, 8, 8]


def test_threads_follow_the_environment(pool: ComputePool) -> None:
    @sky.compute
    @sky.integrations.torch
    def threads() -> tuple[int, int]:
        return torch.get_num_threads(), int(os.environ["OMP_NUM_THREADS"])

    assert all(torchs == set_for_all for torchs, set_for_all in threads() @ pool)


def test_ranks_are_forked_from_a_process_that_has_imported_torch(pool: ComputePool) -> None:
    @sky.compute
    @sky.integrations.torch
    def parents_command() -> bool:
        return b"skyward.node.slot.zygote import main" in Path(f"/proc/{os.getppid()}/cmdline").read_bytes()

    assert parents_command() @ pool == [True, True]

    def seconds() -> float:
        begin = time.perf_counter()
        parents_command() @ pool
        return time.perf_counter() - begin

    # Importing torch alone takes longer in two processes here. A busy machine may delay some calls, but not all.
    assert any(seconds() < 2.0 for _ in range(10))


# Failures ---------------------------------------------------------------------------------------------------------


def test_a_rank_that_raises_is_the_error_though_the_others_wait_for_it(pool: ComputePool) -> None:
    @sky.compute
    @sky.integrations.torch
    def work() -> None:
        if dist.get_rank() == 1:
            raise ValueError("bad batch")
        dist.all_reduce(torch.zeros(1))

    begin = time.monotonic()
    with pytest.raises(ValueError, match="bad batch") as raised:
        work() @ pool
    assert time.monotonic() - begin < 60
    notes = "\n".join(raised.value.__notes__)
    assert "node 1, rank 1" in notes
    assert "Rank 1 of 2 failed first" in notes
    assert "in work" in notes


def test_a_rank_that_keeps_the_group_alive_cannot_delay_the_error(pool: ComputePool) -> None:
    @sky.compute
    @sky.integrations.torch
    def work() -> None:
        if dist.get_rank() == 0:
            pending = dist.all_reduce(torch.zeros(1), async_op=True)
            raise ValueError(f"still waiting: {pending is not None}")
        while True:
            time.sleep(0.01)

    begin = time.monotonic()
    with pytest.raises(ValueError, match="still waiting: True"):
        work() @ pool
    assert time.monotonic() - begin < 60


def test_a_killed_rank_is_named(pool: ComputePool) -> None:
    @sky.compute
    @sky.integrations.torch
    def work() -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.zeros(1))

    begin = time.monotonic()
    with pytest.raises(SlotLost, match="rank 1") as raised:
        work() @ pool
    assert time.monotonic() - begin < 60
    assert (raised.value.signal, raised.value.node) == (signal.SIGKILL, 1)


@dataclass(frozen=True, kw_only=True)
class Speechless(TorchIntegration):
    def environment(self, rank: Rank) -> dict[str, str]:
        raise LookupError("no such network")


def test_an_integration_whose_environment_raises_is_the_error(pool: ComputePool) -> None:
    def work() -> None: ...

    with pytest.raises(LookupError, match="no such network") as raised:
        sky.compute(integrate(work, Speechless()))() @ pool
    notes = "\n".join(raised.value.__notes__)
    assert "in environment" in notes
    assert notes.count("failed first") == 1


def test_after_failures_the_pool_goes_on(pool: ComputePool) -> None:
    @sky.compute
    @sky.integrations.torch
    def ranks() -> float:
        total = torch.ones(1)
        dist.all_reduce(total)
        return total.item()

    assert ranks() @ pool == [2.0, 2.0]


@dataclass(frozen=True, kw_only=True)
class Occupied(TorchIntegration):
    """Integration that binds the rendezvous port of the first launch before torch can, like another program."""

    marker: str

    def environment(self, rank: Rank) -> dict[str, str]:
        if rank.rank == 0 and not os.path.exists(self.marker):
            Path(self.marker).write_text(str(rank.head_port))
            stranger = socket.create_server((rank.head_addr, rank.head_port))
            stranger.detach()  # it stays open as long as the process
        return super().environment(rank)


def test_a_taken_port_makes_the_gang_meet_at_another(pool: ComputePool, tmp_path: Path) -> None:
    marker = tmp_path / "first-port"

    def work() -> tuple[int, str]:
        return dist.get_world_size(), os.environ["MASTER_PORT"]

    function = sky.compute(integrate(work, Occupied(marker=str(marker))))
    (size, port), _ = function() @ pool
    assert size == 2
    assert marker.read_text() != port


def test_a_gang_that_lost_a_process_is_started_again_if_allowed(pool: ComputePool, tmp_path: Path) -> None:
    marker = tmp_path / "died"

    @sky.compute(retries=1)
    @sky.integrations.torch
    def work() -> int:
        if dist.get_rank() == 1 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
        return dist.get_world_size()

    assert work() @ pool == [2, 2]


def stuck(folder: Path) -> Callable[[], None]:
    """Wait as rank 0, in C code that no signal interrupts, for a rank 1 that never comes."""

    def work() -> None:
        (folder / str(os.getpid())).touch()
        if dist.get_rank() == 0:
            dist.all_reduce(torch.zeros(1))
        time.sleep(600)

    return work


def test_a_stuck_gang_ends_at_its_timeout(pool: ComputePool, tmp_path: Path) -> None:
    function = sky.compute(sky.integrations.torch(stuck(tmp_path)))
    notes = ""
    for timeout_s in (5, 15, 45):  # both ranks are at work by then: on a busy machine by a later one
        begin = time.monotonic()
        with pytest.raises(TaskTimeout, match=f"timeout_s={timeout_s} ") as raised:
            function().with_options(timeout_s=timeout_s) @ pool
        assert time.monotonic() - begin < timeout_s + 55
        notes = "\n".join(raised.value.__notes__)
        if "Rank 0 (node 0) waits in all_reduce" in notes:
            break
    assert "Rank 0 (node 0) waits in all_reduce" in notes
    assert "Rank 1 (node 1) is in no collective" in notes
    until(lambda: not any(os.path.exists(f"/proc/{path.name}") for path in tmp_path.iterdir()))


def test_a_cancelled_gang_is_gone_within_seconds(pool: ComputePool, tmp_path: Path) -> None:
    decorate = sky.integrations.torch(processes_per_node=2)
    future = sky.compute(decorate(stuck(tmp_path)))() > pool
    until(lambda: len(list(tmp_path.iterdir())) == 2)
    assert future.cancel()
    until(lambda: not any(os.path.exists(f"/proc/{path.name}") for path in tmp_path.iterdir()))


def test_a_lost_node_ends_the_gang_and_the_next_runs_on_its_replacement(pool: ComputePool, tmp_path: Path) -> None:
    def work(marker: Path) -> int:
        if marker.exists():
            return dist.get_world_size()
        if dist.get_rank() == 1:
            marker.touch()
            time.sleep(600)
        dist.all_reduce(torch.zeros(1))
        return 0

    function = sky.compute(sky.integrations.torch(work))
    marker = tmp_path / "running"
    faults = Faults(pool)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(lambda: function(marker) @ pool)
        until(marker.exists)
        faults.kill_node(1)
        with pytest.raises(NodeLost, match="node 1"):
            running.result(60)
    faults.wait_until_whole()
    assert function(marker) @ pool == [2, 2]


def test_auto_is_one_rank_on_a_node_without_accelerators(pool: ComputePool) -> None:
    @sky.compute
    @sky.integrations.torch(processes_per_node="auto")
    def world() -> tuple[int, str]:
        return dist.get_world_size(), os.environ["LOCAL_WORLD_SIZE"]

    assert world() @ pool == [(2, "1")] * 2


def test_nccl_without_a_gpu_says_what_to_leave_out(pool: ComputePool) -> None:
    @sky.compute
    @sky.integrations.torch(backend="nccl")
    def never() -> None: ...

    with pytest.raises(UsageError, match=r"backend='nccl': node \d has no GPU that torch .*; remove backend="):
        never() @ pool
