"""Common part of process and thread slots: functions, blobs, the pool's topology, and running a task."""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections.abc import Callable
from dataclasses import field, replace
from typing import TYPE_CHECKING, Literal

from ...core.by_value import loads
from ...core.frozenmap import FrozenMap
from ...core.records import dataclass
from ...errors import InitializerFailed
from ...values.devices import Device, Grant
from ...values.topology import InstanceInfo, NetworkInfo, Rank
from ...wire.blobs import Blob
from ...wire.frames import Frame, FrameKind
from ...wire.tasks import CallKind, TaskHead, Topology, references, unpack_task
from .execute import Cancelled, Functions, Inbox, TaskRun
from .exit_handlers import run_exit_handlers
from .guards import SlotGuard
from .link import Link, Replies, read_blob_body
from .mappings import LentBlob, Mappings
from .runtime import RunningCall, call_endings, enter_call
from .stdio import ProcessStreams, ThreadStreams

if TYPE_CHECKING:  # as in wire.tasks
    from ...values.volume import PlacedVolume


_NO_BLOBS: contextlib.nullcontext[tuple[Blob | LentBlob, ...]] = contextlib.nullcontext(())


@dataclass(frozen=True, kw_only=True)
class SlotConfig:
    """Configuration of a slot process, passed when it is forked."""

    number: int
    lanes: int = 1
    executor: Literal["process", "thread"] = "process"
    token: bytes
    workers_per_node: int = 1
    rank: Rank | None = None
    deliver: bool = True
    """Whether anybody wants the rank's value."""
    env: tuple[tuple[str, str], ...] = field(default=())
    notice_file: str = ""
    """See NodeConfig."""
    volumes: tuple[PlacedVolume, ...] = ()
    """See NodeConfig.placed_volumes."""
    agent: str = ""
    """Path of the agent's socket."""
    grant: Grant = field(default=Grant())
    """Part of the node that its calls may use, with its devices named."""
    devices: tuple[Device, ...] = ()
    """Devices of the grant."""
    visible: int = 0
    """Number of devices that the process sees."""
    groups: tuple[str, ...] = ()
    """Files by which the process enters the control groups that limit it."""
    enforced: tuple[str, ...] = ()
    """Options of its calls that these groups enforce."""


class Slot:
    """Functions, blobs and topology that the tasks of one slot process use."""

    def __init__(self, link: Link, config: SlotConfig, prepare: Callable[[], None] | None) -> None:
        self.link = link
        self.config = config
        self._prepare = prepare
        self.functions = Functions()
        self._arrived: dict[bytes, Blob] = {}
        self._mappings = Mappings()
        self.topology: Topology | None = None
        self._infos: dict[int, InstanceInfo] = {}
        self._initialized = False
        self._initialize_lock = threading.Lock()

    def keep(self, frame: Frame) -> bool:
        """Store a frame that tasks depend on; return False for any other frame."""
        if frame.kind == FrameKind.FUNCTION:
            self.functions.add(frame.body[:16], frame.body[16:], self.blobs_of(frame, 16))
        elif frame.kind == FrameKind.BLOB:
            digest, size, _, _ = read_blob_body(frame.body)
            self._arrived[digest] = Blob(digest, size, frame.fd)
        elif frame.kind == FrameKind.DROP_BLOB:
            self._mappings.drop(frame.body)
        elif frame.kind == FrameKind.SLOT_CONFIG:
            self.topology = pickle.loads(frame.body)
            self._infos.clear()
        elif frame.kind == FrameKind.DROP_FUNCTION:
            self.functions.drop(frame.body)
        else:
            return False
        return True

    def drop(self, frame: Frame) -> None:
        """Discard a frame of an ended task, with its blobs."""
        if frame.kind == FrameKind.IN_ITEM:
            for digest, _ in references(frame.body):
                self._arrived.pop(digest, None)

    def blobs_of(self, frame: Frame, start: int) -> tuple[Blob, ...]:
        """Take the blobs that arrived ahead of this frame; its payload begins at `start`.

        Call it when the frame is read, because the next frame may need the same blob, which then arrives again.
        """
        if not self._arrived:
            return ()
        names = [digest for digest, _ in references(frame.body, start)]
        found = {digest: self._arrived.pop(digest) for digest in set(names)}
        return tuple(found[digest] for digest in names)

    def call(self, task: int, head: TaskHead, lane: int) -> RunningCall:
        topology, config = self.topology, self.config
        assert topology is not None  # the agent sends it ahead of every task
        info = self._infos.get(lane)
        if info is None:
            info = self._infos[lane] = _info(topology, config, lane)
        if head.kind == CallKind.BROADCAST:
            head_peer = topology.peers[head.first_node] if head.first_node < len(topology.peers) else None
            address = info.head_addr if head_peer is None else head_peer.private_ip
            info = replace(info, part=head.part, parts=head.parts, head_addr=address)
        return RunningCall(task, info, config.rank, config.agent)

    def initialize(self) -> None:
        """Prepare a rank's integrations, then run the pool's initializer; once per process, before the first task."""
        with self._initialize_lock:
            if self._initialized:
                return
            if self.config.volumes:
                from .volumes import fetch_volumes

                fetch_volumes(self.config.volumes, self.config.agent)
            if self._prepare is not None:
                self._prepare()
            assert self.topology is not None
            try:
                if self.topology.initializer is not None:
                    function, args = loads(self.topology.initializer)
                    function(*args)
            except Exception as error:
                raise InitializerFailed(
                    f"initializer: raised {type(error).__name__}: {error}; mend it, and open the pool again"
                ) from error
            self._initialized = True

    def _end_script(self) -> None:
        """Do what follows the function: a rank's process ends, so its exit handlers run, and then volumes are saved."""
        if self.config.rank is not None:
            run_exit_handlers()
        if self.config.volumes:
            from .volumes import save_volumes

            save_volumes(self.config.volumes)

    def run(
        self,
        frame: Frame,
        blobs: tuple[Blob, ...],
        lane: int,
        guard: SlotGuard,
        inbox: Inbox,
        streams: ProcessStreams | ThreadStreams,
        *,
        whole_process: bool,
        replies: Replies | None = None,
    ) -> None:
        """Run one task, from its first frame to its last.

        Raises ChannelClosed, or any error that kept the last frame from being sent. The process must then exit: the
        page still names the task, and so tells the agent that it was running.
        """
        has_answered = False
        streams.begin()
        guard.begin(frame.ident)
        head = unpack_task(frame.body)
        call = self.call(frame.ident, head, lane)
        if blobs:
            call = call._replace(names=frozenset(blob.digest for blob in blobs))
        enter_call(call, whole_process=whole_process)
        try:
            with self._mappings.lend(blobs) if blobs else _NO_BLOBS as lent:
                TaskRun(
                    frame=frame,
                    head=head,
                    link=replies or self.link,
                    functions=self.functions,
                    blobs=lent,
                    inbox=inbox,
                    guard=guard,
                    deliver=self.config.deliver,
                    before=None if self._initialized else self.initialize,
                    after=self._end_script if self.config.volumes or self.config.rank is not None else None,
                    at_end=streams.end,
                ).run()
                has_answered = True
        except Cancelled:  # in a lane: it arrived after the task's end
            has_answered = True
            raise
        finally:
            for end in call_endings.pop(frame.ident, ()):
                end(frame.ident)
            if has_answered:
                guard.end()
            enter_call(None, whole_process=whole_process)


def _info(topology: Topology, config: SlotConfig, lane: int) -> InstanceInfo:
    rank = config.rank
    peers = tuple(peer for peer in topology.peers if peer is not None)
    return InstanceInfo(
        node=topology.node,
        worker=rank.local_rank if rank else config.number + lane,
        total_nodes=len(peers),
        workers_per_node=rank.local_world_size if rank else config.workers_per_node,
        accelerators=config.visible,
        total_accelerators=sum(topology.accelerators),
        head_addr=rank.head_addr if rank else peers[0].private_ip,
        head_port=rank.head_port if rank else 0,
        job_id=topology.job_id,
        peers=peers,
        accelerator=topology.accelerator,
        network=NetworkInfo(interface=topology.interface) if topology.interface else None,
        rank=rank.rank if rank else None,
        local_rank=rank.local_rank if rank else None,
        world_size=rank.world_size if rank else None,
        restart_count=rank.restart_count if rank else 0,
        part=rank.rank if rank else None,
        parts=rank.world_size if rank else None,
        notice_file=config.notice_file,
        volumes=FrozenMap({place.path: place.folder for place in config.volumes}),
        devices=config.devices,
        cpus=config.grant.cpus,
        memory_gib=config.grant.memory_gib,
        enforced=config.enforced,
    )
