"""Nodes that run nothing: one process that speaks the agents' protocol for all of them, for `engine.py` and `head.py`.

Every connection is a node of 8 slots, whose tasks take 10 ms each and return None. Connections of the keeper are
greeted, and its leases are ignored. A second socket, with `.streams` behind its path, takes connections that speak as
over ssh or Ray: streams whose frames are counted.
"""

from __future__ import annotations

import heapq
import json
import os
import select
import socket
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from skyward.core.limits import raise_file_limit
from skyward.wire.blobs import Blob
from skyward.wire.channel import Channel, ChannelClosed
from skyward.wire.ends import Ends
from skyward.wire.frames import PROTOCOL_VERSION, Frame, FrameKind, pack
from skyward.wire.payloads import encode
from skyward.wire.stream import MAGIC, StreamChannel

SLOTS = 8
TASK_S = 0.01
_FACTS = {"version": PROTOCOL_VERSION, "received": 0, "cpus": SLOTS, "memory_gib": 64.0, "memory_bytes": 64 << 30}
_WELCOME = json.dumps({**_FACTS, "pid": os.getpid()}).encode()
_NONE = encode(None, Blob.snapshot).with_elapsed(int(TASK_S * 1e9))


@dataclass(eq=False)
class Node:
    channel: Channel | StreamChannel
    free: int = SLOTS
    waiting: deque[int] = field(default_factory=deque)


class SimulatedNodes:
    """Event loop of all nodes. It ends once `watched`, its parent, is gone."""

    def __init__(self, listener: socket.socket, streams: socket.socket) -> None:
        self.listeners = {listener.fileno(): listener, streams.fileno(): streams}
        self.streams = streams
        self.poll = select.epoll()
        for number in self.listeners:
            self.poll.register(number, select.EPOLLIN)
        self.nodes: dict[int, Node] = {}
        self.running: list[tuple[float, int, int]] = []
        """Heap of (end, task, descriptor of its node)."""

    def run(self) -> None:
        parent = os.getppid()
        while os.getppid() == parent:
            pause_s = self.running[0][0] - time.monotonic() if self.running else 1.0
            for number, _ in self.poll.poll(max(0.0, min(1.0, pause_s))):
                if number in self.listeners:
                    self.accept(self.listeners[number])
                else:
                    self.read(self.nodes[number])
            self.end_tasks()

    def accept(self, listener: socket.socket) -> None:
        sock, _ = listener.accept()
        number = sock.fileno()
        if listener is self.streams:
            channel = StreamChannel(checks_blobs=True)
            channel.attach(Ends(number, sock.detach()), 0)
            channel.greet(MAGIC)
            channel.flush()
            self.nodes[number] = Node(channel)
        else:
            self.nodes[number] = Node(Channel(sock))
        self.poll.register(number, select.EPOLLIN)

    def read(self, node: Node) -> None:
        try:
            for frame in node.channel.receive():
                self.take(node, frame)
            node.channel.flush()
        except BlockingIOError:
            pass
        except ChannelClosed:
            self.poll.unregister(node.channel.fileno())
            del self.nodes[node.channel.fileno()]
            node.channel.close()

    def take(self, node: Node, frame: Frame) -> None:
        if frame.kind == FrameKind.HELLO:
            if isinstance(node.channel, StreamChannel):
                node.channel.greet(pack(FrameKind.WELCOME, body=_WELCOME))
            else:
                node.channel.queue(FrameKind.WELCOME, body=_WELCOME)
        elif frame.kind == FrameKind.TASK:
            if node.free:
                node.free -= 1
                self.start(node, frame.ident)
            else:
                node.waiting.append(frame.ident)
        elif frame.kind == FrameKind.RECALL and frame.ident in node.waiting:
            node.waiting.remove(frame.ident)
            node.channel.queue(FrameKind.RECALLED, frame.ident)

    def start(self, node: Node, task: int) -> None:
        heapq.heappush(self.running, (time.monotonic() + TASK_S, task, node.channel.fileno()))

    def end_tasks(self) -> None:
        now, changed = time.monotonic(), set()
        while self.running and self.running[0][0] <= now:
            _, task, number = heapq.heappop(self.running)
            node = self.nodes.get(number)
            if node is None:
                continue
            node.channel.queue(FrameKind.RESULT, task, _NONE)
            changed.add(node)
            if node.waiting:
                self.start(node, node.waiting.popleft())
            else:
                node.free += 1
        for node in changed:
            node.channel.flush()


def main() -> None:
    """Serve the socket of the given path; print a line once it listens."""
    raise_file_limit()
    path = Path(sys.argv[1])
    listeners = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    for listener, end in zip(listeners, ("", ".streams"), strict=True):
        listener.bind(f"{path}{end}")
        listener.listen(4096)
    print("ready", flush=True)
    SimulatedNodes(*listeners).run()


if __name__ == "__main__":
    main()
