"""A task's place, and objects that are made once in its process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.errors import ArgumentNotPicklable, InitializerFailed, UsageError
from tests.waiting import lines_of, until


@pytest.fixture(scope="module")
def pool(sky_pools: Callable[..., sky.ComputePool]) -> sky.ComputePool:
    return sky_pools(nodes=2, concurrency=2, logs=False)


def test_outside_a_pool_there_is_no_place() -> None:
    assert sky.instance_info() is None
    assert sky.is_head
    assert sky.is_head()


def test_instance_info_is_correct(pool: sky.ComputePool) -> None:
    infos = sky.compute(sky.instance_info)() @ pool
    for node, info in enumerate(infos):
        assert info is not None
        assert (info.node, info.total_nodes, info.workers_per_node) == (node, 2, 2)
        assert info.worker in (0, 1)
        assert (info.part, info.parts) == (node, 2)
        assert (info.rank, info.local_rank, info.world_size, info.head_port) == (None, None, None, 0)
        assert [(p.node, p.private_ip) for p in info.peers] == [(0, "127.0.0.1"), (1, "127.0.0.1")]
        assert info.head_addr == "127.0.0.1"
        assert info.total_accelerators == 2 * info.accelerators
        assert (info.accelerator is None) == (info.accelerators == 0)
        assert info.network is not None
        assert info.network.interface == "lo"
        assert info.is_head == (node == 0)
    assert infos[0].job_id == infos[1].job_id  # type: ignore[union-attr]


@pytest.mark.parametrize("nodes", [(0, 1), (1, 0), (1,)])
def test_the_workers_of_a_broadcast_are_the_ones_that_run_it(pool: sky.ComputePool, nodes: tuple[int, ...]) -> None:
    def strided() -> list[int]:
        info = sky.instance_info()
        assert info is not None
        return list(range(8))[info.global_worker_index :: info.total_workers]

    shares = sky.compute(strided)() @ pool.nodes(nodes)
    assert sorted(number for share in shares for number in share) == list(range(8)), "two slots a node, one runs it"


def test_a_plain_call_has_the_number_of_its_slot(pool: sky.ComputePool) -> None:
    info = sky.compute(sky.instance_info)() >> pool.node(1)
    assert info is not None
    assert (info.part, info.parts, info.total_workers) == (None, None, 4)
    assert info.global_worker_index == 2 + info.worker


def test_every_slot_has_its_own_number(pool: sky.ComputePool, tmp_path: Path) -> None:
    @sky.compute
    def meet(me: int) -> tuple[int, int, int]:
        (tmp_path / str(me)).touch()
        until(lambda: len(os.listdir(tmp_path)) == 4)
        info = sky.instance_info()
        assert info is not None
        return info.node, info.worker, os.getpid()

    met = sky.gather(*map(meet, range(4))) >> pool
    assert {(n, w) for n, w, _ in met} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert len({pid for *_, pid in met}) == 4


def test_the_head_is_node_0_of_a_broadcast_and_every_plain_call(pool: sky.ComputePool) -> None:
    def is_head() -> bool:
        return bool(sky.is_head)

    assert sky.compute(is_head)() @ pool == [True, False]
    assert [sky.compute(is_head)() >> pool for _ in range(4)] == [True] * 4


def test_a_shard_belongs_to_the_node_in_a_broadcast_and_is_whole_in_a_plain_call(pool: sky.ComputePool) -> None:
    def mine() -> Any:
        return sky.shard(list(range(6)))

    shards = sky.compute(mine)() @ pool
    assert sorted(shards[0] + shards[1]) == list(range(6))
    assert len(shards[0]) == 3
    assert sky.compute(mine)() >> pool == list(range(6))


def test_once_makes_an_object_once_in_each_slot(pool: sky.ComputePool, tmp_path: Path) -> None:
    def use(i: int) -> int:
        def make() -> int:
            with (tmp_path / "made").open("a") as file:
                file.write("made\n")
            return os.getpid()

        return sky.once("test_once", make)

    pids = pool.map(use, range(200), chunk=5)
    assert len(lines_of(tmp_path / "made")) == len(set(pids)) <= 4


def test_the_initializer_runs_before_the_first_call_of_each_slot(tmp_path: Path) -> None:
    def prepare(word: str) -> None:
        os.environ["PREPARED"] = word
        with (tmp_path / "notes").open("a") as file:
            file.write("ran\n")

    with sky.ComputePool(
        sky.Local(), nodes=2, concurrency=2, initializer=prepare, initargs=("well",), logs=False
    ) as pool:
        assert set(pool.map(os.getenv, ["PREPARED"] * 60, chunk=1)) == {"well"}
        assert 2 <= len(lines_of(tmp_path / "notes")) <= 4


def test_an_initializer_that_raises_fails_the_calls_with_a_clear_error() -> None:
    def prepare() -> None:
        raise OSError("no model here")

    with sky.ComputePool(sky.Local(), initializer=prepare, logs=False) as pool:
        for _ in range(2):
            with pytest.raises(InitializerFailed, match="initializer: raised OSError: no model here; "):
                sky.compute(abs)(1) >> pool


def test_an_initializer_that_cannot_be_sent_is_refused() -> None:
    import threading

    lock = threading.Lock()
    with pytest.raises(ArgumentNotPicklable, match="initializer: it or its initargs cannot be sent"):
        sky.ComputePool(sky.Local(), initializer=abs, initargs=(lock,)).start()
    with pytest.raises(UsageError, match="initializer: it and its initargs have .* bytes"):
        sky.ComputePool(sky.Local(), initializer=len, initargs=(b"x" * 10_000_000,)).start()


# JAX warns of every fork after it was imported, as by tests before this one. The child here uses nothing of JAX.
@pytest.mark.filterwarnings("ignore:os.fork.. was called:RuntimeWarning")
def test_the_client_can_fork(pool: sky.ComputePool) -> None:
    """A fork of the client has a closed pool, and leaves the machines to its parent."""
    pid = os.fork()
    if pid == 0:
        os._exit(0 if not pool.is_active else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert sky.compute(abs)(-1) @ pool == [1, 1]
