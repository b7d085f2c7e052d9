"""Rules of .gitignore: what of a folder does not travel."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

__all__ = ["ALWAYS", "Rules", "rules_above", "rules_in"]

# What no program needs elsewhere: histories, environments and caches.
ALWAYS = (
    ".git",
    ".hg",
    ".svn",
    ".venv",
    "__pycache__",
    "node_modules",
    ".tox",
    ".nox",
    ".mypy_cache",
    ".pytest_cache",
    ".ruff_cache",
    ".ipynb_checkpoints",
    ".DS_Store",
    "*.pyc",
)


@dataclass(frozen=True)
class _Rule:
    pattern: re.Pattern[str]
    is_negated: bool
    is_for_folders: bool


@dataclass(frozen=True)
class Rules:
    """The rules of one file, for paths below its folder. Source: gitignore(5), "Pattern format"."""

    folder: str
    rules: tuple[_Rule, ...]

    @classmethod
    def parse(cls, folder: str, lines: Iterable[str]) -> Rules:
        return cls(folder, tuple(rule for line in lines if (rule := _parsed(line)) is not None))

    def verdict(self, path: str, *, is_folder: bool) -> bool | None:
        """True: ignored; False: not, whatever was said before; None: nothing is said of it. The last rule wins."""
        relative = os.path.relpath(path, self.folder)
        for rule in reversed(self.rules):
            if (is_folder or not rule.is_for_folders) and rule.pattern.fullmatch(relative):
                return not rule.is_negated
        return None


def _parsed(line: str) -> _Rule | None:
    text = line.rstrip("\r\n")
    text = text if text.endswith("\\ ") else text.rstrip()
    if not text or text.startswith("#"):
        return None
    is_negated = text.startswith("!")
    text = text.removeprefix("!").removeprefix("\\")
    is_for_folders = text.endswith("/")
    text = text.rstrip("/")
    if not text:
        return None
    # A slash at the start or in the middle ties it to the file's folder; without one it holds at any depth.
    is_tied = "/" in text
    expression = ("" if is_tied else "(?:.*/)?") + _expression(text.lstrip("/"))
    try:
        return _Rule(re.compile(expression), is_negated, is_for_folders)
    except re.error:  # "[z-a]": git passes over it too
        return None


def _expression(text: str) -> str:
    out = ""
    i = 0
    while i < len(text):
        if text.startswith("**/", i) and (i == 0 or text[i - 1] == "/"):
            out, i = out + "(?:.*/)?", i + 3
        elif text[i:] == "**" and i and text[i - 1] == "/":
            out, i = out + ".+", i + 2
        elif text[i] == "*":
            out, i = out + "[^/]*", i + 1
        elif text[i] == "?":
            out, i = out + "[^/]", i + 1
        elif text[i] == "[" and (end := text.find("]", i + 2)) > 0:
            inside = text[i + 1 : end].replace("\\", "\\\\")
            out, i = out + "[" + ("^" + inside[1:] if inside[0] in "!^" else inside) + "]", end + 1
        else:
            step = 2 if text[i] == "\\" and i + 1 < len(text) else 1
            out, i = out + re.escape(text[i + step - 1]), i + step
    return out


@lru_cache(maxsize=256)
def _of_file(path: str, changed_ns: int) -> Rules:
    with open(path, encoding="utf-8", errors="replace") as file:
        return Rules.parse(os.path.dirname(path), file)


def rules_in(folder: str) -> list[Rules]:
    """Those of the folder's own .gitignore."""
    path = os.path.join(folder, ".gitignore")
    try:
        return [_of_file(path, os.stat(path).st_mtime_ns)]
    except OSError:
        return []


def rules_above(folder: str) -> list[Rules]:
    """Those of the folders above, up to where the repository begins; none outside a repository."""
    found: list[Rules] = []
    at = folder
    while not os.path.exists(os.path.join(at, ".git")):
        parent = os.path.dirname(at)
        if parent == at:
            return []
        at = parent
        found = rules_in(at) + found
    return found
