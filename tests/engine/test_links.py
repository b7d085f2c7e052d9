"""Links that break, stall and stay cut, under every kind of call: nothing is lost, doubled or blocked for good."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest

import skyward as sky
from skyward.engine.link_times import LinkTimes
from skyward.engine.opener import Opener
from skyward.engine.width import MOST_CHANNELS, channels_for
from skyward.errors import NodeLost, PoolClosed
from skyward.events import Emit, Event, LinkRestored
from skyward.integrations.base import IntegrationBase, integrate
from skyward.testing import Faults
from skyward.values.machine import Machine, Offer, PoolSpec
from skyward.values.topology import Rank
from skyward.wire.tasks import NodeConfig
from tests.channels import Relayed, breaking
from tests.engines import engine_of
from tests.waiting import lines_of, until

pytestmark = pytest.mark.slow


@sky.compute
def pid() -> int:
    return os.getpid()


@sky.compute
def note(path: Path, number: int) -> int:
    """Write one line to the file for each run."""
    with path.open("a") as file:
        file.write(f"{number}\n")
    return number


@pytest.fixture
def provider(tmp_path: Path) -> Relayed:
    return Relayed(folder=str(tmp_path))


def test_calls_go_on_and_none_runs_twice(provider: Relayed, tmp_path: Path) -> None:
    with sky.ComputePool(provider, nodes=2, concurrency=2, logs=False) as pool, breaking(pool, provider, 2):
        numbers = range(600)
        futures = [note(tmp_path / "ran", number) > pool for number in numbers]
        assert [future.result(60) for future in futures] == list(numbers)
        for number in range(600, 640):
            assert (note(tmp_path / "ran", number) >> pool) == number
    assert sorted(map(int, lines_of(tmp_path / "ran"))) == list(range(640))


def test_maps_go_on(provider: Relayed) -> None:
    def squared(x: int) -> int:
        time.sleep(0.0002)
        return x * x

    with sky.ComputePool(provider, nodes=2, concurrency=2, logs=False) as pool, breaking(pool, provider, 2, seed=1):
        assert pool.map(squared, range(20_000)) == [x * x for x in range(20_000)]


def test_generators_go_on_in_both_directions(provider: Relayed) -> None:
    @sky.compute
    def doubled(items: Iterator[int]) -> Iterator[int]:
        for item in items:
            time.sleep(0.001)
            yield 2 * item

    with sky.ComputePool(provider, nodes=1, logs=False) as pool, breaking(pool, provider, seed=2):
        assert list(doubled(iter(range(1500))) >> pool) == [2 * x for x in range(1500)]


def test_blobs_go_on_in_both_directions(provider: Relayed) -> None:
    @sky.compute
    def reverse(data: bytes) -> bytes:
        return data[::-1]

    with sky.ComputePool(provider, nodes=1, concurrency=2, logs=False) as pool, breaking(pool, provider, seed=3):
        blocks = [random.Random(i).randbytes(3_000_000 + i) for i in range(30)]
        futures = [reverse(block) > pool for block in blocks]
        assert [future.result(60) for future in futures] == [block[::-1] for block in blocks]


def test_output_goes_on_line_by_line(provider: Relayed) -> None:
    lines: list[str] = []

    @sky.compute
    def count() -> None:
        for i in range(1000):
            print(i, flush=True)
            time.sleep(0.001)

    with (
        sky.ComputePool(provider, nodes=1, logs=lambda line: lines.append(line.text)) as pool,
        breaking(pool, provider, seed=4),
    ):
        count() >> pool
    assert [line.strip() for line in lines] == [str(i) for i in range(1000)]


class Meeting(IntegrationBase):
    """Integration whose ranks need nothing except each other."""

    name: ClassVar[str] = "meeting"
    extra: ClassVar[str] = ""
    packages: ClassVar[tuple[str, ...]] = ()

    def session(self, rank: Rank) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def test_gangs_go_on(provider: Relayed) -> None:
    def where() -> int:
        time.sleep(0.2)
        info = sky.instance_info()
        assert info is not None
        return info.node

    rank = sky.compute(integrate(where, Meeting()))
    with sky.ComputePool(provider, nodes=2, logs=False) as pool, breaking(pool, provider, 2, seed=5):
        for _ in range(5):
            assert rank() @ pool == [0, 1]


def test_a_call_ends_normally_after_a_cut_of_seconds(provider: Relayed, tmp_path: Path) -> None:
    @sky.compute
    def work(go: Path) -> int:
        until(go.exists)
        return os.getpid()

    with sky.ComputePool(provider, nodes=1, logs=False) as pool:
        before = pid() >> pool
        future = work(tmp_path / "go") > pool
        provider.cut()
        (tmp_path / "go").touch()
        time.sleep(3)
        assert not future.done()
        provider.mend()
        assert future.result(60) == before


def test_a_silent_link_is_reconnected(provider: Relayed) -> None:
    with sky.ComputePool(replace(provider, lease_s=20.0), nodes=1, logs=False) as pool:
        before = pid() >> pool
        stalled = provider.relays()
        provider.stall()
        assert (pid() >> pool) == before
        until(lambda: not set(stalled) & set(provider.relays()))  # the keeper's link too


def test_other_nodes_do_the_work_while_a_link_is_cut(provider: Relayed) -> None:
    @sky.compute
    def where() -> int:
        info = sky.instance_info()
        assert info is not None
        return info.node

    with sky.ComputePool(provider, nodes=2, logs=False) as pool:
        where() @ pool
        provider.cut(0)
        until(lambda: not engine_of(pool).ledger.links[0].channel.is_attached)
        assert [where() >> pool for _ in range(10)] == [1] * 10
        provider.mend(0)
        assert where() @ pool == [0, 1]


def test_a_link_that_breaks_without_free_descriptors_reconnects_once_there_are_some(
    provider: Relayed, tmp_path: Path
) -> None:
    @sky.compute
    def wait_for(path: Path) -> str:
        while not path.exists():
            time.sleep(0.01)
        return "done"

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with sky.ComputePool(provider, nodes=1, logs=False) as pool:
        assert pid() >> pool
        future = wait_for(tmp_path / "go") > pool
        dialler = engine_of(pool).ledger.links[0].dialler
        assert dialler is not None
        number, relays = dialler.link, provider.relays(0)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
            for relay in relays:
                os.kill(relay, signal.SIGKILL)
            until(lambda: dialler.link >= number + 2)  # one attempt has failed
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        (tmp_path / "go").touch()
        assert future.result(timeout=60) == "done"
        assert pid() >> pool


def test_a_link_that_stays_cut_loses_the_node_and_its_agent_ends_by_itself(provider: Relayed) -> None:
    provider = replace(provider, lease_s=3.0)

    @sky.compute
    def hang() -> None:
        time.sleep(600)

    tries: list[tuple[bool, float]] = []
    while len(tries) < 3:  # a busy machine may take longer for each step
        with sky.ComputePool(provider, nodes=1, logs=False) as pool:
            agent, link = Faults(pool).agent(), engine_of(pool).ledger.links[0]
            future = hang() > pool
            until(future.running)
            until(lambda: len(provider.relays()) == 2)
            time.sleep(1.0)  # the keeper speaks to the agent, which then no longer counts on the life of this process
            began = time.monotonic()
            provider.cut()
            with pytest.raises(NodeLost) as caught:
                future.result(60)
            lasted_s = time.monotonic() - began
            tries.append((not Path(f"/proc/{agent}").exists(), lasted_s))
            assert caught.value.started is None
            assert time.monotonic() - link.channel.heard_at > 3.0, "the lease, which its last answer began"
            provider.mend()
            assert pid() >> pool  # on its successor
        has_ended, lasted_s = tries[-1]
        if has_ended and lasted_s < 18.0:  # long before an attempt to dial gives up
            return
    raise AssertionError(f"whether the agent has ended, and after how many seconds the node was lost: {tries}")


def test_an_agent_that_dies_alone_is_a_lost_node_at_once(provider: Relayed) -> None:
    provider = replace(provider, lease_s=600.0)
    with sky.ComputePool(provider, nodes=1, logs=False) as pool:
        before = pid() >> pool
        future = sky.compute(time.sleep)(600) > pool
        until(future.running)
        Faults(pool).kill_node()
        with pytest.raises(NodeLost):
            future.result(60)
        assert (pid() >> pool) != before


def test_a_session_unknown_to_the_agent_is_a_lost_node(provider: Relayed) -> None:
    with sky.ComputePool(replace(provider, lease_s=600.0), nodes=1, logs=False) as pool:
        before = pid() >> pool
        future = sky.compute(time.sleep)(600) > pool
        until(future.running)
        (machine,) = engine_of(pool).ledger.machines.values()
        other = Opener("other", timeout_s=20).open(machine)  # an agent has one client
        provider.break_links()
        with pytest.raises(NodeLost):
            future.result(60)
        other.close()
        assert (pid() >> pool) != before


def test_links_and_their_ends_leave_nothing_in_the_client(provider: Relayed) -> None:
    data = b"x" * 1_000_000
    with sky.ComputePool(provider, nodes=1, logs=False) as pool:
        assert (sky.compute(len)(data) >> pool) == len(data)
        gc.collect()  # leftovers of other tests do not count
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(10):
            provider.break_links()
            assert (sky.compute(len)(data) >> pool) == len(data)
        until(lambda: len(os.listdir("/proc/self/fd")) <= before + 1)
        until(lambda: "skyward-reconnect" not in [thread.name for thread in threading.enumerate()])


def test_a_pool_that_is_closed_while_a_link_is_cut_closes_at_once(provider: Relayed) -> None:
    provider = replace(provider, lease_s=2.0)
    pool = sky.ComputePool(provider, nodes=1, logs=False, cancel_grace_s=200).start()
    future = sky.compute(time.sleep)(600) > pool
    until(future.running)
    provider.cut()
    until(lambda: not engine_of(pool).ledger.links[0].channel.is_attached)
    began = time.monotonic()
    pool.close(cancel=True)
    assert time.monotonic() - began < 90  # its provider waits for the node to end, and nobody for the call's grace
    with pytest.raises(PoolClosed):
        future.result(0)


def test_a_client_that_holds_its_gil_keeps_its_links(provider: Relayed) -> None:
    for lease_s in (3.0, 12.0):  # on a busy machine, others may be silent for too long too
        with sky.ComputePool(replace(provider, lease_s=lease_s), nodes=1, logs=False) as pool:
            before = pid() >> pool
            until(lambda: len(provider.relays()) == 2)  # the keeper's link too
            links = sorted(provider.relays())
            ctypes.PyDLL(None).sleep(int(lease_s) + 1)  # a PyDLL call keeps the GIL
            if (pid() >> pool) == before and sorted(provider.relays()) == links:
                return
    raise AssertionError("no lease was long enough")


def test_the_reason_of_a_failed_command_is_reported(provider: Relayed) -> None:
    Path(provider.folder, "0").mkdir()
    Path(provider.folder, "0", "cut").touch()
    with pytest.raises(sky.errors.Unreachable, match=r"agent of node 0: does not answer \("):
        sky.ComputePool(provider, nodes=1, logs=False).start()


def test_output_that_waits_for_a_link_is_bounded_and_lost_lines_are_counted(provider: Relayed) -> None:
    lines: list[str] = []
    line = "x" * 999

    @sky.compute
    def chatter() -> None:
        for _ in range(1000):
            print(line)

    with sky.ComputePool(provider, nodes=1, logs=lambda said: lines.append(said.text)) as pool:
        agent = pool.agent_pids()[0]
        sky.compute(abs)(-1) >> pool
        futures = [chatter() > pool for _ in range(20)]
        provider.cut()
        time.sleep(3)
        with open(f"/proc/{agent}/statm") as file:
            resident_mib = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
        provider.mend()
        for future in futures:
            future.result(60)
    assert resident_mib < 60
    dropped = sum(int(text.split()[1]) for text in lines if "were dropped here" in text)
    assert sum(text.strip() == line for text in lines) + dropped == 20_000


@dataclass(frozen=True, kw_only=True)
class SmallMemory(Relayed):
    """Nodes that keep 1 MB of values in memory."""

    def _config(self, spec: PoolSpec, pool: str, node: int) -> NodeConfig:
        return replace(super()._config(spec, pool, node), blob_limit_bytes=1 << 20)


@sky.compute
def block(letter: bytes) -> bytes:
    return letter * 3_000_000


def test_values_that_wait_for_a_link_spill_to_disk(tmp_path: Path) -> None:
    provider = SmallMemory(folder=str(tmp_path))
    with sky.ComputePool(provider, nodes=1, logs=False) as pool:
        futures = [block(letter) > pool for letter in (b"a", b"b", b"c")]
        provider.cut()
        time.sleep(1)
        provider.mend()
        assert [future.result(60) for future in futures] == [letter * 3_000_000 for letter in (b"a", b"b", b"c")]


def test_a_value_without_room_fails_its_call_and_the_node_goes_on(tmp_path: Path) -> None:
    provider = SmallMemory(folder=str(tmp_path))
    with sky.ComputePool(provider, nodes=1, logs=False) as pool:
        before = pid() >> pool
        (machine,) = engine_of(pool).ledger.machines.values()
        Path(machine.folder, "spool").touch()  # a folder cannot be made there, as on a full disk
        with pytest.raises(OSError, match="has no room"):
            block(b"a") >> pool
        assert (pid() >> pool) == before


@dataclass(frozen=True, kw_only=True)
class Chatty(Relayed):
    """Shell of a user that greets before it runs a command."""

    def launch(self, spec: PoolSpec, offers: list[Offer], pool: str, nodes: list[int], emit: Emit) -> list[Machine]:
        machines = super().launch(spec, offers, pool, nodes, emit)
        chat = ("sh", "-c", 'echo "Welcome!"; exec "$@"', "sh")
        return [replace(machine, channel=(*chat, *machine.channel)) for machine in machines]


def test_a_greeting_of_the_shell_is_skipped(tmp_path: Path) -> None:
    with sky.ComputePool(Chatty(folder=str(tmp_path)), nodes=1, logs=False) as pool:
        assert pid() >> pool


def test_a_distant_node_is_kept_busy(tmp_path: Path) -> None:
    provider = Relayed(delay_s=0.3, folder=str(tmp_path))
    with sky.ComputePool(provider, nodes=1, concurrency=2, logs=False) as pool:
        absolute = sky.compute(abs)
        absolute(-1) >> pool
        began = time.monotonic()
        futures = [absolute(-i) > pool for i in range(600)]
        assert [future.result(100) for future in futures] == list(range(600))
        assert pool.map(abs, range(-100_000, 0)) == list(range(100_000, 0, -1))
        assert time.monotonic() - began < 80  # with two calls in flight for each slot, the calls alone would take 90 s


# Several channels -----------------------------------------------------------------------------------------------------

FAR_S = 0.012  # in each direction: 24 ms are worth two channels


@sky.compute
def reversed_of(data: bytes) -> bytes:
    return data[::-1]


@pytest.fixture
def far(provider: Relayed) -> Relayed:
    return replace(provider, delay_s=FAR_S)


def has_more_channels(provider: Relayed) -> bool:
    is_at_it = "skyward-widen" in [thread.name for thread in threading.enumerate()]
    return not is_at_it and len(provider.relays()) >= 3


def carry_much(pool: sky.ComputePool, seed: int = 0) -> None:
    data = random.Random(seed).randbytes(3_000_000)
    assert (reversed_of(data) >> pool) == data[::-1]


def test_the_number_of_channels_follows_the_round_trip_time() -> None:
    assert [channels_for(ms / 1000) for ms in (0, 0.2, 10, 16, 25, 60, 100, 10_000)] == [1, 1, 1, 1, 2, 4, 6, 6]
    assert MOST_CHANNELS <= 10 - 2, "an sshd allows ten sessions, and the keeper and commands need some"


def test_a_slow_link_with_much_traffic_gets_more_channels(far: Relayed) -> None:
    with sky.ComputePool(far, nodes=1, concurrency=2, logs=False) as pool:
        assert (sky.compute(abs)(-1) >> pool) == 1
        carry_much(pool)
        until(lambda: has_more_channels(far))
        for seed in range(3):
            carry_much(pool, seed)
        assert pool.map(abs, range(0, -300_000, -1)) == list(range(300_000))
        assert 3 <= len(far.relays()) <= 1 + MOST_CHANNELS
    until(lambda: far.relays() == [])


def test_a_fast_link_keeps_one_channel(provider: Relayed) -> None:
    counts: list[int] = []
    while not counts or (counts[-1] > 2 and len(counts) < 5):
        # Try again if every answer waited long for a processor, because such a link looks slow.
        with sky.ComputePool(provider, nodes=1, logs=False) as pool:
            for seed in range(3):
                carry_much(pool, seed)
            counts.append(len(provider.relays()))
    assert counts[-1] <= 2


def test_a_link_of_several_channels_breaks_with_any_of_them(far: Relayed) -> None:
    events: list[Event] = []
    with sky.ComputePool(far, nodes=1, concurrency=2, logs=False, on_event=events.append) as pool:
        until(lambda: len(far.relays()) == 2)
        spared = set(far.relays())  # the keeper's channel, and at first the link's first channel
        for turn in range(1, 5):
            carry_much(pool)
            until(lambda: has_more_channels(far))
            os.kill(random.Random(turn).choice(sorted(set(far.relays()) - spared)), signal.SIGKILL)
            carry_much(pool, seed=1)
            until(lambda turn=turn: [type(event) for event in events].count(LinkRestored) >= turn)  # type: ignore[misc]
            until(lambda spared=spared: len(spared & set(far.relays())) == 1)  # type: ignore[misc]  # others end soon
            spared &= set(far.relays())


def test_links_of_several_channels_that_break_repeatedly_lose_nothing(far: Relayed) -> None:
    with sky.ComputePool(far, nodes=1, concurrency=2, logs=False) as pool:
        carry_much(pool)
        until(lambda: has_more_channels(far))
        with breaking(pool, far, seed=5, pause_s=(0.2, 0.8)):
            blocks = [random.Random(i).randbytes(1_000_000 + i) for i in range(20)]
            futures = [reversed_of(block) > pool for block in blocks]
            mapped = pool.map(abs, range(0, -500_000, -1))
            assert [future.result(60) for future in futures] == [block[::-1] for block in blocks]
        assert mapped == list(range(500_000))


def test_a_link_that_gets_no_more_channels_keeps_working(far: Relayed) -> None:
    with sky.ComputePool(far, nodes=1, logs=False) as pool:
        assert (sky.compute(abs)(-1) >> pool) == 1
        until(lambda: len(far.relays()) == 2)  # the client's connection and the keeper's
        far.close_way()
        for seed in range(3):
            carry_much(pool, seed)
        until(lambda: "skyward-widen" not in [thread.name for thread in threading.enumerate()])
        carry_much(pool)
        until(lambda: len(far.relays()) == 2)


def test_a_pool_that_closes_while_a_link_gets_more_channels_leaves_none_open(far: Relayed) -> None:
    for _ in range(3):
        with sky.ComputePool(far, nodes=1, logs=False) as pool:
            carry_much(pool)
        until(lambda: far.relays() == [])
    until(lambda: "skyward-widen" not in [thread.name for thread in threading.enumerate()])


def test_times_are_in_order() -> None:
    times = LinkTimes()
    assert 0 < times.ping_s < times.dead_s
