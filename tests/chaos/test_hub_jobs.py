"""Random kills of all that a job of the hub is made of: hub, runner, agent, and the process of the call.

`make chaos SEED=7 SECONDS=600` runs one schedule for as long as you like.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from skyward import hub
from skyward.errors import HubError
from tests.chaos.load import processes_with
from tests.chaos.schedule import Fault, Injector, Struck, plan, seconds, seeds
from tests.chaos.work import LINES, work
from tests.few_modules import few_modules
from tests.hub.jobs.hub_process import HubProcess
from tests.waiting import until

WEIGHTS = {
    "kill hub": 2,
    "kill runner": 3,
    "end runner": 1,
    "pause runner": 1,
    "kill agent": 2,
    "kill call": 2,
}
COMMANDS = {"runner": "skyward.hub.runner", "agent": "skyward.node.agent"}
SECONDS = 40.0
PAUSE_S = 1.5
OPEN_JOBS = 5
END_S = 240.0
"""No job may stay without an end for longer once the faults are over."""
RETRIES = 1000  # a killed process of a call spends one


@dataclass(frozen=True, kw_only=True)
class Expected:
    """A submitted job, and whether its call fails and its user cancels it."""

    job: hub.Job[str]
    name: str
    fails: bool
    is_cancelled: bool


class JobFaults:
    """Faults that strike a hub and its jobs."""

    def __init__(self, process: HubProcess, folder: Path, marker: str, seed: int) -> None:
        self._process, self._folder, self._marker = process, folder, marker
        self._random = random.Random(seed)

    def __call__(self, fault: Fault, _struck: Struck) -> None:
        match fault.kind.split():
            case ["kill", "hub"]:
                self._process.kill()
                time.sleep(self._random.uniform(0, 1.0))
                self._process.start()
            case ["kill", "call"]:
                self._send(self._calls(), signal.SIGKILL)
            case ["pause", part]:
                pid = self._send(self._running(part), signal.SIGSTOP)
                time.sleep(1.0)
                self._send([pid] if pid else [], signal.SIGCONT)
            case [verb, part]:
                self._send(self._running(part), signal.SIGKILL if verb == "kill" else signal.SIGTERM)

    def _running(self, part: str) -> list[int]:
        return sorted(pid for pid, command in marked(self._marker) if COMMANDS[part] in command)

    def _calls(self) -> list[int]:
        began = {int(line) for path in self._folder.glob("*.runs") for line in path.read_text().split()}
        return sorted(pid for pid, _ in marked(self._marker) if pid in began)

    def _send(self, pids: list[int], number: signal.Signals) -> int | None:
        """Send a signal to one of these processes. Return it, or None if there is none."""
        if not pids:
            return None
        pid = self._random.choice(pids)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        return pid


def marked(marker: str) -> Iterator[tuple[int, str]]:
    """Yield the processes whose environment holds the marker, with their command lines."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if marker.encode() in Path(f"/proc/{name}/environ").read_bytes() and int(name) != os.getpid():
                yield int(name), Path(f"/proc/{name}/cmdline").read_text().replace("\0", " ")


def submit(folder: Path, name: str, rng: random.Random) -> Expected:
    """Hand a job in, whether or not the hub lives at this moment."""
    fails, is_cancelled = rng.random() < 0.2, rng.random() < 0.1
    call = work(str(folder), name, rng.uniform(0.1, 1.5), fails)
    deadline = time.monotonic() + END_S
    while True:
        try:
            job = hub.submit(call, name=name, key=name, retries=0 if fails else RETRIES)
            return Expected(job=job, name=name, fails=fails, is_cancelled=is_cancelled)
        except HubError:
            assert time.monotonic() < deadline, "no hub takes the job"
            time.sleep(0.2)


def is_over(job: hub.Job[str]) -> bool:
    try:
        return job.status in ("completed", "failed", "cancelled", "timed_out")
    except HubError:  # the hub is being replaced
        return False


def cancel(job: hub.Job[str]) -> None:
    while not is_over(job):
        with contextlib.suppress(HubError):
            job.cancel()
            return
        time.sleep(0.2)


def check(expected: Expected, folder: Path) -> Iterator[str]:
    """Yield what is wrong about the end of a job."""
    job, name = expected.job, expected.name
    said = f"{name}: {job.status}, attempts {[attempt.end for attempt in job.attempts]}"
    if Path(folder, f"{name}.overlap").exists():
        yield f"{said}: two runs at once"
    allowed = {"failed"} if expected.fails else {"completed"}
    if job.status not in (allowed | {"cancelled"} if expected.is_cancelled else allowed):
        yield f"{said}: should be {allowed}; {job.exception(1) if job.status == 'failed' else ''}"
    if job.status == "completed":
        if job.result(1) != name:
            yield f"{said}: the value is {job.result(1)!r}"
        printed = [line for line in job.logs(follow=False) if line.startswith(name)]
        if printed[-LINES:] != [f"{name} line {number}" for number in range(LINES)]:
            yield f"{said}: printed {printed}"
        if not Path(folder, f"{name}.runs").exists():
            yield f"{said}: never ran"


@pytest.fixture
def temporary() -> Iterator[Path]:
    """Return a folder with a short path, because the addresses of sockets have at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="sky", dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.parametrize("seed", seeds([1]))
@pytest.mark.timeout(0)  # each part has its own limit
def test_every_job_ends_as_it_should_and_nothing_is_left_whatever_dies(
    seed: int, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = f"SKYWARD_CHAOS={uuid.uuid4().hex}"
    monkeypatch.setenv(*marker.split("="))
    monkeypatch.setenv("TMPDIR", str(temporary))  # `skyward gc` would find the folders of other tests' pools
    duration_s, rng = seconds(SECONDS), random.Random(seed)
    faults = plan(seed, weights=WEIGHTS, nodes=1, length=int(duration_s / PAUSE_S), pause_s=PAUSE_S)
    with few_modules(tmp_path / "config"), HubProcess(tmp_path / "hub") as process:
        monkeypatch.setenv("SKYWARD_HUB_URL", process.url)
        monkeypatch.setenv("SKYWARD_HUB_TOKEN", process.token)
        hub.disconnect()
        stop = threading.Event()
        injector = Injector(faults, JobFaults(process, tmp_path, marker, seed), stop)
        injector.start()
        submitted: list[Expected] = []
        still_open: list[Expected] = []  # to ask for each job that has ever been there keeps a core busy
        while injector.is_alive():
            still_open = [expected for expected in still_open if not is_over(expected.job)]
            if len(still_open) < OPEN_JOBS:
                submitted.append(submit(tmp_path, f"job{len(submitted)}", rng))
                still_open.append(submitted[-1])
                if submitted[-1].is_cancelled:
                    time.sleep(rng.uniform(0, 2))
                    cancel(submitted[-1].job)
            time.sleep(0.3)
        assert injector.error is None, injector.error
        try:
            for expected in submitted:
                until(lambda job=expected.job: is_over(job), END_S)  # type: ignore[misc]
        finally:
            states = {expected.name: expected.job.why_waiting for expected in submitted if not is_over(expected.job)}
            print(f"seed {seed}: {len(injector.struck.faults)} faults, {len(submitted)} jobs; open: {states}")
        wrong = [problem for expected in submitted for problem in check(expected, tmp_path)]
        assert not wrong, "\n".join([*wrong, "The faults were:", *injector.struck.faults])
        process.until_clean()
    until(lambda: not processes_with(marker), 60)
    garbage = subprocess.run([sys.executable, "-m", "skyward", "gc"], capture_output=True, text=True, check=True)
    assert "removed" not in garbage.stdout, garbage.stdout
