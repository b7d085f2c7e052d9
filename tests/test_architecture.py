"""The arrows of docs/architecture.md hold."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parent.parent

VALUES = (
    "accelerators",
    "allocation",
    "calls",
    "errors",
    "frozenmap",
    "image",
    "launch",
    "logs",
    "machine",
    "output",
    "topology",
)


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("skyward", include_external_packages=True, cache_dir=None)


def test_imports_go_up_the_page_of_the_architecture_never_down() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", VALUES)
def test_values_need_only_the_standard_library_and_cloudpickle(graph: grimp.ImportGraph, name: str) -> None:
    imported = graph.find_modules_directly_imported_by(f"skyward.{name}")
    outside = {module.partition(".")[0] for module in imported} - sys.stdlib_module_names
    assert outside <= {"skyward", "cloudpickle"}


def test_importing_the_package_imports_nothing_but_the_standard_library(graph: grimp.ImportGraph) -> None:
    imported = graph.find_modules_directly_imported_by("skyward")
    assert {module.partition(".")[0] for module in imported} <= sys.stdlib_module_names | {"skyward"}
