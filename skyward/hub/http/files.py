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
from .reply import Reply
from .routing import Call

SANDBOX = b"sandbox; default-src 'none'"
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


async def upload(call: Call, run_id: str, key: str) -> Artifact:
    """Store the body of a request as an artifact."""
    artifact: Artifact = await call.hub.tracking.put_artifact(call.actor, run_id, key, call.chunks, call.size)
    return artifact


async def download(call: Call, run_id: str, key: str) -> Reply:
    """Answer with an artifact, or with the part of it that `Range` asks for."""
    wanted = _RANGE.fullmatch(call.header(b"range"))
    start, end = 0, None
    if wanted and wanted[1]:
        start = int(wanted[1])
        end = int(wanted[2]) + 1 if wanted[2] else None
    elif wanted and wanted[2]:
        artifact, _ = await call.hub.tracking.open_artifact(call.actor, run_id, key, 0, 0)
        start = max(artifact.size - int(wanted[2]), 0)
    artifact, pieces = await call.hub.tracking.open_artifact(call.actor, run_id, key, start, end)
    if wanted and start >= max(artifact.size, 1):
        raise Refusal(
            Reason.INVALID, f"range: begins behind the end; the artifact has {artifact.size} bytes", field="range"
        )
    last = min(end or artifact.size, artifact.size)
    name = quote(key.rpartition("/")[2], safe="")
    headers = {
        b"content-length": str(last - start).encode(),
        b"content-disposition": f"attachment; filename*=UTF-8''{name}".encode(),
        b"content-security-policy": SANDBOX,
        b"accept-ranges": b"bytes",
        b"etag": f'"{artifact.sha256}"'.encode(),
        b"cross-origin-resource-policy": b"same-origin",
    }
    if wanted:
        headers[b"content-range"] = f"bytes {start}-{last - 1}/{artifact.size}".encode()
    return Reply(_pieces(pieces), 206 if wanted else 200, b"application/octet-stream", headers)


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
