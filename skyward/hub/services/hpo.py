"""Sweeps that skyward runs: their configuration, the program that drives them, and how far they are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..model.access import Actor, Right
from ..model.jobs import JobState
from ..model.refusal import Reason, Refusal
from ..model.sweep_config import SweepConfig, parse_config
from ..model.sweeps import Direction, SweepRecord, TrialRecord, check_sweep_name
from ..store import jobs, leases, sweeps
from ..store.sweeps import CONFIG, JOB
from ..store.transaction import ReadSnapshot, Transaction
from .calls import Service, require_no_run_token
from .jobs.jobs import Jobs
from .sweeps import driver_lease, need_sweep

STATE, STOP, RUN = "skyward:state", "skyward:stop", "skyward:run"
"""Attributes of a sweep: its end, whether it is told to stop, and its run."""
ENDS = ("completed", "stopped", "failed")
"""Ends of a sweep that its driver reports. A completed one whose limit is raised goes on."""
_WAITING = (JobState.QUEUED, JobState.RESERVED, JobState.STARTING, JobState.LOST, JobState.PREEMPTING)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRecord:
    """A sweep with its configuration and its progress.

    Attributes:
        status: "queued", "running", "interrupted", "completed", "stopped" or "failed".
        config: Configuration; see `model.sweep_config.SweepConfig`.
        counts: State -> number of its trials.
        best: Best completed trial; None if there is none, and with several objectives.
        run: Id of its run, whose children are the runs of its trials.
        job: Id of its job; None where a program drives it.
    """

    sweep: SweepRecord
    status: str
    config: SweepConfig
    counts: Mapping[str, int]
    best: TrialRecord | None
    run: str | None
    job: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverLease:
    """Answer to the driver of a sweep.

    Attributes:
        is_held: Whether it drives the sweep. Otherwise another program does.
        fence: Number that grows with each change of the driver. One that sees it grow has been replaced meanwhile.
        is_stopping: Whether it shall begin no more trials, and stop the running ones.
    """

    is_held: bool
    fence: int
    is_stopping: bool


class Hpo(Service):
    """Calls about sweeps that skyward runs. Their trials are those of `Sweeps`.

    One program drives a sweep, and holds a lease meanwhile. If it dies, another one goes on from the rows.
    """

    def __init__(self, *arguments: Any, jobs: Jobs, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._jobs = jobs

    async def start(self, actor: Actor, name: str, key: str, config: Mapping[str, Any]) -> SearchRecord:
        """Make a sweep, or go on with the one of that name, whose search must be the same.

        A job with its number then runs it, or a program that takes the lease.
        """
        actor.require(Right.WRITE)
        require_no_run_token(actor)
        parsed = parse_config(config)
        check_sweep_name(name)
        return await self.database.write(self._open, actor, name, key, parsed)

    async def search(self, actor: Actor, number: int) -> SearchRecord:
        """Return a sweep with its progress."""
        actor.require(Right.READ)
        require_no_run_token(actor)
        return await self.database.read(_need_search, actor, number, self.clock())

    async def searches(self, actor: Actor, before: int | None, limit: int) -> list[SearchRecord]:
        """Return the sweeps that skyward runs, the newest first."""
        actor.require(Right.READ)
        require_no_run_token(actor)
        return await self.database.read(_searches, actor, before, limit, self.clock())

    async def trials(self, actor: Actor, number: int, after: int, limit: int) -> list[TrialRecord]:
        """Return the trials of a sweep behind a number, in their order."""
        actor.require(Right.READ)
        require_no_run_token(actor)
        return await self.database.read(_trials, actor, number, after, limit)

    async def stop(self, actor: Actor, number: int) -> SearchRecord:
        """Tell the driver of a sweep to stop its trials and to end. A waiting job of it is cancelled."""
        actor.require(Right.WRITE)
        require_no_run_token(actor)
        record, waiting_job = await self.database.write(self._stop, actor, number)
        if waiting_job is not None:
            await self._jobs.cancel(actor, waiting_job)
        return record

    async def hold(self, actor: Actor, number: int, driver: str, lasts_ms: int) -> DriverLease:
        """Take or renew the lease of the program that drives a sweep."""
        actor.require(Right.WRITE)
        require_no_run_token(actor)
        return await self.database.write(_hold, actor, number, driver, lasts_ms)

    async def give_up(self, actor: Actor, number: int, driver: str, state: str | None) -> None:
        """End the lease of a driver, and with a state the sweep."""
        actor.require(Right.WRITE)
        require_no_run_token(actor)
        if (await self.hold(actor, number, driver, 0)).is_held and state is not None:
            await self.database.write(self._end, actor, number, state)

    # Changes ----------------------------------------------------------------------------------------------------------

    def _open(self, tx: Transaction, actor: Actor, name: str, key: str, config: SweepConfig) -> SearchRecord:
        directions = [Direction(goal.direction) for goal in config.objective]
        added = sweeps.add_sweep(tx, actor.project, name, key, actor.user, directions)
        text = json.dumps(config.as_dict())
        if added is None or not added[1]:
            (row,) = sweeps.find_sweeps(tx, actor.project, 0, 1, name)
            return self._reopen(tx, actor, row, config, text)
        number = added[0]
        leases.add_lease(tx, driver_lease(number))
        sweeps.set_sweep_attrs(tx, need_sweep(tx, actor, number), {}, {CONFIG: text})
        self.on_change(tx, actor, "sweep.create", f"sweep/{number}", {"name": name})
        return _need_search(tx, actor, number, self.clock())

    def _reopen(self, tx: Transaction, actor: Actor, row: SweepRecord, config: SweepConfig, text: str) -> SearchRecord:
        known = _config_of(row)
        if known is None:
            raise Refusal(
                Reason.EXISTS, f"name={row.name!r:.80}: a study has this name already; choose another one", field="name"
            )
        before, now = known.search_of(), config.search_of()
        for field in sorted(before.keys() | now.keys()):
            if before.get(field) != now.get(field):
                raise Refusal(
                    Reason.CONFLICT,
                    f"{field}={json.dumps(now.get(field)):.60}: the sweep {row.name!r:.60} has"
                    f" {json.dumps(before.get(field)):.60}; choose another name",
                    field=field,
                )
        record = _search_of(tx, actor, row, self.clock())
        is_raised = record.status == "completed" and config.trials > known.trials
        reopened = {STATE: "null", STOP: "false"} if is_raised or record.status in ("stopped", "failed") else {}
        if reopened or config != known:
            sweeps.set_sweep_attrs(tx, row, {}, {CONFIG: text, **reopened})
            self.on_change(tx, actor, "sweep.resume", f"sweep/{row.id}", {"name": row.name})
        return _need_search(tx, actor, row.id, self.clock())

    def _stop(self, tx: Transaction, actor: Actor, number: int) -> tuple[SearchRecord, str | None]:
        """Tell the driver; without one, end the sweep. Return its waiting job too."""
        record = _need_search(tx, actor, number, self.clock())
        if record.status in ENDS:
            return record, None
        attrs = {STOP: "true"} if record.status == "running" else {STOP: "true", STATE: json.dumps("stopped")}
        sweeps.set_sweep_attrs(tx, need_sweep(tx, actor, number, end=tx.for_update), {}, attrs)
        self.on_change(tx, actor, "sweep.stop", f"sweep/{number}", {"name": record.sweep.name})
        stopped = _need_search(tx, actor, number, self.clock())
        return stopped, record.job if record.status == "queued" else None

    def _end(self, tx: Transaction, actor: Actor, number: int, state: str) -> SearchRecord:
        row = need_sweep(tx, actor, number, end=tx.for_update)
        sweeps.set_sweep_attrs(tx, row, {}, {STATE: json.dumps(state)})
        self.on_change(tx, actor, f"sweep.{state}", f"sweep/{number}", {"name": row.name})
        return _need_search(tx, actor, number, self.clock())


def _hold(tx: Transaction, actor: Actor, number: int, driver: str, lasts_ms: int) -> DriverLease:
    row = need_sweep(tx, actor, number, end=tx.for_update)  # no trial begins under the lease of before meanwhile
    fence = leases.take_lease(tx, driver_lease(number), driver, lasts_ms)
    return DriverLease(is_held=fence is not None, fence=fence or 0, is_stopping=row.system_attrs.get(STOP) == "true")


# Reading --------------------------------------------------------------------------------------------------------------


def _need_search(snapshot: ReadSnapshot, actor: Actor, number: int, now: int) -> SearchRecord:
    return _search_of(snapshot, actor, need_sweep(snapshot, actor, number), now)


def _searches(snapshot: ReadSnapshot, actor: Actor, before: int | None, limit: int, now: int) -> list[SearchRecord]:
    rows = sweeps.searches(snapshot, actor.project, before, limit)
    return [_search_of(snapshot, actor, row, now) for row in rows]


def _trials(snapshot: ReadSnapshot, actor: Actor, number: int, after: int, limit: int) -> list[TrialRecord]:
    return sweeps.trials_after(snapshot, need_sweep(snapshot, actor, number).id, after, limit)


def _search_of(snapshot: ReadSnapshot, actor: Actor, row: SweepRecord, now: int) -> SearchRecord:
    config = _config_of(row)
    if config is None:
        raise Refusal(
            Reason.MISSING, f"sweep={row.id}: is a study that skyward does not run; see /v1/sweeps", field="sweep"
        )
    job = _text(row, JOB)
    return SearchRecord(
        sweep=row,
        status=_text(row, STATE) or _status(snapshot, actor, row, job, now),
        config=config,
        counts=sweeps.count_by_state(snapshot, row.id),
        best=sweeps.best_trial(snapshot, row),
        run=_text(row, RUN),
        job=job,
    )


def _status(snapshot: ReadSnapshot, actor: Actor, row: SweepRecord, job: str | None, now: int) -> str:
    if leases.expiry_of(snapshot, driver_lease(row.id)) > now:
        return "running"
    found = None if job is None else jobs.find_job(snapshot, actor.project, job)
    if found is None:
        return "interrupted"
    if found.state in _WAITING:
        return "queued"
    return "running" if found.state is JobState.RUNNING else "interrupted"


def _config_of(row: SweepRecord) -> SweepConfig | None:
    text = row.system_attrs.get(CONFIG)
    return None if text is None else parse_config(json.loads(text))


def _text(row: SweepRecord, key: str) -> str | None:
    return json.loads(row.system_attrs.get(key, "null")) or None
