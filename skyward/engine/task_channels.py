"""Channels that tasks open to this program. `skyward.node.slot.channels` opens them there."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ..calls.futures import refuse_to_wait
from ..errors import PoolClosed
from ..wire.channel import BLOBS, CONTROL
from ..wire.frames import Frame, FrameKind
from ..wire.task_channel import RESERVED, TaskChannel, Tell, services
from .ledger import Ledger
from .link import NodeLink, Readable
from .threads import in_words

_log = logging.getLogger(__name__)

_MOST_UNCLAIMED = 256
"""Channels that ended before the program asked for them. Beyond that, the oldest is dropped."""


class DirectService(Protocol):
    """Service whose frames are handled where they are read, under the ledger's lock. It must be quick."""

    def on_open(self, number: int, fields: dict[str, Any], tell: Tell) -> None: ...
    def on_frame(self, number: int, kind: int, body: bytes, lane: int) -> None: ...
    def on_end(self, number: int) -> None: ...


class TaskChannels:
    """Channels between tasks and this program. Until the program accepts one, it waits in a line.

    Args:
        ledger: Shared state of the engine.
        direct: Services by name of their channels.
    """

    def __init__(self, ledger: Ledger, direct: Mapping[str, DirectService]) -> None:
        self._ledger = ledger
        self._direct = direct
        self._served: dict[int, tuple[DirectService, int]] = {}
        """Service and node of each channel of a direct service."""
        self._open: dict[int, TaskChannel] = {}
        self._unclaimed: dict[str, deque[TaskChannel]] = {}
        self._came = threading.Condition()
        self._is_closed = False

    def accept(self, name: str, timeout_s: float | None) -> TaskChannel:
        """Wait for a channel of that name that nobody has accepted yet, the oldest first.

        Raises:
            TimeoutError: None was opened in time.
            PoolClosed: The engine was closed.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._came:
            while not self._unclaimed.get(name):
                if self._is_closed:
                    raise PoolClosed(
                        f"channel={name!r}: the pool was closed; wait for channels inside its `with` block"
                    )
                left_s = None if deadline is None else deadline - time.monotonic()
                if left_s is not None and left_s <= 0:
                    raise TimeoutError(
                        f"channel={name!r}: no task opened it within {timeout_s:g} s; check the name, or raise "
                        "timeout_s"
                    )
                refuse_to_wait("channel")
                self._came.wait(left_s)
            return self._unclaimed[name].popleft()

    # With the ledger locked -------------------------------------------------------------------------------------------

    def on_open(self, link: Readable, frame: Frame) -> None:
        if not isinstance(link, NodeLink):
            return
        fields = json.loads(frame.body)
        service = self._direct.get(fields["name"])
        if service is not None:
            self._served[frame.ident] = service, link.node
            service.on_open(frame.ident, fields, self._direct_teller(link.node, frame.ident))
            return
        self._opened(link, frame, fields)

    def _opened(self, link: NodeLink, frame: Frame, fields: dict[str, Any]) -> None:
        """Take a channel that no direct service serves."""
        node = fields.get("node", link.node)  # a head says it for its nodes
        opened = self._open[frame.ident] = TaskChannel(
            fields["name"],
            self._teller(node, frame.ident),
            node=node,
            rank=fields["rank"],
            before_wait=lambda: refuse_to_wait("channel"),
        )
        if opened.name.startswith(RESERVED):
            self._ledger.after.append(lambda: _start(opened))
            return
        with self._came:
            self._unclaimed.setdefault(opened.name, deque()).append(opened)
            self._drop_oldest()
            self._came.notify_all()

    def on_frame(self, _: Readable, frame: Frame) -> None:
        served = self._served.get(frame.ident)
        if served is not None:
            if frame.kind == FrameKind.END_CHANNEL:
                del self._served[frame.ident]
            served[0].on_frame(frame.ident, frame.kind, frame.body, frame.lane)
            return
        opened = self._open.get(frame.ident)
        if opened is not None:
            opened.on_frame(frame.kind, frame.body, frame.lane)
            if frame.kind == FrameKind.END_CHANNEL:
                del self._open[frame.ident]

    def node_lost(self, node: int) -> None:
        for number, (service, place) in list(self._served.items()):
            if place == node:
                del self._served[number]
                service.on_end(number)
        for number, opened in list(self._open.items()):
            if opened.node == node:
                del self._open[number]
                opened.end(f"node {node} was lost")

    def close(self) -> None:
        """End all channels, because the engine ends."""
        self.end_open("the pool was closed")
        self._served.clear()
        with self._came:
            self._is_closed = True
            self._came.notify_all()

    def end_open(self, why: str) -> None:
        """End the channels that are open. Others may follow."""
        for opened in self._open.values():
            opened.end(why)
        self._open.clear()

    def _drop_oldest(self) -> None:
        ended = [opened for line in self._unclaimed.values() for opened in line if not opened.is_open]
        for opened in ended[: max(0, len(ended) - _MOST_UNCLAIMED)]:
            _log.warning(
                "channel %r of node %d: dropped with its messages, which nobody received", opened.name, opened.node
            )
            self._unclaimed[opened.name].remove(opened)

    def _link_to(self, node: int) -> NodeLink | None:
        """Return the link by which frames for a node travel."""
        return self._ledger.links.get(node)

    def _teller(self, node: int, number: int) -> Tell:
        def tell(kind: FrameKind, body: bytes, lane: int) -> None:
            with self._ledger:
                link = self._link_to(node)
                if link is None or number not in self._open:
                    return
                # Messages are as bulky as blobs. The end must stay behind them.
                priority = CONTROL if kind == FrameKind.TAKEN else BLOBS
                link.channel.queue(kind, number, body, lane=lane, priority=priority)
                self._ledger.dirty.add(link)
                if kind == FrameKind.END_CHANNEL:
                    del self._open[number]

        return tell

    def _direct_teller(self, node: int, number: int) -> Tell:
        def tell(kind: FrameKind, body: bytes, lane: int) -> None:
            link = self._ledger.links.get(node)
            if link is None or number not in self._served:
                return
            link.channel.queue(kind, number, body, lane=lane, priority=BLOBS)
            self._ledger.dirty.add(link)
            if kind == FrameKind.END_CHANNEL:
                del self._served[number]

        return tell


def _start(opened: TaskChannel) -> None:
    def run() -> None:
        try:
            service = _service_of(opened.name.partition("/")[0])
            if service is not None:
                service(opened)
        except BaseException as error:  # the thread's last line: the task learns that the channel has ended
            _log.error("channel %r of node %d: %s", opened.name, opened.node, in_words(error))
        finally:
            opened.close()

    threading.Thread(target=run, name="skyward-channel", daemon=True).start()


def _service_of(name: str) -> Callable[[TaskChannel], None] | None:
    """Return the function for a name: one that its library has registered, or else an installed one."""
    if name not in services:
        from importlib.metadata import entry_points  # takes milliseconds, which most pools need not wait for

        for entry in entry_points(group="skyward.services", name=name):
            services.setdefault(name, entry.load())
    return services.get(name)
