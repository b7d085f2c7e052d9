"""The cable of a host is pulled, for a while and for good."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import skyward as sky
from skyward.errors import NodeLost
from skyward.events import Event, LinkRestored
from tests.hosts.faults import EPSILON_S, Ledger, Place, gang_of, noted, nothing_runs_on
from tests.waiting import until

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(240)]

Places = Callable[[int], Place]
NewLedger = Callable[[Place], Ledger]


@pytest.mark.parametrize("cut_s", [5.0, pytest.param(60.0, marks=pytest.mark.slow)])
def test_a_cut_shorter_than_the_lease_is_only_a_pause(place: Places, ledger_of: NewLedger, cut_s: float) -> None:
    @sky.compute  # in here, so that it travels by value: pytest is not on the nodes
    def said(limit: int) -> int:
        for n in range(limit):
            print(f"line {n}", flush=True)
            time.sleep(0.02)
        return limit

    @sky.compute
    def doubled(items: Iterator[int]) -> Iterator[int]:
        for item in items:
            time.sleep(0.01)
            yield 2 * item

    here = place(2)
    ledger, mapped = ledger_of(here), ledger_of(here)
    call = noted(ledger.path, 0.02)
    lines: list[str] = []
    events: list[Event] = []
    got: list[int] = []
    with (
        here.pool(
            lease_s=3 * cut_s,
            concurrency=4,
            logs=lambda line: lines.append(line.text.strip()),
            on_event=events.append,
        ) as pool,
        ThreadPoolExecutor(2) as threads,
    ):
        agents = pool.agent_pids()
        waiting = gang_of(lambda: time.sleep(cut_s / 2))
        gang = threads.submit(lambda: waiting() @ pool)
        talk = said(200) > pool
        stream = doubled(iter(range(300))) >> pool
        values = threads.submit(pool.map, noted(mapped.path, 0.002), range(2000))
        futures = {n: ledger.submit(call(n) > pool, n) for n in range(300)}
        got.extend(next(stream) for _ in range(20))
        until(lambda: len(ledger.ran()) >= 20 and len(mapped.ran()) >= 20 and len(lines) >= 3)
        with here.hosts[0].link_cut(), here.hosts[1].link_cut():
            time.sleep(cut_s)
        got.extend(stream)
        assert ledger.settle(futures) == {}
        assert talk.result(60) == 200
        assert values.result(60) == list(range(2000))
        assert gang.result(60) == [None, None]
        assert pool.agent_pids() == agents
        assert sky.compute(abs)(-1) @ pool == [1, 1]
    assert set(ledger.ran().values()) == {1}
    assert set(mapped.ran().values()) == {1}
    assert got == [2 * n for n in range(300)]
    assert lines == [f"line {n}" for n in range(200)]
    if cut_s > 20:  # TCP handles a shorter one
        assert any(isinstance(event, LinkRestored) for event in events)


def test_a_link_that_stays_cut_is_a_lost_node_and_the_node_ends_by_itself(place: Places, ledger_of: NewLedger) -> None:
    here = place(2)
    ledger = ledger_of(here)
    lost, other = here.hosts
    lease_s = 4.0
    call = noted(ledger.path, 0.05)
    with here.pool(lease_s=lease_s, concurrency=2) as pool:
        futures = {n: ledger.submit(call(n) > pool, n) for n in range(400)}
        until(lambda: len(ledger.ran()) >= 20)
        with lost.link_cut():
            began = time.monotonic()
            nothing_runs_on([lost], lease_s + EPSILON_S)
            losses = ledger.settle(futures)
            assert time.monotonic() - began > lease_s, "it was waited for as long as it might live"
            assert {type(error) for error in losses.values()} == {NodeLost}
            assert len(losses) < 40, "no more than what had been sent"
            assert max(ledger.ran().values()) == 1
            assert sky.compute(abs)(-1) >> pool == 1
            assert other.started_processes() != []
        # Its successor is the same host, as soon as that can be reached.
        assert sky.compute(abs)(-1).with_options(retries=3) @ pool == [1, 1]
