"""Tasks that wait in a busy slot's socket: when they are put there, and who gets them. The test plays the slot."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skyward.node.agent.devices import NodeDevices
from skyward.node.agent.limit_groups import Enforcement
from skyward.node.agent.loop import EventLoop
from skyward.node.agent.node_tasks import NodeTasks
from skyward.node.agent.slots import make_slot
from skyward.node.slot.page import CURRENT
from skyward.node.slot.shelf import MOST, Claims
from skyward.wire.channel import Channel
from skyward.wire.frames import ON_SHELF, QUIET, Frame, FrameKind
from skyward.wire.payloads import encode
from skyward.wire.tasks import Mode, NodeConfig, TaskHead, pack_task

FUNCTION = b"f" * 16
PAYLOAD = encode(((), {}), lambda data: pytest.fail("a blob")).body


class Client:
    """Client that notes the agent's frames."""

    passes_fds = False

    def __init__(self) -> None:
        self.heard: list[Frame] = []

    def send_result(self, frame: Frame) -> None:
        self.heard.append(frame)

    def send(self, kind: int, ident: int = 0, body: bytes = b"", *, lane: int = 0) -> None:
        self.heard.append(Frame(kind, 0, lane, ident, body))

    def flush(self) -> None: ...


class Agent(NodeTasks):
    """Agent whose event loop is run by the test."""

    def __init__(self, loop: EventLoop, config: NodeConfig) -> None:
        super().__init__(loop, config, "", NodeDevices(), Enforcement())
        self.loop = loop


class Worker:
    """A slot of the agent without a process: the test reads its socket."""

    def __init__(self, agent: Agent, number: int) -> None:
        self._agent = agent
        self.slot = make_slot(number)
        sock_fd, out, err, page, shelf_fd = self.slot.child_fds
        self._socket = socket.socket(fileno=sock_fd)
        self._channel = Channel(self._socket)
        self._claims = Claims(shelf_fd)
        self._fds = (out, err, page, shelf_fd)
        self.slot.child_fds = []
        agent.placing.slots.append(self.slot)

    def tasks(self) -> list[int]:
        """Return the tasks that arrived and belong to this slot. A shelved task belongs to it only if it is claimed."""
        try:
            frames = self._channel.receive()
        except BlockingIOError:
            return []
        tasks = [frame for frame in frames if frame.kind == FrameKind.TASK]
        return [frame.ident for frame in tasks if not frame.flags & ON_SHELF or self._claims.claim(frame.lane)]

    def ends(self, task: int) -> None:
        self._agent.on_slot_frame(self.slot, Frame(FrameKind.RESULT, QUIET, 0, task, PAYLOAD))
        self._agent.loop.end_turn()

    def dies(self, *, in_task: int = 0) -> None:
        self.slot.page[CURRENT] = in_task
        self._agent.on_slot_dead(self.slot, 0, -9)

    def close(self) -> None:
        self._channel.close()
        for fd in self._fds:
            os.close(fd)
        if not self.slot.is_dead:
            self.slot.close()


@pytest.fixture
def agent(tmp_path: Path) -> Any:
    """Agent of a node that cannot make processes."""
    config = NodeConfig(
        pool="p", node=0, folder=str(tmp_path), slots=2, python="/nowhere", path=(), cwd=str(tmp_path), env=()
    )
    made: Any = Agent(EventLoop(), config)
    made.client = Client()
    made.placing.add_function(Frame(FrameKind.FUNCTION, 0, 0, 0, FUNCTION + PAYLOAD))
    return made


@pytest.fixture
def first(agent: Any) -> Iterator[Worker]:
    made = Worker(agent, 0)
    yield made
    made.close()


@pytest.fixture
def second(agent: Any, first: Worker) -> Iterator[Worker]:
    made = Worker(agent, 1)
    yield made
    made.close()


def send(agent: Any, *tasks: int, mode: Mode = Mode.CALL, inputs: int = 0) -> None:
    for task in tasks:
        head = TaskHead(FUNCTION, mode, 0, inputs, 0)
        agent.on_task(Frame(FrameKind.TASK, 0, 0, task, pack_task(head, PAYLOAD)))
    agent.loop.end_turn()


def heard(agent: Any, kind: FrameKind) -> list[int]:
    return [frame.ident for frame in agent.client.heard if frame.kind == kind]


def test_a_busy_slot_is_sent_its_next_task_and_no_more(agent: Any, first: Worker) -> None:
    send(agent, 1, 2, 3)
    assert first.tasks() == [1, 2]
    first.ends(1)
    assert first.tasks() == [3]
    first.ends(2)
    first.ends(3)
    assert heard(agent, FrameKind.RESULT) == [1, 2, 3]
    assert not agent.placing.shelved
    assert not agent.placing.by_task
    assert not first.slot.running


def test_a_waiting_task_goes_to_a_slot_that_falls_idle(agent: Any, first: Worker, second: Worker) -> None:
    send(agent, 1, 2, 3)
    assert second.tasks() == [2]
    second.ends(2)
    assert second.tasks() == [3]
    assert first.tasks() == [1]
    assert not agent.placing.shelved


def test_a_task_that_has_begun_stays_though_another_slot_falls_idle(agent: Any, first: Worker, second: Worker) -> None:
    send(agent, 1, 2, 3)
    assert first.tasks() == [1, 3]  # 1 has ended, and the agent does not know it yet
    second.ends(2)
    assert second.tasks() == [2]
    first.ends(1)
    assert second.tasks() == []
    first.ends(3)
    assert heard(agent, FrameKind.RESULT) == [2, 1, 3]


@pytest.mark.parametrize("kind", [FrameKind.RECALL, FrameKind.CANCEL])
def test_a_waiting_task_is_given_back(agent: Any, first: Worker, kind: FrameKind) -> None:
    send(agent, 1, 2, 3)
    order = agent.on_recall if kind == FrameKind.RECALL else agent.on_cancel
    order(Frame(kind, 0, 10, 2, b""))
    assert heard(agent, FrameKind.RECALLED) == [2]
    assert first.tasks() == [1]
    first.ends(1)
    assert first.tasks() == [3]


def test_a_task_that_has_begun_is_not_given_back(agent: Any, first: Worker) -> None:
    send(agent, 1, 2)
    assert first.tasks() == [1, 2]
    agent.on_recall(Frame(FrameKind.RECALL, 0, 0, 2, b""))
    assert heard(agent, FrameKind.RECALLED) == []
    assert sorted(first.slot.running) == [1, 2]
    first.ends(1)
    first.ends(2)
    assert not first.slot.running


def test_a_task_that_has_begun_is_cancelled_like_a_running_one(agent: Any, first: Worker) -> None:
    send(agent, 1, 2)
    assert first.tasks() == [1, 2]
    agent.on_cancel(Frame(FrameKind.CANCEL, 0, 10, 2, b""))
    assert first.slot.cancelled == {2}
    assert heard(agent, FrameKind.RECALLED) == []


@pytest.mark.parametrize(("mode", "inputs"), [(Mode.STREAM, 0), (Mode.CALL, 1)])
def test_a_stream_waits_for_a_free_slot_and_is_not_overtaken(
    agent: Any, first: Worker, mode: Mode, inputs: int
) -> None:
    send(agent, 1)
    send(agent, 2, mode=mode, inputs=inputs)
    send(agent, 3)
    assert first.tasks() == [1]
    first.ends(1)
    assert first.tasks() == [2, 3]


def test_a_task_that_waits_for_a_dying_slot_runs_in_the_next(agent: Any, first: Worker, second: Worker) -> None:
    send(agent, 1, 2, 3, 4)
    first.dies(in_task=1)
    (lost,) = (frame for frame in agent.client.heard if frame.kind == FrameKind.LOST)
    assert lost.ident == 1
    assert json.loads(lost.body)["started"] is True
    second.ends(2)
    assert second.tasks() == [2, 4, 3]


def test_a_task_that_had_begun_in_a_dying_slot_is_lost_and_runs_nowhere(
    agent: Any, first: Worker, second: Worker
) -> None:
    send(agent, 1, 2, 3)
    assert first.tasks() == [1, 3]
    first.dies(in_task=3)
    lost = {f.ident: json.loads(f.body)["started"] for f in agent.client.heard if f.kind == FrameKind.LOST}
    assert lost[3] is True
    assert second.tasks() == [2]
    second.ends(2)
    assert second.tasks() == []


def test_a_task_does_not_wait_indefinitely_behind_a_long_one(agent: Any, first: Worker, second: Worker) -> None:
    send(agent, *range(1, 10))
    assert second.tasks() == [2, 4]
    first.slot.shelved[0].shelved_at -= 60
    second.ends(2)
    assert second.tasks() == [3]
    assert first.tasks() == [1]


def test_both_tasks_that_had_not_begun_come_again(agent: Any, first: Worker, second: Worker) -> None:
    """The pipe holds two numbers: the task that runs next, as far as the agent knows, and the one behind it."""
    send(agent, 1, 2, 3, 4, 5)
    first.ends(1)  # the slot has not looked for 3 yet, and 5 is put behind it
    agent.on_recall(Frame(FrameKind.RECALL, 0, 0, 5, b""))
    assert heard(agent, FrameKind.RECALLED) == [5]
    assert first.tasks() == [1, 3]
    assert list(first.slot.running) == [3]


def test_nothing_waits_behind_a_task_of_the_direct_line(agent: Any, first: Worker) -> None:
    first.slot.line_number = 1
    agent.on_hold(Frame(FrameKind.HOLD, 0, 0, 1, (1).to_bytes(8, "little")))
    send(agent, 2)
    assert first.tasks() == []
    agent.on_unhold(Frame(FrameKind.UNHOLD, 0, 0, 1, b""))
    assert first.tasks() == [2]


def test_a_slot_is_left_one_void_frame_for_each_task(agent: Any, first: Worker, second: Worker) -> None:
    send(agent, 1, 2, 3)
    second.ends(2)
    assert second.tasks() == [2, 3]
    send(agent, 4, 5)
    assert second.tasks() == [4]
    assert not first.slot.shelved
    assert [pending.frame.ident for pending in agent.placing.queue] == [5]
    assert first.tasks() == [1]


@pytest.fixture
def tiny(agent: Any) -> None:
    """Let the agent learn that tasks are tiny."""
    for _ in range(40):
        agent.placing.took(1000)


@pytest.mark.usefixtures("tiny")
class TestTinyTasks:
    def test_many_wait_in_a_busy_slot(self, agent: Any, first: Worker) -> None:
        send(agent, *range(1, 40))
        assert first.tasks() == list(range(1, 1 + 1 + MOST))
        for task in range(1, 8):
            first.ends(task)
        assert first.tasks() == []  # the shelf is filled up again once it is half empty
        first.ends(8)
        assert first.tasks() == list(range(2 + MOST, 10 + MOST))
        assert heard(agent, FrameKind.RESULT) == list(range(1, 9))

    def test_waiting_tasks_go_to_a_slot_that_falls_idle(self, agent: Any, first: Worker, second: Worker) -> None:
        send(agent, *range(1, 20))
        begun: list[int] = []
        while tasks := second.tasks():
            begun += tasks
            for task in tasks:
                second.ends(task)
        assert sorted(begun) == list(range(2, 20))
        assert first.tasks() == [1]

    def test_all_are_settled_when_their_slot_dies(self, agent: Any, first: Worker, second: Worker) -> None:
        send(agent, *range(1, 20))
        first.ends(1)
        first.ends(3)
        began = first.tasks()[:4]
        first.dies(in_task=began[-1])
        lost = [frame.ident for frame in agent.client.heard if frame.kind == FrameKind.LOST]
        assert not first.slot.shelved
        assert set(lost) <= set(range(1, 20))
        left = {pending.frame.ident for pending in agent.placing.queue} | set(agent.placing.by_task)
        assert left | set(lost) | set(heard(agent, FrameKind.RESULT)) == set(range(1, 20))
        assert not left & set(lost)
        assert all(agent.placing.by_task[task] is second.slot for task in agent.placing.by_task)

    def test_one_that_waits_is_cancelled_and_the_others_run(self, agent: Any, first: Worker) -> None:
        send(agent, *range(1, 8))
        first.ends(1)
        agent.on_cancel(Frame(FrameKind.CANCEL, 0, 10, 5, b""))
        assert heard(agent, FrameKind.RECALLED) == [5]
        ran = []
        for _ in range(10):
            for task in first.tasks():
                ran.append(task)
                if task != 1:
                    first.ends(task)
        assert ran == [1, 2, 3, 4, 6, 7]
