"""A connection to a machine: what both transports offer, how one is chosen, and how a machine that boots is awaited."""

from __future__ import annotations

import math
import shutil
import threading
import time
from collections.abc import Callable
from typing import BinaryIO, Literal, Protocol

from ..errors import AuthFailed, SkywardError, Unreachable, UsageError
from .command import SSHResult
from .failures import is_not_yet
from .runs import Pooled
from .target import SSHTarget

__all__ = ["SSHResult", "Connection", "Transport", "connect", "wait_until_ready"]

Transport = Literal["openssh", "paramiko"]
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 2.0
_SHORTEST_TRY_S = 2.0


class Connection(Protocol):
    """One TCP connection to a machine, for any number of commands; made anew by itself when it was lost.

    Thread-safe. `close` may be called by any thread, more than once: it ends the commands that run, and the
    connection, unless somebody else still uses what `argv` gave him; then it ends with the last of them.
    """

    @property
    def target(self) -> SSHTarget: ...

    def argv(self, command: str) -> list[str]:
        """A command of this machine that runs `command`, a line of sh, over there.

        Its standard input, output and error and its exit code are those of the remote command. It may be run at any
        time, by any process of this user, any number of times, also when the connection was lost meanwhile. 255:
        there was no connection, and standard error says why. Over there, the end of the input is all that a command
        learns of it when this one is killed.
        """
        ...

    def run(
        self,
        command: str,
        *,
        input: bytes | BinaryIO | None = None,  # noqa: A002  # as in subprocess.run
        timeout_s: float,
        on_line: Callable[[str], None] | None = None,
        stop: threading.Event | None = None,
    ) -> SSHResult:
        """Run `command`, a line of sh, over there, and wait for its end; its exit code is the caller's to judge.

        `input` is sent to it, a file piece by piece. `on_line` is called with each line of both streams when it
        comes, by this thread. What a login shell prints before the command is left out.

        A command that does not end in time, or is interrupted here, is killed over there too, with what it started.
        Another thread interrupts it by setting `stop`.

        Raises TimeoutError; Unreachable when the connection is lost meanwhile or closed by another thread, or `stop`
        is set; and what `connect` raises.
        """
        ...

    def terminal(self) -> list[str]:
        """A command of this machine that opens the user's shell there, on the terminal it is run on.

        With one more argument, a line of sh, it runs that instead. Empty: this transport has no terminals.
        """
        ...

    def close(self) -> None: ...


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
    made: Pooled
    if chosen == "openssh":
        from .openssh import openssh

        made = openssh(target)
    elif chosen == "paramiko":
        from .pure import pure

        made = pure(target)
    else:
        raise UsageError(f'transport: {transport!r}; it is "openssh", "paramiko" or None')
    try:
        made.open(stop, timeout_s)
    except BaseException:
        made.close()
        raise
    return made


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
