"""Gate of the node beside the head: a call begins there only once the client knows of it.

If that node is lost, the head is lost with it, and nobody else could say which calls had begun. So the client must know
first. It permits the first few of its open calls when it sends them: these begin at once. Each other call is announced
(SENT), and its frames wait until the client has that. So calls are sent ahead to the node, as to a distant one.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from ...calls.futures import Future
from ...wire.frames import FrameKind
from ...wire.payloads import Encoded
from ...wire.tasks import pack_task
from ..ledger import Ledger
from ..link import NodeLink
from ..tasks import Task

_ROUND_TRIPS = 8
_MEASURED = 4


class StartGate:
    """Frames of tasks that wait until the client knows of them. Used under the ledger's lock.

    Args:
        ledger: Shared state of the head's engine.
        must_wait: Returns whether the client must know of a task first.
        ask: Asks the client, behind all announcements, whether it is there.
        measured: Called with the seconds that a task waits here.
    """

    def __init__(
        self,
        ledger: Ledger,
        must_wait: Callable[[Task], bool],
        ask: Callable[[], Future[Any]],
        measured: Callable[[NodeLink, float], object],
    ) -> None:
        self._ledger = ledger
        self.must_wait = must_wait
        self._ask = ask
        self._measured = measured
        self.waiting: dict[int, list[Callable[[], object]]] = {}
        """Functions that send the frames of each task, in their order."""
        self._is_asking = False
        self._round_trips: deque[float] = deque(maxlen=_ROUND_TRIPS)
        self._least_s = math.inf

    def measure(self, times: int = _MEASURED) -> None:
        """Measure how long a task waits here while there is nothing else to do, that many times."""
        began = time.monotonic()
        self._ask().add_done_callback(partial(self._came, times - 1, began))

    def _came(self, left: int, began: float, done: Any) -> None:
        if done.exception() is not None:
            return  # the head ends
        with self._ledger:
            self._note(time.monotonic() - began)
            if left:
                self.measure(left)

    def _note(self, waited_s: float) -> None:
        self._round_trips.append(waited_s)
        self._least_s = min(self._least_s, waited_s)
        self._ledger.scheduler.delay_home(self._least_s * 1e9)

    def close_for(self, link: GatedLink, task: Task) -> None:
        """Let the frames of a task wait."""
        self.waiting[task.id] = []
        if task.grant is not None:
            link.send(FrameKind.GRANT, task.id, task.grant.pack())
        link.send(FrameKind.TASK, task.id, pack_task(task.head, task.payload.body))
        if not self._is_asking:
            self._is_asking = True
            self._ledger.after.append(partial(self._announce, link))  # behind the announcement, which follows

    def _announce(self, link: GatedLink) -> None:
        with self._ledger:
            numbers, began = list(self.waiting), time.monotonic()
            self._ask().add_done_callback(partial(self._known, link, numbers, began))

    def _known(self, link: GatedLink, numbers: list[int], began: float, done: Any) -> None:
        if done.exception() is not None:
            return  # the head ends
        with self._ledger:
            for number in numbers:
                for send in self.waiting.pop(number, ()):
                    send()
            self._ledger.dirty.add(link)
            self._note(time.monotonic() - began)
            self._measured(link, 2 * min(self._round_trips))  # a task may come just after a question
            self._is_asking = bool(self.waiting)
        if self._is_asking:
            self._announce(link)


class GatedLink(NodeLink):
    """Link to an agent, with a gate if that is beside the head."""

    gate: StartGate | None = None

    @property
    def unsent(self) -> int:
        return 0 if self.gate is None else len(self.gate.waiting)

    def send_task(self, task: Task) -> None:
        if self.gate is None or not self.gate.must_wait(task):
            super().send_task(task)
            return
        self.send_parts(task.function, task.payload)
        self.gate.close_for(self, task)

    def send(self, kind: int, ident: int = 0, body: bytes = b"", *, lane: int = 0) -> None:
        waiting = self._waiting_of(ident)
        if waiting is None:
            super().send(kind, ident, body, lane=lane)
        else:
            waiting.append(partial(super().send, kind, ident, body, lane=lane))

    def send_stream_item(self, ident: int, lane: int, item: Encoded) -> None:
        waiting = self._waiting_of(ident)
        if waiting is None:
            super().send_stream_item(ident, lane, item)
        else:
            self._hold_blobs(item.blobs, is_from_here=True)
            waiting.append(partial(self._queue_item, ident, lane, item))

    def end_stream(self, kind: int, ident: int, lane: int, why: str = "") -> None:
        waiting = self._waiting_of(ident)
        if waiting is None:
            super().end_stream(kind, ident, lane, why)
        else:
            waiting.append(partial(super().end_stream, kind, ident, lane, why))

    def _waiting_of(self, task: int) -> list[Callable[[], object]] | None:
        return None if self.gate is None else self.gate.waiting.get(task)
