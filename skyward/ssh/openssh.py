"""The OpenSSH client: one master process for each connection, which all commands go through."""

from __future__ import annotations

import contextlib
import math
import os
import re
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

__all__ = ["Master", "main", "openssh"]

_ALIVE_S = 3
_ALIVE_COUNT = 3
"""A master whose machine said nothing for 9 to 12 seconds ends, and everything on it."""
_PERSIST_S = 20
"""How long a master without users lives: until a channel is re-made, or the next step of a bootstrap begins."""
_FROM_BEYOND = re.compile(r"kex_exchange_identification|banner exchange")
"""The end of a connection that was hardly made: where a proxy leads to the machine, it may be the proxy that failed."""
_CHECK_S = 2.0
"""A master answers within microseconds, from memory. One that does not in this time hangs."""


def openssh(target: SSHTarget) -> Connection:
    """A Connection through `ssh`. Raises UsageError where the target names a key file that is not there."""
    target.check_key_file()
    return Connection(Master(target, make_folder()), __name__, terminal="skyward.ssh.terminal")


class Master:
    """The Holder: a master of ControlMaster, and the socket in `folder` by which other `ssh` reach it."""

    def __init__(self, target: SSHTarget, folder: str) -> None:
        self.target = target
        self.folder = folder
        self._socket = os.path.join(folder, "m.sock")
        self._config = os.path.join(folder, "config")

    def ensure(self, stop: threading.Event | None = None, timeout_s: float = math.inf) -> None:
        limit_s = min(timeout_s, self.target.connect_timeout_s)
        with connecting(self.target, self.folder, limit_s):
            if self.is_alive() and os.path.exists(self._config):
                return
            self._clear()
            self._prepare(stop)
            self._start(stop, limit_s)

    def command(self, command: str) -> list[str]:
        """By a connection of its own where the master is gone, or has no room for more sessions."""
        return [*self._ssh(), "-o", "ControlMaster=no", self.target.host, command]

    def shell(self, command: str, *, has_terminal: bool) -> list[str]:
        """`ssh` that opens a shell of the user's, or runs the command, as one does by hand."""
        argv = [*self._ssh(), "-o", "ControlMaster=no", "-t" if has_terminal else "-T", self.target.host]
        return [*argv, command] if command else argv

    def is_alive(self) -> bool:
        return self._check() != 0

    def end(self) -> None:
        close_folder(self.folder, self._check)

    # The process ----------------------------------------------------------------------------------------------------

    def _check(self) -> int:
        """The pid of a master that answers, or 0."""
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
        except subprocess.TimeoutExpired:  # a master that hangs is none
            return 0
        match = re.search(rb"pid=(\d+)", done.stderr)
        return int(match[1]) if match and not done.returncode else 0

    def _clear(self) -> None:
        """What is left of a master that does not answer: its process may hang, its socket may lie there."""
        kill_process(self.folder)
        with contextlib.suppress(FileNotFoundError):  # there is none
            os.unlink(self._socket)

    def _start(self, stop: threading.Event | None, limit_s: float) -> None:
        target = self.target
        argv = [*self._ssh(), "-f", "-N", "-M", "-o", f"ControlPersist={_PERSIST_S}", target.host]
        done = run_process(argv, timeout_s=limit_s, stop=stop)
        if done.code:
            raise self._refusal(done.error_text, stop)
        pid = self._check()
        if not pid:
            raise failure(target, done.error_text or "it closed the connection")
        record_process(self.folder, pid)

    # Options --------------------------------------------------------------------------------------------------------

    def _ssh(self) -> list[str]:
        target = self.target
        given = [("-p", target.port), ("-l", target.user), ("-J", target.jump)]
        argv = ["ssh", "-F", self._config, "-S", self._socket]
        argv += [word for option, value in given if value is not None for word in (option, str(value))]
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
        """The files that the options name."""
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
        if _FROM_BEYOND.search(text):
            text = self._said_on_the_way(stop) or text
        is_unknown = "Host key verification failed" in text and not re.search("CHANGED|REVOKED", text)
        lines = self._probe(stop) if is_unknown else []
        if not lines:
            return failure(self.target, text)
        return unknown_key(self.target, lines[0], self.target.host_keys.file or self._users_known_hosts())

    def _said_on_the_way(self, stop: threading.Event | None) -> str:
        """What the `ssh` of a jump host, or another proxy, wrote: a master throws it away.

        Source: OpenSSH 9.2, sshconnect.c, ssh_proxy_connect.
        """
        if not re.search(r"^proxy(jump|command) (?!none$)", self._told(), re.MULTILINE):
            return ""
        argv = self._alone("-o", "PreferredAuthentications=none")
        try:
            done = run_process(argv, timeout_s=self.target.connect_timeout_s, stop=stop)
        except TimeoutError:  # the advice lacks what the machine says, no more
            return ""
        lines = done.error_text.splitlines()
        return "\n".join(line for line in lines if not _FROM_BEYOND.search(line) and "UNKNOWN port" not in line)

    def _alone(self, *options: str) -> list[str]:
        """A connection that is no master and goes through none."""
        # The first value of an option counts, but for -S.
        ssh, *rest = [word for word in self._ssh() if word not in ("-S", self._socket)]
        return [ssh, *options, "-o", "ControlPath=none", *rest, self.target.host, "true"]

    def _sent_keys(self, stop: threading.Event | None) -> list[str]:
        return [" ".join(line.split()[1:3]) for line in self._probe(stop)]

    def _probe(self, stop: threading.Event | None) -> list[str]:
        """The key that the machine sends, as a line of known_hosts. Nothing is proved by it, and no log-in tried."""
        file = os.path.join(self.folder, "probe")
        argv = ["-o", "StrictHostKeyChecking=accept-new", "-o", f"UserKnownHostsFile={_quoted(file)}"]
        argv += ["-o", "GlobalKnownHostsFile=/dev/null", "-o", "HashKnownHosts=no"]
        argv = self._alone(*argv, "-o", "PreferredAuthentications=none")
        run_process(argv, timeout_s=self.target.connect_timeout_s, stop=stop)
        try:
            with open(file) as lines:
                return [line for line in lines if line.strip()]
        except FileNotFoundError:  # ssh wrote no key: none came
            return []
        finally:
            with contextlib.suppress(FileNotFoundError):  # ssh wrote no key
                os.unlink(file)

    def _users_known_hosts(self) -> str:
        match = re.search(r"^userknownhostsfile (\S+)", self._told(), re.MULTILINE)
        return match[1] if match else "~/.ssh/known_hosts"

    def _told(self) -> str:
        """All that the configuration says of the machine."""
        argv = [*self._ssh(), "-G", self.target.host]
        return subprocess.run(argv, capture_output=True, text=True, errors="replace", check=False).stdout


def _quoted(path: str) -> str:
    return '"' + os.path.abspath(os.path.expanduser(path)).replace("%", "%%") + '"'


def _config(target: SSHTarget) -> str:
    """What holds for the machine and for the hosts on the way to it; then the user's own.

    Options on the command line would not reach the `ssh` of a jump host; this file does.
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
        check_file(included, "config_file")  # `ssh -F` does not look whose it is
        lines += ["Match all", f'Include "{included}"', "Include /etc/ssh/ssh_config"]
    return "\n".join(lines) + "\n"


def main(folder: str, target: SSHTarget, command: str) -> None:
    """Of what `argv` gives: make sure of the master, then become the `ssh` that runs the command through it."""
    master = Master(target, folder)
    master.ensure()
    argv = master.command(command)
    os.execvp(argv[0], argv)
