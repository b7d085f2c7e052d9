"""Hosts that are reached over SSH, as users write them."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import os
import re
from collections.abc import Callable, Mapping, Sequence

from ..core.records import dataclass
from ..core.signatures import checked_options
from ..errors import UsageError
from ..ssh import HostKeys, SSHTarget
from ..ssh.target import check_login, is_port

# An IPv6 address stands in brackets. Without brackets no port can follow, and the whole text is the address, as in ssh.
_HOST = re.compile(
    r"(?:ssh://)?(?:(?P<user>[^\s:/]+)@)?"
    r"(?:\[(?P<ip>[^\s\[\]]+)\]|(?P<bare>[^@\s\[\]/]*:[^@\s\[\]/]*:[^@\s\[\]/]*)|(?P<host>[^:@\s\[\]/,]+))"
    r"(?::(?P<port>[0-9]+))?"
)
_WITH_PASSWORD = re.compile(r"(?:ssh://)?(?P<user>[^\s:/@,]+):[^,]*@")


@checked_options
@dataclass(frozen=True, kw_only=True)
class SSHHost:
    """One host of an `SSH` provider, with options that differ from the other hosts.

    An option that is None falls back to the option of `SSH`, and then to the SSH configuration.

    Args:
        host: name, address, or alias of the SSH configuration.
        user: login name.
        port: TCP port of sshd, 1 to 65535.
        key_file: path of the private key. A key with a passphrase must be loaded in the SSH agent.
        jump: host to connect through, as in `ssh -J`.
        host_keys: accepted host keys; see `SSH`.
        private_address: IPv4 address at which the other nodes reach this host. Set it when nodes use a second
            network card or a tunnel. Empty: the address at which the SSH connection arrives.

    Raises:
        UsageError: an option is not one of these, or not legal; the message names it.

    Example:
        >>> SSHHost(host="gpu1", user="me", private_address="10.0.0.2").port is None
        True
    """

    host: str
    user: str | None = None
    port: int | None = None
    key_file: str | os.PathLike[str] | None = None
    jump: str | None = None
    host_keys: str | Sequence[str] | None = None
    private_address: str = ""

    def __post_init__(self) -> None:
        check_login(self)
        host = self.host
        if not isinstance(host, str) or "@" in host or (":" in host and not _is_ipv6(host)):
            raise UsageError(
                f"SSHHost.host={host!r}: must be a name or an address alone; give the login name as user= and the port "
                "as port="
            )
        if self.private_address and not _is_address(self.private_address, ipaddress.IPv4Address):
            raise UsageError(
                f"SSHHost.private_address={self.private_address!r}: not an IPv4 address; write one such as "
                '"10.0.0.2", or leave it out'
            )


def read_host(host: object, field: str) -> SSHHost:
    """Return a host that a user has written in any of its forms. Raises UsageError, which names `field`."""
    if isinstance(host, SSHHost):
        return host
    if isinstance(host, Mapping):
        known = {f.name for f in dataclasses.fields(SSHHost)}
        unknown = sorted(set(host) - known)
        if unknown or "host" not in host:
            raise UsageError(
                f"{field}={dict(host)!r}: not a host; give `host`, and only these fields: {', '.join(sorted(known))}"
            )
        return SSHHost(**host)
    match = _HOST.fullmatch(host) if isinstance(host, str) else None
    if match is not None:
        address, port = match["ip"] or match["bare"], match["port"]
        if port and not is_port(int(port)):
            raise UsageError(f"{field}={host!r}: no TCP port is {port}; write one from 1 to 65535, or leave it out")
        if not address or _is_ipv6(address):
            with contextlib.suppress(UsageError):  # it names a field that is not in the user's text
                return SSHHost(host=address or match["host"], user=match["user"], port=int(port) if port else None)
    if isinstance(host, str) and (found := _WITH_PASSWORD.match(host)):  # not repeated: errors go to logs
        raise UsageError(
            f"{field}: a password is in the host of {found['user']!r}, and logins go by keys; write "
            f'"{found["user"]}@name", and give the key as key_file= or load it in the SSH agent',
            field=field.rpartition(".")[2],
        )
    raise UsageError(
        f'{field}={host!r}: not a host; write "name", "user@name", "user@name:port" or an SSHHost, and put an '
        'IPv6 address with a port in brackets: "user@[fd00::2]:22"'
    )


def _is_ipv6(address: str) -> bool:
    return _is_address(address, ipaddress.IPv6Address)


def _is_address(address: str, kind: Callable[[str], object]) -> bool:
    try:
        kind(address)
    except ValueError:  # not an address
        return False
    return True


def target_of(host: SSHHost, config_file: str | os.PathLike[str] | None = None) -> SSHTarget:
    """Return the connection details of a host. Raises UsageError."""
    return SSHTarget(
        host=host.host,
        user=host.user,
        port=host.port,
        key_file=_path(host.key_file),
        jump=host.jump,
        config_file=_path(config_file),
        host_keys=_host_keys("known_hosts" if host.host_keys is None else host.host_keys),
    )


def _path(path: str | os.PathLike[str] | None) -> str | None:
    return os.fspath(path) if isinstance(path, os.PathLike) else path


def _host_keys(option: str | Sequence[str]) -> HostKeys:
    if option == "known_hosts":
        return HostKeys()
    if option == "accept-new":
        return HostKeys(policy="pin")
    keys = (option,) if isinstance(option, str) else option
    if isinstance(keys, Sequence) and keys and all(isinstance(key, str) for key in keys):
        with contextlib.suppress(UsageError):  # it names a field that users do not see
            return HostKeys(policy="given", keys=tuple(keys))
    raise UsageError(
        f'SSH.host_keys={option!r}: not a policy or a list of keys; set "known_hosts", "accept-new" or a list such '
        'as ["ssh-ed25519 AAAA..."] or ["SHA256:..."]'
    )
