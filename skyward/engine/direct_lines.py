"""Direct lines: sockets from the client to the first slot of each node, and to actors, for short calls.

They bypass the agent. It passes such a socket to the client when the process starts, and learns of a call on a line
only if it must (HOLD).

A large value of such a call stays in the memory of its process, and this process copies it from there. The task is open
until then, so its slot is busy, and its death is reported, as while the call ran.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable

from ..wire.channel import Channel, ChannelClosed
from ..wire.frames import Frame, FrameKind, pack
from ..wire.pull import PullRefused
from .ledger import Ledger
from .link import DirectLine, LineEnd, Readable
from .tasks import Received
from .threads import start_thread

_log = logging.getLogger(__name__)


class DirectLines:
    """Direct lines of all nodes. Call every public method except `gone` with the ledger locked."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def on_line(self, node: int, frame: Frame) -> None:
        """Take the line that a node offers, and drop the previous one to the same place."""
        actor = int.from_bytes(frame.body, "little")
        end = self._ledger.actors.get(actor) if actor else self._ledger.links[node]
        if end is None:  # the actor was closed meanwhile
            if frame.fd >= 0:
                os.close(frame.fd)
            return
        self.drop(end)
        if frame.fd < 0:  # this process may open no more files, so the place has no line
            return
        end.line = DirectLine(node, Channel(socket.socket(fileno=frame.fd)), frame.ident, end)

    def take_lent(self, line: DirectLine, task_id: int, value: Received, settle: Callable[[Received], object]) -> None:
        """Copy a value that is in the memory of its process, without the lock, and then call `settle` with the copy.

        A caller that leads copies it itself. The I/O thread has other channels to read, so a new thread copies it.
        """

        def refuse(error: BaseException) -> None:
            if not isinstance(error, PullRefused | OSError):
                _log.warning("pool: a value could not be copied, so it is sent: %s", error)
            with self._ledger:
                self._answer(line, task_id, is_copied=False)

        def copy() -> None:
            copied = value.copied()
            with self._ledger:
                self._answer(line, task_id, is_copied=True)
                settle(copied)

        def copy_or_refuse() -> None:
            try:
                copy()
            except Exception as error:
                refuse(error)

        if line.is_led:
            self._ledger.after.append(copy_or_refuse)
        else:
            self._ledger.after.append(lambda: start_thread(copy, name="skyward-copy", failed=refuse))

    def _answer(self, line: DirectLine, task_id: int, *, is_copied: bool) -> None:
        """Tell the process whether its value was copied. If it is gone, the agent reports its death."""
        if line.end.line is not line:
            return
        try:
            line.is_blocked = not line.channel.send(pack(FrameKind.COPIED, task_id, lane=0 if is_copied else 1))
        except ChannelClosed:
            self.drop(line.end)

    def gone(self, line: Readable) -> None:
        """Drop a line whose process has died. The agent then reports the outcome of the call on it."""
        with self._ledger:
            if isinstance(line, DirectLine) and line.end.line is line:
                self.drop(line.end)

    def drop(self, end: LineEnd) -> None:
        """Close the line to a place, if there is one."""
        line, end.line = end.line, None
        if line is None:
            return
        line.is_led = False
        self._ledger.watcher.remove(line)
        line.channel.close()
        end.hold()  # only the agent knows how far the call on the line came
        link = self._ledger.links.get(line.node)
        if link is not None:
            self._ledger.dirty.add(link)
