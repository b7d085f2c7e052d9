"""Host keys as text: fingerprints, errors about unknown keys, and the known_hosts entries of a machine.

known_hosts files are read as `ssh` reads them. Source: sshd(8), "SSH_KNOWN_HOSTS FILE FORMAT".
"""

from __future__ import annotations

import base64
import binascii
import fnmatch
import hashlib
import hmac
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..core.ownership import check_path
from ..errors import HostKeyChanged, HostKeyUnknown, SkywardError
from .target import SSHTarget


def fingerprint(key: str) -> str:
    """Format a key's fingerprint as `ssh-keygen -l` does. `key`: base64, or "type base64 ..."."""
    words = key.split()
    try:
        blob = base64.b64decode(words[1] if len(words) > 1 else words[0], validate=True)
    except (binascii.Error, IndexError):  # not a key
        return ""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def accepts(target: SSHTarget, key: str) -> bool:
    """Return whether the policy "given" names this key ("type base64")."""
    accepted = {tuple(k.split()[:2]) for k in target.host_keys.keys if " " in k}
    return tuple(key.split()[:2]) in accepted or fingerprint(key) in target.host_keys.fingerprints


def unknown_key(target: SSHTarget, line: str, known_hosts: str) -> SkywardError:
    """Build the error for a machine that sent an unknown key, given as a `line` of known_hosts."""
    key = " ".join(line.split()[1:3])
    shown = f"{key.split()[0]} {fingerprint(key)}"
    if target.host_keys.policy == "given":
        return HostKeyChanged(
            f"ssh {target}: the machine sent the host key {shown}, which host_keys does not name "
            f"({', '.join(target.host_keys.fingerprints or map(fingerprint, target.host_keys.keys))}); if you trust "
            "this key, add it to host_keys",
            host=str(target),
            fingerprint=fingerprint(key),
        )
    return HostKeyUnknown(
        f"ssh {target}: the machine sent the host key {shown}, but {known_hosts} has none for it; compare it with the "
        "machine's own (`ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub` there, or its provider's console). If they "
        f"match, make it known: echo {shlex.quote(line.strip())} >> {known_hosts}",
        host=str(target),
        fingerprint=fingerprint(key),
        known_hosts_line=line.strip(),
    )


# known_hosts ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class KnownKey:
    """Line of known_hosts that concerns the machine.

    Args:
        key: "type base64".
        where: "file:line".
        mark: "revoked", "cert-authority" for a key that signs host keys, or empty.
    """

    key: str
    where: str
    mark: str = ""


def known_keys(files: Iterable[str], name: str) -> list[KnownKey]:
    """List the known keys of a machine.

    Unreadable files count as empty, and broken lines as absent.

    Args:
        files: known_hosts files.
        name: "host", or "[host]:port" if the port is not 22.

    Raises:
        UsageError: another user could have planted one of the files.
    """
    return [key for file in files for key in _lines_of(file, name.lower())]


def _lines_of(file: str, name: str) -> Iterator[KnownKey]:
    check_path(file)
    try:
        with open(file, encoding="utf-8", errors="replace") as lines:
            texts = lines.read().splitlines()
    except OSError:  # no such file, so it knows no host
        return
    for number, text in enumerate(texts, 1):
        words = text.split()
        mark = words.pop(0)[1:] if words and words[0].startswith("@") else ""
        if len(words) >= 3 and not words[0].startswith("#") and _is_about(words[0], name):
            yield KnownKey(key=f"{words[1]} {words[2]}", where=f"{file}:{number}", mark=mark)


def _is_about(patterns: str, name: str) -> bool:
    """Return whether the patterns match. A negated match overrides all others."""
    is_named = False
    for pattern in patterns.lower().split(",") if not patterns.startswith("|") else [patterns]:
        if _fits(pattern.removeprefix("!"), name):
            if pattern.startswith("!"):
                return False
            is_named = True
    return is_named


def _fits(pattern: str, name: str) -> bool:
    if not pattern.startswith("|1|"):
        return fnmatch.fnmatchcase(name, re.sub(r"\[", "[[]", pattern))  # brackets are literal in known_hosts
    try:
        salt, digest = (base64.b64decode(part) for part in pattern[3:].split("|"))
    except (binascii.Error, ValueError):  # a damaged line matches nothing
        return False
    return hmac.compare_digest(hmac.new(salt, name.encode(), hashlib.sha1).digest(), digest)
