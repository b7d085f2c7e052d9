"""Nodes that are given back: only idle ones, and the calls that wait for them lose nothing."""

from __future__ import annotations

import contextlib
import pickle

import pytest

from skyward.engine.kept_received import KeptReceived
from skyward.errors import NodeLost, PoolClosed, UsageError
from skyward.events import NodeLost as NodeLostEvent
from skyward.node.slot.link import blob_body
from skyward.wire.blobs import Blob
from skyward.wire.frames import Frame, FrameKind
from skyward.wire.payloads import Encoded, encode
from tests.engine.parts import FarEnd, Parts

VALUE = b"v" * 300_000


def kept_on(parts: Parts, node: int) -> KeptReceived:
    """Let a value stay on a node."""
    with parts.ledger:
        return parts.values.kept_on(parts.ledger.links[node], encode(VALUE, Blob.kept).body)


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


@pytest.mark.parametrize("fails", [False, True])
def test_the_agent_ends_only_when_that_is_confirmed_and_the_node_is_in_no_book_before(
    parts: Parts, fails: bool
) -> None:
    members, told = parts.members(), list[tuple[list[int], bool]]()
    agent, _ = parts.add_node(0), parts.add_node(1)

    def confirm() -> None:
        told.append((agent.kinds(), 0 in parts.ledger.machines or 0 in members.there))
        if fails:
            raise PoolClosed("pool: closed")

    with pytest.raises(PoolClosed) if fails else contextlib.nullcontext():
        members.give_back(0, confirm)
    assert told == [([], False)]
    assert agent.kinds() == ([] if fails else [FrameKind.SHUTDOWN])


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


def test_a_node_that_is_leaving_takes_calls_again_when_it_is_wanted(parts: Parts) -> None:
    members = parts.members()
    for node in range(4):
        parts.add_node(node)
    running = [parts.submit() for _ in range(4)]
    for node in (1, 2, 3):
        members.leave(node)
    assert list(members.there) == [0]
    waiting = parts.task()
    with parts.ledger:
        parts.dispatcher.submit(waiting, (3,))
    assert members.stay(-1) == 1, "a call waits for node 3"
    assert members.stay(0) == 0
    assert members.stay(1) == 1
    assert list(members.there) == [0, 1, 3]
    assert members.leaving == {2}
    with parts.ledger:
        for task in running:
            place = parts.ledger.scheduler.node_of(task.id)
            assert place is not None
            parts.dispatcher.finish(task, place, elapsed_ns=1)
    more = [parts.submit() for _ in range(3)]
    assert {parts.ledger.scheduler.node_of(task.id) for task in (waiting, *more)} == {0, 1, 3}
    assert members.give_back(2)
    assert not members.leaving


def test_a_node_whose_machine_will_be_taken_back_takes_no_calls_again(parts: Parts) -> None:
    members = parts.members()
    relief = parts.relief(members, parts.link_repair())
    parts.add_node(0)
    parts.add_node(1)
    members.leave(1)
    with parts.ledger:
        relief.on_notice(1, b"")
    assert members.stay(1) == 1
    assert [parts.ledger.scheduler.node_of(parts.submit().id) for _ in range(2)] == [0, None]


def test_the_replacement_of_a_node_that_was_leaving_is_there(parts: Parts) -> None:
    members = parts.members()
    repair = parts.link_repair(members.node_lost)
    parts.add_node(0)
    parts.add_node(1)
    members.leave(1)
    members.leave(2)  # it is not there
    assert members.leaving == {1}
    repair.link_gone(parts.ledger.links[1], "killed")
    parts.add_node(1)
    assert not members.leaving
    assert list(members.there) == [0, 1]


def test_only_nodes_that_nobody_knows_are_expected(parts: Parts) -> None:
    members, changes = parts.members(), list[tuple[int, ...]]()
    parts.add_node(0)
    with parts.ledger:
        parts.ledger.scheduler.node_absent(1, 1)  # it is being replaced
    members.expect([0, 1, 2], 1, then=lambda: changes.append(members.there))
    assert changes == [(0, 1)]
    assert parts.ledger.resting == {2}
    parts.submit()
    assert members.demand().loads == {0: 1, 1: 0}


def test_a_node_joins_once_however_often_that_is_asked(parts: Parts) -> None:
    members, changes = parts.members(), list[tuple[int, ...]]()
    parts.add_node(0)
    link = parts.ledger.links[0]
    members.join([parts.ledger.machines[0]], then=lambda: changes.append(members.there))
    assert changes == [(0,)]
    assert parts.ledger.links[0] is link


def test_a_node_that_cannot_be_noted_does_not_join(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    members = parts.members()
    parts.add_node(1)
    link, machine = parts.ledger.links[1], parts.ledger.machines[1]
    members.give_back(1)
    waiting = parts.submit()
    monkeypatch.setattr(parts.nodes.opener, "open", lambda machine: link)

    def refuse() -> None:
        raise UsageError("journal: there is no room; free some")

    with pytest.raises(UsageError, match="no room"):
        members.join([machine], then=refuse)
    assert (members.there, parts.ledger.resting, dict(parts.ledger.links)) == ((), {1}, {})
    assert waiting.told == []
    assert members.demand().waiting == 1


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
    kept = [kept_on(parts, 0)]
    assert not members.is_idle
    assert not members.give_back(0)
    kept.clear()
    assert members.is_idle
    assert members.give_back(0)


def arrive(parts: Parts, end: FarEnd, frame: Frame, *, has_blob: bool = True, is_missing: bool = False) -> None:
    """Let the agent of a node answer a FETCH."""
    if has_blob:
        blob = Blob.kept(memoryview(VALUE))
        end.send(FrameKind.BLOB, frame.ident, blob_body(blob.digest, blob.size), fd=blob.fd)
    end.send(FrameKind.FETCHED, frame.ident, frame.body, lane=int(is_missing))
    link = next(link for link in parts.ledger.links.values() if link.node == parts.ends.index(end))
    received: list[Frame] = []
    while not received:  # the blob is read alone
        received = list(link.receive())
    with parts.ledger:
        parts.values.on_fetched(link, received[0])


def test_a_value_moves_to_a_node_that_stays_before_its_own_is_given_back(parts: Parts) -> None:
    members = parts.members()
    there, agent = parts.add_node(0), parts.add_node(1)
    kept = kept_on(parts, 1)
    assert not members.give_back(1)
    members.move_values(0)  # there is no node with a lower number
    members.move_values(1)
    arrive(parts, agent, agent.next(FrameKind.FETCH))
    there.next(FrameKind.BLOB)
    assert not members.give_back(1), "nobody has said that the bytes arrived"
    members.move_values(1)
    members.move_values(1)
    (question,) = [frame for frame in there.received() if frame.kind == FrameKind.FETCH]
    assert question.lane == 1
    arrive(parts, there, question, has_blob=False)
    assert agent.next(FrameKind.DROP_BLOB).body == kept.blobs[0].digest
    assert members.give_back(1)
    assert not members.give_back(0)
    assert parts.values.nodes_of(kept.blobs) == (0,)


def test_a_node_stays_if_its_value_did_not_arrive_and_the_move_is_tried_again(parts: Parts) -> None:
    members = parts.members()
    there, agent = parts.add_node(0), parts.add_node(1)
    kept = kept_on(parts, 1)
    for is_missing in (True, False):  # the other node has no room for it, at first
        members.move_values(1)
        arrive(parts, agent, agent.next(FrameKind.FETCH))
        members.move_values(1)
        arrive(parts, there, there.next(FrameKind.FETCH), has_blob=False, is_missing=is_missing)
        assert members.give_back(1) is not is_missing
    assert parts.values.nodes_of(kept.blobs) == (0,)


@pytest.mark.parametrize("step", ["the bytes are fetched", "the node is asked"])
def test_a_value_moves_elsewhere_if_the_node_dies_that_was_to_get_it(parts: Parts, step: str) -> None:
    members = parts.members()
    _, there, agent = (parts.add_node(number) for number in range(3))
    kept = kept_on(parts, 2)
    with parts.ledger:
        parts.values.hold(kept.blobs, (1,))
    if step == "the node is asked":
        arrive(parts, agent, agent.next(FrameKind.FETCH))
        members.move_values(2)
        there.next(FrameKind.FETCH)
    with parts.ledger:
        parts.ledger.links.pop(1).close()
        parts.values.node_lost(1)
    assert not members.give_back(2)
    members.move_values(2)
    arrive(parts, agent, agent.next(FrameKind.FETCH))
    members.move_values(2)
    arrive(parts, parts.ends[0], parts.ends[0].next(FrameKind.FETCH), has_blob=False)
    assert members.give_back(2)


def test_a_value_that_the_program_has_is_no_reason_to_keep_a_node(parts: Parts) -> None:
    members = parts.members()
    parts.add_node(0)
    blob = Blob.kept(memoryview(VALUE))
    ref = parts.values.put(Encoded(encode(0, Blob.kept).body, (blob,)), (0,))
    assert not members.give_back(0)
    members.move_values(0)
    assert members.give_back(0)
    assert ref.nodes == ()


@pytest.mark.parametrize("numbers", [(0,), (0, 1)])
def test_the_end_of_a_link_that_was_given_back_is_no_loss(parts: Parts, numbers: tuple[int, ...]) -> None:
    members, repair = parts.members(), parts.link_repair()
    for number in numbers:
        parts.add_node(number)
    link = parts.ledger.links[0]
    assert members.give_back(0)
    repair.link_gone(link, "its link ended")
    assert not [event for event in parts.events if isinstance(event, NodeLostEvent)]
