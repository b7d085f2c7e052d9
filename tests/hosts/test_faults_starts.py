"""The start of a node whose ssh connection dies during it: it continues, or nothing of it is left."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import skyward as sky
from skyward.bootstrap.prepare import prepare
from skyward.bootstrap.scripts import undo
from skyward.errors import NodeLost
from skyward.events import Event, NodeReplaced, PhaseStarted, PoolReady, ignore
from skyward.providers.node_setup import python_line
from skyward.ssh import connect
from skyward.ssh.connect import Transport
from skyward.wire.tasks import NodeConfig
from tests.hosts.bed import pids_in
from tests.hosts.faults import Place, kill, nothing_runs_on, pids
from tests.hosts.host import Host
from tests.waiting import until

pytestmark = pytest.mark.hosts

Places = Callable[[int], Place]


def cut(host: Host) -> int:
    """Kill the processes of all current log-ins. Returns how many there were."""
    killed = 0
    for entry in filter(str.isdigit, os.listdir("/proc")):  # not by `pids`: it must be quick
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{entry}/cmdline").read_bytes()
            is_log_in = command.startswith(b"sshd: ") and b"[listener]" not in command
            if is_log_in and int(entry) in pids_in(host.machine):
                os.kill(int(entry), signal.SIGKILL)
                killed += 1
    return killed


class Cutter:
    """Thread that kills the log-ins once, that many seconds after a phase of the next start has begun."""

    def __init__(self, host: Host) -> None:
        self.cuts = 0
        self._host = host
        self._phase: str | None = None
        self._after_s = 0.0
        self._threads: list[threading.Thread] = []

    def aim(self, phase: str, after_s: float) -> None:
        self._phase, self._after_s = phase, after_s

    def __call__(self, event: Event) -> None:
        if isinstance(event, PhaseStarted) and event.phase == self._phase:
            self._phase = None
            self._threads.append(threading.Thread(target=self._cut, args=(self._after_s,)))
            self._threads[-1].start()

    def _cut(self, after_s: float) -> None:
        time.sleep(after_s)
        self.cuts += cut(self._host)

    def join(self) -> None:
        for thread in self._threads:
            thread.join()


@pytest.fixture
def lone(place: Places) -> Iterator[Place]:
    """Return one host, on which nothing runs at the end."""
    here = place(1)
    yield here
    nothing_runs_on(here.hosts)


OPENSSH = {"connect": (0.1,), "probe": (0.0, 0.1), "agent": (0.0, 0.05, 0.1, 0.15, 0.2)}
PARAMIKO = {"probe": (0.1,), "agent": (0.05, 0.15)}


@pytest.mark.slow
@pytest.mark.parametrize(("transport", "times"), [("openssh", OPENSSH), ("paramiko", PARAMIKO)])
def test_a_replacement_continues_whenever_its_connection_dies(
    lone: Place, transport: Transport, times: dict[str, tuple[float, ...]]
) -> None:
    cutter, (host,) = Cutter(lone.hosts[0]), lone.hosts
    replaced: list[NodeReplaced] = []

    def on_event(event: Event) -> None:
        cutter(event)
        if isinstance(event, NodeReplaced):
            replaced.append(event)

    moments = [(phase, after_s) for phase, seconds in times.items() for after_s in seconds]
    with lone.pool(transport=transport, on_event=on_event) as pool:
        for turn, (phase, after_s) in enumerate(moments):
            cutter.aim(phase, after_s)
            kill(host, "agent")
            until(lambda turn=turn: len(replaced) > turn, within_s=60)  # type: ignore[misc]
            cutter.join()
            (agent,) = pool.agent_pids().values()
            until(lambda agent=agent: [p.pid for p in pids(host, "agent")] == [agent])  # type: ignore[misc]
            with contextlib.suppress(NodeLost):
                assert sky.compute(abs)(-turn) >> pool == turn
    assert cutter.cuts >= len(moments) - 1


@pytest.mark.parametrize("phase", ["probe", "agent"])
def test_a_pool_that_is_closed_while_it_replaces_a_node_leaves_nothing(lone: Place, phase: str) -> None:
    is_replacing = threading.Event()

    def on_event(event: Event) -> None:
        if isinstance(event, PoolReady):
            is_open.set()
        elif isinstance(event, PhaseStarted) and event.phase == phase and is_open.is_set():
            is_replacing.set()

    is_open = threading.Event()
    with lone.pool(on_event=on_event):
        kill(lone.hosts[0], "agent")
        assert is_replacing.wait(60)


def test_an_agents_start_that_comes_too_late_starts_nothing(lone: Place) -> None:
    """The command was in flight when the connection died, and begins after the node's processes were ended."""
    (host,) = lone.hosts
    with contextlib.closing(connect(lone.ssh().targets[0])) as connection:
        ready = prepare(connection.run, lone.image, emit=ignore, node=0, folder="late")
        undo(connection.run, ["late"])
        config = NodeConfig(
            pool="late",
            node=0,
            folder=ready.folder,
            slots=1,
            python=ready.python,
            path=ready.path,
            cwd=ready.cwd,
            env=(),
        )
        done = connection.run(
            python_line((ready.agent_python,), ready.agent_path, "start"), input=pickle.dumps(config), timeout_s=60
        )
    assert done.code == 1
    assert "was removed" in done.error_text
    assert not host.path(ready.folder).exists()
