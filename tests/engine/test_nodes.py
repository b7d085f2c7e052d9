"""Nodes: opening their links, introducing them, and the facts about them."""

from __future__ import annotations

import json
import os
import pickle
import socket
import threading
from dataclasses import asdict
from pathlib import Path

import pytest

from skyward.errors import Unreachable
from skyward.events import NodeReady
from skyward.values.devices import Device, NodeResources
from skyward.values.launch import ProcessLaunch
from skyward.wire.frames import PROTOCOL_VERSION, FrameKind, FrameParser, pack
from tests.engine.parts import Parts, machine

GPU = Device(index=0, id="GPU-1", kind="nvidia", name="NVIDIA L4", memory_gib=22.5)


def greet_once(path: Path) -> threading.Thread:
    """Play an agent that takes one connection and introduces itself."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def run() -> None:
        with listener:
            sock, _ = listener.accept()
        with sock:
            (hello,) = FrameParser().feed(sock.recv(4096))
            assert json.loads(hello.body)["pool"] == "job"
            facts = {"version": PROTOCOL_VERSION, "pid": 77, "devices": [asdict(GPU)], "cpus": 4, "memory_gib": 7.5}
            sock.sendall(pack(FrameKind.WELCOME, body=json.dumps(facts).encode()))
            sock.recv(1)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_an_open_link_knows_the_facts_of_its_agent(parts: Parts, tmp_path: Path) -> None:
    agent = greet_once(tmp_path / "agent.sock")
    parts.nodes.open([machine(socket_path=str(tmp_path / "agent.sock"))])
    assert parts.nodes.agent_pids() == {0: 77}
    assert parts.nodes.resources(0) == NodeResources(devices=(GPU,), cpus=4, memory_gib=7.5)
    assert parts.nodes.are_attached
    parts.nodes.close()
    agent.join()


def test_a_missing_agent_is_unreachable(parts: Parts, tmp_path: Path) -> None:
    with pytest.raises(Unreachable):
        parts.nodes.open([machine(socket_path=os.fspath(tmp_path / "nobody.sock"))])
    assert not parts.ledger.links


def test_a_node_that_is_up_learns_its_name_and_gets_waiting_tasks(parts: Parts) -> None:
    ends = [parts.add_link(node, devices=("a", "b")[: node + 1]) for node in (0, 1)]
    with parts.ledger:
        for node in (0, 1):
            parts.nodes.up(parts.ledger.machines[node])
    frame, *_ = ends[1].received()
    topology = pickle.loads(frame.body)
    assert frame.kind == FrameKind.SLOT_CONFIG
    assert (topology.node, len(topology.peers), topology.accelerators) == (1, 2, (1, 2))
    assert [type(event) for event in parts.events] == [NodeReady, NodeReady]
    parts.submit()
    assert FrameKind.TASK in ends[0].kinds()


def test_a_gang_has_one_rank_per_accelerator_of_the_smallest_node(parts: Parts) -> None:
    class Auto(ProcessLaunch):
        ranks_per_node = "auto"

    assert parts.nodes.ranks_per_node(ProcessLaunch()) == 1
    for node, devices in enumerate((("a", "b", "c"), ("d", "e"))):
        parts.add_link(node, devices)
    assert parts.nodes.ranks_per_node(Auto()) == 2


def test_nodes_report_their_load(parts: Parts) -> None:
    agent = parts.add_node()
    parts.nodes.ask_usage(1.5)
    (frame,) = agent.received()
    assert (frame.kind, frame.lane) == (FrameKind.USAGE, 15)
