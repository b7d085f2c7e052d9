"""A lost node whose replacement fails at first gets another. A node that is given up leaves nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import skyward as sky
from skyward.errors import NodeLost, ProviderError, Unreachable
from skyward.events import Emit, Event, NodeReplaced
from skyward.events import NodeLost as NodeLostEvent
from skyward.values.machine import Machine, Offer, PoolSpec
from tests.waiting import until


@dataclass(frozen=True, kw_only=True)
class Failing(sky.Local):
    """Provider whose later launches follow `fates`.

    Each is "unreachable", "final", "dead" (it dies at once), "well", "hangs", or the name of an interpreter in
    `folder`, with which the agent is started.
    """

    fates: tuple[str, ...]
    folder: str = ""
    made: list[Machine] = field(default_factory=list)
    launches: list[str] = field(default_factory=list)
    is_waiting: threading.Event = field(default_factory=threading.Event)

    def launch(self, spec: PoolSpec, offers: list[Offer], pool: str, nodes: list[int], emit: Emit) -> list[Machine]:
        fate = ("well", *self.fates)[len(self.launches)]
        self.launches.append(fate)
        if fate == "hangs":
            self.is_waiting.set()
            assert spec.stop.wait(60)
            raise Unreachable("told to stop", was_stopped=True)
        if fate in ("unreachable", "final"):
            raise Unreachable("the connection was lost", is_final=fate == "final")
        with pytest.MonkeyPatch.context() as patch:
            if fate not in ("well", "dead"):
                patch.setattr("sys.executable", os.path.join(self.folder, fate))
            machines = super().launch(spec, offers, pool, nodes, emit)
        self.made.extend(machines)
        if fate == "dead":
            os.kill(machines[0].pid, signal.SIGKILL)
            machines[0].handle.wait()
            until(lambda: not answers(machines[0].socket_path))  # the agent ends a moment after its parents
        return machines

    def is_empty(self) -> bool:
        return not any(os.path.exists(machine.folder) for machine in self.made)


def answers(socket_path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(socket_path) == 0


def lose(pool: sky.ComputePool) -> None:
    (agent,) = pool.agent_pids().values()
    os.kill(agent, signal.SIGKILL)
    until(lambda: not pool.agent_pids() or list(pool.agent_pids().values()) != [agent])


@pytest.mark.parametrize("fates", [("unreachable", "well"), ("dead", "dead", "well")])
def test_a_temporary_failure_is_retried(fates: tuple[str, ...]) -> None:
    seen: list[Event] = []
    provider = Failing(fates=fates)
    with sky.ComputePool(provider, logs=False, on_event=seen.append) as pool:
        lose(pool)
        assert sky.compute(abs)(-3) >> pool == 3
        until(lambda: any(isinstance(event, NodeReplaced) for event in seen))
    assert provider.launches == ["well", *fates]
    assert provider.is_empty()


@pytest.mark.parametrize("fates", [("final",), ("dead", "dead", "dead")])
def test_a_node_that_is_given_up_leaves_nothing_while_its_pool_is_open(
    fates: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[Event] = []
    provider = Failing(fates=fates)
    with sky.ComputePool(provider, logs=False, on_event=seen.append) as pool:
        lose(pool)
        until(lambda: any(isinstance(event, NodeLostEvent) and not event.will_be_replaced for event in seen))
        with pytest.raises(NodeLost):
            sky.compute(abs)(-3) >> pool
        until(provider.is_empty)
    assert provider.launches == ["well", *fates]
    assert "could not be replaced: Unreachable" in caplog.text


def test_closing_a_pool_ends_a_launch_in_progress() -> None:
    provider = Failing(fates=("hangs",))
    with sky.ComputePool(provider, logs=False) as pool:
        lose(pool)
        assert provider.is_waiting.wait(60)
    assert provider.is_empty()


def interpreter(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_a_local_replacement_that_dies_while_it_starts_is_tried_again(tmp_path: Path) -> None:
    interpreter(tmp_path / "is-killed", "kill -9 $$")
    provider = Failing(fates=("is-killed", "is-not-there", "well"), folder=str(tmp_path))
    with sky.ComputePool(provider, logs=False) as pool:
        lose(pool)
        assert sky.compute(abs)(-3) >> pool == 3
    assert provider.launches == ["well", *provider.fates]
    assert provider.is_empty()


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("kill -9 $$", "the agent of node 0 was killed by SIGKILL while it started"),
        ("exit 3", "the agent of node 0 exited with code 3 while it started"),
        ('ulimit -n 24; exec {python} "$@"', "RLIMIT_NOFILE=24: .*raise the hard limit"),
        (None, "the agent of node 0 could not be started: No such file or directory"),
    ],
)
def test_an_agent_that_does_not_start_reports_why_it_died(
    script: str | None, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "python"
    if script is not None:
        interpreter(path, script.format(python=sys.executable))
    monkeypatch.setattr("sys.executable", str(path))
    with pytest.raises(ProviderError, match=why) as caught:
        sky.ComputePool(sky.Local(), logs=False).start()
    assert caught.value.retryable


@pytest.mark.parametrize(("files", "slots"), [(40, 1), (64, 4)])
def test_a_limit_of_open_files_that_an_agent_requests_is_enough(
    files: int, slots: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interpreter(tmp_path / "python", f'ulimit -n {files}; exec {sys.executable} "$@"')
    with monkeypatch.context() as patch:
        patch.setattr("sys.executable", str(tmp_path / "python"))
        pool = sky.ComputePool(sky.Local(), logs=False, concurrency=slots).start()
    with contextlib.closing(pool):
        assert pool.map(abs, [-3] * 8) == [3] * 8
