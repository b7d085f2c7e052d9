"""Real processes that are killed, stopped and interrupted, and the proof that nothing of skyward outlives them.

A `Sandbox` gives a test its own runtime folder and a mark in its environment. Every process that skyward or a task
starts inherits the mark, however it detaches, so /proc shows which of them are alive.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
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

from tests.waiting import until

MARK = "SKYWARD_TEST_MARK"
ROOT = Path(__file__).parent.parent.parent
GONE_LIMIT_S = 90.0
PREAMBLE = """
import faulthandler, os, signal, subprocess, sys, threading, time
from pathlib import Path
import skyward as sky

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with it ignored
faulthandler.register(signal.SIGUSR1)

here = Path(sys.argv[1])

def say(word):
    # One write, also without a buffer: a fork says its word into the same pipe.
    print(word + "\\n", end="", flush=True)

@sky.compute
def hang(name="begun"):
    (here / name).touch()
    time.sleep(600)
    (here / "finished").touch()

@sky.compute
def pid():
    return os.getpid()

@sky.compute
def hang_with_detached_children():
    for _ in range(2):
        subprocess.Popen(["sleep", "600"], start_new_session=True)
    (here / "begun").touch()
    time.sleep(600)
"""


@dataclass(frozen=True)
class Process:
    pid: int
    parent: int
    command: str


def _processes_with(mark: str) -> list[Process]:
    wanted = f"{MARK}={mark}".encode()
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if wanted not in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                continue
            command = Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            stat = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            if stat[0] not in "ZX":
                found.append(Process(int(name), int(stat[1]), command))
    return found


class Client:
    """A script in its own process that uses skyward. Its output is read line by line."""

    def __init__(self, process: subprocess.Popen[str], errors: Path) -> None:
        self.process = process
        self.pid = process.pid
        self._errors = errors
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    @property
    def errors(self) -> str:
        return self._errors.read_text()

    def state(self) -> str:
        """Describe for a failing test how the client ended, or where its threads are."""
        if self.process.poll() is None:
            self.send(signal.SIGUSR1)
            time.sleep(0.5)
        return f"client {self.pid}, exit code {self.process.returncode}, its stderr:\n{self.errors}"

    def says(self, word: str, limit_s: float = 60.0) -> None:
        """Wait until the client prints this very line."""
        deadline = time.monotonic() + limit_s
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                pytest.fail(f"the client did not say {word!r} within {limit_s:.0f} s; {self.state()}")
            if line == word:
                return
            if line is None:
                pytest.fail(f"the client ended and never said {word!r}; its stderr:\n{self.errors}")

    def ends(self, limit_s: float = 60.0) -> tuple[int, list[str]]:
        """Wait for the client's end. Returns its exit code and the unread lines."""
        try:
            code = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"it still runs after {limit_s:.0f} s: {self.state()}")
        self._reader.join()  # it ends with the last process that holds the pipe
        lines = []
        while (line := self._lines.get()) is not None:
            lines.append(line)
        return code, lines

    def send(self, number: signal.Signals, *, to_group: bool = False) -> None:
        if to_group:
            os.killpg(self.pid, number)
        else:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        self.process.wait()


class Sandbox:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.clients: list[Client] = []

    @property
    def environment(self) -> dict[str, str]:
        # Coverage and similar tools must not start in processes that are about to be killed.
        return {**os.environ, "TMPDIR": str(self.folder), MARK: self.mark, "PYTHONPATH": str(ROOT)}

    def client(self, script: str) -> Client:
        """Run `script` behind the preamble, as the leader of a process group."""
        path = self.folder / f"client{len(self.clients)}.py"
        path.write_text(PREAMBLE + script)
        errors = path.with_suffix(".stderr")
        with errors.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, str(path), str(self.folder)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=file,
                env=self.environment,
                text=True,
                start_new_session=True,
            )
        client = Client(process, errors)
        self.clients.append(client)
        return client

    def exists(self, name: str) -> bool:
        return (self.folder / name).exists()

    def waits_for(self, name: str) -> None:
        deadline = time.monotonic() + 60
        while not self.exists(name):
            has_ended = any(client.process.poll() is not None for client in self.clients)
            if (has_ended and not self.exists(name)) or time.monotonic() > deadline:
                states = "\n".join(client.state() for client in self.clients)
                pytest.fail(f"the file {name!r} was not made; {states}\nalive: {self.processes()}")
            time.sleep(0.01)

    def waits_for_file(self, name: str) -> None:
        """Wait until this file exists, which a process writes after the death of the client."""
        deadline = time.monotonic() + 60
        while not self.exists(name):
            if time.monotonic() > deadline:
                pytest.fail(f"the file {name!r} was not made; alive: {self.processes()}")
            time.sleep(0.01)

    def processes(self) -> list[Process]:
        return _processes_with(self.mark)

    def pids(self, role: str) -> list[int]:
        """Return the pids of our processes of one kind: keeper, standby, watchdog, agent, zygote, slot."""
        alive = self.processes()
        nodes = {p.pid: p for p in alive if "skyward.node.agent.main" in p.command}
        # The first zygote of a local node is forked from its agent, and so are the slots.
        workers = {**nodes, **{p.pid: p for p in alive if "skyward.node.slot.zygote" in p.command}}
        standbys = [p for p in nodes.values() if p.parent not in nodes]
        watchdogs = [p for p in nodes.values() if p.parent in {s.pid for s in standbys}]
        agents = [p for p in nodes.values() if p.parent in {w.pid for w in watchdogs}]
        zygotes = [p for p in workers.values() if p.parent in {a.pid for a in agents}]
        slots = [p for p in workers.values() if p.parent in {z.pid for z in zygotes}]
        started = {p.pid: p for p in alive if "skyward.engine.keeper_process" in p.command}
        # The keeper starts commands, and a child looks like its parent until it runs its own program.
        keepers = [p for p in started.values() if p.parent not in started]
        of_role = {"keeper": keepers, "watchdog": watchdogs, "standby": standbys, "agent": agents}
        found = {**of_role, "zygote": zygotes, "slot": slots}[role]
        return sorted(p.pid for p in found)

    def kills(self, role: str) -> list[int]:
        """Kill all processes of one kind with SIGKILL. Returns their pids."""
        until(lambda: self.pids(role))  # a process that has just begun to run its program has no environment yet
        pids = self.pids(role)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        return pids

    def runtime_entries(self) -> list[str]:
        folder = self.folder / f"skyward-{os.getuid()}"
        return sorted(os.listdir(folder)) if folder.exists() else []

    def proves_nothing_is_left(self, *, but: int = 0) -> None:
        """Wait until no process except `but` has the mark and the runtime folder is empty, for 90 seconds at most."""
        deadline = time.monotonic() + GONE_LIMIT_S
        while (alive := [p for p in self.processes() if p.pid != but]) or self.runtime_entries():
            if time.monotonic() > deadline:
                pytest.fail(f"after {GONE_LIMIT_S:.0f} s there are still {alive} and {self.runtime_entries()}")
            time.sleep(0.02)

    def clean(self) -> None:
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        for client in self.clients:
            client.process.wait()
            assert client.process.stdout is not None
            client.process.stdout.close()
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    """Sandbox for clients in their own processes."""
    made = Sandbox(Path(tempfile.mkdtemp(prefix="sky-", dir="/tmp")))  # a socket's path must be short
    try:
        yield made
    finally:
        made.clean()


@pytest.fixture
def inside(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    """Sandbox for pools of this very process. All pools share its keeper, which may have no mark."""
    monkeypatch.setenv(MARK, sandbox.mark)
    monkeypatch.setenv("TMPDIR", str(sandbox.folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return sandbox
