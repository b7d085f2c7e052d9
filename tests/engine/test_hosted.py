"""Pools whose scheduler runs in a head: the shipped engine suites over channels that the client lends."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import pytest

import skyward as sky
from skyward.testing import EngineSuite, ProcessEngineSuite
from tests.engines import hosted_pool


@pytest.fixture(scope="module")
def processes() -> Iterator[sky.ComputePool]:
    with hosted_pool(nodes=2, concurrency=2, cancel_grace_s=3, logs=False) as pool:
        yield pool


class TestProcesses(ProcessEngineSuite):
    @pytest.fixture
    def pool(self, processes: sky.ComputePool) -> sky.ComputePool:
        return processes


@pytest.fixture(scope="module")
def threads() -> Iterator[sky.ComputePool]:
    with hosted_pool(nodes=2, concurrency=2, executor="thread", logs=False) as pool:
        yield pool


@pytest.mark.slow  # beside the suite above it finds little: most of it is the same path
class TestThreads(EngineSuite):
    @pytest.fixture
    def pool(self, threads: sky.ComputePool) -> sky.ComputePool:
        return threads


def test_each_call_has_its_events(processes: sky.ComputePool) -> None:
    calls = 200
    with contextlib.closing(processes.events()) as events:
        for future in [sky.compute(abs)(-1) > processes for _ in range(calls)]:
            future.result(timeout=60)
        places: dict[type[sky.events.Event], dict[int, int]] = {sky.events.TaskSent: {}, sky.events.TaskEnded: {}}
        for place in itertools.count():
            event = events.get(timeout_s=60)
            assert event is not None, "an event did not come"
            if isinstance(event, sky.events.TaskSent | sky.events.TaskEnded):
                places[type(event)][event.task] = place  # a call that is moved to the other node is sent twice
            if len(places[sky.events.TaskEnded]) == calls:
                break
    sent, ended = places.values()
    assert all(sent[task] < place for task, place in ended.items())
