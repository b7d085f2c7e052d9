"""Kept values, and large arguments of actors, on a node with little memory, a full disk, or no room for a value."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.core.limits import default_blob_limit
from skyward.errors import ArgumentNotPicklable, ResultNotPicklable, UsageError
from skyward.values.machine import PoolSpec
from skyward.wire.tasks import NodeConfig
from tests.waiting import open_files, until

SIZE = 3_000_000


@dataclass(frozen=True, kw_only=True)
class SmallMemory(sky.Local):
    """Nodes that keep 4 MB of values in memory, and the folders of these nodes."""

    folders: list[str] = field(default_factory=list)

    def _config(self, spec: PoolSpec, pool: str, node: int) -> NodeConfig:
        config = replace(super()._config(spec, pool, node), blob_limit_bytes=4 << 20)
        self.folders.append(config.folder)
        return config


@sky.compute
def block(letter: bytes) -> bytes:
    return letter * SIZE


@sky.compute
def first(data: bytes) -> bytes:
    return data[:1]


@pytest.fixture
def pool() -> Iterator[sky.ComputePool]:
    with sky.ComputePool(SmallMemory(), nodes=1, logs=False) as pool:
        yield pool


def places(pool: sky.ComputePool) -> tuple[int, int]:
    """Return how many values the agent has in memory and on the disk."""
    files = open_files(pool.agent_pids()[0])
    in_memory = sum("memfd:skyward-kept" in file or "memfd:skyward-blob" in file for file in files)
    return in_memory, sum("/blobs/" in file for file in files)


def test_values_beyond_the_memory_limit_go_to_the_disk_and_are_freed_there(pool: sky.ComputePool) -> None:
    refs: list[sky.Ref[bytes]] = [block(letter).keep() >> pool for letter in (b"a", b"b", b"c")]
    refs.append(pool.put(b"d" * SIZE, nodes=[0]))
    until(lambda: places(pool) == (1, 3))
    assert [first(ref) >> pool for ref in refs] == [b"a", b"b", b"c", b"d"]
    assert refs[0].get() == b"a" * SIZE
    for ref in refs:
        ref.drop()
    until(lambda: places(pool) == (0, 0))


def test_a_node_keeps_old_arguments_only_within_the_limit_that_it_announces(pool: sky.ComputePool) -> None:
    blob_first = first.with_options(retries_on_loss=1)  # without retries the buffers would stay in the client's memory
    for letter in (b"a", b"b", b"c", b"d", b"e"):
        assert blob_first(letter * SIZE) >> pool == letter
    until(lambda: places(pool) == (1, 1))  # as much in its folder as in memory: 8 MiB, which two arguments fit
    assert blob_first(b"f" * 4 * SIZE) >> pool == b"f", "larger than both together"


def test_local_nodes_share_the_memory_of_their_machine() -> None:
    spec = PoolSpec(nodes=2, max_nodes=4)
    configs = sky.Local().plan(spec, sky.Local().offers(spec)[0], "p")
    assert [config.blob_limit_bytes for config in configs] == [default_blob_limit(4)] * 2


def test_a_value_that_a_node_cannot_send_now_is_not_lost(pool: sky.ComputePool) -> None:
    ref = block(b"a").keep() >> pool
    agent = pool.agent_pids()[0]
    before = resource.prlimit(agent, resource.RLIMIT_NOFILE)
    resource.prlimit(agent, resource.RLIMIT_NOFILE, (0, before[1]))
    with pytest.raises(
        UsageError, match=r"ref: node 0 cannot send its 3000\d+ bytes now, for want of a free descriptor"
    ):
        ref.get()
    resource.prlimit(agent, resource.RLIMIT_NOFILE, before)
    assert ref.get() == b"a" * SIZE
    assert first(ref) >> pool == b"a"


def test_on_a_full_disk_values_stay_in_memory(pool: sky.ComputePool) -> None:
    assert isinstance(pool.provider, SmallMemory)
    Path(pool.provider.folders[-1], "blobs").touch()  # no folder can be made there, as on a full disk
    refs = [block(letter).keep() >> pool for letter in (b"a", b"b", b"c")]
    assert [first(ref) >> pool for ref in refs] == [b"a", b"b", b"c"]
    until(lambda: places(pool) == (3, 0))
    del refs
    until(lambda: places(pool) == (0, 0))


def test_a_value_without_room_fails_its_call_and_the_node_goes_on(pool: sky.ComputePool) -> None:
    @sky.compute
    def without_room(limit: int) -> Any:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        return bytes(SIZE)

    with pytest.raises(ResultNotPicklable, match="a bytes without room on the node: File too large"):
        without_room(1 << 20).keep() >> pool
    kept = without_room(resource.RLIM_INFINITY).keep() >> pool
    assert first(kept) >> pool == b"\0"


# Actors -------------------------------------------------------------------------------------------------------------


class Store(sky.ActorBase):
    """Waits for a file, so that the arguments of later calls pile up on the node."""

    @sky.compute
    def wait(self, there: Path) -> None:
        until(there.exists, 60)

    @sky.compute
    def first(self, data: bytes) -> bytes:
        return data[:1]

    @sky.compute
    def block(self, limit: int) -> bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        return bytes(SIZE)


@pytest.mark.parametrize("is_full", [False, True])
def test_large_arguments_of_waiting_calls_go_to_the_disk_or_stay_in_memory(
    pool: sky.ComputePool, tmp_path: Path, is_full: bool
) -> None:
    assert isinstance(pool.provider, SmallMemory)
    if is_full:
        Path(pool.provider.folders[-1], "blobs").touch()  # no folder can be made there, as on a full disk
    with Store() >> pool as store:
        waiting = store.wait(tmp_path / "go") > pool
        futures = [store.first(letter * SIZE) > pool for letter in (b"a", b"b", b"c")]
        until(lambda: places(pool) == ((3, 0) if is_full else (1, 2)))
        (tmp_path / "go").touch()
        assert waiting.result(60) is None
        assert [future.result(60) for future in futures] == [b"a", b"b", b"c"]


def test_an_actor_without_room_for_a_value_fails_that_call_alone(pool: sky.ComputePool) -> None:
    with Store() >> pool as store:
        with pytest.raises(ResultNotPicklable, match="a bytes without room on the node: File too large"):
            store.block(1 << 20) >> pool
        assert len(store.block(resource.RLIM_INFINITY) >> pool) == SIZE


def test_a_task_puts_values_beyond_the_memory_limit_and_is_told_if_there_is_no_room(pool: sky.ComputePool) -> None:
    def many() -> tuple[list[bytes], str]:
        refs = [pool.put(letter * SIZE) for letter in (b"a", b"b", b"c")]
        letters = [ref.get()[:1] for ref in refs]
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
        try:
            pool.put(bytes(SIZE))
        except ArgumentNotPicklable as error:
            return letters, str(error)
        return letters, ""

    letters, why = sky.compute(many)() >> pool
    assert letters == [b"a", b"b", b"c"]
    assert "File too large" in why
    until(lambda: places(pool) == (0, 0))
