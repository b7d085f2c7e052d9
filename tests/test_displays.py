"""`display(...)` and figures of tasks, as text of a program that is no notebook; test_notebook.py has the notebook."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import skyward as sky
from skyward.integrations.base import integrate
from tests.pools_with_gpus import Plain

pytestmark = pytest.mark.usefixtures("patient_output")


class Table:
    """An object with several forms."""

    def __repr__(self) -> str:
        return "row 1\nrow 2"

    def _repr_html_(self) -> str:
        return "<table>"


def show(word: str) -> None:
    print("before", word, end="")
    display(Table())  # type: ignore[name-defined]  # noqa: F821  # a builtin in tasks, as in notebooks
    print("after", word)


def steps() -> Iterator[int]:
    for step in range(3):
        print("step", step)
        display(step)  # type: ignore[name-defined]  # noqa: F821
        yield step


def nested(target: Any) -> None:
    print("outer")
    sky.compute(show)("inner") >> target
    display("outer")  # type: ignore[name-defined]  # noqa: F821


SHOWN = ["before {}", "row 1", "row 2", "after {}"]


@pytest.fixture(params=["process", "thread"])
def output(request: pytest.FixtureRequest, lines: list[sky.LogLine]) -> Iterator[Any]:
    with sky.ComputePool(sky.Local(), nodes=2, executor=request.param, logs=lines.append) as pool:
        yield pool, lines


@pytest.fixture
def lines() -> list[sky.LogLine]:
    return []


def texts(lines: list[sky.LogLine], node: int | None = None) -> list[str]:
    taken = [line.text for line in lines if node in (None, line.node)]
    lines.clear()
    return taken


def test_displays_keep_their_place_among_the_lines(output: Any) -> None:
    pool, lines = output
    for _ in range(20):
        sky.compute(show)("x") >> pool
        assert texts(lines) == [line.format("x") for line in SHOWN]
    sky.compute(show)("all") @ pool
    assert [texts(lines[:], node) for node in (0, 1)] == [[line.format("all") for line in SHOWN]] * 2
    lines.clear()
    list(pool.map(show, ["m"] * 50))
    assert texts(lines).count("row 2") == 50


def test_steps_of_a_generator_come_after_their_displays(output: Any) -> None:
    pool, lines = output
    for step in sky.compute(steps)() >> pool:
        assert [line.text for line in lines][: 2 * step + 2][-1] == str(step)
    assert texts(lines) == ["step 0", "0", "step 1", "1", "step 2", "2"]


def test_displays_of_a_nested_call_come_from_its_own_node(output: Any) -> None:
    pool, lines = output
    sky.compute(nested)(pool.node(0)) >> pool.node(1)
    inner = [line.text for line in lines if line.node == 0]
    told = texts(lines, 1)
    assert told == ["outer", "'outer'"]
    assert inner == [line.format("inner") for line in SHOWN]


@sky.stdout(only=lambda info: info.node == 1)
def show_on_one() -> None:
    display("here")  # type: ignore[name-defined]  # noqa: F821


def test_muted_nodes_show_nothing(output: Any) -> None:
    pool, lines = output
    sky.compute(show_on_one)() @ pool
    assert [(line.node, line.text) for line in lines] == [(1, "'here'")]


def show_too_much() -> None:
    display(Large())  # type: ignore[name-defined]  # noqa: F821


class Large:
    def __repr__(self) -> str:
        return "large"

    def _repr_html_(self) -> str:
        return "x" * (5 << 20)

    def _repr_markdown_(self) -> str:
        raise OSError("no file")


def test_a_form_that_is_too_large_or_fails_is_reported_and_the_others_are_shown(output: Any) -> None:
    pool, lines = output
    sky.compute(show_too_much)() >> pool
    shown = {line.stream: line.text for line in lines}
    assert shown["stdout"] == "large"
    assert shown["stderr"].startswith("skyward: display: text/html of 5.0 MiB is more than 4 MiB and is not shown; ")
    assert "OSError: no file" in [line.text for line in lines]


def show_in_a_child() -> str:
    child = multiprocessing.get_context("fork").Process(target=show, args=("child",))
    child.start()
    child.join()
    show("parent")
    return f"{child.exitcode}"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_children_of_a_task_can_display(lines: list[sky.LogLine]) -> None:
    with sky.ComputePool(sky.Local(), logs=lines.append) as pool:
        assert sky.compute(show_in_a_child)() >> pool == "0"
    assert texts(lines) == [line.format(word) for word in ("child", "parent") for line in SHOWN]


def plot(close: bool = True) -> str:
    import matplotlib.pyplot as plt

    plt.plot([1, 2])
    if close:
        plt.show()
    print("open:", plt.get_fignums())
    return str(plt.get_backend())


def fail_with_a_figure() -> None:
    plot(close=False)
    raise ValueError("half drawn")


def test_figures_are_shown_and_closed_and_no_call_meets_those_of_another(output: Any) -> None:
    pool, lines = output
    node = pool.node(0)
    for _ in range(2):
        assert sky.compute(plot)() >> node == "module://skyward.node.slot.figures"
        assert texts(lines) == ["<Figure size 640x480 with 1 Axes>", "open: []"]
        with pytest.raises(ValueError, match="half drawn"):
            sky.compute(fail_with_a_figure)() >> node
        assert texts(lines) == ["open: [1]"]


def test_a_backend_chosen_by_the_user_stays(lines: list[sky.LogLine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "svg")
    with sky.ComputePool(sky.Local(), logs=lines.append) as pool:
        assert sky.compute(plot)(close=False) >> pool == "svg"
        assert sky.compute(os.environ.get)("MPLBACKEND") >> pool == "svg"


def show_by_ipython() -> list[bool]:
    before = "IPython" in sys.modules
    from IPython import display as ipython
    from IPython.core import display_functions

    handle: Any = ipython.display(ipython.HTML("<b>"), display_id=True)  # type: ignore[no-untyped-call]
    handle.update(3)
    ipython.DisplayHandle().display([1])  # type: ignore[no-untyped-call]
    return [before, display_functions.display is display]  # type: ignore[name-defined]  # noqa: F821


def test_functions_of_ipython_are_replaced_once_a_task_imports_them(lines: list[sky.LogLine]) -> None:
    with sky.ComputePool(sky.Local(), logs=lines.append) as pool:
        assert sky.compute(show_by_ipython)() >> pool == [False, True]
    assert texts(lines) == ["<IPython.core.display.HTML object>", "3", "[1]"]


def plot_in_a_gang() -> None:
    print("rank")
    plot()


def test_ranks_of_a_gang_show_figures_too(lines: list[sky.LogLine]) -> None:
    with sky.ComputePool(sky.Local(), nodes=2, logs=lines.append) as pool:
        sky.compute(integrate(plot_in_a_gang, Plain()))() @ pool
    for rank in (0, 1):
        shown = [line.text for line in lines if line.rank == rank]
        assert shown == ["rank", "<Figure size 640x480 with 1 Axes>", "open: []"]


def test_modules_that_were_loaded_before_the_slot_began_are_hooked_too(lines: list[sky.LogLine]) -> None:
    with sky.ComputePool(sky.Local(), preload=["matplotlib.pyplot", "IPython"], logs=lines.append) as pool:
        assert sky.compute(plot)() >> pool == "module://skyward.node.slot.figures"
        assert sky.compute(show_by_ipython)() >> pool == [True, True]
    assert texts(lines)[-1] == "[1]"
