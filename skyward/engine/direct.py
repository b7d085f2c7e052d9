"""Direct engine: the client holds a channel to each node's agent and hosts the scheduler.

Threads: any thread may submit and cancel. One I/O thread reads all channels and runs the deadlines. A submitting thread
writes to the socket itself, so that a call costs one thread switch instead of two.

The engine consists of parts that share one `ledger` under one lock. Each part gets its collaborators in its constructor
and knows no part above it:

    reader                the I/O thread; `leader` lets a waiting caller read in its place
    frame_handlers        a handler for each kind of frame from a node
    link_repair           links that break, nodes that are lost
    members               nodes that join, and nodes that are given back
    nested_calls          calls that tasks make
    task_values           values that tasks have references to
    gangs                 ranks that start and end as one
    actors                objects that live on nodes, and their calls in order
    nodes, open_streams   links to the agents; items to and from running tasks
    kept_values           values that stay on nodes
    questions, width      questions to running calls; more channels for a link
    task_channels         messages to and from running tasks
    shared_state          dictionaries, locks and more, which tasks and the program share
    transfers             blobs on their way from node to node
    task_dispatcher       tasks on their way to nodes and back
    direct_lines          sockets that bypass the agent
    ledger                open tasks and gangs, and the lock

An engine that runs on another machine than its client can use all parts except these, which know a client:

- `leader` reads for a waiting thread of this process, and its `may_pull` lets slots read this process's memory.
- `direct_lines` are sockets between processes of one machine, for the calls of `leader`.
- `log_router` puts lines together for the terminal and the sinks of this process.
- `link_repair` gets other machines from the pool (`Machines`), which is in this process.
- Tasks and gangs get their outcomes by method calls (`on_result`) and futures. They unpickle the user's errors if
  `retry_on` is set, and `nested_calls` unpickles options and errors of nested calls, so both need the user's modules.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Literal

from ..calls.futures import refuse_to_wait
from ..console.activity import RunningTask
from ..core import interrupts
from ..core.limits import raise_file_limit
from ..errors import InternalError, PoolClosed, SkywardError
from ..events import Emit, ignore
from ..schedule.scheduler import Scheduler
from ..shared.messages import CHANNEL
from ..values.machine import Machine, Machines
from ..wire.frames import FrameKind
from .actors import Actors
from .builder import TaskBuilder
from .direct_lines import DirectLines
from .frame_handlers import FrameHandlers
from .gang import Gang, RankTask, StartedRank
from .gangs import Gangs
from .kept_values import KeptValues
from .leader import Leader
from .ledger import Ledger
from .link import NodeLink
from .link_repair import LinkRepair
from .log_router import LogRouter
from .members import Membership
from .nested_calls import NestedCalls
from .nodes import NodeLinks
from .open_streams import OpenStreams
from .questions import OpenQuestions
from .reader import Reader
from .relief import Relief
from .running import running_tasks
from .shared_state import SharedState
from .task_channels import TaskChannels
from .task_dispatcher import TaskDispatcher
from .task_events import TaskCounts, TaskEvents
from .tasks import Task
from .transfers import Transfers
from .width import Width

if TYPE_CHECKING:
    from ..shared.store import Store
    from .log_router import LineSink

_CANCELLED_AT_ONCE = 1000
"""Most calls to cancel under one hold of the lock: some milliseconds of work."""

_engines: weakref.WeakSet[DirectEngine] = weakref.WeakSet()


class DirectEngine:
    """Engine (see `skyward.engine.engine`) whose scheduler runs in this process."""

    def __init__(
        self,
        job_id: str,
        *,
        cancel_grace_s: float,
        lines: LineSink | None,
        mask: Callable[[str], str] | None = None,
        initializer: bytes | None,
        emit: Emit = ignore,
        kept: frozenset[int] = frozenset(),
        default_timeout_s: float | None = None,
        direct_transfers: bool = True,
        channels: type[TaskChannels] = TaskChannels,
        numbers: Iterator[int] | None = None,
        make_store: Callable[[], Store] | None = None,
    ) -> None:
        self._grace_s = cancel_grace_s
        self.ledger = ledger = Ledger(Scheduler(kept), numbers)
        self._task_events = task_events = TaskEvents(emit)
        self._logs = LogRouter(lines, mask)
        self._lines = DirectLines(ledger)
        self._dispatcher = TaskDispatcher(ledger, self._lines, task_events, self._logs, grace_s=cancel_grace_s)
        self.streams = OpenStreams(ledger, self._dispatcher)
        self.nodes = NodeLinks(ledger, self._dispatcher, job_id=job_id, initializer=initializer, emit=emit)
        self._gangs = Gangs(ledger, self._dispatcher, self.nodes, self._logs, grace_s=cancel_grace_s)
        self.questions = OpenQuestions(ledger, self._dispatcher)
        self.shared = SharedState(ledger, make_store)
        self.channels = channels(ledger, {CHANNEL: self.shared})
        self.builder = TaskBuilder(
            ledger.numbers.__next__, self.nodes.ranks_per_node, self.cancel_gang, default_timeout_s
        )
        self.transfers = transfers = Transfers(ledger, emit, are_allowed=direct_transfers)
        self.values = KeptValues(ledger, self._dispatcher, transfers)
        self.actors = Actors(ledger, self._lines, self._dispatcher, self.nodes, self.builder, kept)
        self.nested_calls = NestedCalls(ledger, self._dispatcher, self._gangs, self.actors, self.builder, self.values)
        self.nodes.on_up += [self.nested_calls.held.on_up, self.values.on_up]
        lost = (
            self.actors.node_lost,
            self.values.node_lost,
            self._gangs.node_lost,
            self.nested_calls.node_lost,
            self.channels.node_lost,
        )
        self.members = Membership(ledger, self._lines, self._dispatcher, self.nodes, self.values, on_left=lost)
        self.link_repair = LinkRepair(
            ledger,
            self._lines,
            self._dispatcher,
            self.nodes,
            task_events,
            on_lost=(*lost, self.members.node_lost),
        )
        self.relief = Relief(ledger, self._dispatcher, task_events, self.members, self.link_repair)
        self.frame_handlers = FrameHandlers(
            ledger,
            self._dispatcher,
            self._logs,
            on_rank_stack=self._gangs.on_stack,
            received_kept=self.values.received,
            take_lent=self._lines.take_lent,
            others={
                FrameKind.PORT: lambda _, frame: self._gangs.on_port(frame),
                FrameKind.LINE: lambda link, frame: self._lines.on_line(link.node, frame),
                FrameKind.USAGE: lambda link, frame: task_events.usage(link.node, frame.body),
                FrameKind.NOTICE: lambda link, frame: self.relief.on_notice(link.node, frame.body),
                FrameKind.FETCHED: self.values.on_fetched,
                FrameKind.OFFERED: transfers.on_offered,
                FrameKind.PULLED: transfers.on_pulled,
                FrameKind.ANSWER: lambda _, frame: self.questions.on_answer(frame),
                FrameKind.ACTOR_GONE: self.actors.on_gone,
                FrameKind.CALL: self.nested_calls.on_call,
                FrameKind.UNCALL: self.nested_calls.on_uncall,
                FrameKind.CHANNEL: self.channels.on_open,
                FrameKind.MESSAGE: self.channels.on_frame,
                FrameKind.TAKEN: self.channels.on_frame,
                FrameKind.END_CHANNEL: self.channels.on_frame,
            },
        )
        self.reader = Reader(
            ledger,
            self.frame_handlers,
            self._lines,
            self.link_repair,
            Width(ledger, self._dispatcher),
            self.nodes.liveness,
            recall=self._dispatcher.recall,
            stop=self.streams.stop,
            died=self._die,
        )
        self.values.soon = self.actors.soon = self.reader.soon
        self.leader = Leader(ledger, self._dispatcher, self.reader.read)

    # Life -----------------------------------------------------------------------------------------------------------

    def start(self, machines: list[Machine], source: Machines) -> None:
        raise_file_limit()
        self.link_repair.source = source
        self.nodes.open(machines)
        with self.ledger.lock:
            self.ledger.is_open = True
            for machine in machines:
                self.nodes.up(machine)
            self.ledger.flush()
        self.begin()

    def begin(self) -> None:
        """Read channels from now on, and accept calls. Calls wait until `use` brings nodes."""
        self.ledger.is_open = True
        self.reader.start()
        _engines.add(self)

    def use(self, machines: list[Machine], source: Machines | None) -> None:
        """Connect to all agents of an engine that has begun: one whose way to them is a channel that it reads.

        Raises:
            Unreachable: An agent does not answer. All links are closed again.
        """
        self.link_repair.source = source
        self.nodes.open(machines)
        with self.ledger:
            for machine in machines:
                self.nodes.up(machine)
        self.ledger.watcher.wake()

    def use_again(self, machines: list[Machine], there: frozenset[int]) -> None:
        """Use the nodes of an earlier process, of which those in `there` are connected. Needs the ledger's lock."""
        self.ledger.machines.update((machine.node, machine) for machine in machines)
        for machine in machines:
            if machine.node in there:
                self.nodes.up(machine)
            else:
                self.link_repair.missing(machine)
        self.ledger.after.append(self.ledger.watcher.wake)

    @property
    def carrier(self) -> Literal["direct", "ray"]:
        return "direct"

    @property
    def was_started(self) -> bool:
        return self.reader.was_started

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        refuse_to_wait("closing the pool")
        ledger = self.ledger

        def is_idle() -> bool:
            return not ledger.is_open or (
                not ledger.arrivals
                and all(task.is_cancelled for task in ledger.tasks.values())
                and all(gang.is_cancelled for gang in ledger.gangs.values())
            )

        with ledger.idle:
            if timeout_s is None:
                interrupts.wait_for(lambda slice_s: ledger.idle.wait_for(is_idle, slice_s))
                return True
            return ledger.idle.wait_for(is_idle, timeout_s)

    def cancel_all(self, reason: SkywardError | None = None) -> None:
        with self.ledger:
            open_tasks = [task for task in self.ledger.tasks.values() if not isinstance(task, RankTask)]
            gangs = list(self.ledger.gangs.values())
        error = reason or _closed_early()
        for task in open_tasks:
            if not task.is_cancelled:
                task.on_failed(error)
        self._cancel_each(task.id for task in open_tasks)
        for gang in gangs:
            gang.future.settle_error(error)
            self.cancel_gang(gang.id)
        self.actors.cancel_all()

    def fail_waiting(self, error: SkywardError) -> None:
        self.cancel_all(error)

    def wait_stopped(self) -> bool:
        ledger = self.ledger

        def have_stopped() -> bool:
            # A call behind a broken link cannot report its end. It ends with its node.
            return not ledger.is_open or not (
                any(self._is_reachable(task) for task in ledger.tasks.values())
                or (ledger.gangs and self.nodes.are_attached)
            )

        with ledger.idle:
            return ledger.idle.wait_for(have_stopped, self._grace_s + 1)

    def _is_reachable(self, task: Task) -> bool:
        node = self.ledger.node_of(task)
        link = self.ledger.links.get(0 if node is None else node)
        return link is None or link.channel.is_attached

    def close(self) -> None:
        ledger = self.ledger
        with ledger.lock:
            if not ledger.is_open:
                if not self.reader.was_started:
                    self._release()
                return
            tasks, gangs = ledger.close_all()
            self.nodes.opener.close()
            for node in ledger.links:
                ledger.tell(node, FrameKind.SHUTDOWN)
            ledger.flush()
            for task in tasks:
                self._task_events.ended(task, ok=False)
        with ledger:
            self.questions.close()
            self.channels.close()
            self.shared.close()
            self.values.close()
            self.actors.stop()
        self.nested_calls.close()
        _fail(tasks, gangs, _closed_early())
        ledger.watcher.wake()
        self.reader.join()
        self.nested_calls.join()
        self._logs.flush()
        self._release()

    def _release(self) -> None:
        self.nodes.close()
        self.ledger.watcher.close()
        interrupts.restore()
        _engines.discard(self)

    def _die(self, cause: BaseException) -> None:
        """Fail everything that is open, because the I/O thread has given up."""
        error = InternalError(f"I/O thread of the pool: died of {type(cause).__name__}: {cause}; report this bug")
        error.__cause__ = cause
        with self.ledger.lock:
            tasks, gangs = self.ledger.close_all()
            self.channels.close()
        with self.ledger:
            self.shared.close()
            self.values.close()
            self.actors.stop()
        _fail(tasks, gangs, error)

    def forget_in_child(self) -> None:
        """Close the descriptors and the pool in a forked child of the client."""
        self.ledger.forget_in_child()
        self.nodes.close_in_child()
        with contextlib.suppress(OSError):  # closed before the fork
            self.ledger.watcher.close_in_child()

    # Calls ----------------------------------------------------------------------------------------------------------

    def submit(self, task: Task, *, nodes: tuple[int, ...] | None = None, after_s: float = 0.0) -> None:
        is_plain = nodes is None and not after_s
        if is_plain and not task.actor and task.options.need is None and self.ledger.arrive(task):
            return
        with self.ledger:
            if is_plain and self.leader.is_idle:
                self.leader.submit_unled(task)
            else:
                self._dispatcher.submit(task, nodes, after_s=after_s)

    def take_up(
        self, task: Task, node: int, nodes: tuple[int, ...] | None, devices: tuple[int, ...] | None = None
    ) -> None:
        """Take a task that runs on a node already; see `TaskDispatcher.take_up`."""
        with self.ledger:
            self._dispatcher.take_up(task, node, nodes, devices)

    def take_up_gang(self, gang: Gang, ranks: Mapping[int, StartedRank]) -> None:
        """Take a gang that runs already; see `Gangs.take_up`."""
        with self.ledger:
            self._gangs.take_up(gang, ranks)

    def delays_starts(self, link: NodeLink, delay_s: float) -> None:
        """Note how long a task waits here before it is sent to a node. Needs the ledger's lock."""
        link.start_delay_s = delay_s
        round_trip_ns = (link.channel.round_trip_s + delay_s) * 1e9
        self._dispatcher.perform(self.ledger.scheduler.set_round_trip(link.node, round_trip_ns))

    def submit_gang(self, gang: Gang) -> None:
        with self.ledger:
            self.ledger.require_open()
            self._gangs.submit(gang)

    def cancel(self, task_id: int) -> None:
        with self.ledger:
            self._dispatcher.cancel(task_id)

    def _cancel_each(self, task_ids: Iterable[int]) -> None:
        """Cancel several tasks, in batches so that other threads and Ctrl-C get their turn in between.

        The newest go first. Otherwise each cancelled task would make room for a waiting one, which would be sent to a
        node only to be cancelled there.
        """
        newest_first = sorted(task_ids, reverse=True)
        for start in range(0, len(newest_first), _CANCELLED_AT_ONCE):
            with self.ledger:
                for task_id in newest_first[start : start + _CANCELLED_AT_ONCE]:
                    self._dispatcher.cancel(task_id)

    def cancel_gang(self, gang_id: int) -> None:
        with self.ledger:
            self._gangs.cancel(gang_id)

    def abandon(self, task_id: int) -> None:
        self.reader.abandon(task_id)

    # Monitoring -----------------------------------------------------------------------------------------------------

    def counts(self) -> TaskCounts:
        with self.ledger:
            busy, queued = self.ledger.scheduler.counts()
            ended, failed = self._task_events.calls_ended, self._task_events.calls_failed
            why = self.ledger.scheduler.why_oldest() if queued else ""
        return TaskCounts(busy=busy, queued=queued, ended=ended, failed=failed, why=why)

    def why_waiting(self, call: int) -> str:
        with self.ledger:
            if why := self.actors.why_waiting(call) or self.ledger.scheduler.why_waiting(call):
                return why
            task = self.ledger.tasks.get(call)
            is_paused = task is not None and self.ledger.scheduler.node_of(call) is None
        return "waits for the pause before its next run" if is_paused else ""

    def running(self) -> tuple[RunningTask, ...]:
        with self.ledger.lock:
            return running_tasks(self.ledger, self._logs)

    def tell_tasks(self, is_heard: bool) -> None:
        self._task_events.is_heard = is_heard


def _closed_early() -> PoolClosed:
    return PoolClosed("pool: closed before the call ended; wait for its value inside the `with` block")


def _fail(tasks: list[Task], gangs: list[Gang], error: SkywardError) -> None:
    """Fail all these tasks and gangs, without the lock. A gang's future stands for its ranks."""
    for task in tasks:
        if not isinstance(task, RankTask):
            task.on_failed(error)
    for gang in gangs:
        gang.future.settle_error(error)


def _forget_all_in_child() -> None:
    for engine in list(_engines):
        engine.forget_in_child()


os.register_at_fork(after_in_child=_forget_all_in_child)
