"""Items of a generator as bytes: each is packed, behind its length. Only nodes and clients unpack them."""

from __future__ import annotations

from collections.abc import Iterator

_LENGTH = 8


def frame_item(packed: bytes) -> bytes:
    """Return a packed item behind its length."""
    return len(packed).to_bytes(_LENGTH, "little") + packed


def take_items(buffer: bytearray) -> Iterator[bytes]:
    """Take whole items from the beginning of a buffer, and yield them packed. A part of the next one stays.

    Example:
        >>> buffer = bytearray(frame_item(b"one") + frame_item(b"two")[:-1])
        >>> list(take_items(buffer)), len(buffer)
        ([b'one'], 10)
    """
    while len(buffer) >= _LENGTH:
        end = _LENGTH + int.from_bytes(buffer[:_LENGTH], "little")
        if len(buffer) < end:
            return
        packed = bytes(buffer[_LENGTH:end])
        del buffer[:end]
        yield packed
