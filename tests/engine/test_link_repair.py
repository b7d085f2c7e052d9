"""Lost nodes: the errors of their calls, the reports to other parts, and the replacement machine."""

from __future__ import annotations

import threading

from skyward import events
from skyward.errors import NodeLost
from skyward.values.machine import Gone, Machine
from skyward.wire.frames import FrameKind
from tests.engine.parts import Parts
from tests.waiting import until


class Source:
    """Machines that are never replaced once `go` is set. It notes every request."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.asked: list[tuple[str, int]] = []

    def replace(self, node: int) -> Machine | None:
        self.asked.append(("replace", node))
        assert self.go.wait(60)
        return None

    def prepare_replacement(self, node: int) -> bool:
        self.asked.append(("prepare", node))
        return True

    def give_up(self, node: int) -> None:
        self.asked.append(("give up", node))

    def why_gone(self, node: int) -> Gone | None:
        return None


def test_a_lost_node_fails_its_sent_calls_and_is_reported(parts: Parts) -> None:
    lost: list[int] = []
    link_repair = parts.link_repair(lost.append)
    parts.add_node(0)
    other = parts.add_node(1)
    sent = [parts.submit(timeout_s=60.0) for _ in range(2)]
    gone = next(task for task in sent if parts.ledger.scheduler.node_of(task.id) == 0)
    link_repair.link_gone(parts.ledger.links[0], "its link ended")
    ((_, error),) = gone.told
    assert isinstance(error, NodeLost)
    assert error.node == 0
    assert lost == [0]
    assert list(parts.ledger.tasks) == [task.id for task in sent if task is not gone]
    assert FrameKind.TASK in other.kinds()
    assert [event.reason for event in parts.events if isinstance(event, events.NodeLost)] == ["its link ended"]


def test_a_call_with_retries_goes_to_another_node(parts: Parts) -> None:
    link_repair = parts.link_repair()
    parts.add_node(0)
    task = parts.submit(retries=1)
    other = parts.add_node(1)
    link_repair.link_gone(parts.ledger.links[0], "its link ended")
    assert task.told == []
    assert other.kinds() == [FrameKind.FUNCTION, FrameKind.TASK]


def test_waiting_calls_fail_when_no_replacement_comes(parts: Parts) -> None:
    link_repair, source = parts.link_repair(), Source()
    link_repair.source = source
    parts.add_node()
    _, waiting = parts.submit(timeout_s=60.0), parts.submit(timeout_s=60.0)
    link_repair.link_gone(parts.ledger.links[0], "its link ended")
    assert waiting.told == []
    source.go.set()
    until(lambda: waiting.told)
    assert [type(error) for _, error in waiting.told] == [NodeLost]
    assert source.asked == [("replace", 0)]


def test_calls_fail_at_once_while_nobody_is_there_who_could_replace_the_node(parts: Parts) -> None:
    link_repair, source = parts.link_repair(), Source()
    link_repair.source, link_repair.may_ask = source, lambda node: False
    parts.add_node()
    task = parts.submit(timeout_s=60.0)
    link_repair.link_gone(parts.ledger.links[0], "its link ended")
    assert [type(error) for _, error in task.told] == [NodeLost]
    assert [event.will_be_replaced for event in parts.events if isinstance(event, events.NodeLost)] == [False]
    assert source.asked == []
