"""How large the chunks of a map are, and how many of them are on their way. Arithmetic only.

Where nodes are near, the size is measured first: a chunk of one call for each slot, then chunks of `TARGET_NS` of work,
at most `GROWTH`-fold larger each time. Where a round trip is long, waiting for the first answers would cost as much as
a whole map of small calls, so the sizes are guessed: a series of growing chunks goes out at once. No guess can be bad
for long, because a slot ends a chunk when its time is up (`limit_ns`) and gives back what it has not begun.
Chunks get smaller towards the end of the input, so that all slots end together.
"""

from __future__ import annotations

import math

__all__ = ["ChunkSizes"]

TARGET_NS = 25_000_000
"""Nanoseconds of work in a chunk: long against a round trip, short against a progress bar's patience."""
LEAST_NS = 2_000_000
"""Nanoseconds of work in a chunk at least, if there is that much: several times what sending one costs."""
GROWTH = 64
MAX_ITEMS = 1 << 16
_AHEAD = 2
"""Chunks for each slot on their way: one that runs and one that waits behind it. What a round trip takes comes on top.
"""
_MOST_AHEAD = 64
_MOST_LAZY = 1024
"""Calls of a chunk at most, where the input is read as the values are taken."""

_LIMIT = 4
"""Times `TARGET_NS` that a chunk may take. What a slot gives back is sent again, so it should be rare."""
FAR_NS = 2_000_000
"""Round trips from which on sizes are guessed; a network of one building is nearer."""
_GUESSES = 12
"""Guessed chunks for each slot: 1, 16, 256, 4096, and some of `MAX_ITEMS`. With the smallest calls there are, half a
million of them, they keep a slot busy for some 50 ms."""
_GUESS_GROWTH = 16
_TELLING = 4
"""Guessed chunks for each slot of which the last tells how long a call takes, however short all of them were."""
_GUESSED_BYTES = 2 << 20
"""Of all guessed chunks on their way: on a slow line no more must stand in the way of what turns out to be wanted."""


class ChunkSizes:
    """Of one map. The owner tells what it sends and what comes back.

    Args:
        slots: of the pool.
        chunk: calls in each chunk; None: as this class finds best.
        left: calls that were not sent; None: not known.
        is_lazy: the input is read as the values are taken.
        round_trip_ns: to the farthest node; 0 on this machine.
        may_guess: False where each call has a time limit, which chunks would share.
    """

    def __init__(
        self,
        *,
        slots: int,
        chunk: int | None,
        left: int | None,
        is_lazy: bool,
        round_trip_ns: float = 0.0,
        may_guess: bool = True,
    ) -> None:
        self._slots = slots
        self._chunk = chunk
        self._left = left
        self._is_lazy = is_lazy
        self._round_trip_ns = round_trip_ns
        self._guesses = may_guess and not is_lazy and chunk is None and round_trip_ns >= FAR_NS
        self._item_ns: float | None = None
        self._timed_ns = self._timed_items = 0.0
        self._last_size = 1
        self._guessed = self._ended = self._bytes = 0
        self._item_bytes = 0.0

    # Questions ------------------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Calls in the next chunk, >= 1."""
        if self._chunk is not None:
            return self._chunk
        if self._item_ns is None:
            return self._guess() if self._guesses else 1
        size = min(int(TARGET_NS / self._item_ns), self._last_size * GROWTH, MAX_ITEMS)
        if self._left is not None:
            # Smaller towards the end, so that all slots end together; but not so small that sending costs more.
            least = int(LEAST_NS / self._item_ns)
            size = min(size, max(least, -(-self._left // (self._slots * self._ahead()))))
        elif self._is_lazy:
            size = min(size, _MOST_LAZY)
        return max(1, size)

    @property
    def limit(self) -> int:
        """Chunks that may be on their way."""
        if self._chunk is not None or self._item_ns is not None:
            return self._slots * self._ahead()
        # Until the first chunk came back nobody knows how long a call takes.
        if not self._guesses or self._bytes >= _GUESSED_BYTES:
            return self._slots
        return self._slots * _GUESSES

    @property
    def limit_ns(self) -> int | None:
        """How long a slot runs calls of a chunk; None: to its end."""
        if self._chunk is not None:
            return None
        if self._item_ns is None:
            # All guesses together last longer than a round trip: what comes back is there again before they have ended.
            return int(max(TARGET_NS, 2 * self._round_trip_ns / _GUESSES))
        return _LIMIT * TARGET_NS

    @property
    def expected_ns(self) -> float | None:
        """How long the next chunk will take; None: not known. Of a guess: so little that no node is refused it."""
        if self._item_ns is not None:
            return self._item_ns * self.size
        return self._round_trip_ns / _GUESSES if self._guesses else None

    def _guess(self) -> int:
        size: int = min(_GUESS_GROWTH ** min(self._guessed // self._slots, 8), MAX_ITEMS)
        if self._left is not None:
            size = min(size, -(-self._left // self._slots))
        if self._guessed:  # as far as is known from those that were sent
            size = min(size, int(_GUESSED_BYTES / _GUESSES / self._slots / max(self._item_bytes, 1e-3)))
        return max(1, size)

    def _ahead(self) -> int:
        """Chunks for each slot on their way, so that the next is there when one ends, however far the node is."""
        if not self._round_trip_ns or self._item_ns is None:
            return _AHEAD
        chunk_ns = max(min(self._item_ns * self._last_size, TARGET_NS), self._item_ns, LEAST_NS)
        return min(_AHEAD + math.ceil(self._round_trip_ns / chunk_ns), _MOST_AHEAD)

    # Events ---------------------------------------------------------------------------------------------------------

    def sent(self, count: int, size_bytes: int) -> None:
        """A chunk of so many calls, and of so many bytes."""
        if self._left is not None:
            self._left -= count
        self._bytes += size_bytes
        if self._item_ns is None:
            self._guessed += 1
            self._item_bytes = size_bytes / count

    def returned(self, count: int) -> None:
        """Calls of a chunk that were not begun."""
        if self._left is not None:
            self._left += count

    def ended(self, elapsed_ns: int, count: int, size_bytes: int, round_trip_ns: float) -> None:
        """A chunk of so many bytes ended, in which so many calls ran."""
        self._bytes -= size_bytes
        self._ended += 1
        # By the number of calls, so that a small chunk, most of whose time is not its calls', says little.
        self._timed_ns = 0.5 * self._timed_ns + elapsed_ns
        self._timed_items = 0.5 * self._timed_items + count
        self._last_size = max(self._last_size, count)
        if (
            not self._guesses
            or self._item_ns is not None
            or self._timed_ns >= LEAST_NS
            or self._ended >= _TELLING * self._slots
        ):
            self._item_ns = max(self._timed_ns / max(self._timed_items, 1.0), 1.0)
        self._round_trip_ns = round_trip_ns
