"""A user's view of a pool on hosts: its start, its visibility for others, a shell on a node."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import skyward as sky
from skyward import events
from skyward.state import live
from tests.console.on_a_terminal import Program
from tests.providers.conftest import Hosts

double = sky.compute(lambda x: 2 * x)


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "skyward"


def skyward(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    argv = [sys.executable, "-m", "skyward", *arguments]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, env=env, check=False)


def test_its_start_is_reported_phase_by_phase(sshds: Hosts) -> None:
    pool = sky.ComputePool(provider=sshds.ssh(), nodes=2, logs=False)
    stream = pool.events()
    with pool:
        assert double(2) @ pool == [4, 4]
    seen = list(stream)
    for node in (0, 1):
        began = [event.phase for event in seen if isinstance(event, events.PhaseStarted) and event.node == node]
        ended = [event.phase for event in seen if isinstance(event, events.PhaseEnded) and event.node == node]
        assert began
        assert sorted(began) == sorted(ended)


def test_a_shell_and_a_command_run_on_a_node_of_another_programs_pool(sshds: Hosts) -> None:
    with sky.ComputePool(provider=sshds.ssh(transport="openssh"), nodes=2, name="lab", logs=False):
        assert [node.node for node in live.find("lab").nodes] == [0, 1]
        done = skyward("ssh", "lab", "1", "--", "echo", "$0 here;", "exit 7")
        assert (done.stdout, done.returncode) == ("$0 here; exit 7\n", 0), done.stderr
        done = skyward("ssh", "lab", "1", "--", "echo $((6 * 7)); exit 7")
        assert (done.stdout, done.returncode) == ("42\n", 7), done.stderr
        code = "import os, sys; os.execv(sys.executable, [sys.executable, '-m', 'skyward', 'ssh', 'lab'])"
        with Program(code) as shell:
            shell.type(b"tty; echo $((40 + 2)) is said; exit 5\n")
            assert shell.wait() == 5
            text = "\n".join(shell.screen.all_lines)
            assert "42 is said" in text
            assert "/dev/pts/" in text
        assert skyward("ls").stdout.splitlines()[1].split()[1:4] == ["ssh", "open", "2/2"]


def test_plain_lines_report_each_phase_once_and_when_it_is_ready(
    sshds: Hosts, capsys: pytest.CaptureFixture[str]
) -> None:
    with sky.ComputePool(provider=sshds.ssh(), nodes=2, name="lab") as pool:
        double(1) >> pool
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "skyward: lab: starting 2 nodes on ssh"
    assert any(line.startswith("skyward: lab: ready after ") for line in lines)
    assert lines[-1].startswith("skyward: lab: closed after ")
    assert len(lines) < 16
