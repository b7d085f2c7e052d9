"""Asking a training run: what it does now, and to save, to stop or to abort.

A `Client` speaks to one run through a transport: HTTP to the socket or port that the run listens on
(`skyward.training.control.find`), or the channel that a pool has to the run's node anyway (`ComputePool.control`).
The messages are the same: a method, a path, a JSON object each way.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Protocol, Self

from ..errors import ControlFailed, UsageError

__all__ = [
    "COMMANDS",
    "STOPPING",
    "Client",
    "CommandState",
    "RunStatus",
    "Transport",
    "check_job_id",
]

COMMANDS = ("graceful_stop", "save_checkpoint", "save_and_stop", "abort", "status")
"""What a run understands. "status" changes nothing."""
STOPPING = ("graceful_stop", "save_and_stop", "abort")
"""Those that are executed when the run has ended."""

_JOB_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", re.ASCII)
_ANSWER_S = 10.0
"""Seconds for an answer that waits for nothing."""
_WINDOW_S = 20.0
"""Seconds that one request waits on the run's side; a longer wait is several."""


def check_job_id(job_id: str, field_name: str = "job_id") -> str:
    """The id, if it may be the name of a folder and a part of a path.

    Raises: UsageError.
    """
    if not isinstance(job_id, str) or not _JOB_ID.fullmatch(job_id):
        raise UsageError(
            f"{field_name}: {job_id!r} is no job id; use 1 to 128 of the letters A-Z, a-z, the digits, '.', '_' and "
            "'-', and begin with a letter, a digit or '_'"
        )
    return job_id


class _Body:
    """Made from a JSON object of a run; members that this version does not know are left out."""

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Self:
        known = {each.name for each in fields(cls)}  # type: ignore[arg-type]  # subclasses are dataclasses
        try:
            return cls(**{name: value for name, value in body.items() if name in known})
        except TypeError as error:
            raise ControlFailed(f"the answer of the run is not understood: {error}") from error


@dataclass(frozen=True, kw_only=True)
class RunStatus(_Body):
    """Where a run is. Times are seconds since the epoch."""

    job_id: str
    status: Literal["running", "stopping", "aborting", "ended"]
    timestamp: float
    """When this was said."""
    global_step: int = 0
    epoch: float | None = None
    max_steps: int = 0
    logs: dict[str, Any] = field(default_factory=dict)
    """The latest; a number that JSON has no word for is a string ("nan")."""
    step_at: float = 0.0
    """When the last step ended; 0: none has."""
    world_size: int = 1
    ranks: list[dict[str, Any]] = field(default_factory=list)
    """Of each rank what it said of itself when something was last logged: rank, node, host, pid, global_step, at,
    memory_bytes."""


@dataclass(frozen=True, kw_only=True)
class CommandState(_Body):
    """What became of a command.

    state: "waiting" (no step has ended since), "applied" (all ranks know, from `step` on), "executed" (the checkpoint
    is saved, the run has ended), "failed" (it will not be; `detail` says why) or "unknown" (the run is gone, and with
    it what became of the command).
    """

    request_id: str
    command: str
    state: Literal["waiting", "applied", "executed", "failed", "unknown"]
    step: int | None = None
    detail: str = ""

    @property
    def is_final(self) -> bool:
        return self.state in ("executed", "failed", "unknown")


class Transport(Protocol):
    """Brings a request to a run."""

    def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None, *, timeout_s: float
    ) -> tuple[int, dict[str, Any]]:
        """The status, as HTTP's, and the object of the answer.

        Raises: ControlFailed when there is no answer in time; `is_gone` says that the run has ended.
        """


class Client:
    """One run. Any thread may use it; nothing stays open between two calls.

    Commands return at once, with the state that they are in; with `wait_s` they wait so long at most until they are
    executed. A save is executed when the checkpoint is written, the others when the run has ended.

    job_id: None: the only run that the transport leads to; it is waited for, for at most `start_s` seconds.

    Raises: ControlFailed, where the run cannot be asked or refuses.
    """

    def __init__(self, transport: Transport, job_id: str | None = None, *, start_s: float = 0.0) -> None:
        self._transport = transport
        self._job_id = None if job_id is None else check_job_id(job_id)
        self._start_s = start_s

    def __repr__(self) -> str:
        return f"<Client of {self._job_id or 'a run that was not asked yet'} by {self._transport!r}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    # Looking ---------------------------------------------------------------------------------------------------------

    @property
    def job_id(self) -> str:
        """Asks for it where it is not known. Raises: ControlFailed when there are several runs, or none."""
        if self._job_id is None:
            self._job_id = self._found()
        return self._job_id

    def status(self) -> RunStatus:
        """Where the run is now."""
        return RunStatus.of(self._ask("GET", f"/jobs/{self.job_id}/status"))

    def history(self, since: int = 0) -> tuple[list[dict[str, Any]], int]:
        """What was logged, oldest first, from the record `since` on, and the number to give next time.

        One answer holds so many as fit; there is more as long as the number grows. The oldest of a long run are gone.
        """
        body = self._ask("GET", f"/jobs/{self.job_id}/history?since={since}")
        return list(body["records"]), int(body["next"])

    def command(self, request_id: str, *, wait_s: float = 0.0) -> CommandState:
        """What became of a command. With `wait_s`: as soon as that is known."""
        return self._followed(CommandState(request_id=request_id, command="", state="waiting"), wait_s)

    # Commands --------------------------------------------------------------------------------------------------------

    def stop(self, *, wait_s: float = 0.0) -> CommandState:
        """End after the step that runs. A checkpoint is saved first, unless the run's save_strategy is "no"."""
        return self.send("graceful_stop", wait_s=wait_s)

    def save(self, *, wait_s: float = 0.0) -> CommandState:
        """Save a checkpoint and go on. It is evaluated too where the run loads its best model at the end."""
        return self.send("save_checkpoint", wait_s=wait_s)

    def save_and_stop(self, *, wait_s: float = 0.0) -> CommandState:
        """Save a checkpoint, whatever the run's save_strategy, then end."""
        return self.send("save_and_stop", wait_s=wait_s)

    def abort(self, *, wait_s: float = 0.0) -> CommandState:
        """End after the step that runs, without a checkpoint; one that was asked for and not begun is not saved."""
        return self.send("abort", wait_s=wait_s)

    def send(self, command: str, data: Mapping[str, Any] | None = None, *, wait_s: float = 0.0) -> CommandState:
        """Any command by its name; see `COMMANDS`."""
        request_id = uuid.uuid4().hex  # known here: sent again it would be the same request
        body: dict[str, Any] = {"command": command, "request_id": request_id, "data": dict(data or {})}
        deadline = time.monotonic() + wait_s
        # It waits in the request that brings the command: a run that ends at once answers no second one.
        window_s = max(0.0, min(_WINDOW_S, wait_s))
        path = f"/jobs/{self.job_id}/control" + (f"?wait={window_s:.3f}" if window_s else "")
        answer = self._ask("POST", path, body, timeout_s=window_s + _ANSWER_S)
        if command == "status":
            return CommandState(request_id=request_id, command=command, state="executed")
        return self._followed(CommandState.of(answer), deadline - time.monotonic())

    # Within ----------------------------------------------------------------------------------------------------------

    def _followed(self, state: CommandState, wait_s: float) -> CommandState:
        deadline = time.monotonic() + wait_s
        is_first = not state.command
        while not state.is_final and (is_first or time.monotonic() < deadline):
            is_first = False
            window_s = max(0.0, min(_WINDOW_S, deadline - time.monotonic()))
            path = f"/jobs/{self.job_id}/commands/{state.request_id}?wait={window_s:.3f}"
            asked_at = time.monotonic()
            try:
                state = CommandState.of(self._ask("GET", path, timeout_s=window_s + _ANSWER_S))
            except ControlFailed as error:
                if not error.is_gone or not state.command:
                    raise
                detail = "the run ended before it said what became of it"
                return CommandState(
                    request_id=state.request_id, command=state.command, state="unknown", step=state.step, detail=detail
                )
            if not state.is_final:  # a run that many wait for answers at once
                time.sleep(max(0.0, min(0.1, window_s) - (time.monotonic() - asked_at)))
        return state

    def _found(self) -> str:
        deadline = time.monotonic() + self._start_s
        while True:
            try:
                jobs = self._answered("GET", "/jobs", None, _ANSWER_S)["jobs"]
            except ControlFailed as error:
                if error.is_gone or time.monotonic() >= deadline:
                    raise
                jobs = []
            if len(jobs) == 1:
                return check_job_id(jobs[0]["job_id"])
            if jobs:
                names = ", ".join(sorted(str(job["job_id"]) for job in jobs))
                raise ControlFailed(f"there are {len(jobs)} runs there: {names}; say which with job_id=")
            if time.monotonic() >= deadline:
                raise ControlFailed("no training run with a TrainerControlCallback has begun there")
            time.sleep(0.1)

    def _ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float = _ANSWER_S
    ) -> dict[str, Any]:
        return self._answered(method, path, body, timeout_s)

    def _answered(self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> dict[str, Any]:
        status, answer = self._transport.ask(method, path, body, timeout_s=timeout_s)
        if status >= 400:
            name = self._job_id or "the run"
            raise ControlFailed(
                f"{name} refused {method} {path.partition('?')[0]}: {answer.get('error', status)}",
                job_id=self._job_id,
                status=status,
            )
        return answer
