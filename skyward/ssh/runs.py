"""Commands over there, by whatever transport: their end when they are interrupted here, and their output's begin."""

from __future__ import annotations

import contextlib
import os
import shlex
import threading
from collections.abc import Callable, Iterator
from typing import BinaryIO

from ..errors import SkywardError, Unreachable
from .command import Completed, Stopped, run_process
from .target import Target

__all__ = ["RemoteRuns", "in_sh"]

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


class RemoteRuns:
    """`run`, `close` and what stops them, over the `_command`, `_is_alive` and `_end` of a transport."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._closing = threading.Event()
        self._changed = threading.Condition()
        self._running = 0
        self._is_closed = False

    def _command(self, command: str, stop: threading.Event | None = None) -> list[str]:
        """A local command that runs it there, over a connection that is known to be alive. Raises Stopped."""
        raise NotImplementedError

    def _is_alive(self) -> bool:
        """Whether there is a connection now."""
        raise NotImplementedError

    def _end(self) -> None:
        """End the connection, whatever its state."""
        raise NotImplementedError

    def terminal(self) -> list[str]:
        """See Connection; not every transport has them."""
        return []

    def run(
        self,
        command: str,
        *,
        input: bytes | BinaryIO | None = None,  # noqa: A002  # as in subprocess.run
        timeout_s: float,
        on_line: Callable[[str], None] | None = None,
        stop: threading.Event | None = None,
    ) -> Completed:
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
            if done.code == _NO_CONNECTION and not self._is_alive():
                message = f"ssh {self.target}: the connection was lost while {_shown(command)} ran; {done.error_text}"
                raise Unreachable(message, host=str(self.target), is_final=False)
            return done

    def _kill_remote(self, mark: str) -> None:
        """A command whose ssh was killed runs on over there, and nobody would ever read what it says."""
        if not self._is_alive():
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
                self._end()

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
