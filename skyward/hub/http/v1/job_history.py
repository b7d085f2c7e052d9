"""The history of a job in `/v1`. Times are milliseconds since 1970."""

from __future__ import annotations

from dataclasses import asdict

import msgspec
from msgspec import Struct

from ..routing import Call
from . import wire


class SaveOut(Struct):
    """A save that a training has noted."""

    path: str
    step: int | None
    bytes: int
    seconds: float


class JobEventOut(Struct):
    """Something that happened: a state, such as "running", or "create", "save", "saved", "cancel", "retry"."""

    at: int
    kind: str
    attempt: int
    save: SaveOut | None = None


class AttemptFactsOut(Struct):
    """Facts of an attempt. `ends_by` is the time by which it ends; of one that is over there is none."""

    number: int
    devices: list[int]
    saved_at: int | None
    late_at: int | None
    ends_by: int | None
    usd_per_hour: float


class DeliveryOut(Struct):
    """News for the owner of a job. Without `next_at` it has arrived, at `delivered_at`, or is given up."""

    id: str
    kind: str
    target: str
    at: int
    tries: int
    next_at: int | None
    delivered_at: int | None
    error: str


class JobHistoryOut(Struct):
    """History of a job. `result_sizes` has the bytes of its "value" or "error"."""

    needs: str
    events: list[JobEventOut]
    attempts: list[AttemptFactsOut]
    result_sizes: dict[str, int]
    deliveries: list[DeliveryOut] = []


async def get(call: Call, _request: wire.Nothing) -> JobHistoryOut:
    history = await call.hub.histories.history(call.actor, call.path["id"])
    return JobHistoryOut(
        needs=history.needs,
        events=[msgspec.convert(asdict(event), JobEventOut) for event in history.events],
        attempts=[AttemptFactsOut(**{**asdict(facts), "devices": list(facts.devices)}) for facts in history.attempts],
        result_sizes=dict(history.result_sizes),
        deliveries=[DeliveryOut(**asdict(delivery)) for delivery in history.deliveries],
    )
