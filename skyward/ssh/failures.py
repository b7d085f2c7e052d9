"""What SSH clients say, as our errors: one table, for OpenSSH's messages and for those of the sockets below paramiko.

Source of the messages: OpenSSH 9.2, sshconnect.c, sshconnect2.c and readconf.c.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from ..errors import AuthFailed, HostKeyChanged, HostKeyUnknown, SkywardError, Unreachable, UsageError
from .target import SSHTarget

__all__ = ["failure", "is_not_yet"]


def _changed(target: SSHTarget, text: str) -> SkywardError:
    sent = re.search(r"SHA256:[A-Za-z0-9+/]+", text)
    known = re.search(r"Offending (?:.*? )?key in (.*)", text)
    whose = re.search(r"Host key for (\S+) has changed", text)  # it may be that of a host on the way
    name = whose[1] if whose else "the machine"
    fingerprint = sent[0] if sent else "another key"
    where = known[1].strip() if known else "known_hosts"
    return HostKeyChanged(
        f"ssh {target}: {name} sent the host key {fingerprint}, but {where} has another one for it. Either it was "
        "installed anew, or somebody is in between. If you know that it was, remove the old key "
        f"(`ssh-keygen -R` with the host's name, `-f` with that file) and connect again",
        host=str(target),
        fingerprint=fingerprint,
    )


def _revoked(target: SSHTarget, text: str) -> SkywardError:
    sent = re.search(r"SHA256:[A-Za-z0-9+/]+", text)
    return HostKeyChanged(
        f"ssh {target}: the machine sent a host key that known_hosts marks as @revoked ({_saying('revoked', text)}): "
        "somebody may have stolen it. Do not log in before you know",
        host=str(target),
        fingerprint=sent[0] if sent else "",
    )


def _saying(word: str, text: str) -> str:
    lines = (line.strip(" .") for line in text.splitlines() if not line.startswith("@"))
    return next((line for line in lines if word in line.lower()), word)


def _unknown(target: SSHTarget, text: str) -> SkywardError:
    match = re.search(r"host key is known for (\S+)", text)
    whose = f"the host key of {match[1]}" if match else "its host key, or that of a host on the way to it,"
    advice = "log in by hand once, with `ssh`, and compare what it shows"
    return HostKeyUnknown(f"ssh {target}: {whose} is not known: {_last_line(text)} {advice}", host=str(target))


def _refused(target: SSHTarget, text: str) -> SkywardError:
    hints = []
    if "UNPROTECTED PRIVATE KEY" in text or "bad permissions" in text:
        hints.append("the key file can be read by others: chmod 600")
    if missing := re.search(r"Identity file (\S+) not accessible", text):
        hints.append(f"there is no key file {missing[1]}")
    if "Too many authentication" in text:
        hints.append("the agent offers many keys: name one with key_file")
    if not hints:
        hints.append("does `ssh` log in there without asking? A key with a passphrase must be in the agent (ssh-add)")
    return AuthFailed(f"ssh {target}: {_last_line(text)}; {'; '.join(hints)}", host=str(target))


def _not_yet(target: SSHTarget, text: str) -> SkywardError:
    return Unreachable(f"ssh {target}: {_last_line(text)}", host=str(target), is_final=False)


def _final(target: SSHTarget, text: str) -> SkywardError:
    return Unreachable(f"ssh {target}: {_last_line(text)}", host=str(target), is_final=True)


def _unresolved(target: SSHTarget, text: str) -> SkywardError:
    advice = (
        f"is the name right? `ssh -G {target.host}` shows what the SSH configuration makes of it. Give an address, a "
        "name that this machine can resolve, or an alias with a HostName in ~/.ssh/config; behind another host: jump="
    )
    is_final = "emporary" not in text  # no name server answers: it may later
    return Unreachable(f"ssh {target}: {_last_line(text)}; {advice}", host=str(target), is_final=is_final)


def _misconfigured(target: SSHTarget, text: str) -> SkywardError:
    return UsageError(f"ssh {target}: the SSH configuration: {_last_line(text, first=True)}")


_TABLE: tuple[tuple[str, Callable[[SSHTarget, str], SkywardError]], ...] = (
    (r"REVOKED", _revoked),
    (r"HOST IDENTIFICATION HAS CHANGED|Host key for .* has changed", _changed),
    (r"Host key verification failed|host key is known for", _unknown),
    (r"Permission denied|Too many authentication failures|Authentication failed|No more authentication", _refused),
    (r"Bad configuration option|Bad owner or permissions|terminating, \d+ bad|Unsupported option", _misconfigured),
    (r"Name or service not known|nodename nor servname|No address associated|name resolution", _unresolved),
    (r"Unable to negotiate|no matching .* found|protocol identification|not found: ssh", _final),
    # Refused, timed out, no route, closed while it greets: a machine that boots says all of these.
    (r"", _not_yet),
)


def failure(target: SSHTarget, text: str) -> SkywardError:
    """The error for what a client wrote. Unreachable has `is_final`: False where the machine may only be booting."""
    return next(make for pattern, make in _TABLE if re.search(pattern, text))(target, text)


def is_not_yet(error: BaseException) -> bool:
    """Whether the same attempt may succeed when it is made again soon."""
    return isinstance(error, Unreachable) and not error.is_final


def _last_line(text: str, *, first: bool = False) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("@")]
    if not lines:
        return "the client ended and said nothing"
    return lines[0] if first else lines[-1]
