"""Pools that were opened and closed, and starts that failed, leave no resources behind."""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import skyward as sky
from skyward.errors import NoCapacity, NodeError
from skyward.events import Emit
from skyward.node.agent.main import listen_at
from skyward.providers.local import collect_garbage
from skyward.values.machine import Machine, Offer, PoolSpec
from tests.waiting import until

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Sandbox


@sky.compute
def pid() -> int:
    return os.getpid()


def open_files() -> dict[str, str]:
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:  # the one of listdir itself
            continue
    return found


def test_descriptors_and_threads_do_not_grow_over_twenty_pools(inside: Sandbox) -> None:
    def open_and_close() -> None:
        with sky.ComputePool(sky.Local(), nodes=1, logs=False) as pool:
            data = bytes(1 << 20)
            assert (pid() >> pool) > 0
            assert pool.map(len, [data, data]) == [len(data)] * 2

    open_and_close()  # objects that are made once per process are made now
    gc.collect()
    files, threads = open_files(), set(threading.enumerate())
    for _ in range(20):
        open_and_close()
    gc.collect()
    until(lambda: set(threading.enumerate()) <= threads)  # some end a moment after their pool
    assert len(open_files()) <= len(files), {k: v for k, v in open_files().items() if k not in files}
    inside.proves_nothing_is_left()


@dataclass(frozen=True, kw_only=True)
class LosesItsSecondNode(sky.Local):
    """Provider whose second machine dies between its launch and the first contact."""

    def launch(self, spec: PoolSpec, offers: list[Offer], pool: str, nodes: list[int], emit: Emit) -> list[Machine]:
        machines = super().launch(spec, offers, pool, nodes, emit)
        os.kill(machines[1].pid, signal.SIGKILL)
        machines[1].handle.wait()
        until(lambda: not os.path.exists(machines[1].socket_path))  # its agent ends a moment later
        return machines


@dataclass(frozen=True, kw_only=True)
class FailsAtItsSecondNode(sky.Local):
    """Provider that launches one machine and then has no more."""

    def launch(self, spec: PoolSpec, offers: list[Offer], pool: str, nodes: list[int], emit: Emit) -> list[Machine]:
        first = super().launch(spec, offers, pool, nodes[:1], emit)
        for machine in first:
            os.kill(machine.pid, 0)
            machine.handle.kill()  # its watchdog; the rest of the node ends with it
        self.terminate(first)
        raise NoCapacity("local: no second machine")


@pytest.mark.parametrize(
    ("provider", "error"), [(LosesItsSecondNode(), NodeError), (FailsAtItsSecondNode(), NoCapacity)]
)
def test_a_failed_start_leaves_nothing_and_can_be_tried_again(
    inside: Sandbox, provider: sky.Local, error: type[Exception]
) -> None:
    files, threads = len(open_files()), threading.active_count()
    pool = sky.ComputePool(provider, nodes=2, logs=False)
    for _ in range(2):
        with pytest.raises(error):
            pool.start()
        assert not pool.is_active
    inside.proves_nothing_is_left()
    gc.collect()
    until(lambda: threading.active_count() <= threads)  # some end a moment after their pool
    assert len(open_files()) <= files


def test_garbage_of_dead_pools_is_collected_and_live_pools_are_not_touched(inside: Sandbox) -> None:
    with sky.ComputePool(sky.Local(), nodes=1, logs=False) as pool:
        (alive,) = inside.runtime_entries()
        dead = inside.folder / f"skyward-{os.getuid()}" / "pool-dead-0-123456"
        dead.mkdir()
        (dead / "agent.sock").touch()
        starting = dead.with_name("pool-starting-0-123456")
        starting.mkdir()  # an agent that has not made its socket yet looks like this
        assert collect_garbage() == [str(dead)]
        assert inside.runtime_entries() == sorted([alive, starting.name])
        assert (pid() >> pool) > 0
        os.utime(starting, (0, 0))
        assert collect_garbage() == [str(starting)]
    inside.proves_nothing_is_left()


def test_starting_and_busy_nodes_are_not_taken_for_garbage(inside: Sandbox) -> None:
    with sky.ComputePool(sky.Local(), nodes=1, logs=False):  # it makes the folder of all nodes
        (alive,) = inside.runtime_entries()
        folder = inside.folder / f"skyward-{os.getuid()}"
        is_over = threading.Event()
        removed: list[str] = []

        def collect() -> None:
            while not is_over.is_set():
                removed.extend(collect_garbage())

        collector = threading.Thread(target=collect)
        collector.start()
        sockets = []
        for number in range(200):
            node = folder / f"pool-starting-{number}-123456"
            node.mkdir()
            sockets.append(listen_at(str(node / "agent.sock")))
        (folder / "pool-busy-0-123456").mkdir()
        busy = listen_at(path := str(folder / "pool-busy-0-123456" / "agent.sock"))
        busy.listen(0)
        with socket.socket(socket.AF_UNIX) as waiting:  # the only one that may wait
            waiting.connect(path)
            assert collect_garbage() == []
        is_over.set()
        collector.join()
        assert removed == []
        for listener in (*sockets, busy):
            listener.close()
        assert len(collect_garbage()) == 201
        assert inside.runtime_entries() == [alive]
    inside.proves_nothing_is_left()


def test_leftovers_of_a_node_that_was_killed_as_a_whole_are_collected(sandbox: Sandbox, inside: Sandbox) -> None:
    client = sandbox.client("sky.ComputePool(sky.Local(), nodes=1).start()\n(here / 'begun').touch()\ntime.sleep(600)")
    sandbox.waits_for("begun")
    for role in ("standby", "watchdog", "agent"):
        for number in sandbox.pids(role):
            os.kill(number, signal.SIGSTOP)  # none may see the other's end
    killed = [pid for role in ("agent", "watchdog", "standby") for pid in sandbox.pids(role)]
    client.kill()
    for number in killed:
        os.kill(number, signal.SIGKILL)
    while sandbox.processes():
        time.sleep(0.01)
    (left,) = sandbox.runtime_entries()
    assert [Path(path).name for path in collect_garbage()] == [left]
    sandbox.proves_nothing_is_left()
