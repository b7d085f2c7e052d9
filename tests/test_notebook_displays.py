"""Figures and `display(...)` of tasks in a notebook, with a real Jupyter kernel."""

from __future__ import annotations

import base64

import pytest

from tests.kernel import OPEN_POOL, Notebook, notebook

__all__ = ["notebook"]

# These come from libraries that talk to the kernel.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:jupyter_client"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:zmq"),
]

DISPLAYS = """
import matplotlib.pyplot as plt

@sky.compute
def draw(size):
    print("before", sky.instance_info().node)
    plt.plot([1, 2, size])
    plt.show()
    print("between", end="")
    display(Table(size))
    print("after")
    return len(plt.get_fignums())

class Table:
    def __init__(self, rows):
        self.rows = rows

    def __repr__(self):
        return f"{self.rows} rows"

    def _repr_html_(self):
        return f"<table>{'<tr><td>' * self.rows}</table>"
"""


def test_figures_and_displays_of_a_task_appear_between_its_lines(notebook: Notebook) -> None:
    notebook.run(OPEN_POOL)
    notebook.run(DISPLAYS)
    cell = notebook.run("draw(2) >> pool.node(1)")
    assert (cell.error, cell.value) == ("", "0"), cell.traceback
    (before, figure, between, table, after) = cell.outputs
    assert (before, between, after) == (
        "[node 1] before 1\n[node 1]\n",
        "[node 1] between\n[node 1]\n",
        "[node 1] after\n",
    )
    assert isinstance(figure, dict)
    assert base64.b64decode(figure["image/png"])[1:4] == b"PNG"
    assert figure["text/plain"] == "<Figure size 640x480 with 1 Axes>"
    assert table == {"text/plain": "2 rows", "text/html": "<table><tr><td><tr><td></table>"}
    for code, times in (("draw(1) @ pool", 2), ("pool.map(draw.fn, [1] * 6);", 6)):
        shown = [output for output in notebook.run(code).outputs if isinstance(output, dict)]
        assert sum("image/png" in output for output in shown) == times
        assert sum(output.get("text/html") == "<table><tr><td></table>" for output in shown) == times


LIVE = """
@sky.compute
def live():
    from IPython.display import clear_output
    for step in range(3):
        clear_output(wait=True)
        display({"step": step})
    handle = display("first", display_id=True)
    handle.update("second")
"""


def test_a_display_that_a_task_replaces_stays_in_its_place(notebook: Notebook) -> None:
    notebook.run(OPEN_POOL)
    notebook.run(LIVE)
    cell = notebook.run("live() @ pool;")
    states = [[state["text/plain"] for state in output] for output in cell.displays.values()]
    assert sorted(states) == [["'first'", "'second'"]] * 2 + [["{'step': 0}", "{'step': 1}", "{'step': 2}"]] * 2
