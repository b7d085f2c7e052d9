"""The direct engine: the client holds a channel to each node's agent and hosts the scheduler.

Threads: any thread may submit and cancel. One I/O thread reads all channels and keeps the deadlines. A submitting
thread writes to the socket itself, so that a call costs one change of thread and not two.

It consists of parts that share one set of `books` under one lock. Each part gets its collaborators in its constructor
and knows no part above it:

    reading               the I/O thread; `leading` lets a caller that waits read in its place
    arrivals              what each frame from a node means
    faults                links that break, nodes that are lost
    nested                calls that tasks make
    gangs                 ranks that start and end as one
    nodes, open_streams   links to the agents; items to and from running tasks
    asking, width         questions to running calls; more channels for a link
    sending               tasks on their way to nodes and back
    direct_lines          sockets that pass the agent by
    books                 what is open, and the lock

An engine that runs on another machine than its client can use all of them but these, which know a client:

- `leading` reads for a thread of this process that waits, and its `may_pull` lets slots read this process's memory.
- `direct_lines` are sockets between processes of one machine, for the calls of `leading`.
- `logs` puts lines together for the terminal and the sinks of this process.
- `faults` asks the pool (`Machines`), which is in this process, for other machines.
- Tasks and gangs get their outcomes by method calls (`on_result`) and futures. They unpickle the user's errors if
  `retry_on` is set, and `nested` unpickles options and errors of nested calls, so both need the user's modules.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterable

from ..calls.futures import refuse_to_wait
from ..console.logs import Lines
from ..core import interrupts
from ..core.limits import raise_file_limit
from ..errors import InternalError, PoolClosed, SkywardError
from ..events import Emit, ignore
from ..schedule.scheduler import Scheduler
from ..values.machine import Machine, Machines
from ..wire.frames import Kind
from .builder import TaskBuilder
from .direct_lines import DirectLines
from .frame_handlers import Arrivals
from .gang import Gang, RankTask
from .gangs import Gangs
from .leader import Leading
from .ledger import Books
from .link_repair import Faults
from .log_router import LogRouter
from .nested_calls import NestedCalls
from .nodes import Nodes
from .open_streams import OpenStreams
from .questions import Asking
from .reader import Reader
from .task_events import TaskCounts, TaskTeller
from .task_sender import Sending
from .tasks import Task
from .width import Width

__all__ = ["DirectEngine"]

_CANCELLED_AT_ONCE = 1000
"""Calls that are cancelled under one lock: some milliseconds of work."""

_engines: weakref.WeakSet[DirectEngine] = weakref.WeakSet()


class DirectEngine:
    """An `Engine` (see `skyward.engine.engine`) whose scheduler is in this process."""

    def __init__(
        self,
        job_id: str,
        *,
        cancel_grace_s: float,
        lines: Lines | None,
        mask: Callable[[str], str] | None = None,
        initializer: bytes | None,
        emit: Emit = ignore,
        kept: frozenset[int] = frozenset(),
        default_timeout_s: float | None = None,
    ) -> None:
        self._grace_s = cancel_grace_s
        self.books = books = Books(Scheduler(kept))
        self._teller = teller = TaskTeller(emit)
        self._logs = LogRouter(lines, mask)
        self._lines = DirectLines(books)
        self._sending = Sending(books, self._lines, teller, self._logs, grace_s=cancel_grace_s)
        self.streams = OpenStreams(books, self._sending)
        self.nodes = Nodes(books, self._sending, job_id=job_id, initializer=initializer, emit=emit)
        self._gangs = Gangs(books, self._sending, self.nodes, self._logs, grace_s=cancel_grace_s)
        self.asking = Asking(books, self._sending)
        self.builder = TaskBuilder(self.next_id, self.nodes.ranks_per_node, self.cancel_gang, default_timeout_s)
        self.nested = NestedCalls(books, self._sending, self._gangs, self.builder)
        lost = (self._gangs.node_lost, self.nested.node_lost)
        self.faults = Faults(books, self._lines, self._sending, self.nodes, teller, on_lost=lost)
        self.arrivals = Arrivals(
            books,
            self._sending,
            self._logs,
            on_rank_stack=self._gangs.on_stack,
            others={
                Kind.PORT: lambda _, frame: self._gangs.on_port(frame),
                Kind.LINE: lambda link, frame: self._lines.on_line(link.node, frame),
                Kind.USAGE: lambda link, frame: teller.usage(link.node, frame.body),
                Kind.NOTICE: lambda link, frame: self.faults.on_notice(link.node, frame.body),
                Kind.ANSWER: lambda _, frame: self.asking.on_answer(frame),
                Kind.CALL: self.nested.on_call,
                Kind.UNCALL: self.nested.on_uncall,
            },
        )
        self.reader = Reader(
            books,
            self.arrivals,
            self._lines,
            self.faults,
            Width(books, self._sending),
            self.nodes.liveness,
            stop=self.streams.stop,
            died=self._die,
        )
        self.leading = Leading(books, self._sending, self.reader.read)

    # Life -----------------------------------------------------------------------------------------------------------

    def start(self, machines: list[Machine], source: Machines) -> None:
        raise_file_limit()
        self.faults.source = source
        self.nodes.open(machines)
        with self.books.lock:
            self.books.is_open = True
            for machine in machines:
                self.nodes.up(machine)
            self.books.flush()
        self.reader.start()
        _engines.add(self)

    @property
    def was_started(self) -> bool:
        return self.reader.was_started

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        refuse_to_wait("closing the pool")
        books = self.books

        def is_idle() -> bool:
            return not books.is_open or (
                all(task.is_cancelled for task in books.tasks.values())
                and all(gang.is_cancelled for gang in books.gangs.values())
            )

        with books.idle:
            if timeout_s is None:
                interrupts.wait_for(lambda slice_s: books.idle.wait_for(is_idle, slice_s))
                return True
            return books.idle.wait_for(is_idle, timeout_s)

    def cancel_all(self, reason: SkywardError | None = None) -> None:
        with self.books.lock:
            open_tasks = [task for task in self.books.tasks.values() if not isinstance(task, RankTask)]
            gangs = list(self.books.gangs.values())
        error = reason or PoolClosed("the pool was closed before the call ended")
        for task in open_tasks:
            if not task.is_cancelled:
                task.on_failed(error)
        self._cancel_each(task.id for task in open_tasks)
        for gang in gangs:
            gang.future.settle_error(error)
            self.cancel_gang(gang.id)

    def wait_stopped(self) -> bool:
        books = self.books

        def have_stopped() -> bool:
            # What is behind a broken link says nothing, and ends with its node.
            return not books.is_open or not (
                any(self._is_reachable(task) for task in books.tasks.values())
                or (books.gangs and self.nodes.are_attached)
            )

        with books.idle:
            return books.idle.wait_for(have_stopped, self._grace_s + 1)

    def _is_reachable(self, task: Task) -> bool:
        node = task.node if isinstance(task, RankTask) else self.books.scheduler.node_of(task.id)
        link = self.books.links.get(0 if node is None else node)
        return link is None or link.channel.is_attached

    def close(self) -> None:
        books = self.books
        with books.lock:
            if not books.is_open:
                if not self.reader.was_started:
                    self._release()
                return
            tasks, gangs = books.close_all()
            self.nodes.opener.close()
            for node in books.links:
                books.tell(node, Kind.SHUTDOWN)
            books.flush()
            for task in tasks:
                self._teller.ended(task, ok=False)
        with books:
            self.asking.close()
        self.nested.close()
        _fail(tasks, gangs, PoolClosed("the pool was closed before the call ended"))
        books.watcher.wake()
        self.reader.join()
        self.nested.join()
        self._logs.flush()
        self._release()

    def _release(self) -> None:
        self.nodes.close()
        self.books.watcher.close()
        interrupts.restore()
        _engines.discard(self)

    def _die(self, cause: BaseException) -> None:
        """Fail everything that is open: the I/O thread has given up."""
        error = InternalError(f"the pool's I/O thread died: {type(cause).__name__}: {cause}; please report this")
        error.__cause__ = cause
        with self.books.lock:
            tasks, gangs = self.books.close_all()
        _fail(tasks, gangs, error)

    def forget_in_child(self) -> None:
        """Close the descriptors and the pool in a forked child of the client."""
        self.books.forget_in_child()
        self.nodes.close_in_child()
        with contextlib.suppress(OSError):
            self.books.watcher.close_in_child()

    # Calls ----------------------------------------------------------------------------------------------------------

    def next_id(self) -> int:
        return next(self.books.numbers)

    def submit(self, task: Task, *, nodes: tuple[int, ...] | None = None) -> None:
        with self.books:
            if nodes is None and self.leading.is_idle:
                self.leading.submit_unled(task)
            else:
                self._sending.submit(task, nodes)

    def submit_gang(self, gang: Gang) -> None:
        with self.books:
            self.books.require_open()
            self._gangs.submit(gang)

    def cancel(self, task_id: int) -> None:
        with self.books:
            self._sending.cancel(task_id)

    def _cancel_each(self, task_ids: Iterable[int]) -> None:
        """Cancel several tasks, the newest first: no waiting one begins in the place of one that was stopped.

        It takes them in batches and closes the books in between, so that other threads and Ctrl-C get their turn.
        """
        newest_first = sorted(task_ids, reverse=True)
        for start in range(0, len(newest_first), _CANCELLED_AT_ONCE):
            with self.books:
                for task_id in newest_first[start : start + _CANCELLED_AT_ONCE]:
                    self._sending.cancel(task_id)

    def cancel_gang(self, gang_id: int) -> None:
        with self.books:
            self._gangs.cancel(gang_id)

    def abandon(self, task_id: int) -> None:
        self.reader.abandon(task_id)

    # Monitoring -----------------------------------------------------------------------------------------------------

    def counts(self) -> TaskCounts:
        with self.books.lock:
            busy, queued = self.books.scheduler.counts()
            ended, failed = self._teller.calls_ended, self._teller.calls_failed
        return TaskCounts(busy=busy, queued=queued, ended=ended, failed=failed)

    def tell_tasks(self, is_heard: bool) -> None:
        self._teller.is_heard = is_heard


def _fail(tasks: list[Task], gangs: list[Gang], error: SkywardError) -> None:
    """Fail everything that was open, without the lock. Gangs tell their own ranks."""
    for task in tasks:
        if not isinstance(task, RankTask):
            task.on_failed(error)
    for gang in gangs:
        gang.future.settle_error(error)


def _forget_all_in_child() -> None:
    for engine in list(_engines):
        engine.forget_in_child()


os.register_at_fork(after_in_child=_forget_all_in_child)
