"""Reach of nodes before Ray starts: which of them can connect to which, and to Ray on the first one."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import json
import random
import socket
import sys
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from skyward.engine.ray.companion import why_unreachable
from skyward.engine.ray.reach import Place, broken_paths, probe, reasons_of
from skyward.node.slot.ports import PORTS
from skyward.ssh.command import SSHResult
from tests.engine.parts import machine

HERE = "127.0.0.1"


def test_a_node_that_cannot_connect_to_the_first_one_names_both_addresses_and_the_port() -> None:
    with socket.create_server((HERE, 0)) as server:
        address = f"{HERE}:{server.getsockname()[1]}"
        assert why_unreachable(address, "127.0.0.2") == ""
    why = why_unreachable(address, "127.0.0.2")
    assert f"no connection from 127.0.0.2 to {address}, which is Ray on the first node (connection refused)" in why


def free_places(count: int) -> list[Place]:
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("", 0))) for _ in range(count)]
        return [(HERE, server.getsockname()[1]) for server in servers]


async def all_reasons(known: Sequence[Sequence[Place]], limit_s: float) -> list[dict[int, str]]:
    """Let nodes connect to each other. Each knows places of its own."""
    tries = (reasons_of(node, dict(enumerate(places)), limit_s) for node, places in enumerate(known))
    reasons = list(await asyncio.gather(*tries))
    await connections_are_read()
    return reasons


async def connections_are_read() -> None:
    """Wait until no connection is open: its other end is closed, and Python complains of those that a loop leaves."""
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others)


def test_nodes_that_reach_each_other_are_done_at_once() -> None:
    places = free_places(4)
    assert asyncio.run(all_reasons([places] * 4, 60.0)) == [{}] * 4


def test_a_direction_that_is_closed_is_found_from_its_own_side() -> None:
    first, other, closed = free_places(3)
    assert asyncio.run(all_reasons([[first, closed], [first, other]], 0.5)) == [{1: "connection refused"}, {}]


# A server of asyncio loses a connection that arrives while it closes, and Python 3.11 complains of it (gh-109564).
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_strangers_line_is_not_taken_for_a_nodes() -> None:
    async def disturbed() -> dict[int, str]:
        places = free_places(2)
        node = asyncio.create_task(reasons_of(0, dict(enumerate(places)), 1.0))
        while not node.done():
            with contextlib.suppress(OSError):  # does not listen yet, or has ended
                _, writer = await asyncio.open_connection(*places[0])
                writer.write(b"x" * 200_000 + b"\n")
                writer.close()
                await writer.wait_closed()
            await asyncio.sleep(0.05)
        await connections_are_read()
        return await node

    assert asyncio.run(disturbed()) == {1: "connection refused"}
    gc.collect()  # so that the complaint does not meet another test


def test_a_probe_whose_port_is_taken_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.closing(taken_port()) as server:
        order = {"node": 0, "places": {"0": [HERE, server.getsockname()[1]]}, "limit_s": 1.0}
        monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(order)))
        assert probe() == 1
    assert "in use" in capsys.readouterr().err


def taken_port() -> socket.socket:
    while True:
        with contextlib.suppress(OSError):
            return socket.create_server(("", random.choice(PORTS)))


class Login:
    """Login on a node whose probe gives an answer."""

    watchdog, started = 1, "1"

    def __init__(self, answer: dict[int, str] | None) -> None:
        self.answer = answer
        self.order: dict[str, Any] = {}

    def run(self, module: str, name: str, arguments: Sequence[str] = (), **options: Any) -> SSHResult:
        self.order = json.loads(options["input"])
        return SSHResult(code=int(self.answer is None), stdout=json.dumps(self.answer).encode(), stderr=b"")

    def prepare(self, *_: Any, **__: Any) -> tuple[str, str]:
        raise AssertionError

    def channel_to(self, socket_path: str) -> tuple[str, ...]:
        raise AssertionError

    def undo(self, mark: str) -> None:
        raise AssertionError


def paths_between(*answers: dict[int, str] | None) -> tuple[str, dict[str, Any]]:
    logins = [Login(answer) for answer in answers]
    text = broken_paths([machine(node, login=login) for node, login in enumerate(logins)], threading.Event())
    return text, logins[0].order


def test_both_addresses_the_port_and_the_direction_of_a_broken_path_are_named() -> None:
    text, order = paths_between({1: "no answer"}, {})
    (here, _), (there, port) = order["places"].values()
    assert text == f"node 0 at {here} cannot connect to node 1 at {there}:{port} (no answer)"


def test_a_node_that_cannot_be_asked_is_left_out() -> None:
    assert paths_between({1: "no answer"}, None)[0] == ""
    assert paths_between({}, {})[0] == ""


def test_many_broken_paths_are_counted() -> None:
    text, _ = paths_between(*({other: "no answer" for other in range(3) if other != node} for node in range(3)))
    assert text.count("cannot connect") == 3
    assert text.endswith(", and so for 3 more pairs")
