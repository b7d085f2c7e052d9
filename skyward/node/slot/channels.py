"""Channels of a task to its pool's program, over a connection of their own to the node's agent."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import threading

from ...core.signatures import checked_options
from ...errors import PoolClosed, UsageError
from ...wire.channel import ChannelClosed
from ...wire.frames import FrameKind
from ...wire.task_channel import TaskChannel, check_name
from .link import connect_task
from .runtime import RunningCall, call_endings, current_call

_JOIN_S = 5.0

_open: dict[int, _Channels] = {}
"""Channels by task."""
_lock = threading.Lock()


@checked_options
def channel(name: str) -> TaskChannel:
    """Return this task's channel of that name to its pool's program, which receives it by `pool.channel(name)`.

    The first use of a name opens the channel, also if the program does not wait for it yet. Each task has its own, and
    so has each rank of a gang. Nothing listens on a port.

    Args:
        name: 1 to 200 characters. Names that begin with "skyward." are reserved.

    Returns:
        The channel, the same object each time until it is closed. It ends with the call.

    Raises:
        UsageError: This code does not run in a task, or the name is not legal.
        PoolClosed: The node's agent cannot be reached.

    Example:
        @sky.compute
        def train():
            channel = sky.channel("progress")
            channel.send(b"half done")
            print(channel.receive(timeout_s=60))
    """
    check_name(name)
    call = current_call()
    if call is None:
        raise UsageError(
            f"name={name!r}: a channel begins in a task, and this code runs in none; open it there, and "
            "receive it here with pool.channel(name)"
        )
    return channel_of(call, name)


def channel_of(call: RunningCall, name: str) -> TaskChannel:
    """Return a task's channel of that name; see `channel`."""
    with _lock:
        channels = _open.get(call.task)
        if channels is None:
            try:
                channels = _Channels(call)
            except OSError as error:
                raise PoolClosed(f"agent of this node: cannot be reached ({error}); reopen the pool") from error
            _open[call.task] = channels
            call_endings.setdefault(call.task, []).append(_end)
        return channels.named(name)


def _end(task: int) -> None:
    """Close the channels of an ended task."""
    with _lock:
        channels = _open.pop(task, None)
    if channels is not None:
        channels.close()


class _Channels:
    """Channels of one task. Any thread may use them.

    A thread of its own writes: a signal that interrupts the user's code must not cut a frame in two.
    """

    def __init__(self, call: RunningCall) -> None:
        self._call = call
        self._link = connect_task(call.agent, call.task, "channels")
        self._by_name: dict[str, TaskChannel] = {}
        self._by_number: dict[int, TaskChannel] = {}
        self._outbox: queue.SimpleQueue[tuple[int, int, bytes, int]] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=run, name=f"skyward-channels-{direction}", daemon=True)
            for direction, run in (("in", self._read), ("out", self._write))
        ]
        for thread in self._threads:
            thread.start()

    def named(self, name: str) -> TaskChannel:
        known = self._by_name.get(name)
        if known is not None and known.is_open:
            return known
        number = int.from_bytes(os.urandom(8), "little")
        rank = None if self._call.rank is None else self._call.rank.rank

        def tell(kind: FrameKind, body: bytes, lane: int) -> None:
            self._outbox.put((kind, number, body, lane))

        opened = self._by_name[name] = TaskChannel(name, tell, node=self._call.node, rank=rank)
        self._by_number[number] = opened
        tell(FrameKind.CHANNEL, json.dumps({"name": name, "rank": rank}).encode(), 0)
        return opened

    def close(self) -> None:
        for opened in list(self._by_number.values()):
            opened.close()
        self._outbox.put((0, 0, b"", 0))
        self._threads[1].join(_JOIN_S)
        self._link.shut_down()
        self._threads[0].join(_JOIN_S)

    # Threads --------------------------------------------------------------------------------------------------------

    def _write(self) -> None:
        while True:
            kind, number, body, lane = self._outbox.get()
            if not kind:
                return
            try:
                self._link.send(kind, number, body, lane=lane)
            except OSError:
                return  # the reading thread meets the error too

    def _read(self) -> None:
        why = "the call has ended, or the node's agent has"
        with contextlib.closing(self._link):
            try:
                while True:
                    frame = self._link.receive()
                    known = self._by_number.get(frame.ident)
                    if known is not None:
                        known.on_frame(frame.kind, frame.body, frame.lane)
                    if frame.kind == FrameKind.END_CHANNEL:
                        self._by_number.pop(frame.ident, None)
            except (ChannelClosed, OSError):
                pass
            except BaseException as error:
                why = f"of {type(error).__name__}: {error}"
            for opened in list(self._by_number.values()):
                opened.end(why)


def _forget_in_child() -> None:
    global _lock
    _lock = threading.Lock()
    _open.clear()  # the connections, and the threads that wait on them, belong to the parent


os.register_at_fork(after_in_child=_forget_in_child)
