"""Sizes of a map's chunks, for simulated slots and a simulated link in virtual time."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from skyward.pool.chunk_sizes import MAX_ITEMS, ChunkSizes

MS = 1e6
CHUNK_COST_NS = 0.2 * MS
"""What a chunk costs its slot beyond its calls."""


@dataclass
class World:
    """Slots that take chunks from one queue, `round_trip_ns` away from the cutter."""

    sizes: ChunkSizes
    items: int
    call_ns: Callable[[int], float]
    round_trip_ns: float
    slots: int
    bytes_per_item: int = 0
    chunks: int = 0
    busy_ns: list[float] = field(default_factory=list)
    most_bytes: int = 0

    def run(self) -> float:
        """Return the nanoseconds until the last value arrives."""
        events: list[tuple[float, int, tuple[int, int], int]] = []
        order = itertools.count()
        free = [0.0] * self.slots
        self.busy_ns = [0.0] * self.slots
        given_back: deque[tuple[int, int]] = deque()
        at, out, bytes_out, now = 0, 0, 0, 0.0
        while True:
            while out < self.sizes.limit and (given_back or at < self.items):
                size, limit_ns = self.sizes.size, self.sizes.limit_ns
                assert 1 <= size <= MAX_ITEMS
                if given_back:
                    first, stop = given_back.popleft()
                    if first + size < stop:
                        given_back.appendleft((first + size, stop))
                else:
                    first, stop = at, self.items
                    at = min(at + size, self.items)
                stop = min(first + size, stop)
                self.sizes.sent(stop - first, (stop - first) * self.bytes_per_item)
                bytes_out += (stop - first) * self.bytes_per_item
                self.most_bytes = max(self.most_bytes, bytes_out)
                slot = min(range(self.slots), key=free.__getitem__)
                begin = max(free[slot], now + self.round_trip_ns / 2)
                took, done = CHUNK_COST_NS, first
                while done < stop and (done == first or limit_ns is None or took < limit_ns):
                    took += self.call_ns(done)
                    done += 1
                free[slot] = begin + took
                self.busy_ns[slot] += took
                heapq.heappush(events, (free[slot] + self.round_trip_ns / 2, next(order), (first, stop), done))
                out, self.chunks = out + 1, self.chunks + 1
            if not events:
                return now
            now, _, (first, stop), done = heapq.heappop(events)
            out -= 1
            bytes_out -= (stop - first) * self.bytes_per_item
            took = CHUNK_COST_NS + sum(self.call_ns(i) for i in range(first, done))
            self.sizes.ended(int(took), done - first, (stop - first) * self.bytes_per_item, self.round_trip_ns)
            if done < stop:
                given_back.append((done, stop))
                self.sizes.returned(stop - done)


def world(
    items: int,
    call_ns: float | Callable[[int], float],
    *,
    round_trip_ms: float,
    slots: int = 2,
    bytes_per_item: int = 0,
    may_guess: bool = True,
    is_cheap: bool = False,
) -> World:
    sizes = ChunkSizes(
        slots=slots,
        chunk=None,
        left=items,
        is_lazy=False,
        round_trip_ns=round_trip_ms * MS,
        may_guess=may_guess,
        is_cheap=is_cheap,
    )
    cost = call_ns if callable(call_ns) else lambda _: call_ns
    return World(sizes, items, cost, round_trip_ms * MS, slots, bytes_per_item)


@pytest.mark.parametrize("items", [10_000, 1_000_000])
def test_a_map_of_tiny_calls_costs_little_more_than_a_round_trip_over_a_long_link(items: int) -> None:
    near = world(items, 100, round_trip_ms=0).run()
    far = world(items, 100, round_trip_ms=100).run()
    assert far < near + 150 * MS


@pytest.mark.parametrize("call_ms", [0.3, 3, 30, 300])
def test_slow_calls_keep_all_slots_busy_over_a_long_link(call_ms: float) -> None:
    items = int(3000 / call_ms)
    made = world(items, call_ms * MS, round_trip_ms=100)
    ideal = items * call_ms * MS / made.slots + 100 * MS
    assert made.run() < 1.15 * ideal + 100 * MS


@pytest.mark.parametrize("round_trip_ms", [0, 100])
def test_calls_that_turn_slow_are_shared_out(round_trip_ms: float) -> None:
    """A chunk that was cut for tiny calls must not hold a slot for minutes."""
    made = world(20_000, lambda i: 100 if i < 18_000 else 2 * MS, round_trip_ms=round_trip_ms)
    assert made.run() < 1.2 * (2000 * 2 * MS / 2) + 3 * round_trip_ms * MS


def test_a_quick_first_call_says_nothing_about_the_others() -> None:
    made = world(400, lambda i: 1000 if i < 5 else 20 * MS, round_trip_ms=100)
    assert made.run() < 1.15 * 400 * 20 * MS / 2 + 200 * MS


def test_sizes_are_measured_and_not_guessed_if_nodes_are_near() -> None:
    sizes = ChunkSizes(slots=2, chunk=None, left=1000, is_lazy=False, round_trip_ns=0.3 * MS)
    assert (sizes.size, sizes.limit) == (1, 2)


def test_near_slots_get_numbers_before_a_call_was_measured() -> None:
    sizes = ChunkSizes(slots=2, chunk=None, left=100_000, is_lazy=False, is_cheap=True)
    sent: list[int] = []
    while len(sent) < sizes.limit:
        sent.append(sizes.size)
        sizes.sent(sizes.size, 10)
    assert sent == [1, 1, 16_384, 16_384, 16_384, 16_384]


@pytest.mark.parametrize("call_ms", [0.03, 0.3, 3, 30, 300])
def test_a_guess_for_near_slots_delays_no_slow_calls(call_ms: float) -> None:
    items = int(3000 / call_ms)
    made = world(items, call_ms * MS, round_trip_ms=0, is_cheap=True)
    assert made.run() < 1.05 * items * call_ms * MS / made.slots + 100 * MS


def test_nothing_is_guessed_for_an_input_that_is_read_as_values_are_taken() -> None:
    sizes = ChunkSizes(slots=2, chunk=None, left=None, is_lazy=True, round_trip_ns=100 * MS)
    for _ in range(2):
        assert sizes.size == 1
        sizes.sent(1, 100)
    assert sizes.limit == 2


def test_nothing_is_guessed_for_calls_with_a_time_limit() -> None:
    made = world(1000, 100, round_trip_ms=100, may_guess=False)
    assert (made.sizes.size, made.sizes.limit) == (1, 2)


def test_guesses_do_not_fill_the_line_with_large_items() -> None:
    made = world(2000, 30 * MS, round_trip_ms=100, bytes_per_item=50_000)
    made.run()
    assert made.most_bytes < 8 << 20


def test_a_requested_chunk_size_is_kept() -> None:
    sizes = ChunkSizes(slots=2, chunk=7, left=1000, is_lazy=False, round_trip_ns=100 * MS)
    assert (sizes.size, sizes.limit_ns, sizes.expected_ns) == (7, None, None)
