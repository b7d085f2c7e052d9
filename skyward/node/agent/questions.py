"""Questions of the client's to calls that run here, and their answers: passed on, never understood.

A call that answers has a session of its own (see `skyward.node.slot.answers`). Each question gets one answer: the
call's, or the reason why there is none.
"""

from __future__ import annotations

from collections.abc import Callable

from ...wire.frames import Frame, FrameKind
from .session import Session

__all__ = ["QuestionRelay"]

_NUMBER = 8
_MAX_OPEN = 64
"""Of one call: one that does not answer must not be sent without end."""
NOBODY, TOO_MANY = 1, 2


class QuestionRelay:
    """`tell(task, body, lane)` sends an ANSWER to the client."""

    def __init__(self, tell: Callable[[int, bytes, int], None]) -> None:
        self._tell = tell
        self._sessions: dict[int, Session] = {}
        self._open: dict[int, set[bytes]] = {}

    def answers(self, session: Session, task: int) -> None:
        """From now on that session answers for that task."""
        self._sessions[task] = session
        self._open.setdefault(task, set())

    def on_ask(self, frame: Frame) -> None:
        task, number = frame.ident, frame.body[:_NUMBER]
        session = self._sessions.get(task)
        if session is None:
            self._tell(task, number, NOBODY)
        elif len(self._open[task]) >= _MAX_OPEN:
            self._tell(task, number, TOO_MANY)
        else:
            self._open[task].add(number)
            session.send(FrameKind.ASK, task, frame.body)

    def on_answer(self, session: Session, frame: Frame) -> None:
        task, number = frame.ident, frame.body[:_NUMBER]
        if self._sessions.get(task) is session and number in self._open[task]:
            self._open[task].discard(number)
            self._tell(task, frame.body, frame.lane)

    def closed(self, session: Session) -> None:
        """The call has ended, or its process has."""
        for task in [task for task, each in self._sessions.items() if each is session]:
            del self._sessions[task]
            for number in self._open.pop(task):
                self._tell(task, number, NOBODY)
