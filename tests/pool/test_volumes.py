"""Volumes of pools of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.bootstrap.volumes import list_volumes, remove_volume
from skyward.errors import ProviderError, UsageError
from skyward.ssh import SSHResult
from skyward.ssh.command import run_process
from tests.waiting import until


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of this test's volumes."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path / "data" / "skyward" / "volumes"


def here(command: str, **options: Any) -> SSHResult:
    return run_process(["sh", "-c", command], **options)


@sky.compute
def add(path: str, name: str, text: str) -> str:
    folder = sky.volume(path)
    (folder / name).write_text(text)
    return os.fspath(folder)


@sky.compute
def contents(path: str) -> dict[str, str]:
    folder = sky.volume(path)
    return {name: (folder / name).read_text() for name in sorted(os.listdir(folder))}


@sky.compute
def folders() -> dict[str, str]:
    info = sky.instance_info()
    assert info is not None
    return dict(info.volumes)


def opened(**options: object) -> sky.ComputePool:
    options = {"volumes": {"/data": sky.Volume("cache")}, "logs": False, **options}
    return sky.ComputePool(sky.Local(), **options)  # type: ignore[arg-type]


def test_a_volume_outlives_the_pool_and_is_shared_by_all_of_its_nodes(data: Path) -> None:
    with opened(nodes=2) as pool:
        assert add("/data", "a", "1") >> pool.node(0) == str(data / "cache")
        assert contents("/data") @ pool == [{"a": "1"}] * 2
    with opened(volumes={"elsewhere": "cache", "~/new": sky.Volume("other")}) as pool:
        assert contents("elsewhere") >> pool == {"a": "1"}
        assert folders() >> pool == {"elsewhere": str(data / "cache"), "~/new": str(data / "other")}
    assert (data / "cache").stat().st_mode & 0o777 == 0o700
    assert not Path("/data").exists()
    assert not Path("elsewhere").exists()


def test_processes_of_ranks_and_threads_see_volumes() -> None:
    with opened(nodes=2, executor="thread", concurrency=2) as pool:
        assert len(set(add("/data", "a", "1") @ pool)) == 1
        assert len(set(add.with_options(nodes=2)("/data", "b", "2") >> pool)) == 1, "ranks are processes of their own"


def test_an_unknown_volume_is_named_with_the_nearest() -> None:
    with opened() as pool, pytest.raises(UsageError, match=r"volume='/dat': no such .*; did you mean '/data'\?"):
        contents("/dat") >> pool
    with opened(volumes=None) as pool, pytest.raises(UsageError, match=r"set ComputePool\(volumes="):
        contents("/data") >> pool
    with pytest.raises(UsageError, match="runs in no task"):
        sky.volume("/data")


def test_a_folder_that_cannot_be_created_ends_the_start(tmp_path: Path, data: Path) -> None:
    data.parent.mkdir(parents=True)
    data.write_text("a file")
    with pytest.raises(ProviderError, match=r"volumes\['/data'\]: the folder of Volume\('cache'\) cannot be created"):
        opened().start()


PROGRAM = """
import os, sys, time
import skyward as sky
from tests.pool.test_volumes import add, opened
with opened() as pool:
    add("/data", "a", "1") >> pool
    print(*(machine.pid for machine in pool._life._machines), flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("victim", ["client", "node"])
def test_deaths_leave_the_files_and_no_lock(data: Path, victim: str) -> None:
    program = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True)
    try:
        assert program.stdout is not None
        node = int(program.stdout.readline())
        with pytest.raises(UsageError, match="volume='cache': a pool uses it"):
            remove_volume(here, "cache")
        os.kill(program.pid if victim == "client" else node, signal.SIGKILL)
        if victim == "node":  # it is replaced, and the new one uses the volume
            program.kill()
        until(lambda: not list_volumes(here)[0].is_in_use, 60)
        assert (data / "cache" / "a").read_text() == "1"
        assert remove_volume(here, "cache").name == "cache"
        assert os.listdir(data) == []
    finally:
        program.kill()
        program.communicate()
