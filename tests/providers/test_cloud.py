"""Rules for all rented machines: partial launches, removed records, pools side by side."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from skyward.errors import AuthFailed, NoCapacity, ProviderError, QuotaExceeded, TerminateFailed, Throttled
from skyward.events import Emit, InstanceLaunched, ignore
from skyward.providers.rented import Host, Instance, Request
from skyward.state.journal import journals
from skyward.testing.fake_cloud import FakeCloud, FakeEnd, FakeFaults, FakeProvider
from skyward.testing.virtual_clock import FastClock, VirtualClock
from skyward.values.machine import Machine, PoolSpec
from tests.waiting import until


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def launched(provider: FakeProvider, spec: PoolSpec, emit: Emit = ignore, pool: str = "mine") -> list[Machine]:
    return provider.launch(spec, provider.offers(spec), pool, list(range(spec.nodes)), emit)


def offers_of(machines: list[Machine]) -> list[tuple[str, str, bool]]:
    return [(m.offer.instance_type, m.offer.zone, m.offer.is_spot) for m in machines if m.offer is not None]


class TestSpotIfAvailable:
    def provider(self, capacity: Mapping[tuple[str, str, bool], int]) -> FakeProvider:
        none = {(kind, zone, is_spot): 0 for kind in ("small", "large") for zone in "ab" for is_spot in (True, False)}
        return FakeProvider(api=FakeCloud(VirtualClock(), faults=FakeFaults(capacity={**none, **capacity})))

    def test_available_spot_machines_are_taken_and_the_rest_are_on_demand(self) -> None:
        provider = self.provider({("small", "b", True): 2, ("small", "b", False): 9})
        seen: list[InstanceLaunched] = []
        machines = launched(
            provider,
            PoolSpec(nodes=3),
            lambda event: seen.append(event) if isinstance(event, InstanceLaunched) else None,
        )
        assert offers_of(machines) == [("small", "b", True), ("small", "b", True), ("small", "b", False)]
        assert [(event.node, event.is_spot) for event in seen] == [(0, True), (1, True), (2, False)]
        provider.terminate(machines)
        assert provider.api.billed() == []
        assert journals() == []

    def test_all_spot_of_a_dearer_offer_comes_before_a_mix(self) -> None:
        provider = self.provider({("small", "a", True): 2, ("small", "a", False): 9, ("large", "b", True): 3})
        machines = launched(provider, PoolSpec(nodes=3))
        assert set(offers_of(machines)) == {("large", "b", True)}
        provider.terminate(machines)

    def test_a_part_that_cannot_be_completed_is_given_back(self) -> None:
        capacity = {("small", "a", True): 2, ("small", "a", False): 0, ("small", "b", False): 3}
        provider = self.provider(capacity)
        machines = launched(provider, PoolSpec(nodes=3))
        assert set(offers_of(machines)) == {("small", "b", False)}
        assert len(provider.api.billed()) == 3
        provider.terminate(machines)
        assert provider.api.billed() == []

    @pytest.mark.parametrize("allocation", ["spot", "on-demand", "cheapest"])
    def test_only_that_strategy_mixes(self, allocation: str) -> None:
        provider = self.provider({("small", "a", True): 2, ("small", "a", False): 2})
        with pytest.raises(NoCapacity):
            launched(provider, PoolSpec(nodes=3, allocation=allocation))  # type: ignore[arg-type]
        assert provider.api.servers == {}


@dataclass(frozen=True, kw_only=True)
class LosesItsRecord(FakeProvider):
    """Cloud during whose launch somebody removes the state folder, and the launch fails."""

    def bring_up(self, hosts: list[Host], spec: PoolSpec, pool: str, nodes: list[int], emit: Emit) -> list[Machine]:
        shutil.rmtree(journals()[0].folder)
        raise ProviderError("it does not come up")


def test_a_launch_that_fails_ends_its_machines_though_their_record_was_removed() -> None:
    provider = LosesItsRecord(api=FakeCloud(VirtualClock()))
    with pytest.raises(ProviderError, match="does not come up") as caught:
        launched(provider, PoolSpec(nodes=2))
    assert not getattr(caught.value, "__notes__", [])
    assert provider.api.billed() == []
    assert provider.api.networks == {}
    assert journals() == []


class SlowToCleanUp(FakeCloud):
    def __init__(self) -> None:
        super().__init__(FastClock())
        self.is_at_it = threading.Event()
        self.may_end = threading.Event()

    def clean_up(self, tags: Mapping[str, str]) -> list[str]:
        self.is_at_it.set()
        assert self.may_end.wait(60)
        return super().clean_up(tags)


def test_the_clean_up_of_one_pool_blocks_no_other() -> None:
    cloud = SlowToCleanUp()
    provider = FakeProvider(api=cloud)
    machines = launched(provider, PoolSpec())
    ending = threading.Thread(target=lambda: provider.terminate(machines))
    ending.start()
    assert cloud.is_at_it.wait(60)
    other = launched(provider, PoolSpec(), pool="other")
    again = launched(provider, PoolSpec())  # of the same name, with a record of its own
    settled: list[bool] = []
    waiting = threading.Thread(target=lambda: settled.append(provider.settle("mine")))
    waiting.start()
    cloud.may_end.set()
    ending.join()
    waiting.join()
    provider.terminate(other)
    provider.terminate(again)
    until(lambda: cloud.billed() == [])
    assert cloud.networks == {}
    assert journals() == []


class KnowsLessLater(FakeCloud):
    """Cloud that answers from several servers: the second may not know a machine that the first named."""

    def __init__(self) -> None:
        super().__init__(VirtualClock())
        self.looks = 0
        self.refusals = 3

    def describe(self, tags: Mapping[str, str | None]) -> list[Instance]:
        self.looks += 1
        return [] if self.looks == 2 else super().describe(tags)

    def terminate(self, ids: Sequence[str]) -> None:
        if self.refusals:
            self.refusals -= 1
            raise Throttled("not while it is pending")
        super().terminate(ids)


def test_a_machine_missing_in_one_answer_does_not_count_as_gone() -> None:
    cloud = KnowsLessLater()
    provider = FakeProvider(api=cloud)
    machines = launched(provider, PoolSpec())
    cloud.looks = 0
    provider.terminate(machines)
    assert cloud.billed() == []


class MayNotLook(FakeCloud):
    may_look = True

    def describe(self, tags: Mapping[str, str | None]) -> list[Instance]:
        if not self.may_look:
            raise AuthFailed("DescribeInstances: UnauthorizedOperation")
        return super().describe(tags)


def test_machines_are_terminated_even_if_nobody_may_list_them() -> None:
    cloud = MayNotLook(VirtualClock())
    provider = FakeProvider(api=cloud)
    machines = launched(provider, PoolSpec(nodes=2))
    cloud.may_look = False
    with pytest.raises(
        TerminateFailed, match="fake-0, fake-1 .the provider answered: DescribeInstances: UnauthorizedOperation"
    ):
        provider.terminate(machines)
    assert cloud.billed() == []
    cloud.may_look = True
    provider.terminate(machines)
    assert [server.terminate_calls for server in cloud.servers.values()] == [1, 1]
    assert journals() == []


class DiesFirst(FakeCloud):
    is_dying = True

    def terminate(self, ids: Sequence[str]) -> None:
        if self.is_dying:
            raise SystemExit("as if this process were killed before it sent the request")
        super().terminate(ids)


def test_successor_of_a_process_that_died_before_its_request_asks_soon() -> None:
    clock = VirtualClock()
    cloud = DiesFirst(clock)
    provider = FakeProvider(api=cloud)
    machines = launched(provider, PoolSpec())
    with pytest.raises(SystemExit):
        provider.terminate(machines)
    cloud.is_dying = False
    began = clock.monotonic()
    provider.terminate(machines)
    (server,) = cloud.servers.values()
    assert server.terminated_at is not None
    assert server.terminated_at - began < 32


class MakesOneMore(FakeCloud):
    """Cloud whose create call made one machine more than it reported."""

    def create(self, request: Request) -> list[Instance]:
        return super().create(replace(request, count=request.count + 1))[:-1]


def test_an_unreported_machine_ends_with_the_last_of_its_pool() -> None:
    provider = FakeProvider(api=MakesOneMore(VirtualClock()))
    machines = launched(provider, PoolSpec(nodes=2))
    provider.terminate(machines)
    assert [server.end for server in provider.api.servers.values()] == 3 * [FakeEnd.ASKED]
    assert journals() == []


class HasAQuota(FakeCloud):
    def create(self, request: Request) -> list[Instance]:
        self.calls["asked"] += 1
        raise QuotaExceeded("the account may have 0 vCPUs")


def test_a_quota_applies_to_all_zones_and_is_reported_as_such() -> None:
    provider = FakeProvider(api=HasAQuota(VirtualClock()))
    with pytest.raises(QuotaExceeded, match=r"from 2 offer.*\n  small on-demand in a .*0 vCPUs") as caught:
        launched(provider, PoolSpec(nodes=2, allocation="on-demand"))
    assert provider.api.calls["asked"] == len(caught.value.tried) == 2  # not in zone b
    assert journals() == []


class RefusesToBoot(FakeCloud):
    def describe(self, tags: Mapping[str, str | None]) -> list[Instance]:
        for server in self.servers.values():
            self.reclaim(server.id)
        shown = super().describe(tags)
        return [replace(i, reason="Client.InternalError: no access to the key", is_refused=True) for i in shown]


def test_a_machine_that_the_account_keeps_from_booting_is_not_tried_by_other_offers() -> None:
    provider = FakeProvider(api=RefusesToBoot(VirtualClock()))
    with pytest.raises(ProviderError, match="ended before it ran .Client.InternalError: no access to the key"):
        launched(provider, PoolSpec())
    assert len(provider.api.servers) == 1
    assert journals() == []
