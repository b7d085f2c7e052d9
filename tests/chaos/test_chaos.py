"""Random kills and pauses under every kind of call, on pools of this machine.

For hosts, see tests/hosts/test_chaos.py.

`make chaos SEED=7 SECONDS=600` runs one schedule for as long as you like.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

import skyward as sky
from skyward.core.process import processes_below
from skyward.errors import UsageError
from skyward.testing import Faults
from tests.chaos.load import Load, count, processes_with
from tests.chaos.schedule import Fault, Injector, Struck, plan, seconds, seeds
from tests.waiting import until

NODES = 2
WEIGHTS = {"kill slot": 6, "kill zygote": 2, "kill agent": 2, "kill watchdog": 2, "kill newborn": 1, "pause agent": 2}
"""A pool replaces at most 16 nodes, so faults that end one are rarer and a schedule is short."""
ROUND_S = 9.0
PAUSE_S = 0.6


class LocalFaults:
    """Faults that are carried out on a pool of this machine."""

    def __init__(self, pool: sky.ComputePool) -> None:
        self._faults = Faults(pool)

    def __call__(self, fault: Fault, struck: Struck) -> None:
        # The node is being replaced, or the process has just ended.
        with contextlib.suppress(UsageError, ProcessLookupError, FileNotFoundError):
            agent = self._faults.agent(fault.node)
            slots = self._faults.slots(fault.node)
            self._strike(fault.kind, agent, slots, struck)

    def _strike(self, kind: str, agent: int, slots: list[int], struck: Struck) -> None:
        match kind:
            case "kill slot" if slots:
                struck.slots += 1
                os.kill(slots[len(slots) // 2], signal.SIGKILL)
            case "kill zygote" if slots:
                struck.slots += len(slots)
                os.kill(parent_of(slots[0]), signal.SIGKILL)
            case "kill agent" | "kill newborn":
                struck.nodes += 1
                before = set(processes_below(os.getpid()))
                os.kill(agent, signal.SIGKILL)
                if kind == "kill newborn":  # its replacement, too, while that starts
                    kill_first(lambda: [pid for pid in processes_below(os.getpid()) if pid not in before])
            case "kill watchdog":
                struck.nodes += 1
                os.kill(parent_of(agent), signal.SIGKILL)
            case "pause agent":
                os.kill(agent, signal.SIGSTOP)
                time.sleep(0.5)
                os.kill(agent, signal.SIGCONT)


def parent_of(pid: int) -> int:
    text = Path(f"/proc/{pid}/stat").read_text()
    return int(text.rpartition(")")[2].split()[1])


def kill_first(newborn: Callable[[], list[int]]) -> None:
    """Kill the first process that appears within two seconds, if one does."""
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        for pid in newborn():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended: a child of a task
                if "skyward.node.agent.main" in Path(f"/proc/{pid}/cmdline").read_text():
                    os.kill(pid, signal.SIGKILL)
                    return
        time.sleep(0.002)


def nothing_is_left(marker: str) -> None:
    """Wait until no process of the pool runs. End and report the ones that do."""
    try:
        until(lambda: not processes_with(marker), within_s=60)
    except AssertionError:
        left = processes_with(marker)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        raise AssertionError(f"still running after the pool was closed: {left}") from None


def run_round(seed: int, ledger: Path, marker: str) -> str:
    faults = plan(seed, weights=WEIGHTS, nodes=NODES, length=int(ROUND_S / PAUSE_S), pause_s=PAUSE_S)
    stop = threading.Event()
    with sky.ComputePool(sky.Local(), nodes=NODES, concurrency=2, logs=False) as pool:
        load = Load(pool, str(ledger), seed)
        injector = Injector(faults, LocalFaults(pool), stop)
        injector.start()
        injector.join(ROUND_S + 30)
        stop.set()
        load.finish()
        assert injector.error is None, injector.error
        closing = time.monotonic()
    assert time.monotonic() - closing < 90, "the pool took too long to close"
    load.books.check(count([ledger.read_text()]), injector.struck)
    nothing_is_left(marker)
    return f"seed {seed}: {len(injector.struck.faults)} faults, {load.books}"


@pytest.mark.parametrize("seed", seeds([1, 2]))
@pytest.mark.timeout(0)  # each round has its own limits
def test_nothing_acknowledged_is_lost_doubled_or_left_whatever_dies(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = f"SKYWARD_CHAOS={uuid.uuid4().hex}"
    monkeypatch.setenv(*marker.split("="))
    deadline = time.monotonic() + seconds(ROUND_S)
    for number in range(10_000):
        print(run_round(seed + 1000 * number, tmp_path / f"ledger-{number}", marker))
        if time.monotonic() >= deadline:
            return
