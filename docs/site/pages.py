"""Assemble the source of the documentation site: `python docs/site/pages.py FOLDER`.

The folder mirrors the checkout, so links between pages work on the site as they do in a code browser. Files that are
unchanged keep their time, because `mkdocs serve` watches them.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from reference import ROOT, pages

_PAGES = ["CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md", "benchmarks/README.md", "changes/README.md"]
_LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")


def source_pages() -> list[str]:
    """Return the pages of the site that are files of the checkout, except README.md."""
    folders = [path for folder in ("docs", "guides") for path in sorted((ROOT / folder).glob("*.md"))]
    return [name for name in _PAGES if (ROOT / name).exists()] + [str(path.relative_to(ROOT)) for path in folders]


def repository() -> str:
    """Return the address of the source, which pyproject.toml has."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return str(project["urls"]["Source"])


def assemble(folder: Path) -> None:
    """Write all pages and pictures into a folder, and delete what is no longer one of them."""
    written = {folder / name for name in _write_all(folder)}
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_file() and path not in written:
            path.unlink()
        elif path.is_dir() and not any(path.iterdir()):
            path.rmdir()


def _write_all(folder: Path) -> Iterator[str]:
    known = {"README.md", *source_pages()}
    files: set[str] = set()
    for name in sorted(known):
        target = "index.md" if name == "README.md" else name
        _write(folder / target, _site_links(name, (ROOT / name).read_text(), known, files))
        yield target
    for name, text in pages():
        _write(folder / name, text)
        yield name
    for name in sorted(files | {str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("pictures/*.svg")}):
        _copy(ROOT / name, folder / name)
        yield name
    for path in (*(ROOT / "docs" / "site").glob("*.css"), *(ROOT / "docs" / "site").glob("*.js")):
        _copy(path, folder / path.name)
        yield path.name


def _site_links(name: str, text: str, pages: set[str], files: set[str]) -> str:
    """Point links at pages of the site, at copies of small text files, or at the repository."""

    def translate(link: re.Match[str]) -> str:
        target = link[2]
        if "://" in target or target.startswith("mailto:"):
            return link[0]
        path = os.path.normpath(os.path.join(os.path.dirname(name), target))
        if path == "README.md":
            home = os.path.relpath("index.md", os.path.dirname(name) or ".")
            return f"{link[1]}{home}{link[3]}"
        if path in pages:
            return link[0]
        if (ROOT / path).is_file() and path.endswith((".py", ".txt", ".svg", ".png")):
            files.add(path)
            return link[0]
        return f"{link[1]}{repository()}/blob/main/{path}{link[3]}"

    return _LINK.sub(translate, text)


def _write(path: Path, text: str) -> None:
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def _copy(source: Path, path: Path) -> None:
    if not path.exists() or path.read_bytes() != source.read_bytes():
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, path)


if __name__ == "__main__":
    assemble(Path(sys.argv[1]))
