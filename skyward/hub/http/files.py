"""Downloads and uploads of artifacts, shared by both APIs.

A browser never shows an artifact as a page of this origin: it is an attachment, its type is not guessed, and a policy
puts it into a sandbox. A page that wants to show one fetches it and decides itself.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Generator, Iterator
from urllib.parse import parse_qs, quote

from anyio import to_thread

from ..model.refusal import Reason, Refusal
from ..model.runs import Artifact
from .faults import HttpRefusal
from .reply import HttpReply
from .routing import Call

SANDBOX = b"sandbox; default-src 'none'"
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")


async def upload(call: Call, run_id: str, key: str) -> Artifact:
    """Store the body of a request as an artifact."""
    return await call.hub.tracking.put_artifact(call.actor, run_id, key, call.chunks, call.size)


async def download(call: Call, run_id: str, key: str) -> HttpReply:
    """Answer with an artifact, or with the part of it that `Range` asks for."""
    start, end = 0, None
    wanted = _RANGE.fullmatch(call.header(b"range"))
    if wanted is not None:
        size = (await call.hub.tracking.artifact(call.actor, run_id, key)).size
        start, end = _part(wanted[1], wanted[2], size)
    artifact, pieces = await call.hub.tracking.open_artifact(call.actor, run_id, key, start, end)
    last = artifact.size if end is None else end
    name = quote(key.rpartition("/")[2], safe="")
    headers = {
        b"content-length": str(last - start).encode(),
        b"content-disposition": f"attachment; filename*=UTF-8''{name}".encode(),
        b"content-security-policy": SANDBOX,
        b"accept-ranges": b"bytes",
        b"etag": f'"{artifact.sha256}"'.encode(),
        b"cross-origin-resource-policy": b"same-origin",
    }
    if end is not None:
        headers[b"content-range"] = f"bytes {start}-{last - 1}/{artifact.size}".encode()
    return HttpReply(_pieces(pieces), 200 if end is None else 206, b"application/octet-stream", headers)


async def redirect(call: Call, run_id: str, key: str) -> HttpReply:
    """Answer with the URL of an artifact's bytes, or with the bytes where the hub must hand them out itself.

    The URL is good for 15 minutes and needs no token, so a client should send none along.
    """
    _, url = await call.hub.tracking.presigned_artifact(call.actor, run_id, key)
    if url is None:
        return await download(call, run_id, key)
    return HttpReply(b"", 307, headers={b"location": url.encode()})


def _part(first: str, last: str, size: int) -> tuple[int, int | None]:
    """Return where a wanted part begins and ends. No end: the whole, because no part of nothing can be named.

    Raises:
        HttpRefusal: It begins behind the end.
    """
    if size == 0 or not (first or last):
        return 0, None
    if not first:
        return max(size - int(last), 0), size
    start = int(first)
    if start >= size:
        text = f"range: begins behind the end; begin below {size}, its number of bytes"
        raise HttpRefusal(Reason.INVALID, text, 416, field="range")
    return start, min(int(last) + 1, size) if last else size


async def _pieces(pieces: Iterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Read the pieces on a thread, because the store's reads block."""
    try:
        while (piece := await to_thread.run_sync(next, pieces, None)) is not None:
            yield piece
    finally:
        if isinstance(pieces, Generator):
            pieces.close()


def query_value(call: Call, name: str) -> str:
    """Return a field of the query of a route whose body is raw.

    Raises:
        Refusal: It is missing, or cannot be decoded.
    """
    try:
        found = parse_qs(call.query.decode("ascii"), errors="strict").get(name)
    except ValueError:
        found = None
    if not found:
        raise Refusal(Reason.INVALID, f"{name}: missing; give ?{name}=", field=name)
    return found[-1]
