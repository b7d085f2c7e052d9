"""The types that users see, checked by mypy: `typing/positive.py` is clean, `typing/negative.py` has its errors."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import skyward

ROOT = Path(__file__).parent.parent
HERE = ROOT / "tests" / "typing"

pytestmark = pytest.mark.timeout(300)


def mypy(path: Path, cache: Path) -> list[tuple[int, str]]:
    """Return (line, code) of each error in the file."""
    command = [sys.executable, "-m", "mypy", "--strict", f"--cache-dir={cache}", "--config-file=pyproject.toml"]
    done = subprocess.run([*command, str(path)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = []
    for line in done.stdout.splitlines():
        match = re.match(r"(?P<file>[^:]+):(?P<line>\d+): error: .*\[(?P<code>[\w-]+)\]$", line)
        if match and Path(match["file"]).name == path.name:
            found.append((int(match["line"]), match["code"]))
    return found


@pytest.fixture(scope="module")
def cache() -> Path:
    return ROOT / ".mypy_cache"  # shared with `make lint`: torch and numpy take a minute without


def test_legal_code_of_users_is_typed(cache: Path) -> None:
    assert mypy(HERE / "positive.py", cache) == []


def test_exactly_the_mistakes_of_users_are_refused(cache: Path) -> None:
    path = HERE / "negative.py"
    expected = [
        (number, match[1])
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (match := re.search(r"# error: ([\w-]+)$", line))
    ]
    assert len(expected) > 10
    assert sorted(set(mypy(path, cache))) == expected  # mypy repeats itself about overloads


@pytest.mark.parametrize("stub", sorted((ROOT / "skyward").rglob("*.pyi")), ids=lambda stub: stub.parent.name)
def test_a_module_has_the_names_of_its_stub(stub: Path) -> None:
    """The package reads its stub by lines and words. This test reads it as a checker does."""
    imports = [node for node in ast.parse(stub.read_text()).body if isinstance(node, ast.ImportFrom)]
    parts = stub.with_suffix("").relative_to(ROOT).parts
    module = importlib.import_module(".".join(parts).removesuffix(".__init__"))
    assert {alias.asname for node in imports for alias in node.names} == set(dir(module)) - {"REGISTRY"}
    assert all(alias.asname == alias.name for node in imports for alias in node.names)


def test_the_stub_takes_each_name_from_where_the_package_does() -> None:
    tree = ast.parse((ROOT / "skyward" / "__init__.pyi").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                module = __import__(f"skyward.{node.module or ''}".rstrip("."), fromlist=[alias.name])
                assert getattr(module, alias.name) is getattr(skyward, alias.name)
