"""What the documentation says is so: its code runs, its links lead somewhere, its commands exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from skyward.cli.integrations import describe, markdown

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES += sorted((ROOT / "docs").glob("*.md")) + sorted((ROOT / "guides").glob("*.md"))

# A python block, and the text block that says what it prints if one follows.
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:(?:(?!^```).)*?^```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def runnable() -> list[tuple[str, str, str]]:
    """(page and number, code, what it prints or nothing). Examples in the guides are run by test_examples."""
    blocks = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for number, found in enumerate(BLOCK.finditer(page.read_text()), start=1):
            blocks.append((f"{page.name}-{number}", found[1], found[2] or ""))
    return blocks


@pytest.mark.parametrize(("code", "prints"), [b[1:] for b in runnable()], ids=[b[0] for b in runnable()])
def test_code_in_the_documentation_runs_and_prints_what_is_shown(code: str, prints: str, tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "-W", "error", "example.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if prints:
        # Two nodes print in any order.
        shown = done.stdout.replace(f"{tmp_path}/", "")  # tracebacks name the file
        assert sorted(shown.splitlines()) == sorted(prints.splitlines()), shown


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    links = [link for link in LINK.findall(page.read_text()) if "://" not in link and not link.startswith("mailto:")]
    missing = [link for link in links if not (page.parent / link.partition("#")[0]).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_that_are_named_exist_in_the_makefile(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    named = set(re.findall(r"(?:^\$ |^ {4}|`)make ([a-z][a-z-]*)", page.read_text(), re.MULTILINE))
    assert named <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_of_the_project_that_are_named_exist(page: Path) -> None:
    named = set(re.findall(r"`((?:examples|guides|docs|benchmarks|tests|skyward)/[\w./]+)`", page.read_text()))
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing


def test_readme_names_the_two_commands() -> None:
    commands = re.findall(r"^\$ (make [a-z-]+)", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert commands == ["make demo", "make test"]


def test_the_page_on_integrations_says_what_their_classes_say() -> None:
    """`skyward integrations --markdown > docs/integrations.md` writes it."""
    assert (ROOT / "docs" / "integrations.md").read_text() == markdown(describe())
