"""The agent alone: frames in, frames out, with processes that cannot be made or stay silent."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skyward.node.agent.devices import NodeDevices
from skyward.node.agent.limit_groups import Enforcement
from skyward.node.agent.loop import EventLoop
from skyward.node.agent.node_tasks import NodeTasks
from skyward.node.agent.session import Session
from skyward.node.agent.slots import make_slot
from skyward.node.slot.link import blob_body
from skyward.node.slot.slot import SlotConfig
from skyward.node.slot.zygote import ForkOrder, receive_order, send_order
from skyward.values.topology import Rank
from skyward.wire.blobs import Blob
from skyward.wire.channel import Channel
from skyward.wire.frames import Frame, FrameKind, pack
from skyward.wire.payloads import encode
from skyward.wire.tasks import CallKind, NodeConfig, RankOrder, TaskHead, pack_task

FUNCTION = b"f" * 16
RANK = Rank(
    rank=0,
    world_size=1,
    local_rank=0,
    local_world_size=1,
    node=0,
    node_rank=0,
    nodes=1,
    head_addr="127.0.0.1",
    head_port=1,
    local_addr="127.0.0.1",
)


@contextlib.contextmanager
def few_files(left: int) -> Iterator[None]:
    """Limit this process to this many more open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for fd in taken[:left]:
            os.close(fd)
        del taken[:left]
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken:
            os.close(fd)


BOOT = "import sys; sys.path[:] = sys.argv[1:]; from skyward.node.agent.main import main; sys.exit(main())"
AGENT = [sys.executable, "-S", "-c", BOOT, *sys.path]
"""Command of an agent."""


class Client:
    """Client that notes the agent's frames."""

    def __init__(self) -> None:
        self.heard: list[Frame] = []

    def send_result(self, frame: Frame) -> None:
        self.heard.append(frame)

    def flush(self) -> None: ...


@pytest.fixture
def agent(tmp_path: Path) -> Any:
    """Agent of a node whose interpreter does not exist. It runs no slot."""
    config = NodeConfig(
        pool="p", node=0, folder=str(tmp_path), slots=1, python="/nowhere", path=(), cwd=str(tmp_path), env=()
    )
    made: Any = NodeTasks(EventLoop(), config, "", NodeDevices(), Enforcement())
    made.client = Client()
    payload = encode(None, lambda data: pytest.fail("a blob")).body
    made.placing.add_function(Frame(FrameKind.FUNCTION, 0, 0, 0, FUNCTION + payload))
    return made


def task(ident: int, kind: CallKind, payload: bytes) -> Frame:
    head = TaskHead(FUNCTION, 0, kind, 0, 0)
    return Frame(FrameKind.TASK, 0, 0, ident, pack_task(head, payload))


def test_the_task_of_a_rank_that_could_not_be_made_is_lost_and_runs_nowhere(
    agent: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    slot = make_slot(0)
    agent.placing.slots.append(slot)
    agent.on_rank(Frame(FrameKind.RANK, 0, 1, 7, pickle.dumps(RankOrder(rank=RANK, launch=b"launch"))))
    assert "cannot start a process" in capfd.readouterr().err
    order = task(7, CallKind.GANG, encode(((), {}), lambda data: pytest.fail("a blob")).body)
    agent.on_task(order)
    agent.on_task(order)
    lost, unknown = agent.client.heard
    assert (lost.kind, lost.ident) == (FrameKind.LOST, 7)
    assert json.loads(lost.body)["started"] is False
    assert "/nowhere" in json.loads(lost.body)["why"]
    assert json.loads(unknown.body)["why"] == "", "the reason is kept until it is told"
    assert not slot.running
    slot.close()


def test_a_rank_without_free_descriptors_fails_its_gang_and_not_the_node(agent: Any) -> None:
    order = pickle.dumps(RankOrder(rank=RANK, launch=b"launch"))
    with few_files(0):
        agent.on_rank(Frame(FrameKind.RANK, 0, 1, 7, order))
    agent.on_task(task(7, CallKind.GANG, encode(((), {}), lambda data: pytest.fail("a blob")).body))
    (lost,) = agent.client.heard
    assert (lost.kind, lost.ident) == (FrameKind.LOST, 7)
    assert "Too many open files" in json.loads(lost.body)["why"]


@pytest.mark.parametrize("left", range(14))
def test_a_slot_that_cannot_be_made_leaves_no_descriptor_open(left: int) -> None:
    gc.collect()
    before = os.listdir("/proc/self/fd")
    with few_files(left):
        try:
            slot = make_slot(0, line_number=1)
        except OSError:
            slot = None
    if slot is not None:
        slot.close()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_blob_that_is_dropped_while_its_task_waits_is_requested_again(agent: Any) -> None:
    blobs: list[Blob] = []

    def put(data: memoryview) -> Blob:
        blobs.append(Blob.snapshot(data.cast("B")))
        return blobs[-1]

    def arrives() -> None:
        body = blob_body(blobs[0].digest, blobs[0].size)
        agent.placing.add_blob(Frame(FrameKind.BLOB, 0, 0, 0, body, os.dup(blobs[0].fd)))

    slot = make_slot(0)
    slot.running[1] = None
    agent.placing.slots.append(slot)
    payload = encode(((b"x" * 1_000_000,), {}), put).body
    agent.on_task(task(2, CallKind.PLAIN, payload))
    arrives()
    agent.placing.drop_blob(Frame(FrameKind.DROP_BLOB, 0, 0, 0, blobs[0].digest))
    del slot.running[1]
    agent.placing.dispatch()
    assert not slot.running
    arrives()
    assert list(slot.running) == [2]
    slot.close()


def test_a_session_that_receives_an_invalid_frame_is_closed(capfd: pytest.CaptureFixture[str]) -> None:
    ours, theirs = socket.socketpair()
    loop = EventLoop()
    closed: list[Session] = []

    def ended(session: Session) -> None:
        closed.append(session)
        loop.stop()

    session = Session(loop, Channel(ours), 1000, lambda session, frame: None, ended)
    with theirs:
        theirs.sendall(b"\xff" * 64)
        loop.run()
    assert closed == [session]
    assert "agent closed a connection" in capfd.readouterr().err


@pytest.mark.parametrize("size", [10, 1_000_000])
def test_an_order_of_any_size_reaches_the_zygote_with_its_descriptors(size: int) -> None:
    order = ForkOrder(number=1, config=SlotConfig(number=0, token=b"t"), launch=b"x" * size)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        send_order(ours, pickle.dumps(order), [0, 0, 0, 0])
        received, fds = receive_order(theirs)
    assert received == order
    assert len(fds) == 4
    for fd in fds:
        os.close(fd)


def test_an_agent_that_cannot_make_its_folder_reports_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = NodeConfig(
        pool="p",
        node=3,
        folder=str(tmp_path / "file" / "folder"),
        slots=1,
        python=sys.executable,
        path=tuple(sys.path),
        cwd=str(tmp_path),
        env=(),
    )
    ended = subprocess.run(
        AGENT,
        input=pickle.dumps(config),
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    assert b"folder cannot be created or written: Not a directory" in ended.stdout
    assert b"Traceback" not in ended.stderr


@pytest.mark.parametrize("has_contact", [True, False])
def test_a_machine_that_ends_with_its_node_goes_on_if_that_was_never_used(tmp_path: Path, has_contact: bool) -> None:
    lease = tmp_path / "lease"
    lease.touch()
    config = NodeConfig(
        pool="p",
        node=1,
        folder=str(tmp_path / "node"),
        slots=1,
        python=sys.executable,
        path=tuple(sys.path),
        cwd=str(tmp_path),
        env=(),
        lease_s=60.0,
        lease_file=str(lease),
        ends_machine=True,
    )
    with subprocess.Popen(AGENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as agent:
        assert agent.stdin is not None
        assert agent.stdout is not None
        agent.stdin.write(pickle.dumps(config))
        agent.stdin.close()
        with socket.socket(socket.AF_UNIX) as keeper:
            keeper.connect(agent.stdout.readline().strip())
            keeper.sendall((pack(FrameKind.LEASE) if has_contact else b"") + pack(FrameKind.SHUTDOWN))
            assert agent.wait(60) == 0
    assert bool(lease.read_text()) == has_contact
