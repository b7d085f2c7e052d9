"""Calls beside a head begin there only once the client knows of them, unless it has permitted them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from skyward.calls.futures import Future
from skyward.engine.head.start_gate import GatedLink, StartGate
from skyward.engine.link import NodeLink
from skyward.wire.frames import FrameKind
from skyward.wire.payloads import Encoded
from tests.engine.parts import FarEnd, NotedTask, Parts


class Beside(Parts):
    """Parts with a node beside the head. The test answers for the client."""

    def __init__(self) -> None:
        super().__init__()
        self.agent: FarEnd = self.add_link()
        plain = self.ledger.links[0]
        link = self.ledger.links[0] = GatedLink(0, plain.channel, plain.facts)
        self.permitted: set[int] = set()
        self.asked: list[Future[Any]] = []
        self.delays: list[float] = []
        link.gate = StartGate(self.ledger, lambda task: task.id not in self.permitted, self._ask, self._measured)
        with self.ledger:
            self.ledger.watcher.add(link)
            self.dispatcher.perform(self.ledger.scheduler.node_up(0, 3))

    def _ask(self) -> Future[Any]:
        self.asked.append(Future())
        return self.asked[-1]

    def _measured(self, link: NodeLink, delay_s: float) -> None:
        self.delays.append(delay_s)

    def permit(self) -> NotedTask:
        task = self.task()
        self.permitted.add(task.id)
        with self.ledger:
            self.dispatcher.submit(task, None)
        return task

    def came(self) -> list[tuple[int, int]]:
        """Return kind and task of the frames that the agent has got."""
        own = FrameKind.TASK, FrameKind.CANCEL, FrameKind.IN_ITEM, FrameKind.IN_END
        return [(frame.kind, frame.ident) for frame in self.agent.received() if frame.kind in own]


@pytest.fixture
def parts() -> Iterator[Beside]:
    parts = Beside()
    yield parts
    parts.close()


def test_a_call_waits_until_the_client_knows_of_it_and_a_permitted_one_does_not(parts: Beside) -> None:
    first, second, permitted = parts.submit(), parts.submit(), parts.permit()
    assert parts.came() == [(FrameKind.TASK, permitted.id)]
    assert [task.attempt for task in (first, second)] == [1, 1], "both were announced"
    assert len(parts.asked) == 1
    parts.asked[0].settle(None)
    assert parts.came() == [(FrameKind.TASK, first.id)], "the question came before the other announcement"
    parts.asked[1].settle(None)
    assert parts.came() == [(FrameKind.TASK, second.id)]
    assert len(parts.asked) == len(parts.delays) == 2
    parts.submit()
    assert len(parts.asked) == 2, "no slot is left, so it was not sent"


def test_a_cancel_stays_behind_its_call(parts: Beside) -> None:
    task = parts.submit()
    with parts.ledger:
        parts.dispatcher.cancel(task.id)
    assert parts.came() == []
    parts.asked[0].settle(None)
    assert parts.came() == [(FrameKind.TASK, task.id), (FrameKind.CANCEL, task.id)]


def test_the_items_of_an_iterator_stay_behind_their_call(parts: Beside) -> None:
    task, link = parts.submit(), parts.ledger.links[0]
    with parts.ledger:
        link.send_stream_item(task.id, 0, Encoded(b"item"))
        link.end_stream(FrameKind.IN_END, task.id, 0)
    assert parts.came() == []
    parts.asked[0].settle(None)
    assert [kind for kind, _ in parts.came()] == [FrameKind.TASK, FrameKind.IN_ITEM, FrameKind.IN_END]


def test_the_delay_of_the_node_beside_the_head_is_the_least_that_was_measured(parts: Beside) -> None:
    scheduler, gate = parts.ledger.scheduler, parts.ledger.links[0].gate  # type: ignore[attr-defined]
    gate.measure(2)
    parts.asked[0].settle(None)
    parts.asked[1].settle(None)
    assert len(parts.asked) == 2
    assert not parts.delays, "nothing had to wait"
    parts.submit()
    assert parts.ledger.links[0].unsent == 1
    parts.asked[2].settle(None)
    assert parts.ledger.links[0].unsent == 0
    assert scheduler.home is None, "so nobody needs to know"
