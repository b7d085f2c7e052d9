"""Items of an iterator that reach a call once, however many heads are lost on their way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from skyward.engine.sent_inputs import InputPosition, SentInputs
from skyward.wire.frames import FrameKind
from skyward.wire.payloads import Encoded

CALL, LANE = 2, 0
WINDOW = 4
COUNT = 20


@dataclass
class Way:
    """Way through one head to the node, and back. Everything on it is lost with the head."""

    items: deque[bytes | None] = field(default_factory=deque)
    credits: int = 0

    def send_stream_item(self, ident: int, lane: int, item: Encoded) -> None:
        self.items.append(bytes(item.body))

    def end_stream(self, kind: int, ident: int, lane: int) -> None:
        self.items.append(None)


class Call:
    """Call that reads an iterator of `COUNT` items, with the thread that feeds it."""

    def __init__(self) -> None:
        self.sent = SentInputs()
        self.way = Way()
        self.is_lost = False
        self.made = 0
        self.room = WINDOW
        self.came: list[bytes | None] = []
        """Items that have arrived on the node; None for the end."""
        self.taken = 0

    def send(self) -> None:
        if self.made == COUNT:
            if self.sent.end(CALL, LANE, FrameKind.IN_END):
                self.way.end_stream(FrameKind.IN_END, CALL, LANE)
        elif self.made < COUNT and self.room:
            self.room -= 1
            item = Encoded(bytes([self.made]))
            if self.sent.add(CALL, LANE, item):
                self.way.send_stream_item(CALL, LANE, item)
        else:
            return
        self.made += 1

    def arrive(self) -> None:
        if self.way.items:
            self.came.append(self.way.items.popleft())

    def take(self) -> None:
        if self.taken < len(self.came) and self.came[self.taken] is not None:
            self.taken += 1
            self.way.credits += not self.is_lost

    def credit(self) -> None:
        if self.way.credits:
            self.way.credits -= 1
            self.room += 1
            self.sent.taken(CALL, LANE)

    def lose(self) -> None:
        self.way, self.is_lost = Way(), True
        self.sent.wait(CALL)

    def resume(self) -> None:
        if self.is_lost:
            self.is_lost, has_ended = False, None in self.came
            position = InputPosition(len(self.came) - has_ended, self.taken, has_ended)
            self.room += self.sent.resume(self.way, CALL, {LANE: position}).get(LANE, 0)


STEPS = Call.send, Call.arrive, Call.take, Call.credit, Call.lose, Call.resume


@given(steps=st.lists(st.sampled_from(STEPS), max_size=80))
def test_each_item_arrives_once_and_in_order(steps: list[Callable[[Call], None]]) -> None:
    call = Call()
    for step in [*steps, Call.resume, *[Call.arrive, Call.take, Call.credit, Call.send] * 2 * COUNT]:
        step(call)
    assert call.came == [*(bytes([number]) for number in range(COUNT)), None]
    assert call.taken == COUNT


def test_a_call_that_ends_while_it_waits_is_forgotten() -> None:
    sent, way = SentInputs(), Way()
    sent.add(CALL, LANE, Encoded(b"x"))
    sent.wait(CALL)
    assert sent.waits(CALL)
    sent.forget(CALL)
    assert not sent.waits(CALL)
    assert sent.resume(way, CALL, {}) == {}
    assert not way.items
