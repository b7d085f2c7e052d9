"""Nodes whose machines will be taken back: they go when nothing is left there, and other machines take their places."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from skyward import events
from skyward.engine.relief import Relief
from skyward.errors import InternalError, PoolClosed, Preempted
from skyward.wire.frames import FrameKind
from tests.engine.parts import FarEnd, NotedTask, Parts
from tests.engine.test_link_repair import Source
from tests.engine.test_members import arrive, kept_on
from tests.waiting import until


class Relieving:
    """Two nodes and the parts that relieve one of them. Its far ends are `agents`."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.source = Source()
        self.members = parts.members()
        self.repair = parts.link_repair(self.members.node_lost)
        self.repair.source = self.source
        self.relief: Relief = parts.relief(self.members, self.repair)
        self.agents: list[FarEnd] = [parts.add_node(0), parts.add_node(1)]

    def notify(self, node: int) -> None:
        with self.parts.ledger:
            self.relief.on_notice(node, b"spot")

    def running_on(self, node: int) -> NotedTask:
        task = self.parts.task()
        with self.parts.ledger:
            self.parts.dispatcher.submit(task, (node,))
        return task

    def finish(self, task: NotedTask, node: int) -> None:
        with self.parts.ledger:
            self.parts.dispatcher.finish(task, node, elapsed_ns=1)

    def until_replaced(self, node: int) -> None:
        until(lambda: ("replace", node) in self.source.asked)

    @staticmethod
    def until_over() -> None:
        """Wait until no thread relieves a node."""
        until(lambda: not [thread for thread in threading.enumerate() if thread.name == "skyward-relieve"])


@pytest.fixture
def relieving(parts: Parts) -> Iterator[Relieving]:
    relieving = Relieving(parts)
    yield relieving
    parts.ledger.is_open = False
    relieving.source.go.set()
    relieving.until_over()


def test_a_node_with_a_notice_gets_no_new_calls_and_goes_when_it_is_idle(relieving: Relieving) -> None:
    parts = relieving.parts
    agent = parts.add_node(2, slots=2)
    running = relieving.running_on(2)
    agent.received()
    relieving.notify(2)
    for _ in range(4):
        parts.submit()
    assert FrameKind.TASK not in agent.kinds()
    relieving.finish(running, 2)
    relieving.until_replaced(2)
    assert relieving.source.asked == [("prepare", 2), ("replace", 2)]
    (lost,) = [event for event in parts.events if isinstance(event, events.NodeLost)]
    assert lost.will_be_replaced


def test_its_machine_is_replaced_once_its_outcomes_are_elsewhere_and_it_is_in_no_book_before(
    relieving: Relieving,
) -> None:
    told: list[tuple[list[tuple[str, int]], bool]] = []

    def confirm(node: int) -> None:
        told.append(([*relieving.source.asked], node in relieving.parts.ledger.links))

    relieving.relief.confirm = confirm
    relieving.notify(1)
    relieving.until_replaced(1)
    assert told == [([("prepare", 1)], False)]
    assert FrameKind.SHUTDOWN not in relieving.agents[1].kinds(), "it ends with its machine"


def test_calls_of_a_node_fail_if_its_relief_breaks_off_and_nobody_waits(relieving: Relieving) -> None:
    def confirm(node: int) -> None:
        raise InternalError("broken")

    relieving.relief.confirm = confirm
    running = relieving.running_on(1)
    relieving.notify(1)
    waiting = relieving.running_on(1)
    relieving.finish(running, 1)
    until(lambda: waiting.told)
    assert [type(error) for _, error in waiting.told] == [Preempted]
    assert relieving.source.asked == [("prepare", 1), ("give up", 1)]


def test_nothing_is_replaced_by_a_process_that_ends(relieving: Relieving) -> None:
    def confirm(node: int) -> None:
        raise PoolClosed("pool: closed")

    relieving.relief.confirm = confirm
    relieving.notify(1)
    relieving.until_over()
    assert relieving.source.asked == [("prepare", 1)]


def test_a_value_moves_to_another_node_before_its_own_goes(relieving: Relieving) -> None:
    parts, (agent, there) = relieving.parts, relieving.agents
    kept = kept_on(parts, 0)
    relieving.notify(0)
    arrive(parts, agent, agent.next(FrameKind.FETCH))
    there.next(FrameKind.BLOB)
    question = there.next(FrameKind.FETCH)
    assert 0 in parts.ledger.links, "nobody has said that the bytes arrived"
    arrive(parts, there, question, has_blob=False)
    relieving.until_replaced(0)
    assert parts.values.nodes_of(kept.blobs) == (1,)


@pytest.mark.parametrize("is_other_noticed", [False, True])
def test_a_node_goes_with_a_value_that_no_other_node_can_take(relieving: Relieving, is_other_noticed: bool) -> None:
    parts = relieving.parts
    if is_other_noticed:
        relieving.repair.may_ask = lambda node: node == 0
        relieving.notify(1)
    else:
        assert relieving.members.give_back(1)
    kept = kept_on(parts, 0)
    relieving.notify(0)
    relieving.until_replaced(0)
    assert parts.values.nodes_of(kept.blobs) == ()


def test_a_detached_pool_keeps_a_node_with_a_notice_while_no_client_is_there(relieving: Relieving) -> None:
    running = relieving.running_on(1)
    relieving.notify(1)
    until(lambda: relieving.source.asked)
    relieving.repair.may_ask = lambda node: False  # the client has left
    relieving.until_over()
    relieving.finish(running, 1)
    assert 1 in relieving.parts.ledger.links
    relieving.notify(0)
    assert relieving.source.asked == [("prepare", 1)]
    assert not [event for event in relieving.parts.events if isinstance(event, events.NodeLost)]


def test_a_node_that_is_given_back_meanwhile_is_not_replaced(relieving: Relieving) -> None:
    ready = threading.Event()
    relieving.source.prepare_replacement = lambda node: ready.wait(60)  # type: ignore[method-assign]
    relieving.notify(1)
    assert relieving.members.give_back(1)
    ready.set()
    relieving.until_over()
    assert relieving.source.asked == []
