"""State that all parts of an engine share under one lock: open tasks and gangs, links to nodes, the scheduler.

A block `with ledger:` holds the lock. At the end of the block, the ledger first sends the queued frames, still with
the lock. Then it releases the lock and calls the queued callbacks. Code inside a block is short and never blocks on
I/O.

Rules that keep this safe:

- Lock order: `Readable.reading` first, then the ledger. No thread waits for `reading` while it holds the ledger.
- Outcomes reach the user's code (futures, done-callbacks) only from `after`. Under the lock that code could deadlock
  with another thread of the user's, or stop all other calls while it runs.
- Callbacks of one block run in the order in which they were queued. Those of different threads have no order.
- A task that would only wait behind others, or for the I/O thread, may be left in `arrivals` without the lock. Each
  block takes it in first and last, so a block never misses one. Questions about open tasks need a block, not the bare
  lock.
- Signals are held for the whole block, callbacks included. A KeyboardInterrupt between two changes would leave the
  scheduler and the tables at odds, and one between two callbacks would lose an outcome.
"""

from __future__ import annotations

import copy
import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from ..core import interrupts
from ..errors import PoolClosed, SkywardError
from ..schedule.scheduler import Scheduler
from ..values.machine import Machine
from ..wire.channel import ChannelClosed
from .gang import Gang, RankTask
from .link import LineEnd, NodeLink, Readable
from .live_actor import LiveActor
from .tasks import Loss, Task
from .watcher import Watcher

_LONGEST_WAIT_S = 3600.0
"""Longest timeout for a selector, which refuses to wait for weeks. One wake-up per hour costs nothing."""
_MOST_LEFT = 256
"""Most tasks that wait for the I/O thread, which may have to wait for the interpreter: a few milliseconds of work."""
MANY_OPEN = 64
"""Fewest open tasks from which another may wait for the I/O thread, so that it goes together with others."""


class Ledger:
    """Shared state of an engine; see the module. Use it inside `with ledger:` or under `lock`, unless stated otherwise.

    Blocks nest: only the end of the outermost block sends frames and calls callbacks. `__enter__` and `__exit__` are
    methods because a generator-based context manager costs more, and every call passes here.
    """

    is_behind = False
    """Whether the I/O thread has found many channels ready, and has not yet found none. Set by that thread, which opens
    a block after it has cleared this."""
    many = MANY_OPEN
    """Number of open tasks from which others may be left to the I/O thread."""
    _has_called = False
    """Whether that thread was woken for such tasks, and has not looked since."""

    def __init__(self, scheduler: Scheduler, numbers: Iterator[int] | None = None) -> None:
        self.lock = threading.RLock()
        self.idle = threading.Condition(self.lock)
        """Condition that is notified when the last open call ends, or when `wait_idle` has fewer calls to wait for."""
        self.is_open = False
        """Whether calls are accepted, which is so from the start of the engine to its end."""
        self.ended_by: SkywardError | None = None
        """Reason why the engine has ended before it was closed."""
        self.scheduler = scheduler
        self.tasks: dict[int, Task] = {}
        self.gangs: dict[int, Gang] = {}
        """Gangs that have no outcome yet."""
        self.actors: dict[int, LiveActor] = {}
        """Actors that were not closed and are not lost."""
        self.losses: dict[int, Loss] = {}
        """Losses by task: survived ones, and those that the scheduler has not decided about yet."""
        self.machines: dict[int, Machine] = {}
        self.links: dict[int, NodeLink] = {}
        """Links to the nodes that are up."""
        self.taken_back: set[int] = set()
        """Nodes whose last lost machine was taken back by its provider."""
        self.resting: set[int] = set()
        """Nodes that are not there on purpose, and come when they are wanted."""
        self.watcher = Watcher()
        """Set of channels that the I/O thread waits for. Any thread may wake it."""
        self.arrivals: deque[Task] = deque()
        """Tasks to take in with the next block, in order."""
        self.take_in: Callable[[Task], object]
        """Function that takes a task in, and never raises. Set by the dispatcher."""
        self.dirty: set[Readable] = set()
        """Channels to flush at the end of the block."""
        self.after: list[Callable[[], object]] = []
        """Callbacks to call without the lock, because they run the user's code or take time."""
        self.numbers = itertools.count(1) if numbers is None else numbers
        """Source of numbers for tasks, gangs and deadlines. Any thread may take one, also without the lock."""
        self.now: Callable[[], float] = time.monotonic
        """Clock of the deadlines."""
        self._deadlines: list[tuple[float, int, Callable[[int, int], None], int, int]] = []
        self._depth = 0

    def __enter__(self) -> None:
        interrupts.hold()
        self.lock.acquire()
        self._depth += 1
        if self.arrivals and self._depth == 1:
            self._take_in_all()

    def __exit__(self, *_: object) -> None:
        after: list[Callable[[], object]] = []
        try:
            try:
                if self._depth == 1:
                    if self.arrivals:
                        self._take_in_all()
                    if self.dirty:
                        self.flush()
                    if self.after:
                        # Take the list under the lock: the next thread to enter starts with an empty one.
                        after, self.after = self.after, after
            finally:
                self._depth -= 1
                self.lock.release()
            if after:
                _call_each(after)
        finally:
            interrupts.let_go()

    def arrive(self, task: Task) -> bool:
        """Leave a task to the next block, if that block comes soon. Call it without the lock.

        The task must be one that may go to any node without a role, and needs no resources of its own. There are two
        reasons to leave it:

        - Others of its kind wait. They cannot begin without an event, and the block of that event takes it in.
        - The I/O thread is behind, so this program is slower than its nodes. A write for each task, and a wait for the
          lock, would make it slower still.

        So thousands of small calls are taken in together, and their thread does not wait for the lock while the I/O
        thread holds it.

        Returns:
            Whether the task was left. False: submit it.
        """
        if not ((self.scheduler.has_backlog or self.is_behind) and self.is_open):
            return False
        self.arrivals.append(task)
        # The line may have become empty, perhaps before the task came, or the I/O thread may have caught up.
        is_soon = self.scheduler.has_backlog or (self.is_behind and len(self.arrivals) < _MOST_LEFT)
        if not (is_soon and self.is_open):
            with self:
                pass
        return True

    def leave(self, task: Task) -> bool:
        """Leave a task to the I/O thread if many are open, so that one write carries several. Call it without the lock.

        For an engine that does not know whether tasks wait; see `arrive`. So the I/O thread is woken, once for all that
        come until it has the interpreter: a few milliseconds.

        Returns:
            Whether the task was left. False: submit it.
        """
        if len(self.tasks) < self.many or not self.is_open:
            return False
        self.arrivals.append(task)
        if len(self.arrivals) >= _MOST_LEFT or not self.is_open:
            with self:
                pass
        elif not self._has_called:
            self._has_called = True
            self.watcher.wake()
        return True

    def take_in_left(self) -> None:
        """Take in the tasks that were left. For the I/O thread, without the lock."""
        self._has_called = False  # first, even if another thread has taken them: each later one wakes again
        if self.arrivals:
            with self:
                pass

    def _take_in_all(self) -> None:
        arrivals, take_in = self.arrivals, self.take_in
        while arrivals:
            take_in(arrivals.popleft())

    def forget_in_child(self) -> None:
        """Close the ledger in a forked child. Do not take the lock: its holder may not exist in the child."""
        self.is_open = False
        self.lock = threading.RLock()
        self.idle = threading.Condition(self.lock)

    def require_open(self) -> None:
        """Raise PoolClosed, or the reason why the engine has ended by itself, unless calls are accepted."""
        if not self.is_open and self.ended_by is not None:
            raise copy.copy(self.ended_by)  # every caller has a traceback of its own
        if not self.is_open:
            raise PoolClosed("pool: closed; make calls inside its `with` block")

    def node_loss(self, node: int, *, started: bool | None) -> Loss:
        """Describe the loss of a node to a task on it. `started` is None if nobody knows whether the task had begun."""
        return Loss(node=node, started=started, is_node=True, is_preempted=node in self.taken_back)

    # Places ---------------------------------------------------------------------------------------------------------

    def node_of(self, task: Task | None) -> int | None:
        """Return the node that a task was sent to; None if it was not sent, or there is no task."""
        if task is None:
            return None
        if isinstance(task, RankTask):
            return task.node
        if task.actor:
            actor = self.actors.get(task.actor)
            return actor.node if actor is not None and task.id in actor.sent else None
        return self.scheduler.node_of(task.id)

    def end_of(self, task: Task) -> LineEnd | None:
        """Return the place of a direct line that may carry a task: its actor, or the node that it was sent to."""
        if task.actor:
            return self.actors.get(task.actor)
        return self.links.get(self.scheduler.node_of(task.id) or 0)

    # Frames ---------------------------------------------------------------------------------------------------------

    def tell(self, node: int, kind: int, ident: int = 0, body: bytes = b"", *, lane: int = 0) -> None:
        """Queue a frame for a node, if it is up."""
        link = self.links.get(node)
        if link is not None:
            link.send(kind, ident, body, lane=lane)
            self.dirty.add(link)

    def flush(self) -> None:
        """Send as much as the sockets take without blocking. The I/O thread sends the rest."""
        for link in tuple(self.dirty):
            was_blocked = link.is_blocked
            try:
                link.flush()
            except ChannelClosed:
                continue  # the I/O thread reads the end of the link too, and only it repairs links
            if link.is_blocked or was_blocked or link.is_led:
                self.watcher.update(link)
        self.dirty.clear()

    # Open calls -----------------------------------------------------------------------------------------------------

    def close_all(self) -> tuple[list[Task], list[Gang]]:
        """Stop accepting calls. Return the open tasks and gangs, which the caller must fail without the lock."""
        self.is_open = False
        tasks, gangs = [*self.tasks.values(), *self.arrivals], list(self.gangs.values())
        self.arrivals.clear()
        self.tasks.clear()
        self.gangs.clear()
        self.idle.notify_all()
        return tasks, gangs

    # Deadlines ------------------------------------------------------------------------------------------------------

    def at(self, delay_s: float, action: Callable[[int, int], None], subject: int, attempt: int) -> None:
        """Call `action(subject, attempt)` after `delay_s`.

        Deadlines are not removed when their call ends, which most calls do long before. So they hold numbers, which
        keep no task alive, and `action` has to check that its subject still exists. 0 stands for no call.
        """
        if len(self._deadlines) > 1000 + 4 * len(self.tasks):  # mostly outdated: keep those of open calls
            self._deadlines = [d for d in self._deadlines if not d[3] or d[3] in self.tasks or d[3] in self.gangs]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (self.now() + delay_s, next(self.numbers), action, subject, attempt))
        self.watcher.wake()

    @property
    def has_deadlines(self) -> bool:
        """Return whether there may be deadlines. Needs no lock."""
        return bool(self._deadlines)

    def run_deadlines(self) -> float | None:
        """Run the deadlines that are due. Return the seconds until the next one; None if there is none."""
        now = self.now()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, action, subject, attempt = heapq.heappop(self._deadlines)
            action(subject, attempt)
        return min(_LONGEST_WAIT_S, max(0.0, self._deadlines[0][0] - now)) if self._deadlines else None


def _call_each(callbacks: list[Callable[[], object]]) -> None:
    """Call all callbacks even if some raise, and raise the first error at the end.

    Each one brings an outcome to somebody who waits, so one that raises must not keep the others from theirs.
    """
    first: BaseException | None = None
    for callback in callbacks:
        try:
            callback()
        except BaseException as error:
            first = first or error
    if first is not None:
        raise first
