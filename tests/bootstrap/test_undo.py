"""Work that began for a node is ended by the name of the node's folder, and nothing else that runs there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyward.bootstrap.scripts import marked, script, undo
from skyward.core.cgroups import groups_of
from skyward.errors import ProviderError
from skyward.ssh.command import SSHResult
from tests.waiting import until

NOBODY = 65534

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a node is Linux: its processes are found in /proc")


def run(command: str, *, input: object = None, timeout_s: float, on_line: object = None) -> SSHResult:  # noqa: A002
    done = subprocess.run(["sh", "-c", command], input=input, capture_output=True, timeout=timeout_s, check=False)  # type: ignore[call-overload]
    return SSHResult(code=done.returncode, stdout=done.stdout, stderr=done.stderr)


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(f"/tmp/skyward-{os.getuid()}") / f"undo.-{uuid.uuid4().hex[:6]}"
    path.mkdir(parents=True)
    yield path
    assert not path.exists()


def test_processes_of_the_node_are_ended_however_they_detached_themselves(folder: Path) -> None:
    other = folder.with_name(folder.name.replace("undo.", "undox"))
    other.mkdir()
    waits = f"exec {sys.executable} -c 'import os, time; os.fork() or os.setsid(); time.sleep(60)'"
    process, spared = (
        subprocess.Popen(["sh", "-c", marked(waits, path.name)], start_new_session=True) for path in (folder, other)
    )
    until(lambda: len(_of(folder)) == len(_of(other)) == 2)
    undo(run, [folder.name, "never-begun"])
    process.wait(60)
    assert _of(folder) == []
    until(lambda: len(_of(other)) == 2)
    undo(run, [folder.name])
    undo(run, [other.name])
    spared.wait(60)
    assert not other.exists()


@pytest.mark.root
def test_the_control_groups_of_the_node_are_removed(folder: Path) -> None:
    above = next((Path(group.folder) for group in groups_of()), None)
    if above is None:
        pytest.skip("no control groups here")
    groups, others = (above / f"skyward.1.1.{name}" for name in (folder.name, f"{folder.name}0"))
    for path in (groups, others):
        (path / "1").mkdir(parents=True)
    undo(run, [folder.name])
    assert not groups.exists()
    (others / "1").rmdir()
    others.rmdir()


def test_a_shell_that_does_not_answer_is_an_error(folder: Path) -> None:
    def dumb(command: str, **options: object) -> SSHResult:
        return SSHResult(code=127, stdout=b"", stderr=b"sh: not found")

    with pytest.raises(ProviderError, match=r"code 127.*sh: not found"):
        undo(dumb, [folder.name])
    folder.rmdir()


def _of(folder: Path) -> list[int]:
    mark = f"SKYWARD_NODE={folder.name}\0".encode()
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            if mark in Path(f"/proc/{entry}/environ").read_bytes():
                found.append(int(entry))
        except OSError:
            continue
    return found


# Parent folder of nodes' folders ------------------------------------------------------------------------------------


@pytest.fixture
def base() -> Iterator[Path]:
    """Return the base folder of a user who is not on this machine."""
    path = Path(f"/tmp/skyward-{os.getpid()}{NOBODY}")
    yield path
    if path.is_symlink() or path.is_file():
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)


def run_on_node(base: Path, text: str) -> str:
    number = base.name.rpartition("-")[2]
    order = f"id() {{ echo {number}; }}\n".encode() + script(("node.sh",), {}) + f"\n{text}\n".encode()
    return subprocess.run(["sh"], input=order, capture_output=True, check=False, timeout=60).stdout.decode()


def test_a_nodes_folder_is_made_where_only_its_user_can_enter(base: Path) -> None:
    assert run_on_node(base, "make_folder pool-0") == f"\1folder {base}/pool-0\n"
    assert base.stat().st_mode & 0o777 == 0o700
    base.chmod(0o755)
    assert run_on_node(base, "make_folder pool-1") == f"\1folder {base}/pool-1\n"
    assert base.stat().st_mode & 0o777 == 0o700


def test_a_nodes_folder_is_not_made_in_a_link_or_where_everybody_may_write(base: Path, tmp_path: Path) -> None:
    base.symlink_to(tmp_path)
    (tmp_path / "pool-0").mkdir()
    assert "remove it" in run_on_node(base, "make_folder pool-1")
    run_on_node(base, "nodes=pool-0\n" + script(("undo.sh",), {}).decode())
    assert [path.name for path in tmp_path.iterdir()] == ["pool-0"]
    base.unlink()
    base.mkdir()
    base.chmod(0o777)
    assert "remove it" in run_on_node(base, "make_folder pool-1")
    assert not list(base.iterdir())


@pytest.mark.root
def test_a_nodes_folder_is_not_made_in_another_users(base: Path) -> None:
    base.mkdir(mode=0o700)
    os.chown(base, NOBODY, NOBODY)
    assert "remove it" in run_on_node(base, "make_folder pool-1")
    assert not list(base.iterdir())
