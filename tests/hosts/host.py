"""A bare Debian host on this machine: its own systemd, sshd, disk, network and host key. ssh answers in half a second.

It is a systemd-nspawn container. Its disk is an overlay on the shared base, in memory. Like a disk, it keeps its
contents until `destroy`, also over `power_loss` and `shutdown`.
"""

from __future__ import annotations

import math
import os
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tests.hosts.base import USERS, base, clock_library, layer_of_uv
from tests.hosts.bed import Bed, ip, pids_in, run, started
from tests.hosts.cgroups import entering, remove
from tests.waiting import until

__all__ = ["Host", "Process"]

# Processes of a bare host by name, and those that a login leaves for ten seconds. Somebody started all others.
_SYSTEM = {"systemd", "systemd-journal", "dbus-daemon", "systemd-logind", "sshd", "agetty", "systemd-update-"}


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process inside a host. `pid` is its number in there, `outside_pid` on this machine."""

    pid: int
    outside_pid: int
    uid: int
    name: str
    command: str


class Host:
    """One host. Call `start` to boot it. All methods block, and raise AssertionError if they take too long.

    A second `Host` with the same bed and name, in another process of the session, may do everything except start it.

    `disk_mib` bounds its disk, which takes memory only as it fills. `users` maps users who may log in by ssh to their
    public keys. None means root and the ordinary users, with the key of the bed. `has_uv` spares each pool the upload
    of uv: half a second of processor time. `layers` are folders whose files lie over those of the base. `shared` are
    folders of this machine that it has at the same place.
    """

    def __init__(
        self,
        bed: Bed,
        name: str,
        address: str,
        *,
        disk_mib: int = 8192,
        users: Mapping[str, str] | None = None,
        has_uv: bool = False,
        layers: Sequence[Path] = (),
        shared: Sequence[Path] = (),
    ) -> None:
        self.bed = bed
        self.name = name
        self.address = address
        self.machine = f"{bed.name}-{name}"
        self.folder = bed.folder / "hosts" / name
        self.boot_s = math.nan
        """How long the last start took until ssh answered, in seconds."""
        self._disk_mib = disk_mib
        self._users = users
        self._has_uv = has_uv
        self._layers, self._shared = tuple(layers), tuple(shared)
        third, last = (int(part) for part in address.split(".")[2:])
        self._is_rented = address.startswith(f"{bed.cloud_network}.")
        self._veth = f"{bed.name}{'c' if self._is_rented else '-'}{third:02x}{last:02x}"
        # A network card keeps its number over a boot. With another one, peers would send to the old for a minute.
        self._mac = f"02:99:{bed.number:02x}:{int(self._is_rented):02x}:{third:02x}:{last:02x}"
        self._container: subprocess.Popen[bytes] | None = None

    def __repr__(self) -> str:
        return f"Host({self.name} {self.address}, {'on' if self.is_on else 'off'})"

    # Power.

    @property
    def is_on(self) -> bool:
        """True if it has power. A host that powered itself off has none."""
        if self._container is not None:
            return self._container.poll() is None
        record = self.folder / "container"  # another process of the session may have started it
        return record.exists() and started(int((words := record.read_text().split())[0])) == words[1]

    @property
    def _pid(self) -> int:
        return int((self.folder / "container").read_text().split()[0])

    def start(self, *, ssh_after_s: float = 0.0) -> Host:
        """Boot, and return at once. See `wait_ssh`.

        `ssh_after_s` makes a slow boot: the host is there, but its sshd starts only then. With `math.inf` the boot
        never ends.
        """
        assert not self.is_on, f"{self.name} is on"
        self.make()
        self._set_boot_delay(ssh_after_s)
        self._make_network()
        self._begun = time.monotonic()
        command = entering(self.machine)
        command += ["systemd-nspawn", "-q", "-D", str(self._root), "--boot", "--register=no", "--keep-unit"]
        command += [f"--machine={self.machine}", f"--hostname={self.name}", "--console=pipe", "--resolv-conf=off"]
        command += [f"--network-namespace-path=/run/netns/{self.machine}", "--link-journal=no", "--timezone=off"]
        command += [f"--bind={folder}" for folder in self._shared]
        with open(self.folder / "console", "ab") as console:
            self._container = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=console, stderr=console, start_new_session=True
            )
        self.bed.own(self._container)
        (self.folder / "container").write_text(f"{self._container.pid} {started(self._container.pid)}")
        return self

    def wait_ssh(self, within_s: float = 30.0) -> Host:
        """Wait until its sshd answers."""
        until(lambda: not self.is_on or self.answers_ssh(), within_s)
        assert self.is_on, f"{self.name} did not boot: {self.console()[-2000:]}"
        self.boot_s = time.monotonic() - self._begun
        return self

    def answers_ssh(self, timeout_s: float = 1.0) -> bool:
        """Return whether an sshd introduces itself at port 22."""
        try:
            with socket.create_connection((self.address, 22), timeout=timeout_s) as connection:
                connection.settimeout(timeout_s)
                return connection.recv(4) == b"SSH-"
        except OSError:
            return False

    def shutdown(self, within_s: float = 60.0) -> None:
        """Shut down cleanly, in about 2 s. The disk stays, and `start` boots it again."""
        assert self.is_on, f"{self.name} is off"
        os.kill(self._pid, signal.SIGTERM)
        self.wait_off(within_s)

    def power_loss(self, *, is_silent: bool = True) -> None:
        """End everything in it at once. The disk stays.

        With `is_silent`, its peers hear nothing, as when a cable is pulled. Otherwise its connections end with a FIN or
        reset, as when a kernel crashes in a rack whose switch reports it.
        """
        if is_silent and self.is_on:
            self.cut_link()
        if self.is_on:
            with suppress(ProcessLookupError):
                os.kill(self._init(), signal.SIGKILL)
            until(self._has_lost_power, within_s=60)
        self.wait_off()

    @property
    def exit_code(self) -> int | None:
        """Exit code of the host: 0 by itself, 133 to boot again, another after a power loss, None while it is on.

        Only the process that started it knows.
        """
        return None if self._container is None else self._container.poll()

    def wait_off(self, within_s: float = 60.0) -> None:
        """Wait until it has no power, because of an order or by itself."""
        until(lambda: not self.is_on, within_s)
        if self._container is not None:
            self._drop_network()

    def destroy(self) -> None:
        """Take its power, and its disk too. Idempotent."""
        self.power_loss(is_silent=False)
        with self.bed.locked():
            for mounted in (self._root, self._disk):
                if os.path.ismount(mounted):
                    run(["umount", "-l", str(mounted)])
            shutil.rmtree(self.folder, ignore_errors=True)
            _write_books(self.bed)
        with suppress(OSError):
            Path(f"/run/systemd/nspawn/propagate/{self.machine}").rmdir()
        remove(self.machine)

    def console(self) -> str:
        """Return the output on its console, over all its boots."""
        path = self.folder / "console"
        return path.read_text(errors="replace") if path.exists() else ""

    # Network.

    def cut_link(self) -> None:
        """Let nothing through in either direction, without a notice to anybody."""
        # This is our side of the cable. If it were the host's, the kernel there would notice and tell its programs.
        ip("link", "set", self._veth, "down")

    def restore_link(self) -> None:
        """Undo `cut_link`."""
        ip("link", "set", self._veth, "up")

    @contextmanager
    def link_cut(self) -> Iterator[None]:
        """Cut the link for the length of the block."""
        self.cut_link()
        try:
            yield
        finally:
            self.restore_link()

    def hide_from(self, address: str, *, hides_ports_only: bool = False) -> None:
        """Drop packets from `address`, so that the host can be reached only through another (a jump host).

        `hides_ports_only`: drop its new connections only, so that the host can still connect to it.
        """
        new = "tcp flags & (syn|ack) == syn " if hides_ports_only else ""
        self._nft("add table ip hidden; add chain ip hidden input { type filter hook input priority 0; }")
        self._nft(f"add rule ip hidden input ip saddr {address} {new}drop")

    def show_to_all(self) -> None:
        """Undo `hide_from`."""
        self._nft("delete table ip hidden")

    def _nft(self, commands: str) -> None:
        run(["ip", "netns", "exec", self.machine, "nft", commands])

    # Processes in it.

    def run(
        self, *command: str, stdin: str | None = None, timeout_s: float = 60.0, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in it as root, from outside: no ssh, so it works with the link cut."""
        done = subprocess.run(
            [*self.command_inside(), *command],
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if check and done.returncode:
            raise AssertionError(f"{self.name}: {shlex.join(command)} gave {done.returncode}: {done.stderr}")
        return done

    def command_inside(self) -> list[str]:
        """Return a command that runs the command behind it in the host as root, from outside, until its next boot."""
        clean = ["env", "-i", "HOME=/root", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]
        return ["nsenter", "-a", "-t", str(self._init()), *clean]

    def ssh(
        self, command: str, *, user: str = "root", options: Sequence[str] = (), timeout_s: float = 60.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a command by OpenSSH, as `user`, with the key of the bed."""
        return subprocess.run(
            ["ssh", "-F", self.bed.ssh_config, *options, f"{user}@{self.name}", command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def processes(self) -> list[Process]:
        """Return all processes in it, however they detached themselves."""
        found = []
        for pid in pids_in(self.machine):
            with suppress(OSError):
                found.append(_describe(pid))
        return sorted(found, key=lambda process: process.pid)

    def started_processes(self) -> list[Process]:
        """Return the processes beyond those of a bare host: somebody started them and did not end them.

        sshd's own processes do not count, but the ones of its sessions do.
        """
        # Names in parentheses are systemd's own, and the programs it is about to execute.
        return [process for process in self.processes() if process.name not in _SYSTEM and process.name[0] != "("]

    def memory_mib(self) -> float:
        """Return the memory of its processes, shared pages in their part, and of its disk: its cost here."""
        total_kib = 0
        for process in self.processes():
            with suppress(OSError):
                lines = Path(f"/proc/{process.outside_pid}/smaps_rollup").read_text().splitlines()
                total_kib += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        return total_kib / 1024 + self.disk_used_mib()

    # Its files.

    def path(self, inside: str) -> Path:
        """Return where this machine finds a file of it. While it is on, that includes its /tmp, /run and /dev/shm.

        Follow no absolute symbolic link of it, because that would lead to this machine's own files.
        """
        relative = PurePosixPath(inside).relative_to("/")
        return (Path(f"/proc/{self._init()}/root") if self.is_on else self._root) / relative

    def write(self, inside: str, text: str, *, mode: int = 0o644) -> None:
        """Write a file of it, as root, with the folders above it. It appears whole: a process there may wait for it."""
        path = self.path(inside)
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".{path.name}.new")
        new.write_text(text)
        new.chmod(mode)
        new.replace(path)

    def read(self, inside: str) -> str:
        """Read a file of it."""
        return self.path(inside).read_text()

    def changed_files(self) -> list[str]:
        """Return the files written to or removed from its disk since it was made, without /tmp, /run, /dev/shm."""
        upper = self._disk / "upper"
        return sorted(f"/{path.relative_to(upper)}" for path in upper.rglob("*") if not path.is_dir())

    def disk_used_mib(self) -> float:
        """Return how much of its disk is in use."""
        used = os.statvfs(self._disk)
        return (used.f_blocks - used.f_bfree) * used.f_frsize / 2**20

    @contextmanager
    def disk_full(self, inside: str = "/", *, left_kib: int = 0) -> Iterator[None]:
        """Fill the disk except for `left_kib`, for the length of the block.

        `/` is its disk. Other paths are /tmp, /run, /dev/shm, /run/user/UID, each with its own memory.
        """
        where = self._disk if inside == "/" else self.path(inside)
        before = os.statvfs(where)
        size, used = before.f_blocks * before.f_frsize, (before.f_blocks - before.f_bfree) * before.f_frsize
        self._resize(inside, max(used + left_kib * 1024, before.f_frsize))
        try:
            yield
        finally:
            self._resize(inside, size)

    def _resize(self, inside: str, size: int) -> None:
        if inside == "/":
            run(["mount", "-o", f"remount,size={size}", str(self._disk)])
        else:
            self.run("mount", "-o", f"remount,size={size}", inside)

    # Its clock.

    def set_clock(self, offset_s: float) -> None:
        """Make the time of day wrong by that much, in ssh sessions that begin from now on and the programs they start.

        This works for programs that are linked dynamically. The kernel has one clock for all, and stamps files by it.
        The monotonic clock stays unchanged. 0 puts it right.
        """
        # It is not in /etc/ld.so.preload, where sshd's sandbox would meet it. PAM reads this file for each session.
        library = self.path("/usr/local/lib/clock.so")
        if not library.exists():  # one that is in use must not be written to
            shutil.copy(clock_library(), library)
        lines = f"LD_PRELOAD=/usr/local/lib/{library.name}\nSKYWARD_TESTS_CLOCK_S={offset_s:.0f}\n"
        self.write("/etc/environment", lines if offset_s else "")

    # Making it.

    @property
    def _disk(self) -> Path:
        return self.folder / "disk"

    @property
    def _root(self) -> Path:
        return self._disk / "root"

    def _init(self) -> int:
        """Return the pid of its systemd on this machine."""
        assert self.is_on, f"{self.name} is off"
        children = Path(f"/proc/{self._pid}/task/{self._pid}/children")
        found: list[str] = []
        until(lambda: found.extend(children.read_text().split()) or found, within_s=60)  # type: ignore[func-returns-value]
        return int(found[0])

    def _has_lost_power(self) -> bool:
        """Return whether it is off. During a start, the child that was killed may not have been its systemd yet."""
        with suppress(OSError):
            children = Path(f"/proc/{self._pid}/task/{self._pid}/children").read_text().split()
            for pid in (*map(int, children), *pids_in(self.machine)):
                os.kill(pid, signal.SIGKILL)
        return not self.is_on

    def make(self) -> None:
        """Give it its disk, before its first boot. Idempotent; `start` does it too."""
        if os.path.ismount(self._root):
            return
        for folder in (self._disk, self._root):
            folder.mkdir(parents=True, exist_ok=True)
        run(["mount", "-t", "tmpfs", "-o", f"size={self._disk_mib}M,mode=755", "tmpfs", str(self._disk)])
        for folder in (self._root, self._disk / "upper", self._disk / "work"):
            folder.mkdir()
        layers = (*self._layers, *([layer_of_uv()] if self._has_uv else []), base())
        lower = ":".join(map(str, layers))
        options = f"lowerdir={lower},upperdir={self._disk}/upper,workdir={self._disk}/work"
        run(["mount", "-t", "overlay", "-o", options, self.machine, str(self._root)])
        key = self.folder / "host_key"
        run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", self.name, "-f", str(key)])
        shutil.copy(key, self._root / "etc/ssh/ssh_host_ed25519_key")
        shutil.copy(f"{key}.pub", self._root / "etc/ssh/ssh_host_ed25519_key.pub")
        (self._root / "etc/hostname").write_text(f"{self.name}\n")
        public = Path(f"{self.bed.key_file}.pub").read_text()
        for user, keys in (self._users if self._users is not None else dict.fromkeys(("root", *USERS), public)).items():
            self.authorize(user, keys)
        self._introduce()

    def unpack(self, archive: str) -> None:
        """Unpack a tar file on its disk, before its first boot."""
        run(["tar", "-C", str(self._root), "-xpf", archive])

    def authorize(self, user: str, public_keys: str) -> None:
        """Let `user` in with these keys and no others."""
        home = self._root / ("root" if user == "root" else f"home/{user}")
        folder = home / ".ssh"
        folder.mkdir(mode=0o700, exist_ok=True)
        (folder / "authorized_keys").write_text(public_keys)
        owner = home.stat()
        for path in (folder, folder / "authorized_keys"):
            os.chown(path, owner.st_uid, owner.st_gid)

    def host_key(self) -> str:
        """Return its public host key: `ssh-ed25519 AAAA...`."""
        return " ".join((self.folder / "host_key.pub").read_text().split()[:2])

    def change_host_key(self) -> None:
        """Give it another host key, as after a new installation. `known_hosts` of the bed keeps the old one."""
        self.run("sh", "-c", "rm /etc/ssh/ssh_host_*; ssh-keygen -q -t ed25519 -N '' -f /etc/ssh/ssh_host_ed25519_key")

    def _introduce(self) -> None:
        with self.bed.locked():
            (self.folder / "address").write_text(self.address)
            _write_books(self.bed)

    def _make_network(self) -> None:
        self._drop_network()
        ip("netns", "add", self.machine)
        peer = ["peer", "name", "eth0", "address", self._mac, "netns", self.machine]
        ip("link", "add", self._veth, "type", "veth", *peer)
        ip("link", "set", self._veth, "master", self.bed.name, "up")
        here, there = f"{self.bed.network}.0/24", f"{self.bed.cloud_network}.0.0/16"
        if self._is_rented:
            here, there = there, here
        ip("addr", "add", f"{self.address}/{here.rpartition('/')[2]}", "dev", "eth0", netns=self.machine)
        ip("link", "set", "eth0", "up", netns=self.machine)
        ip("link", "set", "lo", "up", netns=self.machine)
        ip("route", "add", there, "dev", "eth0", netns=self.machine)

    def _drop_network(self) -> None:
        # The namespace takes along the connections that its kernel would still try to end.
        if Path(f"/run/netns/{self.machine}").exists():
            until(lambda: not pids_in(self.machine))
            ip("netns", "del", self.machine)
        if Path(f"/sys/class/net/{self._veth}").exists():
            with suppress(RuntimeError):  # the kernel was faster: it goes with its other end
                ip("link", "del", self._veth)

    def _set_boot_delay(self, ssh_after_s: float) -> None:
        drop_in = self._root / "etc/systemd/system/ssh.service.d/delay.conf"
        drop_in.unlink(missing_ok=True)
        if ssh_after_s > 0:
            drop_in.parent.mkdir(exist_ok=True)
            sleep = "infinity" if ssh_after_s == math.inf else f"{ssh_after_s:g}"
            drop_in.write_text(f"[Service]\nExecStartPre=/bin/sleep {sleep}\nTimeoutStartSec=infinity\n")


def _write_books(bed: Bed) -> None:
    """Write the bed's known_hosts and ssh_config, and the /etc/hosts of all its hosts.

    Each must find its own name at its own address. With 127.0.0.1, gloo and JAX would tell the others to meet there.
    """
    folders = sorted(path.parent for path in bed.folder.glob("hosts/*/address"))
    known, config, table = "", "", "127.0.0.1 localhost\n"
    for folder in folders:
        name, address = folder.name, (folder / "address").read_text()
        key = " ".join((folder / "host_key.pub").read_text().split()[:2])
        known += f"{name},{address} {key}\n"
        config += f"Host {name}\n  HostName {address}\n"
        table += f"{address} {name}\n"
    bed.known_hosts.write_text(known)
    bed.ssh_config.write_text(
        f"{config}Host *\n  User root\n  IdentityFile {bed.key_file}\n  IdentitiesOnly yes\n  BatchMode yes\n"
        f"  UserKnownHostsFile {bed.known_hosts}\n  StrictHostKeyChecking yes\n  ConnectTimeout 10\n"
    )
    for folder in folders:
        (folder / "disk/root/etc/hosts").write_text(table)


def _describe(pid: int) -> Process:
    folder = Path(f"/proc/{pid}")
    status = dict(line.split(":\t", 1) for line in (folder / "status").read_text().splitlines() if ":\t" in line)
    words = (folder / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    return Process(
        pid=int(status["NSpid"].split()[-1]),
        outside_pid=pid,
        uid=int(status["Uid"].split()[0]),
        name=status["Name"],
        command=b" ".join(words).decode(errors="replace"),
    )
