"""Direct lines: what goes on them, and what the agent is told when one is gone."""

from __future__ import annotations

from skyward.wire.frames import FrameKind
from tests.engine.parts import Parts


def test_a_lone_call_goes_on_the_line_and_no_further_one_does(parts: Parts) -> None:
    agent = parts.add_node(slots=2)
    slot = parts.offer_line(agent)
    with parts.ledger:
        parts.dispatcher.submit(parts.task(), None, is_alone=True)
    assert slot.kinds() == [FrameKind.FUNCTION, FrameKind.TASK]
    assert agent.kinds() == []
    with parts.ledger:
        parts.dispatcher.submit(parts.task(), None)
    assert slot.kinds() == []
    assert agent.kinds() == [FrameKind.HOLD, FrameKind.FUNCTION, FrameKind.TASK]


def test_a_call_goes_to_the_agent_when_the_line_has_broken(parts: Parts) -> None:
    agent = parts.add_node()
    parts.offer_line(agent).channel.close()
    with parts.ledger:
        parts.dispatcher.submit(parts.task(), None, is_alone=True)
    assert agent.kinds() == [FrameKind.FUNCTION, FrameKind.TASK]
    assert parts.ledger.links[0].line is None


def test_the_agent_is_told_of_the_call_on_a_line_that_is_gone(parts: Parts) -> None:
    agent = parts.add_node()
    parts.offer_line(agent)
    line = parts.ledger.links[0].line
    assert line is not None
    with parts.ledger:
        parts.dispatcher.submit(parts.task(), None, is_alone=True)
    parts.lines.gone(line)
    assert agent.kinds() == [FrameKind.HOLD]
    assert line.channel.fileno() == -1


def test_another_line_takes_the_place_of_the_one_before(parts: Parts) -> None:
    agent = parts.add_node()
    parts.offer_line(agent)
    before = parts.ledger.links[0].line
    parts.offer_line(agent)
    assert before is not None
    assert before.channel.fileno() == -1
    assert parts.ledger.links[0].line not in (None, before)
