"""Address of a machine: host, login, route, and how the machine proves its identity."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ..core.ownership import check_path
from ..errors import UsageError

_KEY = re.compile(r"(ssh|ecdsa|sk-ssh|sk-ecdsa)-[\w.@-]+ [A-Za-z0-9+/=]+( .*)?$")
_FINGERPRINT = re.compile(r"SHA256:[A-Za-z0-9+/]{43}=?$")


@dataclass(frozen=True, kw_only=True)
class HostKeys:
    """Policy for checking a machine's host key. Every policy refuses a key that differs from the known one.

    Args:
        policy: "known" accepts keys of the user's `known_hosts`. "pin" accepts the first key and writes it to `file`;
            afterwards it accepts only that. "given" accepts only `keys`.
        file: known_hosts file to use instead of the user's and the system's. One file may serve many machines if each
            has its own `alias`, because an address may later belong to another machine.
        alias: name under which the key is looked up, instead of host and port.
        keys: keys of the policy "given": public keys ("ssh-ed25519 AAAA...") or fingerprints ("SHA256:...").

    Raises:
        UsageError: the fields contradict each other.

    Example:
        >>> HostKeys(policy="given", keys=("ssh-ed25519 AAAA",)).fingerprints
        ()
    """

    policy: Literal["known", "pin", "given"] = "known"
    file: str = ""
    alias: str = ""
    """Name under which the key is looked up, instead of host and port."""
    keys: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.policy not in ("known", "pin", "given"):
            raise UsageError(f'HostKeys.policy={self.policy!r}: unknown policy; set "known", "pin" or "given"')
        if (self.policy == "given") != bool(self.keys):
            raise UsageError(
                f"HostKeys.keys={self.keys!r}: does not fit policy={self.policy!r}; give keys with policy='given', and "
                "only then"
            )
        for key in self.keys:
            if not (_KEY.match(key) or _FINGERPRINT.match(key)):
                raise UsageError(
                    f"HostKeys.keys={key!r}: not a key; write 'ssh-ed25519 AAAA...' or a fingerprint 'SHA256:...'"
                )

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """Fingerprints among the keys, without padding."""
        return tuple(key.rstrip("=") for key in self.keys if _FINGERPRINT.match(key))


@dataclass(frozen=True, kw_only=True)
class SSHTarget:
    """A machine in the terms of `ssh`. Fields that are None come from the user's SSH configuration.

    Args:
        host: name, address, or alias of the configuration.
        port: TCP port of sshd, 1 to 65535.
        user: login name.
        key_file: path of the private key.
        jump: hosts to connect through, as in `ssh -J`: "user@host:port", several separated by commas.
        config_file: configuration to read instead of ~/.ssh/config; "none" reads no configuration at all.
        host_keys: how to check the machine's host key.
        connect_timeout_s: seconds for one attempt to connect and log in, > 0.

    Raises:
        UsageError: a field is not legal; the message names it.

    Example:
        >>> str(SSHTarget(host="10.0.0.2", user="me", port=2222))
        'me@10.0.0.2:2222'
    """

    host: str
    port: int | None = None
    user: str | None = None
    key_file: str | None = None
    jump: str | None = None
    config_file: str | None = None
    host_keys: HostKeys = field(default_factory=HostKeys)
    connect_timeout_s: float = 15.0

    def __post_init__(self) -> None:
        check_login(self)
        if not self.connect_timeout_s > 0:
            raise UsageError(
                f"SSHTarget.connect_timeout_s={self.connect_timeout_s!r}: must be a number of seconds > 0; set "
                "connect_timeout_s=15"
            )

    def check_key_file(self) -> None:
        """Refuse a key file that does not exist, or that another user could have planted. Raises UsageError."""
        if self.key_file is None:
            return
        path = os.path.expanduser(self.key_file)
        check_path(path)
        if not os.path.isfile(path):
            raise UsageError(f"ssh {self}: key_file={self.key_file!r}: no such file; name an existing private key")

    def __str__(self) -> str:
        user = f"{self.user}@" if self.user else ""
        host = f"[{self.host}]" if self.port and ":" in self.host else self.host
        return f"{user}{host}:{self.port}" if self.port else f"{user}{host}"

    def to_json(self) -> str:
        """Serialize for the command line of our own process. Contains no secrets."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> SSHTarget:
        fields: dict[str, Any] = json.loads(text)
        keys = fields.pop("host_keys")
        return cls(**fields, host_keys=HostKeys(**{**keys, "keys": tuple(keys["keys"])}))


def check_login(options: object) -> None:
    """Check an object's options that are fields of an SSHTarget. Raises UsageError, which names class and option."""
    owner = type(options).__name__
    # A leading dash would make it an option of ssh.
    for name, kind in (("host", "host"), ("user", "user"), ("jump", "host")):
        value = getattr(options, name, None)
        if value is not None and (not isinstance(value, str) or not re.fullmatch(r"[^-\s'\"][^\s'\"]*", value)):
            raise UsageError(
                f"{owner}.{name}={value!r}: not the name of a {kind}; write text without a leading dash, spaces and "
                "quotes"
            )
    for name in ("key_file", "config_file"):
        value = getattr(options, name, None)
        if value is not None and (not isinstance(value, str | os.PathLike) or not os.fspath(value)):
            raise UsageError(f"{owner}.{name}={value!r}: must be the path of a file; set it, or leave it out")
    port = getattr(options, "port", None)
    if port is not None and not is_port(port):
        raise UsageError(f"{owner}.port={port!r}: must be a whole number from 1 to 65535; set port=22, or leave it out")


def is_port(value: object) -> bool:
    """Return whether a value is a number of a TCP port."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 65536
