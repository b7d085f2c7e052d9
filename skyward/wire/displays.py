"""Displays: figures, tables and other rich output of a task, on their way from the slot to the client.

A display is a mime bundle: one content in several forms. It travels as JSON, because the client must not unpickle what
a task chose, and in pieces, because a frame is bounded. The body of each DISPLAY frame is:

    | number u64 | index u32 | count u32 | piece of the JSON |
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from typing import Any

from ..values.displays import FORMS, JSON, MAX_DISPLAY, Display

_SIZES = ("width", "height")
"""Metadata of a form that is passed on."""
_HEAD = struct.Struct("<QII")
_PIECE = 48 * 1024
"""Bytes of a piece in a frame of its own."""
_MAX_BYTES = 5 * MAX_DISPLAY
"""JSON escapes characters, and UTF-8 has up to 4 bytes for one."""
_MAX_COLLECTED = 64 << 20
"""Most bytes of displays whose pieces are collected. The oldest is dropped then: it probably lacks a piece."""


def pieces(display: Display, size: int = _PIECE) -> Iterator[bytes]:
    """Yield the pieces of a display, of at most `size` bytes. Raises TypeError or ValueError if it cannot be JSON."""
    fields = {
        "data": display.data,
        "metadata": display.metadata,
        "name": display.name,
        "is_update": display.is_update,
    }
    body = json.dumps(fields, ensure_ascii=False).encode(errors="replace")
    number = int.from_bytes(os.urandom(8), "little")
    step = size - _HEAD.size
    count = -(-len(body) // step)
    for index in range(count):
        yield _HEAD.pack(number, index, count) + body[index * step : (index + 1) * step]


def is_first(piece: bytes) -> bool:
    """Return whether a piece is the first of its display."""
    return piece[8:12] == bytes(4)


class DisplayJoiner:
    """Collects the pieces of displays from many tasks. A display that lacks a piece is never complete."""

    def __init__(self) -> None:
        self._begun: dict[tuple[int, int], list[bytes]] = {}
        self._collected = 0
        """Number of bytes of their pieces, all of one size in a display but the last."""

    def add(self, node: int, body: bytes) -> Display | None:
        """Take a piece. Returns the display that it completes, if it is a valid one."""
        if len(body) < _HEAD.size:
            return None
        number, index, count = _HEAD.unpack_from(body)
        so_far = self._take(node, number)
        if index != len(so_far) or index * len(body) > _MAX_BYTES:
            return None
        so_far.append(body[_HEAD.size :])
        if len(so_far) == count:
            return _parse(b"".join(so_far))
        self._begun[node, number] = so_far
        self._collected += _size_of(so_far)
        while self._collected > _MAX_COLLECTED:
            self._take(*next(iter(self._begun)))
        return None

    def _take(self, node: int, number: int) -> list[bytes]:
        so_far = self._begun.pop((node, number), [])
        self._collected -= _size_of(so_far)
        return so_far


def _size_of(pieces_so_far: list[bytes]) -> int:
    return len(pieces_so_far[0]) * len(pieces_so_far) if pieces_so_far else 0


def _parse(body: bytes) -> Display | None:
    """Return a display with the known forms only; None if there is none."""
    try:
        fields = json.loads(body)
        given, metadata = dict(fields["data"]), dict(fields["metadata"])
        name, is_update = str(fields["name"]), bool(fields["is_update"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    data = {form: given[form] for form in FORMS if (form == JSON and form in given) or isinstance(given.get(form), str)}
    sizes = {form: _sizes(metadata[form]) for form in data if isinstance(metadata.get(form), dict)}
    return Display(data=data, metadata=sizes, name=name[:200], is_update=is_update) if data else None


def _sizes(metadata: dict[str, Any]) -> dict[str, Any]:
    return {key: metadata[key] for key in _SIZES if isinstance(metadata.get(key), int | float)}
