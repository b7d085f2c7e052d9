"""Direct lines: sockets from the client to the first slot of each node, and to actors, for short calls.

They bypass the agent. It passes such a socket to the client when the process starts, and learns of a call on a line
only if it must (HOLD).
"""

from __future__ import annotations

import os
import socket

from ..wire.channel import Channel
from ..wire.frames import Frame
from .ledger import Ledger
from .link import DirectLine, LineEnd, Readable


class DirectLines:
    """Direct lines of all nodes. Call every method except `gone` with the ledger locked."""

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
