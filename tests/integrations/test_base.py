"""The seam: the result of `integrate`, and the lazy names of `sky.integrations`."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import cloudpickle
import pytest

import skyward as sky
from skyward import integrations
from skyward.errors import MissingDependency, UsageError
from skyward.integrations.base import IntegrationBase, integrate, integrations_of, load_framework
from skyward.node.slot.runtime import RunningCall, enter_call
from skyward.values.launch import Integration, ProcessLaunch
from skyward.values.topology import InstanceInfo, Rank

pytestmark = pytest.mark.by_reference  # a test counts the bytes of a function that travels by value

RANK = Rank(
    rank=0,
    world_size=1,
    local_rank=0,
    local_world_size=1,
    node=0,
    node_rank=0,
    nodes=1,
    head_addr="127.0.0.1",
    head_port=1,
    local_addr="127.0.0.1",
)
events: list[str] = []


@dataclass(frozen=True, kw_only=True)
class Outer(IntegrationBase):
    name: ClassVar[str] = "outer"
    extra: ClassVar[str] = "outer"
    packages: ClassVar[tuple[str, ...]] = ()
    preload: ClassVar[tuple[str, ...]] = ("json", "csv")

    def environment(self, rank: Rank) -> dict[str, str]:
        return {self.name.upper(): str(rank.rank)}

    @contextmanager
    def session(self, rank: Rank) -> Iterator[None]:
        events.append(f"enter {self.name}")
        try:
            yield
        finally:
            events.append(f"leave {self.name}")


@dataclass(frozen=True, kw_only=True)
class Inner(Outer):
    name: ClassVar[str] = "inner"
    preload: ClassVar[tuple[str, ...]] = ("csv", "wave")


def work(x: int, *, y: int = 2) -> int:
    """Do it."""
    events.append("work")
    return x * y


@pytest.fixture
def in_a_rank() -> Iterator[None]:
    info = InstanceInfo(
        node=0,
        worker=0,
        total_nodes=1,
        workers_per_node=1,
        accelerators=0,
        total_accelerators=0,
        head_addr="127.0.0.1",
        head_port=1,
        job_id="job",
    )
    enter_call(RunningCall(task=1, info=info, rank=RANK), whole_process=True)
    yield
    enter_call(None, whole_process=True)


@pytest.fixture(autouse=True)
def _no_events() -> None:
    events.clear()


def test_outside_a_rank_no_session_is_entered() -> None:
    assert integrate(work, Outer())(3) == 6
    assert events == ["work"]


@pytest.mark.usefixtures("in_a_rank")
def test_sessions_are_entered_from_the_outermost_in() -> None:
    assert integrate(integrate(work, Inner()), Outer())(3, y=5) == 15
    assert events == ["enter outer", "enter inner", "work", "leave inner", "leave outer"]


@pytest.mark.usefixtures("in_a_rank")
def test_sessions_are_left_when_the_function_raises() -> None:
    def fails() -> None:
        raise KeyError("here")

    with pytest.raises(KeyError, match="here"):
        integrate(fails, Outer())()
    assert events == ["enter outer", "leave outer"]


@pytest.mark.usefixtures("in_a_rank")
def test_a_session_is_entered_once_however_deep_the_calls() -> None:
    below = integrate(work, Outer())
    assert integrate(lambda: below(1), Outer())() == 2
    assert events == ["enter outer", "work", "leave outer"]
    assert below(2) == 4
    assert events[3:] == ["enter outer", "work", "leave outer"]


def test_the_integrations_of_a_stack_are_known_through_output_decorators() -> None:
    stacked = sky.stderr(integrate(sky.stdout(integrate(work, Inner())), Outer()))
    assert integrations_of(stacked) == (Outer(), Inner())
    assert integrations_of(work) == ()
    function = sky.compute(stacked)
    assert function.launch == ProcessLaunch(integrations=(Outer(), Inner()))
    assert function.launch.preload == ("json", "csv", "wave")
    assert inspect.signature(stacked) == inspect.signature(work)
    assert stacked.__doc__ == "Do it."


def test_a_function_that_travels_by_value_takes_nothing_of_skyward_with_it() -> None:
    def local(x: int) -> int:
        return x + 1

    travelled = cloudpickle.dumps(integrate(local, Outer()))
    assert len(travelled) < 3000
    assert cloudpickle.loads(travelled)(1) == 2


@pytest.mark.parametrize("number", [1, 8, "auto"])
def test_a_number_of_processes_is_accepted(number: int | str) -> None:
    integration: Integration = Outer(processes_per_node=number)  # type: ignore[arg-type]  # parametrized
    assert integration.ranks_per_node == number


def test_the_values_of_all_ranks_are_a_list_outside_a_pool_too() -> None:
    everybody = integrate(work, Outer(returns="ranks"))
    assert sky.compute(everybody).launch.returns == "ranks"
    values: list[object] = [everybody(1), everybody(3, y=5)]
    assert values == [[2], [15]]
    assert sky.compute(integrate(everybody, Inner())).launch.returns == "ranks"


def test_a_wrong_choice_of_ranks_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"returns='rank': .*; did you mean returns='ranks'\?"):
        Outer(returns="rank")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="returns=None: .*; set returns="):
        Outer(returns=None)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="returns='head': @inner on the same function has returns='ranks' already"):
        integrate(integrate(work, Inner(returns="ranks")), Outer(returns="head"))


@pytest.mark.parametrize("wrong", [3, None, int, "gloo"])
def test_objects_that_are_no_function_are_refused(wrong: object) -> None:
    with pytest.raises(UsageError, match="by keyword"):
        integrate(wrong, Outer())  # type: ignore[arg-type]  # what an untyped caller may pass


def test_a_missing_framework_is_named_with_the_extra_that_brings_it() -> None:
    with pytest.raises(MissingDependency, match=r"pip install 'skyward\[nothing\]'") as raised:
        load_framework("no_such_framework", extra="nothing")
    assert raised.value.name == "no_such_framework"


# The registry -----------------------------------------------------------------------------------------------------


def test_every_name_is_public_and_exists() -> None:
    assert set(dir(integrations)) == set(integrations.__all__) >= set(integrations.REGISTRY)
    for name in integrations.REGISTRY:
        assert callable(getattr(integrations, name))


def test_an_unknown_name_is_refused_with_advice() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'pytorch'; write sky.integrations.torch"):
        _ = integrations.pytorch  # type: ignore[attr-defined]


@pytest.mark.parametrize("first", ["skyward.integrations.torch", "skyward.integrations.joblib"])
def test_a_file_of_the_same_name_does_not_hide_a_decorator(first: str) -> None:
    code = f"import {first}, skyward as sky\n@sky.integrations.torch\ndef train(): ..."
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_names_load_no_framework_before_they_are_used() -> None:
    code = (
        "import sys, skyward as sky\n"
        "dir(sky.integrations); sky.integrations.torch(seed=1)\n"
        "print({'torch', 'numpy', 'joblib', 'sklearn'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_name_whose_framework_is_missing_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['joblib'] = None\n"
        "import skyward as sky\n"
        "from skyward.errors import MissingDependency\n"
        "try:\n    sky.integrations.joblib_backend\nexcept MissingDependency as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "joblib" in done.stdout
    assert "skyward[joblib]" in done.stdout
