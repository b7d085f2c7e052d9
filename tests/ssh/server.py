"""A real sshd on this machine's loopback: its own port, host key, authorized keys and configuration."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path
from random import SystemRandom

import pytest

from tests.waiting import until

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


def make_key(path: Path) -> Path:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
    return path


def free_port() -> int:
    """Return a port of the loopback on which nobody listens, to be taken later.

    The kernel gives it to no other socket meanwhile, and skyward to no gang.
    """
    for port in SystemRandom().sample(range(10_000, 20_000), 100):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("all these ports are taken")


class Server:
    """One sshd.

    `key` logs in, `known_hosts` knows the server, and `config` is a client configuration with the alias `name`. The
    sessions have the variables of `environment`, as in "NAME=VALUE NAME=VALUE".
    """

    host = "127.0.0.1"

    def __init__(self, folder: Path, name: str = "host", *, options: str = "", environment: str = "") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.name = name
        self.user = getpass.getuser()
        self.port = free_port()
        self.key = make_key(folder / "user_key")
        self.host_key = make_key(folder / "host_key")
        self.authorized = folder / "authorized_keys"
        self.authorized.write_text(self.key.with_suffix(".pub").read_text())
        self.known_hosts = folder / "known_hosts"
        self.known_hosts.write_text(f"[{self.host}]:{self.port} {self.public_host_key}\n")
        self._config = folder / "sshd_config"
        self._config.write_text(
            f"Port {self.port}\nListenAddress {self.host}\nHostKey {self.host_key}\n"
            f"AuthorizedKeysFile {self.authorized}\nStrictModes no\nUsePAM no\nPidFile none\nMaxStartups 100\n"
            # Below another shell, bash leaves out .bashrc. Otherwise each command that sshd runs reads that file,
            # and one with pyenv's lines starts 80 processes.
            f"PasswordAuthentication no\nSetEnv SHLVL=1 {environment}\n{options}\n"
        )
        self.config = folder / "ssh_config"
        self.config.write_text(
            f"Host {name}\n  HostName {self.host}\n  Port {self.port}\n  User {self.user}\n"
            f"  IdentityFile {self.key}\n  UserKnownHostsFile {self.known_hosts}\n"
        )
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def public_host_key(self) -> str:
        return " ".join(self.host_key.with_suffix(".pub").read_text().split()[:2])

    @property
    def log(self) -> str:
        return (self.folder / "sshd.log").read_text()

    def start(self) -> None:
        assert SSHD is not None
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # where Debian's sshd separates privileges
        with (self.folder / "sshd.log").open("ab") as log:
            self.process = subprocess.Popen([SSHD, "-D", "-e", "-f", str(self._config)], stderr=log)
        until(self.answers)

    def answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log
        with contextlib.suppress(OSError), socket.create_connection((self.host, self.port), 1):
            return True
        return False

    def sessions(self) -> list[int]:
        """Return the processes of open connections."""
        assert self.process is not None
        found = subprocess.run(["pgrep", "-P", str(self.process.pid)], capture_output=True, text=True, check=False)
        return [int(pid) for pid in found.stdout.split()]

    def drop_connections(self) -> None:
        """Kill the processes of all connections, as when the machine forgets them."""
        for pid in self.sessions():
            below = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False)
            for process in (pid, *map(int, below.stdout.split())):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)

    def stop(self) -> None:
        if self.process is not None:
            self.drop_connections()
            self.process.kill()
            self.process.wait()
            self.process = None


def needs_sshd() -> None:
    if SSHD is None:
        pytest.skip("no sshd here: install openssh-server")
    if shutil.which("ssh") is None:
        pytest.skip("no ssh here: install openssh-client")
