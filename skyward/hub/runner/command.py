"""A job's command on its nodes: each rank starts it without a shell, waits for it, and ends it when it is told to."""

from __future__ import annotations

import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, ClassVar

from ...core.process import process_table
from ...errors import CommandFailed
from ...integrations.torch import TorchIntegration
from ...node.slot.runtime import current_rank
from ...node.slot.shared.names import event
from ...values.topology import Rank

CANCEL_S = 10.0
"""Seconds between SIGTERM and SIGKILL for a command whose job is cancelled."""


_REST_S = 0.5
"""Seconds after which the beginning of a line is passed on, and for which the last lines are waited for."""
_LONGEST = 8192
"""Bytes of a line that are held back."""
_LOOK_S = 0.1
"""Seconds between two looks for orphans of a command that was told to end."""


@dataclass(frozen=True, kw_only=True)
class CommandIntegration(TorchIntegration):
    """Ranks with torchrun's variables, but without torch: the command opens a process group if it wants one."""

    name: ClassVar[str] = "command"
    packages: ClassVar[tuple[str, ...]] = ()
    preload: ClassVar[tuple[str, ...]] = ()

    @contextmanager
    def session(self, rank: Rank) -> Iterator[None]:
        yield


def run_command(argv: Sequence[str], stop: str) -> int:
    """Run a command until it ends, and return 0.

    Its output is that of the call. Processes that it leaves behind are killed. If it was told to end, they get SIGTERM
    first and may save, too: a shell dies at once, and the training that it started goes on.

    Args:
        argv: Program and arguments.
        stop: Name of the pool's event that tells it to save and end, by SIGTERM.

    Raises:
        CommandFailed: It could not be started, or ended with another status.
    """
    rank = current_rank()
    # The ranks of a node share a pipe, and programs do not write whole lines at once.
    has_pipes = rank is not None and rank.local_world_size > 1
    pipe = subprocess.PIPE if has_pipes else None
    try:
        # A group of its own: the SIGINT of a cancel is for this process, which sends SIGTERM on.
        child = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            env=_environment(),
            process_group=0,
            bufsize=0,
        )
    except OSError as error:
        raise _not_started(argv, error) from None
    lines = LineForwarder([(child.stdout, 1), (child.stderr, 2)]) if has_pipes else None
    is_over, is_told = threading.Event(), threading.Event()
    arguments = (child, stop, is_over, is_told)
    threading.Thread(target=_end_when_told, args=arguments, name="skyward-command-stop", daemon=True).start()
    try:
        status = child.wait()
        if is_told.is_set():
            _end_orphans(child.pid, math.inf)  # when the grace is over, the runner cancels the call
    except BaseException:  # KeyboardInterrupt: the call is cancelled
        _end(child)
        raise
    finally:
        is_over.set()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        if lines is not None:
            lines.close()
    if status:
        raise _failed(argv, f"ended {_in_words(status)}", status)
    return 0


class LineForwarder:
    """Thread that passes output on line by line.

    Args:
        streams: Pipe to read from, and the descriptor to write to.
    """

    def __init__(self, streams: Iterable[tuple[IO[bytes] | None, int]]) -> None:
        self._targets = {source.fileno(): (source, target) for source, target in streams if source is not None}
        self._thread = threading.Thread(target=self._forward, name="skyward-command-output", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Pass the rest on. A process that detached itself may hold a pipe open, and is not waited for."""
        self._thread.join(_REST_S)

    def _forward(self) -> None:
        rests = dict.fromkeys(self._targets, b"")
        while rests:
            ready, _, _ = select.select(list(rests), [], [], _REST_S)
            for descriptor in ready or list(rests):
                piece = os.read(descriptor, 65_536) if ready else b""
                whole, line_end, rest = (rests[descriptor] + piece).rpartition(b"\n")
                is_over = bool(ready) and not piece
                if is_over or not ready or len(rest) > _LONGEST:  # such as a progress bar, which ends no line
                    whole, line_end, rest = whole + line_end + rest, b"", b""
                _write(self._targets[descriptor][1], whole + line_end)
                rests[descriptor] = rest
                if is_over:
                    del rests[descriptor]


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _environment() -> dict[str, str]:
    """Return the rank's environment, in which `python` is the one of the image, and imports the job's modules."""
    path = os.environ.get("PATH", os.defpath)
    variables = {"PATH": f"{os.path.dirname(sys.executable)}{os.pathsep}{path}"}
    if modules := [*_code_folders(), *filter(None, [os.environ.get("PYTHONPATH")])]:
        variables["PYTHONPATH"] = os.pathsep.join(modules)
    # Python buffers what it writes to a pipe, and its lines would come late. Variables of the user win.
    return {"PYTHONUNBUFFERED": "1", **os.environ, **variables}


def _code_folders() -> list[str]:
    """Return the folders on `sys.path` that came with the job. On each node they lie beside the working folder."""
    code = os.path.dirname(os.getcwd()) + os.sep
    return [folder for folder in sys.path if os.path.realpath(folder).startswith(code)]


def _end_when_told(
    child: subprocess.Popen[bytes], stop: str, is_over: threading.Event, is_told: threading.Event
) -> None:
    try:
        event(stop).wait()
    except Exception:
        if not is_over.is_set():  # otherwise the call has ended, and its connections with it
            raise
    else:
        is_told.set()
        child.terminate()


def _end(child: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + CANCEL_S
    child.terminate()
    with suppress(subprocess.TimeoutExpired):
        child.wait(CANCEL_S)
        _end_orphans(child.pid, deadline)


def _end_orphans(group: int, deadline: float) -> None:
    """Send SIGTERM to processes of a group whose parent has ended, and wait until none is left or the time is over.

    A signal for the whole group would be simpler, and wrong: it also ends the workers of a data loader, and the
    training fails by their death while it saves. They get theirs when they are orphans themselves.
    """
    told: set[int] = set()
    while (orphans := _orphans(group)) and time.monotonic() < deadline:
        writers = {pid for pid in orphans if not _reads_pipe(pid)}
        for pid in (writers or orphans) - told:  # `tee` must outlive the program that writes to it
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGTERM)
            told.add(pid)
        time.sleep(_LOOK_S)


def _orphans(group: int) -> set[int]:
    """Return the processes of a group that this process has adopted. A rank adopts orphans, and so it reaps them."""
    with suppress(ChildProcessError):
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass
    return {pid for pid, parent, _ in process_table() if parent == os.getpid() and _group_of(pid) == group}


def _group_of(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


def _reads_pipe(pid: int) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/fd/0").startswith("pipe:")
    except OSError:
        return False


def _not_started(argv: Sequence[str], error: OSError) -> CommandFailed:
    is_missing = isinstance(error, FileNotFoundError)
    return _failed(argv, f"cannot be started: {error.strerror or error}", 127 if is_missing else 126)


def _failed(argv: Sequence[str], problem: str, status: int) -> CommandFailed:
    rank = current_rank()
    where = "" if rank is None or rank.world_size == 1 else f" on node {rank.node_rank}, rank {rank.rank},"
    node = None if rank is None else rank.node_rank
    return CommandFailed(f"command={argv[0]!r}:{where} {problem}; read its output", exit_code=status, node=node)


def _in_words(status: int) -> str:
    if status > 0:
        return f"with status {status}"
    with suppress(ValueError):
        return f"by {signal.Signals(-status).name}"
    return f"by signal {-status}"
