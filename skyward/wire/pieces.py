"""Pieces of a blob, for streams over which its descriptor cannot travel.

The body of each BLOB frame is:

    | digest 16 | size u64 | offset u64 | bytes of the blob from `offset` on |
"""

from __future__ import annotations

import os
import struct
from typing import Final

from .blobs import DIGEST_SIZE, Blob
from .frames import HEADER, FrameKind

PIECE_SIZE: Final = 256 * 1024
"""Bytes of a blob in one frame. More urgent frames wait for one piece at most."""
PIECE_HEAD: Final = struct.Struct(f"<{DIGEST_SIZE}sQQ")
"""Digest, size and offset."""


class FrameSource:
    """Blob on its way out, alive until the peer has acknowledged all its pieces.

    `held` has the total of such blobs as its only item; each source adds its size to it while it is alive.
    """

    __slots__ = ("_held", "blob", "digest", "flags", "ident", "lane", "offset", "size")

    def __init__(self, blob: Blob, ident: int, body: bytes, flags: int, lane: int, held: list[int]) -> None:
        self.blob = blob
        self.digest, self.size, _ = PIECE_HEAD.unpack_from(body)
        self._held = held
        held[0] += self.size
        self.offset = 0
        self.ident = ident
        self.flags = flags
        self.lane = lane

    def write_to(self, fd: int, at: int, end: int) -> int:
        """Write bytes from `at` up to `end`, and return how many the link took.

        Raises:
            OSError: The link takes nothing now, or is broken.
        """
        data = self.blob.in_memory()
        return os.sendfile(fd, self.blob.fd, at, end - at) if data is None else os.write(fd, data[at:end])

    def next_piece(self) -> SentFrame:
        # The header announces the whole piece, but carries only its head. The data follows from the file, so a piece
        # that waits for its acknowledgement costs a few dozen bytes of memory.
        length = min(PIECE_SIZE, self.size - self.offset)
        head = HEADER.pack(PIECE_HEAD.size + length, FrameKind.BLOB, self.flags, self.lane, self.ident)
        piece = head + PIECE_HEAD.pack(self.digest, self.size, self.offset), self, self.offset, length
        self.offset += length
        return piece

    def __del__(self) -> None:
        self._held[0] -= self.size


SentFrame = tuple[bytes, FrameSource | None, int, int]
"""Outgoing frame: its bytes, and for a piece the source, offset and length of the data that follows them."""
