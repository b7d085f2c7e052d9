"""Rules of .gitignore have the same meaning as in git."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from skyward.bootstrap.ignore import Rules, rules_above, rules_in

PATHS = (
    "a.pyc",
    "keep.pyc",
    "build/x.py",
    "src/build/x.py",
    "src/data/deep/x.csv",
    "src/data/x.csv",
    "doc/a/b/c.txt",
    "doc/c.txt",
    "one[1].txt",
    "one1.txt",
    "space .txt",
    "hash#",
    "!bang",
    "x/y/z",
    "x/z",
    "log.txt",
    "sub/log.txt",
)
RULES = (
    "*.pyc\n!keep.pyc",
    "build/",
    "/build",
    "src/data",
    "data/*.csv",
    "**/data",
    "doc/**/c.txt",
    "doc/**",
    "one[0-9].txt",
    "one[!0-9]*",
    r"\!bang",
    "# hash",
    "x/**/z",
    "/log.txt",
    "log.???",
    "*\n!src/\n!src/data/",
    "*\n!*/\n!*.py",
    "doc/**\n!doc/*/",
    "data/\n!data/\n*.csv",
    "log[z-a]*\nx/z",
)


@pytest.mark.parametrize("rules", RULES)
def test_files_that_git_ignores_are_ignored(tmp_path: Path, rules: str) -> None:
    for path in PATHS:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("")
    (tmp_path / ".gitignore").write_text(rules)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    asked = subprocess.run(
        ["git", "-C", str(tmp_path), "check-ignore", "--no-index", *PATHS], capture_output=True, text=True, check=False
    )
    ours = Rules.parse(str(tmp_path), rules.splitlines())
    found = []
    for path in PATHS:
        steps = [*reversed(Path(path).parents[:-1]), Path(path)]  # an ignored folder is not searched
        if any(ours.verdict(str(tmp_path / step), is_folder=str(step) != path) for step in steps):
            found.append(path)
    assert found == asked.stdout.splitlines()


def test_a_folder_below_an_ignored_one_has_only_the_rules_that_name_its_files(tmp_path: Path) -> None:
    """Code in a folder that git ignores still travels when a program starts there."""
    rules = Rules.parse(str(tmp_path), ["sandbox/", "/src/data", ".venv", "*.log"])
    for path in ("sandbox/a.py", "src/data/a.py", ".venv/src/a.py", "../.venv/src/a.py"):
        assert rules.verdict(str(tmp_path / path), is_folder=False) is None
    assert rules.verdict(str(tmp_path / "sandbox" / "a.log"), is_folder=False)
    assert rules.verdict(str(tmp_path / "sandbox" / "sandbox"), is_folder=True)


def test_only_rules_that_are_read_load_pathspec(tmp_path: Path) -> None:
    """Nodes import the providers too if a user's module names one, and they do not have pathspec."""
    code = "import sys, skyward as sky, skyward.bootstrap.code; sky.SSH, sky.AWS; print('pathspec' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_rules_that_git_keeps_elsewhere_apply_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    project, worktree = tmp_path / "project", tmp_path / "worktree"
    git = ["git", "-c", "user.name=x", "-c", "user.email=x", "-C", str(project)]
    subprocess.run(["git", "init", "-q", str(project)], check=True)
    subprocess.run([*git, "commit", "-qm", "first", "--allow-empty"], check=True)
    subprocess.run([*git, "worktree", "add", "-q", str(worktree)], check=True)
    (project / ".git" / "info").mkdir(exist_ok=True)
    (project / ".git" / "info" / "exclude").write_text("/mine.py\n!kept.py\n")
    (tmp_path / ".config" / "git").mkdir(parents=True)
    (tmp_path / ".config" / "git" / "ignore").write_text("*.local\n")

    def ignored(at: Path) -> list[str]:
        names = ("mine.py", "kept.py", "x.local", "x.everywhere")
        found = [
            name
            for name in names
            if any(rules.verdict(str(at / name), is_folder=False) for rules in rules_above(str(at)))
        ]
        asked = subprocess.run(["git", "-C", at, "check-ignore", *names], capture_output=True, text=True, check=False)
        assert found == asked.stdout.split()
        return found

    assert ignored(project) == ignored(worktree) == ["mine.py", "x.local"]
    (tmp_path / ".gitconfig").write_text('[core]\n\texcludesFile = "~/everywhere"\n')
    (tmp_path / "everywhere").write_text("*.everywhere\n")
    assert ignored(project) == ["mine.py", "x.everywhere"]


def test_rules_of_parent_folders_apply_up_to_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    (tmp_path / ".gitignore").write_text("too-far")
    project = tmp_path / "project"
    (project / "src" / "package").mkdir(parents=True)
    (project / ".git").mkdir()
    (project / ".gitignore").write_text("*.tmp")
    (project / "src" / ".gitignore").write_text("*.log")
    above = rules_above(str(project / "src" / "package"))
    assert [rules.folder for rules in above] == [str(project), str(project / "src")]
    assert rules_in(str(project / "src" / "package")) == []
    assert rules_above(str(tmp_path)) == []
