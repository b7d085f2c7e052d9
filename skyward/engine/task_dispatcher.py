"""Tasks on their way: taken into the ledger, sent where the scheduler decides, and written off when they have ended.

Everything here is called with the ledger locked. Other parts add themselves to the tables of `TaskDispatcher`: those
that carry out an action of the scheduler, and those that must know when a call ends.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from ..schedule.scheduler import Action, FailTask, Recall, Send
from ..wire.channel import ChannelClosed
from ..wire.frames import Frame, FrameKind
from .direct_lines import DirectLines
from .gang import RankTask
from .hangs import read_stack, timed_out
from .ledger import Ledger
from .link import NodeLink
from .log_router import LogRouter
from .task_events import TaskEvents
from .tasks import PulledTask, Task, cannot_send, loss_error, output_notes

__all__ = ["TaskDispatcher"]

_STACK_LIMIT_S = 2.5
"""Seconds to wait for the stack of a call whose time is up. A node that answers at all needs 50 ms."""


class TaskDispatcher:
    """Carry out the decisions of a scheduler.

    Args:
        grace_s: seconds that a cancelled call has to end by itself before its process is killed.
    """

    def __init__(
        self, ledger: Ledger, lines: DirectLines, task_events: TaskEvents, logs: LogRouter, *, grace_s: float
    ) -> None:
        self._ledger = ledger
        self._lines = lines
        self._task_events = task_events
        self._logs = logs
        self._grace_s = grace_s
        self.handlers: dict[type[Action], Callable[[Any], object]] = {
            Recall: lambda action: ledger.tell(action.node, FrameKind.RECALL, action.task),
            FailTask: self._fail,
        }
        """Carry out an action, by its type; the parts that own gangs and nested calls add theirs."""
        self.on_ended: defaultdict[int, set[Callable[[int], object]]] = defaultdict(set)
        """Called with the number of a task when it leaves the ledger. By task, so that most calls look up one key."""
        self.on_cancelled: list[Callable[[int], object]] = []
        """Called with the number of each task that is about to be stopped."""

    def submit(
        self, task: Task, nodes: tuple[int, ...] | None, *, parent: int | None = None, is_alone: bool = False
    ) -> None:
        """Take a task into the ledger and send it once it has a place.

        Args:
            nodes: where it may go; None: any node that is kept for no role.
            parent: the task or gang that calls it.
            is_alone: nothing else is open, so it may go on a direct line.

        Raises:
            PoolClosed
        """
        ledger = self._ledger
        ledger.require_open()
        ledger.tasks[task.id] = task
        actions = ledger.scheduler.submit(
            task.id,
            nodes=nodes,
            retries=task.options.retries,
            # The time of one begins when it is sent; the input of another goes with it and cannot be sent twice.
            in_advance=task.timeout_s is None and task.may_move,
            expected_ns=task.expected_ns,
            parent=parent,
        )
        self.perform(actions, task if is_alone else None)

    def perform(self, actions: list[Action], alone: Task | None = None) -> None:
        """Carry out what the scheduler decided. `alone`: the only open task, which may go on a direct line."""
        for action in actions:  # which grows: what could not be sent makes room for others
            if isinstance(action, Send):
                task = self._ledger.tasks[action.task]
                actions += self.send(task, action.node, is_alone=task is alone)
            else:
                self.handlers[type(action)](action)

    def send(self, task: Task, node: int, *, is_alone: bool = False) -> list[Action]:
        """Send a task to the agent of a node, or by its direct line. Returns what to do if it could not be sent."""
        ledger = self._ledger
        link = ledger.links[node]
        if not (is_alone and self._send_on_line(link, task)):
            if isinstance(task, PulledTask):  # another task came first; this one's caller sends it as blobs
                self.forget(task, ok=None)
                ledger.after.append(task.send_again)
                return ledger.scheduler.finished(task.id)
            ledger.dirty.add(link)
            try:
                link.send_task(task)
            except OSError as error:
                return self._not_sent(task, node, error)
        task.attempt += 1
        if task.timeout_s is not None:
            ledger.at(task.timeout_s, self._time_out, task.id, task.attempt)
        if self._task_events.is_heard:
            self._task_events.sent(task, node)
        task.on_sent()
        return []

    def _send_on_line(self, link: NodeLink, task: Task) -> bool:
        """Send a task on the direct line of a node. False: the node has no line, or the task does not fit it."""
        try:
            return link.send_on_line(task)
        except ChannelClosed:
            self._lines.drop(link)
            return False

    def _not_sent(self, task: Task, node: int, error: OSError) -> list[Action]:
        """No descriptor or no memory is left for it: this call fails, and the others go on."""
        failure = cannot_send(repr(task.name), error)
        self.forget(task)
        self._ledger.after.append(lambda: task.on_failed(failure))
        if isinstance(task, RankTask):
            self._ledger.tell(node, FrameKind.CANCEL, task.id)  # its process waits for it
            return []
        return self._ledger.scheduler.finished(task.id)

    def cancel(self, task_id: int) -> None:
        """Stop a task wherever it is; nobody gets its outcome. Idempotent."""
        ledger = self._ledger
        task = ledger.tasks.get(task_id)
        if task is None or task.is_cancelled:
            return
        task.is_cancelled = True
        for tell in self.on_cancelled:
            tell(task_id)
        ledger.idle.notify_all()
        node = ledger.scheduler.cancel(task_id)
        if node is None:
            self.forget(task)
            return
        if node in ledger.links:
            ledger.links[node].hold()
        ledger.tell(node, FrameKind.CANCEL, task_id, lane=int(self._grace_s * 10))

    # Time limits ----------------------------------------------------------------------------------------------------

    def _time_out(self, task_id: int, attempt: int) -> None:
        task = self._ledger.tasks.get(task_id)
        if task is None or task.is_cancelled or task.attempt != attempt:
            return
        node = self._ledger.scheduler.node_of(task_id)
        link = None if node is None else self._ledger.links.get(node)
        if link is None:
            self._stop_late(task_id, attempt)
            return
        link.hold()
        self._ledger.tell(link.node, FrameKind.TAKE_STACK, task_id)
        self._ledger.at(_STACK_LIMIT_S, self._stop_late, task_id, attempt)

    def on_stack(self, task: Task, frame: Frame) -> None:
        """Take the stack of a call whose time is up, and stop the call."""
        attempt = task.attempt
        self._ledger.after.append(lambda: self._read_stack(task.id, attempt, frame))

    def _read_stack(self, task_id: int, attempt: int, frame: Frame) -> None:
        said = json.loads(frame.body)
        text = read_stack(0, 0, said["stack"], said["state"]).traceback()  # reads the user's files: not under the lock
        with self._ledger:
            self._stop_late(task_id, attempt, text)

    def _stop_late(self, task_id: int, attempt: int, stack: str = "") -> None:
        task = self._ledger.tasks.get(task_id)
        if task is None or task.is_cancelled or task.attempt != attempt:
            return
        self.cancel(task_id)
        notes = [f"Where its Python code stood:\n{stack}"] if stack else []
        error = timed_out(task.name, task.timeout_s or 0.0, [*notes, *output_notes(task.tail)])
        self._ledger.after.append(lambda: task.on_failed(error))

    # Written off ----------------------------------------------------------------------------------------------------

    def _fail(self, action: FailTask) -> None:
        task = self._ledger.tasks[action.task]
        loss = self._ledger.losses.pop(task.id, None)
        if loss is None:
            loss = self._ledger.node_loss(action.node or 0, started=action.started)
        self.forget(task)
        error = loss_error(loss, task.name, task.tail)
        if not task.is_cancelled:
            self._ledger.after.append(lambda: task.on_failed(error))

    def finish(self, task: Task, node: int, elapsed_ns: int | None = None) -> None:
        """Write off a task that ended on its node, after `elapsed_ns` if it gave its value."""
        self.release(task, node)
        self._logs.end(task)
        self.forget(task, ok=elapsed_ns is not None)
        if not isinstance(task, RankTask):
            self.perform(self._ledger.scheduler.finished(task.id, elapsed_ns))

    def forget(self, task: Task, *, ok: bool | None = False) -> None:
        """Remove a task from the ledger. `ok`: whether it gave its value; None: another takes its place."""
        ledger = self._ledger
        ledger.tasks.pop(task.id, None)
        ledger.losses.pop(task.id, None)
        for tell in self.on_ended.pop(task.id, ()):
            tell(task.id)
        if ok is not None:
            self._task_events.ended(task, ok=ok)
        if not ledger.tasks and not ledger.gangs:
            ledger.idle.notify_all()

    def release(self, task: Task, node: int | None) -> None:
        """Let a node drop what a task needed there."""
        link = self._ledger.links.get(node) if node is not None else None
        if link is not None:
            link.release(task)
            if link.channel.has_output:
                self._ledger.dirty.add(link)
