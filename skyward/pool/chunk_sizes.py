"""Sizes of a map's chunks, and their number in flight. Arithmetic only.

With near nodes, sizes are measured first: one call per chunk for each slot, then chunks of `TARGET_NS` of work, which
grow at most `GROWTH`-fold each time. With a long round trip, waiting for the first answers would cost as much as a
whole map of small calls. So sizes are guessed: a series of growing chunks goes out at once. A bad guess does not hurt
for long, because a slot ends a chunk when its time is up (`limit_ns`) and returns the calls that have not begun.
A short series goes to near nodes, too, if the items are numbers: it costs nothing to send them twice, and slots that
wait for the first answers would lose a tenth of a map of 100,000 tiny calls. Chunks get smaller towards the end of the
input, so that all slots finish together.
"""

from __future__ import annotations

import math

TARGET_NS = 25_000_000
"""Target work of a chunk in nanoseconds: long compared with a round trip, short enough for a smooth progress bar."""
LEAST_NS = 2_000_000
_LEAST_NEAR_NS = 500_000
"""Least work of a chunk in nanoseconds, while enough is left: several times the cost of sending it, far or near."""
GROWTH = 512
MAX_ITEMS = 1 << 16
_AHEAD = 2
"""Chunks in flight per slot: one that runs and one that waits. A round trip adds more."""
_MOST_AHEAD = 64
_MOST_LAZY = 1024
"""Most calls of a chunk, if the input is read as values are consumed."""

_LIMIT = 4
"""Longest duration of a chunk, in multiples of `TARGET_NS`. Calls that come back are sent again."""
FAR_NS = 2_000_000
"""Shortest round trip for which sizes are guessed. Networks within one building are faster."""
_GUESSES = 12
"""Guessed chunks per slot: 1, 16, 256, 4096, and several of `MAX_ITEMS` calls. With the smallest possible calls, half a
million of them, they keep a slot busy for about 50 ms."""
_GUESS_GROWTH = 16
_NEAR_GUESSES = 3
"""Guessed chunks per slot of a near node: 1 call, and twice `_NEAR_GROWTH`. The second tells how long a call takes, and
the third keeps the slot busy meanwhile."""
_NEAR_GROWTH = 16_384
_TELLING_ITEMS = 100
"""Calls after whose end a guess for near nodes is replaced by what was measured."""
_TELLING = 4
"""Guessed chunks per slot after which the measured duration of a call is used, however short the chunks were."""
_GUESSED_BYTES = 2 << 20
"""Most bytes of all guessed chunks in flight. On a slow line, more would delay what is actually needed."""


class ChunkSizes:
    """Chunk sizes of one map. The owner reports what it sends and receives.

    Args:
        slots: Slots of the pool.
        chunk: Calls in each chunk; None to choose.
        left: Calls that were not sent; None if not known.
        is_lazy: Whether the input is read as values are consumed.
        round_trip_ns: Round trip to the farthest node; 0 on this machine.
        may_guess: False if each call has a time limit, which the calls of a chunk would share.
        is_cheap: Whether it costs next to nothing to send an item twice.
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
        is_cheap: bool = False,
    ) -> None:
        self._slots = slots
        self._chunk = chunk
        self._left = left
        self._is_lazy = is_lazy
        self._round_trip_ns = round_trip_ns
        is_far = round_trip_ns >= FAR_NS
        may_guess = may_guess and not is_lazy and chunk is None
        self._guesses = (_GUESSES if is_far else _NEAR_GUESSES if is_cheap else 0) if may_guess else 0
        """Guessed chunks per slot; 0: none."""
        self._growth, self._most_growth = (_GUESS_GROWTH, 4) if is_far else (_NEAR_GROWTH, 1)
        """Growth of the guesses, and how often they grow."""
        self._telling_items = math.inf if is_far else _TELLING_ITEMS
        self._least_ns = LEAST_NS if is_far else _LEAST_NEAR_NS
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
            # Smaller towards the end, so that all slots finish together, but large enough to be worth sending.
            least = int(self._least_ns / self._item_ns)
            size = min(size, max(least, -(-self._left // (self._slots * self._ahead()))))
        elif self._is_lazy:
            size = min(size, _MOST_LAZY)
        return max(1, size)

    @property
    def limit(self) -> int:
        """Most chunks in flight."""
        if self._chunk is not None or self._item_ns is not None:
            return self._slots * self._ahead()
        # The duration of a call is unknown until the first chunk returns.
        if not self._guesses or self._bytes >= _GUESSED_BYTES:
            return self._slots
        return self._slots * self._guesses

    @property
    def limit_ns(self) -> int | None:
        """Longest time that a slot works on a chunk; None for no limit."""
        if self._chunk is not None:
            return None
        if self._item_ns is None:
            # All guesses together outlast a round trip, so returned calls arrive again before the slot is idle.
            return int(max(TARGET_NS, 2 * self._round_trip_ns / (self._guesses or 1)))
        return _LIMIT * TARGET_NS

    @property
    def expected_ns(self) -> float | None:
        """Expected duration of the next chunk; None if not known. Small for guesses, so that any node may get them."""
        if self._item_ns is not None:
            return self._item_ns * self.size
        return self._round_trip_ns / _GUESSES if self._guesses == _GUESSES else None

    def _guess(self) -> int:
        size: int = min(self._growth ** min(self._guessed // self._slots, self._most_growth), MAX_ITEMS)
        if self._left is not None:
            size = min(size, -(-self._left // self._slots))
        if self._guessed:  # the size of an item is estimated from the chunks sent so far
            size = min(size, int(_GUESSED_BYTES / self._guesses / self._slots / max(self._item_bytes, 1e-3)))
        return max(1, size)

    def _ahead(self) -> int:
        """Return the chunks in flight per slot that keep the slot busy, however far the node is."""
        if not self._round_trip_ns or self._item_ns is None:
            return _AHEAD
        chunk_ns = max(min(self._item_ns * self._last_size, TARGET_NS), self._item_ns, LEAST_NS)
        return min(_AHEAD + math.ceil(self._round_trip_ns / chunk_ns), _MOST_AHEAD)

    # Events ---------------------------------------------------------------------------------------------------------

    def send_one_by_one(self) -> None:
        """Put one call into each chunk from now on."""
        self._chunk = 1

    def sent(self, count: int, size_bytes: int) -> None:
        """Record a chunk that was sent, with its number of calls and its size."""
        if self._left is not None:
            self._left -= count
        self._bytes += size_bytes
        if self._item_ns is None:
            self._guessed += 1
            self._item_bytes = size_bytes / count

    def returned(self, count: int) -> None:
        """Record calls of a chunk that came back without having begun."""
        if self._left is not None:
            self._left += count

    def ended(self, elapsed_ns: int, count: int, size_bytes: int, round_trip_ns: float) -> None:
        """Record a chunk that ended, with the number of calls that ran in it."""
        self._bytes -= size_bytes
        self._ended += 1
        # Weighted by the number of calls: in a small chunk, overhead dominates the time.
        self._timed_ns = 0.5 * self._timed_ns + elapsed_ns
        self._timed_items = 0.5 * self._timed_items + count
        self._last_size = max(self._last_size, count)
        if (
            not self._guesses
            or self._item_ns is not None
            or self._timed_ns >= LEAST_NS
            or self._timed_items >= self._telling_items
            or self._ended >= _TELLING * self._slots
        ):
            self._item_ns = max(self._timed_ns / max(self._timed_items, 1.0), 1.0)
        self._round_trip_ns = round_trip_ns
