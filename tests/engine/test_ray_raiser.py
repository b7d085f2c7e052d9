"""Ray of two nodes, whose logins are stand-ins: one that does not start on a node, or is lost while it starts."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import pytest

import skyward as sky
from skyward.engine.ray.raiser import RayRaiser
from skyward.errors import ProviderError, Unreachable
from skyward.events import EngineLost
from skyward.ssh.command import SSHResult
from tests.engine.parts import machine
from tests.waiting import until

WHY = "node 1: no room"


class Login:
    """Login on a node where Ray starts, has no room, or is slow: then it starts only once the start is interrupted."""

    watchdog, started = 1, "1"

    def __init__(
        self,
        *,
        has_room: bool,
        is_slow: bool = False,
        cut: Mapping[int, str] = MappingProxyType({}),
        is_away: bool = False,
        taken: int = 0,
    ) -> None:
        self.has_room, self.is_slow = has_room, is_slow
        self.cut = dict(cut)
        """Reasons by the nodes that this one cannot connect to."""
        self.is_away, self.taken = is_away, taken
        """Whether it does not answer, and the number of starts that meet a port which another program has taken."""
        self.asked = 0
        """Number of its preparations."""
        self.starts, self.ends = list[str](), list[str]()
        """Folders in which Ray was started, and those in which it was ended."""
        self.limits_s = list[float]()
        """Time limits of the starts."""
        self.secrets = list[list[str]]()
        """Token and certificate of the authority of each start."""

    def prepare(self, image: sky.Image, folder: str, *, stop: threading.Event) -> tuple[str, str]:
        self.asked += 1
        if self.is_away:
            raise Unreachable("no route", node=1)
        if not self.has_room:
            raise ProviderError(WHY)
        return "python3", f"/tmp/{folder}"

    def run(self, module: str, name: str, arguments: Sequence[str] = (), **options: Any) -> SSHResult:
        if name == "probe":
            return SSHResult(code=0, stdout=json.dumps(self.cut).encode(), stderr=b"")
        if name == "end":
            self.ends.append(arguments[2])
        else:
            self.starts.append(arguments[0])
            order = json.loads(options["input"])
            assert order["limit_s"] < options["timeout_s"]
            self.limits_s.append(order["limit_s"])
            self.secrets.append(order["secrets"][:2])
            if self.taken:
                self.taken -= 1
                return SSHResult(code=1, stdout=b"", stderr=b"it printed: Address already in use")
            if self.is_slow:
                assert options["stop"].wait(60)
                raise Unreachable("stopped on request", node=None)
        return SSHResult(
            code=0, stdout=json.dumps({"pid": 1, "started": "1", "address": "127.0.0.1:1"}).encode(), stderr=b""
        )

    def channel_to(self, socket_path: str) -> tuple[str, ...]:
        return ()

    def undo(self, mark: str) -> None:
        raise AssertionError


@contextmanager
def raised(
    other: Login | None = None,
    stood: list[str] | None = None,
    ended: list[list[int]] | None = None,
    *,
    is_needed: bool = True,
    on_up: Callable[[list[Any]], object] | None = None,
) -> Iterator[tuple[RayRaiser, list[str], list[Any]]]:
    """Raise Ray, which the pool needs, on a node with room and another one.

    Args:
        stood: Takes the folders of Ray on the first.
        ended: Takes the processes of Ray that had been ended on each when the head was told of an end.
    """
    reasons, events, stood = list[str](), list[Any](), [] if stood is None else stood
    ended = [] if ended is None else ended
    logins = [Login(has_room=True), other or Login(has_room=False)]
    machines = {node: machine(node, login=login) for node, login in enumerate(logins)}

    def failed(reason: str, is_cut: bool) -> None:
        began = time.monotonic()
        raiser.close()  # as the pool does, in the thread that this one must not wait for
        reasons.append(reason if time.monotonic() - began < 5.0 else "it was closed late")
        assert is_cut == ("network:" in reason)

    raiser = RayRaiser(
        sky.Image(),
        emit=events.append,
        failed=failed if is_needed else None,
        on_up=lambda: None if on_up is None else on_up(events),
        pause_s=0.02,
    )

    def ask(verb: str, *arguments: Any, timeout_s: float | None = None) -> None:
        if verb == "ray_stands":
            stood.append(arguments[1])
        if verb == "ray_ends":
            ended.append([len(login.ends) for login in logins])

    raiser.begin(machines, 0, ask)
    try:
        until(lambda: bool(stood or reasons or events))
        yield raiser, reasons, events
    finally:
        raiser.close()


def ask_for_node_1(raiser: RayRaiser, is_enough: Callable[[], object]) -> None:
    """Ask for Ray on node 1, as the head does, until it is enough."""

    def is_asked() -> object:
        raiser.slow_verbs["ray_lacks"](1)
        return is_enough()

    until(is_asked)


def test_a_pool_that_needs_ray_ends_if_one_node_cannot_have_it() -> None:
    with raised() as (raiser, reasons, events):
        ask_for_node_1(raiser, lambda: reasons)
        assert (reasons, events, raiser.is_up) == ([WHY], [], False)


def test_the_event_says_that_ray_carries_the_calls_after_a_detached_pool_was_let_go() -> None:
    """A reader of it may kill the program, and the pool goes on."""
    before, may_go_on = list[list[Any]](), threading.Event()

    def let_go(events: list[Any]) -> None:
        assert may_go_on.wait(60)
        before.append(list(events))

    with raised(Login(has_room=True), on_up=let_go) as (raiser, _, events):
        raiser.verbs["ray_carries"]([1], [])
        assert (raiser.is_up, events) == (True, [])
        may_go_on.set()
        until(lambda: events)
    assert (before, [type(event).__name__ for event in events]) == ([[]], ["EngineUp"])


def test_a_pool_that_does_not_need_ray_is_told_once_that_one_node_cannot_have_it() -> None:
    with raised(is_needed=False) as (raiser, reasons, events):
        raiser.verbs["ray_carries"]([2], [1])
        ask_for_node_1(raiser, lambda: events)
        assert raiser.why_needed(60.0) == f"Ray does not reach node 1 ({WHY})"  # returns when nothing more is tried
        assert (reasons, [type(event) for event in events], events[0].reason) == ([], [EngineLost], WHY)


@pytest.mark.parametrize("is_needed", [True, False])
def test_ray_is_given_up_where_nodes_cannot_connect_to_each_other(
    is_needed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, stood = Login(has_room=True, cut={0: "no answer"}), list[str]()
    with raised(other, stood, is_needed=is_needed) as (raiser, reasons, events):
        assert not other.starts
        assert not stood
        told = reasons or [event.reason for event in events]
        assert told == [raiser.why_needed(60.0).removeprefix("Ray does not stand (").removesuffix(")")]
        assert "(no answer); let the nodes' private addresses reach each other" in told[0]


def test_a_node_that_is_away_does_not_count_as_one_that_cannot_have_ray() -> None:
    other = Login(has_room=True, is_away=True)
    with raised(other) as (raiser, reasons, events):
        ask_for_node_1(raiser, lambda: other.asked > 3)
        assert (reasons, events) == ([], [])


def test_a_pool_that_is_closed_before_the_time_of_ray_starts_none() -> None:
    login = Login(has_room=True)
    raiser = RayRaiser(sky.Image(), emit=lambda _: None, after_s=600.0)
    raiser.begin({0: machine(0, login=login)}, 0, lambda *_, **__: None)
    raiser.close()
    assert (raiser.is_up, login.asked, login.starts) == (False, 0, [])


def test_a_pool_that_had_ray_goes_on_if_one_node_cannot_have_it_again(caplog: pytest.LogCaptureFixture) -> None:
    with raised() as (raiser, reasons, events):
        raiser.verbs["ray_carries"]([1], [])
        raiser.verbs["ray_carries"]([], [1])
        ask_for_node_1(raiser, lambda: caplog.records)
        assert f"Ray does not run there, so its link stays as it is: {WHY}" in caplog.text
        assert (reasons, [event.engine for event in events]) == ([], ["ray"])


def test_a_start_that_meets_a_taken_port_is_tried_again_for_longer_and_leaves_no_folder() -> None:
    other = Login(has_room=True, taken=1)
    with raised(other) as (raiser, reasons, events):
        until(lambda: len(other.ends) == 1)
        until(lambda: raiser.slow_verbs["ray_lacks"](1) or len(other.starts) == 2)
        raiser.verbs["ray_carries"]([1], [])
        assert (reasons, [event.engine for event in events], raiser.is_up) == ([], ["ray"], True)
        first, second = map(os.path.basename, other.starts)
        assert first != second
        assert other.limits_s[1] == 2 * other.limits_s[0]
        assert [os.path.basename(folder) for folder in other.ends] == [first]


def test_a_node_that_was_given_back_gets_ray_when_it_comes_again_and_its_former_one_ended_with_it() -> None:
    other = Login(has_room=True)
    with raised(other) as (raiser, _, _):
        until(lambda: other.starts)
        ask_for_node_1(raiser, lambda: len(other.starts) == 2)  # the second replaced the first
        raiser.forget(1)
        ask_for_node_1(raiser, lambda: len(other.starts) == 3)
        assert [os.path.basename(folder) for folder in other.ends] == [os.path.basename(other.starts[0])]


def test_the_head_uses_a_lost_ray_no_more_before_its_processes_are_ended() -> None:
    stood, ended = list[str](), list[list[int]]()
    other = Login(has_room=True)
    with raised(other, stood, ended) as (raiser, _, _):
        until(lambda: other.starts)
        raiser.verbs["ray_carries"]([1], [])
        assert not ended
        raiser.verbs["ray_is_lost"](stood[0], "it has ended")
        until(lambda: len(stood) == 2)
        assert ended == [[0, 0]]
        until(lambda: len(other.ends) == 1)
    assert ended == [[0, 0]]  # the end of the pool is told otherwise


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


def test_the_next_client_of_a_detached_pool_starts_the_same_ray_on_a_node_that_lacks_it() -> None:
    first, other = Login(has_room=True), Login(has_room=True)
    machines = {node: machine(node, login=login) for node, login in enumerate([first, other])}
    keys, companions = list[Any](), dict[int, Any]()

    def ask(verb: str, *arguments: Any, timeout_s: float | None = None) -> dict[str, Any] | None:
        if verb == "ray_keys":
            keys.append(arguments)
        elif verb == "ray_runs":
            companions.update(arguments[0])
        elif verb == "ray_there":
            return {"address": "127.0.0.1:1", "companions": companions, "carries": False, "keys": keys[0]}
        return None

    before = RayRaiser(sky.Image(), emit=lambda _: None, is_detached=True)
    before.begin(machines, 0, ask)
    until(lambda: keys and len(companions) == 2)
    before.leave()
    raiser = RayRaiser(sky.Image(), emit=lambda _: None, is_detached=True)
    raiser.begin(machines, 0, ask, attaches=True)
    assert raiser.keys == keys[0], "for a head that follows a killed one"
    ask_for_node_1(raiser, lambda: len(other.starts) == 2)
    raiser.verbs["ray_carries"]([1], [])
    assert raiser.why_needed(60.0) == ""
    assert (first.ends, len(first.starts), other.ends) == ([], 1, other.starts[:1]), "Ray goes on elsewhere"
    assert other.secrets[0] == other.secrets[1] == first.secrets[0]
    raiser.close()
    assert (first.ends, other.ends) == (first.starts, other.starts)
