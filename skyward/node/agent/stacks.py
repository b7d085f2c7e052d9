"""Which ranks have stopped, and where they stand.

A rank has stopped when its main thread has not been on a processor since: the kernel counts how often it left one,
and a thread that waits in a collective, a lock or a sleep is not woken in between. A thread that computes, or that
waits and looks in turns, is never taken for stopped. Reading the counts costs the rank nothing; only one that has
stopped for as long as the client asked is made to write its stack.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from ..slot.stacks import ALL_THREADS, CRASH, MAIN_THREAD, STACKS_AT
from .loop import EventLoop
from .slots import SlotProcess

__all__ = ["RankWatch", "crash_of"]

_MAX_PERIOD_S = 1.0
"""Seconds between two looks at a rank."""
_PAUSE_S = 1.0
_POLL_S = 0.02
_ANSWER_LIMIT_S = 2.0
"""Seconds that a stack may take: a stopped process (SIGSTOP, a disk that does not answer) writes none."""
_TEXT_LIMIT = 64 * 1024

Told = Callable[[dict[str, object]], None]


@dataclass
class _Watched:
    task: int
    slot: SlotProcess
    after_s: float
    runs: int = -1
    """How often the main thread had left a processor when it was last looked at."""
    since: float = 0.0
    """When that was first seen."""
    told_at: float = 0.0
    looked_at: float = 0.0


class RankWatch:
    """Watches the ranks of a node and takes their stacks. `stopped(task, body)` tells of one that has stopped."""

    def __init__(self, loop: EventLoop, stopped: Callable[[int, bytes], None]) -> None:
        self._loop = loop
        self._stopped = stopped
        self._taking: dict[SlotProcess, list[Told]] = {}

    def watch(self, task: int, slot: SlotProcess, after_s: float) -> None:
        """Tell when the rank has stopped for `after_s` seconds, and again after as long, until its process ends."""
        self._look(_Watched(task, slot, after_s))

    def _look(self, watched: _Watched) -> None:
        if watched.slot.is_dead:
            return
        period_s = min(_MAX_PERIOD_S, watched.after_s / 4)
        self._loop.call_later(period_s, lambda: self._look(watched))
        runs, now = _times_run(watched.slot.pid), time.monotonic()
        # Late by so much, we did not run ourselves, nor did the ranks: a paused machine, a frozen cgroup.
        was_paused = now - watched.looked_at > period_s + _PAUSE_S
        watched.looked_at = now
        if runs is None or runs != watched.runs or was_paused:
            watched.runs, watched.since, watched.told_at = runs or -1, now, now
        elif now - watched.told_at >= watched.after_s:
            watched.told_at = now
            self.take(watched.slot, all_threads=False, told=lambda said: self._tell(watched, said))

    def _tell(self, watched: _Watched, said: dict[str, object]) -> None:
        if watched.slot.is_dead:
            return
        watched.runs = _times_run(watched.slot.pid) or -1  # it ran to write its stack
        self._stopped(watched.task, json.dumps({**said, "stopped_s": time.monotonic() - watched.since}).encode())

    def take(self, slot: SlotProcess, *, all_threads: bool, told: Told) -> None:
        """Ask the rank for its stack, and call `told` with it, and with the state of the process, in a moment."""
        number = ALL_THREADS if all_threads else MAIN_THREAD
        if slot in self._taking:
            self._taking[slot].append(told)
            return
        if slot.is_dead or slot.pid is None or not _catches(slot.pid, number):
            told({"stack": "", "state": "starting" if slot.pid is None else _state(slot.pid)})
            return
        self._taking[slot] = [told]
        os.ftruncate(slot.page_fd, STACKS_AT)
        os.lseek(slot.page_fd, STACKS_AT, os.SEEK_SET)
        with contextlib.suppress(ProcessLookupError):  # it has ended; `_await` finds that
            os.kill(slot.pid, number)
        self._await(slot, STACKS_AT, time.monotonic() + _ANSWER_LIMIT_S)

    def _await(self, slot: SlotProcess, size_before: int, deadline: float) -> None:
        """Until the file has text and has stopped growing."""
        size = STACKS_AT if slot.is_dead else os.fstat(slot.page_fd).st_size
        is_over = slot.is_dead or time.monotonic() > deadline
        if not is_over and (size == STACKS_AT or size != size_before):
            self._loop.call_later(_POLL_S, lambda: self._await(slot, size, deadline))
            return
        text = b"" if slot.is_dead else os.pread(slot.page_fd, min(size - STACKS_AT, _TEXT_LIMIT), STACKS_AT)
        said: dict[str, object] = {"stack": text.decode(errors="replace"), "state": _state(slot.pid or 0)}
        for told in self._taking.pop(slot):
            told(said)


def crash_of(slot: SlotProcess) -> tuple[float, str] | None:
    """When a rank that is dead crashed, in seconds since the epoch, and the Python stack of the thread that did, which
    is empty for a thread that runs none. None: it did not crash, or the user has replaced `faulthandler`'s file.
    """
    if slot.page_fd < 0:
        return None
    _, found, text = os.pread(slot.page_fd, 2 * _TEXT_LIMIT, STACKS_AT).partition(CRASH)
    if not found:
        return None
    stack = text.partition(b"\n\n")[2].partition(b"Extension modules:")[0].decode(errors="replace")
    return os.fstat(slot.page_fd).st_mtime, stack.strip()


def _status(pid: int | None) -> dict[str, str]:
    """Of the main thread; empty where there is none, or no /proc."""
    try:
        with open(f"/proc/{pid}/task/{pid}/status") as file:
            return dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    except OSError:  # it has ended
        return {}


def _times_run(pid: int | None) -> int | None:
    status = _status(pid)
    try:
        return int(status["voluntary_ctxt_switches"]) + int(status["nonvoluntary_ctxt_switches"])
    except KeyError:  # the kernel does not count, or there is no process
        return None


def _catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for it. Without one the signal would end it."""
    caught = _status(pid).get("SigCgt", "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def _state(pid: int) -> str:
    """As the kernel says it: "S (sleeping)", "R (running)", "T (stopped)"."""
    return _status(pid).get("State", "dead")
