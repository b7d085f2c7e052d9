"""Tasks on their way: taken into the books, sent where the scheduler says, and written off when they have ended.

A part of `DirectEngine` in a file of its own: everything here is called while its books are open.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ..schedule.actions import Action, FailTask, Recall, Refuse, Send, StartGang
from ..wire.frames import Frame, Kind
from .gang import RankTask
from .hangs import read_stack, timed_out
from .tasks import PulledTask, Task, cannot_send, loss_error, output_notes

if TYPE_CHECKING:
    from .direct import DirectEngine

__all__ = ["Sending"]

_STACK_LIMIT_S = 2.5
"""Seconds that a call whose time is up is waited for to say where it stands. It takes 50 ms, unless nothing answers."""


class Sending:
    """Carries out what the scheduler of one engine decides."""

    def __init__(self, engine: DirectEngine) -> None:
        self._engine = engine
        self._books = engine.books

    def submit(self, task: Task, nodes: tuple[int, ...] | None, *, parent: int | None = None) -> None:
        """`parent`: the task or gang that calls it. Raises PoolClosed."""
        books = self._books
        books.require_open()
        books.tasks[task.id] = task
        actions = books.scheduler.submit(
            task.id,
            nodes=nodes,
            retries=task.options.retries,
            # The time of one begins when it is sent; the input of another goes with it and cannot be sent twice.
            in_advance=task.timeout_s is None and task.may_move,
            expected_ns=task.expected_ns,
            parent=parent,
        )
        self.perform(actions)

    def perform(self, actions: list[Action]) -> None:
        books = self._books
        for action in actions:  # which grows: what could not be sent makes room for others
            if isinstance(action, Send):
                actions += self.send(books.tasks[action.task], action.node)
            elif isinstance(action, Recall):
                books.tell(action.node, Kind.RECALL, action.task)
            elif isinstance(action, StartGang):
                self._engine.gangs.start(action)
            elif isinstance(action, FailTask):
                self._fail(books.tasks[action.task], action)
            elif isinstance(action, Refuse):
                self._engine.nested.refuse(action)
            else:
                self._engine.gangs.fail(action)

    def send(self, task: Task, node: int) -> list[Action]:
        """Send it by the node's direct line if it is alone, else to its agent. What is to be done if it could not."""
        engine, books = self._engine, self._books
        link = books.links[node]
        if not (task is engine.leading.alone and engine.leading.send_on_line(link, task)):
            if isinstance(task, PulledTask):  # another task came first; this one's caller sends it as blobs
                self.forget(task, ok=None)
                books.after.append(task.send_again)
                return books.scheduler.finished(task.id)
            books.dirty.add(link)
            try:
                link.send_task(task)
            except OSError as error:
                return self._not_sent(task, node, error)
        task.attempt += 1
        if task.timeout_s is not None:
            books.at(task.timeout_s, self._time_out, task.id, task.attempt)
        if engine.teller.is_heard:
            engine.teller.sent(task, node)
        task.on_sent()
        return []

    def _not_sent(self, task: Task, node: int, error: OSError) -> list[Action]:
        """No descriptor or no memory is left for it: this call fails, and the others go on."""
        failure = cannot_send(repr(task.name), error)
        self.forget(task)
        self._books.after.append(lambda: task.on_failed(failure))
        if isinstance(task, RankTask):
            self._books.tell(node, Kind.CANCEL, task.id)  # its process waits for it
            return []
        return self._books.scheduler.finished(task.id)

    def _time_out(self, task_id: int, attempt: int) -> None:
        task = self._books.tasks.get(task_id)
        if task is None or task.is_cancelled or task.attempt != attempt:
            return
        if isinstance(task, RankTask):
            self._engine.gangs.time_out(task)
            return
        node = self._books.scheduler.node_of(task_id)
        link = None if node is None else self._books.links.get(node)
        if link is None:
            self._stop_late(task_id, attempt)
            return
        link.hold()
        self._books.tell(link.node, Kind.TAKE_STACK, task_id)
        self._books.at(_STACK_LIMIT_S, self._stop_late, task_id, attempt)

    def on_stack(self, task: Task, frame: Frame) -> None:
        """A call whose time is up says where it stands."""
        attempt = task.attempt
        self._books.after.append(lambda: self._read_stack(task.id, attempt, frame))

    def _read_stack(self, task_id: int, attempt: int, frame: Frame) -> None:
        said = json.loads(frame.body)
        text = read_stack(0, 0, said["stack"], said["state"]).traceback()  # reads the user's files: not under the lock
        with self._books:
            self._stop_late(task_id, attempt, text)

    def _stop_late(self, task_id: int, attempt: int, stack: str = "") -> None:
        task = self._books.tasks.get(task_id)
        if task is None or task.is_cancelled or task.attempt != attempt:
            return
        self._engine.cancel(task_id)
        notes = [f"Where its Python code stood:\n{stack}"] if stack else []
        error = timed_out(task.name, task.timeout_s or 0.0, [*notes, *output_notes(task.tail)])
        self._books.after.append(lambda: task.on_failed(error))

    def _fail(self, task: Task, action: FailTask) -> None:
        loss = self._books.losses.pop(task.id, None)
        if loss is None:
            loss = self._engine.faults.node_loss(action.node or 0, started=action.started)
        self.forget(task)
        error = loss_error(loss, task.name, task.tail)
        if not task.is_cancelled:
            self._books.after.append(lambda: task.on_failed(error))

    # Written off ----------------------------------------------------------------------------------------------------

    def finish(self, task: Task, node: int, elapsed_ns: int | None = None) -> None:
        """It has ended on its node, after `elapsed_ns` if it gave its value."""
        self.release(task, node)
        self._engine.logs.end(task)
        self.forget(task, ok=elapsed_ns is not None)
        if not isinstance(task, RankTask):
            self.perform(self._books.scheduler.finished(task.id, elapsed_ns))

    def forget(self, task: Task, *, ok: bool | None = False) -> None:
        """It leaves the books. `ok`: whether it gave its value; None: another takes its place."""
        engine, books = self._engine, self._books
        books.tasks.pop(task.id, None)
        books.losses.pop(task.id, None)
        engine.asking.ended(task.id)
        engine.nested.ended(task.id)
        if ok is not None:
            engine.teller.ended(task, ok=ok)
        if not books.tasks and not books.gangs:
            books.idle.notify_all()

    def release(self, task: Task, node: int | None) -> None:
        """The node has done with it: what it stood on there may be dropped."""
        link = self._books.links.get(node) if node is not None else None
        if link is not None:
            link.release(task)
            if link.channel.has_output:
                self._books.dirty.add(link)
