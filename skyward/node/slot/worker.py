"""Main loop of a slot process.

A process slot runs tasks one after another in its main thread, so user code behaves as in a script: signal handlers
work, and so do libraries that insist on the main thread. Thread slots are in `lanes`. A rank of a gang runs one task
and exits.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections.abc import Callable, Iterator

from ...wire.blobs import Blob
from ...wire.channel import ChannelClosed
from ...wire.frames import ON_SHELF, Frame, FrameKind
from ...wire.tasks import TASK_HEAD
from .displays import offer_displays
from .execute import Arrived
from .guards import SlotGuard
from .lanes import serve_threads
from .link import Link, Replies, SlotLine
from .page import DRAINED, READING, map_page
from .shelf import Claims
from .slot import Slot, SlotConfig
from .stacks import offer_stacks
from .stdio import ProcessStreams, forbid_terminal


class _DirectInbox:
    """Inbox whose running task reads the socket itself; frames of other tasks wait."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self.later: list[Arrived] = []

    def wait(self) -> Arrived:
        while True:
            arrived = self._for_the_task(self._slot.link.receive())
            if arrived is not None:
                return arrived

    def waiting(self) -> Iterator[Arrived]:
        for frame in self._slot.link.waiting():
            arrived = self._for_the_task(frame)
            if arrived is not None:
                yield arrived

    def _for_the_task(self, frame: Frame) -> Arrived | None:
        if self._slot.keep(frame):
            return None
        if frame.kind == FrameKind.TASK:
            self.later.append((frame, self._slot.blobs_of(frame, TASK_HEAD.size)))
            return None
        return frame, self._slot.blobs_of(frame, 0) if frame.kind == FrameKind.IN_ITEM else ()


def _serve_process(slot: Slot, page: memoryview, claims: Claims | None, line: SlotLine | None) -> None:
    streams = ProcessStreams(slot.config.token, page, DRAINED, READING)
    guard = SlotGuard(page, 0, interrupts=True)
    inbox = _DirectInbox(slot)
    offer_displays(streams.display)

    def run(frame: Frame, blobs: tuple[Blob, ...], replies: Replies | None = None) -> None:
        if claims is None or not frame.flags & ON_SHELF or claims.claim(frame.lane):
            slot.run(frame, blobs, 0, guard, inbox, streams, whole_process=True, replies=replies)

    slot.link.send(FrameKind.READY)
    if line is not None:
        _serve_both(slot, line, inbox, run)
    while True:
        has_run = _serve_next(slot, inbox, run)
        if has_run and slot.config.rank is not None:
            return


def _serve_next(slot: Slot, inbox: _DirectInbox, run: Callable[..., None]) -> bool:
    """Wait for the next frame from the agent. Returns True if it was a task, even one that was taken back."""
    if inbox.later:
        frame, blobs = inbox.later.pop(0)
    else:
        frame = slot.link.receive()
        while frame.kind != FrameKind.TASK:
            if not slot.keep(frame):
                slot.drop(frame)
            if not slot.link.has_more:
                return False
            frame = slot.link.receive()
        blobs = slot.blobs_of(frame, TASK_HEAD.size)
    run(frame, blobs)  # `blobs` ends with this call, so an idle slot keeps no array alive
    return True


def _serve_both(slot: Slot, line: SlotLine, inbox: _DirectInbox, run: Callable[..., None]) -> None:
    """Serve tasks from the agent and from the client's direct line, until the client hangs up."""
    poll = select.poll()
    poll.register(slot.link.fileno(), select.POLLIN)
    poll.register(line.fileno(), select.POLLIN)
    agent = slot.link.fileno()
    while True:
        if not (inbox.later or slot.link.has_more):
            ready = poll.poll(0 if line.has_more else None)
            # The agent goes first, because the functions and blobs of tasks come from there.
            if all(fd != agent for fd, _ in ready):
                try:
                    frames = line.receive()
                except ChannelClosed:  # the client is gone; the agent decides what happens next
                    return
                for frame in frames:
                    if frame.kind == FrameKind.TASK:
                        run(frame, (), line)
                    elif frame.kind == FrameKind.FUNCTION:
                        slot.functions.add(frame.body[:16], frame.body[16:], (), holder="line")
                    elif frame.kind == FrameKind.DROP_FUNCTION:
                        slot.functions.drop(frame.body, holder="line")
                continue
        _serve_next(slot, inbox, run)


def serve(
    sock: socket.socket,
    page_fd: int,
    config: SlotConfig,
    prepare: Callable[[], None] | None = None,
    shelf_fd: int = -1,
    line: socket.socket | None = None,
) -> None:
    """Run tasks until the agent goes away. Called in the freshly forked process.

    Args:
        sock: socket to the agent.
        page_fd: descriptor of the shared page.
        config: configuration of the slot.
        prepare: called as part of the first task, before any user code is loaded.
        shelf_fd: slot's end of the shelf's pipe; -1 for none.
        line: direct line from the client, if any.
    """
    _volunteer_for_the_oom_killer()
    os.environ.update(config.env)
    forbid_terminal()
    link = Link(sock)
    slot = Slot(link, config, prepare)
    page = map_page(page_fd, config.lanes)
    if config.executor == "thread":
        os.close(page_fd)
    else:
        offer_stacks(page_fd)
    try:
        if config.executor == "thread":
            serve_threads(slot, page)
        else:
            claims = None if shelf_fd < 0 else Claims(shelf_fd)
            _serve_process(slot, page, claims, None if line is None else SlotLine(line, link))
    except ChannelClosed:
        pass  # the agent has ended, and so does this process


def _volunteer_for_the_oom_killer() -> None:
    """Raise the OOM score: when memory runs out, a slot must die before the agent, which reports it."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # not Linux, or forbidden
        file.write("800")
