"""Detection of stopped ranks, and their Python stacks.

A rank has stopped if its main thread has not run on a processor since. The kernel counts how often a thread leaves a
processor, and a thread that waits in a collective, a lock or a sleep is not woken in between. So a thread that computes
or polls never counts as stopped. Reading the counts costs the rank nothing. Only a rank that has stopped for as long as
the client asked for is made to write its stack.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable

from ...core.records import dataclass
from ..slot.stacks import ALL_THREADS, CRASH, MAIN_THREAD, STACKS_AT
from .loop import EventLoop
from .slots import SlotProcess

_MAX_PERIOD_S = 1.0
"""Longest interval between two looks at a rank, in seconds."""
_PAUSE_S = 1.0
_POLL_S = 0.02
_ANSWER_LIMIT_S = 2.0
"""Time for a stack to arrive, in seconds: a stopped process (SIGSTOP, a hanging disk) writes none."""
_TEXT_LIMIT = 64 * 1024

OnStack = Callable[[dict[str, object]], None]


@dataclass
class _Watched:
    task: int
    slot: SlotProcess
    after_s: float
    runs: int = -1
    """Number of times the main thread had left a processor at the latest look."""
    since: float = 0.0
    """Time at which that number was first seen."""
    reported_at: float = 0.0
    looked_at: float = 0.0


class RankWatch:
    """Watches a node's ranks and takes their stacks. It calls `stopped(task, body)` for a stopped rank."""

    def __init__(self, loop: EventLoop, stopped: Callable[[int, bytes], None]) -> None:
        self._loop = loop
        self._stopped = stopped
        self._taking: dict[SlotProcess, list[OnStack]] = {}

    def watch(self, task: int, slot: SlotProcess, after_s: float) -> None:
        """Report each time the rank has stopped for `after_s` more seconds, until its process ends."""
        self._look(_Watched(task, slot, after_s))

    def _look(self, watched: _Watched) -> None:
        if watched.slot.is_dead:
            return
        period_s = min(_MAX_PERIOD_S, watched.after_s / 4)
        self._loop.call_later(period_s, lambda: self._look(watched))
        runs, now = _times_run(watched.slot.pid), time.monotonic()
        # A look this late means that this process did not run either: a paused machine, or a frozen cgroup.
        was_paused = now - watched.looked_at > period_s + _PAUSE_S
        watched.looked_at = now
        if runs is None or runs != watched.runs or was_paused:
            watched.runs, watched.since, watched.reported_at = runs or -1, now, now
        elif now - watched.reported_at >= watched.after_s:
            watched.reported_at = now
            self.take(watched.slot, all_threads=False, on_stack=lambda report: self._tell(watched, report))

    def _tell(self, watched: _Watched, report: dict[str, object]) -> None:
        if watched.slot.is_dead:
            return
        watched.runs = _times_run(watched.slot.pid) or -1  # writing the stack has raised the count
        self._stopped(watched.task, json.dumps({**report, "stopped_s": time.monotonic() - watched.since}).encode())

    def take(self, slot: SlotProcess, *, all_threads: bool, on_stack: OnStack) -> None:
        """Ask the rank for its stack; call `on_stack` with the stack and the process state once they arrive."""
        number = ALL_THREADS if all_threads else MAIN_THREAD
        if slot in self._taking:
            self._taking[slot].append(on_stack)
            return
        if slot.is_dead or slot.pid is None or not _catches(slot.pid, number):
            on_stack({"stack": "", "state": "starting" if slot.pid is None else _state(slot.pid)})
            return
        self._taking[slot] = [on_stack]
        os.ftruncate(slot.page_fd, STACKS_AT)
        os.lseek(slot.page_fd, STACKS_AT, os.SEEK_SET)
        with contextlib.suppress(ProcessLookupError):  # already exited; `_await` notices
            os.kill(slot.pid, number)
        self._await(slot, STACKS_AT, time.monotonic() + _ANSWER_LIMIT_S)

    def _await(self, slot: SlotProcess, size_before: int, deadline: float) -> None:
        """Wait until the file has text and has stopped growing."""
        size = STACKS_AT if slot.is_dead else os.fstat(slot.page_fd).st_size
        is_over = slot.is_dead or time.monotonic() > deadline
        if not is_over and (size == STACKS_AT or size != size_before):
            self._loop.call_later(_POLL_S, lambda: self._await(slot, size, deadline))
            return
        text = b"" if slot.is_dead else os.pread(slot.page_fd, min(size - STACKS_AT, _TEXT_LIMIT), STACKS_AT)
        report: dict[str, object] = {"stack": text.decode(errors="replace"), "state": _state(slot.pid or 0)}
        for on_stack in self._taking.pop(slot):
            on_stack(report)


def crash_of(slot: SlotProcess) -> tuple[float, str] | None:
    """Return the time of a dead rank's crash, in seconds since the epoch, and the Python stack of the crashed thread.

    The stack is empty for a thread that ran no Python. None means that the rank did not crash, or that user code has
    redirected `faulthandler`.
    """
    if slot.page_fd < 0:
        return None
    _, found, text = os.pread(slot.page_fd, 2 * _TEXT_LIMIT, STACKS_AT).partition(CRASH)
    if not found:
        return None
    stack = text.partition(b"\n\n")[2].partition(b"Extension modules:")[0].decode(errors="replace")
    return os.fstat(slot.page_fd).st_mtime, stack.strip()


def _status(pid: int | None) -> dict[str, str]:
    """Read the status of the main thread; empty without such a process, or without /proc."""
    try:
        with open(f"/proc/{pid}/task/{pid}/status") as file:
            return dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    except OSError:  # already exited
        return {}


def _times_run(pid: int | None) -> int | None:
    status = _status(pid)
    try:
        return int(status["voluntary_ctxt_switches"]) + int(status["nonvoluntary_ctxt_switches"])
    except KeyError:  # the kernel does not count, or the process is gone
        return None


def _catches(pid: int, number: int) -> bool:
    """Return whether the process handles the signal. Without a handler the signal would kill it."""
    caught = _status(pid).get("SigCgt", "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def _state(pid: int) -> str:
    """Return the state in the kernel's words: "S (sleeping)", "R (running)", "T (stopped)"."""
    return _status(pid).get("State", "dead")
