"""The documentation is correct: its code runs, its links lead somewhere, its commands exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import skyward.errors
from skyward.cli.integrations import describe, markdown
from tests.few_modules import LEAN

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES += sorted((ROOT / "docs").glob("*.md")) + sorted((ROOT / "guides").glob("*.md"))

# A python block, and the text block with its output if one follows.
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:(?:(?!^```).)*?^```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
ERRORS = ROOT / "docs" / "errors.md"
LINK = re.compile(r"""(?:\]\(|src="|srcset=")([^)\s"]+)[)"]""")


def runnable() -> list[tuple[str, str, str]]:
    """Return (page and number, code, its output or nothing). test_examples runs examples of the guides."""
    blocks = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        if page == ERRORS:
            continue
        for number, found in enumerate(BLOCK.finditer(page.read_text()), start=1):
            blocks.append((f"{page.name}-{number}", found[1], found[2] or ""))
    return blocks


@pytest.mark.parametrize(("code", "prints"), [b[1:] for b in runnable()], ids=[b[0] for b in runnable()])
def test_code_in_the_documentation_runs_and_prints_the_shown_output(code: str, prints: str, tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "-W", "error", "example.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(LEAN)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if prints:
        # Two nodes print in any order.
        shown = done.stdout.replace(f"{tmp_path}/", "")  # tracebacks name the file
        assert sorted(shown.splitlines()) == sorted(prints.splitlines()), shown


def test_code_of_the_error_catalogue_runs_on_one_pool_and_prints_the_shown_output(tmp_path: Path) -> None:
    """The examples name `pool`, and the page says how to open it."""
    blocks = list(BLOCK.finditer(ERRORS.read_text()))
    opening = re.findall(r"^pool = .*", ERRORS.read_text(), re.MULTILINE)
    code = ["import skyward as sky", *opening]
    for block in blocks:
        code += [block[1], "print('--', flush=True)"]
    (tmp_path / "example.py").write_text("\n".join([*code, "pool.close()"]))
    command = [sys.executable, "-W", "error", "example.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=220, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    printed = done.stdout.split("--\n")[:-1]
    assert printed == [block[2] or "" for block in blocks]


def test_the_error_catalogue_has_a_section_for_each_class() -> None:
    codes = [re.sub(r"(?<!^)(?=[A-Z])", "-", name).lower() for name in skyward.errors.__all__]
    sections = re.split(r"^## (.+)\n", ERRORS.read_text(), flags=re.MULTILINE)[1:]
    texts = dict(zip(sections[::2], sections[1::2], strict=True))
    assert sorted(texts) == sorted(codes)
    for code, text in texts.items():
        assert all(part in text for part in ("**Meaning.**", "**Cause.**", "**What to do.**", "```python\n")), code


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    links = [link for link in LINK.findall(page.read_text()) if "://" not in link and not link.startswith("mailto:")]
    missing = []
    for link in links:
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            missing.append(link)
    assert not missing


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as code browsers and the site make them."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_commands_exist_in_the_makefile(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    named = set(re.findall(r"(?:^\$ |^ {4}|`)make ([a-z][a-z-]*)", page.read_text(), re.MULTILINE))
    assert named <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_of_the_project_exist(page: Path) -> None:
    named = set(re.findall(r"`((?:examples|guides|docs|benchmarks|tests|skyward)/[\w./]+)`", page.read_text()))
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing


def test_readme_names_the_two_commands() -> None:
    commands = re.findall(r"^\$ (make [a-z-]+)", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert commands == ["make demo", "make test"]


def test_the_page_on_integrations_agrees_with_their_classes() -> None:
    """`skyward integrations --markdown > docs/integrations.md` writes it."""
    assert (ROOT / "docs" / "integrations.md").read_text() == markdown(describe())
