"""Notebooks as people see them: JupyterLab in a real browser."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from tests.few_modules import lean_frameworks
from tests.waiting import until

with lean_frameworks():
    import nbformat

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

ROOT = Path(__file__).parent.parent

# The first page of JupyterLab takes half a minute on a loaded machine, and a test has three parts that wait.
pytestmark = pytest.mark.timeout(400)
OPEN_S = 120.0
RUN_S = 60.0

QUIET = {"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}}
"""Without it the page asks whether it may fetch news."""
KERNEL = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
"""Without it the page asks for a kernel."""
ALL_CELLS = {"windowingMode": "none"}
"""Cells outside the window are part of the page, too."""


def is_answered(port: int | None) -> bool:
    """Return whether somebody listens on a port of this machine."""
    try:
        socket.create_connection(("localhost", port or 0), 5).close()
    except OSError:
        return False
    return True


class Lab:
    """A Jupyter server on a folder of its own. It reads and writes no settings of the user's."""

    def __init__(self, folder: Path) -> None:
        self.files = folder / "files"
        self._runtime = folder / "runtime"
        config, settings = folder / "config", folder / "settings"
        for path in (self.files, self._runtime, config / "labconfig", settings / "@jupyterlab" / "notebook-extension"):
            path.mkdir(parents=True)
        (config / "labconfig" / "page_config.json").write_text(json.dumps(QUIET))
        tracker = settings / "@jupyterlab" / "notebook-extension" / "tracker.jupyterlab-settings"
        tracker.write_text(json.dumps(ALL_CELLS))
        folders = {
            "JUPYTER_CONFIG_DIR": config,
            "JUPYTER_DATA_DIR": folder / "data",
            "JUPYTER_RUNTIME_DIR": self._runtime,
            "JUPYTERLAB_SETTINGS_DIR": settings,
            "JUPYTERLAB_WORKSPACES_DIR": folder / "workspaces",
            "IPYTHONDIR": folder / "ipython",
        }
        options = ["--no-browser", "--allow-root", "--ServerApp.port=0", "--IdentityProvider.token=secret"]
        options.append("--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate")
        self.log = folder / "log.txt"
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "jupyterlab", *options, f"--ServerApp.root_dir={self.files}"],
                env={**os.environ, **{name: str(path) for name, path in folders.items()}},
                stdout=output,
                stderr=output,
            )

    def address(self, name: str) -> str:
        """Return the address of a notebook, once the server serves it."""
        # The file is there a moment before its contents.
        until(
            lambda: (
                any(file.stat().st_size for file in self._runtime.glob("jpserver-*.json"))
                or self._process.poll() is not None
            ),
            OPEN_S,
        )
        assert self._process.poll() is None, self.log.read_text()
        (file,) = self._runtime.glob("jpserver-*.json")
        url = json.loads(file.read_text())["url"]
        until(lambda: is_answered(urlsplit(url).port), OPEN_S)
        return f"{url}doc/tree/{name}?token=secret"

    def close(self) -> None:
        """End the server, which ends its kernels."""
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, browser_address: str) -> Iterator[Lab]:
    lab = Lab(tmp_path_factory.mktemp("lab"))
    yield lab
    lab.close()


class OpenNotebook:
    """A notebook on a page."""

    def __init__(self, page: Page, address: str) -> None:
        self.page = page
        page.goto(address, timeout=OPEN_S * 1000)
        page.locator(".jp-Notebook .jp-CodeCell").first.wait_for(timeout=OPEN_S * 1000)
        # The page draws the cells again when the kernel has answered; a key would be lost before.
        page.locator("#jp-main-statusbar").get_by_text("| Idle").wait_for(timeout=OPEN_S * 1000)
        page.locator(".jp-Spinner").wait_for(state="hidden", timeout=OPEN_S * 1000)

    def cell(self, number: int) -> Cell:
        return Cell(self.page.locator(".jp-CodeCell").nth(number))

    def run(self, number: int) -> Cell:
        """Run a cell to its end."""
        return self.begin(number).finish()

    def begin(self, number: int) -> Cell:
        cell = self.cell(number)
        cell.box.locator(".jp-InputArea .cm-content").click()
        self.page.keyboard.press("Control+Enter")
        until(lambda: cell.prompt() != "[ ]:")
        return cell


class Cell:
    """A code cell on a page."""

    def __init__(self, box: Locator) -> None:
        self.box = box
        self.outputs = box.locator(".jp-OutputArea-output")

    def finish(self) -> Cell:
        until(self.has_ended, RUN_S)
        return self

    def prompt(self) -> str:
        """Return `[ ]:` before it ran, `[*]:` while it runs, and its number afterwards."""
        return self.box.locator(".jp-InputPrompt").first.inner_text().strip()

    def has_ended(self) -> bool:
        return re.fullmatch(r"\[\d+\]:", self.prompt()) is not None

    def text(self) -> str:
        return "\n".join(self.outputs.all_inner_texts())


OPEN = """
import time
import skyward as sky
from tqdm import tqdm
pool = sky.ComputePool(provider=sky.Local(), nodes=2, name="demo").start()
pool
"""

MAP = """
def simulate(seed):
    time.sleep(0.05)
    return seed * seed

sum(pool.map(simulate, range(160)))
"""

BAR = """
@sky.compute
def train(steps):
    for _ in tqdm(range(steps), desc="epochs"):
        time.sleep(0.1)

train(40) >> pool
"""

FIGURE = """
@sky.compute
def draw():
    import matplotlib.pyplot as plt
    print("drawing")
    plt.plot([1, 3, 2])
    plt.show()
    print("drawn")

draw() @ pool;
"""

ERROR = """
@sky.compute
def inverse(x):
    return 1 / x

inverse(0) >> pool
"""


@pytest.fixture
def notebook(lab: Lab, page: Page) -> OpenNotebook:
    """A notebook whose first cell has opened a pool."""
    cells = [nbformat.v4.new_code_cell(code.strip()) for code in (OPEN, MAP, BAR, FIGURE, ERROR)]  # type: ignore[no-untyped-call]
    content = nbformat.v4.new_notebook(cells=cells, metadata=KERNEL)  # type: ignore[no-untyped-call]
    nbformat.write(content, lab.files / "cells.ipynb")  # type: ignore[no-untyped-call]
    return OpenNotebook(page, lab.address("cells.ipynb"))


def states_of(cell: Cell, pattern: str) -> list[str]:
    """Watch a running cell. Return the different states of the one output that matches the pattern meanwhile."""
    states: list[str] = []

    def look() -> bool:
        shown = [text for text in cell.outputs.all_inner_texts() if re.search(pattern, text, re.DOTALL)]
        assert len(shown) <= 1, "the bar was shown again below itself"
        if shown and shown != states[-1:]:
            states.append(shown[0])
        return cell.has_ended()

    until(look, RUN_S)
    return states


def test_a_page_shows_pools_bars_figures_and_errors_as_the_guide_promises(notebook: OpenNotebook) -> None:
    pool = notebook.run(0)
    table = pool.box.locator(".jp-OutputArea-executeResult table").first
    assert "nothing is rented" in table.inner_text()

    states = states_of(notebook.begin(1), r"simulate.* of 160")
    assert len(states) >= 3
    bar = notebook.cell(1)
    until(lambda: re.search(r"160 of 160\b.*in [\d.]+ s", bar.text(), re.DOTALL))
    until(lambda: bar.outputs.count() == 2)  # the bar and the value
    widths = bar.outputs.first.evaluate(
        "box => [...box.querySelectorAll('[style*=\"width:100.0%\"]')].map(e => e.getBoundingClientRect().width)"
    )
    assert min(widths) > 50

    states = states_of(notebook.begin(2), r"\[node \d\] epochs: ")
    assert len(states) >= 3
    until(lambda: "40/40" in notebook.cell(2).text())
    assert notebook.cell(2).text().count("epochs:") == 1, "its last state stays, once"

    figure = notebook.run(3)
    images = figure.box.locator(".jp-OutputArea-output img")
    until(lambda: images.count() == 2)
    for number in range(2):
        assert images.nth(number).evaluate("image => image.decode().then(() => image.naturalWidth)") > 300
    for node in range(2):
        for word in ("drawing", "drawn"):
            until(lambda line=f"[node {node}] {word}": figure.text().count(line) == 1)  # type: ignore[misc]

    failed = notebook.run(4)
    until(lambda: "ZeroDivisionError" in failed.text())
    error = failed.text()
    assert "ZeroDivisionError" in error
    assert "return 1 / x" in error
    assert "skyward/" not in error, "our frames are folded"
    assert len(error.splitlines()) < 25


def test_the_example_runs_from_its_first_cell_to_its_last(lab: Lab, page: Page) -> None:
    content = nbformat.read(ROOT / "examples" / "notebook.ipynb", as_version=4)  # type: ignore[no-untyped-call]
    for cell in content.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    nbformat.write(content, lab.files / "example.ipynb")  # type: ignore[no-untyped-call]
    notebook = OpenNotebook(page, lab.address("example.ipynb"))
    cells = [notebook.run(number) for number in range(page.locator(".jp-CodeCell").count())]
    assert len(cells) > 10
    failed = [cell.text() for cell in cells if "Traceback (most recent call last)" in cell.text()]
    assert len(failed) == 1, failed
    assert failed[0].startswith("ZeroDivisionError division by zero"), "the cell that shows an error"
    until(lambda: page.locator(".jp-RenderedSVG").locator("img, svg").count() == 2)  # of the kernel, and of a task
    curves = page.locator(".jp-RenderedSVG").locator("img, svg").all()
    assert all(curve.evaluate("image => image.getBoundingClientRect().width") > 300 for curve in curves)
    until(lambda: "closed" in cells[-1].text())
