"""Nodes that are given back: only idle ones, and the calls that wait for them lose nothing."""

from __future__ import annotations

import pickle

import pytest

from skyward.errors import NodeLost
from skyward.events import NodeLost as NodeLostEvent
from skyward.wire.frames import FrameKind
from tests.engine.parts import Parts


def test_an_idle_node_is_told_to_end_and_calls_wait_for_another(parts: Parts) -> None:
    left: list[int] = []
    members = parts.members(left.append)
    agent, other = parts.add_node(0), parts.add_node(1)
    assert list(members.there) == [0, 1]
    assert members.give_back(0)
    assert agent.kinds() == [FrameKind.SHUTDOWN]
    assert left == [0]
    assert list(members.there) == [1]
    topology = pickle.loads(other.next(FrameKind.SLOT_CONFIG).body)
    assert [peer and peer.node for peer in topology.peers] == [None, 1]
    assert members.give_back(1)
    waiting = parts.submit()
    assert not members.there
    assert waiting.told == []
    assert members.demand().waiting == 1
    assert not [event for event in parts.events if isinstance(event, NodeLostEvent)]


def test_a_node_in_use_is_not_given_back(parts: Parts) -> None:
    members = parts.members()
    parts.add_node(0)
    running = parts.submit()
    assert not members.is_idle
    assert not members.give_back(0)
    with parts.ledger:
        parts.dispatcher.finish(running, 0, elapsed_ns=1)
    members.keeps = lambda node: True
    assert not members.is_idle
    assert not members.give_back(0)
    members.keeps = lambda node: False
    assert members.is_idle
    assert members.give_back(0)
    assert not members.give_back(0)


def test_a_node_that_a_waiting_call_names_stays(parts: Parts) -> None:
    members = parts.members()
    parts.add_node(0)
    with parts.ledger:
        parts.dispatcher.perform(parts.ledger.scheduler.node_leaving(0))
        parts.dispatcher.submit(parts.task(), (0,))
    assert not members.give_back(0)


def test_calls_that_only_an_absent_node_could_run_fail_when_it_cannot_come(parts: Parts) -> None:
    members = parts.members()
    parts.add_node(0)
    members.expect([1], 1)
    named = parts.task()
    with parts.ledger:
        parts.dispatcher.submit(named, (1,))
    assert members.demand().named == {1}
    members.refuse_resting(1)
    ((_, error),) = named.told
    assert isinstance(error, NodeLost)
    assert members.demand().known == {0, 1}


def test_a_value_that_stays_on_a_node_is_use_until_its_reference_is_gone(parts: Parts) -> None:
    members = parts.members()
    parts.add_node(0)
    digest = b"d" * 16
    parts.ledger.links[0].keep(digest, 8)
    assert not members.is_idle
    assert not members.give_back(0)
    parts.ledger.links[0].forget_blob(digest, is_held=True)
    assert members.is_idle
    assert members.give_back(0)


@pytest.mark.parametrize("numbers", [(0,), (0, 1)])
def test_the_end_of_a_link_that_was_given_back_is_no_loss(parts: Parts, numbers: tuple[int, ...]) -> None:
    members, repair = parts.members(), parts.link_repair()
    for number in numbers:
        parts.add_node(number)
    link = parts.ledger.links[0]
    assert members.give_back(0)
    repair.link_gone(link, "its link ended")
    assert not [event for event in parts.events if isinstance(event, NodeLostEvent)]
