"""Path of a task: into the ledger, to the node that the scheduler chose, and out of the ledger when it has ended.

Everything here is called with the ledger locked, except `_read_stack`. Other parts register in the tables of
`TaskDispatcher` to carry out actions of the scheduler, or to be called when a call ends.
"""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from ..schedule.actions import Action, FailTask, Recall, Send
from ..schedule.home import LOOK_S
from ..values.devices import Grant
from ..wire.blobs import Blob
from ..wire.channel import ChannelClosed
from ..wire.frames import Frame, FrameKind
from .direct_lines import DirectLines
from .gang import RankTask
from .ledger import Ledger
from .link import LineEnd, NodeLink
from .log_router import LogRouter
from .retries import Rerun, Retries
from .task_events import TaskEvents
from .tasks import Loss, PulledTask, Task, cannot_send, loss_error, output_notes

_KNOWN = 1000
"""Functions whose last duration is known."""
_LONG_NS = 50_000_000
"""Last duration of a function, in nanoseconds, from which its next call is not expected to be short. A busy machine may
stop a tiny one for a while.
"""
_STACK_LIMIT_S = 2.5
"""Seconds to wait for the stack of a call that exceeded its timeout. A healthy node answers within 50 ms."""


class ActorQueues(Protocol):
    """Calls of actors, in the order in which they were made. Called with the ledger locked."""

    def submit(self, task: Task, *, is_alone: bool) -> None:
        """Queue a call, and send it if its actor has room."""
        ...

    def took_up(self, task: Task) -> None:
        """Note a call that was sent to its actor by an earlier head."""
        ...

    def ended(self, task: Task) -> None:
        """Forget a call that has left the ledger."""
        ...

    def lost(self, task: Task, loss: Loss) -> None:
        """Handle that the process of an actor died with a call in it, or before the call began."""
        ...


class TaskDispatcher:
    """Executor of the scheduler's decisions.

    Args:
        ledger: Shared state of the engine.
        lines: Direct lines, for the only open task.
        task_events: Counts tasks and emits events.
        logs: Output of tasks.
        grace_s: Seconds that a cancelled call has to end by itself before its process is killed.
    """

    def __init__(
        self, ledger: Ledger, lines: DirectLines, task_events: TaskEvents, logs: LogRouter, *, grace_s: float
    ) -> None:
        self._ledger = ledger
        self._lines = lines
        self._task_events = task_events
        self._logs = logs
        self._grace_s = grace_s
        ledger.take_in = self._take_in
        self.handlers: dict[type[Action], Callable[[Any], object]] = {
            Recall: lambda action: ledger.tell(action.node, FrameKind.RECALL, action.task),
        }
        """Functions that carry out actions, by type. The parts for gangs and nested calls add theirs."""
        self.on_ended: defaultdict[int, set[Callable[[int], object]]] = defaultdict(set)
        """Functions to call with the number of a task when it leaves the ledger, by task. Most calls have none."""
        self.on_cancelled: list[Callable[[int], object]] = []
        """Functions to call with the number of each task that is about to be stopped."""
        self._is_looking = False
        """Whether a look of the scheduler at its home node is due."""
        self._known: OrderedDict[bytes, int] = OrderedDict()
        """Last duration of each function in nanoseconds, by its digest; of few functions."""
        self._taken_up: set[int] = set()
        """Tasks that another engine has sent, with their functions and blobs."""
        self.on_wanted: Callable[[NodeLink], object] = lambda link: None
        """Function to call with the link of a node that needs blobs of other nodes."""
        self.actors: ActorQueues
        """Calls of actors, which the scheduler does not place. Set by that part."""
        self.places_of: Callable[[tuple[Blob, ...]], tuple[int, ...]] = lambda blobs: ()
        """Function that returns the nodes where the bytes of these blobs lie, if they lie on nodes."""

    def submit(
        self,
        task: Task,
        nodes: tuple[int, ...] | None,
        *,
        parent: int | None = None,
        is_alone: bool = False,
        is_of_many: bool = False,
        after_s: float = 0.0,
    ) -> None:
        """Take a task into the ledger, and send it once it has a slot.

        Args:
            task: The task.
            nodes: Nodes that may run it; None: any node without a role.
            parent: Task or gang that made the call.
            is_alone: Whether nothing else is open, so that it may go on a direct line.
            is_of_many: Whether many others come together with it, to a program that is slower than its nodes.
            after_s: Seconds to wait before the scheduler gets it. It is open meanwhile, and can be cancelled.

        Raises:
            PoolClosed: The pool is closed.
        """
        ledger = self._ledger
        ledger.require_open()
        ledger.tasks[task.id] = task
        if task.actor:
            self.actors.submit(task, is_alone=is_alone)
            return
        if after_s or task.options.allow_reruns:
            task.rerun = Rerun(nodes, parent, Retries(task.options))
        if after_s:
            ledger.at(after_s, self._wake, task.id, task.attempt)
        else:
            actions = self._queue(task, nodes, parent, is_of_many=is_of_many)
            self.perform(actions, task if is_alone else None)

    def take_up(
        self, task: Task, node: int, nodes: tuple[int, ...] | None, devices: tuple[int, ...] | None = None
    ) -> None:
        """Take a task into the ledger that runs on a node already. Its time limit begins again.

        Args:
            task: The task, which another engine has sent there.
            node: The node.
            nodes: Nodes that may run it, if it runs again.
            devices: Devices of the node that it has; None: those of its slot.
        """
        ledger = self._ledger
        self.adopt(task)
        if task.options.allow_reruns:
            task.rerun = Rerun(nodes, None, Retries(task.options))
        if task.timeout_s is not None:
            ledger.at(task.timeout_s, self._time_out, task.id, task.attempt)
        if task.actor:
            self.actors.took_up(task)
        else:
            ledger.scheduler.take_up(task.id, node, nodes=nodes, need=task.options.need, devices=devices)

    def adopt(self, task: Task) -> None:
        """Take a task or a rank into the ledger that another engine has sent: the links hold nothing of it."""
        self._ledger.tasks[task.id] = task
        self._taken_up.add(task.id)
        task.attempt = 1

    def _take_in(self, task: Task) -> None:
        """Submit a task that was left to this block, whose caller has its future already."""
        try:
            self.submit(task, None, is_of_many=self._ledger.is_behind)
        except Exception as error:  # the pool was closed meanwhile
            self._ledger.tasks.pop(task.id, None)
            self._ledger.after.append(partial(task.on_failed, error))

    def _queue(
        self, task: Task, nodes: tuple[int, ...] | None, parent: int | None, *, is_of_many: bool = False
    ) -> list[Action]:
        return self._ledger.scheduler.submit(
            task.id,
            nodes=nodes,
            # Sending in advance would start the timeout before the task runs. And a task whose input goes with it
            # could not be recalled and sent again.
            in_advance=task.timeout_s is None and task.may_move,
            expected_ns=task.expected_ns,
            parent=parent,
            is_rerun=task.attempt > 0,
            prefer=self.places_of(task.payload.blobs) if task.payload.blobs else (),
            need=task.options.need,
            in_bulk=task.in_bulk,
            is_of_many=is_of_many,
            is_typical=task.calls == 1 and self._known.get(task.function.digest, _LONG_NS) < _LONG_NS,
        )

    def recall(self) -> None:
        """Recall tasks that wait on a node while slots of another are idle."""
        self.perform(self._ledger.scheduler.recall())

    def rerun_failed(self, task: Task, node: int) -> bool:
        """Let a task that raised on a node run again after its pause. Return False if no retry is left."""
        rerun = task.rerun
        pause_s = None if rerun is None else rerun.retries.spend(is_node_loss=False)
        if rerun is None or pause_s is None:
            return False
        task.on_retry(pause_s)
        self.release(task, node)
        self.perform(self._ledger.scheduler.finished(task.id))  # its slot is free during the pause
        self.perform(self._rerun_after(pause_s, task, rerun))
        return True

    def _rerun_after(self, pause_s: float, task: Task, rerun: Rerun) -> list[Action]:
        """Submit a task that the scheduler has forgotten once more. Return the actions that follow at once.

        The ledger holds the pause. So a cancel or the end of the pool finds the task there, and no thread sleeps.
        """
        if not pause_s:
            return self._queue(task, rerun.nodes, rerun.parent)
        self._ledger.at(pause_s, self._wake, task.id, task.attempt)
        return []

    def _wake(self, task_id: int, attempt: int) -> None:
        """Give a task to the scheduler once its pause is over."""
        task = self._ledger.tasks.get(task_id)
        if task is not None and task.rerun is not None and task.attempt == attempt:
            self.perform(self._queue(task, task.rerun.nodes, task.rerun.parent))

    def perform(self, actions: list[Action], alone: Task | None = None) -> None:
        """Carry out the scheduler's decisions. `alone` is the only open task, which may go on a direct line."""
        # The list grows meanwhile: a task that cannot be sent makes room for others, and a lost one is queued again.
        # Such actions wait for their turn: a task that is sent behind a gang must not arrive before the gang.
        for action in actions:
            if isinstance(action, Send):
                task = self._ledger.tasks[action.task]
                if action.devices is not None or task.options.need is not None:
                    options = task.options
                    task.grant = Grant.of_booking(
                        action.devices, gpus=options.gpus, cpus=options.cpus, memory_gib=options.memory_gib
                    )
                elif task.attempt:  # the devices of an earlier run, perhaps on another node
                    task.grant = None
                actions += self.send(task, action.node, is_alone=task is alone)
            elif isinstance(action, FailTask):
                actions += self._fail(action)
            else:
                self.handlers[type(action)](action)
        if self._ledger.scheduler.needs_look and not self._is_looking:
            self._is_looking = True
            self._ledger.at(LOOK_S, self._look, 0, 0)

    def _look(self, _call: int, _attempt: int) -> None:
        self._is_looking = False
        scheduler = self._ledger.scheduler
        link = None if scheduler.home is None else self._ledger.links.get(scheduler.home)
        self.perform(scheduler.look(0 if link is None else link.unsent))

    def send(self, task: Task, node: int, *, is_alone: bool = False) -> list[Action]:
        """Send a task to the agent of a node, or by its direct line. Return further actions if it cannot be sent."""
        ledger = self._ledger
        link = ledger.links[node]
        end: LineEnd = ledger.actors[task.actor] if task.actor else link
        if not (is_alone and self._send_on_line(end, task)):
            if isinstance(task, PulledTask):  # another task came first, so this one's caller sends it as blobs
                self.forget(task, ok=None)
                ledger.after.append(task.send_again)
                return ledger.scheduler.finished(task.id)
            ledger.dirty.add(link)
            if end.on_line:  # before the task: otherwise the agent would count the end's slot as free
                end.hold()
            try:
                link.send_task(task)
            except OSError as error:
                return self._not_sent(task, node, error)
            if link.wanted:
                self.on_wanted(link)
        task.attempt += 1
        if task.timeout_s is not None:
            ledger.at(task.timeout_s, self._time_out, task.id, task.attempt)
        if self._task_events.is_heard:
            self._task_events.sent(task, node)
        task.on_sent()
        return []

    def _send_on_line(self, end: LineEnd, task: Task) -> bool:
        """Send a task on the direct line to a place. Return False if there is no line that takes it."""
        try:
            return end.send_on_line(task)
        except ChannelClosed:
            self._lines.drop(end)
            return False

    def _not_sent(self, task: Task, node: int, error: OSError) -> list[Action]:
        """Fail a call for which no descriptor or memory is left. Other calls continue."""
        failure = cannot_send(repr(task.name), error)
        self.forget(task)
        self._ledger.after.append(lambda: task.on_failed(failure))
        if isinstance(task, RankTask):
            self._ledger.tell(node, FrameKind.CANCEL, task.id)  # its process has started and waits for the task
            return []
        return self._ledger.scheduler.finished(task.id)

    def cancel(self, task_id: int) -> None:
        """Stop a task wherever it is, and drop its outcome. Idempotent.

        A task that was sent stays in the ledger until its node reports the end, because its slot is busy until then.
        """
        ledger = self._ledger
        task = ledger.tasks.get(task_id)
        if task is None or task.is_cancelled:
            return
        task.is_cancelled = True
        for callback in self.on_cancelled:
            callback(task_id)
        ledger.idle.notify_all()
        node = self.take_back(task)
        if node is None:
            self.forget(task)
            return
        end = ledger.end_of(task)
        if end is not None:
            end.hold()
        ledger.tell(node, FrameKind.CANCEL, task_id, lane=int(self._grace_s * 10))

    def take_back(self, task: Task) -> int | None:
        """Take back a task that waits here, and return None; return the node of a task that was sent."""
        return self._ledger.node_of(task) if task.actor else self._ledger.scheduler.cancel(task.id)

    # Time limits ----------------------------------------------------------------------------------------------------

    def _time_out(self, task_id: int, attempt: int) -> None:
        task = self._ledger.tasks.get(task_id)
        if task is None or task.is_cancelled or task.attempt != attempt:
            return
        node = self._ledger.node_of(task)
        link, end = None if node is None else self._ledger.links.get(node), self._ledger.end_of(task)
        if link is None or end is None:
            self._stop_late(task_id, attempt)
            return
        end.hold()
        self._ledger.tell(link.node, FrameKind.TAKE_STACK, task_id)
        self._ledger.at(_STACK_LIMIT_S, self._stop_late, task_id, attempt)

    def on_stack(self, task: Task, frame: Frame) -> None:
        """Take the stack of a call that exceeded its timeout, and stop the call."""
        attempt = task.attempt
        self._ledger.after.append(lambda: self._read_stack(task.id, attempt, frame))

    def _read_stack(self, task_id: int, attempt: int, frame: Frame) -> None:
        from .hangs import read_stack  # here and below: few calls exceed their time

        answer = json.loads(frame.body)
        # Without the lock, because this reads the user's source files.
        text = read_stack(0, 0, answer["stack"], answer["state"]).traceback()
        with self._ledger:
            self._stop_late(task_id, attempt, text)

    def _stop_late(self, task_id: int, attempt: int, stack: str = "") -> None:
        task = self._ledger.tasks.get(task_id)
        if task is None or task.is_cancelled or task.attempt != attempt:
            return
        self.cancel(task_id)
        from .hangs import timed_out

        notes = [f"Python stack at that moment:\n{stack}"] if stack else []
        error = timed_out(task.name, task.timeout_s or 0.0, [*notes, *output_notes(task.tail)])
        self._ledger.after.append(lambda: task.on_failed(error))

    # Ending ---------------------------------------------------------------------------------------------------------

    def _fail(self, action: FailTask) -> list[Action]:
        """Fail a task that cannot run, or that was lost. Return further actions if it may run again."""
        task = self._ledger.tasks[action.task]
        loss = self._ledger.losses.pop(task.id, None)
        if loss is None:
            loss = self._ledger.node_loss(action.node or 0, started=action.started)
        # False: no node is left that it may go to.
        may_run = action.started is not False and not task.is_cancelled
        if may_run and task.rerun is not None and loss.memory_gib is None:  # it would only run out of memory again
            pause_s = task.rerun.retries.spend(is_node_loss=loss.is_node)
            if pause_s is not None:
                task.on_retry(pause_s)
                return self._rerun_after(pause_s, task, task.rerun)
        self.forget(task)
        error = loss_error(loss, task.name, task.tail)
        if not task.is_cancelled:
            self._ledger.after.append(lambda: task.on_failed(error))
        return []

    def fail(self, task: Task, node: int, error: BaseException) -> None:
        """Stop a task that was sent, and fail it."""
        if isinstance(task, RankTask):
            self.forget(task)
            self._ledger.tell(node, FrameKind.CANCEL, task.id)
        elif task.is_cancelled:
            return
        else:
            self.cancel(task.id)
        self._ledger.after.append(lambda: task.on_failed(error))

    def finish(self, task: Task, node: int, elapsed_ns: int | None = None) -> None:
        """Remove a task that ended on its node. `elapsed_ns` is its duration if it returned a value, else None."""
        self.release(task, node)
        self._logs.end(task)
        self.forget(task, ok=elapsed_ns is not None)
        if not isinstance(task, RankTask):
            if elapsed_ns is not None and self._ledger.scheduler.home is not None:
                self._learn(task.function.digest, elapsed_ns)
            self.perform(self._ledger.scheduler.finished(task.id, elapsed_ns))

    def _learn(self, function: bytes, elapsed_ns: int) -> None:
        """Note how long a function took. A call of one that is not known may take any time."""
        self._known[function] = elapsed_ns
        if len(self._known) > _KNOWN:
            self._known.popitem(last=False)

    def forget(self, task: Task, *, ok: bool | None = False) -> None:
        """Remove a task from the ledger. `ok` tells whether it returned a value; None: another task takes its place."""
        ledger = self._ledger
        ledger.tasks.pop(task.id, None)
        ledger.losses.pop(task.id, None)
        if task.actor:
            self.actors.ended(task)
        for callback in self.on_ended.pop(task.id, ()):
            callback(task.id)
        if ok is not None:
            self._task_events.ended(task, ok=ok)
        if not ledger.tasks and not ledger.gangs:
            ledger.idle.notify_all()

    def release(self, task: Task, node: int | None) -> None:
        """Let a node drop the function and blobs of a task."""
        if task.id in self._taken_up:
            self._taken_up.discard(task.id)
            return
        link = self._ledger.links.get(node) if node is not None else None
        actor = self._ledger.actors.get(task.actor) if task.actor else None
        if actor is not None and actor.free_line(task):
            return
        if link is not None and link.release(task):
            self._ledger.dirty.add(link)
