"""What the user's SSH configuration says of a host, for paramiko, which knows of no Include."""

from __future__ import annotations

import glob
import os
import re
from typing import Any

import paramiko

from ..core.ownership import check_file
from .target import SSHTarget

__all__ = ["configuration"]

_DEEPEST = 16
_ANY = "Host *"
_PROBE = "SkywardIsHere"


def configuration(target: SSHTarget) -> dict[str, Any]:
    """By names in lower case. Raises paramiko's ConfigParseError, and UsageError for another user's file."""
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
