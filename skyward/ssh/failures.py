"""One table that translates messages of SSH clients into skyward's errors: OpenSSH's, and those of paramiko's sockets.

Source of the messages: OpenSSH 9.2, sshconnect.c, sshconnect2.c and readconf.c.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from ..errors import AuthFailed, HostKeyChanged, HostKeyUnknown, SkywardError, Unreachable, UsageError
from .target import SSHTarget


def _changed(target: SSHTarget, text: str) -> SkywardError:
    sent = re.search(r"SHA256:[A-Za-z0-9+/]+", text)
    known = re.search(r"Offending (?:.*? )?key in (.*)", text)
    whose = re.search(r"Host key for (\S+) has changed", text)  # a jump host may have sent it
    name = whose[1] if whose else "the machine"
    fingerprint = sent[0] if sent else "another key"
    where = known[1].strip() if known else "known_hosts"
    return HostKeyChanged(
        f"ssh {target}: {name} sent the host key {fingerprint}, but {where} has another one for it. Either the machine "
        "was reinstalled, or somebody intercepts the connection; if you know that it was reinstalled, remove the old "
        f"key (`ssh-keygen -R` with the host's name, `-f` with that file) and reconnect",
        host=str(target),
        fingerprint=fingerprint,
    )


def _revoked(target: SSHTarget, text: str) -> SkywardError:
    sent = re.search(r"SHA256:[A-Za-z0-9+/]+", text)
    return HostKeyChanged(
        f"ssh {target}: the machine sent a host key that known_hosts marks as @revoked ({_saying('revoked', text)}). "
        "The key may be stolen; find out before you log in",
        host=str(target),
        fingerprint=sent[0] if sent else "",
    )


def _saying(word: str, text: str) -> str:
    lines = (line.strip(" .") for line in text.splitlines() if not line.startswith("@"))
    return next((line for line in lines if word in line.lower()), word)


def _unknown(target: SSHTarget, text: str) -> SkywardError:
    match = re.search(r"host key is known for (\S+)", text)
    whose = f"the host key of {match[1]}" if match else "its host key, or that of a jump host,"
    advice = "log in once by hand with `ssh`, and compare the key that it shows"
    return HostKeyUnknown(
        f"ssh {target}: {whose} is unknown: {_last_line(text).rstrip('.')}; {advice}", host=str(target)
    )


def _refused(target: SSHTarget, text: str) -> SkywardError:
    hints = []
    if "UNPROTECTED PRIVATE KEY" in text or "bad permissions" in text:
        hints.append("make the key file private: chmod 600")
    if missing := re.search(r"Identity file (\S+) not accessible", text):
        hints.append(f"create the missing key file {missing[1]}, or name another with key_file")
    if "Too many authentication" in text:
        hints.append("name one key with key_file, because the agent offers too many")
    if not hints:
        hints.append(
            "check that `ssh` logs in there without a prompt; load a key with a passphrase into the agent (ssh-add)"
        )
    return AuthFailed(f"ssh {target}: {_last_line(text)}; {'; '.join(hints)}", host=str(target))


def _not_yet(target: SSHTarget, text: str) -> SkywardError:
    advice = "check that the machine is on, and that `ssh` reaches it from here"
    return Unreachable(f"ssh {target}: {_last_line(text)}; {advice}", host=str(target), is_final=False)


def _final(target: SSHTarget, text: str) -> SkywardError:
    advice = "check both programs: `ssh -v` shows what they offer each other"
    return Unreachable(f"ssh {target}: {_last_line(text)}; {advice}", host=str(target), is_final=True)


def _unresolved(target: SSHTarget, text: str) -> SkywardError:
    advice = (
        f"check the name: `ssh -G {target.host}` shows how the SSH configuration reads it. Use an address, a name that "
        "this machine can resolve, or an alias with a HostName in ~/.ssh/config; behind another host, set jump="
    )
    is_final = "emporary" not in text  # a temporary failure: no name server answered, and a retry may succeed
    return Unreachable(f"ssh {target}: {_last_line(text)}; {advice}", host=str(target), is_final=is_final)


def _misconfigured(target: SSHTarget, text: str) -> SkywardError:
    line = _last_line(text, first=True)
    return UsageError(f"ssh {target}: the SSH configuration is broken: {line}; fix that line, or set config_file")


_TABLE: tuple[tuple[str, Callable[[SSHTarget, str], SkywardError]], ...] = (
    (r"REVOKED", _revoked),
    (r"HOST IDENTIFICATION HAS CHANGED|Host key for .* has changed", _changed),
    (r"Host key verification failed|host key is known for", _unknown),
    (r"Permission denied|Too many authentication failures|Authentication failed|No more authentication", _refused),
    (r"Bad configuration option|Bad owner or permissions|terminating, \d+ bad|Unsupported option", _misconfigured),
    (r"Name or service not known|nodename nor servname|No address associated|name resolution", _unresolved),
    (r"Unable to negotiate|no matching .* found|protocol identification|not found: ssh", _final),
    # Refused, timed out, no route, closed during the greeting: a booting machine causes all of these.
    (r"", _not_yet),
)


def failure(target: SSHTarget, text: str) -> SkywardError:
    """Build the error for a client's message. Unreachable has `is_final` False if the machine may only be booting."""
    return next(make for pattern, make in _TABLE if re.search(pattern, text))(target, text)


def is_not_yet(error: BaseException) -> bool:
    """Return whether a retry may succeed soon."""
    return isinstance(error, Unreachable) and not error.is_final


def _last_line(text: str, *, first: bool = False) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("@")]
    if not lines:
        return "the client exited without a message"
    return lines[0] if first else lines[-1]
