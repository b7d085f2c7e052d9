"""Rules of .gitignore: what of a folder does not travel."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TextIO

from ..errors import UsageError
from ..ownership import check_path

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
_EXCLUDES_FILE = re.compile(r"^\s*excludesfile\s*=\s*(\S.*)$", re.IGNORECASE | re.MULTILINE)


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


def _rules_of(path: str) -> Rules:
    """Raises OSError, and UsageError for a file that a stranger may have put there."""
    status = os.stat(path)
    check_path(path)
    return _of_file(path, status.st_mtime_ns)


@lru_cache(maxsize=256)
def _of_file(path: str, changed_ns: int) -> Rules:
    with open(path, encoding="utf-8", errors="replace") as file:
        return Rules.parse(os.path.dirname(path), file)


def rules_in(folder: str) -> list[Rules]:
    """Those of the folder's own .gitignore."""
    path = os.path.join(folder, ".gitignore")
    try:
        return [_rules_of(path)]
    except (OSError, UsageError):
        return []


def rules_above(folder: str) -> list[Rules]:
    """Those of the folders above, up to where the repository begins, and behind them those of git itself for all of it.

    None outside a repository.
    """
    found: list[Rules] = []
    at = folder
    while not _is_repository(at):
        parent = os.path.dirname(at)
        if parent == at:
            return []
        at = parent
        found = rules_in(at) + found
    return _rules_of_git(at) + found


def _is_repository(folder: str) -> bool:
    path = os.path.join(folder, ".git")
    try:
        check_path(path)
    except UsageError:  # a stranger put it into a shared folder
        return False
    return os.path.exists(path)


def _rules_of_git(repository: str) -> list[Rules]:
    """The user's own for all repositories, then those of this one that are in no commit. Source: gitignore(5)."""
    found = []
    for path in (_users_ignore(), os.path.join(_git_folder(repository), "info", "exclude")):
        with contextlib.suppress(OSError, UsageError):
            found.append(dataclasses.replace(_rules_of(path), folder=repository))
    return found


def _git_folder(repository: str) -> str:
    """Where its exclude file is: of a further worktree, or a submodule, `.git` is a file that says where."""
    path = os.path.join(repository, ".git")
    if os.path.isfile(path):
        path = _path_in(path)
    common = os.path.join(path, "commondir")
    return _path_in(common) if os.path.isfile(common) else path


def _path_in(file: str) -> str:
    """That a file of git's holds, relative to where it lies."""
    with contextlib.suppress(OSError, UsageError), _opened(file) as text:
        return os.path.normpath(os.path.join(os.path.dirname(file), text.read().removeprefix("gitdir:").strip()))
    return file


def _opened(path: str) -> TextIO:
    check_path(path)
    return open(path, encoding="utf-8", errors="surrogateescape")


def _users_ignore() -> str:
    folder = os.path.join(os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config"), "git")
    for path in (os.path.expanduser("~/.gitconfig"), os.path.join(folder, "config")):
        with contextlib.suppress(OSError, UsageError), _opened(path) as file:
            if said := _EXCLUDES_FILE.search(file.read()):
                return os.path.expanduser(said[1].strip().strip('"'))
    return os.path.join(folder, "ignore")
