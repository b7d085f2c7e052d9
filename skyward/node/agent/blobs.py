"""Blobs on a node: in memory up to a limit, beyond it spilled to the node's folder."""

from __future__ import annotations

import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping

from ...core.limits import default_blob_limit
from ...wire.blobs import Blob, spill
from .complaints import complain

_MOST_TOLD = 4096
"""Most blobs that are left to the next client, because it gets their names in one frame."""


class NodeBlobs:
    """Blobs by digest. The client decides which to drop; this class decides which of the rest stay in memory.

    A blob may be added several times, by the client and by calls whose values stay here. It goes when it was dropped as
    often, because a drop may cross a further addition on its way.
    """

    def __init__(self, folder: str, limit_bytes: int) -> None:
        self._folder = os.path.join(folder, "blobs")
        self._limit = limit_bytes or default_blob_limit()
        self._in_memory: OrderedDict[bytes, Blob] = OrderedDict()
        self._spilled: dict[bytes, Blob] = {}
        self._bytes = 0
        self._added: Counter[bytes] = Counter()
        self._has_said = False
        self.on_closed: Callable[[bytes], object] = lambda digest: None
        """Function that is told when the file of a blob is closed: it was dropped, or moved to the disk."""

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes in memory and on the disk."""
        return self._bytes, sum(blob.size for blob in self._spilled.values())

    def add(self, blob: Blob) -> None:
        self._added[blob.digest] += 1
        if blob.digest in self:
            blob.close()
            return
        self._in_memory[blob.digest] = blob
        self._bytes += blob.size
        while self._bytes > self._limit and len(self._in_memory) > 1:
            digest, oldest = next(iter(self._in_memory.items()))
            try:
                os.makedirs(self._folder, mode=0o700, exist_ok=True)
                self._spilled[digest] = spill(oldest, self._folder)
            except OSError as error:
                # Calls depend on this blob, so keep it. Memory may suffice; if not, the kernel kills a slot first,
                # which volunteered for that, and not the agent.
                self._say(
                    f"agent keeps {oldest.size} bytes in memory beyond its limit: {self._folder}: {error.strerror}"
                )
                return
            del self._in_memory[digest]
            self._bytes -= oldest.size
            self.on_closed(digest)

    def _say(self, text: str) -> None:
        if not self._has_said:
            self._has_said = True
            complain(None, text)

    def get(self, digest: bytes) -> Blob | None:
        blob = self._in_memory.get(digest)
        if blob is not None:
            self._in_memory.move_to_end(digest)
            return blob
        return self._spilled.get(digest)

    def drop(self, digest: bytes, times: int = 1) -> None:
        self._added[digest] -= times
        if self._added[digest] > 0:
            return
        del self._added[digest]
        blob = self._in_memory.pop(digest, None)
        if blob is not None:
            self._bytes -= blob.size
        else:
            blob = self._spilled.pop(digest, None)
        if blob is not None:
            blob.close()
            self.on_closed(digest)

    def clear(self) -> None:
        """Drop all blobs."""
        for digest, times in list(self._added.items()):
            self.drop(digest, times)

    def hand_over(self, coming: Mapping[bytes, int]) -> list[tuple[bytes, int, int]]:
        """Leave the blobs to the next client. Return their names, sizes, and how often that client has to drop them.

        Args:
            coming: How often a value that this client will get has brought a blob. It counts these times itself.
        """
        told: list[tuple[bytes, int, int]] = []
        for digest, times in list(self._added.items()):
            blob, left = self.get(digest), times - coming.get(digest, 0)
            if blob is not None and blob.fd >= 0 and len(told) < _MOST_TOLD:
                told.append((digest, blob.size, left))
            elif left:
                self.drop(digest, left)
        return told

    def __contains__(self, digest: object) -> bool:
        return digest in self._in_memory or digest in self._spilled
