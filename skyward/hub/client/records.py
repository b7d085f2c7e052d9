"""Records of a run as lines of a file: a checksum, a space, and one JSON array.

A reader trusts only lines whose checksum fits. A line without its end is still being written, or was torn when its
writer died.

    ["run", {...}]              first record of a run: its experiment, name, user, start and tags
    ["m", step, timestamp, {key: value}]        metrics; NaN and infinities are texts
    ["p", {key: value}]         parameters        ["t", {key: value}]  tags        ["dt", key]  a tag to delete
    ["a", key, size, sha256]    an artifact, whose bytes lie in `files/<sha256>` of the run's folder
    ["cut", step]               a resumed run drops its points behind this step
    ["cut", step, key]          it drops those of one metric
    ["s", state, timestamp, error]      a new state of the run
    ["h", timestamp]            a heartbeat
    ["ack", number, result]     a command was carried out
    ["in", [...]]               datasets that the run reads
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any
from zlib import crc32

_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode
_PLAIN = frozenset({float, int})
_NOT_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def line_of(record: list[Any]) -> bytes:
    """Return a record as a line.

    Raises:
        ValueError: a number in it is not finite.
        TypeError: JSON cannot hold a value in it.
    """
    text = _encode(record).encode()
    return b"%08x %b\n" % (crc32(text), text)


def line_of_metrics(step: int, timestamp: int, metrics: Mapping[str, Any]) -> bytes:
    """Return metrics as a line. Values may be numbers, or scalars of numpy, torch and the like.

    Raises:
        TypeError: a value is not a number.
        ValueError: a value is a text that is not a number, or an array with several numbers.
    """
    if _PLAIN.issuperset(map(type, metrics.values())):
        try:
            return line_of(["m", step, timestamp, metrics])
        except ValueError:
            pass  # a number is not finite
    return line_of(["m", step, timestamp, {key: _number(key, value) for key, value in metrics.items()}])


def _number(key: str, value: Any) -> float | str:
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError) as error:  # torch raises RuntimeError for several numbers
        raise TypeError(f"{key}={value!r:.60}: is not a number; log one number") from error
    return number if math.isfinite(number) else _NOT_FINITE[str(number)]


def checked_lines(data: bytes) -> Iterator[tuple[bytes | None, int]]:
    """Yield each complete line's JSON, or None where its checksum does not fit, and the offset of the next line."""
    at = 0
    while (end := data.find(b"\n", at)) >= 0:
        yield _checked(data[at:end]), end + 1
        at = end + 1


def _checked(line: bytes) -> bytes | None:
    text = line[9:]
    try:
        is_intact = line[8:9] == b" " and int(line[:8], 16) == crc32(text)
    except ValueError:
        is_intact = False
    return text if is_intact else None
