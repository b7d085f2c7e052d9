"""Ways to nodes by Ray or not: which one is dialled. A thread here answers as Ray's driver does."""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyward.engine.dialler import DialledEnds
from skyward.engine.ray.links import RayEnds, RayWays
from tests.engine.parts import machine
from tests.waiting import until


class Driver:
    """Server at the socket of a driver."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_ready = True
        self.prepared: list[str] = []
        self.ended: dict[str, object] = {}
        self.connections: list[socket.socket] = []
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(path))
        self._server.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._server.accept()
            order = json.loads(connection.makefile("rb").readline() or b"{}")
            if "prepare" in order:
                self.prepared.append(order["node"])
                connection.sendall(json.dumps({"ready": True} if self.is_ready else {"why": "no"}).encode() + b"\n")
            elif "ended" in order:
                connection.sendall(json.dumps(self.ended).encode() + b"\n")
            elif "id" in order:
                self.connections.append(connection)
                continue
            connection.close()
            if not order:  # `close` has connected
                return

    def close(self) -> None:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(self.path))
        self._thread.join()
        self._server.close()
        self.path.unlink()
        for connection in self.connections:
            connection.close()


class OtherEnds(DialledEnds):
    """A link the other way."""

    def __init__(self) -> None:
        ours, self.theirs = socket.socketpair()
        fd = ours.detach()
        super().__init__(fd, fd)

    def close(self) -> None:
        super().close()
        self.theirs.close()


class Dialled:
    """Ways to one node, and the links that were dialled."""

    def __init__(self, folder: Path) -> None:
        self.moved: list[int] = []
        self.error: BaseException | None = None
        self.ways = RayWays(lambda _: OtherEnds, self._move)
        self._machine = machine(3, socket_path="/there/agent.sock")
        self._links: list[DialledEnds] = []
        self.driver = Driver(folder / "driver.sock")

    def _move(self, node: int) -> None:
        self.moved.append(node)
        if self.error is not None:
            raise self.error

    def dial(self) -> DialledEnds:
        self._links.append(self.ways.way_to(self._machine)())
        return self._links[-1]

    def close(self) -> None:
        self.ways.is_down()
        self.driver.close()
        for link in self._links:
            link.close()


@pytest.fixture
def dialled(tmp_path: Path) -> Iterator[Dialled]:
    dialled = Dialled(tmp_path)
    yield dialled
    dialled.close()


def test_links_go_the_other_way_until_ray_stands(dialled: Dialled) -> None:
    assert isinstance(dialled.dial(), OtherEnds)
    dialled.ways.stands(str(dialled.driver.path))
    until(lambda: dialled.moved)
    assert isinstance(dialled.dial(), RayEnds)
    assert dialled.ways.by_ray == {3}
    assert set(dialled.moved) == {3}
    assert set(dialled.driver.prepared) == {"skyward-3"}
    dialled.ways.is_down()
    assert isinstance(dialled.dial(), OtherEnds)
    assert not dialled.ways.by_ray


def test_a_link_that_breaks_goes_the_other_way_until_there_is_a_new_bridge(dialled: Dialled) -> None:
    dialled.dial()
    dialled.ways.stands(str(dialled.driver.path))
    until(lambda: dialled.moved)
    link = dialled.dial()
    dialled.driver.is_ready = False
    dialled.driver.ended = {"code": None, "said": "the bridge is lost"}
    assert link.exit_code(20.0) is None
    assert link.said() == "the bridge is lost"
    moves, asked = len(dialled.moved), len(dialled.driver.prepared)
    assert isinstance(dialled.dial(), OtherEnds)
    until(lambda: len(dialled.driver.prepared) > asked)
    dialled.driver.is_ready = True
    until(lambda: len(dialled.moved) > moves)
    assert isinstance(dialled.dial(), RayEnds)


def test_a_link_that_could_not_move_moves_later(dialled: Dialled) -> None:
    dialled.dial()
    dialled.ways.stands(str(dialled.driver.path))
    until(lambda: len(dialled.moved) > 1)  # nobody dialled the first time, as if the link was being dialled just then
    assert isinstance(dialled.dial(), RayEnds)


def test_a_link_whose_agent_is_gone_keeps_its_way(dialled: Dialled) -> None:
    dialled.dial()
    dialled.ways.stands(str(dialled.driver.path))
    until(lambda: dialled.moved)
    link = dialled.dial()
    dialled.driver.ended = {"code": 69, "said": "no agent"}
    assert link.exit_code(20.0) == 69
    assert isinstance(dialled.dial(), RayEnds)


def test_a_lost_node_is_missing_only_if_it_will_return(dialled: Dialled) -> None:
    dialled.dial()
    dialled.ways.stands(str(dialled.driver.path))
    until(lambda: dialled.moved)
    dialled.dial()
    assert not dialled.ways.missing
    dialled.ways.lose(3, will_return=True)
    assert dialled.ways.missing == {3}
    dialled.ways.lose(3, will_return=False)
    assert not dialled.ways.missing


def test_links_go_the_other_way_when_the_driver_has_died(dialled: Dialled) -> None:
    dialled.dial()
    dialled.ways.stands(str(dialled.driver.path))
    until(lambda: dialled.moved)
    link = dialled.dial()
    dialled.driver.close()
    assert link.exit_code(20.0) is None
    assert isinstance(dialled.dial(), OtherEnds)
    dialled.driver = Driver(dialled.driver.path)


def test_a_move_that_raises_is_logged_and_tried_again(dialled: Dialled, caplog: pytest.LogCaptureFixture) -> None:
    dialled.dial()
    dialled.error = RuntimeError("of a test")
    with caplog.at_level(logging.ERROR):
        dialled.ways.stands(str(dialled.driver.path))
        until(lambda: "of a test" in caplog.text)
    dialled.error = None
    dialled.ways.stands(str(dialled.driver.path))
    until(lambda: len(dialled.moved) > 1)
