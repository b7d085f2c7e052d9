"""Direct lines: the calls that use them, and the agent's view of a line that is gone."""

from __future__ import annotations

from skyward.wire.frames import FrameKind
from tests.engine.parts import Parts


def test_a_lone_call_uses_the_line_and_further_calls_do_not(parts: Parts) -> None:
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


def test_a_call_goes_to_the_agent_after_the_line_broke(parts: Parts) -> None:
    agent = parts.add_node()
    parts.offer_line(agent).channel.close()
    with parts.ledger:
        parts.dispatcher.submit(parts.task(), None, is_alone=True)
    assert agent.kinds() == [FrameKind.FUNCTION, FrameKind.TASK]
    assert parts.ledger.links[0].line is None


def test_the_agent_learns_of_the_call_on_a_line_that_is_gone(parts: Parts) -> None:
    agent = parts.add_node()
    parts.offer_line(agent)
    line = parts.ledger.links[0].line
    assert line is not None
    with parts.ledger:
        parts.dispatcher.submit(parts.task(), None, is_alone=True)
    parts.lines.gone(line)
    assert agent.kinds() == [FrameKind.HOLD]
    assert line.channel.fileno() == -1


def test_a_new_line_replaces_the_old_one(parts: Parts) -> None:
    agent = parts.add_node()
    parts.offer_line(agent)
    before = parts.ledger.links[0].line
    parts.offer_line(agent)
    assert before is not None
    assert before.channel.fileno() == -1
    assert parts.ledger.links[0].line not in (None, before)
