"""Host keys as text: fingerprints, what to say of a key that is not known, and what known_hosts files say of a machine.

Those files are read as `ssh` reads them. Source: sshd(8), "SSH_KNOWN_HOSTS FILE FORMAT".
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

__all__ = ["KnownKey", "accepts", "fingerprint", "known_keys", "unknown_key"]


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


# known_hosts ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class KnownKey:
    """A line that is about the machine.

    key: "type base64".
    where: "file:line".
    mark: "revoked", or "cert-authority" for a key that signs those of machines, or empty.
    """

    key: str
    where: str
    mark: str = ""


def known_keys(files: Iterable[str], name: str) -> list[KnownKey]:
    """Of the machine that is looked up by `name`: "host", or "[host]:port" where that is not 22.

    Files that cannot be read count as empty, lines that are broken as absent. Raises UsageError for a file that a
    stranger may have put there.
    """
    return [key for file in files for key in _lines_of(file, name.lower())]


def _lines_of(file: str, name: str) -> Iterator[KnownKey]:
    check_path(file)
    try:
        with open(file, encoding="utf-8", errors="replace") as lines:
            texts = lines.read().splitlines()
    except OSError:  # no such file: it knows no host
        return
    for number, text in enumerate(texts, 1):
        words = text.split()
        mark = words.pop(0)[1:] if words and words[0].startswith("@") else ""
        if len(words) >= 3 and not words[0].startswith("#") and _is_about(words[0], name):
            yield KnownKey(key=f"{words[1]} {words[2]}", where=f"{file}:{number}", mark=mark)


def _is_about(patterns: str, name: str) -> bool:
    """One that is negated wins over all others."""
    is_named = False
    for pattern in patterns.lower().split(",") if not patterns.startswith("|") else [patterns]:
        if _fits(pattern.removeprefix("!"), name):
            if pattern.startswith("!"):
                return False
            is_named = True
    return is_named


def _fits(pattern: str, name: str) -> bool:
    if not pattern.startswith("|1|"):
        return fnmatch.fnmatchcase(name, re.sub(r"\[", "[[]", pattern))  # only * and ? mean something
    try:
        salt, digest = (base64.b64decode(part) for part in pattern[3:].split("|"))
    except (binascii.Error, ValueError):  # a damaged line matches nothing
        return False
    return hmac.compare_digest(hmac.new(salt, name.encode(), hashlib.sha1).digest(), digest)
