"""Blobs on their way in: a stream of bytes is written to the place of blobs, within the limit of its project."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable

from ..model.quotas import Limit
from ..store.blobs import PIECE, Blobs, NewBlob


async def receive_blob(
    blobs: Blobs, stream: AsyncIterable[bytes], sha256: str | None, size: int | None, room: Limit | None
) -> tuple[str, int]:
    """Store a stream as one blob, and return its SHA-256 and its size.

    Args:
        blobs: Where bytes are.
        stream: The bytes.
        sha256: Hash that they must have, where it is known.
        size: Number that they must have, where it is known.
        room: Limit of the project. None: there is none, or the project has these bytes already.

    Raises:
        Refusal: The bytes differ from hash or size, or there is no room.
    """
    if room is not None and size is not None:
        room.check(size)
    writer = await asyncio.to_thread(blobs.writer)
    try:
        await _write_all(writer, stream, room)
        return await asyncio.to_thread(writer.finish, sha256, size)
    finally:
        await asyncio.to_thread(writer.abort)


async def _write_all(writer: NewBlob, stream: AsyncIterable[bytes], room: Limit | None) -> None:
    """Write a stream in large pieces: a hop to a thread for each small one would cost more than the writing."""
    waiting: list[bytes] = []
    length = total = 0
    async for piece in stream:
        waiting.append(piece)
        length += len(piece)
        total += len(piece)
        if room is not None:
            room.check(total)
        if length >= PIECE:
            await asyncio.to_thread(writer.write, b"".join(waiting))
            waiting, length = [], 0
    if waiting:
        await asyncio.to_thread(writer.write, b"".join(waiting))
