"""Counts and events of the tasks and nodes of an engine."""

from __future__ import annotations

import json
import time

from ..core.records import dataclass
from ..events import (
    DeviceUsage,
    Emit,
    LinkLost,
    LinkRestored,
    NodeLost,
    NodeReplaced,
    NodeUsage,
    PreemptionNotice,
    TaskEnded,
    TaskSent,
    ignore,
)
from .tasks import Task


@dataclass(frozen=True, kw_only=True)
class TaskCounts:
    """Numbers of an engine: `busy` slots, `queued` tasks, and calls that have `ended` and `failed` so far.

    `why` says what the oldest waiting call lacks, if it is more than a slot.
    """

    busy: int
    queued: int
    ended: int
    failed: int
    why: str = ""


class TaskEvents:
    """Counter of tasks and source of events. Used under the ledger's lock. Without listeners a task costs little."""

    def __init__(self, emit: Emit = ignore) -> None:
        self._emit = emit
        self.is_heard = False
        """Whether to emit events for each task. Any thread may set it."""
        self.calls_ended = 0
        self.calls_failed = 0
        self._sent: dict[int, tuple[float, int]] = {}
        self._lost_at: dict[int, float] = {}
        self._cut_at: dict[int, float] = {}

    def sent(self, task: Task, node: int) -> None:
        """Emit TaskSent. Call it only if `is_heard`."""
        self._sent[task.id] = (time.monotonic(), node)
        self._emit(TaskSent(task=task.id, name=task.name, node=node, rank=task.rank, calls=task.calls))

    def ended(self, task: Task, *, ok: bool) -> None:
        calls = task.calls
        self.calls_ended += calls
        if not ok and not task.is_cancelled:
            self.calls_failed += calls
        if self.is_heard or self._sent:
            self._emit_end(task, ok)

    def _emit_end(self, task: Task, ok: bool) -> None:
        sent_at, node = self._sent.pop(task.id, (0.0, -1))
        if node >= 0:  # otherwise it was never sent, or sent before anybody listened
            seconds = time.monotonic() - sent_at
            self._emit(
                TaskEnded(
                    task=task.id,
                    name=task.name,
                    node=node,
                    ok=ok,
                    seconds=seconds,
                    rank=task.rank,
                    calls=task.calls,
                )
            )

    def usage(self, node: int, body: bytes) -> None:
        usage = json.loads(body)
        devices = tuple(DeviceUsage(**{**device, "index": int(device["index"])}) for device in usage.pop("devices"))
        self._emit(NodeUsage(node=node, devices=devices, **usage))

    def link_lost(self, node: int, reason: str) -> None:
        self._cut_at[node] = time.monotonic()
        self._emit(LinkLost(node=node, reason=reason))

    def link_restored(self, node: int) -> None:
        cut_at = self._cut_at.pop(node, time.monotonic())
        self._emit(LinkRestored(node=node, seconds=time.monotonic() - cut_at))

    def preemption_notice(self, node: int, notice: bytes) -> None:
        self._emit(PreemptionNotice(node=node, notice=notice.decode(errors="replace")))

    def node_lost(self, node: int, *, will_return: bool, reason: str = "") -> None:
        self._lost_at.setdefault(node, time.monotonic())
        self._emit(NodeLost(node=node, reason=reason, will_be_replaced=will_return))

    def node_replaced(self, node: int) -> None:
        lost_at = self._lost_at.pop(node, time.monotonic())
        self._emit(NodeReplaced(node=node, seconds=time.monotonic() - lost_at))
