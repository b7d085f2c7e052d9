"""A sweep as any process sees it: its progress, its trials, and the best one."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import JobFailed, UsageError
from ..client.connection import HubConnection, path_of
from ..client.job_handle import Job
from ..client.registry import register
from ..client.settings import Address

ENDS = frozenset({"completed", "stopped", "failed"})
"""Statuses of a sweep that is over."""
_LOOK_S = 0.5
_PAGE = 1000
_MOST = 50_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """A trial of a sweep, as the hub has it.

    Attributes:
        number: Number in its sweep, from 0.
        state: "waiting", "running", "completed", "pruned" or "failed".
        params: Parameters that were chosen.
        values: Value of each objective; empty if there is none yet.
        run: Id of its run; None for one that was copied from an earlier sweep.
        error: Why it failed; None if it did not.
        stopped_by: "pruned", "patience" or "stopped"; None if nothing ended it early.

    Example:
        from skyward import hub

        for trial in hub.sweeps("digits")[0].trials:
            print(trial.number, trial.state, trial.params, trial.value)
    """

    number: int
    state: str
    params: Mapping[str, Any]
    values: Sequence[float] = ()
    run: str | None = None
    error: str | None = None
    stopped_by: str | None = None

    @property
    def value(self) -> float | None:
        """Value of the first objective; None if there is none yet."""
        return self.values[0] if self.values else None


class Sweep:
    """A search for good parameters: its progress, its trials, and the best one. `hub.sweep` returns it.

    Each property asks the hub, from any process.

    Attributes:
        id: Its number.
        name: Its name, unique in the project.

    Example:
        from skyward import hub

        sweep = hub.sweeps("digits")[0]
        print(sweep.status, sweep.best.params, sweep.best.value)
    """

    def __init__(self, address: Address, body: Mapping[str, Any]) -> None:
        self.id = int(body["id"])
        self.name = str(body["name"])
        self._address = address

    def __repr__(self) -> str:
        return f"<Sweep {self.id} {self.name}>"

    @property
    def status(self) -> str:
        """State: "queued", "running", "interrupted", "completed", "stopped" or "failed"."""
        return str(self._body()["status"])

    @property
    def config(self) -> Mapping[str, Any]:
        """Configuration, in the words of its YAML form."""
        return dict(self._body()["config"])

    @property
    def run(self) -> str | None:
        """Id of its run, whose children are the runs of its trials; None before the first trial."""
        found = self._body()["run"]
        return None if found is None else str(found)

    @property
    def job(self) -> Job[Any] | None:
        """Job that runs it; None if a program does, with a pool of its own."""
        number = self._body()["job"]
        return None if number is None else self._job_of(number)

    @property
    def jobs(self) -> list[Job[Any]]:
        """Jobs of its trials, the first one first. Empty if they are calls to one pool."""
        with HubConnection(self._address) as connection:
            rows = connection.json("GET", "/v1/jobs", query={"sweep": self.id, "limit": _MOST})["jobs"]
        return [Job(self._address, row) for row in reversed(rows)]

    @property
    def trials(self) -> list[TrialResult]:
        """Trials so far, in their order."""
        return list(self._trials())

    @property
    def best(self) -> TrialResult:
        """Completed trial with the best value. With several objectives, see `front`.

        Raises:
            UsageError: No trial is complete, or the sweep has several objectives.
        """
        body = self._body()
        if len(body["directions"]) > 1:
            raise UsageError(f"sweep={self.name!r}: has several objectives and no best trial; use front")
        if body["best"] is None:
            errors = [trial.error for trial in self._trials() if trial.error]
            why = f" The first one failed: {errors[0]}" if errors else ""
            raise UsageError(f"sweep={self.name!r}: no trial is complete; wait for one.{why}", field="sweep")
        return _result(body["best"])

    @property
    def front(self) -> list[TrialResult]:
        """Completed trials that no other one beats in every objective, in their order."""
        signs = [-1.0 if direction == "maximize" else 1.0 for direction in self._body()["directions"]]
        done = [trial for trial in self._trials() if trial.state == "completed" and trial.values]
        costs = [[sign * value for sign, value in zip(signs, trial.values, strict=True)] for trial in done]
        return [trial for trial, own in zip(done, costs, strict=True) if not any(_beats(cost, own) for cost in costs)]

    def wait(self, timeout: float | None = None) -> Sweep:
        """Wait until the sweep is over, and return it.

        Args:
            timeout: Longest wait in seconds; None for no limit.

        Raises:
            TimeoutError: It is not over yet.
            JobFailed: Its job ended before it did.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (body := self._body())["status"] not in ENDS:
            if body["job"] is not None:
                job = self._job_of(body["job"])
                if job.done() and self._body()["status"] not in ENDS:
                    raise job.exception() or JobFailed(
                        f"sweep={self.name!r}: its job {job.id} has ended before it; start it again under its name",
                        url=self._address.url,
                        job=job.id,
                        state=job.status,
                    )
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"sweep={self.name!r}: is {body['status']} after {timeout:g} s; raise timeout")
            time.sleep(_LOOK_S)
        return self

    def stop(self) -> None:
        """Let the sweep end: no trial begins, and running ones stop at their next report."""
        self._send("POST", "cancel", {})

    def delete(self) -> None:
        """Delete the sweep with its trials for good. Their runs stay. Raises HubError if one may not."""
        with HubConnection(self._address) as connection:
            connection.json("DELETE", path_of("v1", "sweeps", str(self.id)))

    def register_best(self, name: str, artifact_path: str, tags: Mapping[str, object] | None = None) -> int:
        """Register an artifact of the best trial's run as a new version of a model, and return its number.

        Args:
            name: Name of the model; made if missing.
            artifact_path: Key of the artifact, or folder of artifacts; or the URL of a checkpoint, which retention
                never deletes then.
            tags: Tags of the version; its sweep, trial and value are added.

        Raises:
            UsageError: No trial is complete, or its run has no such artifact.
            CheckpointNotFound: No checkpoint is at the URL.
            OSError: Its store does not answer, or this process may not write there.
            HubError: The hub refuses the model.
        """
        best = self.best
        if best.run is None:
            raise UsageError(f"sweep={self.name!r}: its best trial is of an earlier sweep; register it there")
        known = {"sweep": self.name, "trial": best.number, "value": best.value}
        with HubConnection(self._address) as connection:
            return register(connection, name, best.run, artifact_path, {**known, **(tags or {})})

    # Within -----------------------------------------------------------------------------------------------------------

    def _body(self) -> dict[str, Any]:
        return dict(self._send("GET"))

    def _send(self, method: str, *parts: str | Mapping[str, Any]) -> Any:
        names = [part for part in parts if isinstance(part, str)]
        body = next((part for part in parts if not isinstance(part, str)), None)
        with HubConnection(self._address) as connection:
            return connection.json(method, path_of("v1", "hpo", str(self.id), *names), body)

    def _job_of(self, number: str) -> Job[Any]:
        return Job(self._address, {"id": number, "name": self.name})

    def _trials(self) -> Iterator[TrialResult]:
        path, after = path_of("v1", "hpo", str(self.id), "trials"), -1
        with HubConnection(self._address) as connection:
            while rows := connection.json("GET", path, query={"after": after, "limit": _PAGE})["trials"]:
                yield from map(_result, rows)
                after = rows[-1]["number"]
                if len(rows) < _PAGE:
                    return


def _result(row: Mapping[str, Any]) -> TrialResult:
    return TrialResult(
        number=row["number"],
        state=row["state"],
        params=dict(row["params"]),
        values=tuple(float(value) for value in row["values"] or ()),
        run=row["run"],
        error=row["error"],
        stopped_by=row["stopped_by"],
    )


def _beats(cost: Sequence[float], other: Sequence[float]) -> bool:
    """Return whether a trial is nowhere worse than another one, and somewhere better."""
    return all(a <= b for a, b in zip(cost, other, strict=True)) and any(
        a < b for a, b in zip(cost, other, strict=True)
    )
