"""Any process may die at any time: no machine outlives its lease, none is forgotten, none is ended while in use.

Hypothesis makes up schedules: pools are opened and closed, clients and keepers are killed between any two calls to the
cloud, links are cut, laptops closed, machines reclaimed, records lost, and `gc` runs in between. The cloud is in memory
and has faults, and hours pass in milliseconds. SKYWARD_SCHEDULES=1000 tries that number of schedules.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from skyward.errors import ProviderError, TerminateFailed
from skyward.providers.reaper import gc, ls, reap
from skyward.state.journal import Owner, journals
from skyward.testing.fake_cloud import FakeCloud, FakeEnd, FakeFaults, FakeProvider
from skyward.testing.virtual_clock import VirtualClock
from skyward.values.machine import Machine, PoolSpec

LEASE_S = 120.0
RENEWED_S = 15.0


class Killed(BaseException):
    """Stand-in for SIGKILL: nothing of the process runs after it, not even a `finally` that would reach the cloud."""


class Mortal:
    """The cloud as one process sees it. The process is killed at its n-th call."""

    def __init__(self, cloud: FakeCloud) -> None:
        self._cloud = cloud
        self.calls_left: int | None = None
        self.is_dead = False

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._cloud, name)
        if not callable(found) or name in ("clock",):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.is_dead:
                raise Killed
            value = None
            try:
                value = found(*args, **kwargs)
            finally:
                if self.calls_left is not None:
                    self.calls_left -= 1
                    if self.calls_left < 0:  # the cloud carried it out; nobody hears of it
                        self.is_dead = True
            if self.is_dead:
                raise Killed
            return value

        return call


@dataclass(frozen=True, kw_only=True)
class OwnedProvider(FakeProvider):
    """Provider of a separate client process, as far as others can see."""

    pid: int = 0

    @property
    def owner(self) -> Owner:
        return replace(Owner.this_process(), pid=self.pid)


@dataclass(repr=False)
class Client:
    name: str
    provider: OwnedProvider
    cloud: Mortal
    spec: PoolSpec
    machines: dict[int, Machine] = field(default_factory=dict)
    has_keeper: bool = True
    has_link: bool = True
    has_records: bool = True
    was_without_contact: bool = False
    """For so long that its machines may have ended by themselves."""

    @property
    def is_alive(self) -> bool:
        return not self.cloud.is_dead

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Show it in the schedules that hypothesis prints."""
        printer.text(self.name)

    @property
    def instances(self) -> set[str]:
        return {machine.handle.instance for machine in self.machines.values()}


RATES = st.sampled_from([0.0, 0.0, 0.1, 0.3])
FAULTS = st.builds(
    FakeFaults,
    listing_s=st.sampled_from([0.0, 5.0, 30.0]),
    stale_s=st.sampled_from([0.0, 5.0, 20.0]),
    omitted=st.sampled_from([0.0, 0.0, 0.2]),
    boot_s=st.sampled_from([0.0, 20.0, 90.0]),
    ready_s=st.sampled_from([1.0, 30.0]),
    never_boots=st.sampled_from([0.0, 0.0, 0.2]),
    ending_s=st.sampled_from([0.0, 15.0, 90.0]),
    throttled=RATES,
    lost_answers=RATES,
    lost_requests=RATES,
    is_refused_while_pending=st.booleans(),
)
KILL = st.one_of(st.none(), st.none(), st.integers(0, 25))


class Schedules(RuleBasedStateMachine):
    @initialize(faults=FAULTS, seed=st.integers(0, 2**16), skew_s=st.sampled_from([0.0, -1e6, 1e6, 3600.0]))
    def begin(self, faults: FakeFaults, seed: int, skew_s: float) -> None:
        # The folder is in memory if possible: each record is synced, and a disk takes its time for that.
        self.state = tempfile.mkdtemp(
            prefix="skyward-schedules-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None
        )
        os.environ["XDG_STATE_HOME"] = self.state
        self.clock = VirtualClock(skew_s=skew_s)
        self.cloud = FakeCloud(self.clock, faults=faults, seed=seed)
        self.clients: list[Client] = []
        self.soon: list[tuple[int, Callable[[], None]]] = []
        self.is_nested = False
        self.clock.on_sleep = self.background

    def teardown(self) -> None:
        if not hasattr(self, "cloud"):
            return
        try:
            self.everybody_dies_and_nothing_is_left()
        finally:
            os.environ.pop("XDG_STATE_HOME", None)
            shutil.rmtree(self.state, ignore_errors=True)

    # The world ------------------------------------------------------------------------------------------------------

    def background(self) -> None:
        """Run background work while somebody sleeps: keepers renew leases, and other processes may act."""
        for client in self.clients:
            if client.is_alive and client.has_keeper and client.has_link:
                for instance in client.instances:
                    self.cloud.touch(instance)
        if self.is_nested or not self.soon:
            return
        count, action = self.soon[0]
        self.soon[0] = (count - 1, action)
        if count <= 0:
            self.soon.pop(0)
            self.is_nested = True
            try:
                action()
            finally:
                self.is_nested = False

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the lock of cleaning up. Others would wait for it; here all are one thread, which would hang."""
        was, self.is_nested = self.is_nested, True
        try:
            yield
        finally:
            self.is_nested = was

    def alive(self, owner: Owner) -> bool:
        return any(c.is_alive and c.provider.pid == owner.pid for c in self.clients)

    def open_ones(self) -> list[Client]:
        return [c for c in self.clients if c.is_alive and c.machines]

    def provider(self, cloud: Any = None) -> OwnedProvider:
        return OwnedProvider(api=cloud or self.cloud, lease_s=LEASE_S, pid=1)

    def guarded(self, client: Client, action: Callable[[], None]) -> None:
        """Run something that a client does. It may die in the middle, or fail and clean up."""
        try:
            action()
        except Killed:
            client.machines.clear()
        except TerminateFailed:
            client.cloud.is_dead = True  # it reported so, with the ids; from here on it is for the others
            client.machines.clear()

    def pass_time(self, seconds: float) -> None:
        while seconds > 0:
            self.clock.sleep(min(seconds, RENEWED_S))
            seconds -= RENEWED_S

    # Actions of clients
    # --------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.clients) < 6)
    @rule(nodes=st.integers(1, 3), allocation=st.sampled_from(["spot", "on-demand", "spot-if-available"]), kill_at=KILL)
    def open_a_pool(self, nodes: int, allocation: Any, kill_at: int | None) -> None:
        cloud = Mortal(self.cloud)
        number = len(self.clients)
        client = Client(
            name=f"pool-{number}",
            provider=OwnedProvider(api=cloud, lease_s=LEASE_S, pid=10_000 + number),
            cloud=cloud,
            spec=PoolSpec(nodes=nodes, allocation=allocation),
        )
        self.clients.append(client)
        cloud.calls_left = kill_at

        def launch() -> None:
            try:
                offers = client.provider.offers(client.spec)
                made = client.provider.launch(client.spec, offers[:3], client.name, list(range(nodes)), lambda e: None)
            except ProviderError as error:
                if any("TerminateFailed" in note for note in getattr(error, "__notes__", [])):
                    raise TerminateFailed from error
                self.nothing_is_left_of(client)
                return
            client.machines = {machine.node: machine for machine in made}

        self.guarded(client, launch)
        cloud.calls_left = None

    @precondition(lambda self: self.open_ones())
    @rule(data=st.data(), kill_at=KILL)
    def close_a_pool(self, data: st.DataObject, kill_at: int | None) -> None:
        client = data.draw(st.sampled_from(self.open_ones()))
        machines = list(client.machines.values())
        client.machines = {}
        client.cloud.calls_left = kill_at

        def close() -> None:
            client.provider.terminate(machines)
            self.nothing_is_left_of(client)

        self.guarded(client, close)
        client.cloud.calls_left = None

    @precondition(lambda self: self.open_ones())
    @rule(data=st.data(), kill_at=KILL)
    def replace_a_node(self, data: st.DataObject, kill_at: int | None) -> None:
        client = data.draw(st.sampled_from(self.open_ones()))
        node = data.draw(st.sampled_from(sorted(client.machines)))
        old = client.machines.pop(node)
        client.cloud.calls_left = kill_at

        def renew() -> None:
            client.provider.terminate([old])
            try:
                offers = client.provider.offers(client.spec)
                (machine,) = client.provider.launch(client.spec, offers[:3], client.name, [node], lambda e: None)
            except ProviderError:
                return
            client.machines[node] = machine

        self.guarded(client, renew)
        client.cloud.calls_left = None

    # Faults of clients
    # ---------------------------------------------------------------------------------------------------

    @precondition(lambda self: any(c.is_alive for c in self.clients))
    @rule(data=st.data())
    def kill_a_client(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from([c for c in self.clients if c.is_alive]))
        client.cloud.is_dead = True
        client.machines.clear()

    @precondition(lambda self: self.open_ones())
    @rule(data=st.data(), seconds=st.floats(0, 4 * LEASE_S))
    def cut_a_link(self, data: st.DataObject, seconds: float) -> None:
        client = data.draw(st.sampled_from(self.open_ones()))
        client.has_link = False
        began = self.clock.monotonic()
        self.pass_time(seconds)  # and longer, if `gc` runs in the middle
        client.has_link = True
        client.was_without_contact |= self.clock.monotonic() - began > LEASE_S - RENEWED_S

    @precondition(lambda self: self.open_ones())
    @rule(data=st.data())
    def kill_a_keeper(self, data: st.DataObject) -> None:
        """Kill a keeper. Its client starts another, but a client that is killed with it has none."""
        client = data.draw(st.sampled_from(self.open_ones()))
        client.has_keeper = False
        client.was_without_contact = True

    @rule(hours=st.floats(0, 10))
    def close_the_laptop(self, hours: float) -> None:
        self.clock.on_sleep = lambda: None
        self.clock.sleep(hours * 3600)
        self.clock.on_sleep = self.background
        for client in self.clients:
            client.was_without_contact |= hours * 3600 > LEASE_S - RENEWED_S

    @rule(seconds=st.floats(0, 3 * LEASE_S))
    def time_passes(self, seconds: float) -> None:
        self.pass_time(seconds)

    @precondition(lambda self: any(s.request.offer.is_spot for s in self.cloud.billed()))
    @rule(data=st.data())
    def reclaim(self, data: st.DataObject) -> None:
        spot = [s.id for s in self.cloud.billed() if s.request.offer.is_spot]
        self.cloud.reclaim(data.draw(st.sampled_from(spot)))

    # Actions of others
    # ---------------------------------------------------------------------------------------------------

    @precondition(lambda self: any(not c.is_alive for c in self.clients))
    @rule(data=st.data(), kill_at=KILL)
    def keeper_reaps(self, data: st.DataObject, kill_at: int | None) -> None:
        client = data.draw(st.sampled_from([c for c in self.clients if not c.is_alive]))
        cloud = Mortal(self.cloud)
        cloud.calls_left = kill_at
        try:
            with self.alone():
                reap(client.name, provider_of=lambda journal: self.provider(cloud))
        except (Killed, ProviderError):
            return
        if client.has_records:  # without them only `gc`, which searches the whole account, finds what it left
            self.nothing_is_left_of(client)

    @rule(kill_at=KILL)
    def gc_runs(self, kill_at: int | None = None) -> None:
        cloud = Mortal(self.cloud)
        cloud.calls_left = kill_at
        provider = self.provider(cloud)
        with contextlib.suppress(Killed), self.alone():
            gc([provider], provider_of=lambda journal: provider, is_alive=self.alive)

    @rule(sleeps=st.integers(0, 20))
    def gc_runs_soon(self, sleeps: int) -> None:
        """Let `gc` run in the middle of somebody else's next action."""
        self.soon.append((sleeps, lambda: self.gc_runs(None)))

    @precondition(lambda self: any(not c.is_alive for c in self.clients))
    @rule(data=st.data())
    def lose_the_records_of_a_dead_pool(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from([c for c in self.clients if not c.is_alive]))
        for journal in journals(client.name):
            shutil.rmtree(journal.folder)
            client.has_records = False

    # Invariants
    # ---------------------------------------------------------------------------------------------------------

    def nothing_is_left_of(self, client: Client) -> None:
        left = [s.id for s in self.of(client) if s in self.cloud.billed()]
        assert left == [], f"{client.name} was closed, and {left} cost money"
        assert journals(client.name) == []

    def of(self, client: Client) -> Sequence[Any]:
        return [s for s in self.cloud.servers.values() if s.request.pool == client.name]

    @invariant()
    def none_is_ended_twice(self) -> None:
        if hasattr(self, "cloud"):
            assert [s.id for s in self.cloud.servers.values() if s.terminate_calls > 1] == []

    @invariant()
    def none_is_ended_while_in_use(self) -> None:
        for client in getattr(self, "clients", []):
            if client.is_alive:
                servers = [self.cloud.servers[i] for i in client.instances]
                assert [s.id for s in servers if s.end is FakeEnd.ASKED] == []
                if not client.was_without_contact:
                    assert [s.id for s in servers if s.end is FakeEnd.LEASE] == []

    @invariant()
    def none_is_forgotten(self) -> None:
        """Check that `ls` shows each machine that costs money. It is on record or carries its owner's tags."""
        if not getattr(self, "cloud", None) or self.cloud.faults.throttled + self.cloud.faults.omitted > 0:
            return
        stale_s = self.cloud.faults.stale_s
        now = self.clock.monotonic()
        listed, failures = ls([self.provider()], provider_of=lambda journal: self.provider(), is_alive=self.alive)
        assert failures == []
        shown = {f.instance.id for f in listed}
        old = [s for s in self.cloud.billed() if now - s.listed_at > stale_s]
        assert {s.id for s in old} <= shown

    def everybody_dies_and_nothing_is_left(self) -> None:
        for client in self.clients:
            client.cloud.is_dead = True
            client.machines.clear()
        self.soon.clear()
        faults = self.cloud.faults
        self.cloud.faults = replace(faults, throttled=min(faults.throttled, 0.1))
        self.pass_time(LEASE_S + faults.boot_s + faults.ready_s + 2 * RENEWED_S)
        outlived = [s.id for s in self.cloud.billed() if s.ready_at is not None]
        assert outlived == [], f"{outlived} outlived their lease"
        for _ in range(12):  # one answer in five may omit a machine
            self.gc_runs(None)
            if not (self.cloud.billed() or journals() or self.cloud.networks):
                break
        assert self.cloud.billed() == []
        assert journals() == []
        assert self.cloud.networks == {}
        self.none_is_ended_twice()


Schedules.TestCase.settings = settings(
    max_examples=int(os.environ.get("SKYWARD_SCHEDULES", "40")),
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
)
TestSchedules = pytest.mark.timeout(600)(Schedules.TestCase)
