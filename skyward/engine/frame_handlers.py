"""Handlers for the frames of nodes: outcomes of tasks, their parts, items and output.

The table also has the handlers of other parts of the engine. All of them are called with the ledger locked.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping
from functools import partial

from ..errors import InternalError
from ..wire.frames import KEPT, Frame, FrameKind
from .gang import RankTask
from .ledger import Ledger
from .link import DirectLine, Readable
from .log_router import LogRouter
from .retries import has_retry_on, is_retried_on
from .task_dispatcher import TaskDispatcher
from .tasks import Loss, Received, Task, TaskFailure, loss_error
from .threads import in_words, report

Handler = Callable[[Readable, Frame], object]
"""Function that takes the channel and the frame that it brought."""


class FrameHandlers:
    """Table of handlers by kind of frame.

    Args:
        ledger: Shared state of the engine.
        dispatcher: Takes ended tasks and stacks of tasks.
        logs: Takes output.
        on_rank_stack: Takes the stack of a rank.
        received_kept: Makes the payload of a result that stays on its node.
        take_lent: Copies a value that is in the memory of its process, then calls the given function with the copy.
        others: Further handlers, by kind of frame.
    """

    def __init__(
        self,
        ledger: Ledger,
        dispatcher: TaskDispatcher,
        logs: LogRouter,
        *,
        on_rank_stack: Callable[[RankTask, Frame], object],
        received_kept: Callable[[Readable, Frame], Received],
        take_lent: Callable[[DirectLine, int, Received, Callable[[Received], object]], object],
        others: Mapping[int, Handler],
    ) -> None:
        self._ledger = ledger
        self._dispatcher = dispatcher
        self._logs = logs
        self._on_rank_stack = on_rank_stack
        self._received_kept = received_kept
        self._take_lent = take_lent
        self.handlers: dict[int, Handler] = {
            FrameKind.RESULT: self._on_result,
            FrameKind.LOG: self._on_log,
            FrameKind.DISPLAY: self._on_display,
            FrameKind.PART: self._on_part,
            FrameKind.ITEM: self._on_item,
            FrameKind.ERROR: self._about_task(self._on_error),
            FrameKind.STACK: self._about_task(self._on_stack),
            FrameKind.LOST: self._about_task(self._on_lost),
            FrameKind.RECALLED: self._about_task(self._on_recalled),
            FrameKind.IN_CREDIT: self._about_task(self._on_input_credit),
            FrameKind.ELSEWHERE: self._on_elsewhere,
            **others,
        }
        """Handlers by kind of frame. Frames of other kinds are ignored, because newer agents may send them."""

    def give_up(self, link: Readable, frame: Frame, error: BaseException) -> None:
        """Fail the task of a frame whose handler raised, so that its caller does not wait forever."""
        report(error)
        task = self._ledger.tasks.get(frame.ident)
        if task is None:
            return
        failure = InternalError(f"{task.name!r}: its outcome could not be handled, {in_words(error)}; report this bug")
        failure.__cause__ = error
        if not task.is_cancelled or isinstance(task, RankTask):
            self._ledger.after.append(lambda: task.on_failed(failure))
        self._dispatcher.finish(task, link.node)

    def _about_task(self, handle: Callable[[Task, int, Frame], object]) -> Handler:
        """Wrap a handler so that it gets the task of the frame. Frames about ended tasks are dropped."""

        def look_up(link: Readable, frame: Frame) -> None:
            task = self._ledger.tasks.get(frame.ident)
            if task is not None:
                handle(task, link.node, frame)

        return look_up

    # Values. They are received even if their task has ended: otherwise their blobs would pile up in the link. ---------

    def _on_result(self, link: Readable, frame: Frame) -> None:
        received = self._received_kept(link, frame) if frame.flags & KEPT else link.received(frame)
        if isinstance(link, DirectLine) and received.is_in_memory:
            self._take_lent(link, frame.ident, received, partial(self._on_value, link.node, frame.ident))
        else:
            self._on_value(link.node, frame.ident, received)

    def _on_value(self, node: int, task_id: int, received: Received) -> None:
        task = self._ledger.tasks.get(task_id)
        if task is None:
            return
        if not task.is_cancelled:  # before `finish` may raise, so a value that arrived is never lost
            self._logs.end(task)  # a value comes behind all output
            self._pass_on(task, task.on_result, received)
        elif isinstance(task, RankTask):
            self._ledger.after.append(partial(task.ended, task))
        self._dispatcher.finish(task, node, received.elapsed_ns)

    def _on_part(self, link: Readable, frame: Frame) -> None:
        part = link.received(frame)
        task = self._ledger.tasks.get(frame.ident)
        if task is not None:
            self._pass_on(task, task.on_part, part)

    def _on_item(self, link: Readable, frame: Frame) -> None:
        item = link.received(frame)
        task = self._ledger.tasks.get(frame.ident)
        if task is not None:
            self._pass_on(task, task.on_item, item)

    def _pass_on(self, task: Task, take: Callable[[Received], object], received: Received) -> None:
        if task.is_relayed:
            take(received)
        else:
            self._ledger.after.append(partial(take, received))

    # Everything else --------------------------------------------------------------------------------------------------

    def _on_log(self, link: Readable, frame: Frame) -> None:
        self._logs.add(link.node, self._ledger.tasks.get(frame.ident), frame.lane, frame.body)

    def _on_display(self, link: Readable, frame: Frame) -> None:
        self._logs.add_display(link.node, self._ledger.tasks.get(frame.ident), frame.body)

    def _on_elsewhere(self, link: Readable, _: Frame) -> None:
        """Stop the caller that reads this line, because the answer comes by the link."""
        link.is_led = False

    def _on_input_credit(self, task: Task, _: int, frame: Frame) -> None:
        self._ledger.after.append(lambda: task.on_input_credit(frame.lane))

    def _on_stack(self, task: Task, _: int, frame: Frame) -> None:
        if isinstance(task, RankTask):
            self._on_rank_stack(task, frame)
        else:
            self._dispatcher.on_stack(task, frame)

    def _on_error(self, task: Task, node: int, frame: Frame) -> None:
        where = f"node {node}" + ("" if task.rank is None else f", rank {task.rank}") + f", task {task.name!r}"
        self._logs.end(task)
        link = self._ledger.links.get(node)
        failed = TaskFailure(
            pickle.loads(frame.body),
            where,
            node,
            task.name,
            "".join(task.tail),
            is_elsewhere=link is not None and link.dialler is not None,
            unused_retries=0 if has_retry_on(task.options) or task.rank is not None else task.options.retries,
        )
        may_rerun = has_retry_on(task.options) and task.rerun is not None and not task.is_cancelled
        if (
            may_rerun
            and is_retried_on(task.options, failed.failure, failed.error)
            and self._dispatcher.rerun_failed(task, node)
        ):
            return
        if not task.is_cancelled or isinstance(task, RankTask):
            self._ledger.after.append(lambda: task.on_error(failed))
        self._dispatcher.finish(task, node)

    def _on_lost(self, task: Task, node: int, frame: Frame) -> None:
        fields = json.loads(frame.body)
        loss = Loss(
            node=node,
            signal=fields["signal"],
            exit_code=fields["exit_code"],
            started=fields["started"],
            index=fields["index"],
            at=fields["at"],
            stack=fields["stack"],
            why=fields.get("why", ""),
            memory_gib=fields.get("memory_gib"),
        )
        if task.actor:
            self._dispatcher.actors.lost(task, loss)
        elif task.is_cancelled or task.handles_loss:
            self._dispatcher.finish(task, node)
            if task.handles_loss:  # queued, so that it comes behind the parts that arrived before
                self._ledger.after.append(lambda: task.on_lost(loss))
        elif not task.may_move:
            self._dispatcher.finish(task, node)
            error = loss_error(loss, task.name, task.tail)
            self._ledger.after.append(lambda: task.on_failed(error))
        else:
            self._logs.end(task)
            self._dispatcher.release(task, node)
            self._ledger.losses[task.id] = loss
            self._dispatcher.perform(self._ledger.scheduler.lost(task.id, started=bool(fields["started"])))

    def _on_recalled(self, task: Task, node: int, _: Frame) -> None:
        if isinstance(task, RankTask):
            self._dispatcher.finish(task, node)
            self._ledger.after.append(lambda: task.ended(task))
        elif task.is_cancelled or task.actor:
            self._dispatcher.finish(task, node)
        else:
            self._dispatcher.release(task, node)
            self._dispatcher.perform(self._ledger.scheduler.lost(task.id, started=False))
