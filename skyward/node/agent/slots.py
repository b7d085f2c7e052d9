"""Agent side of a slot: its socket, pipes and shared page, and its current tasks."""

from __future__ import annotations

import contextlib
import os
import socket
from collections import deque
from collections.abc import Iterator
from dataclasses import field
from typing import TYPE_CHECKING, Any, Literal

from ...core.records import dataclass
from ...errors import InternalError
from ...values.devices import NO_GRANT, Grant
from ...values.topology import Rank
from ...wire.channel import Channel, ChannelClosed
from ...wire.frames import Frame, FrameKind
from ...wire.tasks import is_plain
from ..slot.page import CANCEL, CURRENT, DRAINED, ENDED, INDEX, PAGE_GROUP, READING, map_page
from ..slot.shelf import Shelf
from ..slot.slot import SlotConfig
from ..slot.stacks import STACKS_AT
from .devices import NO_PART, NodePart
from .limit_groups import LimitGroup
from .output import DISPLAYS, OutputReader

if TYPE_CHECKING:  # as in wire.tasks
    from ...values.volume import PlacedVolume


@dataclass(eq=False)
class PendingSlot:
    """A task on this node that has not begun: its frame, and early frames about it."""

    frame: Frame
    missing: set[bytes]
    """Digests of blobs that have not arrived."""
    following: list[Frame] = field(default_factory=list)
    shelf_number: int = 0
    """Number under which it was put on a slot's shelf."""
    shelved_at: float = 0.0

    @property
    def may_wait_in_slot(self) -> bool:
        """Return whether it may wait in a slot's socket: only plain calls and chunks.

        Frames of a stream must reach the running task, and a task that waits in the socket would be in their way.
        """
        return is_plain(self.frame.body)


@dataclass(eq=False)
class SlotProcess:
    """One process: a slot of the pool, a rank of a gang if `rank` is set, or an actor's process if `actor` is."""

    number: int
    lanes: int
    executor: Literal["process", "thread"]
    config: SlotConfig
    channel: Channel
    page: memoryview
    outputs: tuple[OutputReader, ...]
    child_fds: list[int]
    """Descriptors for the child, passed to the zygote with the fork order and then closed here."""
    line: socket.socket | None = None
    """The client's end of the direct line, until it is passed to the client."""
    line_number: int = 0
    pid: int | None = None
    running: dict[int, PendingSlot | None] = field(default_factory=dict)
    """Tasks sent to the slot that have not ended, except those on its shelf.

    Tasks that left the shelf keep their entry as value, because the slot may not have begun them."""
    held: int = 0
    """The one task in `running` that came over the direct line; 0 for none."""
    actor: int = 0
    """Number of the actor that lives in it; 0 for none."""
    waiting: deque[PendingSlot] = field(default_factory=deque)
    """Calls of the actor that have not begun, in order."""
    shelf: Shelf | None = None
    """Shelf of a process slot; None for ranks and thread slots."""
    shelved: deque[PendingSlot] = field(default_factory=deque)
    """Tasks that wait in the slot's socket for the end of the running one, in order."""
    is_shelf_spent: bool = False
    """Whether its shelf was taken back. That leaves void frames in the socket, at most one shelf per running task."""
    kept: dict[int, list[bytes]] = field(default_factory=dict)
    """Digests of blobs that stay on the node, by the task whose value is still to come."""
    inputs: dict[int, dict[int, list[int]]] = field(default_factory=dict)
    """Numbers of items that have come, that were taken, and of ends, by task and argument, for the next head."""
    functions: set[bytes] = field(default_factory=set)
    mapped: set[bytes] = field(default_factory=set)
    """Digests of large blobs of which the process may keep a mapping."""
    cancelled: set[int] = field(default_factory=set)
    preload: tuple[str, ...] = ()
    """Preload list of the zygote that forked it."""
    has_replied: bool = False
    """Whether the agent has seen a task end here."""
    has_returned: bool = False
    """Whether one of them has returned a value, so an actor is made."""
    booked: tuple[int, ...] | None = None
    """Devices that an actor was given, of those of its node; None: it books none."""
    is_blocked: bool = False
    """Whether its socket is full, so that frames wait in the agent."""
    is_broken: bool = False
    """Whether it has sent an invalid frame. Nothing that follows can be understood, so it is killed."""
    is_dead: bool = False
    failure: str = ""
    """Reason why its process could not be started."""
    note: tuple[Any, ...] = ()
    """Facts about the gang of a rank for the next head; see `RankOrder`."""
    request: Grant = NO_GRANT
    """Grant of the calls that it was started for; without devices: its number's share of them."""
    renewed_as: Grant | None = None
    """Grant of its successor, once it is to end because calls need another process; it takes no more."""
    group: LimitGroup | None = None
    """Control group that limits it."""
    exceeded_gib: float | None = None
    """Memory limit at which the kernel has killed it; None for any other death."""
    page_fd: int = -1
    """File of the shared page, in process slots and ranks. The process writes its stacks behind the page."""

    @property
    def rank(self) -> Rank | None:
        return self.config.rank

    @property
    def room(self) -> int:
        return 0 if self.is_dead or self.renewed_as is not None else max(0, self.lanes - len(self.running))

    @property
    def may_shelve(self) -> bool:
        """Return whether tasks may wait in its socket.

        Never behind a task of the direct line. Only the client learns of that one's end, so the agent could not tell
        which of the two had begun.
        """
        return (
            self.shelf is not None
            and not self.is_shelf_spent
            and len(self.running) == 1
            and not (self.held or self.is_dead or self.is_broken or self.renewed_as is not None)
        )

    @property
    def finished_any(self) -> bool:
        return self.has_replied or any(self.page[lane * PAGE_GROUP + ENDED] for lane in range(self.lanes))

    def ended(self, task: int) -> None:
        """Note the end of a task. The first task on the shelf is the next to run."""
        self.running.pop(task, None)
        self.inputs.pop(task, None)
        self.cancelled.discard(task)
        if self.held == task:
            self.held = 0
        self.is_shelf_spent = False
        if not self.running:
            self.take_from_shelf()

    def count_input(self, frame: Frame) -> None:
        """Count a frame of an iterator."""
        counts = self.inputs.setdefault(frame.ident, {}).setdefault(frame.lane, [0, 0, 0])
        counts[0 if frame.kind == FrameKind.IN_ITEM else 1 if frame.kind == FrameKind.IN_CREDIT else 2] += 1

    def take_from_shelf(self) -> None:
        """Count the first shelved task as sent: the slot has begun it, or is about to."""
        if self.shelved:
            pending = self.shelved.popleft()
            self.running[pending.frame.ident] = pending

    def lane_of(self, task: int) -> int | None:
        """Return the lane that runs the task, by the shared page; None if it has not begun or has ended."""
        for lane in range(self.lanes):
            if self.page[lane * PAGE_GROUP + CURRENT] == task:
                return lane
        return None

    def begun_index(self, task: int) -> int | None:
        lane = self.lane_of(task)
        return None if lane is None else int(self.page[lane * PAGE_GROUP + INDEX])

    def mark_cancelled(self, task: int) -> None:
        lane = self.lane_of(task)
        # If the task has not begun, the mark waits for it in lane 0, the only lane of a process slot.
        self.page[(lane or 0) * PAGE_GROUP + CANCEL] = task

    def receive(self) -> Iterator[Frame]:
        """Yield frames that have arrived; never waits."""
        try:
            while not self.is_broken:
                yield from self.channel.receive()
        except (BlockingIOError, ChannelClosed, InternalError):  # no more frames, or none that can be understood
            return

    def output(self) -> Iterator[tuple[int, int, bytes]]:
        """Yield (task, number of the stream, text) for everything that the process has written."""
        for stream, reader in enumerate(self.outputs):
            if not reader.is_closed:
                for task, text, is_display in reader.read():
                    yield task, DISPLAYS if is_display else stream, text

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
    volumes: tuple[PlacedVolume, ...] = (),
    line_number: int = 0,
    agent: str = "",
    part: NodePart = NO_PART,
) -> SlotProcess:
    """Create the agent's ends of a slot, and the child's ends, ready to be passed on.

    Args:
        number: number of the slot on its node.
        lanes: most tasks at once.
        executor: whether tasks run in the process's main thread or in threads.
        workers_per_node: number of slots of the node.
        rank: rank of a gang; None for a slot of the pool.
        deliver: whether anybody wants the rank's value.
        env: variables of a rank.
        notice_file: file that announces a preemption.
        volumes: volumes with their folders.
        line_number: number of its direct line; 0 for none.
        agent: path of the agent's socket.
        part: part of the node that it gets.

    Raises:
        OSError: the machine has no room for the descriptors; then none is left open.
    """
    group = part.group
    config = SlotConfig(
        number=number,
        lanes=lanes,
        executor=executor,
        token=os.urandom(16),
        workers_per_node=workers_per_node,
        rank=rank,
        deliver=deliver,
        env=(*env, *part.env),
        notice_file=notice_file,
        volumes=volumes,
        agent=agent,
        grant=part.grant,
        devices=part.devices,
        visible=part.visible,
        groups=() if group is None else group.entries,
        enforced=() if group is None else group.options,
    )
    with contextlib.ExitStack() as undo:
        slot = _with_ends(config, line_number, undo)
        slot.group = group
        undo.pop_all()
        return slot


def _with_ends(config: SlotConfig, line_number: int, undo: contextlib.ExitStack) -> SlotProcess:
    """Create a slot with everything that it shares with its process; `undo` closes every end, ours and the child's."""
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
    theirs.detach()  # `child_fds` owns the descriptor now
    return slot


def _owned(undo: contextlib.ExitStack, *fds: int) -> tuple[int, ...]:
    for fd in fds:
        undo.callback(os.close, fd)
    return fds


def _new_page(lanes: int, undo: contextlib.ExitStack) -> tuple[int, memoryview]:
    """Create the file of a shared page, and map the page. The process writes its stacks behind it."""
    (page_fd,) = _owned(undo, os.memfd_create("skyward-page", os.MFD_CLOEXEC))
    os.ftruncate(page_fd, max(4096, lanes * PAGE_GROUP * 8))
    os.lseek(page_fd, STACKS_AT, os.SEEK_SET)
    page = map_page(page_fd, lanes)
    # Write once now: the first write to a mapped page updates the file's time, which must later be a crash's.
    page[DRAINED] = 0
    return page_fd, page


def _reader(fd: int, config: SlotConfig, page: memoryview) -> OutputReader:
    """Create the reader of a pipe that the process prints to."""
    is_process = config.executor == "process"

    def drained(count: int) -> None:
        page[DRAINED] += count

    def reading(is_reading: bool) -> None:
        page[READING] = is_reading

    def current() -> int:
        return int(page[CURRENT]) if is_process else 0

    return OutputReader(fd, config.token, current, drained, reading)
