"""Handlers of sweeps and their trials."""

from __future__ import annotations

from collections.abc import Sequence

from ...model.refusal import Reason, Refusal
from ...model.sweeps import Direction, Parameter, SweepRecord, TrialChange, TrialRecord, TrialState, TrialStep
from ..reply import number
from ..routing import Call
from . import sweep_wire, wire


async def search(call: Call, request: sweep_wire.SweepsQuery) -> sweep_wire.SweepsOut:
    found = await call.hub.sweeps.sweeps(call.actor, request.after, request.limit, request.name)
    return sweep_wire.SweepsOut([_sweep(sweep) for sweep in found])


async def create(call: Call, request: sweep_wire.NewSweep) -> sweep_wire.SweepOut:
    directions = [Direction(direction) for direction in request.directions]
    return _sweep(await call.hub.sweeps.create_sweep(call.actor, request.name, request.key, directions))


async def get(call: Call, _request: wire.Nothing) -> sweep_wire.SweepOut:
    return _sweep(await call.hub.sweeps.sweep(call.actor, sweep_number(call)))


async def change(call: Call, request: sweep_wire.SweepChange) -> sweep_wire.SweepOut:
    changed = await call.hub.sweeps.change_sweep(
        call.actor, sweep_number(call), request.user_attrs, request.system_attrs
    )
    return _sweep(changed)


async def delete(call: Call, _request: wire.Nothing) -> wire.Done:
    await call.hub.sweeps.delete_sweep(call.actor, sweep_number(call))
    return wire.Done()


async def create_trial(call: Call, request: sweep_wire.NewTrial) -> sweep_wire.TrialOut:
    return _trial(await call.hub.sweeps.create_trial(call.actor, sweep_number(call), _change(request), request.fence))


async def trials(call: Call, request: sweep_wire.TrialsQuery) -> sweep_wire.TrialChangesOut:
    changes = await call.hub.sweeps.changes(call.actor, sweep_number(call), request.since)
    return sweep_wire.TrialChangesOut(
        changes.version, changes.is_complete, [_trial(trial) for trial in changes.trials], _steps(changes.steps)
    )


async def silent(call: Call, request: sweep_wire.SilentQuery) -> sweep_wire.SilentTrials:
    return sweep_wire.SilentTrials(
        await call.hub.sweeps.silent_trials(call.actor, sweep_number(call), request.silent_s)
    )


async def get_trial(call: Call, _request: wire.Nothing) -> sweep_wire.TrialDetailOut:
    trial, steps = await call.hub.sweeps.trial(call.actor, sweep_number(call))
    return sweep_wire.TrialDetailOut(_trial(trial), _steps(steps))


async def change_trial(call: Call, request: sweep_wire.TrialBody) -> sweep_wire.TrialChanged:
    return sweep_wire.TrialChanged(await call.hub.sweeps.change_trial(call.actor, sweep_number(call), _change(request)))


async def beat(call: Call, _request: wire.Nothing) -> wire.Done:
    await call.hub.sweeps.beat(call.actor, sweep_number(call))
    return wire.Done()


def sweep_number(call: Call) -> int:
    """Return the number of a sweep or a trial in the path."""
    text = call.path["id"]
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise Refusal(Reason.MISSING, f"id={text[:80]!r}: no such number; see the list of sweeps", field="id")
    return int(text)


def _sweep(value: SweepRecord) -> sweep_wire.SweepOut:
    return sweep_wire.SweepOut(
        id=value.id,
        name=value.name,
        owner=value.owner,
        directions=[direction.value for direction in value.directions],
        created_at=value.created_at,
        version=value.version,
        trials=value.trials,
        user_attrs=dict(value.user_attrs),
        system_attrs=dict(value.system_attrs),
    )


def _trial(value: TrialRecord) -> sweep_wire.TrialOut:
    return sweep_wire.TrialOut(
        id=value.id,
        sweep=value.sweep,
        number=value.number,
        state=value.state.value,
        values=None if value.values is None else [number(item) for item in value.values],
        params={
            name: sweep_wire.ParameterValue(number(parameter.value), parameter.distribution)
            for name, parameter in value.params.items()
        },
        user_attrs=dict(value.user_attrs),
        system_attrs=dict(value.system_attrs),
        started_us=value.started_us,
        ended_us=value.ended_us,
    )


def _steps(steps: Sequence[TrialStep]) -> list[sweep_wire.TrialStepOut]:
    return [sweep_wire.TrialStepOut(step.trial, step.step, number(step.value)) for step in steps]


def _change(request: sweep_wire.TrialBody) -> TrialChange:
    return TrialChange(
        key=request.key,
        state=None if request.state is None else TrialState(request.state),
        values=None if request.values is None else [_float("values", item) for item in request.values],
        params={
            name: Parameter(_float("params", parameter.value), parameter.distribution)
            for name, parameter in request.params.items()
        },
        user_attrs=request.user_attrs,
        system_attrs=request.system_attrs,
        steps={step: _float("steps", value) for step, value in request.steps},
        started_us=request.started_us,
        ended_us=request.ended_us,
    )


def _float(field: str, value: sweep_wire.Number) -> float:
    try:
        return float(value)
    except ValueError:
        raise Refusal(Reason.INVALID, f"{field}={value!r:.80}: is no number; give one", field=field) from None
