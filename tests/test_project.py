"""The files for contributors: workflows, hooks, templates and the release command."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
OURS = sorted(path for path in (ROOT / ".github").rglob("*.yml"))


def loaded(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.name)
def test_files_for_the_forge_are_yaml(path: Path) -> None:
    assert isinstance(loaded(path), dict)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_call_targets_of_the_makefile_only(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = [step["run"] for job in loaded(path)["jobs"].values() for step in job["steps"] if "run" in step]
    assert commands
    assert {tuple(command.split()[:1]) for command in commands} == {("make",)}
    assert {command.split()[1] for command in commands} <= targets


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_every_job_has_a_time_limit_and_no_more_rights_than_it_needs(path: Path) -> None:
    workflow = loaded(path)
    assert workflow["permissions"] == {"contents": "read"}
    assert all(job["timeout-minutes"] <= 90 for job in workflow["jobs"].values())


def test_the_tests_run_on_every_version_that_the_package_names() -> None:
    named = re.findall(r"Programming Language :: Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    matrix = loaded(ROOT / ".github" / "workflows" / "tests.yml")["jobs"]["fast"]["strategy"]["matrix"]
    assert matrix["python-version"] == named


def test_hooks_run_the_tools_of_the_environment() -> None:
    hooks = [hook for repo in loaded(ROOT / ".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]
    tools = [hook["entry"].split()[0] for hook in hooks]
    assert tools
    for tool in tools:
        assert tool.startswith(".venv/bin/")
        assert Path(sys.executable).with_name(Path(tool).name).exists()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Make a repository with the release command, and nothing to release."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "release", tmp_path / ".ci")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "-c", "user.name=t", "-c", "user.email=t@localhost", "commit", "-q", "-m", "begin")
    return tmp_path


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=folder, check=True)


def release(folder: Path, version: str) -> str:
    done = subprocess.run(["sh", ".ci/release", version], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stderr


@pytest.mark.parametrize("version", ["", "v1", "1..2", "1.0/2"])
def test_a_release_refuses_an_invalid_version(checkout: Path, version: str) -> None:
    assert "write something like 0.2.0" in release(checkout, version)


def test_a_release_refuses_uncommitted_work_and_keeps_it(checkout: Path) -> None:
    (checkout / "draft.txt").write_text("half done")
    assert "Commit or stash" in release(checkout, "0.2.0")
    assert (checkout / "draft.txt").read_text() == "half done"


def test_a_release_refuses_a_released_version(checkout: Path) -> None:
    git(checkout, "tag", "v0.2.0")
    assert "choose the next version" in release(checkout, "0.2.0")
