"""`make test` and `make test-all` together run every test, and each test once."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest

from tests import __main__ as runner
from tests.__main__ import PARTS, chosen
from tests.waiting import until

ROOT = Path(__file__).parent.parent
GPU = ROOT / "tests" / "gpu"  # needs a GPU, and has a runner of its own
FILES = [path for path in (ROOT / "tests").rglob("test_*.py") if not path.is_relative_to(GPU)]


def collected(folder: Path, *arguments: str) -> list[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return sorted(line for line in done.stdout.splitlines() if "::" in line)


def test_groups_that_share_folders_collect_each_test_once(tmp_path: Path) -> None:
    names = [f"tests/{name}.py" for name in ("test_a", "one/test_b", "one/test_c", "one/two/test_d", "ones/test_e")]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("def test(): ...\n")
    groups = {"core": ("tests",), "first": ("tests/one",), "second": ("tests/one/test_c.py", "tests/one/two")}
    found = {name: collected(tmp_path, *chosen(name, groups)) for name in groups}
    assert found == {
        "core": ["tests/ones/test_e.py::test", "tests/test_a.py::test"],
        "first": ["tests/one/test_b.py::test"],
        "second": ["tests/one/test_c.py::test", "tests/one/two/test_d.py::test"],
    }


def takes(arguments: list[str], path: Path) -> bool:
    """Return whether pytest with these arguments collects a file."""
    folders = [ROOT / argument for argument in arguments if not argument.startswith("--")]
    ignored = [ROOT / argument.removeprefix("--ignore=") for argument in arguments if argument.startswith("--")]
    return any(map(path.is_relative_to, folders)) and not any(map(path.is_relative_to, ignored))


def test_each_file_is_in_one_group_of_the_rest() -> None:
    groups = PARTS["rest"]
    counts = {path: sum(takes(chosen(name, groups), path) for name in groups) for path in FILES}
    assert {str(path): count for path, count in counts.items() if count != 1} == {}


def test_no_file_is_in_two_groups_of_the_promises() -> None:
    groups = PARTS["promises"]
    counts = Counter(path for name in groups for path in FILES if takes(chosen(name, groups), path))
    assert counts
    assert [str(path) for path, count in counts.items() if count > 1] == []


@pytest.mark.parametrize("path", [path for groups in PARTS.values() for paths in groups.values() for path in paths])
def test_each_path_of_a_group_exists(path: str) -> None:
    assert (ROOT / path).exists()


def test_a_limited_number_of_groups_runs_at_once_and_some_after_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    names = ["last", "first", *(f"other{number}" for number in range(runner.AT_ONCE))]
    commands = {name: ["sh", "-c", f"echo begin {name} >>{log}; sleep 0.2; echo end {name} >>{log}"] for name in names}
    monkeypatch.setitem(PARTS, "trial", {})
    monkeypatch.setitem(runner.COMMANDS, "trial", commands)
    monkeypatch.setitem(runner.AFTER, "last", ("first",))
    monkeypatch.setattr(runner, "RESULTS", tmp_path)
    monkeypatch.setattr(runner, "LOOK_S", 0.01)
    monkeypatch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)  # `make coverage` runs no commands
    assert runner.run("trial") == 0
    assert "all passed" in capsys.readouterr().out
    lines = log.read_text().splitlines()
    running = [sum(1 if line.startswith("begin") else -1 for line in lines[:count]) for count in range(len(lines) + 1)]
    assert len(lines) == 2 * len(names)
    assert max(running) <= runner.AT_ONCE
    assert lines.index("end first") < lines.index("begin last")


def test_a_group_that_hangs_is_ended_and_its_output_has_its_stacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "import time\n\ndef sleeps():\n    print('ready', flush=True)\n    time.sleep(600)\n\nsleeps()\n"
    monkeypatch.setitem(PARTS, "trial", {})
    monkeypatch.setitem(runner.COMMANDS, "trial", {"hangs": [sys.executable, "-X", "faulthandler", "-c", program]})
    monkeypatch.setattr(runner, "RESULTS", tmp_path)
    with tempfile.TemporaryFile() as output:
        group = runner.Group("hangs", "trial", output)
        group.start()
        until(lambda: "ready" in group.output())
        group.look([group])
        assert group.is_running
        monkeypatch.setattr(runner, "STALLED_S", 0.0)
        group.look([group])
        assert not group.is_running
        assert group.has_failed
        assert group.new_failures() == ["hangs: no test has ended for 0 minutes, since hangs ..."]
        assert group.new_failures() == []
        assert "in sleeps" in group.output()
