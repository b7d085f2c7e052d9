"""Host keys as text: lines of known_hosts, fingerprints, and what to say of a key that is not known."""

from __future__ import annotations

import base64
import binascii
import hashlib
import shlex

from ..errors import HostKeyChanged, HostKeyUnknown, SkywardError
from .target import SSHTarget

__all__ = ["accepts", "fingerprint", "unknown_key"]


def fingerprint(key: str) -> str:
    """`key`: base64, or "type base64 ..."; as `ssh-keygen -l` shows it."""
    words = key.split()
    try:
        blob = base64.b64decode(words[1] if len(words) > 1 else words[0], validate=True)
    except (binascii.Error, IndexError):  # no key
        return ""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def accepts(target: SSHTarget, key: str) -> bool:
    """Whether `key` ("type base64") is one of those that the policy "given" names."""
    given = {tuple(k.split()[:2]) for k in target.host_keys.keys if " " in k}
    return tuple(key.split()[:2]) in given or fingerprint(key) in target.host_keys.fingerprints


def unknown_key(target: SSHTarget, line: str, known_hosts: str) -> SkywardError:
    """The error for a machine that sent the key in `line` (of known_hosts), which nothing here knows."""
    key = " ".join(line.split()[1:3])
    shown = f"{key.split()[0]} {fingerprint(key)}"
    if target.host_keys.policy == "given":
        return HostKeyChanged(
            f"ssh {target}: the machine sent the host key {shown}, which is none of those that were given for it "
            f"({', '.join(target.host_keys.fingerprints or map(fingerprint, target.host_keys.keys))})",
            host=str(target),
            fingerprint=fingerprint(key),
        )
    return HostKeyUnknown(
        f"ssh {target}: the machine sent the host key {shown}, and {known_hosts} has none for it. Compare that with "
        "what the machine says of itself (`ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub` there, or its "
        f"provider's console). If it is the same, this makes it known: "
        f"echo {shlex.quote(line.strip())} >> {known_hosts}",
        host=str(target),
        fingerprint=fingerprint(key),
        known_hosts_line=line.strip(),
    )
