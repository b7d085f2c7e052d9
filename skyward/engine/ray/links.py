"""The head's side of links by Ray: connections to the driver, which carries them to the nodes."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence

from ...errors import Unreachable
from ...values.machine import Machine
from ..dialler import Connect, DialledEnds
from ..threads import in_words, start_thread

_log = logging.getLogger(__name__)

_LOOK_S = 0.02
_CONNECT_S = 2.0
"""Longest wait in seconds for the driver to take a connection. It is short: there is another way, and leases go on."""
_PREPARE_S = 90.0
"""Longest wait in seconds for a bridge: the driver gives up earlier."""
_AGAIN_S = 3.0
"""Pause in seconds before a bridge is asked for again."""
_LOOK_AGAIN_S = 1.0
"""Seconds in which a link moves to Ray."""


class RayEnds(DialledEnds):
    """Connection to the driver that leads to the agent of a node.

    Args:
        driver: Path of the driver's socket.
        agent: Path of the agent's socket on its node.

    Raises:
        Unreachable: There is no driver.
    """

    def __init__(self, driver: str, agent: str) -> None:
        self._driver = driver
        self._ident = os.urandom(8).hex()
        self._sock = _asked(driver, {"id": self._ident, "agent": agent})
        self._said = ""
        self.on_broken: Callable[[], object] = lambda: None
        """Called when the connection has ended and nobody says that there is no agent."""
        fd = self._sock.fileno()
        super().__init__(fd, fd)

    def said(self) -> str:
        """Return what the driver has said about the end of the connection."""
        return self._said

    def exit_code(self, limit_s: float) -> int | None:
        """Return how the connection ended on the node: 0 at its end, 69 without an agent, None if it broke."""
        code = self._exit_code(limit_s)
        if code is None:
            self.on_broken()
        return code

    def _exit_code(self, limit_s: float) -> int | None:
        deadline = time.monotonic() + limit_s
        while (left_s := deadline - time.monotonic()) > 0:
            try:
                with _asked(self._driver, {"ended": self._ident}) as asked:
                    asked.settimeout(left_s)
                    ended = json.loads(asked.makefile("rb").readline() or b"{}")
            except (OSError, ValueError, Unreachable):  # the driver has died, or does not answer
                return None
            if ended:
                self._said = ended["said"]
                return None if ended["code"] is None else int(ended["code"])
            time.sleep(_LOOK_S)
        return None

    def kill(self) -> None:
        """End the connection at once. Any thread may call this; the reader then sees the end of the stream."""
        with contextlib.suppress(OSError):  # has ended
            self._sock.shutdown(socket.SHUT_RDWR)

    def finish(self, deadline: float) -> None:
        """Close the sending direction, and wait until the agent has read all, or `deadline` (monotonic) has passed."""
        with contextlib.suppress(OSError):  # has ended
            self._sock.shutdown(socket.SHUT_WR)
            self._sock.settimeout(max(0.0, deadline - time.monotonic()))
            while self._sock.recv(65536):
                continue

    def close(self) -> None:
        self.read_fd = self.write_fd = -1
        self._sock.close()

    def close_in_child(self) -> None:
        self.close()


class RayWays:
    """Ways to the nodes of a pool: by Ray where its bridge to the agent is ready, else another.

    A link by Ray that breaks is dialled the other way at once. A new bridge is then made ready, and the link moved to
    it.

    Args:
        otherwise: Returns the other way to a machine.
        move: Gets the number of a node whose link should be dialled again, because Ray reaches it.
        lacks: Gets the number of a node that Ray does not have, every few seconds.
        carries: Gets the nodes whose last link was opened by Ray, and those whose was not, when they have changed.
    """

    def __init__(
        self,
        otherwise: Callable[[Machine], Connect],
        move: Callable[[int], object],
        *,
        lacks: Callable[[int], object] = lambda _: None,
        carries: Callable[[frozenset[int], frozenset[int]], object] = lambda by_ray, missing: None,
    ) -> None:
        self._otherwise, self._move = otherwise, move
        self._lacks, self._carries = lacks, carries
        self._lock, self._noting = threading.Lock(), threading.Lock()
        self._readied = threading.Condition(self._lock)
        self._driver = ""
        self._machines: dict[int, Machine] = {}
        self._ready: set[str] = set()
        """Sockets of the agents that Ray reaches."""
        self._preparing: set[str] = set()
        self._lacking: set[str] = set()
        """Those whose nodes Ray does not have, as the driver last said."""
        self._has_changed = threading.Event()
        """Set when the driver is no longer the same."""
        self._is_lost = False
        """Whether Ray is lost for good: nobody should wait for it until another one stands."""
        self.by_ray: frozenset[int] = frozenset()
        """Nodes whose last link was opened by Ray."""
        self._told = self.by_ray, self.missing

    @property
    def missing(self) -> frozenset[int]:
        """Nodes whose last link was opened the other way."""
        return frozenset(self._machines) - self.by_ray

    def stands(self, driver: str) -> None:
        """Use Ray from now on, by its driver's socket, as soon as its bridges are ready."""
        self.is_down()
        with self._lock:
            self._driver, self._has_changed, self._is_lost = driver, threading.Event(), False
            machines = list(self._machines.values())
        for machine in machines:
            self._prepare(machine)

    def is_down(self) -> None:
        """Use Ray no more. Links by Ray stay as they are until they break."""
        with self._lock:
            self._driver = ""
            self._ready, self._preparing, self._lacking = set(), set(), set()
            self._has_changed.set()

    def is_lost(self) -> None:
        """End `await_ready`, because Ray is lost for good. Another one may stand later."""
        with self._readied:
            self._is_lost = True
            self._readied.notify_all()

    def lose(self, node: int, *, will_return: bool) -> None:
        """Carry a lost node no longer. One that will return is missing until Ray reaches its next machine."""
        if not will_return:
            with self._lock:
                self._machines.pop(node, None)
        self._note(node, is_by_ray=False)

    def await_ready(self, machines: Sequence[Machine], limit_s: float) -> None:
        """Wait until Ray reaches machines that were not dialled before, for at most this many seconds.

        Nobody waits for a node that Ray does not have, nor for a Ray that is lost.
        """
        agents = {machine.socket_path for machine in machines}
        with self._lock:
            self._machines.update((machine.node, machine) for machine in machines)
            is_there = bool(self._driver)
        for machine in machines if is_there else ():
            self._prepare(machine)
        with self._readied:
            self._readied.wait_for(lambda: agents <= self._ready | self._lacking or self._is_lost, limit_s)

    def way_to(self, machine: Machine) -> Connect:
        """Return the function that opens a link to a machine's agent."""
        return functools.partial(self._connect, machine)

    def _connect(self, machine: Machine) -> DialledEnds:
        with self._lock:
            self._machines[machine.node] = machine
            driver = self._driver if machine.socket_path in self._ready else ""
        if driver:
            with contextlib.suppress(Unreachable):  # the driver has died
                ends = RayEnds(driver, machine.socket_path)
                ends.on_broken = functools.partial(self._break, machine)
                self._note(machine.node, is_by_ray=True)
                return ends
            self._break(machine)
        self._note(machine.node, is_by_ray=False)
        self._prepare(machine)
        return self._otherwise(machine)()

    def _note(self, node: int, *, is_by_ray: bool) -> None:
        with self._noting:  # so that the changes are told in their order
            self.by_ray = self.by_ray | {node} if is_by_ray else self.by_ray - {node}
            if self._told != (now := (self.by_ray, self.missing)):
                self._told = now
                self._carries(*now)

    def _break(self, machine: Machine) -> None:
        with self._lock:
            self._ready.discard(machine.socket_path)

    def _prepare(self, machine: Machine) -> None:
        """Make a bridge ready in a thread, and then move the link."""
        with self._lock:
            driver, agent, changed = self._driver, machine.socket_path, self._has_changed
            if not driver or agent in self._preparing:
                return
            self._preparing.add(agent)
        start_thread(
            functools.partial(self._until_ready, driver, machine, changed),
            name="skyward-ray",
            failed=functools.partial(self._not_prepared, machine),
        )

    def _not_prepared(self, machine: Machine, error: BaseException) -> None:
        with self._lock:
            self._preparing.discard(machine.socket_path)
        _log.error("node %d: its link stays as it is, Ray does not carry it: %s", machine.node, in_words(error))

    def _until_ready(self, driver: str, machine: Machine, changed: threading.Event) -> None:
        """Make the bridge ready and move the link, until it goes by Ray: one that is being dialled does not move."""
        while True:
            if is_ready := self._is_ready(driver, machine):
                with self._readied:
                    if changed.is_set():
                        return
                    self._ready.add(machine.socket_path)
                    self._readied.notify_all()
                self._move(machine.node)
            if changed.wait(_LOOK_AGAIN_S if is_ready else _AGAIN_S):
                return
            with self._lock:  # `_prepare` begins another thread only once this one is known to end
                if machine.node in self.by_ray or self._machines.get(machine.node) is not machine:
                    self._preparing.discard(machine.socket_path)
                    return

    def _is_ready(self, driver: str, machine: Machine) -> bool:
        """Ask the driver for a bridge to an agent, and return whether there is one."""
        try:
            with _asked(driver, {"prepare": machine.socket_path, "node": ray_name(machine)}) as asked:
                asked.settimeout(_PREPARE_S)
                answer = json.loads(asked.makefile("rb").readline() or b"{}")
        except (OSError, ValueError, Unreachable):  # the driver has died, or does not answer
            return False
        if is_lacking := bool(answer.get("is_lacking")):
            self._lacks(machine.node)
        with self._readied:
            if is_lacking:
                self._lacking.add(machine.socket_path)
                self._readied.notify_all()
            else:
                self._lacking.discard(machine.socket_path)
        return bool(answer.get("ready"))


def ray_name(machine: Machine) -> str:
    """Return the name of a machine's node in Ray: a resource of which it has one."""
    return f"skyward-{machine.node}"


def _asked(driver: str, order: dict[str, object]) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(_CONNECT_S)
    try:
        sock.connect(driver)
        sock.sendall(json.dumps(order).encode() + b"\n")
    except OSError as error:
        sock.close()
        raise Unreachable(f"Ray's driver at {driver}: does not answer ({error}); see its log", node=None) from error
    return sock
