"""Verification of a hub: each promise about its rows and bytes, looked up."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import zstandard

from ..model.refusal import Refusal
from . import journal, quotas
from .blobs import Blobs
from .chunks import decode
from .points import POINT_BYTES
from .transaction import ReadSnapshot


@dataclass(frozen=True, slots=True)
class Finding:
    """A promise that does not hold.

    Attributes:
        kind: `audit`, `quota`, `blob`, `artifact`, `run`, `logged_model`, `tail` or `chunk`.
        resource: Id of the thing.
        problem: Description of the fault.
    """

    kind: str
    resource: str
    problem: str


def check_hub(snapshot: ReadSnapshot, blobs: Blobs) -> Iterator[Finding]:
    """Yield all that is wrong with a hub. It reads every byte, and changes nothing."""
    broken = journal.first_break(snapshot)
    if broken is not None:
        yield Finding("audit", str(broken), "an entry at or before this one was changed or removed")
    for project, quota, used, counted in quotas.miscounts(snapshot):
        yield Finding("quota", f"{project}/{quota.value}", f"{used} are recorded, and {counted} are there")
    yield from _check_blobs(snapshot, blobs)
    yield from _check_artifacts(snapshot)
    yield from _check_models(snapshot)
    yield from _check_tail(snapshot)
    yield from _check_chunks(snapshot)


def _check_blobs(snapshot: ReadSnapshot, blobs: Blobs) -> Iterator[Finding]:
    rows = snapshot.execute("SELECT sha256, max(size) FROM blob GROUP BY sha256 ORDER BY sha256").fetchall()
    for sha256, size in rows:
        content, length = hashlib.sha256(), 0
        try:
            for piece in blobs.open(sha256):
                content.update(piece)
                length += len(piece)
        except Refusal:
            yield Finding("blob", sha256, "its bytes are missing")
            continue
        if (content.hexdigest(), length) != (sha256, size):
            yield Finding("blob", sha256, f"its bytes have SHA-256 {content.hexdigest()} and size {length}, not {size}")


def _check_artifacts(snapshot: ReadSnapshot) -> Iterator[Finding]:
    rows = snapshot.execute(
        "SELECT owner.id, artifact.key FROM artifact JOIN (SELECT pk, id, project FROM run"
        " UNION ALL SELECT -pk, 'models/' || id, project FROM logged_model) owner ON owner.pk = artifact.run"
        " LEFT JOIN blob ON blob.project = owner.project AND blob.sha256 = artifact.sha256"
        " AND blob.size = artifact.size WHERE blob.sha256 IS NULL"
    )
    for run, key in rows.fetchall():
        yield Finding("artifact", f"{run}/{key}", "no blob of its project has its SHA-256 and size")
    for name in ("artifact", "tail", "chunk", "latest", "attribute"):
        orphans = snapshot.execute(
            f"SELECT count(*), min(run) FROM {name} WHERE run > 0"
            f" AND NOT EXISTS (SELECT 1 FROM run WHERE run.pk = {name}.run)"
        ).fetchone()
        if orphans[0]:
            yield Finding("run", str(orphans[1]), f"is missing, but {orphans[0]} rows of {name} name such runs")


def _check_models(snapshot: ReadSnapshot) -> Iterator[Finding]:
    # A logged model names its artifacts by its number with a minus.
    for name, number in (("artifact", "-run"), ("logged_model_attribute", "model"), ("logged_model_metric", "model")):
        condition = "run < 0 AND " if name == "artifact" else ""
        orphans = snapshot.execute(
            f"SELECT count(*), min({number}) FROM {name} WHERE {condition}"
            f"NOT EXISTS (SELECT 1 FROM logged_model WHERE logged_model.pk = {number})"
        ).fetchone()
        if orphans[0]:
            problem = f"is missing, but {orphans[0]} rows of {name} name such models"
            yield Finding("logged_model", str(orphans[1]), problem)


def _check_tail(snapshot: ReadSnapshot) -> Iterator[Finding]:
    for number, points, size in snapshot.execute("SELECT id, points, length(body) FROM tail ORDER BY id").fetchall():
        if size != points * POINT_BYTES:
            yield Finding("tail", str(number), f"has {size} bytes for {points} points, not {points * POINT_BYTES}")


def _check_chunks(snapshot: ReadSnapshot) -> Iterator[Finding]:
    cursor = snapshot.execute(
        "SELECT run, key, number, points, first_at, last_at, least_step, greatest_step, body FROM chunk"
    )
    for run, key, number, points, first_at, last_at, least, greatest, body in cursor:
        resource = f"{run}/{key}/{number}"
        try:
            columns = decode(bytes(body), points)
        except (ValueError, IndexError, zstandard.ZstdError):
            yield Finding("chunk", resource, f"its bytes are not {points} points")
            continue
        if len(columns) and (
            bool(np.any(np.diff(columns.timestamps) < 0))
            or (columns.timestamps[0], columns.timestamps[-1]) != (first_at, last_at)
            or (columns.steps.min(), columns.steps.max()) != (least, greatest)
        ):
            yield Finding("chunk", resource, "its points are not those that its row announces")
