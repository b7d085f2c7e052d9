"""Log in to a machine: by which transport, and how one that boots is awaited."""

from __future__ import annotations

import math
import shutil
import threading
import time
from collections.abc import Callable
from typing import Literal

from ..errors import AuthFailed, SkywardError, Unreachable, UsageError
from .connection import Connection
from .failures import is_not_yet
from .target import SSHTarget

__all__ = ["Transport", "connect", "wait_until_ready"]

Transport = Literal["openssh", "paramiko"]
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 2.0
_SHORTEST_TRY_S = 2.0


def connect(
    target: SSHTarget,
    *,
    transport: Transport | None = None,
    stop: threading.Event | None = None,
    timeout_s: float = math.inf,
) -> Connection:
    """Log in, within `target.connect_timeout_s`, or `timeout_s` if that is less.

    `transport` None: OpenSSH's client where there is one, else paramiko.

    When another thread sets `stop`, this ends at once, with Unreachable.

    Raises:
        Unreachable: it does not answer; `is_final` says whether there is no use in trying again.
        AuthFailed: it does not let us in.
        HostKeyUnknown, HostKeyChanged: it may not be the machine that is meant.
        UsageError: the SSH configuration is broken.
        MissingDependency: paramiko is needed and not installed.
    """
    chosen = transport or ("openssh" if shutil.which("ssh") else "paramiko")
    if chosen == "openssh":
        from .openssh import openssh

        connection = openssh(target)
    elif chosen == "paramiko":
        from .pure import pure

        connection = pure(target)
    else:
        raise UsageError(f'transport: {transport!r}; it is "openssh", "paramiko" or None')
    try:
        connection.open(stop, timeout_s)
    except BaseException:
        connection.close()
        raise
    return connection


def wait_until_ready(
    target: SSHTarget,
    *,
    timeout_s: float,
    auth_grace_s: float = 0.0,
    transport: Transport | None = None,
    stop: threading.Event | None = None,
    on_retry: Callable[[SkywardError], None] | None = None,
) -> Connection:
    """`connect`, again and again while the machine may be booting: refused, timed out, no route.

    `auth_grace_s`: for so long after the machine first answered, being refused is "not yet" too: a fresh cloud machine
    starts its sshd before it has our key. `on_retry` is told each error that is not yet final.

    Raises what `connect` raises; Unreachable, with the last reason, after `timeout_s`.
    """
    stop = stop or threading.Event()
    deadline = time.monotonic() + timeout_s
    answered = float("inf")
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            left_s = max(_SHORTEST_TRY_S, deadline - time.monotonic())
            return connect(target, transport=transport, stop=stop, timeout_s=left_s)
        except (Unreachable, AuthFailed) as error:
            now = time.monotonic()
            if isinstance(error, AuthFailed):
                answered = min(answered, now)
            has_grace = isinstance(error, AuthFailed) and now < answered + auth_grace_s
            if not (has_grace or is_not_yet(error)) or stop.is_set():
                raise
            if now + pause_s > deadline:
                raise type(error)(f"{error} (tried for {timeout_s:.0f} s)", **vars(error)) from error.__cause__
            if on_retry is not None:
                on_retry(error)
        if stop.wait(pause_s):
            message = f"ssh {target}: told to stop"
            raise Unreachable(message, host=str(target), is_final=True, was_stopped=True)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
