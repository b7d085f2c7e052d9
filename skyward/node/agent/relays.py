"""Relays of frames between the client and the tasks of this node, which the agent passes on without decoding them.

All relays know a task by its own session. QuestionRelay passes questions from the client to running calls; see
`skyward.node.slot.answers`. Each question gets one answer: the call's, or a reason why there is none. CallRelay passes
calls that tasks make; see `skyward.node.slot.caller`. When such a session ends, it tells the client that nobody waits
for these calls any longer. ChannelRelay passes messages both ways; see `skyward.node.slot.channels`.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable

from ...wire.blobs import DIGEST_SIZE
from ...wire.failures import encode_exception
from ...wire.frames import HAS_FD, KEPT, Frame, FrameKind
from ...wire.nested_calls import NestedOutcome, packed
from ...wire.task_channel import LOST_CLIENT
from ..slot.link import blob_body
from .placement import Placement
from .session import Session

_NUMBER = 8
_MAX_OPEN = 64
"""Most unanswered questions per call, so that they do not pile up in front of a call that does not answer."""
NOBODY, TOO_MANY = 1, 2


class QuestionRelay:
    """Relay of questions. `tell(task, body, lane)` sends an ANSWER to the client."""

    def __init__(self, tell: Callable[[int, bytes, int], None]) -> None:
        self._tell = tell
        self._sessions: dict[int, Session] = {}
        self._open: dict[int, set[bytes]] = {}

    def answers(self, session: Session, task: int) -> None:
        """Let a session answer for a task from now on."""
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
        """Refuse the open questions of a session whose call or process has ended."""
        for task in [task for task, answering in self._sessions.items() if answering is session]:
            del self._sessions[task]
            for number in self._open.pop(task):
                self._tell(task, number, NOBODY)


class CallRelay:
    """Relay of calls that tasks make, and keeper of the values that they put.

    `placing` has the blobs of the node. `forward` sends a frame to the client. `failure_of` returns an error if there
    was no room for a blob of the frame. `ended` notes that nothing more is sent of a call.
    """

    def __init__(
        self,
        placing: Placement,
        forward: Callable[[Frame], None],
        failure_of: Callable[[int], OSError | None],
        ended: Callable[[int], None],
    ) -> None:
        self._placing = placing
        self._kept: dict[int, list[bytes]] = {}
        """Blobs that a task puts, by its call, until the call has gone to the client, which holds them from then on."""
        self._forward = forward
        self._failure_of = failure_of
        self._ended = ended
        self._sessions: dict[int, Session] = {}
        """Sessions by call."""

    def on_slot_frame(self, session: Session, frame: Frame) -> None:
        """Pass a BLOB, CALL or UNCALL from a task to the client, and answer FETCH."""
        if frame.kind == FrameKind.FETCH:
            self._fetch(session, frame)
            return
        if frame.kind == FrameKind.UNCALL:
            self._sessions.pop(frame.ident, None)
            self._drop(frame.ident)
        else:
            self._sessions[frame.ident] = session
        if frame.kind == FrameKind.BLOB and frame.flags & KEPT:
            self._placing.add_blob(frame)
            self._kept.setdefault(frame.ident, []).append(frame.body[:DIGEST_SIZE])
            return
        error = None
        if frame.kind == FrameKind.CALL:
            error = self._failure_of(frame.ident) or self._hand_over(frame.ident)
        if error is None:
            self._forward(frame)
        else:  # a blob of the call found no room here
            self._tell(frame.ident, error)

    def _fetch(self, session: Session, frame: Frame) -> None:
        """Give a task a blob of this node. Without it, or without a free descriptor, the task asks the client."""
        blob = self._placing.blob(frame.body)
        if blob is not None and blob.fd >= 0:
            with contextlib.suppress(OSError):
                body = blob_body(blob.digest, blob.size)
                session.send_result(Frame(FrameKind.BLOB, HAS_FD, 0, frame.ident, body, blob.fd))
        session.send_result(Frame(FrameKind.FETCHED, 0, 0, frame.ident, frame.body))

    def _hand_over(self, call: int) -> OSError | None:
        """Leave the blobs that a call puts to the client. Without one of them, drop all, and return an error."""
        blobs = [self._placing.blob(digest) for digest in self._kept.get(call, ())]
        if any(blob is None or blob.fd < 0 for blob in blobs):
            self._drop(call)
            return OSError(errno.EMFILE, "the node's agent may open no more files, so it cannot keep the value")
        self._kept.pop(call, None)
        return None

    def _drop(self, call: int) -> None:
        for digest in self._kept.pop(call, ()):
            self._placing.drop(digest)

    def _tell(self, call: int, error: BaseException) -> None:
        session = self._sessions.pop(call)
        self._ended(call)
        failure, _ = encode_exception(error)
        message = packed(NestedOutcome("error", (failure or b"",)), ())
        session.send_result(Frame(FrameKind.OUTCOME, 0, 0, call, message.body))

    def on_blob(self, frame: Frame) -> None:
        """Pass a blob of an outcome to its task."""
        session = self._sessions.get(frame.ident)
        if session is not None:
            session.send_result(frame)
        os.close(frame.fd)

    def on_outcome(self, frame: Frame) -> None:
        session = self._sessions.pop(frame.ident, None)
        self._ended(frame.ident)
        if session is not None:
            session.send_result(frame)

    def fail_open(self, error: BaseException) -> None:
        """Fail the open calls, because the client that knew them is gone."""
        for call in list(self._sessions):
            self._drop(call)
            self._tell(call, error)

    def closed(self, session: Session) -> None:
        """Withdraw the open calls of a session whose task or process has ended."""
        # Newest first, so that no waiting call starts in the place of a withdrawn one.
        for call in reversed([call for call, caller in self._sessions.items() if caller is session]):
            del self._sessions[call]
            self._drop(call)
            self._failure_of(call)
            self._forward(Frame(FrameKind.UNCALL, 0, 0, call, b""))


class ChannelRelay:
    """Relay of channels that tasks open. `forward` sends a frame to the client."""

    def __init__(self, forward: Callable[[Frame], None]) -> None:
        self._forward = forward
        self._sessions: dict[int, Session] = {}
        """Sessions by number of the channel."""

    def on_slot_frame(self, session: Session, frame: Frame) -> None:
        if frame.kind == FrameKind.CHANNEL:
            self._sessions[frame.ident] = session
        if self._sessions.get(frame.ident) is session:  # otherwise the client has ended it
            self._forward(frame)
        if frame.kind == FrameKind.END_CHANNEL:
            self._sessions.pop(frame.ident, None)

    def on_client_frame(self, frame: Frame) -> None:
        session = self._sessions.get(frame.ident)
        if session is not None:
            session.send_result(frame)
        if frame.kind == FrameKind.END_CHANNEL:
            self._sessions.pop(frame.ident, None)

    def end_open(self) -> None:
        """End the open channels for their tasks, because the client that knew them is gone and another one came."""
        for number, session in self._sessions.items():
            session.send_result(Frame(FrameKind.END_CHANNEL, 0, LOST_CLIENT, number, b""))
        self._sessions.clear()

    def closed(self, session: Session) -> None:
        """End the channels of a session whose task or process has ended."""
        for number in [number for number, task in self._sessions.items() if task is session]:
            del self._sessions[number]
            self._forward(Frame(FrameKind.END_CHANNEL, 0, 0, number, b""))
