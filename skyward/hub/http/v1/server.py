"""Health of the server: whether it lives, and whether it is ready."""

from __future__ import annotations

import dataclasses

from ...store.journal import last_event
from ..routing import Call
from . import wire


async def alive(_call: Call, _request: wire.Nothing) -> wire.Health:
    return wire.Health("alive")


async def ready(call: Call, _request: wire.Nothing) -> wire.Health:
    """Answer once the database answers. One that is away is refused with 503 by the store."""
    await call.hub.database.read(last_event)
    return wire.Health("ready")


async def status(call: Call, _request: wire.Nothing) -> wire.StatusOut:
    return wire.StatusOut(**dataclasses.asdict(await call.hub.status(call.actor)))
