"""`sky.once`, `sky.is_head` and the view of code outside a pool."""

from __future__ import annotations

import pickle
import socket
import threading
import time
from dataclasses import replace

import pytest

import skyward as sky
from skyward.node.slot.link import Link
from skyward.node.slot.runtime import RunningCall, current_call, current_rank, enter_call, once
from skyward.node.slot.slot import Slot, SlotConfig
from skyward.values.topology import InstanceInfo, Peer
from skyward.wire.frames import Frame, FrameKind
from skyward.wire.tasks import CallKind, Mode, TaskHead, Topology

INFO = InstanceInfo(
    node=1,
    worker=0,
    total_nodes=2,
    workers_per_node=1,
    accelerators=0,
    total_accelerators=0,
    head_addr="127.0.0.1",
    head_port=0,
    job_id="test",
)


def test_threads_that_call_at_once_wait_for_one_value() -> None:
    made: list[int] = []

    def factory() -> object:
        made.append(1)
        time.sleep(0.05)
        return object()

    got: list[object] = []
    threads = [threading.Thread(target=lambda: got.append(once("threads", factory))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [1]
    assert len({id(value) for value in got}) == 1
    assert len(got) == 16


def test_keys_do_not_wait_for_each_other() -> None:
    entered, may_end = threading.Event(), threading.Event()

    def slow() -> int:
        entered.set()
        assert may_end.wait(60)
        return 1

    thread = threading.Thread(target=once, args=("slow", slow))
    thread.start()
    assert entered.wait(60)
    assert once("quick", lambda: 2) == 2
    may_end.set()
    thread.join()


def test_a_factory_may_use_another_key() -> None:
    assert once("outer", lambda: once("inner", lambda: 1) + 1) == 2


def test_a_factory_that_raises_is_tried_again() -> None:
    def fail() -> int:
        raise LookupError("not yet")

    with pytest.raises(LookupError):
        once("fails", fail)
    assert once("fails", lambda: 3) == 3


def test_none_is_a_value() -> None:
    made: list[int] = []
    for _ in range(2):
        assert once("none", lambda: made.append(1)) is None
    assert made == [1]


def test_outside_a_pool_there_is_no_call_and_this_process_is_the_head() -> None:
    assert sky.instance_info() is None
    assert current_rank() is None
    assert sky.is_head
    assert sky.is_head()
    assert repr(sky.is_head) == "True"


def test_threads_that_a_call_starts_see_it_if_the_process_runs_one_at_a_time() -> None:
    enter_call(RunningCall(task=1, info=replace(INFO, part=1, parts=2)), whole_process=True)
    try:
        seen: list[bool] = []
        thread = threading.Thread(target=lambda: seen.append(current_call() is not None and not sky.is_head))
        thread.start()
        thread.join()
        assert seen == [True]
    finally:
        enter_call(None, whole_process=True)
    assert current_call() is None


def test_the_head_is_the_first_part_of_a_broadcast_and_every_plain_call() -> None:
    assert INFO.is_head
    assert replace(INFO, part=0, parts=2).is_head
    assert not replace(INFO, part=1, parts=2).is_head


def test_the_address_of_the_head_is_that_of_the_first_node_of_a_broadcast() -> None:
    peers = tuple(Peer(node=node, private_ip=f"10.0.0.{node}") for node in range(4))
    topology = Topology(job_id="test", node=1, peers=peers, accelerators=(0,) * 4)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        slot = Slot(Link(ours), SlotConfig(number=0, token=b""), None)
        slot.keep(Frame(FrameKind.SLOT_CONFIG, 0, 0, 0, pickle.dumps(topology)))
        heads = {}
        for kind, place in ((CallKind.PLAIN, (0, 1, 0)), (CallKind.BROADCAST, (1, 2, 3))):
            head = TaskHead(bytes(16), Mode.CALL, kind, 0, 0, *place)
            heads[kind] = slot.call(1, head, 0).info
    assert (heads[CallKind.PLAIN].head_addr, heads[CallKind.PLAIN].is_head) == ("10.0.0.0", True)
    assert (heads[CallKind.BROADCAST].head_addr, heads[CallKind.BROADCAST].is_head) == ("10.0.0.3", False)
