"""A host loses its power, its disk fills up, its clock is wrong."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import skyward as sky
from skyward.errors import BootstrapFailed, NodeLost, SkywardError
from tests.hosts.bed import Bed
from tests.hosts.faults import EPSILON_S, Ledger, Place, gang_of, kill, noted, nothing_runs_on, pids
from tests.hosts.fixtures import NewHost
from tests.hosts.host import Host
from tests.hosts.index import PackageIndex
from tests.waiting import until

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(240)]

Places = Callable[[int], Place]
NewLedger = Callable[[Place], Ledger]

LEASE_S = 4.0


# Power --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_silent", [True, False], ids=["silent", "with a reset"])
def test_calls_on_a_host_that_lost_its_power_are_named_and_the_rest_goes_on(
    place: Places, ledger_of: NewLedger, is_silent: bool
) -> None:
    here = place(2)
    ledger, again = ledger_of(here), ledger_of(here)
    dead = here.hosts[1]
    call, call_again = noted(ledger.path, 0.05), noted(again.path, 0.05).with_options(retries=3)
    with here.pool(lease_s=LEASE_S, concurrency=2) as pool:
        futures = {n: ledger.submit(call(n) > pool, n) for n in range(150)}
        repeated = {n: again.submit(call_again(n) > pool, n) for n in range(150)}
        until(lambda: len(ledger.ran()) >= 20)
        dead.power_loss(is_silent=is_silent)
        dead.start()
        losses = ledger.settle(futures)
        assert again.settle(repeated) == {}
        assert losses
        assert {type(error) for error in losses.values()} == {NodeLost}
        assert max(ledger.ran().values()) == 1
        assert abs_of_all(pool) == [1, 1], "the host is back, and a node again"


def abs_of_all(pool: sky.ComputePool) -> list[int]:
    return sky.compute(abs)(-1).with_options(retries=5) @ pool


def test_a_gang_fails_as_one_when_a_host_loses_its_power(place: Places, ledger_of: NewLedger) -> None:
    here = place(2)
    ledger = ledger_of(here)
    path = ledger.path
    alive, dead = here.hosts

    def rank(seconds: float) -> None:
        with open(path, "a") as file:
            file.write("1\n")
        time.sleep(seconds)

    gang = gang_of(rank)
    with here.pool(lease_s=LEASE_S) as pool, ThreadPoolExecutor(1) as threads:
        outcome = threads.submit(lambda: gang(600.0) @ pool)
        until(lambda: outcome.done() or ledger.ran().total() == 2)
        slots = len(pids(alive, "slot"))
        dead.power_loss()
        with pytest.raises(NodeLost, match="node 1"):
            outcome.result(LEASE_S + EPSILON_S)
        until(lambda: len(pids(alive, "slot")) < slots)
        dead.start().wait_ssh()
        assert abs_of_all(pool) == [1, 1]
        assert gang(0.0) @ pool == [None, None]


@pytest.mark.slow
def test_a_spare_host_replaces_one_without_power(
    place: Places, ledger_of: NewLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyward.providers.ssh._CONNECT_S", 2.0)  # no option: only tests wait for nobody
    here = place(3)
    ledger = ledger_of(here)
    call = noted(ledger.path, 0.01).with_options(retries=5)
    dead = here.hosts[0]
    with here.pool(lease_s=LEASE_S, nodes=2) as pool:
        values = pool.imap(call, range(1500))
        got = [next(values) for _ in range(50)]
        dead.power_loss()
        got.extend(values)
        assert got == list(range(1500))
        assert abs_of_all(pool) == [1, 1]
        assert pids(here.hosts[2], "agent")
    dead.start().wait_ssh()


# Disks --------------------------------------------------------------------------------------------------------------


def test_a_pool_goes_on_with_full_disks(place: Places) -> None:
    @sky.compute
    def size(data: bytes) -> int:
        print("x" * 10_000)
        return len(data)

    @sky.compute
    def block(count: int) -> bytes:
        return b"x" * count

    @sky.compute
    def write(path: str) -> None:
        with open(path, "wb") as file:
            file.write(bytes(1 << 20))

    here = place(1)
    (host,) = here.hosts
    with here.pool(concurrency=2) as pool:
        assert size(b"") >> pool == 0
        agents = pool.agent_pids()
        with host.disk_full("/tmp"), host.disk_full("/dev/shm"), host.disk_full("/"):
            assert size(bytes(20_000_000)) >> pool == 20_000_000
            assert len(block(20_000_000) >> pool) == 20_000_000
            with pytest.raises(OSError, match="No space left"):
                write("/tmp/full") >> pool
            kill(host, "slot")
            assert size(b"x").with_options(retries=3) >> pool == 1, "slots start anew"
            kill(host, "sshd")
            assert size(b"x") >> pool == 1, "and so do links"
        host.run("rm", "-f", "/tmp/full")
        assert pool.agent_pids() == agents


@pytest.mark.parametrize("full", ["/tmp", "/"])
def test_a_pool_does_not_start_with_a_full_disk_and_reports_it(place: Places, full: str) -> None:
    here = place(1)
    (host,) = here.hosts
    # The home is needed if the environment is not there yet.
    image = here.image if full == "/tmp" else sky.Image(pip=["threadpoolctl"], pip_index_url=here.index.simple)
    with host.disk_full(full), pytest.raises(SkywardError) as caught:
        sky.ComputePool(provider=here.ssh(), image=image, logs=False).start()
    assert any(word in str(caught.value).lower() for word in ("no space", "full", "free")), caught.value
    assert "node 0" in str(caught.value)
    nothing_runs_on([host])


@pytest.mark.slow
@pytest.mark.parametrize(("left_mib", "phase"), [(2, "upload"), (30, "uv"), (75, "packages")])
def test_a_home_that_fills_up_during_a_bootstrap_is_named_and_the_next_one_continues(
    bed: Bed, new_host: NewHost, package_index: PackageIndex, runtime: Path, left_mib: int, phase: str
) -> None:
    host = new_host()
    here = Place(bed=bed, index=package_index, hosts=[host])
    image = sky.Image(pip=["numpy"], pip_index_url=package_index.simple)
    with host.disk_full("/", left_kib=left_mib * 1024), pytest.raises(BootstrapFailed) as caught:
        sky.ComputePool(provider=here.ssh(), image=image, logs=False).start()
    said = str(caught.value)
    assert (caught.value.phase, caught.value.host) == (phase, host.name)
    assert f"node 0 ({host.name})" in said
    assert "no space" in said.lower()
    assert "/root/.cache/skyward" in said
    assert "free disk space there" in said
    nothing_runs_on([host])
    assert listed(host, "/tmp/skyward-0") == []
    assert listed(host, "/root/.cache/skyward/tmp") == []
    with sky.ComputePool(provider=here.ssh(), image=image, logs=False) as pool:
        assert sky.compute(abs)(-1) >> pool == 1
    nothing_runs_on([host])


def listed(host: Host, path: str) -> list[str]:
    return [entry.name for entry in host.path(path).iterdir()] if host.path(path).is_dir() else []


# Clocks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset_s", [-3600.0, 3600.0], ids=["slow", "fast"])
def test_a_clock_that_is_an_hour_wrong_changes_nothing(place: Places, ledger_of: NewLedger, offset_s: float) -> None:
    @sky.compute
    def now() -> float:
        return time.time()

    here = place(1)
    ledger = ledger_of(here)
    (host,) = here.hosts
    call = noted(ledger.path, 0.05)
    host.set_clock(offset_s)
    try:
        with here.pool(lease_s=8.0, concurrency=2) as pool:
            assert abs((now() >> pool) - time.time() - offset_s) < 600
            agents = pool.agent_pids()
            futures = {n: ledger.submit(call(n) > pool, n) for n in range(400)}  # ten seconds: beyond the lease
            until(lambda: len(ledger.ran()) >= 20)
            host.set_clock(-offset_s)  # two hours, for what begins from now on: the next link
            kill(host, "sshd")
            assert ledger.settle(futures) == {}
            assert set(ledger.ran().values()) == {1}
            assert pool.agent_pids() == agents
    finally:
        host.set_clock(0.0)
