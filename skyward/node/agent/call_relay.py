"""Calls that tasks on this node make, and what comes of them: passed on between slots and client, never understood.

A task that calls has a session of its own for it (see `skyward.node.slot.caller`). When that session ends, the client
is told that nobody waits for its calls.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from ...wire.failures import encode_exception
from ...wire.frames import Frame, FrameKind
from ...wire.nested_calls import NestedOutcome, packed
from .session import Session

__all__ = ["CallRelay"]


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
        said, _ = encode_exception(error)
        message = packed(NestedOutcome("error", (said or b"",)), ())
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
        for call in reversed([call for call, each in self._sessions.items() if each is session]):
            del self._sessions[call]
            self._failure_of(call)
            self._forward(Frame(FrameKind.UNCALL, 0, 0, call, b""))
