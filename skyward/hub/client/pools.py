"""Recorder of a pool: it writes the pool's events to a spool, from which a sender brings them to the hub."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any

from ... import events
from ...console.announcer import EventStream
from ...events import Event
from .fluent import current_address, current_spool
from .records import line_of
from .sender import LogSender, SenderThread
from .settings import Address
from .spool import SpoolLog, SpoolWriter

_log = logging.getLogger(__name__)

_LONG_S = 2.0
"""Age in seconds at which a running task is recorded. Shorter ones are recorded when they end."""
_CALLS_PER_S = 50
"""Most tasks recorded in a second. A map of short calls would fill the hub; the pool's counts have them all."""
_LOOK_S = 0.5
_GATHER_S = 0.05
"""Seconds in which events gather. A thread that wakes for each of them would slow short calls down."""
_EXIT_S = 5.0

_KINDS: Mapping[type[Event], str] = {
    events.PoolReady: "pool.ready",
    events.PoolClosed: "pool.closed",
    events.InstanceLaunched: "machine.launched",
    events.InstanceTerminated: "machine.terminated",
    events.NodeReady: "node.ready",
    events.NodeLost: "node.lost",
    events.NodeReplaced: "node.replaced",
    events.PreemptionNotice: "node.notice",
    events.PhaseFailed: "phase.failed",
    events.LinkLost: "link.lost",
    events.LinkRestored: "link.restored",
    events.CostUpdated: "cost",
    events.BudgetWarning: "budget.warning",
    events.DetachmentWarning: "detachment.warning",
    events.Overlooked: "overlooked",
    events.EventsDropped: "events.dropped",
}

_recorders: set[PoolRecorder] = set()


def record_pool(stream: Callable[[], EventStream]) -> None:
    """Record a pool that starts, if this program has a hub.

    Args:
        stream: returns a reader of the pool's events.
    """
    address = current_address()
    if address is not None:
        recorder = PoolRecorder(address, stream())
        _recorders.add(recorder)
        recorder.start()


class PoolRecorder:
    """Recorder of one pool, in a thread of its own, which ends behind the pool's last event.

    Args:
        address: the hub.
        stream: the pool's events.
    """

    def __init__(self, address: Address, stream: EventStream) -> None:
        self.id = os.urandom(16).hex()
        self._stream = stream
        self._writer = SpoolWriter(current_spool().parent / "pools" / self.id)
        self._sender = SenderThread(LogSender(self.id, self._writer.path.parent, address, kind="pools"), self._writer)
        self._running: dict[int, events.TaskSent] = {}
        """Tasks that are not recorded yet, by number and node."""
        self._second, self._count = 0, 0
        self._thread = threading.Thread(target=self._run, name="skyward-hub-pool", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_ending(self) -> bool:
        """True once its pool is closed."""
        return self._stream.is_closed

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the recorder, once its pool is closed."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            is_over = False
            while not is_over:
                is_over = self._stream.is_closed  # asked first: the last events come before the end
                event = self._stream.get(_LOOK_S)
                while event is not None:
                    self._take(event)
                    event = self._stream.get(0)
                self._record_long()
                time.sleep(0 if is_over else _GATHER_S)
        except Exception:
            _log.exception("pool %s: its events are no longer recorded in the hub", self.id)
        finally:
            self._finish()

    def _take(self, event: Event) -> None:
        if isinstance(event, events.PoolStarted):
            first = {
                "name": event.pool,
                "provider": event.provider,
                "nodes": event.nodes,
                "started_at": _milliseconds(event.at),
            }
            self._append(["pool", first])
        elif isinstance(event, events.TaskSent):
            self._running.pop(event.task, None)  # it waited on another node, and stands behind younger ones now
            self._running[event.task] = event
        elif isinstance(event, events.TaskEnded):
            was_recorded = self._running.pop(event.task, None) is None
            if was_recorded or self._has_room(event.at):
                self._append_event("call", event)
        elif type(event) in _KINDS:
            self._append_event(_KINDS[type(event)], event)

    def _record_long(self) -> None:
        """Record the beginning of tasks that run for some time, so that the hub shows them while they run."""
        now = time.time()
        for key, sent in list(self._running.items()):
            if now - sent.at < _LONG_S:
                break  # those behind it are younger
            del self._running[key]
            self._append_event("call.began", sent)

    def _has_room(self, at: float) -> bool:
        if int(at) != self._second:
            self._second, self._count = int(at), 0
        self._count += 1
        return self._count <= _CALLS_PER_S

    def _append_event(self, kind: str, event: Event) -> None:
        detail = {field.name: getattr(event, field.name) for field in fields(event)}
        del detail["at"]
        node = detail.pop("node", None)
        self._append(["e", _milliseconds(event.at), kind, node, detail])

    def _append(self, record: list[Any]) -> None:
        self._writer.append(line_of(record))
        self._sender.notice()

    def _finish(self) -> None:
        is_complete = self._sender.close(_EXIT_S)
        self._writer.close()
        if is_complete:
            SpoolLog(self._writer.path).remove()
            self._writer.path.parent.rmdir()
        else:
            _log.warning("pool %s: its last records did not reach the hub; they are in %s", self.id, self._writer.path)
        _recorders.discard(self)


def _milliseconds(seconds: float) -> int:
    return int(seconds * 1000)


def finish_records() -> None:
    """Wait until the last records of closed pools are in the hub, for five seconds at most."""
    _join(recorder for recorder in list(_recorders) if recorder.is_ending)


def _finish_all() -> None:
    _join(list(_recorders))


def _join(recorders: Iterable[PoolRecorder]) -> None:
    deadline = time.monotonic() + _EXIT_S
    for recorder in recorders:
        recorder.join(max(0.0, deadline - time.monotonic()))


atexit.register(_finish_all)
