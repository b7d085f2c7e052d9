"""Sealed and merged points: the same history, in fewer bytes."""

from __future__ import annotations

import asyncio
import math
import random

import numpy as np
import pytest

from skyward.hub.model.points import PointColumns
from skyward.hub.services.tracking import Tracking
from skyward.hub.store.chunks import Columns, decode, encode, merge
from skyward.hub.store.database import Database
from skyward.hub.store.sealing import apply_seal, prepare_seal
from tests.hub.services.hubs import ADA, columns
from tests.waiting import until


def count(database: Database, table: str) -> int:
    rows = database.read_and_wait(lambda s: s.execute(f"SELECT count(*) FROM {table}").fetchone())
    return int(rows[0])


def test_a_chunk_gives_back_what_was_put_in() -> None:
    values = np.array([math.nan, -0.0, 1e308, 5e-324, math.pi])
    steps = np.array([-(2**63), 2**63 - 1, 0, 0, 7])
    before = Columns(np.array([-5, 0, 1, 2**62, 2**63 - 1]), steps, values)
    after = decode(encode(before), 5)

    assert np.array_equal(after.timestamps, before.timestamps)
    assert np.array_equal(after.steps, before.steps)
    assert after.values.tobytes() == before.values.tobytes()


def test_merging_sorts_and_drops_duplicates() -> None:
    one = Columns(np.array([3, 1, 1]), np.array([1, 1, 1]), np.array([1.0, math.nan, 2.0]))
    merged = merge([one, one, Columns(np.array([1]), np.array([0]), np.array([9.0]))])

    assert list(zip(merged.timestamps, merged.steps, strict=True)) == [(1, 0), (1, 1), (1, 1), (3, 1)]
    assert math.isnan(merged.values[1])
    assert merged.values[2] == 2.0


def test_points_in_order_are_merged_as_points_in_any_order_are() -> None:
    count = 5_000
    times, steps = np.arange(count) // 3, np.arange(count)
    whole = Columns(times, steps, np.sin(steps))
    parts = [whole.take(slice(start, start + 999)) for start in range(0, count, 999)]
    for given in (parts, parts[::-1], [whole.take(np.random.default_rng(1).permutation(count)), *parts]):
        merged = merge(given)
        assert np.array_equal(merged.timestamps, times)
        assert np.array_equal(merged.steps, steps)
        assert np.array_equal(merged.values, whole.values)


def test_nan_is_sorted_behind_zero_and_both_zeros_are_one_point() -> None:
    values = np.array([2.0, math.nan, 0.0, -1.0, -0.0, math.nan])
    merged = merge([Columns(np.zeros(6, np.int64), np.zeros(6, np.int64), values)])

    assert merged.values.tolist() == pytest.approx([-1.0, 0.0, math.nan, 2.0], nan_ok=True)


def test_a_long_tail_is_sealed_and_a_run_that_ends_is_merged(database: Database) -> None:
    tracking = Tracking(database)
    shuffled = random.Random(1)
    expected: set[tuple[int, int, float]] = set()

    async def run() -> None:
        await tracking.create_run(ADA, "0", run_id="r1")
        for start in range(0, 20_000, 1_000):
            points = [
                ("a" if step % 3 else "b", step, shuffled.randrange(1000), step / 7)
                for step in range(start, start + 1_000)
            ]
            expected.update((at, step, value) for key, step, at, value in points if key == "a")
            await tracking.log_points(ADA, "r1", columns(*points))
            await tracking.log_points(ADA, "r1", columns(*points[:50]))

    asyncio.run(run())
    until(lambda: count(database, "chunk") >= 4)

    def history() -> list[tuple[int, int, float]]:
        read = asyncio.run(tracking.history(ADA, "r1", "a"))
        return list(zip(read.timestamps, read.steps, read.values, strict=True))

    assert history() == sorted(expected)
    from skyward.hub.model.runs import RunState

    asyncio.run(tracking.update_run(ADA, "r1", state=RunState.COMPLETED))
    until(lambda: count(database, "tail") == 0 and count(database, "chunk") == 2)
    assert history() == sorted(expected)
    sizes = database.read_and_wait(lambda s: s.execute("SELECT sum(length(body)), sum(points) FROM chunk").fetchone())
    assert sizes[0] / sizes[1] < 14


def test_two_sealers_of_one_run_lose_and_double_nothing(database: Database) -> None:
    tracking = Tracking(database)
    asyncio.run(tracking.create_run(ADA, "0", run_id="r1"))
    run = database.read_and_wait(lambda s: s.execute("SELECT pk FROM run").fetchone())[0]

    def log(step: int) -> None:
        asyncio.run(tracking.log_points(ADA, "r1", columns(("a", step, step, 1.0))))

    for step in range(5):
        log(step)
    first = database.read_and_wait(prepare_seal, run)
    log(5)
    second = database.read_and_wait(prepare_seal, run)
    assert first is not None
    assert second is not None
    database.write_and_wait(apply_seal, run, second)
    log(6)

    async def both() -> list[object]:
        writes = [database.write(apply_seal, run, sealed) for sealed in (first, second)]
        return list(await asyncio.gather(*writes, return_exceptions=True))

    assert [type(error).__name__ for error in asyncio.run(both())] == ["Moved", "Moved"]
    assert list(asyncio.run(tracking.history(ADA, "r1", "a")).steps) == list(range(7))
    assert database.read_and_wait(lambda s: s.execute("SELECT sum(points) FROM chunk").fetchone())[0] == 6


def test_twelve_thousand_names_in_one_run_stay_in_the_tail_until_it_is_long(database: Database) -> None:
    tracking = Tracking(database)
    wide = PointColumns()
    for key in range(12_000):
        wide.append(f"m{key}", 1, 1, float(key))
    asyncio.run(tracking.create_run(ADA, "0", run_id="r1"))
    asyncio.run(tracking.log_points(ADA, "r1", wide))

    assert count(database, "chunk") == 0
    assert len(asyncio.run(tracking.run(ADA, "r1")).metrics) == 12_000
    assert list(asyncio.run(tracking.history(ADA, "r1", "m77")).values) == [77.0]
