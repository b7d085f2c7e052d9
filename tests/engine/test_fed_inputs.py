"""Iterators of calls in a detached pool whose program is gone: nobody feeds them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import skyward as sky
from skyward.engine.head.fed_inputs import FedInputs
from skyward.errors import PoolClosed, UsageError
from skyward.testing.engine_suite import appear, wait_for
from tests.engine.test_killed_head import kill_head
from tests.engines import journaled_pool, leave, next_client

_LIMIT_S = 60.0


@pytest.mark.parametrize("end", ["leaves", "is replaced", "is replaced with its head"])
def test_calls_that_read_an_iterator_end_when_their_program(tmp_path: Path, end: str) -> None:
    def source() -> Iterator[int]:
        yield from range(5)
        wait_for(tmp_path / "end")

    @sky.compute
    def read(items: Iterator[int], name: str) -> None:
        try:
            for item in items:
                appear(tmp_path / f"{name}-{item}")
        finally:
            appear(tmp_path / f"{name}-ended")

    @sky.compute
    def read_all(items: Iterator[int]) -> int:
        total = sum(items)
        appear(tmp_path / "read-all")
        wait_for(tmp_path / "end")
        return total

    with journaled_pool(nodes=1, concurrency=2, logs=False) as pool:
        running, full = read(source(), "running") > pool, read_all(iter(range(5))) > pool
        wait_for(tmp_path / "running-4")
        wait_for(tmp_path / "read-all")
        waiting = read(source(), "waiting") > pool
        client = next_client(pool)
        if end == "leaves":
            leave(pool)
            wait_for(tmp_path / "running-ended")
        elif end == "is replaced with its head":
            kill_head()
        client.start([], None)
        wait_for(tmp_path / "running-ended")
        appear(tmp_path / "end")
        for call in running, waiting, full:
            with pytest.raises(PoolClosed):
                call.result(_LIMIT_S)
        for call in running, waiting:
            with pytest.raises(UsageError, match="iterator argument: its program has left the pool, so nothing more"):
                client.follow(call.call_id).result(_LIMIT_S)
        assert client.follow(full.call_id).result(_LIMIT_S) == 10, "it had all of its items"
        assert not (tmp_path / "waiting-ended").exists(), "it has not begun"
        client.close()


def test_items_that_are_taken_before_the_client_comes_are_told_once() -> None:
    task = SimpleNamespace(id=2, name="f", head=SimpleNamespace(inputs=2))
    engine: Any = SimpleNamespace(ledger=SimpleNamespace(tasks={2: task}, node_of=lambda task: 0))
    told: list[tuple[int, dict[int, tuple[Any, ...]]]] = []
    inputs = FedInputs(engine, lambda *positions: told.append(positions), lambda *_: None, first_fed=0)
    taken: Any = task
    inputs.take_up(taken, {0: (5, 3, False)})
    assert not inputs.took(2, 0)
    assert not inputs.took(2, 1)
    inputs.go_on(2)
    assert told == [(2, {0: (5, 4, False), 1: (0, 1, False)})]
    assert inputs.took(2, 0), "each later one is told when it is taken"
