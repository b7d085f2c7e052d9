"""The arrows of docs/architecture.md hold."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parent.parent

STANDS_ALONE = ("accelerators", "calls", "core", "errors", "events", "values")
"""Rooms and modules that need the standard library and cloudpickle only."""


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("skyward", include_external_packages=True, cache_dir=None)


def test_imports_go_up_the_page_of_the_architecture_never_down() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", STANDS_ALONE)
def test_values_need_only_the_standard_library_and_cloudpickle(graph: grimp.ImportGraph, name: str) -> None:
    room = {f"skyward.{name}", *graph.find_descendants(f"skyward.{name}")}
    imported = {found for module in room for found in graph.find_modules_directly_imported_by(module)}
    outside = {module.partition(".")[0] for module in imported} - sys.stdlib_module_names
    assert outside <= {"skyward", "cloudpickle"}


def test_importing_the_package_imports_nothing_but_the_standard_library(graph: grimp.ImportGraph) -> None:
    imported = graph.find_modules_directly_imported_by("skyward")
    assert {module.partition(".")[0] for module in imported} <= sys.stdlib_module_names | {"skyward"}


def circles_of(imports: dict[str, set[str]]) -> list[frozenset[str]]:
    """Return each largest set of modules that all reach each other by their imports."""
    reached: dict[str, set[str]] = {}
    for module in imports:
        reached[module], ahead = set(), [module]
        while ahead:
            new = imports[ahead.pop()] - reached[module]
            reached[module] |= new
            ahead += new
    found = {
        frozenset(other for other in reached[module] if module in reached[other])
        for module in imports
        if module in reached[module]
    }
    return sorted(found, key=sorted)


def test_no_modules_import_each_other_in_a_circle(graph: grimp.ImportGraph) -> None:
    """Imports for types alone and imports inside functions count: that is where circles hide.

    A function imports late for two reasons: the module is heavy, or the import would be circular. The first makes no
    circle, so nothing is lost by counting them all. Without circles, a program can import any module first.
    """
    modules = {module for module in graph.modules if module.partition(".")[0] == "skyward"}
    imports = {module: graph.find_modules_directly_imported_by(module) & modules for module in modules}
    # The packages around a module run before it.
    around = {
        module: {package for target in targets for package in packages_of(target) - packages_of(module) - {module}}
        for module, targets in imports.items()
    }
    circles = circles_of({module: imports[module] | around[module] for module in modules})
    assert [sorted(circle) for circle in circles] == []


def packages_of(module: str) -> set[str]:
    parts = module.split(".")
    return {".".join(parts[:length]) for length in range(1, len(parts))}


def test_circles_are_found() -> None:
    imports = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"d"}, "f": {"a", "d"}, "g": set()}
    assert circles_of(imports) == [frozenset("abc"), frozenset("de")]


PACKAGE = ROOT / "skyward"
ROOMS = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))

TWO_MEANINGS = {
    "Call": ["calls/listed.py", "hub/http/routing.py"],
    "Job": ["hub/client/job_handle.py", "training/evaluation/dispatcher.py"],
    "NodeLost": ["errors/node.py", "events/machine.py"],
    "PoolClosed": ["errors/usage.py", "events/pool.py"],
}
"""Public names from the first release: the error ends a call, the event tells a reader that it happened. A hub's job
is a future, and that of a dispatcher is one evaluation: their writers know both by this word. A call of a detached
pool is public; one of the hub's HTTP interface is known to its handlers only."""


def test_a_class_name_means_one_thing() -> None:
    places: dict[str, list[str]] = {}
    texts = {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    lines = {path: re.findall(r"^ *class (\w+)", text, re.MULTILINE) for path, text in texts.items()}
    counts = Counter(name for names in lines.values() for name in names)
    for path in (path for path, names in lines.items() if any(counts[name] > 1 for name in names)):
        for node in ast.walk(ast.parse(texts[path])):  # few files, because all take seconds
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    assert {name: files for name, files in places.items() if len(files) > 1} == TWO_MEANINGS


@pytest.mark.parametrize("room", ROOMS)
def test_the_page_describes_each_room_like_its_docstring(room: str) -> None:
    docstring = ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text()))
    assert docstring is not None
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert f"| `{room}/` | {docstring.splitlines()[0]} |" in page


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_has_its_folder_of_tests(room: str) -> None:
    assert list((ROOT / "tests" / room).rglob("test_*.py"))


def test_files_that_the_page_names_exist() -> None:
    named = re.findall(r"`([\w/]+\.py)`", (ROOT / "docs" / "architecture.md").read_text())
    assert named
    assert [name for name in named if not ((PACKAGE / name).exists() or (ROOT / name).exists())] == []
