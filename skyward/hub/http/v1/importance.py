"""Importance of the parameters of a sweep in `/v1`."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from ...model.refusal import Reason, Refusal
from ..routing import Call


class ImportanceQuery(Struct):
    """An objective of the sweep, from 0."""

    objective: Annotated[int, Meta(ge=0, le=1_000)] = 0
    project: str | None = None


class ImportanceOut(Struct):
    """Parameter -> its part of 1. Without any, `reason` says why they are not available."""

    importance: dict[str, float]
    reason: str
    trials: int


async def get(call: Call, request: ImportanceQuery) -> ImportanceOut:
    text = call.path["id"]
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise Refusal(Reason.MISSING, f"id={text[:80]!r}: no such number; see the list of sweeps", field="id")
    found = await call.hub.importances.importance(call.actor, int(text), request.objective)
    return ImportanceOut(dict(found.parts), found.reason, found.trials)
