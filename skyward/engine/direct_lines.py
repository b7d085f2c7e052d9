"""Direct lines: sockets from the client to the first slot of each node, on which short calls pass the agent by.

The agent hands such a socket over when the slot starts. It learns of a call on a line only when it must (HOLD).
"""

from __future__ import annotations

import socket

from ..wire.channel import Channel
from ..wire.frames import Frame
from .ledger import Ledger
from .link import DirectLine, NodeLink, Readable

__all__ = ["DirectLines"]


class DirectLines:
    """Open and drop the direct lines of all nodes. The ledger is locked in every call except `gone`."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def on_line(self, node: int, frame: Frame) -> None:
        """Take the line that a node offers in the place of the one before."""
        link = self._ledger.links[node]
        self.drop(link)
        if frame.fd < 0:  # it could not be received: this process may open no more files
            return
        link.line = DirectLine(node, Channel(socket.socket(fileno=frame.fd)), frame.ident)

    def gone(self, line: Readable) -> None:
        """Drop a line whose slot has died. The agent is told of the call on it, and reports what became of it."""
        with self._ledger:
            link = self._ledger.links.get(line.node)
            if link is not None and link.line is line:
                self.drop(link)

    def drop(self, link: NodeLink) -> None:
        """Close the line of a node, if it has one."""
        line, link.line = link.line, None
        if line is None:
            return
        line.is_led = False
        self._ledger.watcher.remove(line)
        line.channel.close()
        link.hold()
        self._ledger.dirty.add(link)
