"""Any of several sources: which one is tried, which one wins, and nothing is left of the others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

import skyward as sky
from skyward.accelerators import Accelerator
from skyward.errors import AuthFailed, NoCapacity, OutcomeUnknown, ProviderError, TerminateFailed, UsageError
from skyward.events import InstanceLaunched, ignore
from skyward.providers.any_of import AnyOf, FullOffers, SourceEntry
from skyward.providers.base import Provider
from skyward.providers.choice import Selection, speed_of
from skyward.state.journal import journals
from skyward.testing import FakeCloud, FakeFaults, FakeProvider, FastClock, ProviderSuite, VirtualClock
from skyward.values.machine import Machine, Offer, PoolSpec

KINDS = [(kind, zone, is_spot) for kind in ("small", "large", "gpu") for zone in "ab" for is_spot in (True, False)]
FULL = FakeFaults(no_capacity=frozenset(KINDS))
PAIR = PoolSpec(nodes=2, vcpus=2, allocation="on-demand")


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def kind(name: str, usd: float, *, accelerator: str = "", vcpus: int = 2) -> Offer:
    made = Accelerator.from_name(accelerator) if accelerator else None
    return Offer(
        provider="fake",
        instance_type=name,
        vcpus=vcpus,
        memory_gib=4.0,
        accelerator=made,
        price_usd_per_hour=usd,
    )


def fake(account: str, *catalogue: Offer, faults: FakeFaults | None = None, **options: Any) -> FakeProvider:
    cloud = FakeCloud(
        options.pop("clock", VirtualClock()), faults=faults, account=account, zones=("a",), **_of(catalogue)
    )
    return FakeProvider(api=cloud, **options)


def _of(catalogue: tuple[Offer, ...]) -> dict[str, Any]:
    return {"catalogue": catalogue} if catalogue else {}


def any_of(*providers: Any, selection: Selection = "cheapest", full: FullOffers | None = None) -> AnyOf:
    return AnyOf([SourceEntry(provider=provider) for provider in providers], selection, full or FullOffers())


def launched(source: AnyOf, spec: PoolSpec = PAIR, nodes: list[int] | None = None, pool: str = "mine") -> list[Machine]:
    return source.launch(spec, source.offers(spec), pool, nodes or list(range(spec.nodes)), ignore)


def types(offers: list[Offer]) -> list[str]:
    return [offer.instance_type for offer in offers]


class _OnlySecond(AnyOf):
    """Two entries of which the first has nothing that fits. All that a cloud provider has beyond its protocol is
    the second one's."""

    name: ClassVar[str] = "fake"  # type: ignore[misc]

    bring_up = FakeProvider.bring_up

    def __getattr__(self, name: str) -> Any:
        return getattr(self.entries[1].provider, name)


@dataclass(frozen=True, kw_only=True)
class _Second(FakeProvider):
    def bring_up(self, *arguments: Any) -> list[Machine]:
        return _OnlySecond.bring_up(self, *arguments)  # the suite breaks it there


class TestConforms(ProviderSuite):
    test_its_facts_are_on_its_class: Any = None  # they are those of its entries

    @pytest.fixture
    def provider(self) -> Any:
        nothing = FakeProvider(api=FakeCloud(VirtualClock(), catalogue=(), account="other"))
        entries = [SourceEntry(provider=nothing), SourceEntry(provider=_Second(api=FakeCloud(VirtualClock())))]
        return _OnlySecond(entries, "cheapest", FullOffers())


# The table ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("selection", "order"),
    [
        ("cheapest", ["x", "y", "z", "w"]),
        ("first", ["y", "w", "z", "x"]),
        ("fastest", ["w", "z", "y", "x"]),
    ],
)
def test_offers_of_all_entries_are_one_table(selection: Selection, order: list[str]) -> None:
    one = fake("one", kind("y", 2.0, accelerator="A100"), kind("w", 9.0, accelerator="H100"))
    two = fake("two", kind("x", 1.0, accelerator="T4"), kind("z", 3.0, accelerator="A100", vcpus=64))
    accelerators = [Accelerator.from_name(name) for name in ("A100", "H100", "T4")]
    entries = [SourceEntry(provider=provider, accelerator=wanted) for provider in (one, two) for wanted in accelerators]
    source = AnyOf(entries, selection, FullOffers())
    offers = source.offers(PoolSpec(allocation="on-demand"))
    assert types(offers) == order
    for offer in offers:
        wanted = source.entries[offer.entry].accelerator
        assert offer.accelerator is not None
        assert wanted is not None
        assert offer.accelerator.name == wanted.name


def test_the_fastest_accelerators_come_first_and_unknown_ones_last() -> None:
    names = ["GB300", "B300", "MI300X", "H100", "Trainium2", "TPUv5p", "L40S", "A100", "V100", "L4", "T4", "K80"]
    offers = [kind(name, 1.0, accelerator=name) for name in names]
    assert sorted(offers, key=speed_of, reverse=True) == offers
    eight = Accelerator.from_name("T4", count=8)
    assert speed_of(replace(offers[0], accelerator=eight)) > speed_of(kind("x", 1.0, accelerator="L40S"))
    assert speed_of(kind("x", 1.0, vcpus=192)) < speed_of(kind("y", 1.0, accelerator="K80"))


def test_your_own_machines_are_cheaper_than_any_spot_machine() -> None:
    source = any_of(fake("one"), sky.SSH(hosts=["gpu1"]))
    kinds = [(offer.provider, offer.is_spot) for offer in source.offers(PoolSpec())]
    assert kinds[0] == ("ssh", False)
    assert [is_spot for _, is_spot in kinds[1:]] == sorted((is_spot for _, is_spot in kinds[1:]), reverse=True)


# Launches -----------------------------------------------------------------------------------------------------------


def test_a_full_entry_is_left_for_the_next_and_nothing_stays_behind(caplog: pytest.LogCaptureFixture) -> None:
    full, free = fake("full", faults=FULL), fake("free")
    source = any_of(full, free, selection="first")
    with caplog.at_level(logging.WARNING, "skyward"):
        machines = launched(source)
    assert (
        "mine: fake has no machines for this pool: asked for 2 machine(s) together in one zone, got 0 from "
        in caplog.text
    )
    assert (len(full.api.billed()), len(free.api.billed())) == (0, 2)
    assert not full.api.networks
    (journal,) = journals("mine")
    assert journal.scope == "fake:free"
    assert source.settle("mine")
    source.terminate(machines)
    assert (free.api.billed(), journals()) == ([], [])


def test_one_entry_gives_all_nodes_or_none() -> None:
    one_left = FakeFaults(capacity=dict.fromkeys(KINDS, 1))
    small, large = fake("small", faults=one_left), fake("large")
    source = any_of(small, large, selection="first")
    machines = launched(source)
    assert (small.api.billed(), len(large.api.billed())) == ([], 2)
    source.terminate(machines)


def test_machines_that_do_not_come_up_are_ended_before_the_next_entry_is_tried() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Unreached(FakeProvider):
        def bring_up(self, *_: Any) -> list[Machine]:
            assert len(self.api.billed()) == 2
            raise sky.errors.Unreachable("fake: no answer")

    class Second(FakeCloud):
        def create(self, request: Any) -> Any:
            assert first.api.billed() == [], "machines of two entries at once"
            return super().create(request)

    first = Unreached(api=FakeCloud(VirtualClock(), account="first"))
    second = FakeProvider(api=Second(VirtualClock(), account="second"))
    source = any_of(first, second, selection="first")
    machines = launched(source)
    assert (first.api.billed(), len(second.api.billed())) == ([], 2)
    source.terminate(machines)


def test_an_entry_whose_machines_cannot_be_ended_keeps_the_next_from_being_tried() -> None:
    class Stuck(FakeCloud):
        is_stuck = True

        def terminate(self, ids: Sequence[str]) -> None:
            if self.is_stuck:
                raise ProviderError("fake: no")
            super().terminate(ids)

    @dataclass(frozen=True, kw_only=True)
    class Unreached(FakeProvider):
        def bring_up(self, *_: Any) -> list[Machine]:
            raise sky.errors.Unreachable("fake: no answer")

    first = Unreached(api=Stuck(VirtualClock(), account="first"), lease_s=1e6)
    second = fake("second")
    source = any_of(first, second, selection="first")
    with pytest.raises(TerminateFailed):
        launched(source)
    assert (len(first.api.billed()), second.api.calls["create"]) == (2, 0)
    first.api.is_stuck = False
    assert source.settle("mine")
    assert (first.api.billed(), journals()) == ([], [])


def test_an_unknown_outcome_ends_the_launch() -> None:
    first, second = fake("first"), fake("second")
    for _ in range(9):
        first.api.script("create", OutcomeUnknown("fake: the connection broke"))
    with pytest.raises(OutcomeUnknown):
        launched(any_of(first, second, selection="first"))
    assert (first.api.billed(), second.api.billed()) == ([], [])


def test_the_error_names_each_entry_with_its_reason() -> None:
    class NoRights(FakeCloud):
        def offers(self, spec: PoolSpec) -> list[Offer]:
            raise AuthFailed("fake: the key is unknown")

    refused = FakeProvider(api=NoRights(VirtualClock()))
    source = AnyOf(
        [
            SourceEntry(provider=fake("full", faults=FULL)),
            SourceEntry(provider=sky.SSH(hosts=["gpu1"])),
            SourceEntry(provider=refused),
        ],
        "first",
        FullOffers(),
    )
    with pytest.raises(NoCapacity) as raised:
        launched(source)
    full, ssh, rights = raised.value.tried[0], raised.value.tried[1], raised.value.tried[2]
    assert full.startswith("fake: asked for 2 machine(s) together in one zone, got 0")
    assert (ssh.startswith("ssh: nodes=2 exceeds the 1 host"), rights) == (True, "fake: the key is unknown")
    assert all(reason.partition("\n")[0] in str(raised.value) for reason in (full, ssh, rights))
    with pytest.raises(AuthFailed, match="the key is unknown"):
        any_of(refused, refused).offers(PAIR)


def test_a_full_offer_is_tried_last_for_a_while() -> None:
    now = [0.0]
    memory = FullOffers(300.0, lambda: now[0])
    full = fake("full", kind("cheap", 1.0), faults=FakeFaults(no_capacity=frozenset({("cheap", "a", False)})))
    free = fake("free", kind("dear", 2.0))
    source = any_of(full, free, full=memory)
    assert types(source.offers(PAIR)) == ["cheap", "dear"]
    source.terminate(launched(source))
    assert full.api.calls["create"] == 1
    for _ in range(2):  # a pool of another program knows it too
        source = any_of(full, free, full=memory)
        assert types(source.offers(PAIR)) == ["dear", "cheap"]
        source.terminate(launched(source))
    assert full.api.calls["create"] == 1
    now[0] = 301.0
    assert types(source.offers(PAIR)) == ["cheap", "dear"]


def test_a_replacement_comes_from_the_entry_of_the_pool() -> None:
    cheap, dear = fake("cheap", kind("cheap", 1.0)), fake("dear", kind("dear", 2.0))
    cheap.api.faults = replace(FULL, no_capacity=frozenset({("cheap", "a", False)}))
    source = any_of(cheap, dear)
    first, second = launched(source)
    cheap.api.faults = FakeFaults()
    source.terminate([first])
    (another,) = launched(source, nodes=[0])
    assert (cheap.api.billed(), len(dear.api.billed())) == ([], 2)
    dear.api.faults = FakeFaults(no_capacity=frozenset({("dear", "a", False)}))
    source.terminate([another])
    with pytest.raises(NoCapacity, match="dear"):
        launched(source, nodes=[0])
    source.terminate([second, another])
    assert (dear.api.billed(), journals()) == ([], [])


# Pools --------------------------------------------------------------------------------------------------------------


def test_a_pool_runs_calls_on_the_source_that_has_machines() -> None:
    def made(account: str, faults: FakeFaults | None = None) -> FakeProvider:
        return FakeProvider(api=FakeCloud(FastClock(), account=account, faults=faults), has_agents=True)

    full, free = made("full", FULL), made("free")
    events: list[sky.events.Event] = []
    pool = sky.ComputePool(any_of=[full, free], selection="first", nodes=2, vcpus=2, on_event=events.append, logs=False)
    assert {offer.entry for offer in pool.offers()} == {0, 1}
    assert pool.plan()
    with pool:
        assert pool.map(abs, [-1, -2]) == [1, 2]
        assert (full.api.billed(), len(free.api.billed())) == ([], 2)
        assert pool.cost_usd > 0
    assert free.api.billed() == []
    assert len([event for event in events if isinstance(event, InstanceLaunched)]) == 2


def test_own_hosts_that_lack_nodes_are_passed_over() -> None:
    with sky.ComputePool(any_of=[sky.SSH(hosts=["nowhere.invalid"]), sky.Local()], nodes=2, logs=False) as pool:
        assert pool.map(abs, [-3]) == [3]


def test_a_list_of_regions_or_accelerators_makes_entries() -> None:
    pool = sky.ComputePool(sky.AWS(region="us-east-1"), region=["eu-west-1", "eu-west-2"], accelerator=["A100", "H100"])
    assert repr(pool.provider) == (
        "any of aws eu-west-1 A100 80GB, aws eu-west-1 H100 80GB, aws eu-west-2 A100 80GB, aws eu-west-2 H100 80GB"
    )
    assert (pool.provider.name, pool.provider.is_rented, pool.spec.accelerator) == ("aws", True, None)
    one = sky.ComputePool(sky.AWS(), region="eu-west-3", accelerator=["L4"])
    assert (one.provider, one.spec.accelerator) == (sky.AWS(region="eu-west-3"), Accelerator.from_name("L4"))
    mixed = sky.ComputePool(any_of=[sky.Local(), sky.AWS()], region="eu-west-3")
    assert (mixed.provider.name, mixed.provider.is_rented, mixed.provider.shares_files) == ("local or aws", True, False)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"any_of": [sky.Local], "provider": None}, r"any_of: .* is not a provider; pass instances"),
        ({"any_of": [sky.Local()]}, r"any_of: the pool has provider= too"),
        ({"any_of": "aws", "provider": None}, r"any_of='aws': not a list of providers"),
        ({"any_of": [], "provider": None}, r"any_of=\[\]: names no provider"),
        ({"selection": "cheap"}, r"selection='cheap': not supported; did you mean 'cheapest'\?"),
        ({"region": ["x"]}, r"region=\['x'\]: provider 'local' has no regions"),
        ({"provider": sky.AWS(), "region": 3}, "region=3: not a region or a list of them"),
        ({"provider": sky.AWS(), "region": []}, r"region=\[\]: not a region or a list of them"),
        ({"accelerator": []}, r"accelerator=\[\]: empty"),
        ({"accelerator": ["A100", 3]}, r"accelerator=\['A100', 3\]: not an accelerator"),
    ],
)
def test_wrong_sources_are_refused_by_name(options: dict[str, Any], problem: str) -> None:
    make: Callable[..., Provider] = sky.ComputePool  # type: ignore[assignment]
    with pytest.raises(UsageError, match=problem):
        make(**{"provider": sky.Local(), **options})
