"""Slots that are started for calls with grants. No process runs: the slots are records, and the test ends them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from skyward.node.agent.devices import NodeDevices, NodePart
from skyward.node.agent.granted import GrantedSlots
from skyward.node.agent.slots import SlotProcess, make_slot
from skyward.node.slot.page import ENDED
from skyward.values.devices import NO_GRANT, Device, Grant

GPUS = tuple(Device(index=at, id=f"GPU-{at}", kind="nvidia", name="L4") for at in range(8))
NODE = NodeDevices(devices=GPUS, names=tuple("01234567"))
SLOTS = 4


class Node:
    """Slots of a node, and the ones that are to be renewed."""

    def __init__(self) -> None:
        self.granted = GrantedSlots(self.resolve, self.renew)
        self.renewed: list[SlotProcess] = []
        self.slots = [self.start(number) for number in range(SLOTS)]

    def resolve(self, grant: Grant, number: int) -> Grant:
        return NODE.of(grant, number, SLOTS)

    def renew(self, slot: SlotProcess) -> None:
        self.renewed.append(slot)

    def start(self, number: int, request: Grant = NO_GRANT) -> SlotProcess:
        slot = make_slot(number, part=NodePart(grant=self.resolve(request, number)))
        slot.request = request
        self.granted.started(slot)
        return slot

    def use(self, number: int, request: Grant = NO_GRANT) -> SlotProcess:
        """Replace a slot by one that has run a call for the request."""
        slot = self.start(number, request)
        slot.page[ENDED] = 1
        self.slots[number].close()
        self.slots[number] = slot
        return slot

    def end(self, slot: SlotProcess) -> None:
        """Let the process of a renewed slot end."""
        assert slot.renewed_as is not None
        self.renewed.remove(slot)
        self.granted.ended(slot)
        slot.close()
        self.slots[slot.number] = self.start(slot.number, slot.renewed_as)

    def give_out(self, *tasks: int) -> list[int]:
        """Look for slots for all waiting tasks in turn; return those that got one."""
        self.granted.begin(self.slots)
        placed = []
        for task in tasks:
            slot = self.granted.slot_for(task, self.slots)
            if slot is not None:
                slot.running[task] = None
                placed.append(task)
        return placed


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node()
    yield made
    for slot in made.slots:
        slot.close()


def test_calls_without_grants_take_their_slots_as_they_are(node: Node) -> None:
    assert not node.granted.is_used
    assert node.give_out(1, 2, 3, 4, 5) == [1, 2, 3, 4]
    assert not node.renewed


def test_each_waiting_call_gets_one_renewed_slot(node: Node) -> None:
    for task in (1, 2):
        node.granted.add(task, Grant(devices=(1, 2)))
    assert node.give_out(1, 2) == []
    assert node.give_out(1, 2) == [], "it counts on the slots that are about to come"
    assert len(node.renewed) == 2
    node.end(node.renewed[0])
    assert node.give_out(1, 2) == [1]
    assert len(node.renewed) == 1


def test_a_grant_of_a_slots_own_share_needs_no_other_process(node: Node) -> None:
    node.granted.add(1, Grant(devices=(4, 5)))
    assert node.give_out(1) == [1]
    assert node.slots[2].running
    assert not node.renewed


def test_the_slot_that_has_loaded_least_is_renewed(node: Node) -> None:
    for number in (0, 1, 3):
        node.use(number)
    node.granted.add(1, Grant(devices=()))
    node.give_out(1)
    assert node.renewed == [node.slots[2]]


def test_a_slot_stays_reserved_while_a_holder_of_its_devices_ends(node: Node) -> None:
    """Younger calls took the slot for themselves, and slots were renewed thousands of times a second."""
    holder = node.use(0, Grant(devices=(2,)))
    node.use(1, Grant(devices=(2, 3)))
    for number in (2, 3):
        node.slots[number].running[90 + number] = None
    node.granted.add(1, Grant(devices=(2, 3)))
    node.granted.add(2, Grant(devices=(6,)))
    for _ in range(5):
        assert node.give_out(1, 2, 3, 4) == []
        assert node.renewed == [holder]
    node.end(holder)
    assert node.give_out(1, 2, 3, 4) == [1]
    assert [slot.renewed_as for slot in node.renewed] == [Grant(devices=(6,))], "the next in turn"


def test_shares_of_one_gpu_do_not_end_one_another(node: Node) -> None:
    node.use(0, Grant(devices=(2,), gpu_share=0.5))
    node.use(1, Grant(devices=(2,), gpu_share=0.25))
    node.granted.add(1, Grant(devices=(2,), gpu_share=0.5))
    assert node.give_out(1) == [1]
    assert not node.renewed
