"""Log in by paramiko as `ssh` would: configuration, jump hosts, keys, host keys, and errors translated into ours."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import socket
import threading
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

_KNOWN_HOSTS = "~/.ssh/known_hosts ~/.ssh/known_hosts2"
_SYSTEM_KNOWN_HOSTS = "/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2"
_MAX_JUMPS = 8
_DEEPEST = 16
_ANY = "Host *"
_PROBE = "SkywardIsHere"


class Login:
    """Login to a machine, with its connections: several only if the machine's sshd limits the sessions of each."""

    def __init__(self, target: SSHTarget) -> None:
        self.target = target
        self.heard = time.monotonic()
        """Time at which the last data arrived from the machine."""
        self._clients: list[paramiko.SSHClient] = []
        self._adding = threading.Lock()
        self._sockets: list[Any] = []

    def connect(self) -> None:
        """Log in. Raises what `skyward.ssh.connect` raises."""
        self._clients.append(self._connected(self.target, 0))

    @property
    def is_active(self) -> bool:
        transport = self._clients[0].get_transport()
        return transport is not None and transport.is_active()

    def ask(self) -> None:
        """Request an answer from the machine and wait for it, possibly forever. Its arrival updates `heard`."""
        transport = self._clients[0].get_transport()
        if transport is not None:
            # A lost connection needs no handling here: `is_active` reports it.
            with contextlib.suppress(paramiko.SSHException, EOFError, OSError):
                transport.global_request("keepalive@openssh.com", wait=True)

    def open_session(self) -> paramiko.Channel:
        """Open a channel, on a new connection if the others are full. Raises SSHException, SkywardError."""
        tried = list(self._clients)
        channel = self._session_of(tried)
        if channel is not None:
            return channel
        # One at a time: sshd drops some of many logins that come at once (MaxStartups).
        with self._adding:
            channel = self._session_of([client for client in self._clients if client not in tried])
            if channel is not None:
                return channel
            try:
                client = self._connected(self.target, 0)
            except SkywardError as error:
                raise paramiko.SSHException(str(error)) from error
            self._clients.append(client)
            transport = client.get_transport()
            assert transport is not None
            return transport.open_session(timeout=self.target.connect_timeout_s)

    def _session_of(self, clients: list[paramiko.SSHClient]) -> paramiko.Channel | None:
        """Open a channel on the first of these connections that has room for one."""
        for client in clients:
            transport = client.get_transport()
            if transport is not None and transport.is_active():
                with contextlib.suppress(paramiko.ChannelException):  # this connection has no room for a session
                    return transport.open_session(timeout=self.target.connect_timeout_s)
        return None

    def open_port(self, port: int) -> paramiko.Channel:
        """Open a channel to a port of the machine's loopback. Raises SSHException."""
        transport = self._clients[0].get_transport()
        if transport is None:
            raise paramiko.SSHException("the connection is gone")
        limit_s = self.target.connect_timeout_s
        return transport.open_channel("direct-tcpip", ("127.0.0.1", port), ("127.0.0.1", 0), timeout=limit_s)

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
            raise failure(target, str(error) or "the machine closed the connection") from error

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
                auth_strategy=Identities(target, config),  # type: ignore[arg-type]  # paramiko calls only `authenticate`
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
        """Open the way to the machine: a socket, a channel of a jump host, or a proxy process."""
        jump = target.jump or config.get("proxyjump")
        if jump and jump != "none":
            if jumps >= _MAX_JUMPS:
                raise Unreachable(
                    f"ssh {target}: more than {_MAX_JUMPS} jump hosts; shorten the chain, or remove a circle from "
                    "ProxyJump",
                    host=str(target),
                    is_final=True,
                )
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
        """Keep a reference to a jump host's client: without one, paramiko closes its connection."""
        self._sockets.append(client)


class _Heard:
    """Socket that notes when data arrived."""

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
    """Build the target of a jump host, "user@host:port"; its own configuration supplies the key."""
    match = re.fullmatch(r"(?:ssh://)?(?:([^@]+)@)?(\[[^\]]+\]|[^:]+)(?::(\d+))?", jump.strip())
    if match is None:
        raise failure(target, f"ProxyJump {jump!r}: Bad configuration option")
    user, host, port = match.groups()
    # A given key is offered to jump hosts too, as OpenSSH does. A jump host with an IdentityFile uses that instead.
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
    """List the known_hosts files; new keys are written to the first."""
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
    """Checks every host key itself, because paramiko ignores patterns and marks of known_hosts. It gets no keys."""

    def __init__(self, target: SSHTarget, files: list[str], name: str) -> None:
        self._target = target
        self._file = files[0] if files else ""
        self._known = known_keys(files, name)

    def transport(self, sock: Any, **options: Any) -> paramiko.Transport:
        """Create a transport that prefers key types that are known for the machine."""
        transport = paramiko.Transport(sock, **options)
        known = {entry.key.split()[0] for entry in self._known}
        offered = transport.get_security_options()
        offered.key_types = sorted(
            offered.key_types, key=lambda kind: re.sub(r"^rsa-sha2-\d+$", "ssh-rsa", kind) not in known
        )
        return transport

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        sent = f"{key.get_name()} {key.get_base64()}"
        keys = self._target.host_keys
        known = [entry for entry in self._known if not entry.mark]
        for entry in self._known:
            if entry.mark == "revoked" and entry.key == sent:
                raise failure(self._target, f"{hostname} {fingerprint(sent)} REVOKED in {entry.where}")
        if any(entry.key == sent for entry in known) or (keys.policy == "given" and accepts(self._target, sent)):
            return
        if known:
            shown = f"Offending key in {known[0].where}\nHost key for {hostname} has changed: {fingerprint(sent)}"
            raise failure(self._target, shown)
        if keys.policy != "pin":
            error = unknown_key(self._target, f"{hostname} {sent}", self._file)
            if any(entry.mark == "cert-authority" for entry in self._known):
                error.add_note("known_hosts has a certificate authority for it; set transport='openssh' to use that")
            raise error
        check_path(self._file)
        os.makedirs(os.path.dirname(os.path.abspath(self._file)), mode=0o700, exist_ok=True)
        with open(os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "a") as file:
            file.write(f"{hostname} {sent}\n")


# Configuration --------------------------------------------------------------------------------------------------------


def configuration(target: SSHTarget) -> dict[str, Any]:
    """Read the user's SSH configuration of a host, with Include, which paramiko ignores. Keys are in lower case.

    Raises:
        ConfigParseError: paramiko cannot parse the configuration.
        UsageError: the file belongs to another user.
    """
    if target.config_file == "none":
        return {}
    lines: list[str] = []
    for path in (os.path.expanduser(target.config_file or "~/.ssh/config"), "/etc/ssh/ssh_config"):
        lines.append(_ANY)
        _read(path, target.host, lines)
    return dict(paramiko.SSHConfig.from_text("\n".join(lines)).lookup(target.host))


def _read(path: str, host: str, lines: list[str], depth: int = 0) -> None:
    """Append the file's lines, with included files in place where the include applies to the host.

    An included file begins and ends in the section that includes it, whatever sections it opens.
    """
    check_file(path, "config_file")
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            texts = file.read().splitlines()
    except OSError:  # OpenSSH skips unreadable files too
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
    """Return whether a section applies to the host after these lines, which may set what its Match tests.

    Asks paramiko itself: does an option in this section show up?
    """
    found = paramiko.SSHConfig.from_text("\n".join([*lines, section, f"{_PROBE} yes"])).lookup(host)
    return _PROBE.lower() in found
