"""Frames between the client and the tasks of this node that the agent passes on without understanding them.

Both relays know a task by a session of its own. QuestionRelay passes questions of the client to running calls (see
`skyward.node.slot.answers`): each gets one answer, that of the call or the reason why there is none. CallRelay passes
the calls that tasks make (see `skyward.node.slot.caller`): when such a session ends, it tells the client that nobody
waits for them.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from ...wire.failures import encode_exception
from ...wire.frames import Frame, FrameKind
from ...wire.nested_calls import NestedOutcome, packed
from .session import Session

__all__ = ["CallRelay", "QuestionRelay"]

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
        for task in [task for task, answering in self._sessions.items() if answering is session]:
            del self._sessions[task]
            for number in self._open.pop(task):
                self._tell(task, number, NOBODY)


class CallRelay:
    """`forward` sends a frame to the client; a blob may find no room on its way, and `failure_of` says so then.
    `ended`: nothing more is sent of that call.
    """

    def __init__(
        self,
        forward: Callable[[Frame], None],
        failure_of: Callable[[int], OSError | None],
        ended: Callable[[int], None],
    ) -> None:
        self._forward = forward
        self._failure_of = failure_of
        self._ended = ended
        self._sessions: dict[int, Session] = {}
        """By call."""

    def on_slot_frame(self, session: Session, frame: Frame) -> None:
        """BLOB, CALL or UNCALL."""
        if frame.kind == FrameKind.UNCALL:
            self._sessions.pop(frame.ident, None)
        else:
            self._sessions[frame.ident] = session
        error = self._failure_of(frame.ident) if frame.kind == FrameKind.CALL else None
        if error is None:
            self._forward(frame)
        else:  # its blobs found no room here
            self._tell(frame.ident, error)

    def _tell(self, call: int, error: OSError) -> None:
        session = self._sessions.pop(call)
        self._ended(call)
        failure, _ = encode_exception(error)
        message = packed(NestedOutcome("error", (failure or b"",)), ())
        session.send_result(Frame(FrameKind.OUTCOME, 0, 0, call, message.body))

    def on_blob(self, frame: Frame) -> None:
        """One that an outcome needs."""
        session = self._sessions.get(frame.ident)
        if session is not None:
            session.send_result(frame)
        os.close(frame.fd)

    def on_outcome(self, frame: Frame) -> None:
        session = self._sessions.pop(frame.ident, None)
        self._ended(frame.ident)
        if session is not None:
            session.send_result(frame)

    def closed(self, session: Session) -> None:
        """The task has ended, or its process has."""
        # The newest first: none that waits begins in the place of one that is stopped.
        for call in reversed([call for call, caller in self._sessions.items() if caller is session]):
            del self._sessions[call]
            self._failure_of(call)
            self._forward(Frame(FrameKind.UNCALL, 0, 0, call, b""))
