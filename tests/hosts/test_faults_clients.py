"""The client dies at any moment, with and without its keeper: nothing of it stays anywhere."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.hosts.base import clock_library
from tests.hosts.bed import ROOT
from tests.hosts.faults import EPSILON_S, Place, client_processes, nothing_runs_on, pids
from tests.waiting import until

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(240)]

Places = Callable[[int], Place]

PERSIST_S = 20.0
"""How long OpenSSH's master waits for the next user after the last."""

PROGRAM = """
import os, subprocess, sys, time
import skyward as sky
from tests.engines import is_moving
from tests.hosts.meeting import Meeting
from skyward.integrations.base import integrate

hosts, config, index, lease_s, what = sys.argv[1:]

def say(text):
    os.write(1, f"{text}\\n".encode())  # whole lines, from whichever thread

def told(event):
    say(f"{type(event).__name__} {getattr(event, 'phase', '')}")

def hang():
    # Out of the task's session, its group and its output: only its ancestors tell whose it is.
    subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=subprocess.DEVNULL)
    print("running", flush=True)
    time.sleep(600)

def slow(x):
    if not x:
        print("running", flush=True)
    time.sleep(0.05)
    return x

def endless(_):
    while True:
        yield bytes(100_000)

def deaf():
    import signal
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    hang()

if __name__ == "__main__":
    say(f"clock {time.time()}")
    with sky.ComputePool(
        provider=sky.SSH(hosts=hosts.split(), config_file=config, lease_s=float(lease_s)),
        nodes=(1, 2) if what == "move" else 2, engine="direct", image=sky.Image(pip_index_url=index),
        on_event=told, cancel_grace_s=60,
        logs=lambda line: say(line.text.strip()),
    ) as pool:
        if what == "call":
            sky.compute(hang)() @ pool
        elif what == "map":
            pool.map(slow, range(100_000))
        elif what == "generator":
            for number, _ in enumerate(sky.compute(endless)(0) >> pool):
                if number == 20:
                    say("running")
        elif what == "gang":
            sky.compute(integrate(hang, Meeting()))() @ pool
        elif what == "move":
            pool.scale(2)
            kept = [sky.compute(bytes)((1 << 25) + n).keep() >> pool.node(n) for n in range(2)]
            pool.scale(1)
            while not is_moving(pool, kept[1]):
                time.sleep(0.01)
            say("running")
            time.sleep(600)
        elif what == "closing":
            future = sky.compute(deaf)() > pool
            while not future.running():
                if future.done():
                    future.result()
                time.sleep(0.01)
            sky.compute(abs)(1) >> pool
            say("running")
        else:
            say("running")
            time.sleep(600)
"""


class Client:
    """A separate program that has a pool on hosts."""

    def __init__(self, place: Place, folder: Path, what: str, *, lease_s: float, clock_s: float = 0.0) -> None:
        script = folder / "client.py"
        script.write_text(PROGRAM)
        names = " ".join(host.name for host in place.hosts)
        self.process = subprocess.Popen(
            [sys.executable, script, names, place.bed.ssh_config, place.index.simple, str(lease_s), what],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(ROOT), **(_clock(clock_s) if clock_s else {})},
            start_new_session=True,
        )

    def says(self, wanted: str) -> str:
        """Wait for a line that begins so. Returns its rest."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(wanted):
                return line.removeprefix(wanted).strip()
        pytest.fail(f"it ended and never said {wanted!r}")

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _clock(offset_s: float) -> dict[str, str]:
    """Return variables that make the time of day wrong for a program and its children."""
    return {"LD_PRELOAD": str(clock_library()), "SKYWARD_TESTS_CLOCK_S": f"{offset_s:.0f}"}


@pytest.fixture
def client_of(runtime: Path) -> Iterator[Callable[..., Client]]:
    """Return a function `client_of(place, what, lease_s=...)`, which starts one."""
    made: list[Client] = []

    def give(place: Place, what: str, **options: float) -> Client:
        made.append(Client(place, runtime, what, **options))
        return made[-1]

    yield give
    for client in made:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(client.process.pid, signal.SIGKILL)
        client.process.wait()
        assert client.process.stdout is not None
        client.process.stdout.close()
    for pid in [pid for found in client_processes(runtime).values() for pid in found]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


NewClient = Callable[..., Client]

MOMENTS = {
    "connecting": ("idle", "PhaseStarted connect"),
    "probing": ("idle", "PhaseStarted probe"),
    "bootstrapping": ("idle", "PhaseStarted code"),
    "starting agents": ("idle", "PhaseStarted agent"),
    "idle": ("idle", "running"),
    "a call": ("call", "running"),
    "a map": ("map", "running"),
    "a generator": ("generator", "running"),
    "a gang": ("gang", "running"),
    "closing": ("closing", "running"),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_client_leaves_nothing_on_hosts(
    place: Places, client_of: NewClient, runtime: Path, moment: str
) -> None:
    here = place(2)
    what, said = MOMENTS[moment]
    client = client_of(here, what, lease_s=5.0)
    client.says(said)
    client.kill()
    # The keeper ends the nodes that it knows. A node that was not reported to it yet has its lease.
    nothing_runs_on(here.hosts, 5.0 + EPSILON_S)
    if moment == "a call":
        until(lambda: not any(client_processes(runtime).values()), PERSIST_S + EPSILON_S)


def test_a_client_that_is_killed_while_a_value_moves_leaves_nothing_on_hosts(
    place: Places, client_of: NewClient
) -> None:
    here = place(2)
    one, other = here.hosts
    other.hide_from(one.address)  # the two try for seconds to reach each other, before the program carries the value
    try:
        client = client_of(here, "move", lease_s=5.0)
        client.says("running")
        client.kill()
        nothing_runs_on(here.hosts, 5.0 + EPSILON_S)
    finally:
        other.show_to_all()


@pytest.mark.parametrize("offset_s", [-400 * 86400.0, 3600.0], ids=["a year ago", "in an hour"])
def test_a_client_with_a_wrong_clock_starts_keeps_and_ends_its_nodes(
    place: Places, client_of: NewClient, offset_s: float
) -> None:
    here = place(2)
    client = client_of(here, "idle", lease_s=6.0, clock_s=offset_s)
    assert abs(float(client.says("clock ")) - time.time() - offset_s) < 600
    client.says("running")
    agents = [pids(host, "agent") for host in here.hosts]
    assert all(agents)
    time.sleep(9.0)  # beyond the lease
    assert [pids(host, "agent") for host in here.hosts] == agents
    os.kill(client.process.pid, signal.SIGINT)
    nothing_runs_on(here.hosts)


def test_nodes_of_a_killed_client_end_long_before_their_lease(place: Places, client_of: NewClient) -> None:
    here = place(2)
    client = client_of(here, "call", lease_s=600.0)
    client.says("running")
    client.kill()
    nothing_runs_on(here.hosts)


@pytest.mark.parametrize("what", ["call", "gang"])
def test_nodes_end_by_their_lease_when_the_keeper_is_killed_too(
    place: Places, client_of: NewClient, runtime: Path, what: str
) -> None:
    here = place(2)
    client = client_of(here, what, lease_s=4.0)
    client.says("running")
    (keeper,) = client_processes(runtime)["keeper"]
    began = time.monotonic()
    os.kill(keeper, signal.SIGSTOP)  # else it would do its work in an instant
    client.kill()
    os.kill(keeper, signal.SIGKILL)
    nothing_runs_on(here.hosts, 4.0 + EPSILON_S)
    assert time.monotonic() - began > 1.0, "the lease cannot have ended them"


def test_nodes_end_by_their_lease_when_the_client_is_killed_behind_a_cut_link(
    place: Places, client_of: NewClient, runtime: Path
) -> None:
    here = place(2)
    client = client_of(here, "call", lease_s=4.0)
    client.says("running")
    with here.hosts[0].link_cut():
        client.kill()
        nothing_runs_on(here.hosts, 4.0 + EPSILON_S)


def test_everything_on_this_side_is_killed_at_once(place: Places, client_of: NewClient, runtime: Path) -> None:
    here = place(2)
    client = client_of(here, "map", lease_s=4.0)
    client.says("running")
    until(lambda: all(client_processes(runtime).values()))
    for pid in [client.process.pid, *(pid for found in client_processes(runtime).values() for pid in found)]:
        with contextlib.suppress(ProcessLookupError):  # a command that was short
            os.kill(pid, signal.SIGSTOP)
    for pid in [client.process.pid, *(pid for found in client_processes(runtime).values() for pid in found)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    nothing_runs_on(here.hosts, 4.0 + EPSILON_S)


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("bootstrapping", signal.SIGINT),
        ("a call", signal.SIGTERM),
        ("a gang", signal.SIGINT),
        ("a gang", signal.SIGHUP),
    ],
)
def test_a_terminated_client_leaves_nothing(
    place: Places, client_of: NewClient, runtime: Path, moment: str, number: signal.Signals
) -> None:
    here = place(2)
    what, said = MOMENTS[moment]
    client = client_of(here, what, lease_s=600.0)
    client.says(said)
    os.kill(client.process.pid, number)
    with contextlib.suppress(subprocess.TimeoutExpired):
        client.process.communicate(timeout=90)
    assert client.process.poll() not in (None, 0)
    nothing_runs_on(here.hosts)
