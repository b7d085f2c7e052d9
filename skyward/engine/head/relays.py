"""Parts of an engine that a head passes on to its client: channels of tasks, lines of output, events, and machines."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from ...console.logs import Part
from ...values.machine import Gone, LogLine, Machine
from ...wire.channel import BLOBS, CONTROL
from ...wire.frames import Frame, FrameKind
from ..ledger import Ledger
from ..link import NodeLink, Readable
from ..task_channels import DirectService, TaskChannels
from .plain import dump_plain
from .requests import Requests

_MACHINE_S = 3600.0
"""Longest wait in seconds for another machine: the client decides how long it looks for one."""
_WHY_GONE_S = 30.0


class RelayedChannels(TaskChannels):
    """Channels between tasks and the program, which pass through this process."""

    def __init__(self, ledger: Ledger, direct: Mapping[str, DirectService]) -> None:
        super().__init__(ledger, direct)
        self._nodes: dict[int, int] = {}
        """Node by number of the channel."""
        self.tell: Callable[[int, int, bytes, int, int], object] = lambda kind, number, body, lane, priority: None
        """Sends the client a frame: kind, number, body, lane and priority."""

    def _opened(self, link: NodeLink, frame: Frame, fields: dict[str, Any]) -> None:
        self._nodes[frame.ident] = link.node
        self.tell(frame.kind, frame.ident, json.dumps({**fields, "node": link.node}).encode(), 0, BLOBS)

    def on_frame(self, link: Readable, frame: Frame) -> None:
        if frame.ident not in self._nodes:
            super().on_frame(link, frame)
            return
        self.tell(frame.kind, frame.ident, frame.body, frame.lane, _priority(frame))
        if frame.kind == FrameKind.END_CHANNEL:
            del self._nodes[frame.ident]

    def on_client_frame(self, frame: Frame) -> None:
        """Pass a frame of the client on to the node of its channel."""
        link = self._ledger.links.get(self._nodes.get(frame.ident, -1))
        if link is not None:
            link.channel.queue(frame.kind, frame.ident, frame.body, lane=frame.lane, priority=_priority(frame))
            self._ledger.dirty.add(link)
        if frame.kind == FrameKind.END_CHANNEL:
            self._nodes.pop(frame.ident, None)

    def end_all(self) -> None:
        """End the channels to a program that is gone, as if it had closed them. Needs the ledger's lock."""
        for number, node in self._nodes.items():
            link = self._ledger.links.get(node)
            if link is not None:
                link.channel.queue(FrameKind.END_CHANNEL, number, priority=BLOBS)
                self._ledger.dirty.add(link)
        self._nodes.clear()

    def node_lost(self, node: int) -> None:
        super().node_lost(node)
        for number in [number for number, place in self._nodes.items() if place == node]:
            del self._nodes[number]
            self.tell(FrameKind.END_CHANNEL, number, b"", 0, BLOBS)


def _priority(frame: Frame) -> int:
    return CONTROL if frame.kind == FrameKind.TAKEN else BLOBS


class RelayedLines:
    """Lines of output on their way to the client.

    Args:
        tell: Sends a message about a call.
    """

    def __init__(self, tell: Callable[[int, bytes], object]) -> None:
        self._tell = tell

    def put(self, line: LogLine, part: Part = Part.LINE) -> Callable[[], None]:
        self._tell(line.call, dump_plain((line, part.name)))
        return _is_sent


def _is_sent() -> None:
    """Wait for nothing: the client knows when its line is shown."""


class RelayedMachines:
    """Source of machines that asks the client; see `Machines`."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    def replace(self, node: int) -> Machine | None:
        machine: Machine | None = self._requests.ask("replace", node, timeout_s=_MACHINE_S)
        return machine

    def prepare_replacement(self, node: int) -> bool:
        return bool(self._requests.ask("prepare_replacement", node, timeout_s=_MACHINE_S))

    def give_up(self, node: int) -> None:
        self._requests.ask("give_up", node, timeout_s=_MACHINE_S)

    def why_gone(self, node: int) -> Gone | None:
        try:
            gone: Gone | None = self._requests.ask("why_gone", node, timeout_s=_WHY_GONE_S)
        except TimeoutError:  # the client is away, which says nothing about the machine
            return None
        return gone
