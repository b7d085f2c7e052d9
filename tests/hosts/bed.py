"""A bed: one bridge, one range of addresses and one folder, for the hosts that a test session makes.

A session claims the first number whose lock is free. Its reaper process holds the lock and only waits for the session's
end, however that comes. Then it takes everything down. Leftovers of a dead reaper are taken down by the next session
that claims the number. Everything that runs in a host is found by its network namespace, so nothing can hide.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.hosts.cgroups import remove
from tests.waiting import until

__all__ = ["ROOT", "RUN", "Bed", "ip", "pids_in", "run", "started", "take_down", "tidied"]

RUN = Path("/run/skyward-tests")
ROOT = Path(__file__).parent.parent.parent
_HIGHEST = 99
_INOTIFY = Path("/proc/sys/fs/inotify/max_user_instances")
_INOTIFY_INSTANCES = 4096


class Bed:
    """The network of one test session: `address` is this machine's on the bridge, by which hosts reach it.

    `Bed.claim()` makes it. `Bed(number)` in another process of the same session uses the same one. The bridge leads
    nowhere else: no route, no NAT.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.name = f"skyt{number}"
        self.folder = RUN / str(number)
        self.network = f"10.99.{number}"
        self.address = f"{self.network}.1"
        self.cloud_network = f"10.{100 + number}"
        """Of the machines of the EC2: these two numbers, and /16."""
        self.cloud_address = f"{self.cloud_network}.0.1"
        """This machine's address as those machines see it."""
        self.key_file = self.folder / "id_ed25519"
        """The key that root and the ordinary users of every host let in."""
        self.known_hosts = self.folder / "known_hosts"
        self.ssh_config = self.folder / "ssh_config"
        """`ssh -F` with this knows every host by its name."""
        self._reaper: subprocess.Popen[bytes] | None = None

    @classmethod
    def claim(cls) -> Bed:
        """Claim a bed. `close` it. If this process is killed first, its reaper closes it."""
        for number in range(1, _HIGHEST + 1):
            with tidied(number) as lock:
                if lock is not None:
                    bed = cls(number)
                    bed._open(lock)
                    return bed
        raise RuntimeError(f"all {_HIGHEST} beds under {RUN} are in use")

    def _open(self, lock: int) -> None:
        _allow_many_hosts()
        self._reaper = subprocess.Popen(
            [sys.executable, "-m", "tests.hosts.reaper", str(self.number), str(os.getpid())],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            pass_fds=[lock],
            start_new_session=True,
        )
        (self.folder / "owned").mkdir(parents=True)
        ip("link", "add", self.name, "type", "bridge")
        # The length of a bridge's name is limited. So is the time: without a spanning tree, ports forward at once.
        ip("link", "set", self.name, "type", "bridge", "stp_state", "0", "forward_delay", "0")
        ip("addr", "add", f"{self.address}/24", "dev", self.name)
        ip("addr", "add", f"{self.cloud_address}/16", "dev", self.name)
        ip("link", "set", self.name, "up")
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "tests", "-f", self.key_file], check=True)
        self.known_hosts.touch()
        self.ssh_config.touch()

    def own(self, process: subprocess.Popen[bytes]) -> None:
        """Make sure that `process` does not outlive the session."""
        (self.folder / "owned" / str(process.pid)).write_text(started(process.pid) or "")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the files that the processes of a session share, before a change of them."""
        with open(self.folder / "lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def close(self) -> None:
        """Take everything down. This takes seconds, whatever runs in the hosts."""
        if self._reaper is not None:
            self._reaper.communicate(b"end\n", timeout=60)
            self._reaper = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _allow_many_hosts() -> None:
    """Raise the limit of inotify instances.

    root has 128 by default, and the systemd of each host takes seven. One that gets none boots indefinitely, without
    sshd. The limit stays raised until the machine's next boot.
    """
    with suppress(OSError):  # read-only in some containers
        if int(_INOTIFY.read_text()) < _INOTIFY_INSTANCES:
            _INOTIFY.write_text(f"{_INOTIFY_INSTANCES}\n")


@contextmanager
def tidied(number: int) -> Iterator[int | None]:
    """Take the lock of bed `number` and remove the leftovers of a dead session. Returns None if a live one has it."""
    RUN.mkdir(exist_ok=True)
    lock = os.open(RUN / f"{number}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
            return
        take_down(number)
        yield lock
    finally:
        os.close(lock)


def take_down(number: int) -> None:
    """End every process of bed `number`, and remove its namespaces, mounts, bridge and folder. Idempotent."""
    bed = Bed(number)
    owned = bed.folder / "owned"
    killed: dict[int, str | None] = {}
    for record in owned.iterdir() if owned.exists() else ():
        if started(int(record.name)) == record.read_text():
            _kill([int(record.name)], killed)
    names = [path.name for path in Path("/run/netns").glob(f"{bed.name}-*")]
    for name in names:
        until(lambda name=name: not _kill(pids_in(name), killed))  # type: ignore[misc]
        ip("netns", "del", name)
    # A process that is ending is in no namespace, but still exists.
    until(lambda: not any(start is not None and started(pid) == start for pid, start in killed.items()))
    for mounted in sorted(_mounts(bed.folder), reverse=True):
        subprocess.run(["umount", "-l", mounted], check=True)
    if Path(f"/sys/class/net/{bed.name}").exists():
        ip("link", "del", bed.name)
    for left in Path("/run/systemd/nspawn/propagate").glob(f"{bed.name}-*"):
        with suppress(OSError):
            left.rmdir()
    remove(f"{bed.name}-*")
    shutil.rmtree(bed.folder, ignore_errors=True)


def pids_in(netns: str) -> list[int]:
    """Return the processes in the network namespace `netns`, or none if there is no such namespace."""
    try:
        inode = os.stat(f"/run/netns/{netns}").st_ino
    except FileNotFoundError:
        return []
    wanted, found = f"net:[{inode}]", []
    for entry in os.listdir("/proc"):
        with suppress(OSError):
            if entry.isdigit() and os.readlink(f"/proc/{entry}/ns/net") == wanted:
                found.append(int(entry))
    return found


def ip(*arguments: str, netns: str | None = None) -> None:
    """Run `ip`. Raises RuntimeError with its output."""
    run(["ip", *(["-n", netns] if netns else []), *arguments])


def run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


def _kill(pids: Sequence[int], killed: dict[int, str | None]) -> bool:
    """Kill the processes, and note them in `killed`. Returns whether there were any."""
    for pid in pids:
        killed[pid] = started(pid)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if pids:
        time.sleep(0.01)
    return bool(pids)


def started(pid: int) -> str | None:
    """Return the start in ticks since boot, which with the number names a process for good, or None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[19] if fields[0] not in "ZX" else None


def _mounts(below: Path) -> list[str]:
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return [target for target in (line.split()[1] for line in lines) if target.startswith(f"{below}/")]
