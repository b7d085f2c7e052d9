"""Lists of numbers as bytes, for chunks of tiny calls. All are ints of 32 bits, or all are floats.

`marshal` writes such a list in less time than it takes to look at the type of each value, and refuses every subclass
of int and float. So nothing but a look at its output is needed to know that no value would change its type.
"""

from __future__ import annotations

import marshal
from collections.abc import Sequence
from typing import Any

_VERSION = 2
"""Version of marshal's format that has neither references nor flags, so that a number is one fixed record."""
_HEAD = 5
"""Bytes before the first record: a type and the number of records."""
_INT, _INT_SIZE = b"i", 5
_FLOAT, _FLOAT_SIZE = b"g", 9
_LEAST, _MOST = -(1 << 31), (1 << 31) - 1


def pack_numbers(values: Sequence[Any]) -> bytes | None:
    """Return a list or tuple of numbers as bytes; None if it is something else, or has other values too."""
    if (type(values) is not list and type(values) is not tuple) or not values:
        return None
    # The ends tell most lists of something else apart, before all of it is written.
    for end in (values[0], values[-1]):
        if type(end) is not float and not (type(end) is int and _LEAST <= end <= _MOST):
            return None
    record, size = (_INT, _INT_SIZE) if type(values[0]) is int else (_FLOAT, _FLOAT_SIZE)
    try:
        data = marshal.dumps(values, _VERSION)
    except ValueError:  # a value that marshal does not know
        return None
    # The first record begins behind the head. If it has this type, the second begins `size` bytes later, and so on.
    # Buffers, among them numbers of numpy, are records of another type.
    is_all = len(data) == _HEAD + size * len(values) and data[_HEAD::size].count(record) == len(values)
    return data if is_all else None


def unpack_numbers(values: Any) -> Any:
    """Return the list or tuple that `pack_numbers` packed, or the one that it refused."""
    return marshal.loads(values) if type(values) is bytes else values
