"""Conformance suite of providers of rented machines, independent of the cloud."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

import pytest

from ..errors import ForeignState, NoCapacity, OutcomeUnknown, ProviderError, Throttled
from ..events import Event, InstanceLaunched, InstanceTerminated
from ..providers.clock import patiently
from ..providers.cloud import CloudProvider
from ..providers.reaper import ls, reap
from ..providers.rented import JOURNAL_TAG, Cloud, Host, Instance, Request
from ..state.journal import Journal, journals
from ..values.machine import Machine, PoolSpec


class ProviderSuite:
    """Conformance of a provider. Inherit it in a test class, and define the fixture `provider`.

    The provider must be free of charge (a fake, or a server on this machine) and have room for 3 of its cheapest
    machines. `bring_up` may be a stub. The suite keeps its state in a folder of its own.

    Example:
        class TestMine(ProviderSuite):
            @pytest.fixture
            def provider(self):
                return FakeProvider(api=FakeCloud(VirtualClock()))
    """

    @pytest.fixture(autouse=True)
    def _state(self, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))

    @pytest.fixture
    def spec(self) -> PoolSpec:
        return PoolSpec(nodes=3, allocation="on-demand")

    @pytest.fixture
    def events(self) -> list[Event]:
        return []

    @pytest.fixture
    def machines(self, provider: CloudProvider, spec: PoolSpec, events: list[Event]) -> Iterator[list[Machine]]:
        made = provider.launch(spec, provider.offers(spec), "suite", list(range(spec.nodes)), events.append)
        yield made
        provider.terminate(made)
        assert self._billed(provider) == []

    def _billed(self, provider: CloudProvider) -> list[Instance]:
        return [i for i in _instances(provider, None) if i.is_billed]

    # Facts and offers -------------------------------------------------------------------------------------------------

    def test_its_facts_are_on_its_class(self, provider: CloudProvider) -> None:
        kind = type(provider)
        assert kind.name
        assert isinstance(kind.extra, str)
        assert kind.is_rented
        assert not kind.shares_files
        assert "env" in kind.acts_on_image
        cloud = type(provider.cloud())
        assert cloud.name == kind.name
        assert cloud.credentials
        assert cloud.settle_s > 0
        assert cloud.minimum_billed_s >= 0

    def test_plain_data_makes_an_equal_provider(self, provider: CloudProvider) -> None:
        import json

        assert json.loads(json.dumps(provider.fields())) == provider.fields()

    def test_offers_come_cheapest_first_with_a_price(self, provider: CloudProvider, spec: PoolSpec) -> None:
        offers = provider.offers(spec)
        prices = [offer.price_usd_per_hour for offer in offers]
        assert prices == sorted(prices)
        assert all(price > 0 for price in prices)
        assert all(not offer.is_spot and offer.zone for offer in offers)

    def test_offers_have_at_least_what_was_asked_for(self, provider: CloudProvider) -> None:
        offers = provider.offers(PoolSpec(vcpus=4, memory_gib=8.0))
        assert all(offer.vcpus >= 4 and offer.memory_gib >= 8.0 for offer in offers)

    def test_spot_is_tried_before_on_demand(self, provider: CloudProvider) -> None:
        offers = provider.offers(PoolSpec(allocation="spot-if-available"))
        kinds = [offer.is_spot for offer in offers]
        assert kinds == sorted(kinds, reverse=True)
        if "spot" in provider.cloud().capabilities:
            assert set(kinds) == {True, False}
            assert all(offer.is_spot for offer in provider.offers(PoolSpec(allocation="spot")))

    def test_what_nobody_has_is_refused_in_words(self, provider: CloudProvider) -> None:
        with pytest.raises(NoCapacity, match="vcpus=100000"):
            provider.offers(PoolSpec(vcpus=100_000))

    def test_the_price_limit_is_for_the_whole_pool(self, provider: CloudProvider, spec: PoolSpec) -> None:
        price = provider.offers(spec)[0].price_usd_per_hour
        assert provider.offers(replace(spec, max_hourly_cost=3 * price))
        with pytest.raises(NoCapacity, match="max_hourly_cost"):
            provider.offers(replace(spec, max_hourly_cost=2.9 * price))

    def test_a_plan_sends_nothing(self, provider: CloudProvider, spec: PoolSpec) -> None:
        calls = provider.plan(spec, provider.offers(spec)[0], "suite")
        assert calls
        assert all(call.operation and call.parameters for call in calls)
        assert self._billed(provider) == []
        assert journals() == []

    # Launch and terminate ---------------------------------------------------------------------------------------------

    def test_machines_run_and_are_known_by_their_tags(
        self, provider: CloudProvider, machines: list[Machine], events: list[Event]
    ) -> None:
        assert [machine.node for machine in machines] == [0, 1, 2]
        (journal,) = journals("suite")
        instances = _instances(provider, journal.id)
        assert {i.id for i in instances if i.state == "running"} == {m.handle.instance for m in machines}
        assert len({i.zone for i in instances}) == 1
        assert {i.id for i in instances} == set(journal.living)
        launched = [event for event in events if isinstance(event, InstanceLaunched)]
        assert [event.node for event in launched] == [0, 1, 2]
        assert all(m.offer is not None and m.offer.price_usd_per_hour > 0 for m in machines)
        listed, failures = ls([provider])
        assert {f.instance.id for f in listed} == {i.id for i in instances}
        assert {f.owner for f in listed} == {"here"}
        assert failures == []

    def test_the_key_is_the_pools_own_and_nobody_else_reads_it(
        self, provider: CloudProvider, machines: list[Machine]
    ) -> None:
        (journal,) = journals("suite")
        assert stat.S_IMODE(os.stat(f"{journal.folder}/key").st_mode) == 0o600
        assert stat.S_IMODE(os.stat(journal.folder).st_mode) == 0o700

    def test_terminate_returns_when_they_are_gone_and_leaves_nothing(
        self, provider: CloudProvider, machines: list[Machine], events: list[Event]
    ) -> None:
        (journal,) = journals("suite")
        provider.terminate(machines[1:2])
        assert len(self._billed(provider)) == 2
        provider.terminate(machines)
        provider.terminate(machines)
        assert self._billed(provider) == []
        assert journals() == []
        assert not os.path.exists(journal.folder)
        assert _patiently(provider, lambda: provider.cloud().clean_up({JOURNAL_TAG: journal.id})) == []
        gone = sorted(event.node for event in events if isinstance(event, InstanceTerminated))
        assert gone == [0, 1, 2]

    def test_a_replacement_joins_the_others_in_their_zone(
        self, provider: CloudProvider, spec: PoolSpec, machines: list[Machine], events: list[Event]
    ) -> None:
        provider.terminate(machines[:1])
        (new,) = provider.launch(spec, provider.offers(spec), "suite", [0], events.append)
        assert new.offer is not None
        assert machines[1].offer is not None
        assert new.offer.zone == machines[1].offer.zone
        assert len(self._billed(provider)) == 3
        machines[0] = new

    def test_two_pools_do_not_see_each_other(
        self, provider: CloudProvider, spec: PoolSpec, machines: list[Machine], events: list[Event]
    ) -> None:
        other = provider.launch(replace(spec, nodes=1), provider.offers(spec), "other", [0], events.append)
        provider.terminate(other)
        assert len(self._billed(provider)) == 3
        assert [journal.pool for journal in journals()] == ["suite"]

    # Failing ----------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("error", [ProviderError("no agent"), KeyboardInterrupt()])
    def test_a_launch_that_fails_at_the_end_leaves_nothing(
        self, provider: CloudProvider, spec: PoolSpec, error: BaseException, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fails(_self: CloudProvider, hosts: list[Host], *_: object) -> list[Machine]:
            assert len(hosts) == 3
            raise error

        monkeypatch.setattr(type(provider), "bring_up", fails)
        with pytest.raises(type(error)):
            provider.launch(spec, provider.offers(spec), "suite", [0, 1, 2], lambda event: None)
        assert self._billed(provider) == []
        assert journals() == []

    def test_a_create_call_that_fails_but_made_machines_is_found_out(
        self, provider: CloudProvider, spec: PoolSpec, events: list[Event], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cloud = type(provider.cloud())
        create = cloud.create
        lost: list[str] = []

        def loses(self: Cloud, request: Request) -> list[Instance]:
            made = create(self, request)
            if not lost:
                lost.append("once")
                raise OutcomeUnknown("the connection broke")
            return made

        monkeypatch.setattr(cloud, "create", loses)
        machines = provider.launch(spec, provider.offers(spec), "suite", [0, 1, 2], events.append)
        assert len(machines) == len(self._billed(provider)) == 3
        provider.terminate(machines)
        assert self._billed(provider) == []

    def test_an_offer_that_cannot_be_had_is_followed_by_the_next(
        self, provider: CloudProvider, spec: PoolSpec, events: list[Event], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cloud = type(provider.cloud())
        create = cloud.create
        refused: list[str] = []

        def refuses(self: Cloud, request: Request) -> list[Instance]:
            if len(refused) < 2:
                refused.append("once more")
                raise NoCapacity("none now")
            return create(self, request)

        monkeypatch.setattr(cloud, "create", refuses)
        offers = provider.offers(spec)
        machines = provider.launch(spec, offers, "suite", [0, 1, 2], events.append)
        assert machines[0].offer == offers[2]
        provider.terminate(machines)

    def test_no_capacity_says_what_was_asked_tried_and_got(
        self, provider: CloudProvider, spec: PoolSpec, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuses(self: Cloud, request: Request) -> list[Instance]:
            raise NoCapacity("none now")

        monkeypatch.setattr(type(provider.cloud()), "create", refuses)
        offers = provider.offers(spec)[:2]
        with pytest.raises(NoCapacity, match=r"asked for 3 .* got 0 from 2 offer") as caught:
            provider.launch(spec, offers, "suite", [0, 1, 2], lambda event: None)
        assert offers[0].instance_type in str(caught.value)
        assert journals() == []

    # Dead owners ------------------------------------------------------------------------------------------------------

    def test_another_process_ends_what_a_dead_one_rented(
        self, provider: CloudProvider, spec: PoolSpec, machines: list[Machine]
    ) -> None:
        ids = {machine.handle.instance for machine in machines}
        assert set(reap("suite", provider_of=lambda journal: provider)) == ids
        assert self._billed(provider) == []
        assert journals() == []
        assert reap("suite", provider_of=lambda journal: provider) == []

    def test_state_of_another_account_is_refused_and_not_acted_on(
        self, provider: CloudProvider, machines: list[Machine]
    ) -> None:
        foreign = Journal.open_new(
            pool="elsewhere", provider=provider.name, fields={}, scope="another account", lease_s=1.0
        )
        with pytest.raises(ForeignState, match="another account"):
            reap("elsewhere", provider_of=lambda journal: provider)
        assert len(self._billed(provider)) == 3
        foreign.close()


T = TypeVar("T")


def _patiently(provider: CloudProvider, call: Callable[[], T]) -> T:
    return patiently(call, again_on=(Throttled, OutcomeUnknown), clock=provider.clock, limit_s=60.0)


def _instances(provider: CloudProvider, journal: str | None) -> list[Instance]:
    return _patiently(provider, lambda: provider.cloud().describe({JOURNAL_TAG: journal}))
