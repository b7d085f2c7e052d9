"""Handler of the live stream: server-sent events, resumable by `Last-Event-ID`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from ...model.refusal import Reason, Refusal
from ...services.live import Notice, noun_of
from ..reply import HttpReply
from ..routing import Call
from . import wire

STREAM = b"text/event-stream; charset=utf-8"


async def events(call: Call, request: wire.EventsQuery) -> HttpReply:
    text = call.header(b"last-event-id")
    if text and not (text.isascii() and text.isdigit() and len(text) < 19):
        raise Refusal(Reason.INVALID, "last-event-id: not a number; leave it out", field="last-event-id")
    notices = call.hub.live.watch(
        call.actor,
        run=request.run,
        experiment=request.experiment,
        kinds=request.kind,
        last=int(text) if text else None,
    )
    # The first notice is awaited here, so that a run that is not there is refused with a status.
    await anext(notices)
    return HttpReply(_lines(notices), content_type=STREAM, headers={b"x-accel-buffering": b"no"})


async def _lines(notices: AsyncGenerator[Notice | None, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(notices):
        yield b": connected\n\n"
        async for notice in notices:
            if notice is None:
                yield b": still here\n\n"
                continue
            number = b"" if notice.id is None else b"id: %d\n" % notice.id
            kind = noun_of(notice.kind).encode()
            yield b"%sevent: %s\ndata: %s\n\n" % (number, kind, msgspec.json.encode(notice.body))
