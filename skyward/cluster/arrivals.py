"""What comes from nodes and what it means: outcomes of tasks, their parts and output, and what is for other parts.

A part of `DirectEngine` in a file of its own: everything here is called while its books are open.
"""

from __future__ import annotations

import json
import pickle
from typing import TYPE_CHECKING

from ..errors import InternalError
from ..wire.frames import Frame, Kind
from .gang import RankTask
from .link import NodeLink, Readable
from .tasks import Loss, Task, TaskFailure, loss_error
from .threads import in_words, report

if TYPE_CHECKING:
    from .direct import DirectEngine

__all__ = ["Arrivals"]


class Arrivals:
    """Of one engine."""

    def __init__(self, engine: DirectEngine) -> None:
        self._engine = engine
        self._books = engine.books
        self._sending = engine.sending

    def on_frame(self, link: Readable, frame: Frame) -> None:  # noqa: C901, PLR0912, PLR0915  # a table
        engine, after = self._engine, self._books.after
        kind = frame.kind
        task = self._books.tasks.get(frame.ident)
        if kind == Kind.RESULT:
            received = link.received(frame)  # also for a task nobody waits for: its blobs must not pile up
            if task is not None:
                if not task.is_cancelled:  # noted before anything is sent: a value that is here is never lost
                    after.append(lambda: task.on_result(received))
                elif isinstance(task, RankTask):
                    after.append(lambda: task.ended(task))
                self._sending.finish(task, link.node, received.elapsed_ns)
        elif kind == Kind.LOG:
            engine.logs.add(link.node, task, frame.lane, frame.body)
        elif kind == Kind.PORT:
            engine.gangs.on_port(frame)
        elif kind == Kind.ELSEWHERE:
            link.is_led = False
        elif kind == Kind.LINE:
            engine.leading.on_line(link.node, frame)
        elif kind in (Kind.USAGE, Kind.NOTICE):
            (engine.teller.usage if kind == Kind.USAGE else engine.faults.on_notice)(link.node, frame.body)
        elif kind == Kind.ANSWER:
            engine.asking.on_answer(frame)
        elif kind in (Kind.CALL, Kind.UNCALL) and isinstance(link, NodeLink):
            self._on_nested(link, frame)
        elif task is None:
            if kind in (Kind.PART, Kind.ITEM):
                link.received(frame)
        elif kind == Kind.PART:
            part = link.received(frame)
            after.append(lambda: task.on_part(part))
        elif kind == Kind.ITEM:
            item = link.received(frame)
            after.append(lambda: task.on_item(item))
        elif kind == Kind.ERROR:
            self._on_error(link.node, task, frame)
        elif kind == Kind.STACK:
            if isinstance(task, RankTask):
                engine.gangs.on_stack(task, frame)
            else:
                self._sending.on_stack(task, frame)
        elif kind == Kind.LOST:
            self._on_lost(link.node, task, frame)
        elif kind == Kind.RECALLED:
            self._on_recalled(link.node, task)
        elif kind == Kind.IN_CREDIT:
            lane = frame.lane
            after.append(lambda: task.on_input_credit(lane))

    def give_up(self, link: Readable, frame: Frame, error: BaseException) -> None:
        """A frame could not be handled: the task that it is about fails."""
        report(error)
        task = self._books.tasks.get(frame.ident)
        if task is None:
            return
        failure = InternalError(f"{task.name!r} failed in the client: {in_words(error)}; please report this")
        failure.__cause__ = error
        if not task.is_cancelled or isinstance(task, RankTask):
            self._books.after.append(lambda: task.on_failed(failure))
        self._sending.finish(task, link.node)

    def _on_nested(self, link: NodeLink, frame: Frame) -> None:
        blobs = link.blobs_of_call(frame.ident)
        if frame.kind == Kind.CALL:
            self._engine.nested.on_call(link.node, frame, blobs)
        else:
            self._engine.nested.on_uncall(frame.ident)

    def _on_error(self, node: int, task: Task, frame: Frame) -> None:
        where = f"node {node}" + ("" if task.rank is None else f", rank {task.rank}") + f", task {task.name!r}"
        self._engine.logs.end(task)
        link = self._books.links.get(node)
        failed = TaskFailure(
            pickle.loads(frame.body),
            where,
            node,
            task.name,
            "".join(task.tail),
            is_elsewhere=link is not None and link.dialler is not None,
        )
        if task.options.retry_on and not task.is_cancelled and not isinstance(task, RankTask):
            error, scheduler = failed.error(), self._books.scheduler
            if isinstance(error, task.options.retry_on) and scheduler.spend_retry(task.id):
                self._sending.release(task, node)
                self._sending.perform(scheduler.again(task.id))
                return
        if not task.is_cancelled or isinstance(task, RankTask):
            self._books.after.append(lambda: task.on_error(failed))
        self._sending.finish(task, node)

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
            why=said.get("why", ""),
        )
        if task.is_cancelled or task.handles_loss:
            self._sending.finish(task, node)
            if task.handles_loss:  # told in turn, behind the parts that came before
                self._books.after.append(lambda: task.on_lost(loss))
        elif not task.may_move:
            self._sending.finish(task, node)
            error = loss_error(loss, task.name, task.tail)
            self._books.after.append(lambda: task.on_failed(error))
        else:
            self._engine.logs.end(task)
            self._sending.release(task, node)
            self._books.losses[task.id] = loss
            self._sending.perform(self._books.scheduler.lost(task.id, started=bool(said["started"])))

    def _on_recalled(self, node: int, task: Task) -> None:
        if isinstance(task, RankTask):
            self._sending.finish(task, node)
            self._books.after.append(lambda: task.ended(task))
        elif task.is_cancelled:
            self._sending.finish(task, node)
        else:
            self._sending.release(task, node)
            self._sending.perform(self._books.scheduler.lost(task.id, started=False))
