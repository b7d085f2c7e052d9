"""The pages' JSDoc types hold: TypeScript's checker reads them, strictly."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.hub.ui import vendor

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
CHECKS = ROOT / ".make" / "pages-checks"


@pytest.fixture(scope="module")
def modules() -> Path:
    """Folder with the packages of `package-lock.json`, installed once for each lock file."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("no npm here: install Node.js with npm")
    lock = (HERE / "package-lock.json").read_text()
    installed = CHECKS / "package-lock.json"
    if not installed.exists() or installed.read_text() != lock or not (CHECKS / ".ready").exists():
        shutil.rmtree(CHECKS, ignore_errors=True)
        CHECKS.mkdir(parents=True)
        for name in ("package.json", "package-lock.json"):
            shutil.copy(HERE / name, CHECKS / name)
        command = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
        done = subprocess.run(command, cwd=CHECKS, capture_output=True, text=True, check=False, timeout=300)
        if done.returncode and not os.environ.get("CI"):
            pytest.skip(f"npm installs nothing here:\n{done.stderr[-500:]}")
        assert done.returncode == 0, done.stderr
        (CHECKS / ".ready").touch()
    return CHECKS / "node_modules"


@pytest.mark.timeout(400)
def test_types_of_the_pages_hold(modules: Path) -> None:
    checker = modules / ".bin" / "tsc"
    command = [str(checker), "-p", str(HERE / "tsconfig.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.timeout(400)
def test_the_vendored_libraries_come_from_the_locked_packages(
    modules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = vendor.VENDOR
    monkeypatch.setattr(vendor, "VENDOR", tmp_path)
    vendor.copy(modules)
    for copied in tmp_path.iterdir():
        assert copied.read_bytes() == (kept / copied.name).read_bytes(), copied.name
