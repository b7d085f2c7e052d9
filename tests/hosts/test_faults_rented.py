"""Rented machines, and a client that dies, is terminated, or meets the usual faults of clouds."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, wait
from pathlib import Path

import pytest

import skyward as sky
from skyward.errors import HostKeyChanged, NoCapacity, NodeError, Preempted, Unreachable
from skyward.events import Event, NodeReplaced, PhaseStarted, PreemptionNotice
from tests.hosts.bed import ROOT
from tests.hosts.ec2 import Ec2
from tests.hosts.faults import EPSILON_S, client_processes
from tests.hosts.index import PackageIndex
from tests.waiting import until

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(240)]

GONE_S = 60.0
"""Until machines that are told to end are gone, and what was made for them, on a loaded machine."""

PROGRAM = """
import os, sys, time
import skyward as sky

cidr, index, engine = sys.argv[1:]

def say(text):
    os.write(1, f"{text}\\n".encode())

def told(event):
    say(f"{type(event).__name__} {getattr(event, 'phase', '')}")

def hang():
    print("running", flush=True)
    time.sleep(600)

if __name__ == "__main__":
    with sky.ComputePool(
        provider=sky.AWS(instance_types=["m5.large"], client_cidr=cidr, lease_s=60.0),
        nodes=2, allocation="on-demand", engine=engine, image=sky.Image(pip_index_url=index),
        on_event=told, logs=lambda line: say(line.text.strip()),
    ) as pool:
        sky.compute(hang)() @ pool
"""


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the journals of these pools apart from the user's."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(ec2: Ec2, package_index: PackageIndex, runtime: Path) -> Iterator[Start]:
    """Return a function `start(engine)`, which starts a client whose pool has two rented nodes."""
    made: list[subprocess.Popen[str]] = []
    script = runtime / "client.py"
    script.write_text(PROGRAM)

    def give(engine: str = "direct") -> subprocess.Popen[str]:
        made.append(
            subprocess.Popen(
                [sys.executable, script, ec2.client_cidr, package_index.simple, engine],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                text=True,
                cwd=runtime,
                env={**os.environ, "TMPDIR": str(runtime), "PYTHONPATH": str(ROOT)},
                start_new_session=True,
            )
        )
        return made[-1]

    yield give
    for process in made:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
    for pid in [pid for pids in client_processes(runtime).values() for pid in pids]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def says(process: subprocess.Popen[str], wanted: str) -> None:
    """Wait for a line that begins so."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(wanted):
            return
    pytest.fail(f"it ended and never said {wanted!r}")


def wait_for(process: subprocess.Popen[str], limit_s: float) -> int | None:
    """Return its exit code. Its output is read meanwhile, or it could not end."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=limit_s)
    return process.poll()


MOMENTS = {
    "launched": "InstanceLaunched",
    "connecting": "PhaseStarted connect",
    "bootstrapping": "PhaseStarted probe",
    "a call": "running",
}


@pytest.mark.parametrize("moment", ["launched", "bootstrapping", "a call"])
def test_the_keeper_ends_the_machines_of_a_killed_client(ec2: Ec2, start: Start, moment: str) -> None:
    process = start("auto" if moment == "a call" else "direct")
    says(process, MOMENTS[moment])
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    until(lambda: ec2.left() == [], GONE_S)


@pytest.mark.slow
def test_machines_end_by_themselves_when_client_and_keeper_are_killed(ec2: Ec2, start: Start, runtime: Path) -> None:
    process = start("auto")
    says(process, "running")
    (keeper,) = client_processes(runtime)["keeper"]
    os.kill(keeper, signal.SIGSTOP)
    os.kill(process.pid, signal.SIGKILL)
    os.kill(keeper, signal.SIGKILL)
    process.wait()
    assert len(ec2.machines("running")) == 2
    until(lambda: ec2.machines("pending", "running") == [], 60.0 + 2 * EPSILON_S)


@pytest.mark.parametrize(
    ("moment", "signals"),
    [
        ("launched", ("SIGINT", "SIGINT")),
        ("connecting", ("SIGINT",)),
        ("a call", ("SIGINT", "SIGINT", "SIGINT", "SIGINT")),
        ("launched", ("SIGTERM",)),
        ("a call", ("SIGTERM",)),
    ],
)
def test_a_terminated_client_gives_everything_back(
    ec2: Ec2, start: Start, moment: str, signals: tuple[str, ...]
) -> None:
    process = start()
    says(process, MOMENTS[moment])
    for name in signals:
        os.kill(process.pid, signal.Signals[name])
        time.sleep(0.3)  # a hasty user
    assert wait_for(process, GONE_S) not in (None, 0)
    until(lambda: ec2.left() == [], GONE_S)


# A pool of this process ---------------------------------------------------------------------------------------------


def pool_on(ec2: Ec2, index: PackageIndex, **options: object) -> sky.ComputePool:
    arguments: dict[str, object] = {
        "provider": sky.AWS(instance_types=["m5.large"], client_cidr=ec2.client_cidr, lease_s=60.0),
        "nodes": 2,
        "allocation": "on-demand",
        "image": sky.Image(pip_index_url=index.simple),
        "logs": False,
        "engine": "direct",
        **options,
    }
    return sky.ComputePool(**arguments)  # type: ignore[arg-type]


def test_a_machine_that_never_boots_ends_the_start_and_both(
    ec2: Ec2, package_index: PackageIndex, runtime: Path
) -> None:
    ec2.set(boots="never")
    began = time.monotonic()
    with pytest.raises((Unreachable, NodeError)):
        pool_on(ec2, package_index, provision_timeout_s=15.0).start()
    assert time.monotonic() - began < 150
    until(lambda: ec2.left() == [], GONE_S)


def test_a_second_machine_that_cannot_be_reached_ends_the_first_too(
    ec2: Ec2, package_index: PackageIndex, runtime: Path
) -> None:
    ec2.set(ssh_after_s=3.0)

    def cut_second(event: Event) -> None:
        if isinstance(event, PhaseStarted) and event.phase == "connect" and event.node == 1:
            ec2.host(ec2.machines("running")[1].id).cut_link()

    with pytest.raises((Unreachable, NodeError)):
        pool_on(ec2, package_index, provision_timeout_s=12.0, on_event=cut_second).start()
    until(lambda: ec2.left() == [], GONE_S)


def test_a_machine_with_another_host_key_than_on_its_console_is_refused(
    ec2: Ec2, package_index: PackageIndex, runtime: Path
) -> None:
    ec2.set(ssh_after_s=6.0)
    changed: list[str] = []

    def swap(event: Event) -> None:
        if isinstance(event, PhaseStarted) and event.phase == "connect" and not changed:
            changed.append(ec2.machines("running")[0].id)
            ec2.host(changed[0]).change_host_key()

    with pytest.raises(HostKeyChanged):
        pool_on(ec2, package_index, on_event=swap).start()
    assert changed
    until(lambda: ec2.left() == [], GONE_S)


def test_missing_capacity_is_reported_and_leaves_nothing(ec2: Ec2, package_index: PackageIndex, runtime: Path) -> None:
    ec2.has_no_capacity()
    with pytest.raises(NoCapacity, match=r"m5\.large"):
        pool_on(ec2, package_index).start()
    until(lambda: ec2.left() == [], GONE_S)


def test_machines_whose_create_call_had_no_answer_are_found_and_ended(
    ec2: Ec2, package_index: PackageIndex, runtime: Path
) -> None:
    ec2.fail("RunInstances", is_done=True, is_dropped=True, times=1)
    with pool_on(ec2, package_index) as pool:
        assert sky.compute(abs)(-1) @ pool == [1, 1]
        assert len(ec2.machines("running", "pending")) == 2
    until(lambda: ec2.left() == [], GONE_S)


def test_a_machine_with_a_notice_is_relieved_before_it_goes(
    ec2: Ec2, package_index: PackageIndex, runtime: Path
) -> None:
    @sky.compute
    def until_told() -> int:
        deadline = time.monotonic() + 60
        info = sky.instance_info()
        while info is not None and not info.is_preempted and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(1.0)  # a callback that saves a state
        return -1 if info is None or not info.is_preempted else info.node

    @sky.compute
    def whoami() -> int:
        info = sky.instance_info()
        return -1 if info is None else info.node

    seen: list[Event] = []
    with pool_on(ec2, package_index, allocation="spot", on_event=seen.append) as pool:
        name = sky.compute(lambda: os.uname().nodename)() >> pool.node(0)
        (first, second) = [until_told() > pool for _ in range(2)]
        until(lambda: first.running() and second.running())
        (taken,) = [machine for machine in ec2.machines("running") if machine.name == name]
        ec2.interrupt(taken.id, in_s=120.0)
        (told,), (other,) = wait([first, second], 100, FIRST_COMPLETED)
        (notice,) = [event for event in seen if isinstance(event, PreemptionNotice)]
        assert told.result() == notice.node, "the call went on, and knew it"
        assert "terminate" in notice.notice
        other.cancel()
        until(lambda: any(isinstance(event, NodeReplaced) for event in seen), 60)
        until(lambda: taken.id not in {machine.id for machine in ec2.machines("running")}, 60)
        assert len(ec2.machines("running")) == 2
        assert whoami() @ pool == [0, 1]
    until(lambda: ec2.left() == [], GONE_S)


def test_a_reclaimed_machine_is_replaced_its_calls_say_so_and_a_map_is_complete(
    ec2: Ec2, package_index: PackageIndex, runtime: Path
) -> None:
    @sky.compute
    def hang() -> None:
        time.sleep(600)

    @sky.compute(retries=5)
    def slow(x: int) -> int:
        time.sleep(0.02)
        return x

    with pool_on(ec2, package_index, allocation="spot", concurrency=2) as pool:
        hanging = [hang() > pool.node(node) for node in range(2)]
        until(lambda: all(future.running() for future in hanging))
        values = pool.imap(slow, range(1000))
        got = [next(values) for _ in range(20)]
        first = ec2.machines("running")[0]
        ec2.interrupt(first.id, in_s=0.5)
        got.extend(values)
        assert got == list(range(1000))
        (lost,), (other,) = wait(hanging, 100, FIRST_COMPLETED)
        assert isinstance(lost.exception(), Preempted)
        other.cancel()
        assert sky.compute(abs)(-1).with_options(retries=5) @ pool == [1, 1]
        assert first.id not in {machine.id for machine in ec2.machines("running")}
        assert len(ec2.machines("running")) == 2
    until(lambda: ec2.left() == [], GONE_S)
