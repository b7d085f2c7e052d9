"""The direct engine: the client holds a channel to each node's agent and hosts the scheduler.

Threads: any thread may submit and cancel. One I/O thread reads all channels and keeps the deadlines. A submitting
thread writes to the socket itself, so that a call costs one change of thread and not two. Everything below `_lock`
is short and does no I/O that can block; what tells the user something runs after the lock was released.

It is long because all of it changes the same books (tasks, links) under one lock. What can stand alone does:
scheduler, watcher, link, gangs, faults, logs, interrupts.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import json
import os
import pickle
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from ..errors import InternalError, PoolClosed, SkywardError, TaskTimeout
from ..events import Emit, NodeReady, ignore
from ..futures import Future, refuse_to_wait, this_thread
from ..launch import Launch
from ..machine import LogSink, Machine, Machines
from ..schedule.scheduler import Action, FailTask, Recall, Refuse, Scheduler, Send, StartGang
from ..topology import AcceleratorInfo
from ..wire import pull
from ..wire.channel import Channel, ChannelClosed
from ..wire.frames import Frame, Kind
from ..wire.payloads import Encoded
from ..wire.tasks import Topology
from . import interrupts
from .asking import Asking
from .faults import Faults
from .gang import Gang, RankTask
from .gangs import Gangs
from .link import LEAD_S, Line, NodeLink, Readable
from .liveness import Liveness
from .logs import LogRouter
from .nested import NestedCalls
from .opening import Opener
from .tasks import Loss, PulledTask, StreamTask, Task, TaskFailure, loss_error
from .telling import TaskCounts, TaskTeller
from .watcher import Watcher
from .width import Width

__all__ = ["DirectEngine"]

_CONNECT_S = 20.0
_FINISH_S = 3.0
"""Seconds for the last frames to a remote node, and for the command that brings them there to end."""

Nodes = tuple[int, ...] | None

_engines: weakref.WeakSet[DirectEngine] = weakref.WeakSet()


class DirectEngine:
    """Runs tasks on machines that have agents. Thread-safe. `start` once, `close` once (or more)."""

    def __init__(
        self,
        job_id: str,
        *,
        cancel_grace_s: float,
        logs: LogSink | None,
        mask: Callable[[str], str] | None = None,
        initializer: bytes | None,
        emit: Emit = ignore,
        kept: frozenset[int] = frozenset(),
        default_timeout_s: float | None = None,
    ) -> None:
        self.job_id = job_id
        self._emit = emit
        self._teller = TaskTeller(emit)
        self._usage_tenths = 0
        self._grace_s = cancel_grace_s
        self._initializer = initializer
        self._logs = LogRouter(logs, mask)
        self._lock = threading.RLock()
        self._scheduler = Scheduler(kept)
        self._links: dict[int, NodeLink] = {}
        self._machines: dict[int, Machine] = {}
        self._source: Machines | None = None
        self._tasks: dict[int, Task] = {}
        self._gangs = Gangs(self)
        self._faults = Faults(self)
        self._width = Width(self)
        self.asking = Asking(self)
        self.nested = NestedCalls(self, default_timeout_s)
        self._losses: dict[int, Loss] = {}
        self._after: list[Callable[[], object]] = []
        self._deadlines: list[tuple[float, int, Callable[[int, int], None], int, int]] = []
        self._abandoned: deque[int] = deque()
        self._numbers = itertools.count(1)
        self._dirty: set[Readable] = set()
        self.can_pull = pull.is_possible()
        """Whether slots can read this process's memory, as far as is known."""
        self._leading: Task | None = None
        """Being submitted while nothing else is open: it may go on a direct line."""
        self._lone = 0
        """The last task that `submit` put on a direct line."""
        self._opener = Opener(job_id, timeout_s=_CONNECT_S)
        self._watcher = Watcher()
        self._liveness = Liveness()
        self._depth = 0
        self._is_open = False
        self._thread: threading.Thread | None = None
        self._idle = threading.Condition(self._lock)

    # Life -----------------------------------------------------------------------------------------------------------

    def start(self, machines: list[Machine], source: Machines) -> None:
        """Connect to all agents. Raises Unreachable; what was connected is closed again."""
        self._source = source
        self._machines = {machine.node: machine for machine in machines}
        self._links = self._opener.open_all(machines)
        with self._lock:
            self._is_open = True
            for machine in machines:
                self._node_up(machine)
            self._flush()
        self._thread = threading.Thread(target=self._run, name="skyward-io", daemon=True)
        self._thread.start()
        _engines.add(self)

    def _node_up(self, machine: Machine) -> None:
        link = self._links[machine.node]
        self._watch(link)
        count = max(self._machines) + 1
        facts = link.facts
        kind, own = facts["accelerator"], facts["accelerators"]
        topology = Topology(
            job_id=self.job_id,
            node=machine.node,
            peers=tuple(self._machines[n].peer for n in range(count)),
            accelerators=tuple(self._accelerators(n) for n in range(count)),
            accelerator=AcceleratorInfo(type=kind, count=own, is_trainium=kind == "Neuron") if own else None,
            interface=machine.interface,
            initializer=self._initializer,
        )
        link.send(Kind.SLOT_CONFIG, body=pickle.dumps(topology))
        if self._usage_tenths:
            link.send(Kind.USAGE, lane=self._usage_tenths)
        self._dirty.add(link)
        self._emit(NodeReady(node=machine.node, address=machine.peer.private_ip))
        self._perform(self._scheduler.node_up(machine.node, machine.slots))

    def _watch(self, link: NodeLink) -> None:
        self._watcher.add(link)
        if link.dialler is not None:
            self._liveness.watch(link, self._machines[link.node].lease_s, time.monotonic())
        self._dirty.add(link)

    def _accelerators(self, node: int) -> int:
        link = self._links.get(node)
        return int(link.facts["accelerators"]) if link else 0

    @property
    def was_started(self) -> bool:
        """Whether the agents were reached (and told to end by `close`)."""
        return self._thread is not None

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        """Wait until no outcome is to be told any more. False: the time was up."""
        refuse_to_wait("closing the pool")

        def is_idle() -> bool:
            return not self._is_open or (all(task.is_cancelled for task in [*self._tasks.values(), *self._gangs]))

        with self._idle:
            return self._idle.wait_for(is_idle, timeout_s)

    def cancel_all(self, reason: SkywardError | None = None) -> None:
        """Fail every open call with `reason`, else PoolClosed, and stop it where it runs.

        `wait_stopped` gives it time for that.
        """
        with self._lock:
            open_tasks = [task for task in self._tasks.values() if not isinstance(task, RankTask)]
            gangs = list(self._gangs)
        error = reason or PoolClosed("the pool was closed before the call ended")
        for task in open_tasks:
            if not task.is_cancelled:
                task.on_failed(error)
        self.cancel_each(task.id for task in open_tasks)
        for gang in gangs:
            gang.future.settle_error(error)
            self.cancel_gang(gang.id)

    def wait_stopped(self) -> bool:
        """Give the calls that were cancelled their grace to end. False: some did not, and end with their node."""

        def have_stopped() -> bool:
            # What is behind a broken link says nothing, and ends with its node.
            return not self._is_open or not (
                any(self._is_reachable(task) for task in self._tasks.values()) or (self._gangs and self._all_attached())
            )

        with self._idle:
            return self._idle.wait_for(have_stopped, self._grace_s + 1)

    def _is_reachable(self, task: Task) -> bool:
        node = task.node if isinstance(task, RankTask) else self._scheduler.node_of(task.id)
        link = self._links.get(0 if node is None else node)
        return link is None or link.channel.is_attached

    def _all_attached(self) -> bool:
        return all(link.channel.is_attached for link in self._links.values())

    def close(self) -> None:
        """Tell the agents to end and fail what is still open with PoolClosed. Idempotent."""
        with self._lock:
            if not self._is_open:
                if self._thread is None:
                    self._release_sockets()
                return
            self._is_open = False
            self._opener.close()
            for link in self._links.values():
                link.send(Kind.SHUTDOWN)
                self._dirty.add(link)
            self._flush()
            open_tasks = list(self._tasks.values())
            gangs = self._gangs.take_all()
            self._tasks.clear()
            for task in open_tasks:
                self._teller.ended(task, ok=False)
            self._idle.notify_all()
        with self._changing():
            self.asking.close()
        self.nested.close()
        error = PoolClosed("the pool was closed before the call ended")
        for task in open_tasks:
            if not isinstance(task, RankTask):
                task.on_failed(error)
        for gang in gangs:
            gang.future.settle_error(error)
        self._wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=10)
        self.nested.join()
        self._logs.flush()
        self._release_sockets()

    def _release_sockets(self) -> None:
        remote = [link for link in self._links.values() if link.dialler is not None]
        deadline = time.monotonic() + _FINISH_S
        threads = [threading.Thread(target=link.finish, args=(deadline,), daemon=True) for link in remote]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_FINISH_S + 1)
        for link in self._links.values():
            link.close()
            if link.line is not None:
                link.line.channel.close()
        self._watcher.close()
        interrupts.restore()
        _engines.discard(self)

    def forget_in_child(self) -> None:
        """After a fork of the client: the child holds none of our descriptors, and its pool is closed."""
        self._is_open = False
        self._lock = threading.RLock()
        self._idle = threading.Condition(self._lock)
        for link in self._links.values():
            link.channel.close_in_child()
            if link.line is not None:
                link.line.channel.close_in_child()
        with contextlib.suppress(OSError):
            self._watcher.close_in_child()

    # Submitting -----------------------------------------------------------------------------------------------------

    def next_id(self) -> int:
        return next(self._numbers)

    @property
    def nodes(self) -> int:
        return len(self._machines)

    def accelerators(self) -> int:
        """Of the node that has fewest."""
        return min((self._accelerators(n) for n in self._links), default=0)

    def ranks_per_node(self, launch: Launch) -> int:
        asked = launch.ranks_per_node
        return max(1, self.accelerators()) if asked == "auto" else asked

    @property
    def round_trip_s(self) -> float:
        """To the node that is farthest away; 0 on this machine, and where it is not known yet."""
        return max((link.channel.round_trip_s for link in tuple(self._links.values())), default=0.0)

    def agent_pids(self) -> dict[int, int]:
        """Of the nodes that are up: the process id of the agent, on its machine."""
        with self._lock:
            return {node: int(link.facts["pid"]) for node, link in self._links.items()}

    def tell_tasks(self, is_heard: bool) -> None:
        """Whether TaskSent and TaskEnded are emitted, from now on."""
        self._teller.is_heard = is_heard

    def ask_usage(self, every_s: float) -> None:
        """From now on each node says how busy it is, as NodeUsage; 0: no more."""
        with self._changing():
            self._usage_tenths = int(every_s * 10)
            for node in self._links:
                self._tell(node, Kind.USAGE, lane=self._usage_tenths)

    def counts(self) -> TaskCounts:
        """How much is going on."""
        with self._lock:
            busy, queued = self._scheduler.counts()
            ended, failed = self._teller.calls_ended, self._teller.calls_failed
        return TaskCounts(busy=busy, queued=queued, ended=ended, failed=failed)

    def submit(self, task: Task, *, nodes: Nodes = None) -> None:
        """`nodes`: those that it may go to; None: any that is kept for no role.

        Raises PoolClosed. Everything else is told to the task.
        """
        with self._changing():
            if nodes is not None or not self._is_idle:
                self._submit(task, nodes)
                return
            link = self._submit_alone(task, None)
            if link is not None and link.line is not None and link.on_line == task.id:
                self._watcher.add(link.line)  # until somebody waits for the value; see `lead`
                self._lone = task.id

    def _submit(self, task: Task, nodes: Nodes, *, parent: int | None = None) -> None:
        self._require_open()
        self._tasks[task.id] = task
        actions = self._scheduler.submit(
            task.id,
            nodes=nodes,
            retries=task.options.retries,
            # The time of one begins when it is sent; the input of another goes with it and cannot be sent twice.
            in_advance=task.timeout_s is None and task.may_move,
            expected_ns=task.expected_ns,
            parent=parent,
        )
        self._perform(actions)

    def submit_gang(self, gang: Gang) -> None:
        with self._changing():
            self._require_open()
            self._gangs.submit(gang)

    def _require_open(self) -> None:
        if not self._is_open:
            raise PoolClosed("the pool is closed; calls go to a pool inside its `with` block")

    def cancel(self, task_id: int) -> None:
        """Stop a task wherever it is; its outcome is told to nobody. Idempotent."""
        with self._changing():
            task = self._tasks.get(task_id)
            if task is None or task.is_cancelled:
                return
            task.is_cancelled = True
            self.nested.ended(task_id)
            self._idle.notify_all()
            node = self._scheduler.cancel(task_id)
            if isinstance(task, RankTask):
                node = task.node
            if node is None:
                self._forget(task)
            else:
                if node in self._links:
                    self._links[node].hold()
                self._tell(node, Kind.CANCEL, task_id, lane=int(self._grace_s * 10))

    def cancel_each(self, task_ids: Iterable[int]) -> None:
        """`cancel` of several, the newest first: none that waits begins in the place of one that was stopped."""
        with self._changing():
            for task_id in sorted(task_ids, reverse=True):
                self.cancel(task_id)

    def cancel_gang(self, gang_id: int) -> None:
        with self._changing():
            self._gangs.cancel(gang_id)

    def send_stream(self, task_id: int, kind: int, body: bytes = b"", *, lane: int = 0) -> None:
        """A frame about a running stream; dropped if the task has ended."""
        with self._changing():
            node = self._scheduler.node_of(task_id)
            if node is not None:
                self._tell(node, kind, task_id, body, lane=lane)

    def send_stream_item(self, task_id: int, lane: int, item: Encoded) -> None:
        with self._changing():
            node = self._scheduler.node_of(task_id)
            if node is None:
                return
            link = self._links.get(node)
            if link is None:
                return
            link.send_stream_item(task_id, lane, item)
            self._dirty.add(link)

    def end_input(self, task_id: int, kind: int, lane: int) -> None:
        """The iterator that feeds a task has ended (IN_END) or raised (IN_ERROR)."""
        with self._changing():
            node = self._scheduler.node_of(task_id)
            if node is not None and node in self._links:
                self._links[node].end_stream(kind, task_id, lane)
                self._dirty.add(self._links[node])

    def close_stream(self, task_id: int) -> None:
        """The consumer is gone. A generator that was not sent is forgotten, a running one is closed."""
        with self._changing():
            task = self._tasks.get(task_id)
            if task is None:
                return
            task.is_cancelled = True
            self._idle.notify_all()
            node = self._scheduler.cancel(task_id)
            if node is None:
                self._forget(task)
            else:
                self._tell(node, Kind.CLOSE, task_id)

    def abandon(self, task_id: int) -> None:
        """`cancel` or `close_stream`, by the I/O thread: for finalizers, which may run within anything of ours."""
        self._abandoned.append(task_id)
        self._wake()

    def cancel_or_close(self, task_id: int) -> None:
        task = self._tasks.get(task_id)
        if isinstance(task, StreamTask):
            self.close_stream(task_id)
        else:
            self.cancel(task_id)

    def close_streams(self) -> None:
        """Stop the generators that run: their readers get PoolClosed. Nobody may ever read them to their end."""
        with self._lock:
            streams = [task for task in self._tasks.values() if isinstance(task, StreamTask)]
        for task in streams:
            task.on_failed(PoolClosed(f"the pool was closed before {task.name!r} was read to its end"))
            self.close_stream(task.id)

    # Carrying out ---------------------------------------------------------------------------------------------------

    def _changing(self) -> _Changing:
        """The lock; then what was decided under it is sent, and told to the user without it."""
        return _Changing(self)

    def _open_books(self) -> None:
        interrupts.hold()
        self._lock.acquire()
        self._depth += 1

    def _close_books(self) -> None:
        after: list[Callable[[], object]] = []
        try:
            try:
                if self._depth == 1:
                    self._flush()
                    after, self._after = self._after, after
            finally:
                self._depth -= 1
                self._lock.release()
            _call_each(after)
        finally:
            interrupts.let_go()

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self._send(self._tasks[action.task], action.node)
            elif isinstance(action, Recall):
                self._tell(action.node, Kind.RECALL, action.task)
            elif isinstance(action, StartGang):
                self._gangs.start(action)
            elif isinstance(action, FailTask):
                self._fail(self._tasks[action.task], action)
            elif isinstance(action, Refuse):
                self.nested.refuse(action)
            else:
                self._gangs.fail(action)

    def _send(self, task: Task, node: int) -> None:
        link = self._links[node]
        if not (task is self._leading and self._send_on_line(link, task)):
            if isinstance(task, PulledTask):  # another task came first; this one's caller sends it as blobs
                self._forget(task, ok=None)
                self._after.append(task.send_again)
                self._perform(self._scheduler.finished(task.id))
                return
            link.send_task(task)
            self._dirty.add(link)
        task.attempt += 1
        if task.timeout_s is not None:
            self._at(task.timeout_s, self._time_out, task.id, task.attempt)
        if self._teller.is_heard:
            self._teller.sent(task, node)
        task.on_sent()

    def _send_on_line(self, link: NodeLink, task: Task) -> bool:
        try:
            return link.send_on_line(task)
        except ChannelClosed:
            self._drop_line(link)
            return False

    def _tell(self, node: int, kind: int, ident: int = 0, body: bytes = b"", *, lane: int = 0) -> None:
        link = self._links.get(node)
        if link is not None:
            link.send(kind, ident, body, lane=lane)
            self._dirty.add(link)

    def _flush(self) -> None:
        for link in tuple(self._dirty):
            try:
                link.flush()
            except ChannelClosed:
                continue  # the I/O thread sees it too, and acts
            self._watcher.update(link)
        self._dirty.clear()

    def _fail(self, task: Task, action: FailTask) -> None:
        loss = self._losses.pop(task.id, None)
        if loss is None:
            loss = self._faults.node_loss(action.node or 0, started=action.started)
        self._forget(task)
        error = loss_error(loss, task.name, task.tail)
        if not task.is_cancelled:
            self._after.append(lambda: task.on_failed(error))

    def _forget(self, task: Task, *, ok: bool | None = False) -> None:
        """`ok`: whether it gave its value; None: another takes its place."""
        self._tasks.pop(task.id, None)
        self._losses.pop(task.id, None)
        self.asking.ended(task.id)
        self.nested.ended(task.id)
        if ok is not None:
            self._teller.ended(task, ok=ok)
        if not self._tasks and not self._gangs:
            self._idle.notify_all()

    def _release(self, task: Task, node: int | None) -> None:
        link = self._links.get(node) if node is not None else None
        if link is not None:
            link.release(task)
            if link.channel.has_output:
                self._dirty.add(link)

    # Deadlines ------------------------------------------------------------------------------------------------------

    def _at(self, delay_s: float, what: Callable[[int, int], None], subject: int, attempt: int) -> None:
        """Call `what(subject, attempt)` later. Numbers, not objects: most calls end long before their time is up."""
        if len(self._deadlines) > 1000 + 4 * len(self._tasks):
            self._deadlines = [d for d in self._deadlines if d[3] in self._tasks or d[3] in self._gangs]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (time.monotonic() + delay_s, next(self._numbers), what, subject, attempt))
        self._wake()

    def _time_out(self, task_id: int, attempt: int) -> None:
        task = self._tasks.get(task_id)
        if task is None or task.is_cancelled or task.attempt != attempt:
            return
        if isinstance(task, RankTask):
            self._gangs.time_out(task)
            return
        self.cancel(task.id)
        error = TaskTimeout(
            f"{task.name!r} ran longer than its timeout_s={task.timeout_s:g} and was stopped",
            task=task.name,
            timeout_s=task.timeout_s,
        )
        self._after.append(lambda: task.on_failed(error))

    # The I/O thread -------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        self._watcher.wake()

    def _run(self) -> None:
        this_thread.brings_values = True
        try:
            self._loop()
        except BaseException as error:  # a bug of ours: better an error in every call than a wait without an end
            self._die(error)
            raise

    def _die(self, cause: BaseException) -> None:
        error = InternalError(f"the pool's I/O thread died: {type(cause).__name__}: {cause}; please report this")
        error.__cause__ = cause
        with self._lock:
            self._is_open = False
            tasks, gangs = list(self._tasks.values()), self._gangs.take_all()
            self._tasks.clear()
            self._idle.notify_all()
        for task in tasks:
            if not isinstance(task, RankTask):
                task.on_failed(error)
        for gang in gangs:
            gang.future.settle_error(error)

    def _loop(self) -> None:
        while self._is_open:
            while self._abandoned:
                self.cancel_or_close(self._abandoned.popleft())
            for link, can_read, can_write in self._watcher.wait(self._run_deadlines()):
                if can_write:
                    with self._changing():
                        self._dirty.add(link)
                if can_read:
                    self._read(link)
            if self._liveness.is_due(time.monotonic()):
                self._check_links()

    def _check_links(self) -> None:
        with self._changing():
            pinged, dead = self._liveness.check(time.monotonic())
            self._dirty.update(pinged)
        for link in dead:
            if link.reading.acquire(blocking=False):  # else a leading caller is reading it this moment
                try:
                    self._faults.link_gone(link, "it has been silent for too long")
                finally:
                    link.reading.release()

    def _run_deadlines(self) -> float | None:
        with self._changing():
            now = time.monotonic()
            while self._deadlines and self._deadlines[0][0] <= now:
                _, _, what, subject, attempt = heapq.heappop(self._deadlines)
                what(subject, attempt)
            # A selector refuses to wait for weeks; waking up once an hour costs nothing.
            wait_s = min(3600.0, max(0.0, self._deadlines[0][0] - now)) if self._deadlines else None
            check_s = self._liveness.interval_s
            return wait_s if check_s is None else min(check_s, 3600.0 if wait_s is None else wait_s)

    def _read(self, link: Readable) -> None:
        interrupts.hold()  # frames that were read must be handled
        try:
            if not link.reading.acquire(blocking=False):
                return  # a leading caller is at it
            try:
                if link.channel.fileno() < 0:
                    return  # closed by the thread that read it last
                frames = list(link.receive())
                with self._changing():
                    for frame in frames:
                        self._on_frame(link, frame)
                    if link.channel.needs_flush:
                        self._dirty.add(link)
                    if link.channel.pongs != link.pongs:
                        link.pongs = link.channel.pongs
                        self._perform(self._scheduler.set_round_trip(link.node, link.channel.round_trip_s * 1e9))
                        self._width.measured(link)
                    if link.is_narrow:
                        self._width.consider(link)
            except BlockingIOError:
                return
            except (ChannelClosed, InternalError) as error:
                self._reading_failed(link, error)
            finally:
                link.reading.release()
        finally:
            interrupts.let_go()

    def _reading_failed(self, link: Readable, error: Exception) -> None:
        if not isinstance(link, NodeLink):
            self._line_gone(link)
        elif isinstance(error, ChannelClosed):
            self._faults.link_gone(link, "its link ended")
        elif link.dialler is not None:
            self._faults.link_gone(link, str(error))  # something on the way wrote into the stream
        else:
            raise error

    # Leading --------------------------------------------------------------------------------------------------------

    def may_pull(self) -> bool:
        """Whether a call that its caller waits for will probably go on a line whose slot can read our memory."""
        if not self.can_pull or not self._is_idle:
            return False
        return all(link.line is not None for link in tuple(self._links.values()))

    def submit_leading(self, task: Task, future: Future[Any], nodes: Nodes = None) -> None:
        """`submit`, and wait a moment for the outcome in this thread.

        If nothing else is open, the call goes on the node's direct line if it can, and the caller reads the answer
        itself while the I/O thread steps aside: a short call then costs no change of thread at all. After `LEAD_S`
        the I/O thread takes over.
        """
        refuse_to_wait("`>> pool`")
        try:
            self._submit_and_lead(task, future, nodes)
        except BaseException:  # Ctrl-C: the caller never gets the future
            self.cancel(task.id)
            raise

    def _submit_and_lead(self, task: Task, future: Future[Any], nodes: Nodes) -> None:
        led: Readable | None = None
        interrupts.hold()
        try:
            with self._changing():
                if self._is_idle:
                    led = self._take_lead(task.id, self._submit_alone(task, nodes))
                else:
                    self._submit(task, nodes)
            if led is not None:
                self._lead(led, future)
        finally:
            if led is not None and (led.is_led or not future.done()):
                self._give_up_lead(led, future)
            interrupts.let_go()

    @property
    def _is_idle(self) -> bool:
        return self._watcher.can_lead and not self._tasks and not self._gangs

    def _submit_alone(self, task: Task, nodes: Nodes) -> NodeLink | None:
        """Nothing else is open: the task goes on a direct line if it can. Where it went."""
        self._leading = task
        try:
            self._submit(task, nodes)
        finally:
            self._leading = None
        return self._links.get(self._scheduler.node_of(task.id) or 0)

    def lead(self, task_id: int, future: Future[Any]) -> None:
        """The caller waits for a task of `submit`: if it is on a direct line, read the answer in this thread."""
        if task_id != self._lone:  # told without the lock: most futures are one of many
            return
        led: Readable | None = None
        interrupts.hold()
        try:
            with self._lock:
                link = self._links.get(self._scheduler.node_of(task_id) or 0)
                if link is not None and link.on_line == task_id and link.line is not None and not link.line.is_led:
                    led = self._take_lead(task_id, link)
            if led is not None:
                self._lead(led, future)
        finally:
            if led is not None:
                self._give_up_lead(led, future)
            interrupts.let_go()

    def _take_lead(self, task_id: int, link: NodeLink | None) -> Readable | None:
        if link is None:
            return None
        led: Readable = link
        if link.on_line == task_id and link.line is not None:
            led = link.line
            self._watcher.remove(led)  # nobody but callers reads a line, as long as their calls are short
        led.is_led = True
        self._watcher.update(led)
        return led

    def _give_up_lead(self, led: Readable, future: Future[Any]) -> None:
        with self._lock:
            led.is_led = False
            if isinstance(led, Line) and not future.done() and led.channel.fileno() >= 0:
                self._watcher.add(led)
            self._watcher.update(led)

    def _lead(self, link: Readable, future: Future[Any]) -> None:
        deadline = time.monotonic() + LEAD_S
        while not future.done() and link.is_led:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return
            if link.wait_readable(left_s):
                this_thread.brings_values = True  # done-callbacks of other calls may run in here
                try:
                    self._read(link)
                finally:
                    this_thread.brings_values = False

    def _on_frame(self, link: Readable, frame: Frame) -> None:  # noqa: C901, PLR0912, PLR0915  # a table
        kind = frame.kind
        task = self._tasks.get(frame.ident)
        if kind == Kind.RESULT:
            received = link.received(frame)  # also for a task nobody waits for: its blobs must not pile up
            if task is not None:
                self._finish(task, link.node, received.elapsed_ns)
                if not task.is_cancelled:
                    self._after.append(lambda: task.on_result(received))
                elif isinstance(task, RankTask):
                    self._after.append(lambda: task.ended(task))
        elif kind == Kind.LOG:
            self._logs.add(link.node, task, frame.lane, frame.body)
        elif kind == Kind.PORT:
            self._gangs.on_port(frame)
        elif kind == Kind.ELSEWHERE:
            link.is_led = False
        elif kind == Kind.LINE:
            self._on_line(link.node, frame)
        elif kind in (Kind.USAGE, Kind.NOTICE):
            (self._teller.usage if kind == Kind.USAGE else self._faults.on_notice)(link.node, frame.body)
        elif kind == Kind.ANSWER:
            self.asking.on_answer(frame)
        elif kind in (Kind.CALL, Kind.UNCALL) and isinstance(link, NodeLink):
            self._on_nested(link, frame)
        elif task is None:
            if kind in (Kind.PART, Kind.ITEM):
                link.received(frame)
        elif kind == Kind.PART:
            part = link.received(frame)
            self._after.append(lambda: task.on_part(part))
        elif kind == Kind.ITEM:
            item = link.received(frame)
            self._after.append(lambda: task.on_item(item))
        elif kind == Kind.ERROR:
            self._on_error(link.node, task, frame)
        elif kind == Kind.STACK:
            self._gangs.on_stack(task, frame)
        elif kind == Kind.LOST:
            self._on_lost(link.node, task, frame)
        elif kind == Kind.RECALLED:
            self._on_recalled(link.node, task)
        elif kind == Kind.IN_CREDIT:
            lane = frame.lane
            self._after.append(lambda: task.on_input_credit(lane))

    def _on_nested(self, link: NodeLink, frame: Frame) -> None:
        blobs = link.blobs_of_call(frame.ident)
        if frame.kind == Kind.CALL:
            self.nested.on_call(link.node, frame, blobs)
        else:
            self.nested.on_uncall(frame.ident)

    def _finish(self, task: Task, node: int, elapsed_ns: int | None = None) -> None:
        self._release(task, node)
        self._logs.end(task)
        self._forget(task, ok=elapsed_ns is not None)
        if not isinstance(task, RankTask):
            self._perform(self._scheduler.finished(task.id, elapsed_ns))

    def _on_error(self, node: int, task: Task, frame: Frame) -> None:
        where = f"node {node}" + ("" if task.rank is None else f", rank {task.rank}") + f", task {task.name!r}"
        self._logs.end(task)
        failed = TaskFailure(pickle.loads(frame.body), where, node, task.name, "".join(task.tail))
        if task.options.retry_on and not task.is_cancelled and not isinstance(task, RankTask):
            error = failed.error()
            if isinstance(error, task.options.retry_on) and self._scheduler.spend_retry(task.id):
                self._release(task, node)
                self._perform(self._scheduler.again(task.id))
                return
        self._finish(task, node)
        if not task.is_cancelled or isinstance(task, RankTask):
            self._after.append(lambda: task.on_error(failed))

    def _on_lost(self, node: int, task: Task, frame: Frame) -> None:
        said = json.loads(frame.body)
        loss = Loss(
            node=node,
            signal=said["signal"],
            exit_code=said["exit_code"],
            started=said["started"],
            index=said["index"],
            at=said["at"],
            stack=said["stack"],
        )
        if task.is_cancelled or task.handles_loss:
            self._finish(task, node)
            if task.handles_loss:  # told in turn, behind the parts that came before
                self._after.append(lambda: task.on_lost(loss))
        elif not task.may_move:
            self._finish(task, node)
            error = loss_error(loss, task.name, task.tail)
            self._after.append(lambda: task.on_failed(error))
        else:
            self._logs.end(task)
            self._release(task, node)
            self._losses[task.id] = loss
            self._perform(self._scheduler.lost(task.id, started=bool(said["started"])))

    def _on_recalled(self, node: int, task: Task) -> None:
        if isinstance(task, RankTask):
            self._finish(task, node)
            self._after.append(lambda: task.ended(task))
        elif task.is_cancelled:
            self._finish(task, node)
        else:
            self._release(task, node)
            self._perform(self._scheduler.lost(task.id, started=False))

    # Direct lines ---------------------------------------------------------------------------------------------------

    def _on_line(self, node: int, frame: Frame) -> None:
        link = self._links[node]
        self._drop_line(link)
        link.line = Line(node, Channel(socket.socket(fileno=frame.fd)), frame.ident)

    def _line_gone(self, line: Readable) -> None:
        """Its slot has died. What the agent did not know of, it must know now: it says what became of the call."""
        with self._changing():
            link = self._links.get(line.node)
            if link is not None and link.line is line:
                self._drop_line(link)

    def _drop_line(self, link: NodeLink) -> None:
        line, link.line = link.line, None
        if line is None:
            return
        line.is_led = False
        self._watcher.remove(line)
        line.channel.close()
        link.hold()
        self._dirty.add(link)


class _Changing:
    """A `with` block in which the engine's books are open; cheaper than a generator."""

    __slots__ = ("_engine",)

    def __init__(self, engine: DirectEngine) -> None:
        self._engine = engine

    def __enter__(self) -> None:
        self._engine._open_books()

    def __exit__(self, *_: object) -> None:
        self._engine._close_books()


def _call_each(callbacks: list[Callable[[], object]]) -> None:
    """All of them, whatever one raises; the first error is raised at the end."""
    first: BaseException | None = None
    for callback in callbacks:
        try:
            callback()
        except BaseException as error:
            first = first or error
    if first is not None:
        raise first


def _forget_all_in_child() -> None:
    for engine in list(_engines):
        engine.forget_in_child()


os.register_at_fork(after_in_child=_forget_all_in_child)
