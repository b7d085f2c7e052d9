"""Notebooks, with a real Jupyter kernel."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.few_modules import lean_frameworks
from tests.kernel import OPEN_POOL, Notebook, notebook

with lean_frameworks():
    import nbclient
    import nbformat

__all__ = ["notebook"]

ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "examples" / "notebook.ipynb"

# These come from libraries that talk to the kernel.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:jupyter_client"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:zmq"),
]


def eventually(claim: Callable[[], bool], limit_s: float = 60) -> bool:
    """Return whether the condition becomes true in time."""
    deadline = time.monotonic() + limit_s
    while not claim():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def is_alive(pid: int) -> bool:
    """Return whether the process runs. A zombie has ended, whoever has to reap it."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


@pytest.fixture(scope="module")
def executed() -> Any:
    """Return the example notebook after all its cells ran."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    return notebook


def shown(notebook: Any, contains: str, number: int | None = None) -> tuple[str, str]:
    """Return (text, value) below the cell that contains the words: the only one, or the one of that number."""
    cells = [c for c in notebook.cells if c.cell_type == "code" and contains in c.source]
    cell = cells[number or 0]
    assert number is not None or len(cells) == 1
    text = "".join(o.text for o in cell.outputs if o.output_type == "stream")
    values = [o.data["text/plain"] for o in cell.outputs if o.output_type == "execute_result"]
    return text, values[0] if values else ""


def test_a_function_of_a_cell_runs_in_a_pool_of_another_cell_and_prints_into_its_own(executed: Any) -> None:
    assert "nodes=2" in shown(executed, "ComputePool")[1]
    assert shown(executed, "FACTOR = 3") == ("", "<scale(14), not run: send it with `>> pool`>")
    text, value = shown(executed, "scale(14) >> pool", 0)
    assert re.fullmatch(r"\[node \d\] scaling 14 by 3\n", text)
    assert value == "42"
    text, value = shown(executed, "# every node")
    assert sorted(text.splitlines()) == ["[node 0] scaling 14 by 3", "[node 1] scaling 14 by 3"]
    assert value == "[42, 42]"


def test_a_changed_global_and_a_redefined_function_take_effect(executed: Any) -> None:
    text, value = shown(executed, "FACTOR = 10")
    assert text.endswith("scaling 14 by 10\n")
    assert value == "140"
    assert shown(executed, "def scale(x: float) -> str:")[1] == "'14 times 10 is 140'"


def test_progress_and_errors_are_readable(executed: Any) -> None:
    text, value = shown(executed, "pool.imap")
    assert text.splitlines() == ["10 of 40 done", "20 of 40 done", "30 of 40 done", "40 of 40 done"]
    assert value == str(sum(n * n for n in range(40)))
    text, _ = shown(executed, "def inverse")
    assert "ZeroDivisionError division by zero" in text
    assert "in inverse\n    return 1 / x" in text


def shapes(notebook: Any) -> list[tuple[str, set[tuple[str, ...]]]]:
    """Return the first line of each code cell, and the kinds of its outputs."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [
        (
            cell.source.partition("\n")[0],
            {(o.output_type, o.get("name", ""), *sorted(o.get("data", {}))) for o in cell.outputs},
        )
        for cell in code
    ]


def test_the_example_is_stored_with_its_reproducible_outputs(executed: Any) -> None:
    stored = nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]
    assert shapes(stored) == shapes(executed)
    outputs = [
        o.data["image/svg+xml"]
        for c in stored.cells
        for o in c.get("outputs", [])
        if "image/svg+xml" in o.get("data", {})
    ]
    assert len(outputs) == 2, "the curve that the kernel draws, and the same one that a task draws"
    curve, of_task = outputs
    assert of_task == curve
    assert curve.startswith("<svg ")
    assert len(re.search(r'points="([^"]+)"', curve)[1].split()) == 120  # type: ignore[index]
    first, last = re.findall(r"[\d.]+", shown(executed, "def train")[1])
    assert float(last) < float(first) / 100
    assert shown(executed, "%%skyward")[1] == "450"
    assert str(ROOT) not in NOTEBOOK.read_text(), "the outputs name a folder of the machine that made them"


def test_interrupting_the_kernel_stops_the_remote_work_and_leaves_the_pool_usable(
    notebook: Notebook, tmp_path: Path
) -> None:
    assert not notebook.run(OPEN_POOL).error
    notebook.run(f"""
@sky.compute
def long(folder):
    try:
        Path(folder, "began").write_text(str(os.getpid()))
        time.sleep(300)
    finally:
        Path(folder, "stopped").touch()

folder = {str(tmp_path)!r}
""")
    request = notebook.begin("long(folder) >> pool")
    assert eventually((tmp_path / "began").exists)
    notebook.manager.interrupt_kernel()
    assert notebook.finish(request).error == "KeyboardInterrupt"
    assert eventually((tmp_path / "stopped").exists)
    assert notebook.value("sky.compute(abs)(-3) @ pool") == [3, 3]


def test_interrupting_a_map_stops_it_and_leaves_the_pool_usable(notebook: Notebook, tmp_path: Path) -> None:
    assert not notebook.run(OPEN_POOL).error
    notebook.run(f"""
def step(n):
    Path({str(tmp_path)!r}, str(n)).touch()
    time.sleep(0.05)
    return n
""")
    request = notebook.begin("pool.map(step, range(100_000))")
    assert eventually((tmp_path / "3").exists)
    notebook.manager.interrupt_kernel()
    assert notebook.finish(request).error == "KeyboardInterrupt"
    assert notebook.value("pool.map(abs, [-1, -2, -3])") == [1, 2, 3]
    # The one slot of each node takes this when its part of the map has ended, which may be after the other node's.
    assert notebook.value("sky.compute(abs)(-4) @ pool") == [4, 4]
    begun = len(list(tmp_path.iterdir()))
    assert notebook.value("sky.compute(abs)(-5) @ pool") == [5, 5]
    assert len(list(tmp_path.iterdir())) == begun


@pytest.mark.parametrize("how", ["restart", "kill"])
def test_the_end_of_the_kernel_leaves_no_process_behind(notebook: Notebook, tmp_path: Path, how: str) -> None:
    assert not notebook.run(OPEN_POOL).error
    notebook.run(f"""
@sky.compute
def busy(folder):
    Path(folder, str(os.getpid())).touch()
    time.sleep(300)

futures = [busy({str(tmp_path)!r}) > pool for _ in range(2)]
""")
    assert eventually(lambda: len(list(tmp_path.iterdir())) == 2)
    kernel, *below = notebook.pids()
    slots = {int(path.name) for path in tmp_path.iterdir()}
    assert slots <= set(below)
    if how == "restart":
        notebook.manager.restart_kernel(now=True)
    else:
        os.kill(kernel, signal.SIGKILL)
    assert eventually(lambda: not any(is_alive(pid) for pid in [kernel, *below])), [
        (pid, Path(f"/proc/{pid}/cmdline").read_bytes()) for pid in below if is_alive(pid)
    ]


WAIT_FOR = """
@sky.compute
def wait_for(path):
    while not Path(path).exists():
        time.sleep(0.02)
    return 3
"""
OPEN_COUNT = (
    "[p.label for p in __import__('skyward').state.live.live_pools() if p.owner.pid == __import__('os').getpid()]"
)


def test_a_cell_that_runs_again_replaces_its_pool(notebook: Notebook) -> None:
    cell = "import skyward as sky, skyward.state.live\npool = sky.ComputePool(sky.Local()).start()\npool"
    assert notebook.run(cell).text == ""
    # None of these is work, or keeps the pool for later.
    notebook.run("future = sky.compute(abs)(-3) > pool\nfuture.result()\nshell, ref = get_ipython(), pool.put(3)")
    notebook.run("def first():\n    return abs(-3) >> pool\nmodel = sky.actor(dict)() >> pool\nmodel.close()")
    assert re.fullmatch(
        r"skyward: pool-\w+: closing this pool, because pool was assigned another pool\n", notebook.run(cell).text
    )
    assert notebook.value("sky.compute(abs)(-3) >> pool") == 3
    assert len(notebook.value(OPEN_COUNT)) == 1
    notebook.run("%reset -f")
    assert "closing this pool" in notebook.run(cell).text
    # In two steps, and by a function.
    assert "closing this pool" in notebook.run("pool = sky.ComputePool(sky.Local())\npool.start()").text
    notebook.run("def opened():\n    return sky.ComputePool(sky.Local()).start()")
    assert "closing this pool" in notebook.run("pool = opened()").text
    assert len(notebook.value(OPEN_COUNT)) == 1


def test_a_pool_with_open_work_stays_until_a_cell_finds_it_idle(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run(f"import time\nfrom pathlib import Path\nimport skyward as sky, skyward.state.live\n{WAIT_FOR}")
    cell = "pool = sky.ComputePool(sky.Local()).start()"
    for number, (work, end) in enumerate(
        [
            (f"future = wait_for({str(tmp_path / 'go')!r}) > pool", f"Path({str(tmp_path / 'go')!r}).touch()"),
            ("model = sky.actor(dict)(a=1) >> pool", "model.close()"),
            ("ref = sky.compute(bytes)(5_000_000).keep() >> pool", "del ref"),
        ]
    ):
        notebook.run(f"{cell}\n{work}")
        text = notebook.run(cell).text
        assert re.fullmatch(r"skyward: pool-\w+: keeping this pool open .* because it has open calls, .*\n", text), work
        assert notebook.run("1").text == "", "once is enough"
        assert len(notebook.value(OPEN_COUNT)) == 2
        notebook.run(end)
        if number == 0:
            assert notebook.run("future.result(timeout=60)").value == "3"
        assert eventually(lambda: notebook.run(f"print(len({OPEN_COUNT}))").text.endswith("1\n"))
        assert notebook.run("pool.close()").text == ""


@pytest.mark.parametrize(
    ("use", "user"),
    [
        ("lab = types.SimpleNamespace(pool=pool)", "lab"),
        ("pools = {'a': [pool]}", "pools"),
        ("mapped = functools.partial(pool.map, abs)", "mapped"),
        ("cm = sky.integrations.joblib_backend(pool)\ncm.__enter__()", "cm"),
        ("stack = contextlib.ExitStack()\nstack.enter_context(sky.integrations.joblib_backend(pool))", "stack"),
    ],
)
def test_a_pool_that_an_object_refers_to_stays_until_that_is_deleted(notebook: Notebook, use: str, user: str) -> None:
    notebook.run("import contextlib, functools, types\nimport skyward as sky, skyward.state.live")
    cell = "pool = sky.ComputePool(sky.Local()).start()"
    notebook.run(f"{cell}\n{use}")
    text = notebook.run(cell).text
    assert re.fullmatch(rf"skyward: pool-\w+: keeping this pool open .* because '{user}' refers to it; .*\n", text)
    assert len(notebook.value(OPEN_COUNT)) == 2
    assert "closing this pool" in notebook.run(f"del {user}").text
    assert len(notebook.value(OPEN_COUNT)) == 1


def test_pools_of_one_name_replace_each_other_and_others_stay(notebook: Notebook) -> None:
    notebook.run("import skyward as sky, skyward.state.live")
    notebook.run('one = sky.ComputePool(sky.Local(), name="train").start()')
    cell = notebook.run('two = sky.ComputePool(sky.Local(), name="train").start()')
    assert cell.text == "skyward: train: closing this pool, because another pool named 'train' was opened\n"
    assert notebook.value(OPEN_COUNT) == ["train"]
    loop = "pools = []\nfor _ in range(2):\n    pool = sky.ComputePool(sky.Local()).start()\n    pools.append(pool)"
    assert notebook.run(loop).text == ""
    assert notebook.run("another = sky.ComputePool(sky.Local()).start()").text == ""
    assert len(notebook.value(OPEN_COUNT)) == 4
    assert notebook.run("abs(-1) >> two").error == "UsageError"
    assert notebook.value("sky.compute(abs)(-3) >> two") == 3


def test_the_console_is_one_line_that_follows_the_pool() -> None:
    cells = [
        'import skyward as sky\npool = sky.ComputePool(sky.Local(), console=True, name="demo").start()',
        "1 + 1",
        "pool.close()",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])  # type: ignore[no-untyped-call]
    nbclient.NotebookClient(notebook, timeout=120).execute()
    (line,) = notebook.cells[0].outputs
    assert line.output_type == "display_data"
    assert re.fullmatch(r"demo: local, 1 node · ready after [\d.]+ s · closed( · 1 call)?", line.data["text/plain"])
    assert notebook.cells[2].outputs == []


def test_a_local_pool_shows_nothing_by_itself() -> None:
    code = "import skyward as sky\nwith sky.ComputePool(sky.Local()) as pool:\n    pass"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])  # type: ignore[no-untyped-call]
    nbclient.NotebookClient(notebook, timeout=120).execute()
    assert notebook.cells[0].outputs == []


CALLS = """
@sky.compute
def inverse(x):
    def inner(y):
        return 1 / y
    return inner(x)
"""


def test_pools_calls_groups_and_futures_describe_themselves_in_html(notebook: Notebook) -> None:
    notebook.run(OPEN_POOL)
    notebook.run(CALLS)
    shown = notebook.run("pool").html
    for part in (
        "ComputePool pool-",
        "open",
        "Local(lease_s=5.0)",
        "2 (1 on each node)",
        "nothing is rented",
        ".close()",
    ):
        assert part in shown, part
    shown = notebook.run("inverse(2)").html
    for part in ("inverse(2)", "has not run", "&gt;&gt; pool", "@ pool"):
        assert part in shown, part
    shown = notebook.run("inverse('<b>') & inverse(3)").html
    assert "inverse(&#x27;&lt;b&gt;&#x27;) &amp; inverse(3)" in shown
    assert "inverse ×2" in shown
    notebook.run("future = inverse(2) > pool; future.result()")
    assert "done" in notebook.run("future").html
    assert "closed" in notebook.run("pool.close(); pool").html


def test_a_remote_error_shows_the_users_frames_of_both_sides_and_none_of_skywards(notebook: Notebook) -> None:
    notebook.run(OPEN_POOL)
    notebook.run(CALLS)
    for code in ("inverse(0) >> pool", "(inverse(0) & inverse(1)) >> pool", "inverse(0) @ pool"):
        cell = notebook.run(code)
        assert cell.error == "ZeroDivisionError"
        assert f"----> 1 {code}" in cell.traceback
        assert re.search(r"  Cell In\[\d+\], line 5, in inverse\n    return inner\(x\)\n", cell.traceback)
        assert "    return 1 / y\n" in cell.traceback
        assert "skyward/" not in cell.traceback
        assert len(cell.traceback.splitlines()) < 20


BARS = """
from tqdm import tqdm

@sky.compute
def train(steps):
    for _ in tqdm(range(steps), desc="epochs"):
        time.sleep(0.1)

def simulate(seed):
    time.sleep(0.05)
"""


def test_maps_and_bars_of_tasks_stay_in_place_below_their_cell(notebook: Notebook) -> None:
    notebook.run(OPEN_POOL)
    notebook.run(BARS)
    cell = notebook.run("pool.map(simulate, range(200));")  # a busy machine draws seldom
    (states,) = cell.displays.values()
    assert len(states) >= 3
    assert re.fullmatch(r"simulate +200 of 200 +━+ +100%  in [\d.]+ s +[\d.]+/s", states[-1]["text/plain"])
    assert "width:100.0%" in states[-1]["text/html"]
    assert cell.text == ""
    cell = notebook.run("train(25) >> pool")
    (states,) = cell.displays.values()
    assert any(re.search(r"\[node \d\] epochs: +[1-9]\d%", state["text/plain"]) for state in states)
    assert states[-1]["text/plain"] == ""  # its last state is a line of the output
    assert len(re.findall("epochs:", cell.text)) == 1
    assert re.search(r"epochs: 100%.*25/25", cell.text)
    notebook.run("import skyward.console.notebook as views; views._CALM_S = 60.0")  # of a busy machine
    assert notebook.run("pool.map(abs, [1]);").displays == {}


def test_a_magic_runs_a_cell_on_a_pool(notebook: Notebook) -> None:
    notebook.run(OPEN_POOL)
    notebook.run("%load_ext skyward\nfactor = 3\ndef times(x):\n    return x * factor")
    cell = notebook.run("%%skyward pool\nprint('from', sky.instance_info().node)\ntotal = times(14)\ntotal")
    assert cell.value == "42", cell.traceback
    assert re.fullmatch(r"\[node \d\] from \d\n", cell.text)
    assert notebook.run("total").error == "NameError"  # variables set by a cell stay there
    notebook.run("%%skyward pool.node(1) --out total,where\nwhere = sky.instance_info().node\ntotal = times(2)")
    assert notebook.value("[total, where]") == [6, 1]
    assert notebook.run("%%skyward pool --each\nsky.instance_info().node").value == "[0, 1]"
    assert notebook.run("%%skyward\n1 + 1").value == "2"
    cell = notebook.run("%%skyward pool\nx = 0\n1 / x")
    assert cell.error == "ZeroDivisionError"
    assert re.search(r'File "<skyward cell \d>", line 2, in <module>\n    1 / x\n', cell.traceback)
    assert "run_source" not in cell.traceback
    for line in ("--out", "--evry"):
        cell = notebook.run(f"%%skyward pool {line}\n1")
        assert cell.error == "UsageError"
        assert "write %%skyward [POOL]" in cell.traceback
