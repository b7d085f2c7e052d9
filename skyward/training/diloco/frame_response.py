"""Responses with a frame of parameters. A worker whose connection broke gets the rest of one alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict

from starlette.responses import Response, StreamingResponse

from .downloads import PARTIAL
from .frames import pieces_from, size_of
from .replies import GlobalParameters
from .tensors import frame_of

_PIECE = 2**20


def frame_response(
    parameters: GlobalParameters, query: Mapping[str, str], *, server_id: str, count: Callable[[int], None]
) -> Response:
    """Return the frame of some parameters, or its rest if the query has its tag, and an offset in it.

    Args:
        parameters: The parameters.
        query: Query of the request.
        server_id: Name of this start of the server.
        count: Called with the bytes of each piece that is sent.
    """
    pieces = _pieces(parameters)
    # In one start of a server, the parameters of a round do not change. So their header names the bytes behind it.
    tag = hashlib.sha256(server_id.encode() + pieces[0]).hexdigest()[:32]
    size, offset = size_of(pieces), int(query.get("offset", 0))
    if query.get("tag") != tag or not 0 < offset < size:
        offset = 0
    headers = {
        "Content-Length": str(size - offset),
        "Content-Type": "application/octet-stream",
        "ETag": f'"{tag}"',
    }
    if offset:
        headers["Content-Range"] = f"bytes {offset}-{size - 1}/{size}"
    return StreamingResponse(
        _counted(pieces_from(pieces, offset), count), status_code=PARTIAL if offset else 200, headers=headers
    )


def _pieces(parameters: GlobalParameters) -> list[memoryview]:
    metadata = {
        "round": str(parameters.round),
        "kind": parameters.kind,
        "is_counted": json.dumps(parameters.is_counted),
        "warning": parameters.warning,
    }
    if parameters.deal is not None:
        metadata["deal"] = json.dumps(asdict(parameters.deal))
    return frame_of(parameters.tensors, metadata, is_bf16=parameters.kind == "update")


def _counted(pieces: Sequence[memoryview], count: Callable[[int], None]) -> Iterator[bytes]:
    for piece in pieces:
        for at in range(0, piece.nbytes, _PIECE):
            part = bytes(piece[at : at + _PIECE])
            count(len(part))
            yield part
