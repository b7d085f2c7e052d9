"""Volumes of nodes that are reached over SSH, and their links."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from pathlib import Path

import pytest

import skyward as sky
from skyward import cli
from skyward.core.process import processes_below
from skyward.ssh.connect import Transport
from tests.providers.conftest import Hosts
from tests.waiting import until

# They travel by value, because this module is not on the nodes.
write = sky.compute(lambda path, text: __import__("pathlib").Path(path).write_text(text))
folder_of = sky.compute(lambda path: str(__import__("skyward").volume(path)))
read = sky.compute(lambda path: __import__("pathlib").Path(path).read_text())


def test_tasks_find_volumes_at_their_paths(sshds: Hosts, transport: Transport, tmp_path: Path) -> None:
    link = tmp_path / "link"
    volumes = {"data/deep": sky.Volume("one"), str(link): sky.Volume("two")}
    with sky.ComputePool(sshds.ssh("host0", transport=transport), volumes=volumes, logs=False) as pool:
        folder = folder_of("data/deep") >> pool
        assert folder == str(sshds.data / "skyward" / "volumes" / "one")
        write("data/deep/a", transport) >> pool
        write(str(link / "b"), transport) >> pool
        assert link.readlink() == Path(folder_of(str(link)) >> pool)
        with sky.ComputePool(sshds.ssh("host1"), volumes={str(link): "two"}, logs=False) as second:
            assert read(str(link / "b")) >> second == transport
        assert link.is_symlink()  # the first pool uses it
    assert not link.is_symlink()
    assert Path(folder, "a").read_text() == transport


def test_where_something_is_there_is_no_link(sshds: Hosts, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "mine").write_text("kept")
    paths = [str(tmp_path / "mine"), str(tmp_path / "no" / "parent")]
    with (
        caplog.at_level(logging.WARNING, "skyward"),
        sky.ComputePool(sshds.ssh("host0"), volumes=dict.fromkeys(paths, "one"), logs=False) as pool,
    ):
        assert {folder_of(path) >> pool for path in paths} == {str(sshds.data / "skyward" / "volumes" / "one")}
    warnings = [record.getMessage() for record in caplog.records]
    assert any("mine'] has no link at that path: something else is there; in tasks, use" in text for text in warnings)
    assert any("parent'] has no link at that path: no such file" in text for text in warnings)
    assert (tmp_path / "mine").read_text() == "kept"


@pytest.mark.parametrize("victims", ["agent", "all"])
def test_a_killed_nodes_link_is_removed_or_taken_over(sshds: Hosts, tmp_path: Path, victims: str) -> None:
    link = tmp_path / "link"
    pool = sky.ComputePool(sshds.ssh("host0"), volumes={str(link): "one"}, logs=False)
    with pytest.raises(sky.errors.SkywardError), pool:
        machine = pool._life.machine(0)  # no public name has the pids of a node
        watchdog = machine.handle.watchdog
        below = processes_below(watchdog)
        for pid in (watchdog, *below) if victims == "all" else below[1:2]:
            with contextlib.suppress(ProcessLookupError):  # it died with its parent
                os.kill(pid, signal.SIGKILL)
        folder_of(str(link)) >> pool
    if victims == "agent":
        until(lambda: not link.is_symlink())
    with sky.ComputePool(sshds.ssh("host0"), volumes={str(link): "two"}, logs=False) as second:
        assert link.readlink().name == "two"
        assert (folder_of(str(link)) >> second).endswith("/two")
    assert not link.is_symlink()


def test_the_command_lists_and_removes_volumes_of_a_host(
    sshds: Hosts, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ssh = sshds.ssh("host0")
    monkeypatch.setattr("skyward.providers.ssh.SSH", lambda hosts: ssh)
    with sky.ComputePool(ssh, volumes={"data": "three"}, logs=False) as pool:
        write("data/a", "1") >> pool
        assert cli.main(["volume", "list", "--host", "host0"]) == 0
        assert "three" in capsys.readouterr().out
        assert cli.main(["volume", "remove", "three", "--host", "host0"]) == 1
        assert "a pool uses it" in capsys.readouterr().err
    assert cli.main(["volume", "remove", "three", "--host", "host0"]) == 0
    assert not (sshds.data / "skyward" / "volumes" / "three").exists()
    assert cli.main(["volume", "remove", "three", "--host", "host0"]) == 1
    assert "no such volume" in capsys.readouterr().err
