"""Rules of .gitignore for files that are not sent. pathspec translates the patterns."""

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

# Histories, environments and caches, which no program needs on a node.
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
    """Rules of one file for paths below its folder. Each is a pattern, and whether it ignores the matching paths."""

    folder: str
    rules: tuple[tuple[re.Pattern[str], bool], ...]

    @classmethod
    def parse(cls, folder: str, lines: Iterable[str]) -> Rules:
        return cls(folder, tuple(rule for line in lines for rule in _parse_line(line)))

    def verdict(self, path: str, *, is_folder: bool) -> bool | None:
        """Return whether the last matching rule ignores the path (True) or keeps it (False). None: no rule matches."""
        # A pool asks thousands of times at its start, mostly about paths that no pattern matches anywhere.
        inside = self.folder + "/"
        relative = path[len(inside) :] if path.startswith(inside) else os.path.relpath(path, self.folder)
        if is_folder:
            relative += "/"
        for pattern, ignores in reversed(self.rules):
            if pattern.search(relative) and _names(pattern, relative):
                return ignores
        return None


def _parse_line(line: str) -> Iterator[tuple[re.Pattern[str], bool]]:
    # Imported late: only a client that sends code needs it, and nodes, which may import this module, do not have it.
    from pathspec import GitIgnoreSpec, RegexPattern

    try:
        patterns = GitIgnoreSpec.from_lines([line.rstrip("\r\n")]).patterns
    except (ValueError, re.error):  # such as "[z-a]", a line that git ignores too
        return
    for pattern in patterns:
        if isinstance(pattern, RegexPattern) and pattern.regex is not None and pattern.include is not None:
            yield pattern.regex, pattern.include


def _names(pattern: re.Pattern[str], relative: str) -> bool:
    """Tell whether the pattern matches the path itself.

    pathspec also matches everything below a named folder, and marks the folder's slash by a group. That must not count
    here, because the walk decides about folders and may begin inside an ignored one.
    """
    matches = pattern.finditer(relative)
    return any(match.lastindex is None or match.end(match.lastindex) == len(relative) for match in matches)


def _rules_of(path: str) -> Rules:
    """Read the rules of a file.

    Raises:
        OSError: There is no such file.
        UsageError: Another user may have put the file there.
    """
    status = os.stat(path)
    check_path(path)
    return _of_file(path, status.st_mtime_ns)


@lru_cache(maxsize=256)
def _of_file(path: str, changed_ns: int) -> Rules:
    with open(path, encoding="utf-8", errors="replace") as file:
        return Rules.parse(os.path.dirname(path), file)


def rules_in(folder: str) -> list[Rules]:
    """Return the rules of the folder's own .gitignore."""
    path = os.path.join(folder, ".gitignore")
    try:
        return [_rules_of(path)]
    except (OSError, UsageError):  # no such file, or another user's
        return []


def rules_above(folder: str) -> list[Rules]:
    """Return the rules of the folders above, up to the root of the repository, after those of git's own files.

    The list is empty outside of a repository.
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
    except UsageError:  # another user put it into a shared folder
        return False
    return os.path.exists(path)


def _rules_of_git(repository: str) -> list[Rules]:
    """Return the user's rules for all repositories, then this repository's uncommitted ones. Source: gitignore(5)."""
    rules = []
    for path in (_users_ignore(), os.path.join(_git_folder(repository), "info", "exclude")):
        with contextlib.suppress(OSError, UsageError):  # no such file, or another user's
            rules.append(dataclasses.replace(_rules_of(path), folder=repository))
    return rules


def _git_folder(repository: str) -> str:
    """Return git's folder. In an additional worktree or a submodule, `.git` is a file with its path."""
    path = os.path.join(repository, ".git")
    if os.path.isfile(path):
        path = _path_in(path)
    common = os.path.join(path, "commondir")
    return _path_in(common) if os.path.isfile(common) else path


def _path_in(file: str) -> str:
    """Return the path that a file of git contains, which is relative to that file."""
    # No such file, or another user's: git's folder is the usual one.
    with contextlib.suppress(OSError, UsageError), _opened(file) as text:
        return os.path.normpath(os.path.join(os.path.dirname(file), text.read().removeprefix("gitdir:").strip()))
    return file


def _opened(path: str) -> TextIO:
    check_path(path)
    return open(path, encoding="utf-8", errors="surrogateescape")


def _users_ignore() -> str:
    folder = os.path.join(os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config"), "git")
    for path in (os.path.expanduser("~/.gitconfig"), os.path.join(folder, "config")):
        with contextlib.suppress(OSError, UsageError), _opened(path) as file:  # no such file, or another user's
            if match := _EXCLUDES_FILE.search(file.read()):
                return os.path.expanduser(match[1].strip().strip('"'))
    return os.path.join(folder, "ignore")
