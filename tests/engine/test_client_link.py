"""Frames that wait for a client that is away, as its head has told them."""

from __future__ import annotations

from skyward.engine.head.client_link import ClientLink
from skyward.engine.head.plain import load_plain
from skyward.engine.head.references import ClientReferences
from skyward.engine.ledger import Ledger
from skyward.events import Event, NodeReady, TaskEnded, TaskSent
from skyward.schedule.scheduler import Scheduler
from skyward.wire.frames import FrameKind
from skyward.wire.stream import StreamChannel


def _waiting(*blocks: list[Event]) -> list[list[int]]:
    """Tell a client the events of these blocks of the ledger. Return the tasks of the frames about tasks."""
    ledger = Ledger(Scheduler(frozenset()))
    link = ClientLink(ledger, StreamChannel(checks_blobs=True), ClientReferences(lambda: 1, was_killed=False))
    for events in blocks:
        with ledger:
            for event in events:
                link.tell_event(event)
    ledger.watcher.close()
    told = link.channel.take_unsent(FrameKind.TASK_EVENTS)
    return [[fields["task"] for _, fields in load_plain(body)] for _, _, body in told]


def _sent(task: int) -> TaskSent:
    return TaskSent(task=task, name="f", node=0)


def test_the_events_of_tasks_in_a_block_are_one_frame() -> None:
    ended = TaskEnded(task=1, name="f", node=0, ok=True, seconds=0.5)
    assert _waiting([_sent(1), ended, _sent(2)], [_sent(3)]) == [[1, 1, 2], [3]]


def test_events_stay_in_their_order() -> None:
    assert _waiting([_sent(1), NodeReady(node=0), _sent(2)]) == [[1], [2]]
