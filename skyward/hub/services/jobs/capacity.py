"""Capacity: the machine sets that jobs may use, declared as data."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...model.access import Actor, Right
from ...model.capacity import MachineSetRecord, MachineSetSpec
from ...model.refusal import Reason, Refusal
from ...store import attempts, identities, machine_sets
from ...store.attempts import AttemptRow
from ...store.jobs import JobRow
from ...store.transaction import ReadSnapshot, Transaction
from ..bell import Bell
from ..calls import Service
from .kept import kept_use
from .life import devices_of

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Capacity(Service):
    """Calls about machine sets. They belong to the whole hub."""

    def __init__(self, *arguments: Any, bell: Bell, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._bell = bell

    async def sets(self, actor: Actor) -> Sequence[MachineSetRecord]:
        """Return all machine sets, with the actor's project's jobs on them."""
        actor.require(Right.READ)
        return await self.database.read(_sets, actor)

    async def declare(self, actor: Actor, spec: MachineSetSpec) -> None:
        """Add a machine set, or change the one of that name."""
        actor.require(Right.OWN)
        if not _NAME.fullmatch(spec.name):
            raise Refusal(
                Reason.INVALID, "name: not 1 to 64 letters, digits, '.', '_' and '-'; choose another", field="name"
            )
        if not isinstance(spec.provider.get("type"), str):
            raise Refusal(
                Reason.INVALID, "provider: has no type; write {'type': 'local'}, for example", field="provider.type"
            )
        await self.database.write(self._declare, actor, spec)

    async def drain(self, actor: Actor, name: str, is_draining: bool) -> None:
        """Let running jobs end on a set and begin none, or let jobs begin there again."""
        actor.require(Right.OWN)
        await self.database.write(self._drain, actor, name, is_draining)

    async def remove(self, actor: Actor, name: str) -> None:
        """Remove a machine set that no job uses."""
        actor.require(Right.OWN)
        await self.database.write(self._remove, actor, name)

    async def declare_first(self, spec: MachineSetSpec) -> None:
        """Add a machine set to a hub that has none. For a hub that starts on a person's machine."""
        await self.database.write(_declare_first, spec)

    def _declare(self, tx: Transaction, actor: Actor, spec: MachineSetSpec) -> None:
        machine_sets.set_machines(tx, replace(spec, projects=_users_of(tx, actor, spec)))
        self.on_change(tx, actor, "capacity.declare", f"capacity/{spec.name}", {"nodes": spec.nodes})
        tx.after_commit(self._bell.ring)

    def _drain(self, tx: Transaction, actor: Actor, name: str, is_draining: bool) -> None:
        if not machine_sets.set_draining(tx, name, is_draining):
            raise _no_set(name)
        self.on_change(tx, actor, "capacity.drain", f"capacity/{name}", {"is_draining": is_draining})
        tx.after_commit(self._bell.ring)

    def _remove(self, tx: Transaction, actor: Actor, name: str) -> None:
        if any(attempt.machines == name for _, attempt in attempts.active_attempts(tx)):
            raise Refusal(Reason.CONFLICT, f"name={name[:80]}: jobs use it; drain it first", field="name")
        if not machine_sets.remove_machines(tx, name):
            raise _no_set(name)
        self.on_change(tx, actor, "capacity.remove", f"capacity/{name}", {})


def _users_of(snapshot: ReadSnapshot, actor: Actor, spec: MachineSetSpec) -> tuple[str, ...] | None:
    """Return the projects that may use a set; None for all.

    Jobs of one project leave files and processes on fixed machines that those of the next one could read. So only
    projects that somebody names together share them.
    """
    if spec.projects is None and spec.kind != "fixed":
        return None
    names = {row[0]: row[1] for row in identities.projects(snapshot, actor.organization, None)}
    if spec.projects is None:
        return (names[actor.project],)
    if "*" in spec.projects:
        return None
    for name in spec.projects:
        if name not in names.values():
            near = difflib.get_close_matches(name, names.values(), n=1)
            advice = f"did you mean {near[0]!r}?" if near else "see the list of projects, or write '*' for all"
            raise Refusal(Reason.INVALID, f"projects={name[:80]!r}: no such project; {advice}", field="projects")
    return tuple(spec.projects)


def _no_set(name: str) -> Refusal:
    return Refusal(Reason.MISSING, f"name={name[:80]!r}: no such machine set; see the capacity list", field="name")


def _sets(snapshot: ReadSnapshot, actor: Actor) -> list[MachineSetRecord]:
    active, kept = attempts.active_attempts(snapshot), kept_use(snapshot)
    return [
        _with_use(
            record,
            [pair for pair in active if pair[1].machines == record.spec.name],
            kept.get(record.spec.name, (0, 0.0)),
            actor,
        )
        for record in machine_sets.machine_sets(snapshot)
    ]


def _with_use(
    record: MachineSetRecord,
    used: Sequence[tuple[JobRow, AttemptRow]],
    kept: tuple[int, float],
    actor: Actor,
) -> MachineSetRecord:
    return replace(
        record,
        jobs={job.id: len(attempt.node_numbers) for job, attempt in used if job.project == actor.project},
        used_nodes=len({node for _, attempt in used for node in attempt.node_numbers}),
        # An attempt that waits for others to leave has no devices yet.
        used_devices=sum(devices_of(record.spec, job, attempt)[1] for job, attempt in used if not attempt.obstacles),
        kept_nodes=kept[0],
        kept_cost_usd=kept[1],
    )


def _declare_first(tx: Transaction, spec: MachineSetSpec) -> None:
    if not machine_sets.machine_sets(tx):
        machine_sets.set_machines(tx, spec)
