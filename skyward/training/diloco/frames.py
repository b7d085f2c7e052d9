"""Frames of arrays on the wire and in spooled uploads: the safetensors format, without a framework and without pickle.

    8 bytes   length of the header, little-endian
    header    JSON: {"__metadata__": {"round": "3"}, "weight": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}
    data      the arrays, one after another, without gaps

Every frame says how long it is, so a torn one is never taken for a whole one. Any safetensors library reads frames.
Ours reads fewer dtypes and has limits. Encoding and decoding copy no array.

Source: https://github.com/huggingface/safetensors (Format).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import UsageError

BUFFER_PREFIX = "buffer:"
"""Begins the name of a buffer on the wire. A server averages buffers, and its outer optimizer leaves them alone."""
FROZEN_PREFIX = "frozen:"
"""Begins the name of a parameter that no worker trains. It travels with the whole model, and in no round."""
ITEM_BYTES = {"F32": 4, "BF16": 2, "U8": 1}
"""Bytes of one value, by the name of its dtype. Bytes are the codes of compressed arrays (see `compression`)."""
MOST_HEADER_BYTES = 16 * 2**20
"""Largest header: about 100,000 arrays with long names."""
_LENGTH_BYTES = 8
_ALIGNMENT = 8
_METADATA = "__metadata__"


@dataclass(frozen=True, kw_only=True, slots=True)
class WireArray:
    """One array of a frame. Its bytes are little-endian, in C order."""

    dtype: str
    """A key of `ITEM_BYTES`."""
    shape: tuple[int, ...]
    data: memoryview


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrayFrame:
    """Arrays by name, with texts that describe them."""

    metadata: Mapping[str, str]
    arrays: Mapping[str, WireArray]


def encode(arrays: Mapping[str, WireArray], metadata: Mapping[str, str]) -> list[memoryview]:
    """Return the pieces of a frame, to be sent one after another. They share memory with the arrays.

    Example:
        >>> ones = WireArray(dtype="BF16", shape=(2,), data=memoryview(bytes.fromhex("803f803f")))
        >>> frame = decode(b"".join(encode({"ones": ones}, {"round": "3"})))
        >>> frame.metadata["round"], frame.arrays["ones"].shape
        ('3', (2,))
    """
    entries: dict[str, Any] = {_METADATA: dict(metadata)}
    end = 0
    for name, array in arrays.items():
        begin, end = end, end + array.data.nbytes
        entries[name] = {"dtype": array.dtype, "shape": list(array.shape), "data_offsets": [begin, end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % _ALIGNMENT)  # so that the arrays are aligned in memory
    first = len(header).to_bytes(_LENGTH_BYTES, "little") + header
    return [memoryview(first), *(array.data.cast("B") for array in arrays.values() if array.data.nbytes)]


def size_of(pieces: Iterable[memoryview]) -> int:
    """Return the bytes of a frame that `encode` returned."""
    return sum(piece.nbytes for piece in pieces)


def pieces_from(pieces: Iterable[memoryview], offset: int) -> list[memoryview]:
    """Return the pieces of a frame from an offset on."""
    rest = []
    for piece in pieces:
        if offset < piece.nbytes:
            rest.append(piece[offset:])
        offset = max(0, offset - piece.nbytes)
    return rest


def largest_frame(shapes: Iterable[tuple[int, ...]]) -> int:
    """Return a limit that no frame of arrays of these shapes exceeds, in bytes."""
    # Four bytes more: the scale of a compressed array of one value.
    return _LENGTH_BYTES + MOST_HEADER_BYTES + sum(4 * math.prod(shape) + 4 for shape in shapes)


def decode(frame: bytes | bytearray | memoryview) -> ArrayFrame:
    """Return the arrays of a whole frame. They share its memory.

    Raises:
        UsageError: The frame is torn, or is no frame.
    """
    whole = memoryview(frame).cast("B")
    if whole.nbytes < _LENGTH_BYTES:
        raise _torn(f"has {whole.nbytes} bytes, fewer than its first field")
    length = int.from_bytes(whole[:_LENGTH_BYTES], "little")
    if length > MOST_HEADER_BYTES:
        raise _broken(f"its header has {length} bytes, more than {MOST_HEADER_BYTES}")
    data = whole[_LENGTH_BYTES + length :]
    if whole.nbytes < _LENGTH_BYTES + length:
        raise _torn(f"has {whole.nbytes} bytes, and its header alone ends at byte {_LENGTH_BYTES + length}")
    try:
        entries = json.loads(bytes(whole[_LENGTH_BYTES : _LENGTH_BYTES + length]))
    except (ValueError, RecursionError) as error:
        raise _broken(f"its header is no JSON: {error}") from None
    if not isinstance(entries, dict):
        raise _broken("its header is no JSON object")
    metadata = entries.pop(_METADATA, {})
    if not (isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())):
        raise _broken("its metadata is not a table of texts")
    arrays, end = {}, 0
    for name, entry in entries.items():
        arrays[name], end = _array(name, entry, data, end)
    if data.nbytes < end:
        raise _torn(f"has {data.nbytes} bytes of arrays instead of {end}")
    if data.nbytes > end:
        raise _broken(f"{data.nbytes - end} bytes follow its last array")
    return ArrayFrame(metadata=metadata, arrays=arrays)


def _array(name: str, entry: Any, data: memoryview, begin: int) -> tuple[WireArray, int]:
    """Return the array that begins at an offset, and the offset of its end. The array may be incomplete."""
    if not isinstance(entry, dict):
        raise _broken(f"its entry of {name!r} is no JSON object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise _broken(f"the dtype of {name!r} is {dtype!r}, and must be one of {', '.join(ITEM_BYTES)}")
    if not (isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)):
        raise _broken(f"the shape of {name!r} is {shape!r}, and must be a list of sizes")
    end = begin + math.prod(shape) * ITEM_BYTES[dtype]
    if offsets != [begin, end]:
        raise _broken(f"the offsets of {name!r} are {offsets!r}, and its dtype and shape give {[begin, end]}")
    return WireArray(dtype=dtype, shape=tuple(shape), data=data[begin:end]), end


def _torn(problem: str) -> UsageError:
    return UsageError(f"frame: {problem}; send it again, whole")


def _broken(problem: str) -> UsageError:
    return UsageError(f"frame: {problem}; write it as safetensors, with versions of skyward that fit")
