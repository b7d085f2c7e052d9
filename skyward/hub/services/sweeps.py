"""Sweeps: searches for good parameters, whose trials many workers make and read at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..model.access import Actor, Right
from ..model.names import check_text
from ..model.refusal import Reason, Refusal
from ..model.sweeps import (
    Direction,
    SweepRecord,
    TrialChange,
    TrialChanges,
    TrialRecord,
    TrialState,
    TrialStep,
    check_change,
    check_sweep_name,
)
from ..store import leases, sweeps
from ..store.transaction import ReadSnapshot, Transaction
from .calls import Service, require_delete, require_no_run_token


class Sweeps(Service):
    """Calls about sweeps.

    A request that comes again, because its answer was lost, has the same key and the same answer. So a trial is made
    once, and the one worker that took a waiting trial learns it. Trials are not in the audit, as points are not.
    """

    async def create_sweep(self, actor: Actor, name: str, key: str, directions: Sequence[Direction]) -> SweepRecord:
        """Make a sweep. Its name is unique in the project."""
        actor.require(Right.WRITE)
        require_no_run_token(actor)
        return await self.database.write(self._create, actor, check_sweep_name(name), key, directions)

    async def sweeps(self, actor: Actor, after: int, limit: int, name: str | None = None) -> list[SweepRecord]:
        """Return sweeps in the order of their numbers, those behind `after`; with `name` only that one."""
        actor.require(Right.READ)
        require_no_run_token(actor)
        return await self.database.read(sweeps.find_sweeps, actor.project, after, limit, name)

    async def sweep(self, actor: Actor, number: int) -> SweepRecord:
        """Return a sweep."""
        actor.require(Right.READ)
        require_no_run_token(actor)
        return await self.database.read(need_sweep, actor, number)

    async def change_sweep(
        self, actor: Actor, number: int, user_attrs: Mapping[str, str], system_attrs: Mapping[str, str]
    ) -> SweepRecord:
        """Set attributes of a sweep."""
        actor.require(Right.WRITE)
        require_no_run_token(actor)
        for key in (*user_attrs, *system_attrs):
            check_text("key", key)
        return await self.database.write(self._change_sweep, actor, number, user_attrs, system_attrs)

    async def delete_sweep(self, actor: Actor, number: int) -> None:
        """Delete a sweep with its trials for good."""
        actor.require(Right.WRITE)
        require_no_run_token(actor)
        await self.database.write(self._delete, actor, number)

    async def create_trial(
        self, actor: Actor, sweep: int, change: TrialChange, fence: int | None = None
    ) -> TrialRecord:
        """Make a trial, which runs unless the change says otherwise.

        Raises:
            Refusal: CONFLICT, where `fence` is given and another driver has taken the lease of the sweep.
        """
        actor.require(Right.WRITE)
        require_no_run_token(actor)
        return await self.database.write(self._create_trial, actor, sweep, check_change(change), fence)

    async def trial(self, actor: Actor, number: int) -> tuple[TrialRecord, list[TrialStep]]:
        """Return a trial and the values that it reported."""
        actor.require(Right.READ)
        require_no_run_token(actor)
        return await self.database.read(_trial_with_steps, actor, number)

    async def change_trial(self, actor: Actor, number: int, change: TrialChange) -> bool:
        """Change a trial. Return False where another worker took it before.

        Raises:
            Refusal: CONFLICT, where the trial is finished.
        """
        actor.require(Right.WRITE)
        require_no_run_token(actor)
        return await self.database.write(self._change_trial, actor, number, check_change(change))

    async def changes(self, actor: Actor, sweep: int, since: int) -> TrialChanges:
        """Return the trials that changed since a version of the sweep."""
        actor.require(Right.READ)
        require_no_run_token(actor)
        return await self.database.read(_changes, actor, sweep, since)

    async def beat(self, actor: Actor, trial: int) -> None:
        """Note that the worker of a trial is alive."""
        actor.require(Right.WRITE)
        require_no_run_token(actor)
        if not await self.database.write(sweeps.beat, actor.project, trial):
            raise _no_trial(trial)

    async def silent_trials(self, actor: Actor, sweep: int, silent_s: int) -> list[int]:
        """Return the running trials whose worker was alive, and has been silent for longer than this."""
        actor.require(Right.READ)
        require_no_run_token(actor)
        return await self.database.read(_silent, actor, sweep, self.clock() - silent_s * 1000)

    def _create(
        self, tx: Transaction, actor: Actor, name: str, key: str, directions: Sequence[Direction]
    ) -> SweepRecord:
        added = sweeps.add_sweep(tx, actor.project, name, key, actor.user, directions)
        if added is None:
            raise Refusal(
                Reason.EXISTS, f"name={name[:80]!r}: a sweep has this name already; choose another one", field="name"
            )
        number, is_new = added
        if is_new:
            self.on_change(tx, actor, "sweep.create", f"sweep/{number}", {"name": name})
        return need_sweep(tx, actor, number)

    def _change_sweep(
        self, tx: Transaction, actor: Actor, number: int, user: Mapping[str, str], system: Mapping[str, str]
    ) -> SweepRecord:
        sweeps.set_sweep_attrs(tx, need_sweep(tx, actor, number, end=tx.for_update), user, system)
        if user or system:
            self.on_change(tx, actor, "sweep.update", f"sweep/{number}", {"attrs": [*user, *system]})
        return need_sweep(tx, actor, number)

    def _delete(self, tx: Transaction, actor: Actor, number: int) -> None:
        sweep = need_sweep(tx, actor, number, end=tx.for_update)
        require_delete(actor, sweep.owner)
        sweeps.delete_sweep(tx, number)
        leases.drop_lease(tx, driver_lease(number))
        self.on_change(tx, actor, "sweep.delete", f"sweep/{number}", {"name": sweep.name})

    def _create_trial(
        self, tx: Transaction, actor: Actor, number: int, change: TrialChange, fence: int | None
    ) -> TrialRecord:
        sweep = sweeps.begin_change(tx, actor.project, number)
        if sweep is None:
            raise _no_sweep(number)
        # A driver takes the lease with the sweep's row locked, as it is here, so it will see this trial.
        if fence is not None and not leases.has_fence(tx, driver_lease(number), fence):
            raise Refusal(
                Reason.CONFLICT,
                f"fence={fence}: another program drives the sweep now; leave its trials to it",
                field="fence",
            )
        _check_values(sweep, change)
        return sweeps.add_trial(tx, sweep, change)

    def _change_trial(self, tx: Transaction, actor: Actor, number: int, change: TrialChange) -> bool:
        sweep = sweeps.begin_trial_change(tx, actor.project, number)
        found = sweeps.find_trial(tx, actor.project, number)
        if sweep is None or found is None:
            raise _no_trial(number)
        trial, state_key = found
        if change.state is not None and change.key == state_key:
            return True  # the answer was lost
        if trial.state.is_finished:
            raise Refusal(
                Reason.CONFLICT,
                f"trial={number}: has {trial.state} and can not be changed; ask for another one",
                field="trial",
            )
        if change.state is TrialState.RUNNING and trial.state is not TrialState.WAITING:
            return False
        _check_values(sweep, change)
        sweeps.change_trial(tx, sweep.version, trial, state_key, change)
        return True


def _check_values(sweep: SweepRecord, change: TrialChange) -> None:
    if change.values is not None and len(change.values) != len(sweep.directions):
        raise Refusal(
            Reason.INVALID,
            f"values: {len(change.values)}, and the sweep has {len(sweep.directions)} objectives; give one for each",
            field="values",
        )


def driver_lease(number: int) -> str:
    """Return the name of the lease of a sweep's driver."""
    return f"sweep/{number}"


def need_sweep(snapshot: ReadSnapshot, actor: Actor, number: int, *, end: str = "") -> SweepRecord:
    """Find a sweep of the actor's project. `end` is the end of the statement."""
    found = sweeps.find_sweep(snapshot, actor.project, number, end=end)
    if found is None:
        raise _no_sweep(number)
    return found


def _trial_with_steps(snapshot: ReadSnapshot, actor: Actor, number: int) -> tuple[TrialRecord, list[TrialStep]]:
    found = sweeps.find_trial(snapshot, actor.project, number)
    if found is None:
        raise _no_trial(number)
    return found[0], sweeps.steps_of(snapshot, number)


def _changes(snapshot: ReadSnapshot, actor: Actor, number: int, since: int) -> TrialChanges:
    return sweeps.changes_since(snapshot, need_sweep(snapshot, actor, number), since)


def _silent(snapshot: ReadSnapshot, actor: Actor, number: int, before: int) -> list[int]:
    need_sweep(snapshot, actor, number)
    return sweeps.silent_trials(snapshot, number, before)


def _no_sweep(number: int) -> Refusal:
    return Refusal(
        Reason.MISSING, f"sweep={number}: no such sweep in this project; see the list of sweeps", field="sweep"
    )


def _no_trial(number: int) -> Refusal:
    return Refusal(
        Reason.MISSING, f"trial={number}: no such trial in this project; see the trials of a sweep", field="trial"
    )
