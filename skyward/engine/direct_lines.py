"""Direct lines: sockets from the client to the first slot of each node, on which short calls bypass the agent.

The agent passes such a socket to the client when the slot starts. It learns of a call on a line only if it must (HOLD).
"""

from __future__ import annotations

import socket

from ..wire.channel import Channel
from ..wire.frames import Frame
from .ledger import Ledger
from .link import DirectLine, NodeLink, Readable


class DirectLines:
    """Direct lines of all nodes. Call every method except `gone` with the ledger locked."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def on_line(self, node: int, frame: Frame) -> None:
        """Take the line that a node offers, and drop its previous one."""
        link = self._ledger.links[node]
        self.drop(link)
        if frame.fd < 0:  # this process may open no more files, so the node has no line
            return
        link.line = DirectLine(node, Channel(socket.socket(fileno=frame.fd)), frame.ident)

    def gone(self, line: Readable) -> None:
        """Drop a line whose slot has died. The agent then reports the outcome of the call on it."""
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
        link.hold()  # only the agent knows how far the call on the line came
        self._ledger.dirty.add(link)
