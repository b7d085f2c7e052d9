"""The machines of a pool without its engine: they are launched, replaced and ended, and none is left."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest

import skyward as sky
from skyward.engine.keeper import Keeper
from skyward.errors import BudgetExceeded, Unreachable
from skyward.events import ignore
from skyward.pool.machines import PoolMachines
from skyward.providers.base import Provider
from skyward.values.machine import Machine, PoolSpec
from tests.channels import Relayed
from tests.waiting import until


class Made:
    def __init__(self, provider: Provider | None = None) -> None:
        self.told: list[list[str]] = []
        self.machines = PoolMachines(
            provider or sky.Local(),
            PoolSpec(),
            "pool-machines",
            budget_usd=None,
            emit=ignore,
            on_changed=self.changed,
            on_overspent=self.overspent,
        )

    def changed(self, machines: Collection[Machine]) -> None:
        self.told.append([machine.folder for machine in machines])

    def overspent(self, error: BudgetExceeded) -> None:
        raise AssertionError("nothing is spent here") from error


@pytest.fixture
def made() -> Iterator[Made]:
    yield from ended(Made())


@pytest.fixture
def made_elsewhere(tmp_path: Path) -> Iterator[Made]:
    """Machines as if on another host: a keeper watches them."""
    yield from ended(Made(Relayed(folder=str(tmp_path / "relays"))))


def ended(made: Made) -> Iterator[Made]:
    yield made
    made.machines.stop()
    made.machines.ask_to_end(were_told=False)
    made.machines.end()
    assert not [folder for folders in made.told for folder in folders if os.path.exists(folder)]


def test_a_machine_is_replaced_by_another_and_ended(made: Made) -> None:
    (first,) = made.machines.launch()
    os.kill(first.pid, signal.SIGKILL)
    second = made.machines.replace(0)
    assert second is not None
    assert list(made.machines) == [second]
    assert made.told == [[first.folder], [second.folder]]
    assert not os.path.exists(first.folder)


def test_a_spare_takes_over_at_once_and_the_old_machine_is_ended_afterwards(made: Made) -> None:
    (first,) = made.machines.launch()
    assert made.machines.prepare_replacement(0)
    assert made.machines.prepare_replacement(0)  # it stands ready
    assert os.path.exists(first.folder)
    os.kill(first.pid, signal.SIGKILL)
    spare = made.machines.replace(0)
    assert spare is not None
    until(lambda: not os.path.exists(first.folder))
    assert os.path.exists(spare.folder)


def test_none_is_launched_after_they_are_stopped(made: Made) -> None:
    made.machines.launch()
    made.machines.stop()
    assert not made.machines.prepare_replacement(0)
    assert made.machines.replace(0) is None


class Stalled:
    """Provider of this machine whose launches begin when they are told to, or end when they are stopped."""

    def __init__(self) -> None:
        self._inner = sky.Local()
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.begun = threading.Event()
        self.launched: list[Machine] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def launch(self, spec: PoolSpec, *others: Any) -> list[Machine]:
        self.begun.set()
        while not self.goes_on.wait(0.01):
            if spec.stop.is_set():
                raise Unreachable("stopped on request", node=0)
        machines = self._inner.launch(spec, *others)
        self.launched += machines
        return machines


@pytest.fixture
def stalled() -> Iterator[tuple[Made, Stalled]]:
    """Machines of which one is about to be replaced, and the provider, whose launches wait from now on."""
    provider = Stalled()
    made = Made(cast(Provider, provider))
    (first,) = made.machines.launch()
    os.kill(first.pid, signal.SIGKILL)
    provider.goes_on.clear()
    provider.begun.clear()
    for _ in ended(made):
        yield made, provider


def test_a_spare_ends_with_its_node(stalled: tuple[Made, Stalled]) -> None:
    made, provider = stalled
    provider.goes_on.set()
    assert made.machines.prepare_replacement(0)
    made.machines.give_back([0])
    until(lambda: not any(os.path.exists(machine.folder) for machine in provider.launched))
    assert len(provider.launched) == 2


def test_a_spare_that_comes_when_its_node_was_given_back_is_ended(stalled: tuple[Made, Stalled]) -> None:
    made, provider = stalled
    with ThreadPoolExecutor() as threads:
        is_ready = threads.submit(made.machines.prepare_replacement, 0)
        assert provider.begun.wait(60)
        made.machines.give_back([0])
        provider.goes_on.set()
        assert not is_ready.result(60)
    until(lambda: not any(os.path.exists(machine.folder) for machine in provider.launched))
    assert len(provider.launched) == 2


def test_a_program_that_leaves_ends_launches_and_may_begin_others(stalled: tuple[Made, Stalled]) -> None:
    made, provider = stalled
    with ThreadPoolExecutor() as threads:
        replaced = threads.submit(made.machines.replace, 0)
        assert provider.begun.wait(60)
        made.machines.stop_replacing()
        with pytest.raises(Unreachable, match="stopped on request"):
            replaced.result(60)
    provider.goes_on.set()
    assert made.machines.replace(0) is not None, "it has stayed"


def test_a_machine_that_comes_when_its_program_has_left_is_ended(stalled: tuple[Made, Stalled]) -> None:
    made, provider = stalled
    with ThreadPoolExecutor() as threads:
        replaced = threads.submit(made.machines.replace, 0)
        assert provider.begun.wait(60)
        made.machines.leave()
        provider.goes_on.set()
        assert replaced.result(60) is None
    assert not list(made.machines)


def test_a_replacement_is_ended_if_no_keeper_can_start_and_is_tried_again(
    made_elsewhere: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = made_elsewhere
    keeper = Keeper.of_this_process()
    (first,) = made.machines.launch()
    launched: list[Machine] = []
    watch = Keeper.watch

    def watch_late(self: Keeper, machine: Machine) -> None:
        launched.append(machine)
        if len(launched) == 1:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        watch(self, machine)

    monkeypatch.setattr(Keeper, "watch", watch_late)
    second = made.machines.replace(0)
    assert keeper is Keeper.of_this_process()
    assert second is launched[1]
    assert not os.path.exists(launched[0].folder)
    assert not os.path.exists(first.folder)
