"""Conformance suite of integrations, as tests to inherit.

from skyward.testing import IntegrationSuite

class TestTorch(IntegrationSuite):
    decorator = staticmethod(sky.integrations.torch)
    framework = "torch"

    @staticmethod
    def is_initialized() -> bool:
        import torch.distributed as dist
        return dist.is_initialized()

    @staticmethod
    def place() -> tuple[int, int]: ...     # rank and world size, as the framework sees them

    @staticmethod
    def total(value: float) -> float: ...   # sum of every rank's value, by a collective
"""

from __future__ import annotations

import inspect
import os
import pickle
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, ParamSpec, TypeVar, cast

import cloudpickle
import pytest

from ..calls.compute import compute
from ..calls.output import silent, stdout
from ..calls.pending import ComputeFunction
from ..errors import MissingDependency, UsageError
from ..integrations.base import integrations_of
from ..node.slot.runtime import instance_info
from ..pool.pool import ComputePool
from ..values.launch import Integration, ProcessLaunch
from ..values.topology import Peer, Rank

P = ParamSpec("P")
R = TypeVar("R")


class IntegrationSuite(ABC):
    """Conformance of an integration, proved by real collectives between real processes of a pool of 2 nodes.

    A subclass names the decorator, and tells how to query its framework; these functions run in the ranks.

    Example:
        class TestTorch(IntegrationSuite):
            decorator = staticmethod(sky.integrations.torch)
            framework = "torch"

            @staticmethod
            def is_initialized() -> bool:
                return torch.distributed.is_initialized()

            ...  # place and total, as in this module's docstring
    """

    decorator: ClassVar[Callable[..., Any]]
    framework: ClassVar[str]
    """Top-level module of the framework; empty if the integration needs none."""

    @staticmethod
    @abstractmethod
    def is_initialized() -> bool:
        """Return whether the framework's distributed runtime is initialised in this process."""

    @staticmethod
    @abstractmethod
    def place() -> tuple[int, int]:
        """Return the rank and the world size, as the framework sees them."""

    @staticmethod
    @abstractmethod
    def total(value: float) -> float:
        """Return the sum of every rank's `value`, computed by a collective of the framework."""

    # Fixtures -------------------------------------------------------------------------------------------------------

    @pytest.fixture(scope="class")
    @classmethod
    def pool(cls, sky_pools: Callable[..., ComputePool]) -> ComputePool:
        """Return an open pool of 2 nodes on which the framework is installed."""
        return sky_pools()

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _travelling(cls) -> Iterator[None]:
        # The nodes may be unable to import the test's module, so it travels by value.
        module = sys.modules[cls.__module__]
        is_registered = module.__name__ in cloudpickle.list_registry_pickle_by_value()
        cloudpickle.register_pickle_by_value(module)
        yield
        if not is_registered:
            cloudpickle.unregister_pickle_by_value(module)

    @pytest.fixture
    def integration(self) -> Integration:
        """Return the integration that the decorator attaches to a function."""
        (integration,) = integrations_of(type(self).decorator(_greet))
        return integration

    def _gang(self, function: Callable[P, R], **options: Any) -> ComputeFunction[P, R]:
        return compute(cast("Callable[P, R]", type(self).decorator(**options)(function)))

    # The decorator --------------------------------------------------------------------------------------------------

    def test_bare_or_called_it_keeps_the_function(self) -> None:
        for decorated in (type(self).decorator(_greet), type(self).decorator()(_greet)):
            assert decorated.__name__ == "_greet"
            assert decorated.__doc__ == _greet.__doc__
            assert inspect.signature(decorated) == inspect.signature(_greet)

    def test_outside_a_pool_the_function_is_simply_called(self) -> None:
        function = compute(type(self).decorator(_greet))
        assert function.local("Ada", loud=True) == "HELLO ADA"
        if self.framework in sys.modules:
            assert not self.is_initialized()

    @pytest.mark.parametrize("number", [0, -1, 1.5, True, "all", None])
    def test_a_number_of_processes_that_makes_no_sense_is_refused(self, number: Any) -> None:
        with pytest.raises(UsageError, match="processes_per_node"):
            type(self).decorator(processes_per_node=number)

    def test_above_compute_it_says_how_to_write_it(self) -> None:
        with pytest.raises(UsageError, match=r"(?s)below @sky.compute.*@sky.compute\n.*\n.*def _greet"):
            type(self).decorator(compute(_greet))

    def test_twice_on_one_function_is_refused(self) -> None:
        with pytest.raises(UsageError, match="twice"):
            type(self).decorator(type(self).decorator(_greet))

    def test_generator_and_async_functions_are_refused(self) -> None:
        def steps() -> Iterator[int]:
            yield 1

        async def later() -> int:
            return 1

        for function in (steps, later):
            with pytest.raises(UsageError, match=function.__name__):
                type(self).decorator(function)

    # Transfer -------------------------------------------------------------------------------------------------------

    def test_it_travels_and_is_loaded_without_the_framework(self, integration: Integration) -> None:
        launch = pickle.dumps(ProcessLaunch(integrations=(integration,)))
        loaded = subprocess.run(
            [sys.executable, "-c", _LOAD, launch.hex(), *sys.path], capture_output=True, text=True, check=False
        )
        assert loaded.returncode == 0, loaded.stderr
        assert self.framework not in loaded.stdout.split()

    def test_the_environment_of_ranks_is_text_and_differs(self, integration: Integration) -> None:
        first, second = (integration.environment(_rank(number)) for number in (0, 1))
        assert all(isinstance(text, str) for pair in [*first.items(), *second.items()] for text in pair)
        assert first.keys() == second.keys()
        assert first != second

    def test_a_missing_framework_is_named_with_its_extra(
        self, integration: Integration, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if not self.framework:
            pytest.skip("it needs no framework")
        monkeypatch.setitem(sys.modules, self.framework, None)
        extra = getattr(integration, "extra")  # noqa: B009  # only subclasses of IntegrationBase have one
        with pytest.raises(MissingDependency, match=rf"skyward\[{extra}\]"), integration.session(_rank(0)):
            pass

    # Gangs ----------------------------------------------------------------------------------------------------------

    def test_a_broadcast_is_one_world(self, pool: ComputePool) -> None:
        place, total = self.place, self.total

        def run() -> tuple[tuple[int, int], float]:
            return place(), total(place()[0] + 1.0)

        function = self._gang(run)
        for _ in range(2):  # the second world must work too
            assert function() @ pool == [((0, 2), 3.0), ((1, 2), 3.0)]

    def test_one_node_is_a_world_of_its_own(self, pool: ComputePool) -> None:
        place, total, is_initialized = self.place, self.total, self.is_initialized

        def run() -> tuple[bool, tuple[int, int], float]:
            return is_initialized(), place(), total(5.0)

        assert self._gang(run)() >> pool == (True, (0, 1), 5.0)

    def test_two_processes_on_each_node_are_neighbours(self, pool: ComputePool) -> None:
        place, total = self.place, self.total

        def run() -> tuple[tuple[int, int], float]:
            return place(), total(10.0 ** place()[0])

        # The result of each node is that of its first rank.
        assert self._gang(run, processes_per_node=2)() @ pool == [((0, 4), 1111.0), ((2, 4), 1111.0)]

    def test_it_stacks_with_the_output_decorators_in_any_order(
        self, pool: ComputePool, capfd: pytest.CaptureFixture[str]
    ) -> None:
        place = self.place

        def speak(word: str) -> tuple[int, int]:
            print(word, flush=True)  # noqa: T201  # the output under test
            return place()

        above = compute(stdout(only="head")(type(self).decorator(speak)))
        below = compute(type(self).decorator(stdout(only="head")(speak)))
        nobody = compute(silent(type(self).decorator(speak)))
        for function, word in ((above, "above"), (below, "below"), (nobody, "nobody")):
            assert function(word) @ pool == [(0, 2), (1, 2)]
        printed = capfd.readouterr().out
        assert (printed.count("above"), printed.count("below"), printed.count("nobody")) == (1, 1, 0)

    def test_no_process_is_used_twice(self, pool: ComputePool) -> None:
        def mark() -> tuple[str | None, int]:
            before = os.environ.get("SKYWARD_SUITE_MARK")
            os.environ["SKYWARD_SUITE_MARK"] = "left by a call"
            return before, os.getpid()

        function = self._gang(mark)
        runs = [function() @ pool for _ in range(2)]
        assert [before for run in runs for before, _ in run] == [None] * 4
        assert len({pid for run in runs for _, pid in run}) == 4

    def test_the_rank_is_the_same_wherever_it_is_asked(self, pool: ComputePool) -> None:
        place = self.place

        def run() -> bool:
            info = instance_info()
            assert info is not None
            return (info.rank, info.world_size) == place()

        assert self._gang(run)() @ pool == [True, True]

    def test_what_the_function_raises_arrives_as_itself(self, pool: ComputePool) -> None:
        place = self.place

        def run() -> None:
            raise LookupError(f"rank {place()[0]}")

        with pytest.raises(LookupError, match="rank"):
            self._gang(run)() @ pool


def _greet(name: str, *, loud: bool = False) -> str:
    """Say hello."""
    greeting = f"hello {name}"
    return greeting.upper() if loud else greeting


def _rank(number: int) -> Rank:
    """Return one of 2 ranks on 2 nodes; nobody listens at its head."""
    peers = tuple(Peer(node=node, private_ip=f"10.0.0.{node + 1}") for node in (0, 1))
    return Rank(
        rank=number,
        world_size=2,
        local_rank=0,
        local_world_size=1,
        node=number,
        node_rank=number,
        nodes=2,
        head_addr=peers[0].private_ip,
        head_port=29_500,
        local_addr=peers[number].private_ip,
        peers=peers,
    )


_LOAD = """
import pickle, sys
sys.path[:] = sys.argv[2:]
launch = pickle.loads(bytes.fromhex(sys.argv[1]))
print(*sys.modules)
"""
