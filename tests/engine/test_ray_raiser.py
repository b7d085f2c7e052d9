"""Ray of two nodes, whose logins are stand-ins: one that does not start on a node, or is lost while it starts."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

import skyward as sky
from skyward.engine.ray.raiser import RayRaiser
from skyward.errors import ProviderError, Unreachable
from skyward.events import EngineUp
from skyward.ssh.command import SSHResult
from tests.engine.parts import machine
from tests.waiting import until

WHY = "node 1: no room"


class Login:
    """Login on a node where Ray starts, has no room, or is slow: then it starts only once the start is interrupted."""

    watchdog, started = 1, "1"

    def __init__(self, *, has_room: bool, is_slow: bool = False) -> None:
        self.has_room, self.is_slow = has_room, is_slow
        self.starts, self.ends = list[str](), list[str]()
        """Folders in which Ray was started, and those in which it was ended."""

    def prepare(self, image: sky.Image, folder: str, *, stop: threading.Event) -> tuple[str, str]:
        if not self.has_room:
            raise ProviderError(WHY)
        return "python3", f"/tmp/{folder}"

    def run(self, module: str, name: str, arguments: Sequence[str] = (), **options: Any) -> SSHResult:
        if name == "end":
            self.ends.append(arguments[2])
        else:
            self.starts.append(arguments[0])
            if self.is_slow:
                assert options["stop"].wait(60)
                raise Unreachable("stopped on request", node=None)
        return SSHResult(
            code=0, stdout=json.dumps({"pid": 1, "started": "1", "address": "127.0.0.1:1"}).encode(), stderr=b""
        )

    def channel_to(self, socket_path: str) -> tuple[str, ...]:
        return ()


@contextmanager
def raised(
    other: Login | None = None, stood: list[str] | None = None
) -> Iterator[tuple[RayRaiser, list[str], list[EngineUp]]]:
    """Raise Ray, which the pool needs, on a node with room and another one. `stood`: folders of Ray on the first."""
    reasons, events, stood = list[str](), list[Any](), [] if stood is None else stood
    logins = [Login(has_room=True), other or Login(has_room=False)]
    machines = {node: machine(node, login=login) for node, login in enumerate(logins)}
    raiser = RayRaiser(sky.Image(), emit=events.append, failed=reasons.append)

    def ask(verb: str, *arguments: Any, timeout_s: float | None = None) -> None:
        if verb == "ray_stands":
            stood.append(arguments[1])

    raiser.begin(machines, 0, ask)
    try:
        until(lambda: bool(stood))
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


def test_word_of_an_earlier_ray_does_not_end_the_one_that_stands_now() -> None:
    stood = list[str]()
    with raised(Login(has_room=True), stood) as (raiser, _, _):
        raiser.verbs["ray_carries"]([1], [])
        raiser.verbs["ray_is_lost"](stood[0], "it has ended")
        assert not raiser.is_up
        until(lambda: len(stood) == 2)
        raiser.verbs["ray_carries"]([1], [])
        assert raiser.is_up
        raiser.verbs["ray_is_lost"](stood[0], "it has ended")
        assert raiser.is_up
        raiser.verbs["ray_is_lost"](stood[1], "it has ended")
        assert not raiser.is_up


@pytest.mark.parametrize("end", [RayRaiser.leave, RayRaiser.close])
def test_starts_that_are_interrupted_have_removed_their_folders_when_the_pool_is_left(
    end: Callable[[RayRaiser], None],
) -> None:
    slow, stood = Login(has_room=True, is_slow=True), list[str]()
    with raised(slow, stood) as (raiser, _, _):
        until(lambda: len(slow.starts) == 1)
        raiser.verbs["ray_is_lost"](stood[0], "it has ended")
        until(lambda: len(slow.starts) == 2)  # of the next Ray; the first one is interrupted
        end(raiser)
        assert sorted(slow.ends) == sorted(map(os.path.basename, slow.starts))
