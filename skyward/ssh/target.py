"""Which machine, and as whom, by which way, and how it proves that it is the one."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ..core.ownership import check_path
from ..errors import UsageError

__all__ = ["HostKeys", "SSHTarget"]

_KEY = re.compile(r"(ssh|ecdsa|sk-ssh|sk-ecdsa)-[\w.@-]+ [A-Za-z0-9+/=]+( .*)?$")
_FINGERPRINT = re.compile(r"SHA256:[A-Za-z0-9+/]{43}=?$")


@dataclass(frozen=True, kw_only=True)
class HostKeys:
    """How a machine's host key is checked. A key that differs from the known one is refused under every policy.

    policy: "known" takes only what the user's `known_hosts` holds; "pin" takes what comes at the first contact and
        writes it to `file`, from then on only that; "given" takes only `keys`.
    file: instead of the user's, and the machine's, known_hosts files. One file may serve many machines if each has an
        `alias` of its own (an address may be given to another machine later).
    keys: of "given", public keys ("ssh-ed25519 AAAA...") or fingerprints ("SHA256:...").

    Raises UsageError when these do not fit together.
    """

    policy: Literal["known", "pin", "given"] = "known"
    file: str = ""
    alias: str = ""
    """The name under which the key is looked up, instead of host and port."""
    keys: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.policy not in ("known", "pin", "given"):
            raise UsageError(f'HostKeys.policy: {self.policy!r}; it is "known", "pin" or "given"')
        if (self.policy == "given") != bool(self.keys):
            raise UsageError(f"HostKeys.keys: {self.keys!r} with policy={self.policy!r}; they go with 'given'")
        for key in self.keys:
            if not (_KEY.match(key) or _FINGERPRINT.match(key)):
                raise UsageError(f"HostKeys.keys: {key!r} is neither 'ssh-ed25519 AAAA...' nor 'SHA256:...'")

    @property
    def fingerprints(self) -> tuple[str, ...]:
        return tuple(key.rstrip("=") for key in self.keys if _FINGERPRINT.match(key))


@dataclass(frozen=True, kw_only=True)
class SSHTarget:
    """A machine as `ssh` would be told of it; None: whatever the user's SSH configuration says.

    host: a name, an address or an alias of the configuration.
    jump: hosts to go through, as in `ssh -J`: "user@host:port", several with commas between.
    config_file: instead of ~/.ssh/config; "none": no configuration at all.
    connect_timeout_s: for one attempt to connect and log in, > 0.

    Raises UsageError when a field is not legal.
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
        # What begins with a dash would be an option of ssh.
        for name in ("host", "user", "jump"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not re.fullmatch(r"[^-\s'\"][^\s'\"]*", value)):
                raise UsageError(f"Target.{name}: {value!r} is no name of a {'user' if name == 'user' else 'host'}")
        for name in ("key_file", "config_file"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise UsageError(f"Target.{name}: {value!r}; it is the path of a file")
        port = self.port
        if port is not None and (isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 65536):
            raise UsageError(f"Target.port: {self.port!r}; it is a number from 1 to 65535")
        if not self.connect_timeout_s > 0:
            raise UsageError(f"Target.connect_timeout_s: {self.connect_timeout_s!r}; it is a number of seconds > 0")

    def check_key_file(self) -> None:
        """Refuse a key file that is not there, or that a stranger may have put there. Raises UsageError."""
        if self.key_file is None:
            return
        path = os.path.expanduser(self.key_file)
        check_path(path)
        if not os.path.isfile(path):
            raise UsageError(f"ssh {self}: key_file: there is no file {self.key_file}")

    def __str__(self) -> str:
        user = f"{self.user}@" if self.user else ""
        host = f"[{self.host}]" if self.port and ":" in self.host else self.host
        return f"{user}{host}:{self.port}" if self.port else f"{user}{host}"

    def to_json(self) -> str:
        """For the command line of a process of ours: there is nothing secret in it."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> SSHTarget:
        fields: dict[str, Any] = json.loads(text)
        keys = fields.pop("host_keys")
        return cls(**fields, host_keys=HostKeys(**{**keys, "keys": tuple(keys["keys"])}))
