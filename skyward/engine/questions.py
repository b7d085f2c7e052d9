"""Questions to running calls over the channels to their nodes. `skyward.node.slot.answers` answers them there."""

from __future__ import annotations

import concurrent.futures
import itertools

from ..calls.futures import refuse_to_wait
from ..errors import ControlFailed, InternalError, UsageError
from ..wire.frames import INLINE_LIMIT, Frame, FrameKind
from .ledger import Ledger
from .task_dispatcher import TaskDispatcher

_NUMBER = 8
_LAST_S = 0.5
NOBODY = 1
SILENT = 255
"""Reason when there was no answer in time. The link may be cut, or the process busy, so asking again may help."""
_REASONS = {
    NOBODY: "control: the call does not answer: it has no training run with a TrainerControlCallback, or that has "
    "ended; try again when one runs",
    2: "control: too many questions to the call are open; try again when some are answered",
    3: f"control: the answer exceeds {INLINE_LIMIT} bytes; let the handler return less",
}

Answer = concurrent.futures.Future[bytes]


class OpenQuestions:
    """Questions to running calls that wait for an answer.

    A question gets exactly one end: an answer, the end of its call, a timeout, or the end of the pool. The one that
    removes it from `_open` settles it.
    """

    def __init__(self, ledger: Ledger, dispatcher: TaskDispatcher) -> None:
        self._ledger = ledger
        self._dispatcher = dispatcher
        self._open: dict[bytes, tuple[int, Answer]] = {}
        self._numbers = itertools.count(1)

    def call_named(self, name: str) -> int:
        """Return the number of the open call of that name; for an empty name, the only call outside of tasks.

        Raises:
            ControlFailed: There is no such call.
            UsageError: There are several.
        """
        with self._ledger:
            calls = {
                gang.id: gang.name
                for gang in self._ledger.gangs.values()
                if not gang.is_cancelled and (name or not gang.is_nested)
            }
            calls |= {
                task.id: task.name
                for task in self._ledger.tasks.values()
                if task.rank is None and not task.is_cancelled and (name or not task.is_nested)
            }
        matching = [call for call, call_name in calls.items() if call_name == (name or call_name)]
        if not matching:
            raise ControlFailed(
                f"control: no call{f' of {name!r}' if name else ''} is open in the pool; send one first"
            )
        if len(matching) > 1:
            names = ", ".join(sorted(calls[call] for call in matching))
            raise UsageError(f"control: {len(matching)} calls are open ({names}); pass the future of one of them")
        return matching[0]

    def ask(self, call: int, question: bytes, timeout_s: float) -> bytes:
        """Ask a running call, or rank 0 of a gang, and wait for the answer.

        A done-callback must not ask, because its thread is the one that reads the answers.

        Raises:
            ControlFailed: There is no answer. `is_gone` is set if the call has ended.
            UsageError: The question is too large.
        """
        if len(question) > INLINE_LIMIT:
            raise UsageError(
                f"control: question of {len(question)} bytes exceeds the limit of {INLINE_LIMIT}; send less at once"
            )
        refuse_to_wait("control")
        answer = Answer()
        number = next(self._numbers).to_bytes(_NUMBER, "little")
        with self._ledger:
            self._ledger.require_open()
            task, node = self._place(call)
            self._open[number] = task, answer
            self._dispatcher.on_ended[task].add(self._ended)
            self._ledger.tell(node, FrameKind.ASK, task, number + question)
        try:
            return answer.result(timeout_s)
        except TimeoutError:
            problem = f"control: the call did not answer within {timeout_s:g} s; try again"
            raise ControlFailed(problem, reason=SILENT) from None
        finally:
            with self._ledger.lock:
                self._open.pop(number, None)

    def _place(self, call: int) -> tuple[int, int]:
        """Return (task, node) of the process that answers for a call."""
        gang = self._ledger.gangs.get(call)
        if gang is not None:
            rank = gang.tasks.get(0)
            if rank is None or rank.id not in gang.open:
                raise ControlFailed("control: the ranks of the call are being started; try again when they run")
            return rank.id, rank.node
        if call not in self._ledger.tasks:
            raise ControlFailed("control: the call has ended; read its value or its error", is_gone=True)
        node = self._ledger.node_of(self._ledger.tasks[call])
        if node is None:
            raise ControlFailed("control: the call waits for a place in the pool; try again when it runs")
        return call, node

    def on_answer(self, frame: Frame) -> None:
        _, answer = self._open.pop(frame.body[:_NUMBER], (0, None))
        if answer is None:
            return
        if frame.lane == 0:
            self._settle(answer, frame.body[_NUMBER:])
        else:
            why = _REASONS.get(frame.lane, f"the node says {frame.lane}")
            self._settle(answer, ControlFailed(why, reason=frame.lane))

    def _ended(self, task: int) -> None:
        """Fail open questions to a task that ended, but not at once.

        Its last answers travel on another socket than its end, so they may arrive later.
        """
        if self._open and any(target == task for target, _ in self._open.values()):
            self._ledger.at(_LAST_S, self._give_up, task, 0)

    def _give_up(self, task: int, _: int) -> None:
        for number in [number for number, (target, _) in self._open.items() if target == task]:
            self._settle(
                self._open.pop(number)[1],
                ControlFailed("control: the call has ended; read its value or its error", is_gone=True),
            )

    def close(self) -> None:
        """Fail all open questions, because the engine ends."""
        for number in list(self._open):
            self._settle(
                self._open.pop(number)[1],
                ControlFailed("control: the pool was closed; open it again, and send the call", is_gone=True),
            )

    def _settle(self, answer: Answer, outcome: bytes | ControlFailed) -> None:
        def settle() -> None:
            if isinstance(outcome, ControlFailed):
                answer.set_exception(outcome)
            else:
                answer.set_result(outcome)

        if answer.done():
            raise InternalError("control: question answered twice; report this bug")
        self._ledger.after.append(settle)
