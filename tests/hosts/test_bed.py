"""Nothing of a session outlives it, however it ends, and two sessions do not disturb each other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts import base
from tests.hosts.bed import ROOT, Bed, pids_in, tidied
from tests.waiting import until

SESSION = """
import os, time
from tests.hosts.bed import Bed
from tests.hosts.ec2 import Ec2
from tests.hosts.host import Host
bed = Bed.claim()
host = Host(bed, f'orphan{os.getpid()}', f'{bed.network}.10').start().wait_ssh()
ec2 = Ec2(bed)
print(bed.number, bed._reaper.pid, ec2._process.pid, host.machine, flush=True)
time.sleep(600)
"""


class _Session:
    """A separate session, with a host and an EC2. Another may claim the number of its bed as soon as it is free."""

    def __init__(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", SESSION], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        with self.process.stdout:
            number, reaper, server, self.machine = self.process.stdout.readline().split()
        self.number, self.reaper = int(number), int(reaper)
        self.pids = [*pids_in(self.machine), int(server)]
        assert len(self.pids) >= 5

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def assert_gone(self) -> None:
        assert not any(_is_alive(pid) for pid in self.pids)
        assert not (Path("/run/netns") / self.machine).exists()
        assert self.machine not in Path("/proc/self/mounts").read_text()


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.hosts
def test_a_killed_session_leaves_nothing() -> None:
    session = _Session()
    session.kill()
    until(lambda: not _is_alive(session.reaper))
    session.assert_gone()


@pytest.mark.hosts
def test_leftovers_of_a_killed_reaper_are_removed_by_the_next_session() -> None:
    session = _Session()
    os.kill(session.reaper, signal.SIGKILL)
    session.kill()
    until(lambda: not _is_alive(session.reaper))  # it holds the lock until it has ended
    assert any(_is_alive(pid) for pid in session.pids)
    with tidied(session.number) as lock:  # as Bed.claim() does with each number until one is free
        if lock is not None:  # else another session was faster, and has done it
            session.assert_gone()
    until(lambda: not any(_is_alive(pid) for pid in session.pids))


@pytest.mark.hosts
def test_two_sessions_have_two_beds(bed: Bed) -> None:
    with Bed.claim() as other:
        assert other.number != bed.number
        assert Path(f"/sys/class/net/{other.name}").exists()
    assert Path(f"/sys/class/net/{bed.name}").exists()


def test_two_processes_that_need_the_same_cache_folder_make_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "CACHE", tmp_path)
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom tests.hosts import base\nbase.CACHE = Path(sys.argv[1])\n"
        "def make(folder):\n    time.sleep(0.3)\n    (folder / 'made').write_text('x')\n    print('made')\n"
        "assert (base.made_once('thing', make) / 'made').read_text() == 'x'\n"
    )
    both = [
        subprocess.Popen([sys.executable, "-c", script, tmp_path], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [process.communicate(timeout=60)[0] for process in both]
    assert sorted(said) == ["", "made\n"]
    assert [process.returncode for process in both] == [0, 0]
    assert not list(tmp_path.glob("thing.*[!k]"))


def test_an_incomplete_folder_is_not_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "CACHE", tmp_path)

    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        base.made_once("thing", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["thing.lock"]


@pytest.mark.parametrize("is_required", [False, True])
def test_without_hosts_tests_are_skipped_with_a_reason_or_fail_if_hosts_are_required(is_required: bool) -> None:
    environment = {**os.environ, "PATH": "/nowhere", "SKYWARD_REQUIRE_HOSTS": "1" if is_required else ""}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            f"{__file__}::{test_two_sessions_have_two_beds.__name__}",
        ],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    why = "hosts need" if sys.platform == "linux" else "hosts are made of Linux containers"
    assert why in done.stdout
    assert ("1 failed" if is_required else "1 skipped") in done.stdout.replace("1 error", "1 failed")
