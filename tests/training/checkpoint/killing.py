"""Ranks that kill themselves at a chosen operation on files."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["Run", "Suicide", "run_world"]

Run = Callable[[int, int, str, str, int | None, Any], None]
"""One rank: `(rank, world, meeting, folder, where it dies if it does, answers)`; puts (rank, ...) and ends."""


class Suicide:
    """Counter of this process's operations on files in a folder. It kills the process before the chosen one."""

    def __init__(self, folder: str, at: int | None, *, by: int = signal.SIGKILL) -> None:
        self.folder, self.at, self.count, self._by = folder, at, 0, by
        sys.addaudithook(self._audit)
        self._fsync = os.fsync
        os.fsync = self._counted_fsync  # type: ignore[assignment]  # no audit event tells of it

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"):
            return
        if event == "open" and not (isinstance(arguments[1], str) and set(arguments[1]) & set("wax")):
            return
        if str(arguments[0]).startswith(self.folder):
            self._turn()

    def _counted_fsync(self, descriptor: Any) -> None:
        self._turn()
        self._fsync(descriptor)

    def _turn(self) -> None:
        if self.count == self.at:
            os.kill(os.getpid(), self._by)
        self.count += 1


def run_world(run: Run, folder: Path, *, world: int, victim: int | None = None, at: int | None = None) -> list[Any]:
    """Return the reports of the ranks, by rank, with None for a killed one.

    Raises if one does not end within 60 seconds.
    """
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    meeting = f"{folder}.meeting-{victim}-{at}-{os.getpid()}-{len(list(folder.parent.iterdir()))}"
    ranks = [
        context.Process(target=run, args=(rank, world, meeting, str(folder), at if rank == victim else None, answers))
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    said: list[Any] = [None] * world
    try:
        for _ in range(world - (victim is not None)):
            answer = answers.get(timeout=60)
            said[answer[0]] = answer[1:]
        for process in ranks:
            process.join(60)
            assert process.exitcode is not None
    finally:
        for process in ranks:
            process.kill()
    return said
