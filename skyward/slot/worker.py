"""The main loop of a slot process.

A process slot runs tasks one after another in its main thread, so that user code sees what a script sees: signal
handlers work, libraries that insist on the main thread work. A thread slot runs up to `lanes` tasks at once in
threads of one process. A rank of a gang runs one task and exits.

The shared page is an array of u64 in memory that the agent maps too, one group of numbers for each lane:

    CURRENT  the task that runs, 0: none      INDEX    offset of the call of a chunk that was begun last
    CANCEL   the task to be interrupted       DRAINED  bytes of output that the agent has read (written by the agent)
    ENDED    how many tasks have ended        READING  1 while the agent reads output, which DRAINED does not count yet

When the process dies, the agent reads there exactly what had begun.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import pickle
import queue
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import InitializerFailed
from ..topology import InstanceInfo, NetworkInfo, Rank
from ..wire.blobs import Blob
from ..wire.channel import ChannelClosed
from ..wire.frames import Frame, Kind
from ..wire.layout import references
from ..wire.tasks import CALL_KINDS, TASK_HEAD, TASK_KIND_AT, Topology
from .execute import Arrived, Cancelled, Inbox, TaskRun
from .functions import Functions
from .link import Line, Link, Replies, read_blob_body
from .runtime import Call, enter_call
from .stacks import offer_stacks
from .stdio import ProcessStreams, ThreadStreams, forbid_terminal

__all__ = ["CANCEL", "CURRENT", "DRAINED", "ENDED", "INDEX", "PAGE_GROUP", "READING", "SlotConfig", "map_page", "serve"]

CURRENT, INDEX, CANCEL, DRAINED, ENDED, READING = range(6)
PAGE_GROUP = 6
"""Numbers of each lane in the shared page."""


@dataclass(frozen=True, kw_only=True)
class SlotConfig:
    """What a slot process is told when it is forked."""

    number: int
    lanes: int = 1
    executor: Literal["process", "thread"] = "process"
    token: bytes
    workers_per_node: int = 1
    rank: Rank | None = None
    deliver: bool = True
    """False: the rank's value is not wanted."""
    env: tuple[tuple[str, str], ...] = field(default=())


def map_page(fd: int, lanes: int) -> memoryview:
    """The shared page as numbers; one group for each lane."""
    size = max(4096, lanes * PAGE_GROUP * 8)
    return memoryview(mmap.mmap(fd, size)).cast("Q")


class _Region:
    """A `with` block in which user code runs (or, within one, does not). Cheaper than a generator: tasks are short."""

    def __init__(self, guard: _Guard, *, inside: bool) -> None:
        self._guard = guard
        self._inside = inside

    def __enter__(self) -> None:
        self._guard.enter(self._inside)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        # Leaving user code must not raise over its result; coming back into it may.
        if self._inside or kind is not None:
            self._guard.leave()
        else:
            self._guard.enter(True)


class _Guard:
    """Lets a cancel interrupt user code, and only user code, of the task it was meant for."""

    def __init__(self, page: memoryview, lane: int, interrupts: bool) -> None:
        self._page = page
        self._base = lane * PAGE_GROUP
        self._in_user_code = False
        self._user_region = _Region(self, inside=True)
        self._our_region = _Region(self, inside=False)
        if interrupts:
            signal.signal(signal.SIGINT, self._on_interrupt)

    def _on_interrupt(self, number: int, frame: Any) -> None:
        if self._in_user_code and self.is_cancelled:
            self._in_user_code = False  # once: what runs from here on is the unwinding
            raise KeyboardInterrupt

    @property
    def is_cancelled(self) -> bool:
        current = self._page[self._base + CURRENT]
        return current != 0 and self._page[self._base + CANCEL] == current

    def user_code(self) -> _Region:
        return self._user_region

    def our_code(self) -> _Region:
        """Within user code: frames are read or sent."""
        return self._our_region

    def enter(self, is_user_code: bool) -> None:
        self._in_user_code = is_user_code
        if is_user_code and self.is_cancelled:
            self._in_user_code = False
            raise KeyboardInterrupt

    def leave(self) -> None:
        self._in_user_code = False

    def begin(self, task: int) -> None:
        self._page[self._base + INDEX] = 0
        self._page[self._base + CURRENT] = task

    def end(self) -> None:
        self._page[self._base + CURRENT] = 0
        self._page[self._base + ENDED] += 1

    @property
    def index_cell(self) -> tuple[memoryview, int]:
        return self._page, self._base + INDEX


class _LaneGuard(_Guard):
    """The guard of a lane of a thread slot: `cancel` raises in the lane's thread, while it runs that task's user code.

    The exception may come up between two bytecodes of our own that lead out of user code, but not later: whoever
    leaves takes back what has not come up. Made by the lane's thread.
    """

    def __init__(self, page: memoryview, lane: int) -> None:
        super().__init__(page, lane, interrupts=False)
        self._lock = threading.Lock()
        self._thread = threading.get_ident()
        self._inbox: _QueueInbox | None = None
        self._task = 0
        self._is_wanted = False
        self._is_raised = False

    def begin_with(self, inbox: _QueueInbox) -> None:
        """The task to begin next is that of `inbox`; it may have been cancelled while it waited for a lane."""
        self._inbox = inbox
        inbox.guard = self

    def cancel(self, task: int) -> None:
        """Called by another thread."""
        with self._lock:
            if task == self._task and not self._is_raised:
                self._is_wanted = True
                if self._in_user_code:
                    self._is_raised = True
                    _set_exception(self._thread, Cancelled)

    def was_told(self) -> None:
        """The task has read that it is cancelled, and unwinds."""
        with self._lock:
            self._is_raised = True

    def enter(self, is_user_code: bool) -> None:
        with self._lock:
            self._in_user_code = is_user_code
            is_due = is_user_code and self._is_wanted and not self._is_raised
            if is_due:
                self._is_raised, self._in_user_code = True, False
            elif not is_user_code:
                self._take_back()
        if is_due:
            raise Cancelled

    def leave(self) -> None:
        with self._lock:
            self._in_user_code = False
            self._take_back()

    def begin(self, task: int) -> None:
        super().begin(task)
        with self._lock:
            self._task = task
            self._is_wanted = self._inbox is not None and self._inbox.is_closed
            self._is_raised = False

    def end(self) -> None:
        with self._lock:
            self._in_user_code = False
            self._task = 0
            self._take_back()
        self._inbox = None
        super().end()

    def _take_back(self) -> None:
        if self._is_raised:
            _set_exception(self._thread, None)


def _set_exception(thread: int, kind: type[BaseException] | None) -> None:
    """A thread cannot be killed, but Python code in it can be interrupted between two bytecodes. None: not any more."""
    exception = None if kind is None else ctypes.py_object(kind)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), exception)


class _Slot:
    """What process and thread slots share: functions, blobs, the pool's topology."""

    def __init__(self, link: Link, config: SlotConfig, prepare: Callable[[], None] | None) -> None:
        self.link = link
        self.config = config
        self._prepare = prepare
        self.functions = Functions()
        self._arrived: dict[bytes, Blob] = {}
        self.topology: Topology | None = None
        self._infos: dict[int, InstanceInfo] = {}
        self._initialized = False
        self._initialize_lock = threading.Lock()

    def keep(self, frame: Frame) -> bool:
        """Take in what tasks stand on; False if the frame is something else."""
        if frame.kind == Kind.FUNCTION:
            self.functions.add(frame.body[:16], frame.body[16:], self.blobs_of(frame, 16))
        elif frame.kind == Kind.BLOB:
            digest, size, _, _ = read_blob_body(frame.body)
            self._arrived[digest] = Blob(digest, size, frame.fd)
        elif frame.kind == Kind.SLOT_CONFIG:
            self.topology = pickle.loads(frame.body)
        elif frame.kind == Kind.DROP_FUNCTION:
            self.functions.drop(frame.body)
        else:
            return False
        return True

    def drop(self, frame: Frame) -> None:
        """The frame is about a task that has ended; so are the blobs that came with it."""
        if frame.kind == Kind.IN_ITEM:
            for digest, _ in references(frame.body):
                self._arrived.pop(digest, None)

    def blobs_of(self, frame: Frame, start: int) -> tuple[Blob, ...]:
        """The blobs that came before the frame because it needs them; its payload begins at `start`.

        Asked when the frame is read: the next one may need the same blob, and then it comes again.
        """
        if not self._arrived:
            return ()
        names = [digest for digest, _ in references(frame.body, start)]
        found = {digest: self._arrived.pop(digest) for digest in set(names)}
        return tuple(found[digest] for digest in names)

    def call(self, frame: Frame, lane: int) -> Call:
        topology, config = self.topology, self.config
        assert topology is not None  # the agent sends it before any task
        info = self._infos.get(lane)
        if info is None:
            info = self._infos[lane] = _info(topology, config, lane)
        kind = CALL_KINDS[frame.body[TASK_KIND_AT]]
        return Call(kind, frame.ident, info, config.rank)

    def initialize(self) -> None:
        """What a rank's integrations prepare, then the pool's initializer; once in this process, before its first
        task.
        """
        with self._initialize_lock:
            if self._initialized:
                return
            if self._prepare is not None:
                self._prepare()
            assert self.topology is not None
            try:
                if self.topology.initializer is not None:
                    function, args = pickle.loads(self.topology.initializer)
                    function(*args)
            except Exception as error:
                raise InitializerFailed(f"the pool's initializer raised {type(error).__name__}: {error}") from error
            self._initialized = True

    def run(
        self,
        frame: Frame,
        blobs: tuple[Blob, ...],
        lane: int,
        guard: _Guard,
        inbox: Inbox,
        streams: ProcessStreams | ThreadStreams,
        *,
        whole_process: bool,
        replies: Replies | None = None,
    ) -> None:
        """One task from frame to last frame. Raises ChannelClosed only."""
        streams.begin()
        guard.begin(frame.ident)
        enter_call(self.call(frame, lane), whole_process=whole_process)
        try:
            TaskRun(
                frame=frame,
                link=replies or self.link,
                functions=self.functions,
                blobs=blobs,
                inbox=inbox,
                guard=guard,
                deliver=self.config.deliver,
                before=None if self._initialized else self.initialize,
                at_end=streams.end,
            ).run()
        finally:
            guard.end()
            enter_call(None, whole_process=whole_process)


def _info(topology: Topology, config: SlotConfig, lane: int) -> InstanceInfo:
    rank = config.rank
    return InstanceInfo(
        node=topology.node,
        worker=rank.local_rank if rank else config.number + lane,
        total_nodes=len(topology.peers),
        workers_per_node=rank.local_world_size if rank else config.workers_per_node,
        accelerators=topology.accelerators[topology.node],
        total_accelerators=sum(topology.accelerators),
        head_addr=rank.head_addr if rank else topology.peers[0].private_ip,
        head_port=rank.head_port if rank else 0,
        job_id=topology.job_id,
        peers=topology.peers,
        accelerator=topology.accelerator,
        network=NetworkInfo(interface=topology.interface) if topology.interface else None,
        rank=rank.rank if rank else None,
        local_rank=rank.local_rank if rank else None,
        world_size=rank.world_size if rank else None,
        restart_count=rank.restart_count if rank else 0,
    )


# Process slots ----------------------------------------------------------------------------------------------------


class _DirectInbox:
    """The running task reads the socket itself; what is not for it waits."""

    def __init__(self, slot: _Slot) -> None:
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
        if frame.kind == Kind.TASK:
            self.later.append((frame, self._slot.blobs_of(frame, TASK_HEAD.size)))
            return None
        return frame, self._slot.blobs_of(frame, 0) if frame.kind == Kind.IN_ITEM else ()


def _serve_process(slot: _Slot, page: memoryview, line: Line | None) -> None:
    streams = ProcessStreams(slot.config.token, page, DRAINED, READING)
    guard = _Guard(page, 0, interrupts=True)
    inbox = _DirectInbox(slot)

    def run(frame: Frame, blobs: tuple[Blob, ...], replies: Replies | None = None) -> None:
        slot.run(frame, blobs, 0, guard, inbox, streams, whole_process=True, replies=replies)

    slot.link.send(Kind.READY)
    if line is not None:
        _serve_both(slot, line, inbox, run)
    while True:
        has_run = _serve_next(slot, inbox, run)
        if has_run and slot.config.rank is not None:
            return


def _serve_next(slot: _Slot, inbox: _DirectInbox, run: Callable[..., None]) -> bool:
    """Wait for what comes through the agent. True: it was a task, and has run."""
    if inbox.later:
        frame, blobs = inbox.later.pop(0)
    else:
        frame = slot.link.receive()
        while frame.kind != Kind.TASK:
            if not slot.keep(frame):
                slot.drop(frame)
            if not slot.link.has_more:
                return False
            frame = slot.link.receive()
        blobs = slot.blobs_of(frame, TASK_HEAD.size)
    run(frame, blobs)  # holds the blobs no longer than it runs: an idle slot holds no array
    return True


def _serve_both(slot: _Slot, line: Line, inbox: _DirectInbox, run: Callable[..., None]) -> None:
    """Tasks from the agent and from the client's direct line, until the client hangs up."""
    poll = select.poll()
    poll.register(slot.link.fileno(), select.POLLIN)
    poll.register(line.fileno(), select.POLLIN)
    agent = slot.link.fileno()
    while True:
        if not (inbox.later or slot.link.has_more):
            ready = poll.poll()
            # The agent first: what tasks stand on comes from there.
            if len(ready) == 1 and ready[0][0] != agent:
                try:
                    frames = line.receive()
                except ChannelClosed:
                    return
                for frame in frames:
                    if frame.kind == Kind.TASK:
                        run(frame, (), line)
                    elif frame.kind == Kind.FUNCTION:
                        slot.functions.add(frame.body[:16], frame.body[16:], (), holder="line")
                    elif frame.kind == Kind.DROP_FUNCTION:
                        slot.functions.drop(frame.body, holder="line")
                continue
        _serve_next(slot, inbox, run)


# Thread slots -----------------------------------------------------------------------------------------------------


class _QueueInbox:
    """The main thread reads the socket and hands each lane its frames."""

    def __init__(self) -> None:
        self.frames: queue.SimpleQueue[Arrived] = queue.SimpleQueue()
        self.guard: _LaneGuard | None = None
        self.is_closed = False

    def put(self, frame: Frame, blobs: tuple[Blob, ...]) -> None:
        """Called by the main thread."""
        self.frames.put((frame, blobs))
        if frame.kind == Kind.CLOSE:
            self.is_closed = True  # before the guard is looked at: a lane that has none yet looks here when it begins
            if self.guard is not None:
                self.guard.cancel(frame.ident)

    def wait(self) -> Arrived:
        return self._told(self.frames.get())

    def waiting(self) -> Iterator[Arrived]:
        while True:
            try:
                yield self._told(self.frames.get_nowait())
            except queue.Empty:
                return

    def _told(self, arrived: Arrived) -> Arrived:
        if arrived[0].kind == Kind.CLOSE and self.guard is not None:
            self.guard.was_told()
        return arrived


def _serve_threads(slot: _Slot, page: memoryview) -> None:
    streams = ThreadStreams(lambda task, stream, text: slot.link.send(Kind.LOG, task, text, lane=stream))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tasks: queue.SimpleQueue[Arrived] = queue.SimpleQueue()
    running: dict[int, _QueueInbox] = {}

    def lane_loop(lane: int) -> None:
        guard = _LaneGuard(page, lane)
        while True:
            frame, blobs = tasks.get()
            inbox = running[frame.ident]
            guard.begin_with(inbox)
            try:
                slot.run(frame, blobs, lane, guard, inbox, streams, whole_process=False)
            except ChannelClosed:
                return
            except Cancelled:  # the task has ended; the lane goes on
                pass
            finally:
                running.pop(frame.ident, None)
                del blobs

    for lane in range(slot.config.lanes):
        threading.Thread(target=lane_loop, args=(lane,), name=f"lane-{lane}", daemon=True).start()
    slot.link.send(Kind.READY)
    while True:
        frame = slot.link.receive()
        if slot.keep(frame):
            continue
        if frame.kind == Kind.TASK:
            running[frame.ident] = _QueueInbox()
            tasks.put((frame, slot.blobs_of(frame, TASK_HEAD.size)))
            continue
        inbox = running.get(frame.ident)  # its lane may take it out at any moment
        if inbox is None:
            slot.drop(frame)
            continue
        inbox.put(frame, slot.blobs_of(frame, 0) if frame.kind == Kind.IN_ITEM else ())


def serve(
    sock: socket.socket,
    page_fd: int,
    config: SlotConfig,
    prepare: Callable[[], None] | None = None,
    line: socket.socket | None = None,
) -> None:
    """Run tasks until the agent goes away. Called in the freshly forked process.

    `prepare` is called as part of the first task, before anything of the user's is loaded; `line` is the client's
    direct line.
    """
    _volunteer_for_the_oom_killer()
    os.environ.update(config.env)
    forbid_terminal()
    link = Link(sock)
    slot = _Slot(link, config, prepare)
    page = map_page(page_fd, config.lanes)
    if config.rank is None:
        os.close(page_fd)
    else:
        offer_stacks(page_fd)
    try:
        if config.executor == "thread":
            _serve_threads(slot, page)
        else:
            _serve_process(slot, page, None if line is None else Line(line, link))
    except ChannelClosed:
        pass  # the agent ended; so do we


def _volunteer_for_the_oom_killer() -> None:
    """When memory runs out, a slot dies before the agent that must report it."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("800")
