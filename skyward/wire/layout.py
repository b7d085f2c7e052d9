"""The layout of a payload in a frame:

    | flags u8 | blobs u16 | elapsed_ns u64 | (digest 16, size u64) * blobs | pickle ... |

Apart from `payloads`, which pickles: the agent reads the references and never the pickle.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

__all__ = ["HEAD", "IN_MEMORY", "PICKLE_IS_BLOB", "REFERENCE", "Parsed", "parse", "references"]

HEAD = struct.Struct("<BHQ")
REFERENCE = struct.Struct("<16sQ")
PICKLE_IS_BLOB = 0x01
"""Flag: the last blob is the pickle itself, which was too large for a frame."""

IN_MEMORY = 0x02
"""Flag: the buffers are in the sender's memory, and the digests say where (see `pull`)."""


class Parsed(NamedTuple):
    """A payload as it came: nothing is unpickled yet."""

    elapsed_ns: int
    references: tuple[tuple[bytes, int], ...]
    pickle: memoryview
    pickle_is_blob: bool
    is_in_memory: bool = False


def references(body: bytes, start: int = 0) -> tuple[tuple[bytes, int], ...]:
    """(digest, size) of each blob that the payload at `start` needs."""
    _, count, _ = HEAD.unpack_from(body, start)
    if not count:
        return ()
    first = start + HEAD.size
    return tuple(REFERENCE.iter_unpack(memoryview(body)[first : first + count * REFERENCE.size]))


def parse(body: bytes, start: int = 0) -> Parsed:
    flags, count, elapsed_ns = HEAD.unpack_from(body, start)
    if not count:
        return Parsed(elapsed_ns, (), memoryview(body)[start + HEAD.size :], False)
    names = references(body, start)
    at = start + HEAD.size + count * REFERENCE.size
    return Parsed(elapsed_ns, names, memoryview(body)[at:], bool(flags & PICKLE_IS_BLOB), bool(flags & IN_MEMORY))
