"""Handlers about the server: whether it lives, whether it is ready, and the description of its API."""

from __future__ import annotations

from functools import cache

import msgspec

from ...store.journal import last_event
from ..reply import HttpReply
from ..routing import Call
from . import wire


async def alive(_call: Call, _request: wire.Nothing) -> wire.Health:
    return wire.Health("alive")


async def ready(call: Call, _request: wire.Nothing) -> wire.Health:
    """Answer once the database answers. One that is away is refused with 503 by the store."""
    await call.hub.database.read(last_event)
    return wire.Health("ready")


async def openapi(_call: Call, _request: wire.Nothing) -> HttpReply:
    return HttpReply(_description())


@cache
def _description() -> bytes:
    from ..openapi import describe
    from ..table import ROUTES

    return msgspec.json.encode(describe(ROUTES))
