"""Every kind of call at once, on one pool, and books that record the fate of each.

A task writes to a ledger, a file of its node, when it begins. The client notes the outcome of each call. `Books.check`
compares the two: nothing that was acknowledged is lost or doubled, and a call is lost only if a fault can have lost it.
"""

from __future__ import annotations

import faulthandler
import itertools
import operator
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import cloudpickle

import skyward as sky
from skyward.errors import NodeLost, SlotLost
from tests.chaos.schedule import Struck
from tests.hosts.faults import gang_of

__all__ = ["Books", "Load", "count", "processes_with"]

OUTCOME_LIMIT_S = 60.0
"""No call may stay without an outcome for longer: none takes a second by itself."""
RETRIES = 50

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # nodes elsewhere have neither pytest nor this file


# On the node --------------------------------------------------------------------------------------------------------


def begin(ledger: str, call: str) -> None:
    with open(ledger, "a") as file:
        file.write(f"{call}\n")


@sky.compute
def plain(ledger: str, call: str, seconds: float) -> str:
    begin(ledger, call)
    time.sleep(seconds)
    return call


@sky.compute
def stream(ledger: str, call: str, length: int) -> Iterator[int]:
    begin(ledger, call)
    for item in range(length):
        time.sleep(0.002)
        yield item


@sky.compute
def nested(pool: sky.ComputePool, ledger: str, call: str, seconds: float) -> str:
    begin(ledger, call)
    inner: str = plain(ledger, f"{call} inner", seconds) >> pool
    return inner.removesuffix(" inner")


@sky.compute
def detach(ledger: str, call: str) -> str:
    begin(ledger, call)
    null = subprocess.DEVNULL
    subprocess.Popen(["sleep", "600"], start_new_session=True, stdin=null, stdout=null, stderr=null)
    return call


def meet(ledger: str, call: str, seconds: float) -> tuple[str, int | None]:
    info = sky.instance_info()
    assert info is not None
    begin(ledger, f"{call} {info.part}")
    time.sleep(seconds)
    return call, info.part


# On the client ------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Books:
    """Fate of each call, by its name."""

    values: Counter[str] = field(default_factory=Counter)
    """How often a right value was delivered."""
    losses: dict[str, NodeLost | SlotLost] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)
    """What no fault excuses: wrong values, other errors, calls without an outcome."""

    def settle(self, call: str, outcome: Callable[[], object], expected: object, *, may_be_lost: bool) -> None:
        """Record one outcome."""
        try:
            value = outcome()
        except CancelledError:
            self.cancelled.add(call)
        except (NodeLost, SlotLost) as error:
            self.losses[call] = error
            if not may_be_lost:
                self.wrong.append(f"{call}: lost in spite of its retries: {error!r}")
        except Exception as error:
            self.wrong.append(f"{call}: {type(error).__name__}: {error}")
        else:
            self.values[call] += 1
            if value != expected:
                self.wrong.append(f"{call}: the value is {value!r}")

    def check(self, began: Counter[str], struck: Struck) -> None:
        """Raise AssertionError with all problems. `began` counts the lines of the ledgers."""
        wrong = list(self.wrong)
        wrong += [f"{call}: delivered {times} times" for call, times in self.values.items() if times > 1]
        wrong += [f"{call}: acknowledged, and never ran" for call in self.values if not _beginnings(began, call)]
        once = [call for call in [*self.values, *self.losses, *self.cancelled] if call.startswith("once")]
        wrong += [f"{call}: ran {began[call]} times" for call in once if began[call] > 1]
        for call, error in self.losses.items():
            if error.started is False and began[call]:
                wrong.append(f"{call}: ran, but was reported as not started: {error!r}")
        slots_lost = [call for call, error in self.losses.items() if isinstance(error, SlotLost)]
        nodes_lost = [call for call, error in self.losses.items() if isinstance(error, NodeLost)]
        if len(slots_lost) > struck.slots:
            wrong.append(f"{len(slots_lost)} calls lost their slot, but {struck.slots} were killed: {slots_lost}")
        if nodes_lost and not struck.nodes:
            wrong.append(f"{len(nodes_lost)} calls lost their node, but none was killed: {nodes_lost}")
        assert not wrong, "\n".join([*wrong, "The faults were:", *struck.faults])

    def __str__(self) -> str:
        return f"{self.values.total()} values, {len(self.losses)} lost, {len(self.cancelled)} cancelled"


def _beginnings(began: Counter[str], call: str) -> int:
    return began[call] or began[f"{call} 0"]  # each rank of a gang begins


class Load:
    """Threads that keep a pool busy, each with one kind of call, until `stop` is set. Then all calls are settled.

    The names of calls that may run at most once begin with "once". All others have retries and must succeed. Gangs are
    on all nodes, or on `gang_nodes` of a pool whose number of nodes changes.
    """

    def __init__(self, pool: sky.ComputePool, ledger: str, seed: int, gang_nodes: int | None = None) -> None:
        self.books = Books()
        self._pool = pool
        self._ledger = ledger
        self._seed = seed
        self._gang_nodes = gang_nodes
        self._stop = threading.Event()
        kinds = (self._futures, self._retried, self._blocking, self._maps, self._streams, self._gangs, self._nested)
        self._threads = [threading.Thread(target=self._run, args=(kind,), name=kind.__name__) for kind in kinds]
        for thread in self._threads:
            thread.daemon = True  # one that hangs is reported, not waited for
            thread.start()

    def finish(self) -> None:
        """Stop sending and wait for all outcomes. Raises AssertionError if a thread still waits, with its stack."""
        self._stop.set()
        deadline = time.monotonic() + 2 * OUTCOME_LIMIT_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        waiting = [thread.name for thread in self._threads if thread.is_alive()]
        if waiting:
            with tempfile.TemporaryFile("w+") as file:
                faulthandler.dump_traceback(file, all_threads=True)
                file.seek(0)
                raise AssertionError(f"no end of {', '.join(waiting)}:\n{file.read()}")

    def _run(self, kind: Callable[[Iterator[int], random.Random], None]) -> None:
        rng = random.Random(f"{self._seed} {kind.__name__}")
        try:
            kind(itertools.takewhile(lambda _: not self._stop.is_set(), itertools.count()), rng)
        except Exception as error:
            self.books.wrong.append(f"{kind.__name__}: {type(error).__name__}: {error}")

    def _futures(self, numbers: Iterator[int], rng: random.Random) -> None:
        open_calls: deque[tuple[str, Future[str]]] = deque()

        def settle_oldest() -> None:
            call, future = open_calls.popleft()
            self.books.settle(call, lambda: future.result(OUTCOME_LIMIT_S), call, may_be_lost=True)

        for number in numbers:
            call = f"once future {number}"
            future = plain(self._ledger, call, rng.uniform(0, 0.02)) > self._pool
            if rng.random() < 0.03:
                future.cancel()
            open_calls.append((call, future))
            if len(open_calls) > 16:
                settle_oldest()
        while open_calls:
            settle_oldest()

    def _retried(self, numbers: Iterator[int], rng: random.Random) -> None:
        call_again = plain.with_options(retries=RETRIES)
        for number in numbers:
            calls = [f"future {number} {part}" for part in range(8)]
            futures = [call_again(self._ledger, call, rng.uniform(0, 0.01)) > self._pool for call in calls]
            for call, future in zip(calls, futures, strict=True):
                self.books.settle(call, lambda f=future: f.result(OUTCOME_LIMIT_S), call, may_be_lost=False)  # type: ignore[misc]

    def _blocking(self, numbers: Iterator[int], rng: random.Random) -> None:
        for number in numbers:
            call = f"once blocking {number}"
            pending = plain(self._ledger, call, rng.uniform(0, 0.005))
            self.books.settle(call, lambda p=pending: p >> self._pool, call, may_be_lost=True)  # type: ignore[misc]
            if number % 50 == 0:
                call = f"once detached {number}"
                pending = detach(self._ledger, call)
                self.books.settle(call, lambda p=pending: p >> self._pool, call, may_be_lost=True)  # type: ignore[misc]

    def _maps(self, numbers: Iterator[int], rng: random.Random) -> None:
        sure = plain.with_options(retries=RETRIES)
        for number in numbers:
            calls = [f"map {number} {part}" for part in range(rng.randrange(1, 120))]
            values = self._pool.imap(sure, itertools.repeat(self._ledger), calls, itertools.repeat(0.002))
            for call in calls:
                self.books.settle(call, lambda v=values: next(v), call, may_be_lost=False)  # type: ignore[misc]

    def _streams(self, numbers: Iterator[int], rng: random.Random) -> None:
        for number in numbers:
            call, length = f"once stream {number}", rng.randrange(1, 100)
            items: list[int] = []

            def outcome(items: list[int] = items, call: str = call, length: int = length) -> list[int]:
                try:
                    for item in stream(self._ledger, call, length) >> self._pool:
                        items.append(item)
                finally:
                    if items != list(range(len(items))):
                        self.books.wrong.append(f"{call}: the items are {items}")
                return items

            self.books.settle(call, outcome, list(range(length)), may_be_lost=True)

    def _gangs(self, numbers: Iterator[int], rng: random.Random) -> None:
        nodes = self._gang_nodes or self._pool.nodes
        gang: Callable[..., Any] = gang_of(meet).with_options(max_restarts=RETRIES)
        send = operator.matmul
        if self._gang_nodes:
            gang, send = gang_of(meet).with_options(max_restarts=RETRIES, nodes=nodes), operator.rshift
        for number in numbers:
            call = f"gang {number}"
            expected = [(call, node) for node in range(nodes)]
            pending = gang(self._ledger, call, rng.uniform(0, 0.05))
            self.books.settle(call, partial(send, pending, self._pool), expected, may_be_lost=False)
            self._stop.wait(0.2)  # a gang holds whole nodes: leave some time to the others

    def _nested(self, numbers: Iterator[int], rng: random.Random) -> None:
        for number in numbers:
            call = f"once nested {number}"
            pending = nested(self._pool, self._ledger, call, rng.uniform(0, 0.01))
            self.books.settle(call, lambda p=pending: p >> self._pool, call, may_be_lost=True)  # type: ignore[misc]


def count(ledgers: Sequence[str]) -> Counter[str]:
    """Count how often each call began, from the text of the ledgers."""
    return Counter(itertools.chain.from_iterable(text.splitlines() for text in ledgers))


def processes_with(marker: str) -> dict[int, str]:
    """Return the command lines of marked processes, by pid.

    A process is marked if its environment holds the marker. This process and its keeper are left out.
    """
    found: dict[int, str] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                is_marked = marker.encode() in file.read()
            with open(f"/proc/{name}/cmdline", "rb") as file:
                command = file.read().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if is_marked and int(name) != os.getpid() and "keeper_process" not in command:
            found[int(name)] = command
    return found
