"""Processes of slots alone: a real zygote forks them, and their death is noticed."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from skyward.core.process import start_time
from skyward.node.agent.loop import EventLoop
from skyward.node.agent.processes import Processes
from skyward.node.agent.slots import SlotProcess, make_slot
from skyward.wire.tasks import NodeConfig

LIMIT_S = 60.0


class Reached(Exception):
    """Raised when the loop has run for long enough."""


class Node:
    """Processes of one node, their reports, and the loop in which they report."""

    def __init__(self, folder: Path, python: str = sys.executable) -> None:
        self.forked: list[SlotProcess] = []
        self.dead: list[tuple[SlotProcess, int, int]] = []
        self._loop = EventLoop()
        self._slots: list[SlotProcess] = []
        config = NodeConfig(
            pool="p",
            node=0,
            folder=str(folder),
            slots=1,
            python=python,
            path=tuple(sys.path),
            cwd=str(folder),
            env=tuple(os.environ.items()),
        )
        self.processes = Processes(
            self._loop, config, on_forked=self.forked.append, on_dead=lambda *death: self.dead.append(death)
        )

    def fork(self) -> SlotProcess:
        slot = make_slot(len(self._slots))
        self._slots.append(slot)
        self.processes.fork(slot, (), b"")
        return slot

    def run_until(self, is_reached: Callable[[], object]) -> None:
        """Run the loop. An exception of a callback ends this call without stopping the loop for good."""
        deadline = time.monotonic() + LIMIT_S

        def look() -> None:
            if is_reached():
                raise Reached
            assert time.monotonic() < deadline
            self._loop.call_later(0.01, look)

        self._loop.call_later(0.0, look)
        with contextlib.suppress(Reached):
            self._loop.run()

    def close(self) -> None:
        self.processes.close()
        for slot in self._slots:
            slot.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    node.close()


def test_a_slot_has_its_process_once_the_zygote_reports_it(node: Node) -> None:
    slot = node.fork()
    assert slot.pid is None
    node.run_until(lambda: node.forked)
    assert node.forked == [slot]
    assert slot.pid is not None
    assert start_time(slot.pid)


def test_a_killed_process_is_reported_with_its_signal(node: Node) -> None:
    slot = node.fork()
    node.run_until(lambda: node.forked)
    node.processes.kill(slot)
    node.run_until(lambda: node.dead)
    assert node.dead == [(slot, slot.pid, -signal.SIGKILL)]


def test_a_slot_that_is_killed_before_it_has_a_process_is_dead_at_once(node: Node) -> None:
    slot = node.fork()
    node.processes.kill(slot)
    assert node.dead == [(slot, 0, -signal.SIGKILL)]


def test_the_process_of_an_abandoned_slot_is_killed_when_it_comes(node: Node) -> None:
    given_up, kept = node.fork(), node.fork()
    node.processes.kill(given_up)
    given_up.is_dead = True  # as the listener of a death marks it
    node.run_until(lambda: node.forked)
    assert node.forked == [kept]
    assert given_up.pid is None


def test_the_slots_of_a_zygote_that_dies_are_dead_and_the_next_gets_another(node: Node) -> None:
    first, second = node.fork(), node.fork()
    node.run_until(lambda: len(node.forked) == 2)
    assert first.pid is not None
    os.kill(parent_of(first.pid), signal.SIGKILL)
    node.run_until(lambda: len(node.dead) == 2)
    assert {slot.number for slot, _, _ in node.dead} == {first.number, second.number}
    assert {code for _, _, code in node.dead} == {-signal.SIGKILL}
    third = node.fork()
    node.run_until(lambda: third in node.forked)


def test_a_process_that_cannot_be_made_is_reported_with_the_reason(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    node = Node(tmp_path, python="/nowhere")
    slot = node.fork()
    assert node.dead == [(slot, 0, 1)]
    assert "/nowhere" in slot.failure
    assert "cannot start a process" in capfd.readouterr().err
    node.close()


def parent_of(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[1])
