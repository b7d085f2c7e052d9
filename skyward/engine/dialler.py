"""Links to an agent through a command, such as ssh, whose standard input and output are the stream."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import InternalError, Unreachable
from ..values.machine import Gone
from ..wire.ends import Ends
from ..wire.frames import HEADER, PROTOCOL_VERSION, FrameKind, pack
from ..wire.stream import MAGIC, StreamChannel
from .link_times import LinkTimes

_BUFFER_SIZE = 256 << 10
_STDERR_TAIL = 2000
_KILLED_S = 2.0
_LONGEST_GREETING = 64 << 20
"""Most bytes of what a peer says first: an agent tells another head of all calls that it holds."""
_CHATTER_LIMIT = 64 * 1024
"""Most bytes that a user's shell may print before the agent's first bytes."""


_NO_AGENT = 69
"""Exit code of the stub on the node if there is no agent."""
_EXIT_S = 1.0


class Forgotten(Exception):
    """Loss of the agent that knew the session. Users never see it.

    Attributes:
        gone: Why the machine is gone; None: it may still run.
    """

    def __init__(self, message: str, gone: Gone | None = None) -> None:
        super().__init__(message)
        self.gone = gone


class Taken(Forgotten):
    """Refusal of a session, because another client has the pool. Users never see it."""


class BeganAgain(Forgotten):
    """Refusal of a session by a head that goes on for the killed one, which knew it. Users never see it."""


class DialledEnds(Ends):
    """Link that a dialler has opened, with what is known of its other end."""

    def said(self) -> str:
        """Return what the other end printed beside the stream; empty if nothing."""
        raise NotImplementedError

    def exit_code(self, limit_s: float) -> int | None:
        """Return the exit code of the command once it has ended by itself; None if it does not within `limit_s`."""
        raise NotImplementedError

    def kill(self) -> None:
        """End the link at once. Any thread may call this; the reader then sees the end of the stream."""
        raise NotImplementedError


Connect = Callable[[], DialledEnds]
"""Opens one link, without waiting for its other end. Raises Unreachable."""


class CommandEnds(DialledEnds):
    """One end of a socket whose other end is a command's standard input and output.

    The command leads its own session, so Ctrl-C at the terminal does not reach it. `close` kills it and its children.

    Raises:
        Unreachable: There is no such command, or no free descriptor or process for it.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        with contextlib.ExitStack() as kept, contextlib.ExitStack() as passed:
            try:
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
                kept.callback(ours.close)
                passed.callback(theirs.close)
                for sock in (ours, theirs):  # room for a whole piece of a blob
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_SIZE)
                self._stderr, stderr = os.pipe()
                kept.callback(os.close, self._stderr)
                passed.callback(os.close, stderr)
                os.set_blocking(self._stderr, False)
                os.set_blocking(stderr, False)  # a full pipe loses output instead of blocking the command
                self._process = subprocess.Popen(
                    list(argv), stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=stderr, start_new_session=True
                )
            except OSError as error:
                problem = f"{argv[0]}: cannot be run ({error.strerror})"
                raise Unreachable(f"{problem}; install it, or free memory and descriptors here", node=None) from error
            kept.pop_all()
        self._stderr_tail = ""
        fd = ours.detach()
        super().__init__(fd, fd)

    def said(self) -> str:
        """Return the end of the command's standard error."""
        with contextlib.suppress(OSError):  # nothing to read
            while self._stderr >= 0 and (piece := os.read(self._stderr, 65536)):
                self._stderr_tail = (self._stderr_tail + piece.decode(errors="replace"))[-_STDERR_TAIL:]
        return self._stderr_tail.strip()

    def finish(self, deadline: float) -> None:
        """Close the sending direction, and give the command until `deadline` (monotonic) to end by itself."""
        with contextlib.suppress(OSError):  # the command has ended already
            sock = socket.socket(fileno=self.write_fd)
            try:
                sock.shutdown(socket.SHUT_WR)
            finally:
                sock.detach()
            _read_to_end(self.read_fd, deadline)

    def exit_code(self, limit_s: float) -> int | None:
        """Return the exit code of the command once it has ended by itself; None if it does not within `limit_s`."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            # Do not reap it yet (WNOWAIT): until then the kernel does not reuse its process group's number, so `close`
            # can still kill the children.
            ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            if ended is not None:
                return ended.si_status if ended.si_code == os.CLD_EXITED else None
            time.sleep(0.005)
        return None

    def kill(self) -> None:
        """Kill the command. Any thread may call this; the reader then sees the end of the stream."""
        if self._process.returncode is None:  # not reaped, so the kernel cannot have reused its number
            with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended
                os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        super().close()
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in a system call; it dies when that returns
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
    """Dialler of the links of one session with an agent, one after another. Each link is a call of `connect`.

    Only one thread at a time may call `dial`, and the same is true of `widen`. Any other thread may call `close`, which
    makes both fail.

    HELLO is JSON. That of a client has these fields beyond the common ones: `token` names the session, and `link`
    counts its links. The first channel of a link sends `is_resumed` and `received`. Each further channel sends `stripe`
    and `stripes`, its number (the first channel is 0) and the total. A session with `continues` goes on with a head
    that was killed: it has the same token, and counts frames from 0.

    Args:
        connect: Opens a link.
        role: Role of this process in HELLO.
        pool: Unique name of the pool.
        node: Node of the agent.
        peer: The other end, for errors; empty: the agent of the node.
        is_known: Whether the other end existed before the first link, so that its absence means its end.
        more: Further fields of HELLO.
    """

    def __init__(
        self,
        connect: Connect,
        *,
        role: str,
        pool: str,
        node: int,
        peer: str = "",
        is_known: bool = False,
        **more: Any,
    ) -> None:
        self._node = node
        self._peer = peer or f"agent of node {node}"
        self.channel = StreamChannel(checks_blobs=False)
        self._connect = connect
        self._hello: dict[str, Any] = {"version": PROTOCOL_VERSION, "role": role, "pool": pool, "pid": os.getpid()}
        self._hello["token"] = os.urandom(8).hex()
        self._hello |= more
        self._is_known = False
        self._should_exist = is_known
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._dialled: set[DialledEnds] = set()
        """Commands of a `dial` or `widen` that has not returned yet."""
        self.link = 0
        """Number of the link that was dialled last."""

    def dial(self, timeout_s: float) -> tuple[Ends, dict[str, Any]]:
        """Dial once. Return the link and the agent's facts, of which `facts["received"]` is for `attach`.

        Raises:
            Unreachable: The agent does not answer in time.
            Forgotten: There is no agent any longer, or it does not know the session.
            InternalError: The agent speaks another version of the protocol.
        """
        self.link += 1
        ends = self._connect()
        try:
            self._begin(ends)
            hello = {"is_resumed": self._is_known, "received": self.channel.received}
            self._say_hello(ends, hello)
            facts = self._greeting(ends, time.monotonic() + timeout_s)
        except (OSError, EOFError, TimeoutError) as error:
            # Only the stub's exit code proves that the agent is gone. Any other end may be the network's, so the node
            # must count as alive until its lease is over.
            code = ends.exit_code(_EXIT_S) if isinstance(error, EOFError | ConnectionError) else None
            ends.close()
            if code == _NO_AGENT and (self._is_known or self._should_exist):
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
        """Open further channels for the link that was dialled last, so that it has `stripes` of them.

        Raises:
            Unreachable: Not all channels are open in time, or the link has ended.
        """
        deadline = time.monotonic() + timeout_s
        opened: list[DialledEnds] = []
        try:
            for number in range(1, stripes):
                opened.append(self._connect())
                self._begin(opened[-1])
                self._say_hello(opened[-1], {"stripe": number, "stripes": stripes})
            for ends in opened:
                self._greeting(ends, deadline)
        except BaseException as error:
            for ends in opened:  # all first: `close` waits for each to die
                ends.kill()
            for ends in opened:
                ends.close()
            if isinstance(error, OSError | EOFError | TimeoutError | Forgotten | InternalError):
                raise Unreachable(
                    f"node {self._node}: no further channels ({error}); check the network", node=None
                ) from error
            raise
        finally:
            for ends in opened:
                self._end(ends)
        return list(opened)

    def _begin(self, ends: DialledEnds) -> None:
        # Add and check under one lock: either `close` finds the command here, or this finds the pool closed.
        with self._lock:
            self._dialled.add(ends)
            if self._closed.is_set():
                raise Unreachable(
                    f"node {self._node}: the pool was closed before it was dialled; open a new one", node=None
                )

    def _end(self, ends: DialledEnds) -> None:
        with self._lock:
            self._dialled.discard(ends)

    def dial_until(
        self, deadline: float, times: LinkTimes, why_gone: Callable[[], Gone | None] = lambda: None
    ) -> tuple[Ends, dict[str, Any]]:
        """Dial repeatedly until `deadline` (monotonic). Raises the errors of `dial`, and Unreachable after `close`.

        `why_gone` is called after each failure. If it returns a reason, that is raised as Forgotten.
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
        """Stop dialling, and kill the attempts under way."""
        with self._lock:
            self._closed.set()
            for ends in self._dialled:
                ends.kill()

    def _say_hello(self, ends: DialledEnds, fields: dict[str, Any]) -> None:
        hello = {**self._hello, "link": self.link, **fields}
        os.write(ends.write_fd, pack(FrameKind.HELLO, body=json.dumps(hello).encode()))

    def _greeting(self, ends: DialledEnds, deadline: float) -> dict[str, Any]:
        self._skip_chatter(ends, deadline)
        length, kind, _, _, _ = HEADER.unpack(ends.read_exactly(HEADER.size, deadline))
        if length > _LONGEST_GREETING:
            raise InternalError(f"{self._peer}: invalid greeting, {length} bytes of kind {kind}; report this bug")
        answer: dict[str, Any] = json.loads(ends.read_exactly(length, deadline))
        if kind == FrameKind.WELCOME:
            return answer
        if answer.get("is_taken"):
            raise Taken(answer["reason"])
        if answer.get("began_again"):
            raise BeganAgain(answer["reason"])
        if answer.get("is_unknown"):
            raise Forgotten(answer["reason"])
        raise InternalError(f"{self._peer}: refused the link, because {answer.get('reason', answer)}; open a new pool")

    def _skip_chatter(self, ends: DialledEnds, deadline: float) -> None:
        window = ends.read_exactly(len(MAGIC), deadline)
        skipped = 0
        while window != MAGIC:
            window = window[1:] + ends.read_exactly(1, deadline)
            skipped += 1
            if skipped > _CHATTER_LIMIT:
                raise EOFError(f"no greeting in the first {skipped} bytes of output")

    def _why(self, ends: DialledEnds, error: Exception) -> str:
        why = f"{self._peer}: does not answer ({error}); check the machine and its network"
        return f"{why}\n{ends.said()}" if ends.said() else why
