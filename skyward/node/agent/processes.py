"""Processes of a node's slots and ranks: forked by zygotes, killed, and reported dead.

Each preload list has its own zygote, which starts on first use, and again after it has died.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...wire.tasks import NodeConfig
from ..slot.zygote import ForkOrder, ZygoteConfig, send_order
from .complaints import complain
from .first_zygote import FirstZygote
from .loop import EventLoop
from .slots import SlotProcess
from .watchdog import kill_session

if TYPE_CHECKING:
    import subprocess

_PACKET = 1 << 20
_BOOT = """
import sys
sys.path[:] = sys.argv[2:]
from skyward.node.slot.zygote import main
main(int(sys.argv[1]))
"""


class Zygote:
    """A running zygote process.

    `on_event` receives its reports: `("forked", number, pid)`, `("exited", pid, status)`, `("failed", number, text)`,
    and once `("gone",)` when the zygote itself has died.
    """

    def __init__(
        self,
        loop: EventLoop,
        node: NodeConfig,
        preload: tuple[str, ...],
        on_event: Callable[[Zygote, Any], None],
        *,
        is_for_ranks: bool,
        forked: FirstZygote | None = None,
    ) -> None:
        self._loop = loop
        self._on_event = on_event
        self.preload = preload
        self.process: subprocess.Popen[bytes] | FirstZygote
        if forked is None:
            self._sock, self.process = _execute(node)
            self._sock.send(pickle.dumps(ZygoteConfig(path=node.path, preload=preload, is_for_ranks=is_for_ranks)))
        else:
            self._sock, self.process = forked.sock, forked
        self._sock.setblocking(False)
        self._orders: deque[tuple[int, bytes, list[int]]] = deque()
        loop.watch(self._sock, self._read)

    def fork(self, order: ForkOrder, fds: list[int]) -> None:
        """Order a process. The caller may close the descriptors afterwards."""
        self._orders.append((order.number, pickle.dumps(order), [os.dup(fd) for fd in fds]))
        self._send_orders()

    def _send_orders(self) -> None:
        """Send as many orders as the socket takes: a zygote does not read while it imports, perhaps for minutes."""
        while self._orders:
            number, order, fds = self._orders[0]
            failed = ""
            try:
                send_order(self._sock, order, fds)
            except BlockingIOError:
                self._loop.watch(self._sock, self._read, self._send_orders)
                return
            except ConnectionError:  # the zygote is gone; `_read` reports it
                return
            except OSError as error:
                failed = f"{type(error).__name__}: {error}"
            self._orders.popleft()
            _close_all(fds)
            if failed:
                self._on_event(self, ("failed", number, failed))
        if self._sock.fileno() >= 0:
            self._loop.watch(self._sock, self._read)

    def _read(self) -> None:
        try:
            data = self._sock.recv(_PACKET)
        except BlockingIOError:  # nothing to read after all
            return
        except ConnectionError:
            data = b""
        if data:
            self._on_event(self, pickle.loads(data))
            return
        self.close()
        self._on_event(self, ("gone",))

    def close(self) -> None:
        """Kill the zygote; its children die with it."""
        if self._sock.fileno() < 0:
            return
        self._loop.forget(self._sock)
        self._sock.close()
        for _, _, fds in self._orders:
            _close_all(fds)
        self._orders.clear()
        self.process.kill()
        self.process.wait()


def _execute(node: NodeConfig) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start an interpreter that becomes a zygote, and return our end of its socket with it."""
    import subprocess  # only here: the first zygote of a local node is forked

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, contextlib.ExitStack() as undo:
        undo.callback(ours.close)
        process = subprocess.Popen(
            [node.python, "-c", _BOOT, str(theirs.fileno()), *node.path],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            cwd=node.cwd,
            env=dict(node.env),
            start_new_session=True,
        )
        undo.pop_all()
    return ours, process


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):  # already closed
            os.close(fd)


RANK_PRELOAD = "skyward.node.slot.worker"
"""Marks preload lists of ranks, so that slots get other zygotes. Every zygote has imported this module anyway."""


class Processes:
    """Starts the processes of slots, and reports when they run and when they have ended.

    Args:
        loop: the agent's event loop.
        config: configuration of the node.
        on_forked: called once the slot has its `pid`.
        on_dead: called with the slot, its pid (0 if it never had one) and its exit code, negative for a signal. It may
            be called more than once per slot; `is_dead` of the slot marks the later calls.
        first: the zygote of plain slots, if it runs already.
    """

    def __init__(
        self,
        loop: EventLoop,
        config: NodeConfig,
        *,
        on_forked: Callable[[SlotProcess], None],
        on_dead: Callable[[SlotProcess, int, int], None],
        first: FirstZygote | None = None,
    ) -> None:
        self._loop = loop
        self._config = config
        self._on_forked = on_forked
        self._on_dead = on_dead
        self._zygotes: dict[tuple[str, ...], Zygote] = {}
        if first is not None:
            plain = Zygote(loop, config, config.preload, self._on_zygote, is_for_ranks=False, forked=first)
            self._zygotes[config.preload] = plain
        self._by_pid: dict[int, SlotProcess] = {}
        self._forking: dict[int, SlotProcess] = {}
        self._orders = 0

    def fork(self, slot: SlotProcess, preload: tuple[str, ...], launch: bytes) -> None:
        """Order a process for the slot, and close the child's ends here. On failure, `on_dead` is called."""
        slot.preload = preload
        self._orders += 1
        self._forking[self._orders] = slot
        order = ForkOrder(number=self._orders, config=slot.config, launch=launch)
        try:
            self._zygote(preload).fork(order, slot.child_fds)
        except OSError as error:
            self._on_fork_failed(self._orders, f"{type(error).__name__}: {error}")
        slot.close_child_fds()

    def kill(self, slot: SlotProcess) -> None:
        """Kill the slot's process at once; `on_dead` is called when it has ended."""
        if slot.is_dead:
            return
        if slot.pid is None:  # its zygote is busy, perhaps forever; a later "forked" finds the slot dead and kills it
            self._on_dead(slot, 0, -signal.SIGKILL)
            return
        _kill_process(slot.pid)

    def close(self) -> None:
        """Kill the zygotes; their children die with them."""
        for zygote in self._zygotes.values():
            zygote.close()

    def _zygote(self, preload: tuple[str, ...]) -> Zygote:
        zygote = self._zygotes.get(preload)
        if zygote is None:
            is_for_ranks = RANK_PRELOAD in preload
            zygote = Zygote(self._loop, self._config, preload, self._on_zygote, is_for_ranks=is_for_ranks)
            self._zygotes[preload] = zygote
        return zygote

    def _on_zygote(self, zygote: Zygote, event: tuple[object, ...]) -> None:
        match event:
            case ("forked", int(number), int(pid)):
                slot = self._forking.pop(number)
                if slot.is_dead:  # killed while its zygote was busy
                    _kill_process(pid)
                    return
                slot.pid = pid
                self._by_pid[pid] = slot
                self._on_forked(slot)
            case ("exited", int(pid), int(status)):
                slot_of_pid = self._by_pid.pop(pid, None)
                if slot_of_pid is not None:
                    self._on_dead(slot_of_pid, pid, os.waitstatus_to_exitcode(status))
            case ("failed", int(number), str(text)):
                self._on_fork_failed(number, text)
            case ("gone",):
                self._on_zygote_gone(zygote)

    def _on_fork_failed(self, number: int, text: str) -> None:
        slot = self._forking.pop(number)
        complain(self._config.node, f"cannot start a process: {text}")
        slot.failure = text
        self._on_dead(slot, 0, 1)

    def _on_zygote_gone(self, zygote: Zygote) -> None:
        """Report the children of a dead zygote: they died with it, and it can no longer report them."""
        del self._zygotes[zygote.preload]
        orphans = [slot for slot in (*self._forking.values(), *self._by_pid.values()) if slot.preload == zygote.preload]
        for number, slot in list(self._forking.items()):
            if slot.preload == zygote.preload:
                del self._forking[number]
        for slot in orphans:
            self._by_pid.pop(slot.pid or 0, None)
            self._on_dead(slot, slot.pid or 0, -signal.SIGKILL)


def _kill_process(pid: int) -> None:
    """Kill a process and its session. A freshly forked process does not lead its session yet."""
    kill_session(pid)
    with contextlib.suppress(ProcessLookupError):  # already exited
        os.kill(pid, signal.SIGKILL)
