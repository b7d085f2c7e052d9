"""Ray that does not start on one node of two. A pool that needs it is told, unless all nodes had it before."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

import skyward as sky
from skyward.engine.ray.raiser import RayRaiser
from skyward.errors import ProviderError
from skyward.events import EngineUp
from skyward.ssh.command import SSHResult
from tests.engine.parts import machine
from tests.waiting import until

WHY = "node 1: no room"


class Login:
    """Login on a node where Ray starts, or has no room."""

    watchdog, started = 1, "1"

    def __init__(self, *, has_room: bool) -> None:
        self.has_room = has_room

    def prepare(self, image: sky.Image, folder: str, *, stop: threading.Event) -> tuple[str, str]:
        if not self.has_room:
            raise ProviderError(WHY)
        return "python3", f"/tmp/{folder}"

    def run(self, module: str, name: str, arguments: Sequence[str] = (), **options: Any) -> SSHResult:
        return SSHResult(
            code=0, stdout=json.dumps({"pid": 1, "started": "1", "address": "127.0.0.1:1"}).encode(), stderr=b""
        )

    def channel_to(self, socket_path: str) -> tuple[str, ...]:
        return ()


@contextmanager
def raised() -> Iterator[tuple[RayRaiser, list[str], list[EngineUp]]]:
    """Raise Ray, which the pool needs, on a node with room and one without."""
    reasons, events, stands = list[str](), list[Any](), threading.Event()
    machines = {node: machine(node, login=Login(has_room=node == 0)) for node in range(2)}
    raiser = RayRaiser(sky.Image(), emit=events.append, failed=reasons.append)

    def ask(verb: str, *arguments: Any, timeout_s: float | None = None) -> None:
        if verb == "ray_stands":
            stands.set()

    raiser.begin(machines, 0, ask)
    try:
        assert stands.wait(60)
        yield raiser, reasons, events
    finally:
        raiser.close()


def ask_for_node_1(raiser: RayRaiser, told: Sequence[object]) -> None:
    """Ask for Ray on node 1, as the head does, until somebody is told."""

    def is_told() -> bool:
        raiser.slow_verbs["ray_lacks"](1)
        return bool(told)

    until(is_told)


def test_a_pool_that_needs_ray_ends_if_one_node_cannot_have_it() -> None:
    with raised() as (raiser, reasons, events):
        ask_for_node_1(raiser, reasons)
        assert (reasons, events, raiser.is_up) == ([WHY], [], False)


def test_a_pool_that_had_ray_goes_on_if_one_node_cannot_have_it_again(caplog: pytest.LogCaptureFixture) -> None:
    with raised() as (raiser, reasons, events):
        raiser.verbs["ray_carries"]([1], [])
        raiser.verbs["ray_carries"]([], [1])
        ask_for_node_1(raiser, caplog.records)
        assert f"Ray does not run there, so its link stays as it is: {WHY}" in caplog.text
        assert (reasons, [event.engine for event in events]) == ([], ["ray"])
