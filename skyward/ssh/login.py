"""Logging in by paramiko as `ssh` would: configuration, jump hosts, keys, host keys; and failures as our errors."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import socket
import time
from dataclasses import replace
from typing import Any

import paramiko

from ..errors import HostKeyChanged, SkywardError, Unreachable
from .failures import failure
from .hostkeys import accepts, fingerprint, unknown_key
from .target import HostKeys, Target

__all__ = ["Login"]

_KNOWN_HOSTS = "~/.ssh/known_hosts ~/.ssh/known_hosts2"
_SYSTEM_KNOWN_HOSTS = "/etc/ssh/ssh_known_hosts"
_MAX_JUMPS = 8


class Login:
    """A machine, and the connections to it. More than one only where its sshd allows few sessions on each."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.heard = time.monotonic()
        """When the machine last said anything."""
        self._clients: list[paramiko.SSHClient] = []
        self._sockets: list[Any] = []

    def connect(self) -> None:
        """Raises what `skyward.ssh.connect` raises."""
        self._clients.append(self._connected(self.target, 0))

    @property
    def is_active(self) -> bool:
        transport = self._clients[0].get_transport()
        return transport is not None and transport.is_active()

    def ask(self) -> None:
        """Ask the machine for an answer, and wait for it, which may be for ever. Its arrival counts as heard."""
        transport = self._clients[0].get_transport()
        if transport is not None:
            with contextlib.suppress(paramiko.SSHException, EOFError, OSError):
                transport.global_request("keepalive@openssh.com", wait=True)

    def open_session(self) -> paramiko.Channel:
        """A new channel; on a new connection where the others are full. Raises SSHException, SkywardError."""
        for client in self._clients:
            transport = client.get_transport()
            if transport is not None and transport.is_active():
                with contextlib.suppress(paramiko.ChannelException):
                    return transport.open_session(timeout=self.target.connect_timeout_s)
        try:
            client = self._connected(self.target, 0)
        except SkywardError as error:
            raise paramiko.SSHException(str(error)) from error
        self._clients.append(client)
        transport = client.get_transport()
        assert transport is not None
        return transport.open_session(timeout=self.target.connect_timeout_s)

    def close(self) -> None:
        for client in self._clients:
            client.close()

    # One connection -------------------------------------------------------------------------------------------------

    def _connected(self, target: Target, jumps: int) -> paramiko.SSHClient:
        try:
            return self._log_in(target, jumps)
        except SkywardError:
            raise
        except paramiko.BadHostKeyException as error:
            raise _changed(target, error) from error
        except (paramiko.AuthenticationException, paramiko.PasswordRequiredException) as error:
            raise failure(target, f"Permission denied: {error}") from error
        except paramiko.ssh_exception.ConfigParseError as error:
            raise failure(target, f"{error}: Bad configuration option") from error
        except paramiko.ssh_exception.IncompatiblePeer as error:
            raise failure(target, f"Unable to negotiate: {error}") from error
        except (paramiko.SSHException, OSError, EOFError) as error:
            raise failure(target, str(error) or "it closed the connection") from error

    def _log_in(self, target: Target, jumps: int) -> paramiko.SSHClient:
        said = _configuration(target)
        host = said.get("hostname", target.host)
        port = target.port or int(said.get("port", 22))
        client = paramiko.SSHClient()
        files = _trust(client, target.host_keys, said)
        client.set_missing_host_key_policy(_Policy(target, files[0]))
        alias = target.host_keys.alias or said.get("hostkeyalias", "")
        key_files = [target.key_file] if target.key_file else said.get("identityfile", [])
        key_files = [path for path in map(os.path.expanduser, key_files) if os.path.isfile(path)]
        sock = self._socket(target, said, host, port, jumps)
        try:
            client.connect(
                alias or host,
                port=22 if alias else port,
                username=target.user or said.get("user"),
                key_filename=key_files or None,  # type: ignore[arg-type]  # a list too, says its documentation
                allow_agent=not (target.key_file or said.get("identitiesonly") == "yes"),
                look_for_keys=not key_files,
                sock=sock,
                banner_timeout=target.connect_timeout_s,
                auth_timeout=target.connect_timeout_s,
                timeout=target.connect_timeout_s,
            )
        except BaseException:
            client.close()
            sock.close()
            raise
        return client

    def _socket(self, target: Target, said: dict[str, Any], host: str, port: int, jumps: int) -> Any:
        """What leads to the machine: a socket, a channel of a jump host, or a proxy's process."""
        jump = target.jump or said.get("proxyjump")
        if jump and jump != "none":
            if jumps >= _MAX_JUMPS:
                raise Unreachable(f"ssh {target}: more than {_MAX_JUMPS} jump hosts", host=str(target), is_final=True)
            before, _, last = jump.rpartition(",")
            through = self._connected(_jump_target(target, last, before or None), jumps + 1)
            transport = through.get_transport()
            assert transport is not None
            channel = transport.open_channel(
                "direct-tcpip", (host, port), ("127.0.0.1", 0), timeout=target.connect_timeout_s
            )
            self._clients_kept(through)
            return _Heard(channel, self)
        if said.get("proxycommand"):
            return _Heard(paramiko.ProxyCommand(said["proxycommand"]), self)
        return _Heard(socket.create_connection((host, port), target.connect_timeout_s), self)

    def _clients_kept(self, client: paramiko.SSHClient) -> None:
        """A client that nobody holds closes its connection."""
        self._sockets.append(client)


class _Heard:
    """A socket that notes when something came."""

    def __init__(self, sock: Any, login: Login) -> None:
        self._sock = sock
        self._login = login

    def recv(self, count: int) -> bytes:
        data: bytes = self._sock.recv(count)
        self._login.heard = time.monotonic()
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


def _jump_target(target: Target, jump: str, before: str | None) -> Target:
    """`jump`: "user@host:port"; its key is the user's to know."""
    match = re.fullmatch(r"(?:ssh://)?(?:([^@]+)@)?(\[[^\]]+\]|[^:]+)(?::(\d+))?", jump.strip())
    if match is None:
        raise failure(target, f"ProxyJump {jump!r}: Bad configuration option")
    user, host, port = match.groups()
    # A key that was given is offered to the hosts on the way too, as the other transport does.
    return replace(
        target,
        host=host.strip("[]"),
        user=user,
        port=int(port) if port else None,
        jump=before,
        host_keys=HostKeys(),
        key_file=None
        if _configuration(replace(target, host=host.strip("[]"))).get("identityfile")
        else target.key_file,
    )


# The configuration --------------------------------------------------------------------------------------------------


def _configuration(target: Target) -> dict[str, Any]:
    """What the user's files say of the host. Raises ConfigParseError."""
    if target.config_file == "none":
        return {}
    lines = [
        *_lines(os.path.expanduser(target.config_file or "~/.ssh/config")),
        "Host *",
        *_lines("/etc/ssh/ssh_config"),
    ]
    return dict(paramiko.SSHConfig.from_text("\n".join(lines)).lookup(target.host))


def _lines(path: str, depth: int = 0) -> list[str]:
    """Of a file and those that it includes, which paramiko does not know of."""
    found: list[str] = []
    try:
        with open(path) as file:
            lines = file.read().splitlines()
    except OSError:
        return []
    for line in lines:
        included = re.match(r"\s*Include[\s=]+(.+)", line, re.IGNORECASE)
        if included is None or depth > 16:
            found.append(line)
            continue
        folder = "/etc/ssh" if path.startswith("/etc/ssh/") else os.path.expanduser("~/.ssh")
        for pattern in included[1].split():
            for name in sorted(glob.glob(os.path.join(folder, os.path.expanduser(pattern.strip('"'))))):
                found += _lines(name, depth + 1)
    return found


# Host keys ----------------------------------------------------------------------------------------------------------


def _trust(client: paramiko.SSHClient, keys: HostKeys, said: dict[str, Any]) -> list[str]:
    """Make known what the policy says; the files, the first of which an unknown key would go to."""
    if keys.policy == "given":
        return [""]
    own = keys.file.split("\0") if keys.file else str(said.get("userknownhostsfile", _KNOWN_HOSTS)).split()
    files = [os.path.expanduser(name) for name in own]
    for name in files if keys.file else [*files, _SYSTEM_KNOWN_HOSTS]:
        with contextlib.suppress(OSError):
            client.load_system_host_keys(name)
    return files


class _Policy(paramiko.MissingHostKeyPolicy):
    """For keys of machines for which none is known."""

    def __init__(self, target: Target, file: str) -> None:
        self._target = target
        self._file = file

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        line = f"{hostname} {key.get_name()} {key.get_base64()}"
        keys = self._target.host_keys
        if keys.policy == "given" and accepts(self._target, f"{key.get_name()} {key.get_base64()}"):
            return
        if keys.policy != "pin":
            raise unknown_key(self._target, line, self._file)
        with open(os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "a") as file:
            file.write(line + "\n")


def _changed(target: Target, error: paramiko.BadHostKeyException) -> SkywardError:
    sent = fingerprint(error.key.get_base64())
    changed = failure(target, f"Host key for {error.hostname} has changed: {sent}")
    assert isinstance(changed, HostKeyChanged)
    return changed
