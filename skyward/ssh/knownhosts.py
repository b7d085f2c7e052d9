"""What known_hosts files say of a machine, as `ssh` reads them. Source: sshd(8), "SSH_KNOWN_HOSTS FILE FORMAT"."""

from __future__ import annotations

import base64
import binascii
import fnmatch
import hashlib
import hmac
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..core.ownership import check_path

__all__ = ["KnownKey", "known_keys"]


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
