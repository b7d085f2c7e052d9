"""Rules of .gitignore: files of a folder that do not travel. Patterns are translated by pathspec."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TextIO

from ..core.ownership import check_path
from ..errors import UsageError

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
class Rules:
    """The rules of one file, for paths below its folder: each a pattern and whether it ignores what it matches."""

    folder: str
    rules: tuple[tuple[re.Pattern[str], bool], ...]

    @classmethod
    def parse(cls, folder: str, lines: Iterable[str]) -> Rules:
        return cls(folder, tuple(rule for line in lines for rule in _parse_line(line)))

    def verdict(self, path: str, *, is_folder: bool) -> bool | None:
        """True: ignored; False: not, whatever was said before; None: nothing is said of it. The last rule wins."""
        relative = os.path.relpath(path, self.folder) + ("/" if is_folder else "")
        return next((ignores for pattern, ignores in reversed(self.rules) if _names(pattern, relative)), None)


def _parse_line(line: str) -> Iterator[tuple[re.Pattern[str], bool]]:
    # Only a pool whose code travels needs it, and a node, which may import this module, does not have it.
    from pathspec import GitIgnoreSpec, RegexPattern

    try:
        patterns = GitIgnoreSpec.from_lines([line.rstrip("\r\n")]).patterns
    except (ValueError, re.error):  # "[z-a]": git passes over such a line too
        return
    for pattern in patterns:
        if isinstance(pattern, RegexPattern) and pattern.regex is not None and pattern.include is not None:
            yield pattern.regex, pattern.include


def _names(pattern: re.Pattern[str], relative: str) -> bool:
    """Whether the pattern matches the path itself. pathspec also matches everything below a folder that is named, and
    marks the folder's slash by a group; here a walk decides about folders, and may begin inside an ignored one.
    """
    matches = pattern.finditer(relative)
    return any(match.lastindex is None or match.end(match.lastindex) == len(relative) for match in matches)


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
    except (OSError, UsageError):  # no such file, or a stranger's
        return []


def rules_above(folder: str) -> list[Rules]:
    """Those of the folders above, up to where the repository begins, and behind them those of git itself for all of it.

    None outside a repository.
    """
    rules: list[Rules] = []
    at = folder
    while not _is_repository(at):
        parent = os.path.dirname(at)
        if parent == at:
            return []
        at = parent
        rules = rules_in(at) + rules
    return _rules_of_git(at) + rules


def _is_repository(folder: str) -> bool:
    path = os.path.join(folder, ".git")
    try:
        check_path(path)
    except UsageError:  # a stranger put it into a shared folder
        return False
    return os.path.exists(path)


def _rules_of_git(repository: str) -> list[Rules]:
    """The user's own for all repositories, then those of this one that are in no commit. Source: gitignore(5)."""
    rules = []
    for path in (_users_ignore(), os.path.join(_git_folder(repository), "info", "exclude")):
        with contextlib.suppress(OSError, UsageError):  # no such file, or a stranger's
            rules.append(dataclasses.replace(_rules_of(path), folder=repository))
    return rules


def _git_folder(repository: str) -> str:
    """Where its exclude file is: of a further worktree, or a submodule, `.git` is a file that says where."""
    path = os.path.join(repository, ".git")
    if os.path.isfile(path):
        path = _path_in(path)
    common = os.path.join(path, "commondir")
    return _path_in(common) if os.path.isfile(common) else path


def _path_in(file: str) -> str:
    """That a file of git's holds, relative to where it lies."""
    # No such file, or a stranger's: git's folder is the usual one.
    with contextlib.suppress(OSError, UsageError), _opened(file) as text:
        return os.path.normpath(os.path.join(os.path.dirname(file), text.read().removeprefix("gitdir:").strip()))
    return file


def _opened(path: str) -> TextIO:
    check_path(path)
    return open(path, encoding="utf-8", errors="surrogateescape")


def _users_ignore() -> str:
    folder = os.path.join(os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config"), "git")
    for path in (os.path.expanduser("~/.gitconfig"), os.path.join(folder, "config")):
        with contextlib.suppress(OSError, UsageError), _opened(path) as file:  # no such file, or a stranger's
            if match := _EXCLUDES_FILE.search(file.read()):
                return os.path.expanduser(match[1].strip().strip('"'))
    return os.path.join(folder, "ignore")
