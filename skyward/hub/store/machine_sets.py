"""Rows of machine sets, and the use of their devices."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict

from ..model.capacity import MachineSetRecord, MachineSetSpec
from .transaction import ReadSnapshot, Transaction


def machine_sets(snapshot: ReadSnapshot) -> list[MachineSetRecord]:
    """Return all machine sets by name."""
    rows = snapshot.execute(
        "SELECT body, is_draining, full_until, older_until FROM machine_set ORDER BY name"
    ).fetchall()
    return [
        MachineSetRecord(
            spec=MachineSetSpec(**json.loads(body)),
            is_draining=bool(draining),
            full_until=full_until,
            older_until=older_until or 0,
        )
        for body, draining, full_until, older_until in rows
    ]


def set_machines(tx: Transaction, spec: MachineSetSpec) -> None:
    """Add a machine set, or change the one of that name."""
    body = json.dumps(asdict(spec), separators=(",", ":"))
    tx.execute(
        "INSERT INTO machine_set (name, body, is_draining, full_until, created_at) VALUES (?, ?, ?, 0, ?)"
        " ON CONFLICT (name) DO UPDATE SET body = excluded.body",
        (spec.name, body, False, tx.now),
    )


def set_draining(tx: Transaction, name: str, is_draining: bool) -> bool:
    """Let a set begin no jobs, or begin them again. Return False if there is no such set."""
    return bool(tx.execute("UPDATE machine_set SET is_draining = ? WHERE name = ?", (is_draining, name)).rowcount)


def set_full(tx: Transaction, name: str, until: int) -> None:
    """Note until when the provider of a set is known to have no machines."""
    tx.execute("UPDATE machine_set SET full_until = ? WHERE name = ?", (until, name))


def set_older(tx: Transaction, name: str, until: int) -> None:
    """Note until when the launchers of a set are taken for too old for some jobs. 0: they are not."""
    tx.execute(
        "UPDATE machine_set SET older_until = ? WHERE name = ? AND COALESCE(older_until, 0) <> ?", (until, name, until)
    )


def remove_machines(tx: Transaction, name: str) -> bool:
    """Remove a set. Return False if there is none."""
    return bool(tx.execute("DELETE FROM machine_set WHERE name = ?", (name,)).rowcount)


def device_uses(snapshot: ReadSnapshot) -> Mapping[int, Mapping[str, tuple[float, int]]]:
    """Return project -> kind of device -> device-seconds, and the time to which they are decayed."""
    found: dict[int, dict[str, tuple[float, int]]] = {}
    for project, kind, seconds, at in snapshot.execute(
        'SELECT project, kind, seconds, "at" FROM device_use'
    ).fetchall():
        found.setdefault(project, {})[kind] = (seconds, at)
    return found


def set_device_use(tx: Transaction, project: int, kind: str, seconds: float) -> None:
    tx.execute(
        'INSERT INTO device_use (project, kind, seconds, "at") VALUES (?, ?, ?, ?)'
        ' ON CONFLICT (project, kind) DO UPDATE SET seconds = excluded.seconds, "at" = excluded."at"',
        (project, kind, seconds, tx.now),
    )
