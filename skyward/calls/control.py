"""Client for a training run: read its status, and save, stop or abort it.

A `Client` reaches one run through a transport: HTTP to the socket or port that the run listens on
(`skyward.training.control.find`), or the pool's own channel to the run's node (`ComputePool.control`). Both carry the
same messages: a method, a path, and a JSON object each way.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import field, fields
from typing import Any, Literal, Protocol, Self

from ..core.records import dataclass
from ..errors import ControlFailed, UsageError

COMMANDS = ("graceful_stop", "save_checkpoint", "save_and_stop", "abort", "status")
"""Commands of a run. "status" changes nothing."""
STOPPING = ("graceful_stop", "save_and_stop", "abort")
"""Commands that count as executed when the run has ended."""

_JOB_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", re.ASCII)
_ANSWER_S = 10.0
"""Time limit for an answer that does not wait, in seconds."""
_WINDOW_S = 20.0
"""Longest wait of one request on the run's side, in seconds. Longer waits take several requests."""


def check_job_id(job_id: str, field_name: str = "job_id") -> str:
    """Return the id if it may name a folder and a part of a path. Raises UsageError."""
    if not isinstance(job_id, str) or not _JOB_ID.fullmatch(job_id):
        raise UsageError(
            f"{field_name}={job_id!r}: not a job id; use 1 to 128 of the letters A-Z, a-z, the digits, '.', '_' and "
            "'-', and begin with a letter, a digit or '_'"
        )
    return job_id


class _Body:
    """Base of values made from a run's JSON object. Members that this version does not know are ignored."""

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Self:
        known = {member.name for member in fields(cls)}  # type: ignore[arg-type]  # subclasses are dataclasses
        try:
            return cls(**{name: value for name, value in body.items() if name in known})
        except TypeError as error:
            raise ControlFailed(
                f"training run: unexpected answer ({error}); use the same version of skyward here and there"
            ) from error


@dataclass(frozen=True, kw_only=True)
class RunStatus(_Body):
    """Status of a run. Times are seconds since the epoch.

    Args:
        job_id: The run.
        status: "running", "stopping", "aborting" or "ended".
        timestamp: Time of this status.
        global_step: Number of finished steps.
        epoch: Epoch, with its fraction; None before the first step.
        max_steps: Planned number of steps.
        logs: Latest logs. A number that JSON cannot express is a string, such as "nan".
        step_at: End of the last step; 0 before the first.
        world_size: Number of ranks.
        ranks: Last report of each rank, with the logs: rank, node, host, pid, global_step, at, memory_bytes.

    Example:
        status = pool.control().status()
        print(f"{status.global_step} of {status.max_steps} steps")
    """

    job_id: str
    status: Literal["running", "stopping", "aborting", "ended"]
    timestamp: float
    """Time of this status."""
    global_step: int = 0
    epoch: float | None = None
    max_steps: int = 0
    logs: dict[str, Any] = field(default_factory=dict)
    """Latest logs. A number that JSON cannot express is a string, such as "nan"."""
    step_at: float = 0.0
    """End of the last step; 0 before the first."""
    world_size: int = 1
    ranks: list[dict[str, Any]] = field(default_factory=list)
    """Last report of each rank, with the logs: rank, node, host, pid, global_step, at, memory_bytes."""


@dataclass(frozen=True, kw_only=True)
class CommandState(_Body):
    """State of a command.

    Args:
        request_id: Id of the command.
        command: Name of the command; see `COMMANDS`.
        state: "waiting": no step has ended since. "applied": all ranks know it, from `step` on. "executed": the
            checkpoint is saved, or the run has ended. "failed": it will not be executed; `detail` says why. "unknown":
            the run is gone, and the outcome with it.
        step: Step from which the command applies, or None.
        detail: Reason of a failure; may be empty.

    Example:
        state = pool.control().save(wait_s=60)
        assert state.state == "executed", state.detail
    """

    request_id: str
    command: str
    state: Literal["waiting", "applied", "executed", "failed", "unknown"]
    step: int | None = None
    detail: str = ""

    @property
    def is_final(self) -> bool:
        """Return whether the state can no longer change."""
        return self.state in ("executed", "failed", "unknown")


class Transport(Protocol):
    """Carries a request to a run."""

    def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None, *, timeout_s: float
    ) -> tuple[int, dict[str, Any]]:
        """Send a request and return the HTTP status and the object of the answer.

        Raises:
            ControlFailed: No answer in time. `is_gone` says whether the run has ended.
        """


class Client:
    """Client of one training run. Thread-safe; nothing stays open between calls.

    Commands return at once with their current state. With `wait_s`, they wait up to that long until they are executed:
    a save when the checkpoint is written, the others when the run has ended.

    Args:
        transport: Connection to the run.
        job_id: The run; None for the only run that the transport reaches.
        start_s: Longest wait for that run to begin, in seconds.

    Raises:
        ControlFailed: The run does not answer, or refuses. Every method may raise it.

    Example:
        with sky.ComputePool(provider=sky.Local()) as pool:
            future = train() > pool
            run = pool.control(future)
            print(run.status().global_step)
            run.save_and_stop(wait_s=120)
    """

    def __init__(self, transport: Transport, job_id: str | None = None, *, start_s: float = 0.0) -> None:
        self._transport = transport
        self._job_id = None if job_id is None else check_job_id(job_id)
        self._start_s = start_s

    def __repr__(self) -> str:
        return f"<Client of {self._job_id or 'a run to be found'} by {self._transport!r}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    # Reading ---------------------------------------------------------------------------------------------------------

    @property
    def job_id(self) -> str:
        """Id of the run, looked up if necessary. Raises ControlFailed if there are several runs, or none."""
        if self._job_id is None:
            self._job_id = self._find()
        return self._job_id

    def status(self) -> RunStatus:
        """Return the current status of the run."""
        return RunStatus.of(self._ask("GET", f"/jobs/{self.job_id}/status"))

    def history(self, since: int = 0) -> tuple[list[dict[str, Any]], int]:
        """Return logged records from number `since` on, oldest first, and the number to pass next time.

        One answer holds as many records as fit. There are more as long as the number grows. A long run drops its oldest
        records.

        Args:
            since: Number of the first record.
        """
        body = self._ask("GET", f"/jobs/{self.job_id}/history?since={since}")
        return list(body["records"]), int(body["next"])

    def command(self, request_id: str, *, wait_s: float = 0.0) -> CommandState:
        """Return the state of a command. With `wait_s`, wait up to that many seconds until it is final.

        Args:
            request_id: Id of the command.
            wait_s: Longest wait in seconds.
        """
        return self._followed(CommandState(request_id=request_id, command="", state="waiting"), wait_s)

    # Commands --------------------------------------------------------------------------------------------------------

    def stop(self, *, wait_s: float = 0.0) -> CommandState:
        """End the run after the current step. A checkpoint is saved first, unless the run's save_strategy is "no".

        Args:
            wait_s: Longest wait for the end, in seconds.
        """
        return self.send("graceful_stop", wait_s=wait_s)

    def save(self, *, wait_s: float = 0.0) -> CommandState:
        """Save a checkpoint and continue. A run that loads its best model at the end also evaluates the checkpoint.

        Args:
            wait_s: Longest wait for the checkpoint, in seconds.
        """
        return self.send("save_checkpoint", wait_s=wait_s)

    def save_and_stop(self, *, wait_s: float = 0.0) -> CommandState:
        """Save a checkpoint, whatever the run's save_strategy, then end the run.

        Args:
            wait_s: Longest wait for the end, in seconds.
        """
        return self.send("save_and_stop", wait_s=wait_s)

    def abort(self, *, wait_s: float = 0.0) -> CommandState:
        """End the run after the current step without a checkpoint. A save that has not begun is dropped.

        Args:
            wait_s: Longest wait for the end, in seconds.
        """
        return self.send("abort", wait_s=wait_s)

    def send(self, command: str, data: Mapping[str, Any] | None = None, *, wait_s: float = 0.0) -> CommandState:
        """Send a command by its name; see `COMMANDS`.

        Args:
            command: Name of the command.
            data: Arguments of the command.
            wait_s: Longest wait in seconds.
        """
        request_id = uuid.uuid4().hex  # chosen by the client, so that sending it again repeats the same request
        body: dict[str, Any] = {"command": command, "request_id": request_id, "data": dict(data or {})}
        deadline = time.monotonic() + wait_s
        # The request that carries the command also waits: a run that ends at once answers no second request.
        window_s = max(0.0, min(_WINDOW_S, wait_s))
        path = f"/jobs/{self.job_id}/control" + (f"?wait={window_s:.3f}" if window_s else "")
        answer = self._ask("POST", path, body, timeout_s=window_s + _ANSWER_S)
        if command == "status":
            return CommandState(request_id=request_id, command=command, state="executed")
        return self._followed(CommandState.of(answer), deadline - time.monotonic())

    # Private ---------------------------------------------------------------------------------------------------------

    def _followed(self, state: CommandState, wait_s: float) -> CommandState:
        deadline = time.monotonic() + wait_s
        is_first = not state.command
        while not state.is_final and (is_first or time.monotonic() < deadline):
            is_first = False
            window_s = max(0.0, min(_WINDOW_S, deadline - time.monotonic()))
            path = f"/jobs/{self.job_id}/commands/{state.request_id}?wait={window_s:.3f}"
            sent_at = time.monotonic()
            try:
                state = CommandState.of(self._ask("GET", path, timeout_s=window_s + _ANSWER_S))
            except ControlFailed as error:
                if not error.is_gone or not state.command:
                    raise
                detail = "the run ended before it reported the outcome"
                return CommandState(
                    request_id=state.request_id, command=state.command, state="unknown", step=state.step, detail=detail
                )
            if not state.is_final:  # a run with many waiting clients answers at once: do not poll it in a tight loop
                time.sleep(max(0.0, min(0.1, window_s) - (time.monotonic() - sent_at)))
        return state

    def _find(self) -> str:
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
                raise ControlFailed(f"job_id: {len(jobs)} runs are open there: {names}; choose one with job_id=")
            if time.monotonic() >= deadline:
                raise ControlFailed(
                    "training run: none with a TrainerControlCallback has begun there; start one, or raise start_s="
                )
            time.sleep(0.1)

    def _ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float = _ANSWER_S
    ) -> dict[str, Any]:
        return self._answered(method, path, body, timeout_s)

    def _answered(self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> dict[str, Any]:
        status, answer = self._transport.ask(method, path, body, timeout_s=timeout_s)
        if status >= 400:
            name = self._job_id or "the run"
            refused = f"{name}: refused {method} {path.partition('?')[0]}: {answer.get('error', status)}"
            raise ControlFailed(refused, job_id=self._job_id, status=status)  # words: ok, the run says what to do
        return answer
