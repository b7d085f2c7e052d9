"""The agent's side of a slot: its socket, pipes and shared page, and what it is working on."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from ...errors import InternalError
from ...values.topology import Rank
from ...wire.channel import Channel, ChannelClosed
from ...wire.frames import Frame
from ...wire.tasks import Mode, unpack_task
from ..slot.page import CANCEL, CURRENT, DRAINED, ENDED, INDEX, PAGE_GROUP, READING, map_page
from ..slot.shelf import Shelf
from ..slot.slot import SlotConfig
from ..slot.stacks import STACKS_AT
from .output import OutputReader

__all__ = ["PendingSlot", "SlotProcess", "make_slot"]


@dataclass(eq=False)
class PendingSlot:
    """A task on this node that has not begun: its frame, and frames about it that came early."""

    frame: Frame
    missing: set[bytes]
    """Digests of blobs that are still on their way."""
    following: list[Frame] = field(default_factory=list)
    shelf_number: int = 0
    """With which it was put on a slot's shelf."""

    @property
    def may_wait_in_slot(self) -> bool:
        """A plain call or a chunk. What follows a stream must reach it, and what is in its socket stands in the way."""
        head = unpack_task(self.frame.body)
        return head.mode != Mode.STREAM and not head.inputs


@dataclass(eq=False)
class SlotProcess:
    """One process: a pool's slot, or a rank of a gang (`rank` is set)."""

    number: int
    lanes: int
    executor: Literal["process", "thread"]
    config: SlotConfig
    channel: Channel
    page: memoryview
    outputs: tuple[OutputReader, ...]
    child_fds: list[int]
    """Given to the zygote with the fork order, then closed here."""
    line: socket.socket | None = None
    """The client's end of the direct line, until the client has it."""
    line_number: int = 0
    pid: int | None = None
    running: dict[int, PendingSlot | None] = field(default_factory=dict)
    """Tasks sent to it, not yet ended, but for the one on its shelf. Those that were there are kept: the slot may not
    have begun them.
    """
    held: int = 0
    """The task in `running` that came on the direct line."""
    shelf: Shelf | None = None
    """Of a process slot that is no rank."""
    shelved: PendingSlot | None = None
    """What waits in its socket for the end of what runs."""
    shelved_at: float = 0.0
    is_shelf_spent: bool = False
    """What was there was taken back. It leaves a void frame in the socket: one for each task that runs, no more."""
    functions: set[bytes] = field(default_factory=set)
    cancelled: set[int] = field(default_factory=set)
    preload: tuple[str, ...] = ()
    """Of the zygote that it was forked from."""
    has_replied: bool = False
    """A task has ended, as far as the agent was told."""
    is_blocked: bool = False
    """Its socket is full: the rest is sent when it can take more."""
    is_broken: bool = False
    """What it sent was no frame: nothing that follows can be understood, and it is killed."""
    is_dead: bool = False
    failure: str = ""
    """Why its process could not be made."""
    page_fd: int = -1
    """Of a process slot or rank: the file of the shared page. The process writes its stacks behind the page."""

    @property
    def rank(self) -> Rank | None:
        return self.config.rank

    @property
    def room(self) -> int:
        return 0 if self.is_dead else max(0, self.lanes - len(self.running))

    @property
    def has_shelf_room(self) -> bool:
        """Whether a task may wait in its socket. Not behind one of the direct line: its end is told to the client
        alone, and the agent could not say which of the two had begun.
        """
        return (
            self.shelf is not None
            and self.shelved is None
            and not self.is_shelf_spent
            and len(self.running) == 1
            and not (self.held or self.is_dead or self.is_broken)
        )

    @property
    def finished_any(self) -> bool:
        return self.has_replied or any(self.page[lane * PAGE_GROUP + ENDED] for lane in range(self.lanes))

    def ended(self, task: int) -> None:
        """What waits on its shelf is the next to run."""
        self.running.pop(task, None)
        self.cancelled.discard(task)
        if self.held == task:
            self.held = 0
        self.is_shelf_spent = False
        if not self.running:
            self.take_from_shelf()

    def take_from_shelf(self) -> None:
        """The slot has begun what was there, or will in a moment."""
        pending, self.shelved = self.shelved, None
        if pending is not None:
            self.running[pending.frame.ident] = pending

    def lane_of(self, task: int) -> int | None:
        """The lane that the task runs in, by the shared page; None if it has not begun or has ended."""
        for lane in range(self.lanes):
            if self.page[lane * PAGE_GROUP + CURRENT] == task:
                return lane
        return None

    def begun_index(self, task: int) -> int | None:
        lane = self.lane_of(task)
        return None if lane is None else int(self.page[lane * PAGE_GROUP + INDEX])

    def mark_cancelled(self, task: int) -> None:
        lane = self.lane_of(task)
        # Before it has begun, the mark waits for it in the only lane of a process slot.
        self.page[(lane or 0) * PAGE_GROUP + CANCEL] = task

    def receive(self) -> Iterator[Frame]:
        """Frames that have come; never waits."""
        try:
            while not self.is_broken:
                yield from self.channel.receive()
        except (BlockingIOError, ChannelClosed, InternalError):  # nothing more can be understood or will come
            return

    def output(self) -> Iterator[tuple[int, int, bytes]]:
        """(task, 0 for stdout or 1 for stderr, text) of all that the process has written."""
        for stream, reader in enumerate(self.outputs):
            if not reader.is_closed:
                for task, text in reader.read():
                    yield task, stream, text

    def close_child_fds(self) -> None:
        for fd in self.child_fds:
            os.close(fd)
        self.child_fds = []

    def close(self) -> None:
        self.close_child_fds()
        if self.line is not None:
            self.line.close()
        if self.shelf is not None:
            self.shelf.close()
            self.shelf = None
        self.channel.close()
        for reader in self.outputs:
            reader.close()
        if self.page_fd >= 0:
            os.close(self.page_fd)
            self.page_fd = -1


def make_slot(
    number: int,
    *,
    lanes: int = 1,
    executor: Literal["process", "thread"] = "process",
    workers_per_node: int = 1,
    rank: Rank | None = None,
    deliver: bool = True,
    env: tuple[tuple[str, str], ...] = (),
    notice_file: str = "",
    line_number: int = 0,
    agent: str = "",
) -> SlotProcess:
    """The agent's ends, and the child's ends waiting to be passed on. `line_number`: it has a direct line. `agent`:
    path of the agent's socket.

    Raises:
        OSError: there is no room for them; then none is left open.
    """
    config = SlotConfig(
        number=number,
        lanes=lanes,
        executor=executor,
        token=secrets.token_bytes(16),
        workers_per_node=workers_per_node,
        rank=rank,
        deliver=deliver,
        env=env,
        notice_file=notice_file,
        agent=agent,
    )
    with contextlib.ExitStack() as undo:
        slot = _with_ends(config, line_number, undo)
        undo.pop_all()
        return slot


def _with_ends(config: SlotConfig, line_number: int, undo: contextlib.ExitStack) -> SlotProcess:
    """The slot with all that it shares with its process; `undo` closes every end, ours and the child's."""
    is_process = config.executor == "process"
    ours, theirs = map(undo.enter_context, socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM))
    page_fd, page = _new_page(config.lanes, undo)
    reads, writes = zip(_owned(undo, *os.pipe()), _owned(undo, *os.pipe()), strict=True)
    child_fds = [theirs.fileno(), *writes, page_fd]
    shelf: Shelf | None = None
    if is_process and config.rank is None:
        shelf = Shelf()
        undo.callback(shelf.close)
        child_fds += _owned(undo, shelf.slot_end())
    line: socket.socket | None = None
    if line_number:
        line, slot_end = map(undo.enter_context, socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM))
        child_fds += _owned(undo, os.dup(slot_end.fileno()))
        slot_end.close()
    slot = SlotProcess(
        number=config.number,
        lanes=config.lanes,
        executor=config.executor,
        config=config,
        channel=Channel(ours),
        page=page,
        outputs=tuple(_reader(fd, config, page) for fd in reads),
        child_fds=child_fds,
        page_fd=os.dup(page_fd) if is_process else -1,
        shelf=shelf,
        line=line,
        line_number=line_number,
    )
    theirs.detach()  # its number stands among the child's
    return slot


def _owned(undo: contextlib.ExitStack, *fds: int) -> tuple[int, ...]:
    for fd in fds:
        undo.callback(os.close, fd)
    return fds


def _new_page(lanes: int, undo: contextlib.ExitStack) -> tuple[int, memoryview]:
    """The file of a shared page, and the page. Behind it the process writes its stacks."""
    (page_fd,) = _owned(undo, os.memfd_create("skyward-page", os.MFD_CLOEXEC))
    os.ftruncate(page_fd, max(4096, lanes * PAGE_GROUP * 8))
    os.lseek(page_fd, STACKS_AT, os.SEEK_SET)
    page = map_page(page_fd, lanes)
    # The first write to a mapped page changes the time of its file, which is to be that of a crash.
    page[DRAINED] = 0
    return page_fd, page


def _reader(fd: int, config: SlotConfig, page: memoryview) -> OutputReader:
    """The agent's end of a pipe that the process prints to."""
    is_process = config.executor == "process"

    def drained(count: int) -> None:
        page[DRAINED] += count

    def reading(is_reading: bool) -> None:
        page[READING] = is_reading

    def current() -> int:
        return int(page[CURRENT]) if is_process else 0

    return OutputReader(fd, config.token, current, drained, reading)
