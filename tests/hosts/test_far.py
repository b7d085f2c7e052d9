"""Hosts at the other end of a long line: a link of several channels, all of one connection if there is room."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import pytest

import skyward as sky
from skyward.engine.width import MOST_CHANNELS
from skyward.ssh.connect import Transport
from tests.hosts.bed import Bed
from tests.hosts.faults import nothing_runs_on, pids
from tests.hosts.fixtures import NewHost, NewRelay
from tests.hosts.host import Host
from tests.hosts.index import PackageIndex
from tests.relay import Relay
from tests.waiting import until

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(240)]

DELAY_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Far:
    host: Host
    line: Relay
    bed: Bed
    image: sky.Image

    def pool(self, transport: Transport) -> sky.ComputePool:
        name = f"far-{self.host.name}"
        config = self.bed.folder / f"{name}.config"
        there = f"Host {name}\n HostName {self.line.host}\n Port {self.line.port}\n HostKeyAlias {self.host.name}\n"
        config.write_text(f"{there}Match all\n Include {self.bed.ssh_config}\n")
        provider = sky.SSH(hosts=[name], config_file=str(config), transport=transport)
        return sky.ComputePool(provider, nodes=1, image=self.image, logs=False, console=False)


@pytest.fixture
def far(bed: Bed, new_host: NewHost, relay: NewRelay, package_index: PackageIndex) -> Far:
    host = new_host(has_uv=True)
    return Far(host=host, line=relay(host.address), bed=bed, image=sky.Image(pip_index_url=package_index.simple))


def carry_much(pool: sky.ComputePool) -> None:
    @sky.compute  # in here, so that it travels by value
    def reversed_of(data: bytes) -> bytes:
        return data[::-1]

    data = random.Random(0).randbytes(4_000_000)
    assert (reversed_of(data) >> pool) == data[::-1]


@pytest.mark.parametrize("transport", ["openssh", "paramiko"])
def test_a_distant_link_has_more_channels_of_the_same_connection(far: Far, transport: Transport) -> None:
    with far.pool(transport) as pool:
        until(lambda: len(pids(far.host, "stub")) == 2)  # the client's and, once it is connected, the keeper's
        carry_much(pool)
        assert len(pids(far.host, "stub")) == 2
    far.line.set_delay(DELAY_S)
    with far.pool(transport) as pool:
        carry_much(pool)
        until(lambda: len(pids(far.host, "stub")) == 1 + MOST_CHANNELS)
        for _ in range(3):
            carry_much(pool)
        assert far.line.count() == 1, "connections"
        agents = pool.agent_pids()
        far.line.reset()
        carry_much(pool)
        assert pool.agent_pids() == agents
    nothing_runs_on([far.host])


def test_an_sshd_that_allows_few_sessions_is_supported(far: Far) -> None:
    far.host.write("/etc/ssh/sshd_config.d/few.conf", "MaxSessions 2\n")
    far.host.run("systemctl", "reload", "ssh")
    far.line.set_delay(DELAY_S)
    with far.pool("openssh") as pool:
        for _ in range(4):
            carry_much(pool)
    nothing_runs_on([far.host])


def test_an_operation_on_shared_state_is_one_round_trip(far: Far) -> None:
    @sky.compute  # in here, so that it travels by value
    def operate(times: int) -> list[float]:
        took = []
        for number in range(times):
            began = time.monotonic()
            sky.counter("n").increment()
            sky.dict[str, int]("d")["key"] = number
            took.append((time.monotonic() - began) / 2)
        return took

    far.line.set_delay(DELAY_S)
    with far.pool("openssh") as pool:
        took = sorted(operate(10) >> pool)
        # The first operation of each kind opens a connection to the agent on its host, which costs no round trip.
        assert took[0] >= 2 * DELAY_S
        assert took[1] < 4 * DELAY_S, "each of them would take two round trips"
        assert pool.counter("n").value() == 10
