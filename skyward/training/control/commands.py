"""A run as its control sees it: the commands that it received, their states, and its progress.

The training thread shares it with the threads that answer requests. Training does only a few assignments here and never
waits, because the lock is held only while small values are copied.
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

_KEPT_COMMANDS = 256
"""Number of commands whose outcome is kept; older ones are forgotten."""
_WAITING_COMMANDS = 64
"""Number of commands that may wait for the end of a step. Further ones are refused, except an abort."""
_KEPT_RECORDS = 20_000
_RECORDS_BYTES = 200_000
"""Size limit of one answer, which must also fit into a frame of a pool's channel."""
_TEXT_LIMIT = 500
_DEPTH_LIMIT = 6

RunState = Literal["running", "stopping", "aborting", "ended"]


@dataclass(frozen=True, kw_only=True)
class TakenCommands:
    """Commands that the training thread takes over at the end of a step."""

    commands: tuple[str, ...]
    """Names, in the order of their arrival."""


class ControlledRun:
    """Commands and progress of one run. Thread-safe.

    A command is first "waiting". The training thread makes it "applied" at the end of a step (`take`). Later it becomes
    "executed" or "failed" (`saved`, `ended`); see `CommandState`.

    Args:
        job_id: id of the run.
    """

    def __init__(self, job_id: str) -> None:
        self.job_id = check_job_id(job_id)
        self.has_new = False
        """Whether `take` would return anything. It is read at every step, without the lock."""
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

    # Requests, in the threads that answer them ------------------------------------------------------------------------

    def submit(self, command: str, request_id: str | None = None) -> CommandState:
        """Add a command. A known request id returns that command's state and adds nothing.

        Raises:
            UsageError: an unknown command, or an invalid request id.
            RuntimeError: too many commands wait, or the run has ended.
        """
        if command not in COMMANDS:
            raise UsageError(f"command={command!r}: unknown; use one of {', '.join(COMMANDS)}")
        request_id = uuid.uuid4().hex if request_id is None else check_job_id(request_id, "request_id")
        with self._changed:
            known = self._commands.get(request_id)
            if known is not None:
                if known.command != command:
                    raise UsageError(f"request_id={request_id!r}: a {known.command} command has this id; use a new one")
                return known
            state = CommandState(request_id=request_id, command=command, state="waiting")
            if command == "status":
                return replace(state, state="executed")
            if self.status == "ended":
                raise RuntimeError("run: the run has ended; read its report instead")
            waiting = sum(1 for command in self._commands.values() if command.state == "waiting")
            if waiting >= _WAITING_COMMANDS and command != "abort":
                raise RuntimeError(f"command: {_WAITING_COMMANDS} commands are waiting already; send it later")
            self._commands[request_id] = state
            self._forget_old()
            self.has_new = True
            return state

    def command(self, request_id: str, wait_s: float = 0.0) -> CommandState | None:
        """Return a command's state, after waiting up to `wait_s` for a final one. None: the id is unknown."""
        deadline = time.monotonic() + wait_s
        with self._changed:
            while True:
                state = self._commands.get(request_id)
                left_s = deadline - time.monotonic()
                if state is None or state.is_final or left_s <= 0:
                    return state
                self._changed.wait(left_s)

    def commands(self) -> list[CommandState]:
        """Return the states of all known commands, oldest first."""
        with self._changed:
            return list(self._commands.values())

    def seen(self) -> dict[str, Any]:
        """Return the run's present state, the body of a `RunStatus`."""
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
        """Return records from number `since` on, up to the size limit of an answer, and the number after the last."""
        with self._changed:
            first = self._recorded - len(self._records)
            start = min(max(since, first), self._recorded)
            records: list[dict[str, Any]] = []
            size = 0
            for at in range(start - first, len(self._records)):
                size += len(repr(self._records[at])) + 8
                if size > _RECORDS_BYTES and records:
                    break
                records.append(self._records[at])
            return records, start + len(records)

    # Events, in the training thread -----------------------------------------------------------------------------------

    def take(self, step: int) -> TakenCommands:
        """Apply the commands that have arrived since the last call; `step` is the step that has just ended.

        A later command overrules others: an abort fails all saves before it.
        """
        with self._changed:
            self.has_new = False
            waiting = [state for state in self._commands.values() if state.state == "waiting"]
            for state in waiting:
                self._set(state, "applied", step=step)
            names = tuple(state.command for state in waiting)
            if "abort" in names:
                self._overrule(("save_checkpoint",), "the run was aborted before this save")
            if self.status == "running" and any(name in STOPPING for name in names):
                self.status = "stopping"
            if "abort" in names:
                self.status = "aborting"
            self._changed.notify_all()
            return TakenCommands(commands=names)

    def saved(self, of_step: int) -> None:
        """Record that the checkpoint of a step is durable. A save that began before a command does not execute it."""
        with self._changed:
            for state in list(self._commands.values()):
                is_later = state.step is None or state.step <= of_step
                if state.state == "applied" and state.command == "save_checkpoint" and is_later:
                    self._set(state, "executed")
            self._changed.notify_all()

    def logged(self, record: Mapping[str, Any]) -> None:
        """Record what was logged at the present step."""
        values = {str(name): plain(value) for name, value in record.items()}
        with self._changed:
            self._logs = {**self._logs, **values}
            self._recorded += 1
            self._records.append({**values, "global_step": self.global_step, "timestamp": time.time()})

    def evaluated(self, metrics: Mapping[str, Any]) -> None:
        """Record metrics unless `logged` already has them: some producers report an evaluation twice."""
        last = self._records[-1] if self._records else {}
        if last.get("global_step") != self.global_step or any(name not in last for name in metrics):
            self.logged(metrics)

    def ranks(self, reports: list[dict[str, Any]]) -> None:
        """Replace the reports of the ranks."""
        with self._changed:
            self._ranks = reports

    def ended(self) -> None:
        """Record the end of the run. Commands that asked for it are executed, all other open ones have failed."""
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
                    self._set(state, "failed", detail="the run ended first")
            self._changed.notify_all()

    # Helpers, called with the lock held -------------------------------------------------------------------------------

    def _set(self, state: CommandState, to: Any, *, step: int | None = None, detail: str = "") -> None:
        self._commands[state.request_id] = replace(
            state, state=to, step=state.step if step is None else step, detail=detail or state.detail
        )

    def _overrule(self, commands: tuple[str, ...], why: str) -> None:
        for state in list(self._commands.values()):
            if state.command in commands and not state.is_final:
                self._set(state, "failed", detail=why)

    def _forget_old(self) -> None:
        # A save can stay "applied" forever, because a producer may save nothing.
        old = [name for name, state in self._commands.items() if state.state != "waiting"]
        for name in old[: max(0, len(self._commands) - _KEPT_COMMANDS)]:
            del self._commands[name]


def plain(value: Any, depth: int = 0) -> Any:
    """Convert a logged value to JSON. NaN, infinities and values that JSON cannot hold become strings."""
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
    if getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None)):  # a scalar of numpy or torch
        return plain(value.item(), depth + 1)
    return repr(value)[:_TEXT_LIMIT]
