"""A run as its control sees it: the commands it was given, their states, and its progress.

The training thread and those that answer requests share it. What training does here is a few assignments, never a
wait: the lock is held for copies of small values only.
"""

from __future__ import annotations

import math
import threading
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from ...calls.control import COMMANDS, STOPPING, CommandState, check_job_id
from ...errors import UsageError

__all__ = ["ControlledRun", "TakenCommands", "plain"]

_KEPT_COMMANDS = 256
"""What became of so many commands is known; of older ones it is not."""
_WAITING_COMMANDS = 64
"""So many may wait for the end of a step: more are refused, but for an abort."""
_KEPT_RECORDS = 20_000
_RECORDS_BYTES = 200_000
"""Of one answer: it must fit into a frame of a pool's channel, too."""
_TEXT_LIMIT = 500
_DEPTH_LIMIT = 6

RunState = Literal["running", "stopping", "aborting", "ended"]


@dataclass(frozen=True, kw_only=True)
class TakenCommands:
    """What is asked for and was not applied yet, by the training thread."""

    commands: tuple[str, ...]
    """In the order in which they came."""


class ControlledRun:
    """Of one run. Thread-safe.

    A command goes from "waiting" to "applied" (`take`, by the training thread at the end of a step) to "executed" or
    "failed" (`saved`, `ended`); see `CommandState`.
    """

    def __init__(self, job_id: str) -> None:
        self.job_id = check_job_id(job_id)
        self.has_new = False
        """Whether `take` would give anything: read for each step, without the lock."""
        self.status: RunState = "running"
        self.global_step = 0
        self.epoch: float | None = None
        self.max_steps = 0
        self.step_at = 0.0
        self.world_size = 1
        self._ranks: list[dict[str, Any]] = []
        self._logs: dict[str, Any] = {}
        self._records: deque[dict[str, Any]] = deque(maxlen=_KEPT_RECORDS)
        self._recorded = 0
        self._commands: OrderedDict[str, CommandState] = OrderedDict()
        self._changed = threading.Condition()

    # Requests, by the threads that answer them ----------------------------------------------------------------------

    def submit(self, command: str, request_id: str | None = None) -> CommandState:
        """Enters a command. One whose request id is known is that one, not another.

        Raises: UsageError for an unknown command or a bad request id; RuntimeError when too many wait, or the run has
        ended.
        """
        if command not in COMMANDS:
            raise UsageError(f"command: there is no {command!r}; there are {', '.join(COMMANDS)}")
        request_id = uuid.uuid4().hex if request_id is None else check_job_id(request_id, "request_id")
        with self._changed:
            known = self._commands.get(request_id)
            if known is not None:
                if known.command != command:
                    raise UsageError(f"request_id: {request_id!r} is that of a {known.command}")
                return known
            state = CommandState(request_id=request_id, command=command, state="waiting")
            if command == "status":
                return replace(state, state="executed")
            if self.status == "ended":
                raise RuntimeError("the run has ended")
            waiting = sum(1 for command in self._commands.values() if command.state == "waiting")
            if waiting >= _WAITING_COMMANDS and command != "abort":
                raise RuntimeError(f"{_WAITING_COMMANDS} commands wait already")
            self._commands[request_id] = state
            self._forget_old()
            self.has_new = True
            return state

    def command(self, request_id: str, wait_s: float = 0.0) -> CommandState | None:
        """What became of it; None: it is not known. Waits for so long until that is final."""
        deadline = time.monotonic() + wait_s
        with self._changed:
            while True:
                state = self._commands.get(request_id)
                left_s = deadline - time.monotonic()
                if state is None or state.is_final or left_s <= 0:
                    return state
                self._changed.wait(left_s)

    def commands(self) -> list[CommandState]:
        """Those that are known, oldest first."""
        with self._changed:
            return list(self._commands.values())

    def seen(self) -> dict[str, Any]:
        """The run as it is now: the body of a `RunStatus`."""
        with self._changed:
            return {
                "job_id": self.job_id,
                "status": self.status,
                "timestamp": time.time(),
                "global_step": self.global_step,
                "epoch": self.epoch,
                "max_steps": self.max_steps,
                "logs": self._logs,
                "step_at": self.step_at,
                "world_size": self.world_size,
                "ranks": self._ranks,
            }

    def history(self, since: int) -> tuple[list[dict[str, Any]], int]:
        """Records from number `since` on, as many as one answer holds, and the number behind the last of them."""
        with self._changed:
            first = self._recorded - len(self._records)
            start = min(max(since, first), self._recorded)
            found: list[dict[str, Any]] = []
            size = 0
            for at in range(start - first, len(self._records)):
                size += len(repr(self._records[at])) + 8
                if size > _RECORDS_BYTES and found:
                    break
                found.append(self._records[at])
            return found, start + len(found)

    # What happens, by the training thread ---------------------------------------------------------------------------

    def take(self, step: int) -> TakenCommands:
        """The commands that came since the last time: they are applied from this step on. Each replaces what it
        overrules: an abort all saves and stops before it.
        """
        with self._changed:
            self.has_new = False
            waiting = [state for state in self._commands.values() if state.state == "waiting"]
            for state in waiting:
                self._set(state, "applied", step=step)
            names = tuple(state.command for state in waiting)
            if "abort" in names:
                self._overrule(("save_checkpoint",), "the run was aborted before it was saved")
            if self.status == "running" and any(name in STOPPING for name in names):
                self.status = "stopping"
            if "abort" in names:
                self.status = "aborting"
            self._changed.notify_all()
            return TakenCommands(commands=names)

    def saved(self, of_step: int) -> None:
        """The checkpoint of a step is durable. One that was begun before a command came does not execute it."""
        with self._changed:
            for state in list(self._commands.values()):
                is_later = state.step is None or state.step <= of_step
                if state.state == "applied" and state.command == "save_checkpoint" and is_later:
                    self._set(state, "executed")
            self._changed.notify_all()

    def logged(self, record: Mapping[str, Any]) -> None:
        """Something was logged, at the present step."""
        said = {str(name): plain(value) for name, value in record.items()}
        with self._changed:
            self._logs = {**self._logs, **said}
            self._recorded += 1
            self._records.append({**said, "global_step": self.global_step, "timestamp": time.time()})

    def evaluated(self, metrics: Mapping[str, Any]) -> None:
        """As `logged`, where it was not logged already: some producers say it twice."""
        last = self._records[-1] if self._records else {}
        if last.get("global_step") != self.global_step or any(name not in last for name in metrics):
            self.logged(metrics)

    def ranks(self, said: list[dict[str, Any]]) -> None:
        """What each rank says of itself."""
        with self._changed:
            self._ranks = said

    def ended(self) -> None:
        """The run has ended: what asked for that is executed, what waits for anything else will not be."""
        with self._changed:
            was_aborted = self.status == "aborting"
            self.status = "ended"
            for state in list(self._commands.values()):
                if state.is_final:
                    continue
                if was_aborted and state.command != "abort":
                    self._set(state, "failed", detail="the run was aborted")
                elif state.command in STOPPING and state.state == "applied":
                    self._set(state, "executed")
                else:
                    self._set(state, "failed", detail="the run ended before")
            self._changed.notify_all()

    # Within ---------------------------------------------------------------------------------------------------------

    def _set(self, state: CommandState, to: Any, *, step: int | None = None, detail: str = "") -> None:
        self._commands[state.request_id] = replace(
            state, state=to, step=state.step if step is None else step, detail=detail or state.detail
        )

    def _overrule(self, commands: tuple[str, ...], why: str) -> None:
        for state in list(self._commands.values()):
            if state.command in commands and not state.is_final:
                self._set(state, "failed", detail=why)

    def _forget_old(self) -> None:
        # Saves may stay applied for ever, where a producer saves nothing.
        old = [name for name, state in self._commands.items() if state.state != "waiting"]
        for name in old[: max(0, len(self._commands) - _KEPT_COMMANDS)]:
            del self._commands[name]


def plain(value: Any, depth: int = 0) -> Any:
    """A value of a log as JSON has it: numbers that JSON has no word for, and what it cannot hold, become strings."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return value[:_TEXT_LIMIT]
    if depth < _DEPTH_LIMIT and isinstance(value, Mapping):
        return {str(name): plain(item, depth + 1) for name, item in value.items()}
    if depth < _DEPTH_LIMIT and isinstance(value, list | tuple):
        return [plain(item, depth + 1) for item in value]
    if getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None)):  # a scalar of numpy's or torch's
        return plain(value.item(), depth + 1)
    return repr(value)[:_TEXT_LIMIT]
