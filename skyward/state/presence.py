"""Presence of an open pool for other processes of this user, and the one request that they may make: to end it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from typing import ClassVar

from ..values.machine import LogSink, Machine
from . import live
from .live import LiveNode, LivePool
from .outputs import OutputFile

_LOOK_S = 1.0


class Presence:
    """Presence of one pool, from before its start until it is closed. Thread-safe.

    One thread serves all pools of the process and checks for requests to end them.

    Args:
        pool: Record of the pool.
        on_asked: Called with the reason, in a separate thread, at most once.
        on_look: Called about once a second, in the thread of all pools. It should not block for long.
    """

    _open: ClassVar[set[Presence]] = set()
    _lock: ClassVar[threading.Lock] = threading.Lock()
    _thread: ClassVar[threading.Thread | None] = None
    _changed: ClassVar[threading.Event] = threading.Event()

    def __init__(
        self, pool: LivePool, on_asked: Callable[[str], object], on_look: Callable[[], object] = lambda: None
    ) -> None:
        self._pool = pool
        self._on_asked = on_asked
        self._on_look = on_look
        self._output: OutputFile | None = None

    def open(self) -> None:
        live.announce(self._pool)
        with self._lock:
            self._open.add(self)
            if Presence._thread is None:
                Presence._changed = threading.Event()
                thread = threading.Thread(target=_look, name="skyward-presence", daemon=True)
                thread.start()
                Presence._thread = thread

    def tell_nodes(self, machines: Iterable[Machine]) -> None:
        """Record the current nodes of the pool."""
        nodes = tuple(_node(machine) for machine in machines)
        self._pool = live.with_nodes(self._pool, nodes)
        live.announce(self._pool)

    def kept_output(self) -> LogSink:
        """Return the sink that keeps every line for `skyward logs`."""
        self._output = OutputFile(self._pool.pool)
        return self._output

    def close(self) -> None:
        """Remove the record. Idempotent."""
        with self._lock:
            self._open.discard(self)
            if not self._open:
                Presence._changed.set()
        if self._output is not None:
            self._output.close()
        live.withdraw(self._pool.pool)

    def look(self) -> None:
        """Check for a request to end the pool, then call `on_look`. The thread calls this."""
        reason = live.is_asked_to_end(self._pool.pool)
        if reason:
            threading.Thread(target=self._on_asked, args=(reason,), name="skyward-end", daemon=True).start()
            with self._lock:
                self._open.discard(self)
            return
        self._on_look()


def _look() -> None:
    changed = Presence._changed
    while True:
        changed.wait(_LOOK_S)
        with Presence._lock:
            pools = list(Presence._open)
            if not pools:
                if Presence._changed is changed:
                    Presence._thread = None
                return
            changed.clear()
        for pool in pools:
            try:
                pool.look()
            except (OSError, RuntimeError):  # no descriptor or no thread is left; the next check comes soon
                continue


def _node(machine: Machine) -> LiveNode:
    offer = machine.offer
    return LiveNode(
        node=machine.node,
        socket_path=machine.socket_path,
        pid=machine.pid,
        channel=machine.channel,
        terminal=machine.terminal,
        address=machine.peer.public_ip or machine.peer.private_ip,
        instance_type=offer.instance_type if offer is not None else "",
        is_spot=offer is not None and offer.is_spot,
        price_usd_per_hour=offer.price_usd_per_hour if offer is not None else 0.0,
    )


def _forget_in_child() -> None:
    """Forget all pools after a fork: they, and the thread, belong to the parent."""
    Presence._open, Presence._thread, Presence._lock = set(), None, threading.Lock()


os.register_at_fork(after_in_child=_forget_in_child)
