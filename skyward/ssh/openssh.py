"""The OpenSSH client: one master process per connection, through which all commands run."""

from __future__ import annotations

import contextlib
import math
import os
import re
import socket
import subprocess
import threading

from ..core.ownership import check_file, check_path
from ..errors import SkywardError
from .command import run_process
from .connection import Connection
from .failures import failure
from .folder import close_folder, connecting, kill_process, make_folder, record_process
from .hostkeys import accepts, unknown_key
from .target import HostKeys, SSHTarget

_ALIVE_S = 3
_ALIVE_COUNT = 3
"""Keepalives without an answer until a master exits: 9 to 12 seconds after its machine went silent."""
_PERSIST_S = 20
"""Seconds that a master lives without users: enough to reopen a channel, or to reach the next setup step."""
_FROM_BEYOND = re.compile(r"kex_exchange_identification|banner exchange")
"""A connection that ended before the handshake. Behind a proxy, the proxy itself may have failed."""
_CHECK_S = 2.0
"""Time for a master to answer, in seconds. It needs microseconds; one that takes longer hangs."""


def openssh(target: SSHTarget) -> Connection:
    """Build a Connection through `ssh`. Raises UsageError if the target's key file does not exist."""
    target.check_key_file()
    return Connection(Master(target, make_folder()), __name__, terminal="skyward.ssh.terminal")


class Master:
    """Holder that runs a ControlMaster, whose socket in `folder` other `ssh` processes use."""

    def __init__(self, target: SSHTarget, folder: str) -> None:
        self.target = target
        self.folder = folder
        self._socket = os.path.join(folder, "m.sock")
        self._config = os.path.join(folder, "config")
        self._dialling = threading.Lock()

    def ensure(self, stop: threading.Event | None = None, timeout_s: float = math.inf) -> None:
        limit_s = min(timeout_s, self.target.connect_timeout_s)
        with connecting(self.target, self.folder, limit_s):
            if self.is_alive() and os.path.exists(self._config):
                return
            self._clear()
            self._prepare(stop)
            self._start(stop, limit_s)

    def command(self, command: str) -> list[str]:
        """Build the `ssh` command. ssh opens its own connection if the master is gone or has no room for a session."""
        return [*self._ssh(), "-o", "ControlMaster=no", self.target.host, command]

    def shell(self, command: str, *, has_terminal: bool) -> list[str]:
        """Build an `ssh` command line for the user's shell, or for a command, as one would type it."""
        argv = [*self._ssh(), "-o", "ControlMaster=no", "-t" if has_terminal else "-T", self.target.host]
        return [*argv, command] if command else argv

    def dial(self, port: int) -> socket.socket:
        with self._dialling:
            return self._dial(port)

    def _dial(self, port: int) -> socket.socket:
        path = os.path.join(self.folder, f"{port}.sock")
        with contextlib.suppress(OSError):  # not forwarded yet, or by a master that is gone
            return _connected(path)
        with contextlib.suppress(FileNotFoundError):  # no socket remained
            os.unlink(path)
        # A socket of the master, not `ssh -W` for each connection: that does not pass on the end of one direction.
        forward = ["-O", "forward", "-L", f"{path}:127.0.0.1:{port}", "master"]
        done = run_process(["ssh", "-F", "/dev/null", "-S", self._socket, *forward], timeout_s=_CHECK_S)
        if done.code:
            why = done.error_text or "the master is gone"
            raise ConnectionError(f"ssh: port {port} cannot be reached ({why}); check that the pool is open")
        return _connected(path)

    def is_alive(self) -> bool:
        return self._check() != 0

    def end(self) -> None:
        close_folder(self.folder, self._check)

    # The process ----------------------------------------------------------------------------------------------------

    def _check(self) -> int:
        """Return the pid of a master that answers, or 0."""
        if not os.path.exists(self._socket):
            return 0
        try:
            done = subprocess.run(
                ["ssh", "-F", "/dev/null", "-S", self._socket, "-O", "check", "master"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_CHECK_S,
                check=False,
            )
        except subprocess.TimeoutExpired:  # a master that hangs is as good as none
            return 0
        match = re.search(rb"pid=(\d+)", done.stderr)
        return int(match[1]) if match and not done.returncode else 0

    def _clear(self) -> None:
        """Remove a master that does not answer: its process may hang, and its socket may remain."""
        kill_process(self.folder)
        with contextlib.suppress(FileNotFoundError):  # no socket remained
            os.unlink(self._socket)

    def _start(self, stop: threading.Event | None, limit_s: float) -> None:
        target = self.target
        argv = [*self._ssh(), "-f", "-N", "-M", "-o", f"ControlPersist={_PERSIST_S}", target.host]
        done = run_process(argv, timeout_s=limit_s, stop=stop)
        if done.code:
            raise self._refusal(done.error_text, stop)
        pid = self._check()
        if not pid:
            raise failure(target, done.error_text or "the machine closed the connection")
        record_process(self.folder, pid)

    # Options --------------------------------------------------------------------------------------------------------

    def _ssh(self) -> list[str]:
        target = self.target
        options = [("-p", target.port), ("-l", target.user), ("-J", target.jump)]
        argv = ["ssh", "-F", self._config, "-S", self._socket]
        argv += [word for option, value in options if value is not None for word in (option, str(value))]
        if target.key_file is not None:
            argv += ["-o", "IdentitiesOnly=yes"]
        return [*argv, *self._host_key_options(target.host_keys)]

    def _host_key_options(self, keys: HostKeys) -> list[str]:
        options = ["StrictHostKeyChecking=" + ("accept-new" if keys.policy == "pin" else "yes")]
        file = os.path.join(self.folder, "known_hosts") if keys.policy == "given" else keys.file
        if file:
            options += [f"UserKnownHostsFile={_quoted(file)}", "GlobalKnownHostsFile=/dev/null"]
        if keys.alias:
            options.append(f"HostKeyAlias={keys.alias}")
        return [word for option in options for word in ("-o", option)]

    def _prepare(self, stop: threading.Event | None) -> None:
        """Write the files that the options name."""
        keys = self.target.host_keys
        if keys.file:
            check_path(keys.file)
        with open(self._config, "w") as file:
            file.write(_config(self.target))
        if keys.policy == "given":
            lines = [f"* {key}" for key in keys.keys if " " in key]
            if keys.fingerprints:
                lines += [f"* {key}" for key in self._sent_keys(stop) if accepts(self.target, key)]
            with open(os.path.join(self.folder, "known_hosts"), "w") as file:
                file.writelines(f"{line}\n" for line in lines)

    # Host keys ------------------------------------------------------------------------------------------------------

    def _refusal(self, text: str, stop: threading.Event | None) -> SkywardError:
        # Empty: under load, a client whose proxy ended at once was seen to exit without a message.
        if not text or _FROM_BEYOND.search(text):
            text = self._said_on_the_way(stop) or text
        is_unknown = "Host key verification failed" in text and not re.search("CHANGED|REVOKED", text)
        lines = self._probe(stop) if is_unknown else []
        if not lines:
            return failure(self.target, text)
        return unknown_key(self.target, lines[0], self.target.host_keys.file or self._users_known_hosts())

    def _said_on_the_way(self, stop: threading.Event | None) -> str:
        """Return what a jump host's `ssh`, or another proxy, printed: a master discards it.

        Source: OpenSSH 9.2, sshconnect.c, ssh_proxy_connect.
        """
        if not re.search(r"^proxy(jump|command) (?!none$)", self._effective_config(), re.MULTILINE):
            return ""
        argv = self._alone("-o", "PreferredAuthentications=none")
        try:
            done = run_process(argv, timeout_s=self.target.connect_timeout_s, stop=stop)
        except TimeoutError:  # the error then only lacks the proxy's message
            return ""
        lines = done.error_text.splitlines()
        return "\n".join(line for line in lines if not _FROM_BEYOND.search(line) and "UNKNOWN port" not in line)

    def _alone(self, *options: str) -> list[str]:
        """Build a command that neither is a master nor uses one."""
        # ssh takes the first value of an option, so these come first. -S is the exception, and is removed.
        ssh, *rest = [word for word in self._ssh() if word not in ("-S", self._socket)]
        return [ssh, *options, "-o", "ControlPath=none", *rest, self.target.host, "true"]

    def _sent_keys(self, stop: threading.Event | None) -> list[str]:
        return [" ".join(line.split()[1:3]) for line in self._probe(stop)]

    def _probe(self, stop: threading.Event | None) -> list[str]:
        """Ask for the machine's host key as a line of known_hosts. Proves nothing, and attempts no login."""
        file = os.path.join(self.folder, "probe")
        argv = ["-o", "StrictHostKeyChecking=accept-new", "-o", f"UserKnownHostsFile={_quoted(file)}"]
        argv += ["-o", "GlobalKnownHostsFile=/dev/null", "-o", "HashKnownHosts=no"]
        argv = self._alone(*argv, "-o", "PreferredAuthentications=none")
        run_process(argv, timeout_s=self.target.connect_timeout_s, stop=stop)
        try:
            with open(file) as lines:
                return [line for line in lines if line.strip()]
        except FileNotFoundError:  # ssh wrote no key, because none came
            return []
        finally:
            with contextlib.suppress(FileNotFoundError):  # ssh wrote no key
                os.unlink(file)

    def _users_known_hosts(self) -> str:
        match = re.search(r"^userknownhostsfile (\S+)", self._effective_config(), re.MULTILINE)
        return match[1] if match else "~/.ssh/known_hosts"

    def _effective_config(self) -> str:
        """Return every option that the configuration sets for the machine."""
        argv = [*self._ssh(), "-G", self.target.host]
        return subprocess.run(argv, capture_output=True, text=True, errors="replace", check=False).stdout


def _connected(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(path)
    except OSError:
        connection.close()
        raise
    return connection


def _quoted(path: str) -> str:
    return '"' + os.path.abspath(os.path.expanduser(path)).replace("%", "%%") + '"'


def _config(target: SSHTarget) -> str:
    """Write a configuration for the machine and for its jump hosts, followed by the user's own.

    A file, because options on the command line do not reach the `ssh` of a jump host.
    """
    lines = [
        "Host *",
        "BatchMode yes",
        f"ConnectTimeout {max(1, int(target.connect_timeout_s))}",
        f"ServerAliveInterval {_ALIVE_S}",
        f"ServerAliveCountMax {_ALIVE_COUNT}",
        "LogLevel ERROR",
        "UpdateHostKeys no",
        "VisualHostKey no",
        "ClearAllForwardings yes",
        "ForwardAgent no",
        "ForwardX11 no",
        "PermitLocalCommand no",
        "RemoteCommand none",
        "RequestTTY no",
    ]
    if target.key_file is not None:
        lines.append(f"IdentityFile {_quoted(target.key_file)}")
    if target.config_file != "none":
        included = os.path.abspath(os.path.expanduser(target.config_file or "~/.ssh/config"))
        check_file(included, "config_file")  # `ssh -F` does not check the owner
        lines += ["Match all", f'Include "{included}"', "Include /etc/ssh/ssh_config"]
    return "\n".join(lines) + "\n"


def main(folder: str, target: SSHTarget, command: str) -> None:
    """Make sure that the master runs, then become the `ssh` that runs the command through it."""
    master = Master(target, folder)
    master.ensure()
    argv = master.command(command)
    os.execvp(argv[0], argv)
