"""The state that all parts of an engine share, under one lock: open tasks and gangs, links to nodes, the scheduler.

A block `with ledger:` locks it: no other thread changes it meanwhile. At its end the frames that it queued are
sent, and then, without the lock, the callbacks that it queued are called. Code in such a block is short and does no
I/O that can block.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable

from ..core import interrupts
from ..errors import PoolClosed
from ..schedule.scheduler import Scheduler
from ..values.machine import Machine
from ..wire.channel import ChannelClosed
from .gang import Gang
from .link import NodeLink, Readable
from .tasks import Loss, Task
from .watcher import Watcher

__all__ = ["Ledger"]

_LONGEST_WAIT_S = 3600.0
"""A selector refuses to wait for weeks; waking up once an hour costs nothing."""


class Ledger:
    """Shared state; see the module. Use it inside `with ledger:`, or under `lock`, unless it says otherwise.

    As a block it is cheaper than a generator, and nests: only the end of the outermost block sends and tells.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.lock = threading.RLock()
        self.idle = threading.Condition(self.lock)
        """Notified when the last open call ends, or when fewer calls are to be waited for."""
        self.is_open = False
        """Whether calls are accepted: from the start of the engine to its end."""
        self.scheduler = scheduler
        self.tasks: dict[int, Task] = {}
        self.gangs: dict[int, Gang] = {}
        """Gangs without an outcome yet."""
        self.losses: dict[int, Loss] = {}
        """By task: a loss that it survived, or that the scheduler has not judged yet."""
        self.machines: dict[int, Machine] = {}
        self.links: dict[int, NodeLink] = {}
        """Links to the nodes that are up."""
        self.taken_back: set[int] = set()
        """Nodes whose last lost machine was taken back by its provider."""
        self.watcher = Watcher()
        """Any thread may wake it."""
        self.dirty: set[Readable] = set()
        """Channels to flush at the end of the block."""
        self.after: list[Callable[[], object]] = []
        """Callbacks for when the lock is free: they tell the user, or may take time."""
        self.numbers = itertools.count(1)
        """Numbers of tasks, gangs and deadlines. Any thread may take one."""
        self._deadlines: list[tuple[float, int, Callable[[int, int], None], int, int]] = []
        self._depth = 0

    def __enter__(self) -> None:
        interrupts.hold()
        self.lock.acquire()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        after: list[Callable[[], object]] = []
        try:
            try:
                if self._depth == 1:
                    self.flush()
                    after, self.after = self.after, after
            finally:
                self._depth -= 1
                self.lock.release()
            _call_each(after)
        finally:
            interrupts.let_go()

    def forget_in_child(self) -> None:
        """Close the ledger in a forked child, without the lock: the thread that held it is not here."""
        self.is_open = False
        self.lock = threading.RLock()
        self.idle = threading.Condition(self.lock)

    def require_open(self) -> None:
        """Raise PoolClosed unless calls are accepted."""
        if not self.is_open:
            raise PoolClosed("the pool is closed; calls go to a pool inside its `with` block")

    def node_loss(self, node: int, *, started: bool | None) -> Loss:
        """Describe what the loss of a node does to a task on it. `started`: None where nobody knows."""
        return Loss(node=node, started=started, is_node=True, is_preempted=node in self.taken_back)

    # Frames ---------------------------------------------------------------------------------------------------------

    def tell(self, node: int, kind: int, ident: int = 0, body: bytes = b"", *, lane: int = 0) -> None:
        """Queue a frame for a node, if it is up."""
        link = self.links.get(node)
        if link is not None:
            link.send(kind, ident, body, lane=lane)
            self.dirty.add(link)

    def flush(self) -> None:
        """Send as much as the sockets take; the I/O thread sends the rest."""
        for link in tuple(self.dirty):
            try:
                link.flush()
            except ChannelClosed:
                continue  # the I/O thread sees it too, and acts
            self.watcher.update(link)
        self.dirty.clear()

    # Open calls -----------------------------------------------------------------------------------------------------

    def close_all(self) -> tuple[list[Task], list[Gang]]:
        """Accept no further calls. Returns the open ones, which the caller tells."""
        self.is_open = False
        tasks, gangs = list(self.tasks.values()), list(self.gangs.values())
        self.tasks.clear()
        self.gangs.clear()
        self.idle.notify_all()
        return tasks, gangs

    # Deadlines ------------------------------------------------------------------------------------------------------

    def at(self, delay_s: float, what: Callable[[int, int], None], subject: int, attempt: int) -> None:
        """Call `what(subject, attempt)` later. Numbers, not objects: most calls end long before their time is up."""
        if len(self._deadlines) > 1000 + 4 * len(self.tasks):
            self._deadlines = [d for d in self._deadlines if d[3] in self.tasks or d[3] in self.gangs]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (time.monotonic() + delay_s, next(self.numbers), what, subject, attempt))
        self.watcher.wake()

    def run_deadlines(self) -> float | None:
        """Call what is due. Seconds until the next one is; None: there is none."""
        now = time.monotonic()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, what, subject, attempt = heapq.heappop(self._deadlines)
            what(subject, attempt)
        return min(_LONGEST_WAIT_S, max(0.0, self._deadlines[0][0] - now)) if self._deadlines else None


def _call_each(callbacks: list[Callable[[], object]]) -> None:
    """Call all of them, whatever one raises, and raise the first error at the end."""
    first: BaseException | None = None
    for callback in callbacks:
        try:
            callback()
        except BaseException as error:
            first = first or error
    if first is not None:
        raise first
