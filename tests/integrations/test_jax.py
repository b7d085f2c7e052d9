"""JAX's integration: one program over several real processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import NamedSharding, PartitionSpec

import skyward as sky
from skyward.errors import GangHung, SlotLost, UsageError
from skyward.integrations.base import integrate, integrations_of
from skyward.integrations.jax import JaxIntegration
from skyward.pool.pool import ComputePool
from skyward.testing import IntegrationSuite
from skyward.values.topology import Rank
from tests.waiting import until

Keeps = Callable[[Callable[[], None]], Callable[[], None]]


@pytest.fixture(scope="module")
def jax_pool() -> Iterator[ComputePool]:
    """Open one pool for the whole file, so that its nodes import JAX once."""
    with sky.ComputePool(sky.Local(), nodes=2) as pool:
        yield pool


@pytest.fixture(scope="module")
def pool(jax_pool: ComputePool) -> ComputePool:
    return jax_pool


class TestJaxConforms(IntegrationSuite):
    decorator = staticmethod(sky.integrations.jax)
    framework = "jax"

    @pytest.fixture(scope="class")
    @classmethod
    def pool(cls, jax_pool: ComputePool) -> ComputePool:
        return jax_pool

    @staticmethod
    def is_initialized() -> bool:
        return bool(jax.distributed.is_initialized())

    @staticmethod
    def place() -> tuple[int, int]:
        return jax.process_index(), jax.process_count()

    @staticmethod
    def total(value: float) -> float:
        return float(process_allgather(jnp.asarray(value)).sum())


# Options and environment ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, -1, True, 1.0, "two"])
def test_an_impossible_number_of_devices_is_refused(count: Any) -> None:
    with pytest.raises(UsageError, match="local_device_count"):
        sky.integrations.jax(local_device_count=count)


def test_options_are_shown_on_the_function() -> None:
    @sky.integrations.jax(processes_per_node="auto", local_device_count=4)
    def train() -> None: ...

    (integration,) = integrations_of(train)
    assert integration == JaxIntegration(processes_per_node="auto", local_device_count=4)
    assert integration.ranks_per_node == "auto"


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


@pytest.fixture
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if "proxy" in name.lower() or name.startswith(("OMP_", "PJRT_", "NCCL_", "JAX_")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(os, "cpu_count", lambda: 16)


@pytest.mark.usefixtures("_plain")
def test_the_environment_says_where_the_ranks_meet() -> None:
    assert JaxIntegration().environment(rank()) == {
        "JAX_COORDINATOR_ADDRESS": "10.0.0.1:20999",
        "JAX_NUM_PROCESSES": "8",
        "JAX_PROCESS_ID": "5",
        "JAX_LOCAL_DEVICE_COUNT": "1",
        "PJRT_NPROC": "4",
        "NCCL_SOCKET_IFNAME": "eth1",
    }
    environment = JaxIntegration().environment(rank(head_addr="fd00::1", interface=""))
    assert environment["JAX_COORDINATOR_ADDRESS"] == "[fd00::1]:20999"
    assert "NCCL_SOCKET_IFNAME" not in environment


@pytest.mark.usefixtures("_plain")
def test_the_users_choices_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJRT_NPROC", "3")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    assert not {"PJRT_NPROC", "NCCL_SOCKET_IFNAME"} & JaxIntegration().environment(rank()).keys()


@pytest.mark.usefixtures("_plain")
@pytest.mark.parametrize(
    ("accelerators", "own", "ids"), [(2, (0, 1), None), (4, (1, 3), "1,3"), (1, (0,), None), (0, (), None)]
)
def test_a_rank_uses_its_own_devices_only(accelerators: int, own: tuple[int, ...], ids: str | None) -> None:
    environment = JaxIntegration().environment(rank(accelerators=accelerators, devices=own))
    assert environment.get("JAX_LOCAL_DEVICE_IDS") == ids, "named if it sees those of its neighbours too"
    assert environment["JAX_LOCAL_DEVICE_COUNT"] == str(len(own) or 1)


@pytest.mark.usefixtures("_plain")
def test_the_number_of_devices_is_reported_as_the_rank_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def count(**options: Any) -> str:
        return JaxIntegration(**options).environment(rank(local_rank=0, local_world_size=1))["JAX_LOCAL_DEVICE_COUNT"]

    assert count(local_device_count=4) == "4"
    assert JaxIntegration(local_device_count=4).environment(rank())["JAX_NUM_CPU_DEVICES"] == "4"
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "3")
    assert (count(), count(local_device_count=4)) == ("3", "4")


@pytest.mark.usefixtures("_plain")
def test_ranks_on_one_accelerator_do_not_preallocate_its_memory() -> None:
    name = "XLA_PYTHON_CLIENT_PREALLOCATE"
    assert JaxIntegration().environment(rank(accelerators=2, shares_devices=True))[name] == "false"
    assert name not in JaxIntegration().environment(rank(accelerators=4))


@pytest.mark.usefixtures("_plain")
def test_the_coordinator_is_reached_past_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    assert JaxIntegration().environment(rank())["no_grpc_proxy"] == "10.0.0.1"
    monkeypatch.setenv("no_proxy", "localhost")
    assert JaxIntegration().environment(rank())["no_grpc_proxy"] == "localhost,10.0.0.1"


# The world --------------------------------------------------------------------------------------------------------


def test_a_psum_covers_the_devices_of_all_nodes(pool: ComputePool) -> None:
    @sky.compute
    @sky.integrations.jax(local_device_count=2)
    def sums() -> tuple[list[int], list[float], float]:
        counts = [jax.device_count(), jax.local_device_count(), jax.process_count()]
        mine = jnp.arange(2.0) + 10 * jax.process_index()
        by_pmap = jax.pmap(lambda x: jax.lax.psum(x, "all"), axis_name="all")(mine)

        mesh = jax.make_mesh((jax.device_count(),), ("all",))
        whole = jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec("all")), np.asarray(mine))
        by_shard_map = jax.jit(
            jax.shard_map(
                lambda x: jax.lax.psum(x, "all"), mesh=mesh, in_specs=PartitionSpec("all"), out_specs=PartitionSpec()
            )
        )(whole)
        return counts, np.asarray(by_pmap.addressable_shards[0].data).tolist(), by_shard_map.item()

    # 0 + 1 on the first node, 10 + 11 on the second.
    assert sums() @ pool == [([4, 2, 2], [22.0], 22.0)] * 2
    assert sums() @ pool == [([4, 2, 2], [22.0], 22.0)] * 2  # the second broadcast too
    assert sums() >> pool == ([2, 2, 1], [1.0], 1.0)


def test_gradients_of_a_sharded_batch_equal_those_of_the_whole(pool: ComputePool) -> None:
    x = np.linspace(-1, 1, 8 * 3, dtype=np.float32).reshape(8, 3)
    y = (x.sum(1) ** 2).astype(np.float32)

    def loss(weight: Any, x: Any, y: Any) -> Any:
        return jnp.mean((x @ weight - y) ** 2)

    @sky.compute
    @sky.integrations.jax
    def gradient() -> Any:
        mesh = jax.make_mesh((jax.device_count(),), ("data",))
        rows = NamedSharding(mesh, PartitionSpec("data"))
        mine_x, mine_y = sky.shard(x, y)
        whole = [jax.make_array_from_process_local_data(rows, part) for part in (mine_x, mine_y)]
        weight = jax.device_put(np.ones(3, np.float32), NamedSharding(mesh, PartitionSpec()))
        return np.asarray(jax.jit(jax.grad(loss))(weight, *whole))

    first, second = gradient() @ pool
    assert (first == second).all()
    np.testing.assert_allclose(first, jax.grad(loss)(jnp.ones(3), x, y), rtol=1e-5)


def test_arrays_may_be_arguments_values_and_closures(pool: ComputePool) -> None:
    two = jnp.full(3, 2.0)

    @sky.compute
    @sky.integrations.jax
    def scaled(x: Any) -> Any:
        return two * x * jax.process_count()

    values = scaled(jnp.arange(3.0)) @ pool
    assert [value.tolist() for value in values] == [[0.0, 4.0, 8.0]] * 2


def test_a_pending_value_is_computed_before_the_ranks_part(pool: ComputePool) -> None:
    @sky.compute
    @sky.integrations.jax
    def later() -> Any:
        x = jax.pmap(lambda x: jax.lax.fori_loop(0, 100, lambda _, y: jnp.tanh(y @ y), x))(jnp.ones((1, 300, 300)))
        sums = jax.pmap(lambda x: jax.lax.psum(jnp.ones_like(x), "i").sum(), axis_name="i")(x)
        return sums.addressable_shards[0].data

    assert [float(value[0]) for value in later() @ pool] == [2 * 300.0 * 300.0] * 2


@dataclass(frozen=True, kw_only=True)
class Chosen(JaxIntegration):
    def environment(self, rank: Rank) -> dict[str, str]:
        chosen = {"JAX_ENABLE_X64": "true", "JAX_NUM_CPU_DEVICES": "3", "JAX_PLATFORMS": "cpu"}
        return {**super().environment(rank), **chosen}


def test_variables_of_the_rank_are_read_though_the_rank_was_forked_with_jax(pool: ComputePool) -> None:
    def work() -> tuple[str, int, str]:
        return str(jnp.ones(1, dtype=float).dtype), jax.local_device_count(), jax.config.values["jax_platforms"]

    assert sky.compute(integrate(work, Chosen()))() @ pool == [("float64", 3, "cpu")] * 2


def test_ranks_are_forked_from_a_process_that_has_imported_jax(pool: ComputePool) -> None:
    @sky.compute
    @sky.integrations.jax
    def parents_command() -> bool:
        return b"skyward.node.slot.zygote import main" in Path(f"/proc/{os.getppid()}/cmdline").read_bytes()

    assert parents_command() @ pool == [True, True]


def test_no_port_is_open_beyond_the_private_network(pool: ComputePool) -> None:
    @sky.compute
    @sky.integrations.jax
    def addresses() -> set[str]:
        process_allgather(jnp.ones(1))
        connections = psutil.Process().net_connections("inet")
        return {connection.laddr.ip.removeprefix("::ffff:") for connection in connections}

    assert addresses() @ pool == [{"127.0.0.1"}] * 2


def test_a_rank_has_its_share_of_threads(pool: ComputePool) -> None:
    @sky.compute
    @sky.integrations.jax
    def threads() -> bool:
        return os.environ["PJRT_NPROC"] == os.environ["OMP_NUM_THREADS"]

    assert threads() @ pool == [True, True]


def test_auto_is_one_rank_on_a_node_without_accelerators(pool: ComputePool) -> None:
    @sky.compute
    @sky.integrations.jax(processes_per_node="auto")
    def world() -> int:
        return int(jax.process_count())

    assert world() @ pool == [2, 2]


def test_a_function_may_shut_jax_down_itself(pool: ComputePool) -> None:
    @sky.compute
    @sky.integrations.jax
    def work() -> int:
        jax.distributed.shutdown()
        return 1

    assert work() @ pool == [1, 1]


# Failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_raises_is_the_error_though_the_others_wait_for_it(pool: ComputePool, failing: int) -> None:
    @sky.compute
    @sky.integrations.jax(processes_per_node=2)
    def work() -> None:
        process_allgather(jnp.ones(1))
        if jax.process_index() == failing:
            raise LookupError("bad batch")
        process_allgather(jnp.ones(1))

    begin = time.monotonic()
    with pytest.raises(LookupError, match="bad batch") as raised:
        work() @ pool
    assert time.monotonic() - begin < 60
    notes = "\n".join(raised.value.__notes__)
    assert f"rank {failing}" in notes
    assert f"Rank {failing} of 4 failed first" in notes
    assert "in work" in notes


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("show", [lambda function: function, sky.silent], ids=["shown", "silent"])
def test_a_rank_that_raises_after_the_others_are_done_is_the_error(
    pool: ComputePool, failing: int, show: Keeps
) -> None:
    @sky.compute
    @sky.integrations.jax
    @show
    def work() -> None:
        if jax.process_index() == failing:
            time.sleep(0.3)  # the other one is leaving
            raise LookupError("late")

    begin = time.monotonic()
    with pytest.raises(LookupError, match="late"):
        work() @ pool
    assert time.monotonic() - begin < 60


@pytest.mark.parametrize("failing", [0, 1])
def test_a_killed_rank_is_named(pool: ComputePool, failing: int) -> None:
    @sky.compute
    @sky.integrations.jax
    def work() -> None:
        process_allgather(jnp.ones(1))
        if jax.process_index() == failing:
            os.kill(os.getpid(), signal.SIGKILL)
        process_allgather(jnp.ones(1))

    begin = time.monotonic()
    with pytest.raises(SlotLost, match=f"rank {failing}") as raised:
        work() @ pool
    assert time.monotonic() - begin < 60
    assert (raised.value.signal, raised.value.node) == (signal.SIGKILL, failing)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_aborts_is_named_though_jax_aborts_others_too(pool: ComputePool, failing: int) -> None:
    @sky.compute
    @sky.integrations.jax(processes_per_node=2)
    def work() -> None:
        process_allgather(jnp.ones(1))
        if jax.process_index() == failing:
            os.abort()
        process_allgather(jnp.ones(1))

    with pytest.raises(SlotLost, match=f"rank {failing}") as raised:
        work() @ pool
    assert raised.value.signal == signal.SIGABRT
    assert "in work\n" in raised.value.__notes__[0]  # the Python stack of the crash


def test_after_failures_the_pool_goes_on(pool: ComputePool) -> None:
    @sky.compute
    @sky.integrations.jax
    def total() -> float:
        return float(process_allgather(jnp.ones(1)).sum())

    assert total() @ pool == [2.0, 2.0]


@dataclass(frozen=True, kw_only=True)
class Occupied(JaxIntegration):
    """Integration that takes the rendezvous port of the first launch before JAX can, like another program."""

    marker: str

    def environment(self, rank: Rank) -> dict[str, str]:
        import socket

        environment = super().environment(rank)
        if rank.rank == 0 and not os.path.exists(self.marker):
            _, _, port = environment["JAX_COORDINATOR_ADDRESS"].rpartition(":")
            Path(self.marker).write_text(port)
            stranger = socket.create_server((rank.head_addr, int(port)))
            stranger.detach()  # it stays open as long as the process
        return environment


def test_a_taken_port_makes_the_gang_meet_at_another(pool: ComputePool, tmp_path: Path) -> None:
    marker = tmp_path / "first-port"

    def work() -> tuple[int, str]:
        return jax.process_count(), os.environ["JAX_COORDINATOR_ADDRESS"]

    function = sky.compute(integrate(work, Occupied(marker=str(marker))))
    (size, address), _ = function() @ pool
    assert size == 2
    assert marker.read_text() != address.rpartition(":")[2]


def test_a_stuck_gang_is_gone_when_it_is_cancelled(pool: ComputePool, tmp_path: Path) -> None:
    def stuck() -> None:
        (tmp_path / str(os.getpid())).touch()
        if jax.process_index() == 0:
            process_allgather(jnp.ones(1))  # the other never comes
        time.sleep(600)

    future = sky.compute(sky.integrations.jax(processes_per_node=2)(stuck))() > pool
    until(lambda: len(list(tmp_path.iterdir())) == 2)
    assert future.cancel()
    until(lambda: not any(os.path.exists(f"/proc/{path.name}") for path in tmp_path.iterdir()))


def test_a_missing_rank_is_named(pool: ComputePool) -> None:
    def work() -> None:
        if jax.process_index() == 1:
            time.sleep(600)
        process_allgather(jnp.ones(1))

    with pytest.raises(GangHung, match="rank 1 .node 1. is in no collective") as raised:
        sky.compute(hang_timeout_s=1)(sky.integrations.jax(work))() @ pool
    assert "in process_allgather at" in str(raised.value)
