"""Questions that the client asks of a call while it runs, answered beside it.

A process slot reads its socket between calls only, and user code has its main thread. So what answers has a
connection of its own to the node's agent, by the agent's socket, and a thread of its own that reads it. Nobody listens
on any network for this.
"""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections.abc import Callable

from ...wire.channel import ChannelClosed
from ...wire.frames import INLINE_LIMIT, FrameKind
from .link import connect_task
from .runtime import call_endings, current_call

__all__ = ["QUESTION_NUMBER", "Handler", "handler_here", "serve"]

QUESTION_NUMBER = 8
"""Bytes of a question's number, in front of it and of its answer."""

_LAST_WORDS_S = 0.5

Reply = Callable[[bytes], None]
Handler = Callable[[bytes, Reply], None]
"""Gets a question, and calls the reply with its answer once, now or later, from any thread. It must not wait."""

_open: dict[int, _Answering] = {}
"""By the task that answers."""
_lock = threading.Lock()


def serve(handler: Handler) -> bool:
    """Answer, from now on and until the running call ends, what the client asks of it. One handler for each call.

    False: there is no call here, or its node's agent cannot be reached.
    """
    call = current_call()
    if call is None or not call.agent:
        return False
    with _lock:
        if call.task in _open:
            _open[call.task].handler = handler
            return True
        try:
            answering = _Answering(call.agent, call.task, handler)
        except OSError:  # no connection to be had: nobody can ask this call
            return False
        _open[call.task] = answering
        call_endings.setdefault(call.task, []).append(_end)
    answering.start()
    return True


def handler_here() -> Handler | None:
    """That of the running call."""
    call = current_call()
    answering = None if call is None else _open.get(call.task)
    return None if answering is None else answering.handler


def _end(task: int) -> None:
    """Stop answering: the call has ended. Waits for answers that are nearly given."""
    with _lock:
        answering = _open.pop(task, None)
    if answering is not None:
        answering.close()


class _Answering:
    def __init__(self, agent: str, task: int, handler: Handler) -> None:
        self.handler = handler
        self._task = task
        self._link = connect_task(agent, task, "task")
        self._pending: set[bytes] = set()
        """Numbers of the questions that have no answer yet."""
        self._replied = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="skyward-answers", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        with self._replied:
            self._replied.wait_for(lambda: not self._pending, _LAST_WORDS_S)
        self._link.shut_down()
        self._thread.join(1.0)

    def _run(self) -> None:
        with contextlib.closing(self._link):
            try:
                while True:
                    frame = self._link.receive()
                    if frame.kind == FrameKind.ASK:
                        self._answer(frame.body[:QUESTION_NUMBER], frame.body[QUESTION_NUMBER:])
            except (ChannelClosed, OSError):  # the call has ended, or the agent is gone
                return

    def _answer(self, number: bytes, question: bytes) -> None:
        def reply(answer: bytes) -> None:
            fits = len(answer) <= INLINE_LIMIT
            with contextlib.suppress(OSError):  # the agent is gone, and ends this process
                self._link.send(FrameKind.ANSWER, self._task, number + (answer if fits else b""), lane=0 if fits else 3)
            ended()

        def ended() -> None:
            with self._replied:
                self._pending.discard(number)
                self._replied.notify_all()

        with self._replied:
            self._pending.add(number)
        try:
            self.handler(question, reply)
        except BaseException:  # who asked waits for a while, and then knows
            traceback.print_exc()
            ended()
