"""Detached pools that have no client: the warning of their end, their last words, and a node that is lost."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import skyward as sky
from skyward.engine import dialler
from skyward.engine.dialler import CommandEnds, Dialler
from skyward.engine.head.client_link import ClientLink
from skyward.engine.head.last_words import read_last_words, write_last_words
from skyward.engine.head.messages import HeadConfig
from skyward.engine.head.place import LocalHead
from skyward.engine.head.turns import ClientTurns
from skyward.engine.hosted import HostedEngine
from skyward.engine.opener import ask_to_end
from skyward.errors import HeadLost, InternalError
from skyward.events import DetachmentWarning, Event, NodeLost, NodeReplaced
from skyward.values.machine import Gone, Machine, PoolSpec
from skyward.wire.frames import PROTOCOL_VERSION
from tests.engine.test_hosted_faults import children_of
from tests.waiting import until


class _Known(LocalHead):
    """Head that another client has started."""

    def __init__(self, argv: tuple[str, ...]) -> None:
        super().__init__()
        self._argv = argv

    def start(self, config: HeadConfig) -> tuple[str, ...]:
        return self._argv


def test_a_client_that_comes_late_is_warned_of_the_end(tmp_path: Path) -> None:
    config = detached(tmp_path, warning_s=3599.9)
    place = LocalHead()
    argv = place.start(config)
    try:
        first = HostedEngine(config, _Known(argv))
        first.start([], None)
        assert look(argv) == (False, True, [])
        first.leave()
        until(lambda: look(argv) == (True, False, []))
        events: list[Event] = []
        second = HostedEngine(config, _Known(argv), emit=events.append, attaches=True)
        second.start([], None)
        until(lambda: bool(events))
        (warning,) = events
        assert isinstance(warning, DetachmentWarning)
        assert warning.detached_for_s == 3600.0
        assert warning.seconds_left < 3599.9
        until(lambda: look(argv) == (False, True, []))
        second.close()
        until(lambda: bool(read_last_words(config.folder)))
        assert read_last_words(config.folder)["why"] == "because its program closed it"
    finally:
        place.stop()


def test_a_client_is_told_once_of_a_node_that_was_lost_before_it_came(tmp_path: Path) -> None:
    provider, spec = sky.Local(), PoolSpec()
    (machine,) = provider.launch(spec, provider.offers(spec), "train-1f2e3d4c", [0], lambda event: None)
    config = replace(detached(tmp_path), node_folder=machine.folder)
    place = LocalHead()
    argv = place.start(config)
    try:
        first = HostedEngine(config, _Known(argv))
        first.start([machine], None)
        (agent,) = first.nodes.agent_pids().values()
        first.leave()
        until(lambda: look(argv) == (False, False, []))
        os.kill(agent, signal.SIGKILL)
        until(lambda: look(argv) == (False, False, [0]))
        second: list[Event] = []
        attach(config, argv, second, lambda: bool(second))
        third: list[Event] = []
        attach(config, argv, third, lambda: True)
        (lost,) = second
        assert not third
        assert isinstance(lost, NodeLost)
        assert (lost.node, lost.will_be_replaced) == (0, False)
        assert re.search(r" s ago, while no program had the pool$", lost.reason)
        assert abs(time.time() - lost.at) < 600
    finally:
        place.stop()
        provider.terminate([machine])


def test_a_client_that_attaches_replaces_a_node_that_was_lost_before_it_came(tmp_path: Path) -> None:
    provider, spec = sky.Local(lease_s=60.0), PoolSpec(nodes=2)
    machines = provider.launch(spec, provider.offers(spec), "train-1f2e3d4c", [0, 1], lambda event: None)
    config = replace(detached(tmp_path), node_folder=machines[0].folder, blueprint=b"of nodes", secrets=("s",))
    place, source = LocalHead(), _LaunchedMachines(provider)
    argv = place.start(config)
    try:
        first = HostedEngine(config, _Known(argv))
        first.start(machines, _GoneMachines())
        os.kill(first.nodes.agent_pids()[1], signal.SIGKILL)
        until(lambda: look(argv) == (False, True, [1]))
        first.leave()
        until(lambda: look(argv) == (False, False, [1]))
        events: list[Event] = []
        second = HostedEngine(config, _Known(argv), emit=events.append, attaches=True)
        second.start(machines, source)
        assert second.blueprint() == (b"of nodes", ("s",))
        assert look(argv) == (False, True, [1])
        assert not source.launched, "only a client that knows how replaces nodes"
        second.replace_lost()
        second.replace_lost()  # asked again
        until(lambda: any(isinstance(event, NodeReplaced) for event in events))
        assert second.requests.ask("there") == (0, 1)
        assert [machine.node for machine in source.launched] == [1]
        assert second.ledger.machines[1] is source.launched[0]
        second.leave()
        until(lambda: look(argv) == (False, False, []))
    finally:
        place.stop()
        ask_to_end([*machines, *source.launched], 5.0)
        provider.terminate([*machines, *source.launched])


def test_a_pool_that_is_extended_takes_clients_that_are_one_version_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = detached(tmp_path)
    place = LocalHead()
    argv = place.start(config)
    try:
        first = HostedEngine(config, _Known(argv))
        first.start([], None)
        first.extend(1800.0)
        first.leave()
        until(lambda: not look(argv)[1])
        assert 5000.0 < glance(argv)["left_s"] <= 5400.0
        for version in (PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1):
            monkeypatch.setattr(dialler, "PROTOCOL_VERSION", version)
            attach(config, argv, [], lambda: True)
        for version in (PROTOCOL_VERSION - 2, PROTOCOL_VERSION + 2):
            monkeypatch.setattr(dialler, "PROTOCOL_VERSION", version)
            with pytest.raises(InternalError, match=rf"protocol {version} of the client does not fit protocol"):
                glance(argv)
    finally:
        place.stop()


def test_calls_fail_as_soon_as_the_provider_says_that_the_machine_of_the_head_is_gone(tmp_path: Path) -> None:
    config = detached(tmp_path)
    place = LocalHead()
    argv = place.start(config)
    network = tmp_path / "network"
    network.touch()
    try:
        lost: list[str] = []
        way = "sh", "-c", f'test -e {network} && exec "$@"', "sh", *argv
        client = HostedEngine(config, _Known(way), lost=lost.append)
        client.start([], _GoneMachines())
        network.unlink()
        place.stop()
        asked = client.requests.begin("counts")
        with pytest.raises(HeadLost, match=r"gone \(the instance was terminated\), and a detached pool ends with it;"):
            asked.result(30.0)
        assert lost == ["the instance was terminated"]
        for use in (client.calls, lambda: client.follow(2), lambda: client.why_needed(1.0)):
            with pytest.raises(HeadLost) as error:
                use()
            assert not error.value.retryable, "nothing is left that could run a call"
        client.close()
    finally:
        place.stop()


def test_a_program_says_that_the_head_is_silent_and_that_it_answers_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("skyward.engine.head_link._SILENT_S", 0.1)  # no option: only tests wait for nobody
    config, network = detached(tmp_path), tmp_path / "network"
    place = LocalHead()
    argv = place.start(config)
    network.touch()
    try:
        # The head reads and writes the pipes of its stub itself, so a stub that dies would end no link.
        client = HostedEngine(config, _Known(("sh", "-c", f'test -e {network} && cat | "$@" | cat', "sh", *argv)))
        client.start([], None)
        network.unlink()
        (shell,) = [pid for pid, line in children_of(os.getpid()).items() if str(network) in line]
        for pid in (*children_of(shell), shell):
            with contextlib.suppress(ProcessLookupError):  # it has ended with another one
                os.kill(pid, signal.SIGKILL)
        asked = client.requests.begin("counts")
        until(lambda: "head of the pool: does not answer for " in caplog.text)
        assert "; calls wait for it, for 1 h 00 m at most" in caplog.text or "for 59 m" in caplog.text
        network.touch()
        asked.result(30.0)
        until(lambda: "head of the pool: answers again, after " in caplog.text)
        assert len(caplog.messages) == 2, "each is said once"
        client.close()
    finally:
        place.stop()


class _GoneMachines:
    """Machines of a provider that has ended all of them."""

    def replace(self, node: int) -> Machine | None:
        return None

    def prepare_replacement(self, node: int) -> bool:
        return False

    def give_up(self, node: int) -> None:
        return None

    def why_gone(self, node: int) -> Gone | None:
        return Gone(reason="the instance was terminated")


class _LaunchedMachines(_GoneMachines):
    """Machines of a provider that launches others."""

    def __init__(self, provider: sky.Local) -> None:
        self._provider = provider
        self.launched: list[Machine] = []

    def replace(self, node: int) -> Machine | None:
        spec = PoolSpec(nodes=2)
        offers = self._provider.offers(spec)
        self.launched += self._provider.launch(spec, offers, "train-1f2e3d4c", [node], lambda event: None)
        return self.launched[-1]

    def why_gone(self, node: int) -> Gone | None:
        return None


def attach(config: HeadConfig, argv: tuple[str, ...], events: list[Event], is_enough: Callable[[], bool]) -> None:
    """Attach to a head, and leave it when these events are enough, and it has answered."""
    client = HostedEngine(config, _Known(argv), emit=events.append, attaches=True)
    client.start([], None)
    client.requests.ask("counts", timeout_s=60.0)
    until(is_enough)
    client.leave()
    until(lambda: not look(argv)[1])


def detached(tmp_path: Path, *, warning_s: float = 0.0) -> HeadConfig:
    return HeadConfig(
        pool="train-1f2e3d4c",
        folder=str(tmp_path / "head"),
        cancel_grace_s=1.0,
        lease_s=30.0,
        starter=os.getpid(),
        detached_for_s=3600.0,
        attach_key="k",
        warning_s=warning_s,
    )


def test_head_of_a_pool_that_ends_with_its_client_warns_of_no_end() -> None:
    config = HeadConfig(pool="train", folder="/tmp/head", cancel_grace_s=1.0, lease_s=30.0)
    turns = ClientTurns(config)
    turns.sessions = 1
    assert not turns.begins_to_end()


def test_head_of_a_detached_pool_whose_client_never_came_ends_after_the_lease() -> None:
    config = HeadConfig(pool="train", folder="/tmp/head", cancel_grace_s=1.0, lease_s=30.0, detached_for_s=28_800.0)
    turns = ClientTurns(config)
    assert not turns.is_over
    turns._renewed_at -= 29.0  # private: the clock
    assert not turns.is_over
    turns._renewed_at -= 2.0  # private: the clock
    assert turns.is_over


def test_head_of_a_detached_pool_whose_silent_client_is_linked_ends_after_the_time_without_a_client() -> None:
    """Ray does not stand yet, and the machine of the client sleeps, or has lost its power."""
    config = HeadConfig(pool="train", folder="/tmp/head", cancel_grace_s=1.0, lease_s=30.0, detached_for_s=3600.0)
    turns = ClientTurns(config)
    turns.sessions = 1
    channel = SimpleNamespace(is_attached=True, heard_at=turns.contact_at)
    turns.client = cast(ClientLink, SimpleNamespace(channel=channel))
    for away_s, is_over in ((3599.0, False), (3601.0, True)):
        channel.heard_at = turns._renewed_at = time.monotonic() - away_s  # private: the clock
        assert turns.is_over == is_over


def test_a_budget_ends_a_pool_without_a_client_earlier_and_is_named_as_the_reason() -> None:
    config = HeadConfig(pool="train", folder="/tmp/head", cancel_grace_s=1.0, lease_s=30.0, detached_for_s=28_800.0)
    turns = ClientTurns(config)
    turns.sessions, turns.goes_alone = 1, True
    turns.renew()
    turns.money_ends_at = time.monotonic() + 3600.0
    assert turns.left_s <= 3600.0
    assert not turns.begins_to_end()
    assert not turns.is_over
    turns.money_ends_at = time.monotonic() + 500.0
    assert turns.begins_to_end()
    assert turns.is_short_of_money
    turns.money_ends_at = time.monotonic() - 1.0
    assert turns.is_over
    assert not turns.was_closed, "nobody else terminates the machine"
    assert turns.last_words == "because no client came, and its budget lasts no longer"


def look(argv: tuple[str, ...]) -> tuple[bool, bool, list[int]]:
    """Return whether a head has warned of its end, whether it has a client, and its lost nodes."""
    facts = glance(argv)
    return facts["is_ending"], bool(facts["client"]), facts["lost"]


def glance(argv: tuple[str, ...]) -> dict[str, Any]:
    """Return what a head tells a process that only looks."""
    looking = Dialler(
        lambda: CommandEnds(argv), role="look", pool="", node=0, peer="head", is_known=True, attach_key="k"
    )
    ends, facts = looking.dial(20.0)
    ends.close()
    return facts


def test_only_the_newest_last_words_are_kept(tmp_path: Path) -> None:
    assert read_last_words(str(tmp_path / "train-0")) == {}
    for number in range(25):
        write_last_words(str(tmp_path / f"train-{number}"), "in a test")
    assert len(list(tmp_path.iterdir())) == 20
