"""Connection to a machine over any transport: runs commands there, and kills them there when interrupted here."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import socket
import threading
from collections.abc import Callable, Iterator
from typing import BinaryIO, Protocol

from ..errors import SkywardError, Unreachable
from . import launch
from .command import SSHResult, Stopped, run_process
from .target import SSHTarget

_VARIABLE = "SKYWARD_RUN"
_KILL_LIMIT_S = 5.0
_NO_CONNECTION = 255
# Repeated until none is found, because a process may fork just before it is killed.
_KILL = """
for i in 1 2 3 4 5; do
  found=
  for p in /proc/[0-9]*; do
    [ "${p#/proc/}" = "$$" ] && continue
    if tr '\\0' '\\n' < "$p/environ" 2>/dev/null | grep -qx "%s"; then found=1; kill -9 "${p#/proc/}" 2>/dev/null; fi
  done
  [ -z "$found" ] && break
done
"""


class Holder(Protocol):
    """The process that holds the TCP connection, for every user that knows its `folder`.

    The first user starts it. It exits by itself after a while without users. So nobody owns it, and each user makes
    sure that it runs.
    """

    target: SSHTarget
    folder: str

    def ensure(self, stop: threading.Event | None = None, timeout_s: float = math.inf) -> None:
        """Log in unless the holder is already logged in. A holder that hangs is killed first.

        Takes at most `timeout_s`, or the target's own limit if that is less. Raises what `connect` raises; Stopped.
        """
        ...

    def command(self, command: str) -> list[str]:
        """Return a local command that runs it there. Call `ensure` right before."""
        ...

    def dial(self, port: int) -> socket.socket:
        """Connect to a port on the machine's loopback. Raises OSError if the holder is gone: call `ensure` then."""
        ...

    def is_alive(self) -> bool:
        """Return whether the holder answers. Says nothing about the machine at the other end."""
        ...

    def end(self) -> None:
        """End the holder and every command that runs through it; remove its folder."""
        ...


class Connection:
    """One TCP connection to a machine, for any number of commands; reconnects by itself.

    Thread-safe. Any thread may call `close`, more than once. It ends the running commands and the connection. If
    another process still uses a command line from `argv`, the connection ends with the last of these.

    Args:
        holder: the process that holds the TCP connection.
        module: module whose `main(folder, target, command)` `argv` runs.
        terminal: module whose `main` `terminal` runs; empty if the transport has no terminals.
        by: name of the way, for messages.

    Example:
        connection = connect(SSHTarget(host="gpu1"))
        result = connection.run("df -h /", timeout_s=10)
        print(result.code, result.text)
        connection.close()
    """

    def __init__(self, holder: Holder, module: str, *, terminal: str = "", by: str = "ssh") -> None:
        self.target = holder.target
        self._holder = holder
        self._module = module
        self._terminal = terminal
        self._by = by
        self._closing = threading.Event()
        self._changed = threading.Condition()
        self._running = 0
        self._is_closed = False

    def open(self, stop: threading.Event | None = None, timeout_s: float = math.inf) -> None:
        """Log in, within `timeout_s` seconds or the target's limit, whichever is less."""
        try:
            self._holder.ensure(stop, timeout_s)
        except Stopped as stopped:
            raise self._stopped() from stopped

    def argv(self, command: str) -> list[str]:
        """Return a local command line that runs `command`, a line of sh, on the machine.

        Its standard streams and exit code are those of the remote command. Any process of this user may run it, at any
        time and any number of times, even after the connection was lost. Exit code 255: there was no connection, and
        standard error says why. When the local command is killed, the remote one only sees the end of its input.

        Args:
            command: a line of sh.
        """
        return launch.argv(self._module, self._holder.folder, self.target, in_sh(command))

    def dial(self, port: int) -> socket.socket:
        """Connect to a port on the machine's loopback.

        If nobody listens there, or sshd forbids forwarding, the connection is closed at once.

        Args:
            port: TCP port, 1 to 65535.

        Raises:
            SkywardError: any error of `connect`.
            OSError: the connection was lost in this moment.
        """
        with self._counted():
            try:
                return self._holder.dial(port)
            except OSError:  # a holder ends when the machine is silent, or after a while without users
                self._holder.ensure(self._closing)
                return self._holder.dial(port)

    def terminal(self) -> list[str]:
        """Return a local command line that opens the user's shell there, on the terminal that runs it.

        With one more argument, a line of sh, it runs that instead. Empty if this transport has no terminals.
        """
        if not self._terminal:
            return []
        return launch.argv(self._terminal, self._holder.folder, self.target, "")[:-1]

    def _command(self, command: str, stop: threading.Event | None = None) -> list[str]:
        self._holder.ensure(stop)
        return self._holder.command(command)

    def run(
        self,
        command: str,
        *,
        input: bytes | BinaryIO | None = None,  # noqa: A002  # as in subprocess.run
        timeout_s: float,
        on_line: Callable[[str], None] | None = None,
        stop: threading.Event | None = None,
    ) -> SSHResult:
        """Run a line of sh on the machine and wait for its end. The caller judges the exit code.

        Output of the login shell before the command is dropped. A command that times out or is interrupted here is
        killed on the machine too, with its children.

        Args:
            command: a line of sh.
            input: data to send, or a file to send piece by piece.
            timeout_s: seconds until the command is killed.
            on_line: called by this thread with each line of both streams as it arrives.
            stop: another thread sets it to interrupt the command.

        Raises:
            TimeoutError: the command ran longer than `timeout_s`.
            Unreachable: the connection was lost, another thread closed it, or `stop` was set.
            SkywardError: any other error of `connect`.
        """
        either = _Either(self._closing, stop)
        with self._counted():
            mark = f"{_VARIABLE}={os.urandom(8).hex()}"
            line = f"exec env {mark} sh -c {shlex.quote(f'echo {mark}; {command}')}"
            try:
                argv = self._command(line, either)
                done = run_process(argv, input=input, timeout_s=timeout_s, on_line=on_line, marker=mark, stop=either)
            except BaseException as error:  # KeyboardInterrupt and errors of on_line too: leave no command behind
                self._kill_remote(mark)
                if isinstance(error, Stopped):
                    raise self._stopped() from error
                if isinstance(error, TimeoutError):
                    raise TimeoutError(
                        f"{self._by} {self.target}: {_shown(command)}: {error}; log in there, and see what it waits for"
                    ) from None
                raise
            if done.code == _NO_CONNECTION and not self._holder.is_alive():
                said = f"{_shown(command)} ran ({done.error_text})"
                message = (
                    f"{self._by} {self.target}: the connection was lost while {said}; check the network, then retry"
                )
                raise Unreachable(message, host=str(self.target), is_final=False)
            return done

    def _kill_remote(self, mark: str) -> None:
        """Kill a command whose ssh was killed: it would run on there, and nobody would read its output."""
        if not self._holder.is_alive():
            return
        try:
            run_process(self._command(in_sh(_KILL % mark)), timeout_s=_KILL_LIMIT_S)
        except (TimeoutError, SkywardError):
            return  # the machine can no longer be reached

    def _stopped(self) -> Unreachable:
        why = "the connection was closed here" if self._closing.is_set() else "stopped on request"
        message = f"{self._by} {self.target}: {why}; open the pool again"
        return Unreachable(message, host=str(self.target), is_final=True, was_stopped=True)

    def close(self) -> None:
        """End the running commands and the connection. Idempotent."""
        self._closing.set()
        with self._changed:
            # Running commands kill their remote side first, and need the connection for that.
            self._changed.wait_for(lambda: not self._running, _KILL_LIMIT_S + 1)
            if not self._is_closed:
                self._is_closed = True
                self._holder.end()

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        with self._changed:
            if self._closing.is_set():
                raise self._stopped()
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()


class _Either(threading.Event):
    """Event that is set when either of two is. Only `is_set` works; nobody can wait for it."""

    def __init__(self, one: threading.Event, other: threading.Event | None) -> None:
        super().__init__()
        self._both = (one,) if other is None else (one, other)

    def is_set(self) -> bool:
        return any(event.is_set() for event in self._both)


def in_sh(command: str) -> str:
    """Wrap a line of sh so that every login shell runs it alike."""
    return f"exec sh -c {shlex.quote(command)}"


def _shown(command: str) -> str:
    words = " ".join(command.split())
    return repr(words if len(words) <= 60 else words[:57] + "...")
