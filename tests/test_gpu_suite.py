"""The tests for machines with a GPU (tests/gpu/) are collected and reported, if there is one."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
SUITE = ROOT / "tests" / "gpu"


def executed(*command: str) -> subprocess.CompletedProcess[str]:
    # No plugin except pytest's own, as on a machine that has nothing else.
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False, env=env)


@pytest.fixture(scope="module")
def runner() -> ModuleType:
    spec = spec_from_file_location("gpu_run", SUITE / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_test_has_the_marker_and_needs_no_plugin() -> None:
    options = (f"--rootdir={ROOT}", f"--confcutdir={SUITE}", "--collect-only", "-q", "-m", "gpu", "--device=cpu")
    done = executed("-m", "pytest", "-c", str(SUITE / "pytest.ini"), *options, str(SUITE))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "deselected" not in done.stdout
    assert {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line} == {
        f"tests/gpu/{path.name}" for path in SUITE.glob("test_*.py")
    }


def test_no_other_run_collects_them() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/gpu", "tests/engine/test_devices.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tests/engine/test_devices.py::" in done.stdout
    assert "tests/gpu" not in done.stdout


def test_without_a_gpu_it_says_so_and_how_it_is_used() -> None:
    done = executed("tests/gpu/run.py")
    assert done.returncode == 2
    assert "There is no GPU here that torch can use" in done.stderr
    assert "make test-gpu PYTHON=python3" in done.stderr


@pytest.mark.timeout(240)
def test_a_rehearsal_writes_one_report(tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    chosen = "bytes_of_every_type or nvidia_smi or versions"
    done = executed("tests/gpu/run.py", "--device=cpu", f"--report={report}", "-k", chosen)
    assert done.returncode == 0, done.stdout + done.stderr
    text = report.read_text()
    assert text.startswith("# GPU tests: a rehearsal on the CPU")
    assert "3 passed, 0 failed, 0 skipped" in text
    assert "| test_snapshots.py::test_bytes_of_every_type_arrive | passed |" in text
    assert "torch: " in text


def test_failures_are_in_the_report(runner: ModuleType) -> None:
    tests = [
        {"test": "test_a.py::test_b", "outcome": "failed", "seconds": 1.5, "figures": {"GB/s": 3}, "why": "E  boom\n"}
    ]
    text = runner.describe("cpu", tests, 9.0, None)
    assert "its time was up; 0 passed, 1 failed, 0 skipped" in text
    assert "| test_a.py::test_b | failed | 1.5 | GB/s: 3 |" in text
    assert "## failed: test_a.py::test_b\n\n```text\nE  boom\n```" in text


def test_dependencies_are_unpacked_from_wheels(
    runner: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    wheels.mkdir()
    monkeypatch.setattr(runner, "WHEELS", wheels)
    monkeypatch.setattr(runner, "DEPENDENCIES", ("house_py", "house_cp", "torch"))
    for tag in ("py3-none-any", "cp27-cp27-win_amd64"):
        with zipfile.ZipFile(wheels / f"house_{tag[:2]}-1.0-{tag}.whl", "w") as archive:
            archive.writestr(f"house_{tag[:2]}.py", "DOORS = 2\n")
    with zipfile.ZipFile(wheels / "torch-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("torch.py", "OLD = True\n")
    (problem,) = runner.unpacked(site)
    assert problem.startswith("house_cp: not installed, and no wheel for cp")
    assert "make gpu-wheels" in problem
    assert [path.name for path in site.iterdir()] == ["house_py.py"]  # and what is installed stays as it is
