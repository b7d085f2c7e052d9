"""The watchdog tells a client or keeper that is gone from a machine that stood still."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skyward.node.agent import watchdog

STANDBY = 7


class Machine:
    """Machine whose time passes only in the watchdog's waits, by the amounts in `waits`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, waits: list[float]) -> None:
        self.now = 100.0
        self.killed: list[int] = []
        self.parent = STANDBY
        self._waits = waits
        clock = SimpleNamespace(monotonic=lambda: self.now)
        system = SimpleNamespace(
            WNOHANG=os.WNOHANG,
            waitpid=lambda pid, flags: (0, 0),
            kill=self._kill,
            getppid=lambda: self.parent,
            write=os.write,
        )
        monkeypatch.setattr(watchdog, "time", clock)
        monkeypatch.setattr(watchdog, "os", system)
        # The real watchdog sleeps in a system call, by the real clock.
        monkeypatch.setattr(watchdog, "_wait_for_child", self._wait)

    def _kill(self, pid: int, number: int) -> None:
        if number:
            self.killed.append(pid)
        else:  # it only asks whether there is such a process
            os.kill(pid, number)

    def _wait(self, limit_s: float) -> None:
        if not self._waits:
            raise KeyboardInterrupt
        self.now += self._waits.pop(0)


def watch(lease: watchdog.Lease) -> Any:
    try:
        return watchdog._watch(1, lease, STANDBY)  # `guard` around it forks, and this clock is not in the child
    except KeyboardInterrupt:
        return None


def test_a_lease_that_ran_out_while_the_machine_stood_still_is_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, [0.25, 60.0, 0.25])
    assert watch(watchdog.Lease(2.0)) is None
    assert not machine.killed


def test_a_lease_that_runs_out_while_the_watchdog_runs_ends_the_agent(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    machine = Machine(monkeypatch, [60.0] + [0.25] * 20)
    assert watch(watchdog.Lease(2.0)) == 3
    assert machine.killed == [1]
    assert capfd.readouterr().err == "lease_s=2: nobody renewed it in time; set a longer one\n"


class Started:
    """A process that reads our pipe for its life, as a client reads the output of its nodes."""

    def __init__(self) -> None:
        reader, self.output = os.pipe()
        self._process = subprocess.Popen(["sleep", "600"], stdin=reader)
        os.close(reader)
        self.starter = watchdog.Starter(self._process.pid, self.output)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture(params=["pidfd", "pid"])
def started(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    if request.param == "pid":  # macOS, and Linux before 5.3
        monkeypatch.delattr(os, "pidfd_open")
    made = Started()
    monkeypatch.undo()
    yield made
    made.end()
    os.close(made.output)


def test_the_life_of_the_starter_renews_the_lease(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = watchdog.Lease(2.0, starter=started.starter)
    assert lease.needs_starter
    machine = Machine(monkeypatch, [0.25] * 20)
    assert watch(lease) is None
    started.end()
    assert started.starter.is_gone
    machine = Machine(monkeypatch, [0.25] * 40)
    assert watch(lease) == 3
    assert machine.killed == [1]


def test_the_starter_does_not_count_any_longer_once_a_keeper_made_contact(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = watchdog.Lease(2.0, starter=started.starter)
    lease.contact()
    assert not lease.needs_starter
    machine = Machine(monkeypatch, [60.0] + [0.25] * 20)
    assert watch(lease) == 3
    assert machine.killed == [1]


def test_a_starter_is_gone_when_it_closes_the_pipe_or_dies_while_a_child_holds_it() -> None:
    reader, output = os.pipe()
    try:
        mine = watchdog.Starter(os.getpid(), output)
        child = subprocess.Popen(["sleep", "600"])
        other = watchdog.Starter(child.pid, output)
        assert (mine.is_gone, other.is_gone) == (False, False)
        child.kill()
        child.wait()
        assert (mine.is_gone, other.is_gone) == (False, True)
        assert watchdog.Starter(child.pid, output).is_gone, "it died before it could be watched"
        os.close(reader)
        assert mine.is_gone
    finally:
        os.close(output)


def test_a_standby_that_is_gone_ends_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, [0.25])
    machine.parent = 1
    assert watch(watchdog.Lease(2.0)) == 3
    assert machine.killed == [1]


def test_a_node_takes_the_folders_of_ray_beside_it_along(tmp_path: Path) -> None:
    node, other = tmp_path / "train-1f2e3d4c-0-e5c782", tmp_path / "train-1f2e3d4c-1-e5c783"
    for folder in (node, other):
        folder.mkdir()
        tmp_path.joinpath(watchdog.beside(str(folder)) + "ab").mkdir()
    watchdog.remove_node(str(node))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ray-e5c783-ab", other.name]


@pytest.mark.parametrize(("restarts", "code", "starts"), [(True, 0, 3), (False, 1, 1)])
def test_a_process_that_fails_is_started_again_if_it_can_be(
    tmp_path: Path, restarts: bool, code: int, starts: int
) -> None:
    """A head can, because it has a journal."""
    path = tmp_path / "starts"
    text = f"""
import sys
from skyward.node.agent.watchdog import Lease, guard

def run():
    with open({str(path)!r}, "a+") as file:
        file.write("x")
        file.seek(0)
        if len(file.read()) < 3:
            raise ValueError("a mistake")
    return 0

sys.exit(guard(run, Lease(60.0), {str(tmp_path / "node-0-1a")!r}, restarts={restarts}))
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, path.read_text()) == (code, "x" * starts)
    assert "ValueError: a mistake" in done.stderr
