"""Direct lines: what goes on them, and what the agent is told when one is gone."""

from __future__ import annotations

from skyward.wire.frames import Kind
from tests.engine.parts import Parts


def test_a_lone_call_goes_on_the_line_and_no_further_one_does(parts: Parts) -> None:
    agent = parts.add_node(slots=2)
    slot = parts.offer_line(agent)
    with parts.books:
        parts.sending.submit(parts.task(), None, is_alone=True)
    assert slot.kinds() == [Kind.FUNCTION, Kind.TASK]
    assert agent.kinds() == []
    with parts.books:
        parts.sending.submit(parts.task(), None)
    assert slot.kinds() == []
    assert agent.kinds() == [Kind.HOLD, Kind.FUNCTION, Kind.TASK]


def test_a_call_goes_to_the_agent_when_the_line_has_broken(parts: Parts) -> None:
    agent = parts.add_node()
    parts.offer_line(agent).channel.close()
    with parts.books:
        parts.sending.submit(parts.task(), None, is_alone=True)
    assert agent.kinds() == [Kind.FUNCTION, Kind.TASK]
    assert parts.books.links[0].line is None


def test_the_agent_is_told_of_the_call_on_a_line_that_is_gone(parts: Parts) -> None:
    agent = parts.add_node()
    parts.offer_line(agent)
    line = parts.books.links[0].line
    assert line is not None
    with parts.books:
        parts.sending.submit(parts.task(), None, is_alone=True)
    parts.lines.gone(line)
    assert agent.kinds() == [Kind.HOLD]
    assert line.channel.fileno() == -1


def test_another_line_takes_the_place_of_the_one_before(parts: Parts) -> None:
    agent = parts.add_node()
    parts.offer_line(agent)
    before = parts.books.links[0].line
    parts.offer_line(agent)
    assert before is not None
    assert before.channel.fileno() == -1
    assert parts.books.links[0].line not in (None, before)
