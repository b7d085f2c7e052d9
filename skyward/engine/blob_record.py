"""Blobs of one node, as the client knows them: reference counts, and eviction of the least recently used.

An agent keeps a blob until it is told to drop it, and is never asked what it has. So this record decides for both.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..core.limits import default_blob_limit
from ..core.records import dataclass
from ..wire.blobs import Blob
from ..wire.channel import BLOBS, Channel
from ..wire.frames import FrameKind

if TYPE_CHECKING:
    from ..wire.stream import StreamChannel

_BODY_TAIL = bytes(8)
_MOST_BLOBS = 512
"""Most blobs that stay on a node beyond their calls. Each holds a descriptor open there."""
_FILES_PER_BLOB = 8
"""Number of files that the agent may open for each stored blob. The others serve slots, output and data in transit."""
_FEW_FILES = 1024
"""Assumed limit of open files of an agent of the previous version, which does not report it."""


@dataclass(slots=True)
class _Stored:
    """Blob that the node has, or is about to have."""

    size: int
    users: int
    """Open calls that need it, functions that refer to it, and references of the user's."""
    added: int
    """How often the agent adds it: the client sent it, or a call's value stayed there. A drop names this number."""
    is_there: bool
    """Whether the agent has it, or gets it before anything that is sent now. If not, it comes from another node."""

    def add(self) -> None:
        """Record that the agent adds it."""
        self.added += 1
        self.is_there = True


class BlobRecord:
    """Blobs that a node has, or is about to have. Used under the ledger's lock.

    They stay on the node for the next call that needs them, as far as its limits allow. Blobs in use are never dropped.

    Args:
        facts: Facts that the agent of the node announces.
    """

    channel: Channel | StreamChannel

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self._blobs: OrderedDict[bytes, _Stored] = OrderedDict()
        self.blob_bytes = 0
        """Size of all of them, in bytes."""
        # The agent keeps as much in memory as it may spill to its folder; see `agent.blobs`.
        self._blob_limit = 2 * int(facts.get("blob_limit_bytes", 0)) or _assumed_limit(facts)
        self._blob_count = min(_MOST_BLOBS, int(facts.get("files", _FEW_FILES)) // _FILES_PER_BLOB)
        self.held: weakref.WeakSet[Blob] = weakref.WeakSet()
        """Blobs of references that this node was told to keep; see `engine.kept_values`."""
        self.wanted: list[Blob] = []
        """Blobs that calls need here and that lie on other nodes; see `engine.kept_values`."""
        self.bring: Callable[[Blob], bool] = lambda blob: False
        """Function that begins to get a blob here from another node, and returns False if this process sends it."""

    def _hold_blobs(self, blobs: tuple[Blob, ...], *, is_from_here: bool = False) -> None:
        """Hold all of these blobs, or none if one raises OSError."""
        for count, blob in enumerate(blobs):
            try:
                self.hold_blob(blob, is_from_here=is_from_here)
            except OSError:
                self.release_blobs(blobs[:count])
                raise

    def hold_blob(self, blob: Blob, *, is_from_here: bool = False) -> None:
        """Send a blob that the node does not have, and keep it there until it is released.

        Args:
            blob: The blob.
            is_from_here: Whether it must go by this link: frames follow that rely on their order.

        Raises:
            OSError: There is no room to send it.
        """
        entry = self._blobs.get(blob.digest)
        if entry is not None and entry.is_there:
            entry.users += 1
            self._blobs.move_to_end(blob.digest)
            blob.sent_to(self)
            return
        here = blob.here()
        is_sent = here is not None and (is_from_here or not self.bring(here))
        if here is not None and is_sent:
            self._queue_blob(here)
        if entry is None:
            entry = self._blobs[blob.digest] = _Stored(blob.size, 0, added=0, is_there=False)
            self.blob_bytes += blob.size
        entry.users += 1
        if is_sent:
            entry.add()
        elif here is None:
            self.wanted.append(blob)
        blob.sent_to(self)
        self._drop_oldest()

    def _queue_blob(self, blob: Blob) -> None:
        body = blob.digest + blob.size.to_bytes(8, "little") + _BODY_TAIL
        self.channel.queue(FrameKind.BLOB, 0, body, blob=blob, priority=BLOBS)

    def send_wanted(self, blob: Blob) -> None:
        """Send a blob that calls on this node wait for.

        Raises:
            OSError: There is no room to send it.
        """
        entry = self._blobs.get(blob.digest)
        if entry is not None and not entry.is_there:
            self._queue_blob(blob)
            entry.add()

    def has_pulled(self, blob: Blob) -> None:
        """Record a blob that came from another node, or drop it if nobody needs it any longer."""
        entry = self._blobs.get(blob.digest)
        if entry is None:
            self.channel.queue(FrameKind.DROP_BLOB, body=blob.digest, priority=BLOBS)
            return
        entry.add()

    def has_blob(self, digest: bytes) -> bool:
        """Return whether the node has a blob, or will have it before anything that is sent to it now."""
        entry = self._blobs.get(digest)
        return entry is not None and entry.is_there

    def needs_blob(self, digest: bytes) -> bool:
        """Return whether calls on the node wait for a blob."""
        entry = self._blobs.get(digest)
        return entry is not None and not entry.is_there

    def lacks_blob(self, digest: bytes) -> None:
        """Note that a node does not have a blob, contrary to the record."""
        entry = self._blobs.get(digest)
        if entry is not None:
            entry.is_there = False

    def release_blobs(self, blobs: tuple[Blob, ...]) -> None:
        """Release blobs whose call has ended."""
        for blob in blobs:
            entry = self._blobs.get(blob.digest)
            if entry is not None:
                entry.users -= 1

    def keep(self, digest: bytes, size: int) -> None:
        """Record a blob of a value that stayed on the node, and hold it for the value's reference."""
        entry = self._blobs.get(digest)
        if entry is None:
            self._blobs[digest] = _Stored(size, 1, added=1, is_there=True)
            self.blob_bytes += size
            self._drop_oldest()
            return
        entry.users += 1
        entry.add()

    def found(self, digest: bytes, size: int, added: int) -> None:
        """Record a blob that the node has from an earlier client. `added`: how often it must be dropped."""
        if digest not in self._blobs:
            self._blobs[digest] = _Stored(size, 0, added=added, is_there=True)
            self.blob_bytes += size

    def forget_blob(self, digest: bytes, *, is_held: bool) -> None:
        """Let go of a blob whose reference is gone, and drop it at once unless calls use it. `is_held`: it was held."""
        entry = self._blobs.get(digest)
        if entry is None:
            return
        entry.users -= is_held
        if not entry.users:
            self._drop_blob(digest, entry)

    def _drop_blob(self, digest: bytes, entry: _Stored) -> None:
        del self._blobs[digest]
        self.blob_bytes -= entry.size
        times = b"" if entry.added == 1 else entry.added.to_bytes(4, "little")
        if entry.added:
            self.channel.queue(FrameKind.DROP_BLOB, body=digest + times, priority=BLOBS)

    def _drop_oldest(self) -> None:
        if self._is_within_limits():
            return
        for digest, entry in list(self._blobs.items()):
            if self._is_within_limits():
                return
            if not entry.users:
                self._drop_blob(digest, entry)

    def _is_within_limits(self) -> bool:
        return self.blob_bytes <= self._blob_limit and len(self._blobs) <= self._blob_count


def _assumed_limit(facts: Mapping[str, Any]) -> int:
    """Return the limit of a head, or of an agent of an earlier version, which do not announce theirs."""
    return int(facts.get("memory_bytes", 0)) // 2 or 2 * default_blob_limit()
