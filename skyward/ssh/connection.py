"""A connection to a machine by whatever transport: commands there, and their end when they are interrupted here."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import threading
from collections.abc import Callable, Iterator
from typing import BinaryIO, Protocol

from ..errors import SkywardError, Unreachable
from . import launch
from .command import SSHResult, Stopped, run_process
from .target import SSHTarget

__all__ = ["Connection", "Holder", "in_sh"]

_VARIABLE = "SKYWARD_RUN"
_KILL_LIMIT_S = 5.0
_NO_CONNECTION = 255
# Until there are none: what is killed may have been about to fork.
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
    """The process that holds the TCP connection, for whoever knows its `folder`.

    It was started by whoever came first, and ends by itself when it has had no user for a while; so nobody owns it,
    and each user makes sure that it is there.
    """

    target: SSHTarget
    folder: str

    def ensure(self, stop: threading.Event | None = None, timeout_s: float = math.inf) -> None:
        """Log in unless somebody has, in `timeout_s` if that is less than the target's own limit.

        One that hangs is killed first. Raises what `connect` raises; Stopped.
        """
        ...

    def command(self, command: str) -> list[str]:
        """A local command that runs it there, right after `ensure`."""
        ...

    def is_alive(self) -> bool:
        """Whether it answers. That says nothing about the machine at the other end."""
        ...

    def end(self) -> None:
        """End it, and with it all that goes through it; remove its folder."""
        ...


class Connection:
    """One TCP connection to a machine, for any number of commands; made anew by itself when it was lost.

    Thread-safe. `close` may be called by any thread, more than once: it ends the commands that run, and the
    connection, unless somebody else still uses what `argv` gave him; then it ends with the last of them.

    Args:
        holder: the process that holds it.
        module: its `main(folder, target, command)` is what `argv` runs.
        terminal: a module whose `main` is what `terminal` runs; empty: this transport has no terminals.
    """

    def __init__(self, holder: Holder, module: str, *, terminal: str = "") -> None:
        self.target = holder.target
        self._holder = holder
        self._module = module
        self._terminal = terminal
        self._closing = threading.Event()
        self._changed = threading.Condition()
        self._running = 0
        self._is_closed = False

    def open(self, stop: threading.Event | None = None, timeout_s: float = math.inf) -> None:
        """Log in."""
        try:
            self._holder.ensure(stop, timeout_s)
        except Stopped as stopped:
            raise self._stopped() from stopped

    def argv(self, command: str) -> list[str]:
        """A command of this machine that runs `command`, a line of sh, over there.

        Its standard input, output and error and its exit code are those of the remote command. It may be run at any
        time, by any process of this user, any number of times, also when the connection was lost meanwhile. 255:
        there was no connection, and standard error says why. Over there, the end of the input is all that a command
        learns of it when this one is killed.
        """
        return launch.argv(self._module, self._holder.folder, self.target, in_sh(command))

    def terminal(self) -> list[str]:
        """A command of this machine that opens the user's shell there, on the terminal it is run on.

        With one more argument, a line of sh, it runs that instead. Empty: this transport has no terminals.
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
        """Run `command`, a line of sh, over there, and wait for its end; its exit code is the caller's to judge.

        `input` is sent to it, a file piece by piece. `on_line` is called with each line of both streams when it
        comes, by this thread. What a login shell prints before the command is left out.

        A command that does not end in time, or is interrupted here, is killed over there too, with what it started.
        Another thread interrupts it by setting `stop`.

        Raises TimeoutError; Unreachable when the connection is lost meanwhile or closed by another thread, or `stop`
        is set; and what `connect` raises.
        """
        either = _Either(self._closing, stop)
        with self._counted():
            mark = f"{_VARIABLE}={os.urandom(8).hex()}"
            line = f"exec env {mark} sh -c {shlex.quote(f'echo {mark}; {command}')}"
            try:
                argv = self._command(line, either)
                done = run_process(argv, input=input, timeout_s=timeout_s, on_line=on_line, marker=mark, stop=either)
            except BaseException as error:  # Ctrl-C, and what on_line raises
                self._kill_remote(mark)
                if isinstance(error, Stopped):
                    raise self._stopped() from error
                if isinstance(error, TimeoutError):
                    raise TimeoutError(f"ssh {self.target}: {_shown(command)}: {error}") from None
                raise
            if done.code == _NO_CONNECTION and not self._holder.is_alive():
                message = f"ssh {self.target}: the connection was lost while {_shown(command)} ran; {done.error_text}"
                raise Unreachable(message, host=str(self.target), is_final=False)
            return done

    def _kill_remote(self, mark: str) -> None:
        """A command whose ssh was killed runs on over there, and nobody would ever read what it says."""
        if not self._holder.is_alive():
            return
        try:
            run_process(self._command(in_sh(_KILL % mark)), timeout_s=_KILL_LIMIT_S)
        except (TimeoutError, SkywardError):
            return  # there is no way to it any more

    def _stopped(self) -> Unreachable:
        why = "the connection was closed here" if self._closing.is_set() else "told to stop"
        return Unreachable(f"ssh {self.target}: {why}", host=str(self.target), is_final=True, was_stopped=True)

    def close(self) -> None:
        self._closing.set()
        with self._changed:
            # They kill over there what they had begun, and need the connection for that.
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
    """Set when one of two is. It can be asked, and not waited for."""

    def __init__(self, one: threading.Event, other: threading.Event | None) -> None:
        super().__init__()
        self._both = (one,) if other is None else (one, other)

    def is_set(self) -> bool:
        return any(event.is_set() for event in self._both)


def in_sh(command: str) -> str:
    """The same for any log-in shell."""
    return f"exec sh -c {shlex.quote(command)}"


def _shown(command: str) -> str:
    words = " ".join(command.split())
    return repr(words if len(words) <= 60 else words[:57] + "...")
