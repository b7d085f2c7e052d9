"""Rows of sweeps and their trials."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..model.sweeps import (
    MOST_STEPS,
    Direction,
    Parameter,
    SweepRecord,
    TrialChange,
    TrialChanges,
    TrialRecord,
    TrialState,
    TrialStep,
)
from .transaction import ReadSnapshot, Transaction

CONFIG = "skyward:config"
"""Attribute of a sweep that skyward runs: its configuration, as JSON."""
JOB = "skyward:job"
"""Attribute of a sweep: the id of the job that runs it, as JSON."""
MOST_TRIALS = 2_000
"""Trials that one answer has."""

_SWEEP = "id, name, owner, directions, created_at, version, trials, user_attrs, system_attrs"
_TRIAL = (
    "trial.id, trial.sweep, trial.number, trial.state, trial.objective, trial.params, trial.user_attrs,"
    " trial.system_attrs, trial.started_us, trial.ended_us, trial.changed"
)
_OF_PROJECT = "FROM trial JOIN sweep ON sweep.id = trial.sweep WHERE trial.id = ? AND sweep.project = ?"


# Sweeps ---------------------------------------------------------------------------------------------------------------


def add_sweep(
    tx: Transaction, project: int, name: str, key: str, owner: str, directions: Sequence[Direction]
) -> tuple[int, bool] | None:
    """Add a sweep. Return its number and whether it is new, or None where the name is taken by another request."""
    made = tx.execute(
        "INSERT INTO sweep (project, name, key, owner, directions, created_at, version, trials, user_attrs,"
        " system_attrs) VALUES (?, ?, ?, ?, ?, ?, 0, 0, '{}', '{}') ON CONFLICT DO NOTHING RETURNING id",
        (project, name, key, owner, json.dumps(list(directions)), tx.now),
    ).fetchone()
    row = (
        made
        or tx.execute(
            "SELECT id FROM sweep WHERE project = ? AND name = ? AND key = ?", (project, name, key)
        ).fetchone()
    )
    return (int(row[0]), made is not None) if row else None


def find_sweep(snapshot: ReadSnapshot, project: int, number: int, *, end: str = "") -> SweepRecord | None:
    """Find a sweep of a project. `end` is the end of the statement."""
    row = snapshot.execute(
        f"SELECT {_SWEEP} FROM sweep WHERE id = ? AND project = ?{end}", (number, project)
    ).fetchone()
    return _sweep_of(row) if row else None


def find_sweeps(snapshot: ReadSnapshot, project: int, after: int, limit: int, name: str | None) -> list[SweepRecord]:
    """Return sweeps in the order of their numbers, those behind `after`; with `name` only that one."""
    condition, parameters = ("", ()) if name is None else (" AND name = ?", (name,))
    rows = snapshot.execute(
        f"SELECT {_SWEEP} FROM sweep WHERE project = ? AND id > ?{condition} ORDER BY id LIMIT ?",
        (project, after, *parameters, limit),
    ).fetchall()
    return [_sweep_of(row) for row in rows]


def set_sweep_attrs(tx: Transaction, sweep: SweepRecord, user: Mapping[str, str], system: Mapping[str, str]) -> None:
    """Set attributes of a sweep."""
    texts = (json.dumps({**sweep.user_attrs, **user}), json.dumps({**sweep.system_attrs, **system}))
    tx.execute("UPDATE sweep SET user_attrs = ?, system_attrs = ? WHERE id = ?", (*texts, sweep.id))


def searches(snapshot: ReadSnapshot, project: int, before: int | None, limit: int) -> list[SweepRecord]:
    """Return the sweeps that have a configuration, the newest first."""
    rows = snapshot.execute(
        f"SELECT {_SWEEP} FROM sweep WHERE project = ? AND id < ? AND system_attrs LIKE ? ORDER BY id DESC LIMIT ?",
        (project, 2**62 if before is None else before, f'%"{CONFIG}"%', limit),
    ).fetchall()
    return [_sweep_of(row) for row in rows]


def delete_sweep(tx: Transaction, number: int) -> None:
    """Delete a sweep with its trials. Its number is never used again."""
    tx.execute("DELETE FROM trial_step WHERE sweep = ?", (number,))
    tx.execute("DELETE FROM trial WHERE sweep = ?", (number,))
    tx.execute("DELETE FROM sweep WHERE id = ?", (number,))


# Trials ---------------------------------------------------------------------------------------------------------------


def begin_change(tx: Transaction, project: int, number: int) -> SweepRecord | None:
    """Count a change of a sweep's trials on. The sweep is then this transaction's, until its end."""
    row = tx.execute(
        f"UPDATE sweep SET version = version + 1 WHERE id = ? AND project = ? RETURNING {_SWEEP}", (number, project)
    ).fetchone()
    return _sweep_of(row) if row else None


def begin_trial_change(tx: Transaction, project: int, trial: int) -> SweepRecord | None:
    """Do what `begin_change` does, for the sweep of a trial."""
    row = tx.execute(
        "UPDATE sweep SET version = version + 1 WHERE id = (SELECT sweep FROM trial WHERE id = ?) AND project = ?"
        f" RETURNING {_SWEEP}",
        (trial, project),
    ).fetchone()
    return _sweep_of(row) if row else None


def add_trial(tx: Transaction, sweep: SweepRecord, change: TrialChange) -> TrialRecord:
    """Add a trial as the change that began, or return the one that the same request added before."""
    state = change.state or TrialState.RUNNING
    started_us = change.started_us if change.started_us or state is TrialState.WAITING else tx.now * 1000
    ended_us = change.ended_us if change.ended_us or not state.is_finished else tx.now * 1000
    row = tx.execute(
        "INSERT INTO trial (sweep, number, key, state, state_key, objective, params, user_attrs, system_attrs,"
        " started_us, ended_us, changed) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"
        f" RETURNING {_TRIAL.replace('trial.', '')}",
        (
            *(sweep.id, sweep.trials, change.key, state.value, change.key, _numbers(change.values)),
            *(_params(change.params), json.dumps(dict(change.user_attrs)), json.dumps(dict(change.system_attrs))),
            *(started_us, ended_us, sweep.version),
        ),
    ).fetchone()
    if row is None:
        row = tx.execute(f"SELECT {_TRIAL} FROM trial WHERE sweep = ? AND key = ?", (sweep.id, change.key)).fetchone()
        return _trial_of(row)
    tx.execute("UPDATE sweep SET trials = trials + 1 WHERE id = ?", (sweep.id,))
    trial = _trial_of(row)
    _add_steps(tx, trial, change.steps, sweep.version)
    return trial


def find_trial(snapshot: ReadSnapshot, project: int, number: int) -> tuple[TrialRecord, str] | None:
    """Find a trial of a project, and the key of the request that changed its state last."""
    row = snapshot.execute(f"SELECT {_TRIAL}, trial.state_key {_OF_PROJECT}", (number, project)).fetchone()
    return (_trial_of(row[:-1]), row[-1]) if row else None


def steps_of(snapshot: ReadSnapshot, trial: int) -> list[TrialStep]:
    """Return the values that a trial reported, in their order."""
    rows = snapshot.execute("SELECT trial, step, value FROM trial_step WHERE trial = ? ORDER BY step", (trial,))
    return [_step_of(row) for row in rows.fetchall()]


def change_trial(tx: Transaction, version: int, trial: TrialRecord, state_key: str, change: TrialChange) -> None:
    """Write a change of a trial that may be changed."""
    _add_steps(tx, trial, change.steps, version)
    if not (change.state or change.values or change.params or change.user_attrs or change.system_attrs):
        return
    state = change.state or trial.state
    begins = change.state is TrialState.RUNNING
    tx.execute(
        "UPDATE trial SET state = ?, state_key = ?, objective = ?, params = ?, user_attrs = ?, system_attrs = ?,"
        " started_us = ?, ended_us = ?, changed = ? WHERE id = ?",
        (
            *(state.value, change.key if change.state else state_key),
            _numbers(trial.values if change.values is None else change.values),
            _params({**trial.params, **change.params}),
            json.dumps({**trial.user_attrs, **change.user_attrs}),
            json.dumps({**trial.system_attrs, **change.system_attrs}),
            (change.started_us or tx.now * 1000) if begins else trial.started_us,
            (change.ended_us or tx.now * 1000) if state.is_finished else None,
            *(version, trial.id),
        ),
    )


def count_by_state(snapshot: ReadSnapshot, sweep: int) -> dict[str, int]:
    """Return the number of trials of a sweep in each state that one has."""
    rows = snapshot.execute("SELECT state, count(*) FROM trial WHERE sweep = ? GROUP BY state", (sweep,)).fetchall()
    return {str(state): int(count) for state, count in rows}


def best_trial(snapshot: ReadSnapshot, sweep: SweepRecord) -> TrialRecord | None:
    """Return the completed trial with the best finite value, of several the first; None with several objectives."""
    if len(sweep.directions) > 1:
        return None
    order = "ASC" if sweep.directions[0] is Direction.MINIMIZE else "DESC"
    row = snapshot.execute(
        f"SELECT {_TRIAL} FROM trial WHERE sweep = ? AND state = 'completed' AND objective IS NOT NULL"
        " AND objective NOT LIKE ?"
        f" ORDER BY CAST(substr(objective, 2, length(objective) - 2) AS DOUBLE PRECISION) {order}, number LIMIT 1",
        (sweep.id, "%n%"),  # as in Infinity
    ).fetchone()
    return _trial_of(row) if row else None


def trials_after(snapshot: ReadSnapshot, sweep: int, after: int, limit: int) -> list[TrialRecord]:
    """Return the trials of a sweep behind a number, in their order."""
    rows = snapshot.execute(
        f"SELECT {_TRIAL} FROM trial WHERE sweep = ? AND number > ? ORDER BY number LIMIT ?", (sweep, after, limit)
    ).fetchall()
    return [_trial_of(row) for row in rows]


def beat(tx: Transaction, project: int, number: int) -> bool:
    """Note that a trial is alive. Return False where the project has no such trial."""
    row = tx.execute(
        "UPDATE trial SET heartbeat_at = ? WHERE id = ? AND sweep IN (SELECT id FROM sweep WHERE project = ?)"
        " RETURNING id",
        (tx.now, number, project),
    ).fetchone()
    return row is not None


def silent_trials(snapshot: ReadSnapshot, sweep: int, before: int) -> list[int]:
    """Return the running trials of a sweep whose last heartbeat was before a time."""
    rows = snapshot.execute(
        "SELECT id FROM trial WHERE sweep = ? AND state = 'running' AND heartbeat_at < ? ORDER BY id", (sweep, before)
    ).fetchall()
    return [int(row[0]) for row in rows]


def changes_since(snapshot: ReadSnapshot, sweep: SweepRecord, since: int) -> TrialChanges:
    """Return the trials and steps that changed since a version, as many as one answer takes.

    Both are cut at the same version, so that a reader who asks on misses nothing.
    """
    if sweep.version <= since:
        return TrialChanges(sweep.version, True, (), ())
    trials = snapshot.execute(
        f"SELECT {_TRIAL} FROM trial WHERE sweep = ? AND changed > ? ORDER BY changed LIMIT ?",
        (sweep.id, since, MOST_TRIALS + 1),
    ).fetchall()
    steps = snapshot.execute(
        "SELECT trial, step, value, changed FROM trial_step WHERE sweep = ? AND changed > ? ORDER BY changed LIMIT ?",
        (sweep.id, since, 2 * MOST_STEPS + 1),
    ).fetchall()
    version = sweep.version
    if len(trials) > MOST_TRIALS:
        version = min(version, trials[-1][-1] - 1)
    if len(steps) > 2 * MOST_STEPS:
        version = min(version, steps[-1][-1] - 1)
    return TrialChanges(
        version,
        version == sweep.version,
        [_trial_of(row) for row in trials if row[-1] <= version],
        [_step_of(row) for row in steps if row[-1] <= version],
    )


# Columns --------------------------------------------------------------------------------------------------------------


def _add_steps(tx: Transaction, trial: TrialRecord, steps: Mapping[int, float], version: int) -> None:
    if steps:
        tx.execute_many(
            "INSERT INTO trial_step (trial, step, sweep, changed, value) VALUES (?, ?, ?, ?, ?)"
            " ON CONFLICT (trial, step) DO UPDATE SET changed = excluded.changed, value = excluded.value",
            [
                (trial.id, step, trial.sweep, version, None if math.isnan(value) else value)
                for step, value in steps.items()
            ],
        )


def _numbers(values: Sequence[float] | None) -> str | None:
    return None if values is None else json.dumps([float(value) for value in values])


def _params(params: Mapping[str, Parameter]) -> str:
    return json.dumps({name: [parameter.value, parameter.distribution] for name, parameter in params.items()})


def _sweep_of(row: Sequence[Any]) -> SweepRecord:
    number, name, owner, directions, created_at, version, trials, user_attrs, system_attrs = row
    return SweepRecord(
        id=number,
        name=name,
        owner=owner,
        directions=[Direction(direction) for direction in json.loads(directions)],
        created_at=created_at,
        version=version,
        trials=trials,
        user_attrs=json.loads(user_attrs),
        system_attrs=json.loads(system_attrs),
    )


def _trial_of(row: Sequence[Any]) -> TrialRecord:
    number, sweep, place, state, values, params, user_attrs, system_attrs, started_us, ended_us, changed = row
    return TrialRecord(
        id=number,
        sweep=sweep,
        number=place,
        state=TrialState(state),
        values=None if values is None else json.loads(values),
        params={name: Parameter(*parameter) for name, parameter in json.loads(params).items()},
        user_attrs=json.loads(user_attrs),
        system_attrs=json.loads(system_attrs),
        started_us=started_us,
        ended_us=ended_us,
        changed=changed,
    )


def _step_of(row: Sequence[Any]) -> TrialStep:
    return TrialStep(row[0], row[1], math.nan if row[2] is None else row[2])
