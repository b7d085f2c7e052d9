"""Answers to questions that the client sends to a running call.

A process slot reads its socket only between calls, and user code owns the main thread. So answers use their own
connection to the node's agent, over the agent's socket, and their own thread that reads it. No network port is opened.
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

QUESTION_NUMBER = 8
"""Length in bytes of a question's number, which precedes the question and its answer."""

_LAST_WORDS_S = 0.5

Reply = Callable[[bytes], None]
Handler = Callable[[bytes, Reply], None]
"""Receives a question and a callback for its answer. It calls back once, now or later, from any thread; never waits."""

_open: dict[int, _Answering] = {}
"""Answering threads by task."""
_lock = threading.Lock()


def serve(handler: Handler) -> bool:
    """Answer the client's questions from now on, until the running call ends. Each call has one handler.

    Returns False outside a call, or if the node's agent cannot be reached.
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
        except OSError:  # without a connection nobody can ask this call anything
            return False
        _open[call.task] = answering
        call_endings.setdefault(call.task, []).append(_end)
    answering.start()
    return True


def handler_here() -> Handler | None:
    """Return the handler of the running call, if any."""
    call = current_call()
    answering = None if call is None else _open.get(call.task)
    return None if answering is None else answering.handler


def _end(task: int) -> None:
    """Stop answering because the call has ended. Waits a moment for answers in progress."""
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
        """Numbers of the unanswered questions."""
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
            except (ChannelClosed, OSError):  # the call has ended, or the agent has
                return

    def _answer(self, number: bytes, question: bytes) -> None:
        def reply(answer: bytes) -> None:
            fits = len(answer) <= INLINE_LIMIT
            with contextlib.suppress(OSError):  # the agent is gone and is about to end this process
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
        except BaseException:  # the client gets no answer, and its question times out
            traceback.print_exc()
            ended()
