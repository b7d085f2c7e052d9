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

from ..core.ownership import check_file, check_path
from ..errors import SkywardError, Unreachable
from .failures import failure
from .hostkeys import accepts, fingerprint, known_keys, unknown_key
from .identities import Identities
from .target import HostKeys, SSHTarget

__all__ = ["Login", "configuration"]

_KNOWN_HOSTS = "~/.ssh/known_hosts ~/.ssh/known_hosts2"
_SYSTEM_KNOWN_HOSTS = "/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2"
_MAX_JUMPS = 8
_DEEPEST = 16
_ANY = "Host *"
_PROBE = "SkywardIsHere"


class Login:
    """A machine, and the connections to it. More than one only where its sshd allows few sessions on each."""

    def __init__(self, target: SSHTarget) -> None:
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
            # `is_active` says that the connection is gone.
            with contextlib.suppress(paramiko.SSHException, EOFError, OSError):
                transport.global_request("keepalive@openssh.com", wait=True)

    def open_session(self) -> paramiko.Channel:
        """A new channel; on a new connection where the others are full. Raises SSHException, SkywardError."""
        for client in self._clients:
            transport = client.get_transport()
            if transport is not None and transport.is_active():
                with contextlib.suppress(paramiko.ChannelException):  # this connection is full
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

    def _connected(self, target: SSHTarget, jumps: int) -> paramiko.SSHClient:
        try:
            return self._log_in(target, jumps)
        except SkywardError:
            raise
        except (paramiko.AuthenticationException, paramiko.PasswordRequiredException) as error:
            raise failure(target, f"Permission denied: {error}") from error
        except paramiko.ssh_exception.ConfigParseError as error:
            raise failure(target, f"{error}: Bad configuration option") from error
        except paramiko.ssh_exception.IncompatiblePeer as error:
            raise failure(target, f"Unable to negotiate: {error}") from error
        except (paramiko.SSHException, OSError, EOFError) as error:
            raise failure(target, str(error) or "it closed the connection") from error

    def _log_in(self, target: SSHTarget, jumps: int) -> paramiko.SSHClient:
        config = configuration(target)
        host = config.get("hostname", target.host)
        port = target.port or int(config.get("port", 22))
        client = paramiko.SSHClient()
        alias = target.host_keys.alias or config.get("hostkeyalias", "")
        name = alias or (host if port == 22 else f"[{host}]:{port}")
        policy = _Policy(target, _known_hosts(target.host_keys, config), name)
        client.set_missing_host_key_policy(policy)
        sock = self._socket(target, config, host, port, jumps)
        try:
            client.connect(
                alias or host,
                port=22 if alias else port,
                auth_strategy=Identities(target, config),  # type: ignore[arg-type]  # what it asks of one is `authenticate`
                sock=sock,
                banner_timeout=target.connect_timeout_s,
                auth_timeout=target.connect_timeout_s,
                timeout=target.connect_timeout_s,
                transport_factory=policy.transport,
            )
        except BaseException:
            client.close()
            sock.close()
            raise
        return client

    def _socket(self, target: SSHTarget, config: dict[str, Any], host: str, port: int, jumps: int) -> Any:
        """What leads to the machine: a socket, a channel of a jump host, or a proxy's process."""
        jump = target.jump or config.get("proxyjump")
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
        if config.get("proxycommand"):
            return _Heard(paramiko.ProxyCommand(config["proxycommand"]), self)
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


def _jump_target(target: SSHTarget, jump: str, before: str | None) -> SSHTarget:
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
        key_file=None if configuration(replace(target, host=host.strip("[]"))).get("identityfile") else target.key_file,
    )


# Host keys ----------------------------------------------------------------------------------------------------------


def _known_hosts(keys: HostKeys, config: dict[str, Any]) -> list[str]:
    """Files; to the first a key goes that is seen for the first time."""
    if keys.policy == "given":
        return []
    if keys.file:
        return [os.path.expanduser(keys.file)]
    own, all_users = (
        config.get("userknownhostsfile", _KNOWN_HOSTS),
        config.get("globalknownhostsfile", _SYSTEM_KNOWN_HOSTS),
    )
    return [os.path.expanduser(name) for name in f"{own} {all_users}".split()]


class _Policy(paramiko.MissingHostKeyPolicy):
    """Judges every key: paramiko, which is told of none, reads neither patterns nor marks of known_hosts."""

    def __init__(self, target: SSHTarget, files: list[str], name: str) -> None:
        self._target = target
        self._file = files[0] if files else ""
        self._known = known_keys(files, name)

    def transport(self, sock: Any, **options: Any) -> paramiko.Transport:
        """One that asks first for a key of a type that is known."""
        transport = paramiko.Transport(sock, **options)
        known = {one.key.split()[0] for one in self._known}
        offered = transport.get_security_options()
        offered.key_types = sorted(
            offered.key_types, key=lambda kind: re.sub(r"^rsa-sha2-\d+$", "ssh-rsa", kind) not in known
        )
        return transport

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        sent = f"{key.get_name()} {key.get_base64()}"
        keys = self._target.host_keys
        known = [one for one in self._known if not one.mark]
        for one in self._known:
            if one.mark == "revoked" and one.key == sent:
                raise failure(self._target, f"{hostname} {fingerprint(sent)} REVOKED in {one.where}")
        if any(one.key == sent for one in known) or (keys.policy == "given" and accepts(self._target, sent)):
            return
        if known:
            shown = f"Offending key in {known[0].where}\nHost key for {hostname} has changed: {fingerprint(sent)}"
            raise failure(self._target, shown)
        if keys.policy != "pin":
            error = unknown_key(self._target, f"{hostname} {sent}", self._file)
            if any(one.mark == "cert-authority" for one in self._known):
                error.add_note("known_hosts has an authority for it, which only transport='openssh' understands")
            raise error
        check_path(self._file)
        os.makedirs(os.path.dirname(os.path.abspath(self._file)), mode=0o700, exist_ok=True)
        with open(os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "a") as file:
            file.write(f"{hostname} {sent}\n")


# Configuration --------------------------------------------------------------------------------------------------------


def configuration(target: SSHTarget) -> dict[str, Any]:
    """Return what the user's SSH configuration says of a host. paramiko knows of no Include.

    By names in lower case. Raises paramiko's ConfigParseError, and UsageError for another user's file.
    """
    if target.config_file == "none":
        return {}
    lines: list[str] = []
    for path in (os.path.expanduser(target.config_file or "~/.ssh/config"), "/etc/ssh/ssh_config"):
        lines.append(_ANY)
        _read(path, target.host, lines)
    return dict(paramiko.SSHConfig.from_text("\n".join(lines)).lookup(target.host))


def _read(path: str, host: str, lines: list[str], depth: int = 0) -> None:
    """Append the file's lines, and in their place those of the files that it includes where it does so for the host.

    An included file begins and ends in the section that includes it, whatever sections of its own it opens.
    """
    check_file(path, "config_file")
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            texts = file.read().splitlines()
    except OSError:  # OpenSSH passes over what it cannot read
        return
    section = lines[-1] if depth else _ANY
    for text in texts:
        included = re.match(r"\s*Include[\s=]+(.+)", text, re.IGNORECASE)
        if included is None or depth > _DEEPEST:
            if re.match(r"\s*(Host|Match)[\s=]", text, re.IGNORECASE):
                section = text
            lines.append(text)
        elif _is_in_force(lines, section, host):
            folder = "/etc/ssh" if path.startswith("/etc/ssh/") else os.path.expanduser("~/.ssh")
            for pattern in included[1].split():
                for name in sorted(glob.glob(os.path.join(folder, os.path.expanduser(pattern.strip('"'))))):
                    lines.append(section)
                    _read(name, host, lines, depth + 1)
            lines.append(section)


def _is_in_force(lines: list[str], section: str, host: str) -> bool:
    """Whether a section is about the host, after these lines: what they set can be what it asks."""
    asked = paramiko.SSHConfig.from_text("\n".join([*lines, section, f"{_PROBE} yes"])).lookup(host)
    return _PROBE.lower() in asked
