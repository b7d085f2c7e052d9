"""Run tests in processes side by side: `python -m tests promises`, `python -m tests rest`.

`promises` are the tests of `make test` (see promises.py), `rest` are all others, for `make test-all`. With any other
arguments, run `python -m pytest` with them.

Each group is a pytest process; `make lint` runs beside the promises. Tests of hosts mostly wait: for machines to boot,
for cut links, for leases to expire. So they run beside the others, in three groups: each has a bed of its own
(tests/hosts/bed.py). All other tests need a core, and frameworks mostly to be imported.

A limited number of groups runs at once. The others wait in the order of their part, so the cores stay busy until the
last groups end. The last lines tell how long each group took.

Each test has a time limit (pyproject.toml). One that hangs all the same ends its group: the stacks of its threads are
in the group's output, and all other groups go on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO
from xml.etree import ElementTree

from tests import promises

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / ".make" / "tests"

Groups = dict[str, tuple[str, ...]]

# Where two groups name a folder and something in it, the tests belong to the group that names more of their path.
PARTS: dict[str, Groups] = {
    "promises": {
        "pools": promises.POOLS,
        "engine": promises.ENGINE,
        "commands": promises.COMMANDS,
        "kept": promises.KEPT,
        "frameworks": promises.FRAMEWORKS,
        "changes": promises.CHANGES,
        "hub": promises.HUB,
    },
    # Groups begin in this order. Groups that another one waits for come first, then the longest: two cores would idle
    # beside a long one that began late. The last ones are short, so that all end within a minute. Of the three that
    # boot hosts, one begins later: beside two others, all three waited, and the cores idled.
    "rest": {
        "rented": tuple(
            f"tests/hosts/test_{name}.py" for name in ("ec2", "detach_rented", "faults_rented", "main_job", "pools")
        ),
        "hosts": ("tests/hosts", "tests/bootstrap/test_on_hosts.py"),
        "training": ("tests/training",),
        "hub": ("tests/hub",),
        "core": ("tests",),
        "faults": tuple(
            f"tests/hosts/test_faults_{name}.py" for name in ("clients", "links", "machines", "processes", "starts")
        ),
        "examples": ("tests/test_examples.py",),
        "jobs": ("tests/hub/jobs",),
        "integrations": ("tests/integrations",),
        "machines": ("tests/providers",),
        "processes": ("tests/lifecycle",),
        "pages": (
            *("tests/hub/ui", "tests/test_browser.py"),
            *("tests/test_diloco_in_browser.py", "tests/test_notebook_in_browser.py"),
        ),
        "environments": ("tests/bootstrap",),
        "ssh": ("tests/ssh",),
    },
}
# A browser drops its connections whenever a network interface comes or goes, and tests of hosts make many of them.
# Tests of machines and processes watch leases of seconds: they begin when fewer hosts boot.
AFTER = {"pages": ("hosts", "faults", "rented"), "machines": ("rented",), "processes": ("rented",), "ssh": ("rented",)}
# Tests wait for processes, and those of hosts for much else: five groups keep two cores busy. More groups would end
# later, since the last ones would be long, and fail tests that look at the clock.
AT_ONCE = 5
# Further processes beside a part's groups. They begin first: tests/test_typing.py, at the end of its group, takes 1 s
# with mypy's cache and 15 s without.
COMMANDS = {"promises": {"lint": ["make", "--no-print-directory", "lint"]}, "rest": {}}
HOSTS = PARTS["rest"]["hosts"]  # conftest.py refuses tests of hosts elsewhere
SLOWEST = 20
STALLED_S = 900.0
"""Seconds without the end of a test after which its group is ended: more than the limit of any test."""
DYING_S = 10.0
LOOK_S, LINE_S = 1.0, 60.0


def chosen(name: str, groups: Groups) -> list[str]:
    """Return the arguments by which pytest collects the tests of one group and of no other."""
    others = [path for other, paths in groups.items() if other != name for path in paths]
    below = [path for path in others if any(path.startswith(f"{folder}/") for folder in groups[name])]
    return [*groups[name], *(f"--ignore={path}" for path in below)]


class Group:
    """One process and its files: output, progress, results."""

    def __init__(self, name: str, part: str, output: BinaryIO) -> None:
        self.name, self._output = name, output
        self._progress = RESULTS / f"{part}-{name}.progress"
        self._results = RESULTS / f"{part}-{name}.xml"
        self._progress.unlink(missing_ok=True)
        self._results.unlink(missing_ok=True)
        self._part = part
        self.is_running = True
        self.minutes = 0.0
        self._shown = 0
        self._began = self._moved = time.monotonic()
        self._last = ""
        """Progress at the time `_moved`."""
        self._stalled: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._began = self._moved = time.monotonic()
        command = self._command(self._part)
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=self._output, stderr=subprocess.STDOUT)

    def _command(self, part: str) -> list[str]:
        if self.name in PARTS[part]:
            files = (f"--progress-file={self._progress}", f"--junitxml={self._results}")
            return [sys.executable, "-m", "pytest", f"--part={part}", *files, *chosen(self.name, PARTS[part])]
        return COMMANDS[part][self.name]

    @property
    def has_failed(self) -> bool:
        return self._process is None or self._process.poll() != 0

    @property
    def has_begun(self) -> bool:
        return self._process is not None

    def look(self, groups: list[Group]) -> None:
        """Start it when its turn has come. Note whether it still runs, and how long it has run."""
        if self._process is None and self._may_start(groups):
            self.start()
        if self._process is not None and self.is_running:
            self.minutes = (time.monotonic() - self._began) / 60
            self.is_running = self._process.poll() is None
            self._end_if_stalled(self._process)

    def _end_if_stalled(self, process: subprocess.Popen[bytes]) -> None:
        """End a group in which no test has ended for long. On SIGABRT pytest prints the stacks of all its threads."""
        now, progress = time.monotonic(), self.progress()
        if progress != self._last:
            self._last, self._moved = progress, now
        if not self.is_running or now - self._moved < STALLED_S:
            return
        self._stalled.append(f"{self.name}: no test has ended for {STALLED_S / 60:.0f} minutes, since {progress}")
        process.send_signal(signal.SIGABRT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(DYING_S)
        process.kill()
        process.wait()
        self.is_running = False

    def _may_start(self, groups: list[Group]) -> bool:
        before = AFTER.get(self.name, ())
        running = [group for group in groups if group.has_begun and group.is_running]
        return len(running) < AT_ONCE and not any(group.is_running for group in groups if group.name in before)

    def wait(self) -> None:
        """Wait for its end, if it has begun."""
        if self._process is not None:
            ended(self._process)

    def progress(self) -> str:
        with contextlib.suppress(OSError):  # still collecting, or no tests
            return f"{self.name} {self._progress.read_text().splitlines()[0]}"
        state = "..." if self.is_running else "failed" if self.has_failed else "passed"
        return f"{self.name} {state}"

    def new_failures(self) -> list[str]:
        """Return the failures since the last call, a line each."""
        failures = list(self._stalled)
        with contextlib.suppress(OSError):
            failures[:0] = self._progress.read_text().splitlines()[1:]
        shown, self._shown = self._shown, len(failures)
        return failures[shown:]

    def output(self) -> str:
        self._output.seek(0)
        return self._output.read().decode(errors="replace")

    def durations(self) -> Iterator[tuple[float, str]]:
        """Yield seconds and name of each test, its fixtures included. Nothing if pytest died."""
        if self._results.exists():
            for case in ElementTree.parse(self._results).iter("testcase"):
                yield float(case.get("time", 0)), f"{case.get('classname')}::{case.get('name')}"


def ended(process: subprocess.Popen[bytes]) -> int:
    """Wait for a process. Ctrl-C reaches it too, and it ends by itself after its fixtures' clean-up."""
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue


def run(part: str) -> int:
    began = time.monotonic()
    RESULTS.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as files:
        is_measured = "COVERAGE_PROCESS_CONFIG" in os.environ  # by `make coverage`, which is about tests only
        names = (*(() if is_measured else COMMANDS[part]), *PARTS[part])
        groups = [Group(name, part, files.enter_context(tempfile.TemporaryFile())) for name in names]
        try:
            show_progress(groups, began)
        finally:
            for group in groups:
                group.wait()
        failed = [group for group in groups if group.has_failed]
        for group in failed:
            sys.stdout.write(f"\n== {group.name}\n{group.output()}")
    slowest = sorted((duration for group in groups for duration in group.durations()), reverse=True)
    lines = [f"{seconds:7.1f} s  {name}" for seconds, name in slowest[:SLOWEST]]
    sys.stdout.write("\n".join([f"\n== the {SLOWEST} slowest of {len(slowest)} tests", *lines, ""]))
    minutes = (time.monotonic() - began) / 60
    outcome = "failed: " + ", ".join(group.name for group in failed) if failed else "all passed"
    sys.stdout.write("\n== " + ", ".join(f"{group.name} {group.minutes:.1f} minutes" for group in groups))
    sys.stdout.write(f"\n== {part}: {len(slowest)} tests in {minutes:.1f} minutes; {outcome}\n")
    return 1 if failed else 0


def show_progress(groups: list[Group], began: float) -> None:
    """Show one line until all groups have ended: in place on a terminal, otherwise again each minute.

    Each failure gets a line at once.
    """
    shown = began
    begin = "\r\x1b[K" if sys.stdout.isatty() else ""
    for group in groups:
        group.look(groups)
    while any(group.is_running for group in groups):
        time.sleep(LOOK_S)
        for group in groups:
            group.look(groups)
        for failure in (failure for group in groups for failure in group.new_failures()):
            sys.stdout.write(f"{begin}FAILED {failure}\n")
            sys.stdout.flush()
        now = time.monotonic()
        if sys.stdout.isatty() or now - shown >= LINE_S:
            shown = now
            minutes, seconds = divmod(int(now - began), 60)
            line = f"{minutes}:{seconds:02}  " + "  ".join(group.progress() for group in groups)
            sys.stdout.write(f"\r{line}\x1b[K" if sys.stdout.isatty() else f"{line}\n")
            sys.stdout.flush()


def main(arguments: list[str]) -> int:
    if len(arguments) == 1 and arguments[0] in PARTS:
        return run(arguments[0])
    return ended(subprocess.Popen([sys.executable, "-m", "pytest", *arguments], cwd=ROOT))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
