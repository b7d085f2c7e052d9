"""Thread slots: up to `lanes` tasks at once, in threads of one process.

The main thread reads the socket and passes each lane the frames of its task.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
import traceback
from collections.abc import Iterator
from typing import NoReturn

from ...wire.blobs import Blob
from ...wire.channel import ChannelClosed
from ...wire.frames import Frame, FrameKind
from ...wire.tasks import TASK_HEAD
from .displays import offer_displays
from .execute import Arrived, Cancelled
from .guards import LaneGuard
from .slot import Slot
from .stdio import ThreadStreams


class LaneInbox:
    """Frames of the task that a lane runs."""

    def __init__(self) -> None:
        self.frames: queue.SimpleQueue[Arrived] = queue.SimpleQueue()
        self.guard: LaneGuard | None = None
        self.is_closed = False

    def put(self, frame: Frame, blobs: tuple[Blob, ...]) -> None:
        """Add a frame. Called by the main thread."""
        self.frames.put((frame, blobs))
        if frame.kind == FrameKind.CLOSE:
            # Set before reading the guard: a lane that gets its guard later checks this flag when it begins.
            self.is_closed = True
            if self.guard is not None:
                self.guard.cancel(frame.ident)

    def wait(self) -> Arrived:
        return self._told(self.frames.get())

    def waiting(self) -> Iterator[Arrived]:
        while True:
            try:
                yield self._told(self.frames.get_nowait())
            except queue.Empty:  # no more frames for now
                return

    def _told(self, arrived: Arrived) -> Arrived:
        if arrived[0].kind == FrameKind.CLOSE and self.guard is not None:
            self.guard.was_told()
        return arrived


def serve_threads(slot: Slot, page: memoryview) -> None:
    streams = ThreadStreams(
        lambda task, stream, text: slot.link.send(FrameKind.LOG, task, text, lane=stream),
        lambda task, piece: slot.link.send(FrameKind.DISPLAY, task, piece),
    )
    offer_displays(streams.display)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tasks: queue.SimpleQueue[Arrived] = queue.SimpleQueue()
    running: dict[int, LaneInbox] = {}

    def serve_lane(lane: int) -> None:
        try:
            _run_tasks(slot, tasks, running, lane, LaneGuard(page, lane), streams)
        except ChannelClosed:  # the agent is gone and is about to end this process
            return
        except BaseException:  # the task's end could not be reported, so end the process: its end is reported
            traceback.print_exc()
            os._exit(1)

    for lane in range(slot.config.lanes):
        threading.Thread(target=serve_lane, args=(lane,), name=f"lane-{lane}", daemon=True).start()
    slot.link.send(FrameKind.READY)
    while True:
        frame = slot.link.receive()
        if slot.keep(frame):
            continue
        if frame.kind == FrameKind.TASK:
            running[frame.ident] = LaneInbox()
            tasks.put((frame, slot.blobs_of(frame, TASK_HEAD.size)))
            continue
        inbox = running.get(frame.ident)  # once: the lane may remove it at any moment
        if inbox is None:
            slot.drop(frame)
            continue
        inbox.put(frame, slot.blobs_of(frame, 0) if frame.kind == FrameKind.IN_ITEM else ())


def _run_tasks(
    slot: Slot,
    tasks: queue.SimpleQueue[Arrived],
    running: dict[int, LaneInbox],
    lane: int,
    guard: LaneGuard,
    streams: ThreadStreams,
) -> NoReturn:
    """Serve one lane until `slot.run` raises."""
    while True:
        frame, blobs = tasks.get()
        inbox = running[frame.ident]
        guard.begin_with(inbox)
        try:
            slot.run(frame, blobs, lane, guard, inbox, streams, whole_process=False)
        except Cancelled:  # it arrived after the task's end; the lane goes on
            pass
        finally:
            running.pop(frame.ident, None)
            del blobs
