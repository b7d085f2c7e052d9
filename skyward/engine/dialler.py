"""Links to an agent by a command whose standard input and output are the stream."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import InternalError, Unreachable
from ..values.machine import Gone
from ..wire.ends import Ends
from ..wire.frames import HEADER, MAX_BODY, PROTOCOL_VERSION, FrameKind, pack
from ..wire.stream import MAGIC, StreamChannel

__all__ = ["LINK_TIMES", "CommandEnds", "Dialler", "Forgotten", "LinkTimes"]

_BUFFER_SIZE = 256 << 10
_STDERR_TAIL = 2000
_KILLED_S = 2.0
_CHATTER_LIMIT = 64 * 1024
"""Bytes that a user's shell may print before the agent speaks."""


_NO_AGENT = 69
"""Exit code of the stub: it is on the node, and no agent is."""
_EXIT_S = 1.0


@dataclass(frozen=True, kw_only=True)
class LinkTimes:
    """Seconds. `ping_s` and `dead_s` are shorter where a lease is short."""

    ping_s: float = 2.0
    """Of silence, after which a link is asked."""
    dead_s: float = 8.0
    """Of silence, after which it is dead."""
    measure_s: float = 5.0
    """Between two measurements of the round trip of a busy link."""
    dial_s: float = 20.0
    """For one attempt to reach a node."""
    backoff_s: float = 0.1
    """Before the second attempt; twice as much before each further one, at most `most_backoff_s`."""
    most_backoff_s: float = 5.0
    margin_s: float = 2.0
    """Beyond the lease, until a node counts as lost: its watchdog's, and that of clocks that do not agree."""


LINK_TIMES = LinkTimes()


class Forgotten(Exception):
    """The agent that knew the session is gone. Never seen by users.

    Attributes: `gone` (why its machine is; None: it may still run).
    """

    def __init__(self, message: str, gone: Gone | None = None) -> None:
        super().__init__(message)
        self.gone = gone


class CommandEnds(Ends):
    """One end of a socket whose other end is a command's standard input and output.

    The command leads a session of its own, so that a Ctrl-C at the terminal passes it by; `close` kills it and what
    it started there.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        """Raises Unreachable: there is no such command, or no descriptor or process for it."""
        with contextlib.ExitStack() as kept, contextlib.ExitStack() as passed:
            try:
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
                kept.callback(ours.close)
                passed.callback(theirs.close)
                for sock in (ours, theirs):  # a piece of a blob must fit at once
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_SIZE)
                self._stderr, stderr = os.pipe()
                kept.callback(os.close, self._stderr)
                passed.callback(os.close, stderr)
                os.set_blocking(self._stderr, False)
                os.set_blocking(stderr, False)  # what is too much is lost, and holds up nobody
                self._process = subprocess.Popen(
                    list(argv), stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=stderr, start_new_session=True
                )
            except OSError as error:
                raise Unreachable(f"{argv[0]}: it cannot be run: {error.strerror}", node=None) from error
            kept.pop_all()
        self._said = ""
        fd = ours.detach()
        super().__init__(fd, fd)

    def said(self) -> str:
        """The last of what the command wrote to its standard error."""
        with contextlib.suppress(OSError):  # nothing is there
            while self._stderr >= 0 and (piece := os.read(self._stderr, 65536)):
                self._said = (self._said + piece.decode(errors="replace"))[-_STDERR_TAIL:]
        return self._said.strip()

    def finish(self, deadline: float) -> None:
        """Say that nothing more is sent, and give the command until `deadline` (monotonic) to end by itself."""
        with contextlib.suppress(OSError):  # the command ended before: nobody is left to tell
            sock = socket.socket(fileno=self.write_fd)
            try:
                sock.shutdown(socket.SHUT_WR)
            finally:
                sock.detach()
            _read_to_end(self.read_fd, deadline)

    def exit_code(self, limit_s: float) -> int | None:
        """Of the command, once it has ended by itself; None: not within that time."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            # Not `wait`: until it is reaped its number is its own, and `close` may kill what it started.
            ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            if ended is not None:
                return ended.si_status if ended.si_code == os.CLD_EXITED else None
            time.sleep(0.005)
        return None

    def kill(self) -> None:
        """By any thread; the reader sees the end of the stream."""
        if self._process.returncode is None:  # nobody has waited for it, so the number is still its own
            with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended
                os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        super().close()
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel; it dies when that lets go
            self._process.wait(_KILLED_S)
        self.said()
        self._close_stderr()

    def close_in_child(self) -> None:
        super().close_in_child()
        self._close_stderr()
        self._process.returncode = 0  # not our child

    def _close_stderr(self) -> None:
        if self._stderr >= 0:
            os.close(self._stderr)
            self._stderr = -1


def _read_to_end(fd: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while (left_s := deadline - time.monotonic()) > 0 and poll.poll(left_s * 1000):
        if not os.read(fd, 65536):
            return


class Dialler:
    """Makes the links of one session with an agent, one after another, each by running `argv`.

    `dial` is for one thread at a time, and so is `widen`; `close` may be called by another, and ends them.

    HELLO is json. Beside what each says, that of a client says `token`, which names the session, `link`, which counts
    its links, and either `is_resumed` and `received`, or, for a further channel of that link, `stripe` and `stripes`:
    it is that one of so many, the first being 0.
    """

    def __init__(self, argv: Sequence[str], *, role: str, pool: str, node: int) -> None:
        self._node = node
        self.channel = StreamChannel(checks_blobs=False)
        self._argv = tuple(argv)
        self._hello: dict[str, Any] = {"version": PROTOCOL_VERSION, "role": role, "pool": pool, "pid": os.getpid()}
        self._hello["token"] = secrets.token_hex(8)
        self._is_known = False
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._dialled: set[CommandEnds] = set()
        """Of a `dial` or a `widen` that has not returned."""
        self.link = 0
        """The number of the link that was dialled last."""

    def dial(self, timeout_s: float) -> tuple[Ends, dict[str, Any]]:
        """A new link, and the facts that the agent says of itself; `facts["received"]` is for `attach`.

        Raises Unreachable when it does not answer in time, Forgotten, InternalError when it speaks another version.
        """
        self.link += 1
        ends = CommandEnds(self._argv)
        try:
            self._begin(ends)
            hello = {"is_resumed": self._is_known, "received": self.channel.received}
            self._say_hello(ends, hello)
            facts = self._greeting(ends, time.monotonic() + timeout_s)
        except (OSError, EOFError, TimeoutError) as error:
            code = ends.exit_code(_EXIT_S) if isinstance(error, EOFError) else None
            ends.close()
            if code == _NO_AGENT and self._is_known:
                raise Forgotten(ends.said()) from error
            raise Unreachable(self._why(ends, error), node=None) from error
        except BaseException:
            ends.close()
            raise
        finally:
            self._end(ends)
        self._is_known = True
        return ends, facts

    def widen(self, stripes: int, timeout_s: float) -> list[Ends]:
        """So many channels for the link that was dialled last, less the one that it has.

        Raises Unreachable where not all of them come in time, or the link is no more.
        """
        deadline = time.monotonic() + timeout_s
        made: list[CommandEnds] = []
        try:
            for number in range(1, stripes):
                made.append(CommandEnds(self._argv))
                self._begin(made[-1])
                self._say_hello(made[-1], {"stripe": number, "stripes": stripes})
            for ends in made:
                self._greeting(ends, deadline)
        except BaseException as error:
            for ends in made:
                ends.kill()
            for ends in made:
                ends.close()
            if isinstance(error, OSError | EOFError | TimeoutError | Forgotten | InternalError):
                raise Unreachable(f"no further channels: {error}", node=None) from error
            raise
        finally:
            for ends in made:
                self._end(ends)
        return list(made)

    def _begin(self, ends: CommandEnds) -> None:
        with self._lock:
            self._dialled.add(ends)
            if self._closed.is_set():
                raise Unreachable("the pool was closed", node=None)

    def _end(self, ends: CommandEnds) -> None:
        with self._lock:
            self._dialled.discard(ends)

    def dial_until(
        self, deadline: float, times: LinkTimes, why_gone: Callable[[], Gone | None] = lambda: None
    ) -> tuple[Ends, dict[str, Any]]:
        """`dial` again and again, until `deadline` (monotonic). Raises as `dial` does, Unreachable also when closed.

        `why_gone` is asked after each failure; Forgotten is raised with what it says.
        """
        backoff_s = times.backoff_s
        while True:
            try:
                return self.dial(min(times.dial_s, max(1.0, deadline - time.monotonic())))
            except Unreachable:
                if time.monotonic() + backoff_s >= deadline or self._closed.wait(backoff_s):
                    raise
                if gone := why_gone():
                    raise Forgotten(gone.reason, gone) from None
            backoff_s = min(2 * backoff_s, times.most_backoff_s)

    def close(self) -> None:
        """Make no more links, and end those that are being made."""
        with self._lock:
            self._closed.set()
            for ends in self._dialled:
                ends.kill()

    def _say_hello(self, ends: CommandEnds, said: dict[str, Any]) -> None:
        hello = {**self._hello, "link": self.link, **said}
        os.write(ends.write_fd, pack(FrameKind.HELLO, body=json.dumps(hello).encode()))

    def _greeting(self, ends: CommandEnds, deadline: float) -> dict[str, Any]:
        self._skip_chatter(ends, deadline)
        length, kind, _, _, _ = HEADER.unpack(_read_exactly(ends, HEADER.size, deadline))
        if length > MAX_BODY:
            raise InternalError(f"the agent's greeting cannot be one: {length} bytes of kind {kind}")
        said: dict[str, Any] = json.loads(_read_exactly(ends, length, deadline))
        if kind == FrameKind.WELCOME:
            return said
        if said.get("is_unknown"):
            raise Forgotten(said["reason"])
        raise InternalError(f"the agent refused: {said.get('reason', said)}")

    def _skip_chatter(self, ends: CommandEnds, deadline: float) -> None:
        seen = _read_exactly(ends, len(MAGIC), deadline)
        skipped = 0
        while seen != MAGIC:
            seen = seen[1:] + _read_exactly(ends, 1, deadline)
            skipped += 1
            if skipped > _CHATTER_LIMIT:
                raise EOFError(f"it printed {skipped} bytes and never spoke as an agent")

    def _why(self, ends: CommandEnds, error: Exception) -> str:
        why = f"the agent of node {self._node} does not answer: {error}"
        return f"{why}\n{ends.said()}" if ends.said() else why


def _read_exactly(ends: CommandEnds, count: int, deadline: float) -> bytes:
    poll = select.poll()
    poll.register(ends.read_fd, select.POLLIN)
    data = b""
    while len(data) < count:
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not poll.poll(left_s * 1000):
            raise TimeoutError("nothing came in time")
        piece = os.read(ends.read_fd, count - len(data))
        if not piece:
            raise EOFError("the stream ended")
        data += piece
    return data
