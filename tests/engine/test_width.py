"""Effects of a link's measured round trip."""

from __future__ import annotations

import pytest

from skyward.engine.width import MOST_CHANNELS, Width, channels_for
from skyward.wire.frames import FrameKind
from tests.engine.parts import Parts


@pytest.mark.parametrize(("round_trip_s", "ahead"), [(0.0, 3), (0.1, 10)])
def test_a_distant_node_gets_more_short_tasks_ahead(
    parts: Parts, monkeypatch: pytest.MonkeyPatch, round_trip_s: float, ahead: int
) -> None:
    agent = parts.add_node()
    link = parts.ledger.links[0]
    monkeypatch.setattr(link.channel, "round_trip_s", round_trip_s)
    monkeypatch.setattr(link.channel, "pongs", 1)
    with parts.ledger:
        Width(parts.ledger, parts.dispatcher).measured(link)
        for _ in range(10):
            task = parts.task()
            task.expected_ns = 1e6
            parts.dispatcher.submit(task, None)
    assert agent.kinds().count(FrameKind.TASK) == ahead
    assert link.pongs == 1


def test_a_link_within_this_machine_keeps_one_channel(parts: Parts) -> None:
    parts.add_node()
    link = parts.ledger.links[0]
    with parts.ledger:
        Width(parts.ledger, parts.dispatcher).measured(link)
    assert not link.is_narrow
    assert (channels_for(0.0), channels_for(10.0)) == (1, MOST_CHANNELS)
