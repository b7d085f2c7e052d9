"""Parts of an engine without an engine, and a node whose agent the test plays."""

from __future__ import annotations

import pickle
import socket
from dataclasses import asdict, dataclass, field
from typing import Any

from skyward.calls.futures import Future
from skyward.calls.options import CallOptions
from skyward.engine.direct_lines import DirectLines
from skyward.engine.frame_handlers import FrameHandlers
from skyward.engine.gang import Gang
from skyward.engine.gangs import Gangs
from skyward.engine.kept_values import KeptValues
from skyward.engine.ledger import Ledger
from skyward.engine.link import NodeLink
from skyward.engine.link_repair import LinkRepair
from skyward.engine.log_router import LogRouter
from skyward.engine.members import Membership
from skyward.engine.nodes import NodeLinks
from skyward.engine.relief import Relief
from skyward.engine.retries import Retries
from skyward.engine.task_dispatcher import TaskDispatcher
from skyward.engine.task_events import TaskEvents
from skyward.engine.tasks import Received, Task, TaskFailure, WireFunction
from skyward.engine.transfers import Transfers
from skyward.events import Event
from skyward.schedule.scheduler import Scheduler
from skyward.values.devices import Device
from skyward.values.launch import ProcessLaunch
from skyward.values.machine import Machine
from skyward.values.topology import Peer
from skyward.wire.blobs import Blob
from skyward.wire.channel import Channel, ChannelClosed
from skyward.wire.failures import encode_failure
from skyward.wire.frames import Frame, FrameKind
from skyward.wire.payloads import Encoded, encode
from skyward.wire.tasks import Mode, TaskHead
from tests.waiting import until

__all__ = ["FarEnd", "NotedTask", "Parts", "failure_body", "function", "value_body"]

GRACE_S = 2.0


def function(name: bytes = b"f") -> WireFunction:
    return WireFunction(name * 16, Encoded(b"code"))


def value_body(value: object) -> bytes:
    """Return the body of a RESULT frame."""
    return encode(value, Blob.snapshot).body


def failure_body(error: Exception) -> bytes:
    """Return the body of an ERROR frame."""
    return encode_failure(error)


@dataclass(eq=False, kw_only=True)
class NotedTask(Task):
    """Task that notes every report it gets."""

    told: list[tuple[str, Any]] = field(default_factory=list)

    def on_result(self, received: Received) -> None:
        self.told.append(("value", received.decode()))

    def on_error(self, failed: TaskFailure) -> None:
        self.told.append(("raised", failed.error()))

    def on_failed(self, error: BaseException) -> None:
        self.told.append(("failed", error))

    def on_item(self, received: Received) -> None:
        self.told.append(("item", received.decode()))


def plain_task(number: int, *, timeout_s: float | None = None, **options: Any) -> NotedTask:
    return NotedTask(
        id=number,
        name="work",
        head=TaskHead(function().digest, Mode.CALL, 0, 0, 0),
        function=function(),
        payload=Encoded(b"arguments"),
        options=CallOptions(**options),
        timeout_s=timeout_s,
    )


class FarEnd:
    """The other end of one of the client's channels."""

    def __init__(self, sock: socket.socket) -> None:
        self.channel = Channel(sock)

    def received(self) -> list[Frame]:
        """Return every frame that has come since the last call."""
        frames: list[Frame] = []
        try:
            while True:
                frames += self.channel.receive()
        except (BlockingIOError, ChannelClosed):
            return frames

    def next(self, kind: int) -> Frame:
        """Wait for the next frame of a kind. Earlier frames are dropped."""
        frames: list[Frame] = []

        def has_come() -> bool:
            frames.extend(frame for frame in self.received() if frame.kind == kind)
            return bool(frames)

        until(has_come)
        return frames[0]

    def kinds(self) -> list[int]:
        return [frame.kind for frame in self.received()]

    def send(self, kind: int, ident: int = 0, body: bytes = b"", *, lane: int = 0, fd: int = -1) -> None:
        self.channel.queue(kind, ident, body, lane=lane, fd=fd)
        assert self.channel.flush()


class Parts:
    """Parts that most tests need, made as an engine makes them. Call `close` at the end."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.ledger = Ledger(Scheduler())
        self.ledger.is_open = True
        self.task_events = TaskEvents(self.events.append)
        self.logs = LogRouter(None)
        self.lines = DirectLines(self.ledger)
        self.dispatcher = TaskDispatcher(self.ledger, self.lines, self.task_events, self.logs, grace_s=GRACE_S)
        self.nodes = NodeLinks(self.ledger, self.dispatcher, job_id="job", initializer=None, emit=self.events.append)
        self.values = KeptValues(
            self.ledger, self.dispatcher, Transfers(self.ledger, self.events.append, are_allowed=True)
        )
        self.values.soon = lambda action: action()
        self.ends: list[FarEnd] = []

    def gangs(self) -> Gangs:
        return Gangs(self.ledger, self.dispatcher, self.nodes, self.logs, grace_s=GRACE_S)

    def link_repair(self, *on_lost: Any) -> LinkRepair:
        return LinkRepair(self.ledger, self.lines, self.dispatcher, self.nodes, self.task_events, on_lost=on_lost)

    def members(self, *on_left: Any) -> Membership:
        return Membership(self.ledger, self.lines, self.dispatcher, self.nodes, self.values, on_left=on_left)

    def relief(self, members: Membership, repair: LinkRepair) -> Relief:
        return Relief(self.ledger, self.dispatcher, self.task_events, members, repair)

    def frame_handlers(self, **given: Any) -> FrameHandlers:
        noted: dict[str, Any] = {
            "on_rank_stack": lambda task, frame: None,
            "received_kept": lambda link, frame: link.received(frame),
            "take_lent": self.lines.take_lent,
            "others": {},
            **given,
        }
        return FrameHandlers(self.ledger, self.dispatcher, self.logs, **noted)

    def close(self) -> None:
        self.values.close()
        for link in self.ledger.links.values():
            link.close()
            if link.line is not None:
                link.line.channel.close()
        for end in self.ends:
            end.channel.close()
        self.ledger.watcher.close()

    # Nodes ----------------------------------------------------------------------------------------------------------

    def add_link(self, number: int = 0, devices: tuple[str, ...] = ()) -> FarEnd:
        """Put a link to a node, and its machine, into the ledger."""
        near, far = socket.socketpair()
        fields = [asdict(Device(index=at, id=name, kind="nvidia", name="L4")) for at, name in enumerate(devices)]
        facts = {"devices": fields, "pid": 100 + number}
        self.ledger.links[number] = NodeLink(number, Channel(near), facts)
        self.ledger.machines[number] = machine(number)
        self.ends.append(FarEnd(far))
        return self.ends[-1]

    def add_node(self, number: int = 0, slots: int = 1, devices: tuple[str, ...] = ()) -> FarEnd:
        """Call `add_link`, and let the scheduler use the node."""
        end = self.add_link(number, devices)
        with self.ledger:
            self.ledger.watcher.add(self.ledger.links[number])
            self.dispatcher.perform(self.ledger.scheduler.node_up(number, slots))
        return end

    def offer_line(self, agent: FarEnd, number: int = 0) -> FarEnd:
        """Let an agent hand its slot's direct line to the client. Returns the slot's end."""
        near, far = socket.socketpair()
        agent.send(FrameKind.LINE, 1, fd=near.fileno())
        near.close()
        (frame,) = self.ledger.links[number].receive()
        with self.ledger:
            self.lines.on_line(number, frame)
        self.ends.append(FarEnd(far))
        return self.ends[-1]

    # Work -----------------------------------------------------------------------------------------------------------

    def task(self, **options: Any) -> NotedTask:
        return plain_task(next(self.ledger.numbers), **options)

    def submit(self, **options: Any) -> NotedTask:
        task = self.task(**options)
        with self.ledger:
            self.dispatcher.submit(task, None)
        return task

    def gang(self, nodes: tuple[int, ...] = (0,), **options: Any) -> Gang:
        launch = ProcessLaunch()
        return Gang(
            id=next(self.ledger.numbers),
            name="train",
            launch=launch,
            launch_bytes=pickle.dumps(launch),
            function=function(),
            payload=Encoded(b"arguments"),
            head=TaskHead(function().digest, Mode.CALL, 2, 0, 0),
            options=CallOptions(**options),
            nodes=nodes,
            ranks_per_node=1,
            retries=Retries(CallOptions(**options)),
            future=Future(),
        )


def machine(number: int = 0, **fields: Any) -> Machine:
    given: dict[str, Any] = {"socket_path": "", "folder": "", "pid": 0, "slots": 1, "lease_s": 5.0, **fields}
    return Machine(node=number, peer=Peer(node=number, private_ip="127.0.0.1"), **given)
