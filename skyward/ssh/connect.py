"""Log in to a machine, with retries while it boots."""

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
    """Log in to a machine.

    Args:
        target: the machine.
        transport: "openssh", "paramiko", or None for OpenSSH's client if it is installed, else paramiko.
        stop: another thread sets it to end the attempt at once, with Unreachable.
        timeout_s: seconds for the attempt, if that is less than `target.connect_timeout_s`.

    Returns:
        An open connection. The caller closes it.

    Raises:
        Unreachable: the machine does not answer. `is_final` says that retrying is useless.
        AuthFailed: the machine refuses the login.
        HostKeyUnknown, HostKeyChanged: it might be another machine than the intended one.
        UsageError: the SSH configuration is broken.
        MissingDependency: paramiko is needed but not installed.

    Example:
        connection = connect(SSHTarget(host="gpu1"))
        print(connection.run("nvidia-smi -L", timeout_s=10).text)
        connection.close()
    """
    chosen = transport or ("openssh" if shutil.which("ssh") else "paramiko")
    if chosen == "openssh":
        from .openssh import openssh

        connection = openssh(target)
    elif chosen == "paramiko":
        from .pure import pure

        connection = pure(target)
    else:
        raise UsageError(f'transport={transport!r}: unknown transport; set "openssh", "paramiko" or None')
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
    """Log in, and retry while the machine may be booting: refused, timed out, no route.

    Args:
        target: the machine.
        timeout_s: seconds until the last error is raised.
        auth_grace_s: seconds after the first answer during which a refused login is retried, because a fresh cloud
            machine starts its sshd before it has our key.
        transport: as for `connect`.
        stop: another thread sets it to end the wait at once, with Unreachable.
        on_retry: called with each error before a retry.

    Returns:
        An open connection. The caller closes it.

    Raises:
        Unreachable: `timeout_s` has passed; the message has the last reason.
        SkywardError: any other error of `connect`.

    Example:
        connection = wait_until_ready(SSHTarget(host="gpu1"), timeout_s=300, on_retry=print)
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
            message = f"ssh {target}: stopped on request; open the pool again"
            raise Unreachable(message, host=str(target), is_final=True, was_stopped=True)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
