"""Transfers of files between this machine and the nodes of a pool, several nodes at once."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import IO, BinaryIO, cast

from ..calls.futures import refuse_to_wait
from ..console.activity import Progress
from ..core import interrupts
from ..core.records import dataclass
from ..errors import NodeLost, SkywardError, TransferFailed, UsageError
from ..values.machine import Machine
from ..wire.file_transfer import FileStream, PeerRefused, receive_files, send_files
from ..wire.file_tree import FileRefused, Selection, in_words, select

_AT_ONCE = 16
_ATTEMPTS = 5
_FIRST_PAUSE_S = 0.3
_END_LIMIT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Outcome of `pool.upload` or `pool.download`, counted over all nodes.

    Args:
        files: Number of files, whether or not they were copied.
        copied: Number of files whose content differed, or that were missing.
        bytes: Bytes that were copied.

    Example:
        >>> Transfer(files=3, copied=1, bytes=2048).copied
        1
    """

    files: int
    copied: int
    bytes: int


def check_remote(field: str, path: object) -> str:
    """Return a path on a node. Raises UsageError if it leaves the working folder of the tasks."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if not isinstance(text, str) or not text or "\0" in text:
        raise UsageError(
            f"{field}={path!r}: is not a path; pass a text such as 'data/train.csv'", field=field, value=path
        )
    if ".." in text.split("/"):
        advice = "name a path below the working folder of the tasks, an absolute path, or one that begins with ~/"
        raise UsageError(f"{field}={text!r}: leads out of its folder with `..`; {advice}", field=field, value=path)
    return text


def select_here(path: str) -> tuple[Selection, str]:
    """Return the local files to upload, and where they go by default. Raises UsageError."""
    here = os.getcwd()
    try:
        selection = select(path, here)
    except FileRefused as error:
        problem, _, advice = str(error).partition("; ")
        raise UsageError(f"path={path!r}: {problem}; {advice}", field="path", value=path) from error
    except OSError as error:
        raise UsageError(
            f"path={path!r}: cannot be read: {error}; change its mode", field="path", value=path
        ) from error
    base = os.path.relpath(os.path.join(here, os.path.expanduser(selection.base)), here)
    if base != ".." and not base.startswith("../"):
        return selection, f"{base}/"
    return selection, f"{os.path.basename(os.path.normpath(path))}/" if selection.kind == "folder" else "./"


Work = Callable[[FileStream, Callable[[], None]], Mapping[str, int]]
"""One transfer, from the greeting to the counts. The second argument raises when the transfer has to end."""


def sending(selection: Selection, into: str, progress: Progress) -> Work:
    """Make the work of an upload to one node."""

    def work(stream: FileStream, check: Callable[[], None]) -> Mapping[str, int]:
        stream.send({"op": "receive", "into": into, "kind": selection.kind})
        with _counting(progress) as count:
            return send_files(stream, selection.entries, count, check)

    return work


def fetching(path: str, local: str, progress: Progress) -> Work:
    """Make the work of a download from one node."""

    def work(stream: FileStream, check: Callable[[], None]) -> Mapping[str, int]:
        stream.send({"op": "send", "path": path})
        stream.flush()
        kind = stream.receive()["kind"]
        with _counting(progress) as count:

            def tell(done: int, total: int) -> None:
                progress.total = total
                count(done)

            return receive_files(stream, local, kind, os.getcwd(), tell, check)

    return work


@contextlib.contextmanager
def _counting(progress: Progress) -> Iterator[Callable[[int], None]]:
    """Count bytes. An attempt that fails takes its own back, because the next one counts them again."""
    counted = 0

    def count(done: int) -> None:
        nonlocal counted
        counted += done
        if done:
            progress.add(done)

    try:
        yield count
    except BaseException:
        progress.add(-counted)
        raise


class TransferRun:
    """Transfers with several nodes at once; the first that fails ends the others. A guest of its pool.

    Args:
        machine: Returns the machine of a node. Raises if there is none.
        work: Work for each node.
        field: Argument that errors name.
        path: Value of that argument.
    """

    def __init__(self, machine: Callable[[int], Machine], work: Mapping[int, Work], *, field: str, path: str) -> None:
        self._field = field
        self._machine = machine
        self._work = work
        self._path = path
        self._lock = threading.Lock()
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._ended_by: BaseException | None = None
        self._ended = threading.Event()

    def run(self) -> Transfer:
        """Run all transfers, and wait. An interrupt ends them. Raises TransferFailed; PoolClosed."""
        refuse_to_wait("transfer")
        with ThreadPoolExecutor(min(_AT_ONCE, len(self._work)), thread_name_prefix="skyward-files") as threads:
            futures = [threads.submit(self._run_node, node, work) for node, work in self._work.items()]
            try:
                interrupts.wait_for(lambda slice_s: not wait(futures, slice_s).not_done)
            except BaseException as error:
                self.end(error)
                raise
        if self._ended_by is not None:
            raise self._ended_by
        counts = [future.result() for future in futures]
        return Transfer(**{name: sum(count[name] for count in counts) for name in ("files", "copied", "bytes")})

    def end(self, reason: BaseException) -> None:
        with self._lock:
            self._ended_by = self._ended_by or reason
            self._ended.set()
            for process in self._processes:
                process.kill()

    def _check(self) -> None:
        if self._ended.is_set():
            raise EOFError("ended")

    def _run_node(self, node: int, work: Work) -> Mapping[str, int]:
        try:
            return self._repeated(node, work)
        except BaseException as error:
            self.end(error)
            return {}

    def _repeated(self, node: int, work: Work) -> Mapping[str, int]:
        """Run a transfer again when its connection is lost: it continues where it stopped."""
        pause_s = _FIRST_PAUSE_S
        for attempt in range(_ATTEMPTS):
            try:
                return self._once(node, work)
            except (EOFError, NodeLost) as error:
                if attempt == _ATTEMPTS - 1 or self._ended.wait(pause_s):
                    raise self._failure(
                        node, f"the connection was lost: {error}; repeat the call to continue"
                    ) from error
            except (PeerRefused, FileRefused) as error:
                raise self._failure(node, str(error), is_final=True) from error
            except OSError as error:
                why = f"{in_words(error)}; check the disk and the permissions here"
                raise self._failure(node, why, is_final=True) from error
            pause_s *= 3
        raise AssertionError("the last attempt returns or raises")

    def _failure(self, node: int, text: str, *, is_final: bool = False) -> SkywardError:
        message = f"{self._field}={self._path!r}: node {node}: {text}"
        return TransferFailed(  # words: ok, a refusal of the node says what to do
            message, node=node, path=self._path, retryable=not is_final
        )

    def _once(self, node: int, work: Work) -> Mapping[str, int]:
        command = self._machine(node).files
        with tempfile.TemporaryFile() as complaints, self._process(command, complaints) as process:
            stream = FileStream(cast(BinaryIO, process.stdout), cast(BinaryIO, process.stdin))
            try:
                stream.wait_for_greeting()
                return work(stream, self._check)
            except EOFError as error:
                process.kill()
                complaints.seek(0)
                lines = complaints.read().decode(errors="replace").split("\n")
                said = next((line for line in reversed(lines) if line.strip()), "")
                raise EOFError(said.removeprefix("skyward: ") or str(error)) from None

    @contextlib.contextmanager
    def _process(self, command: Sequence[str], complaints: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
        with self._lock:
            if self._ended_by is not None:
                raise EOFError("ended before it began")
            # In a session of its own: Ctrl-C in the terminal is for this process, which ends the command itself.
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=complaints, start_new_session=True
            )
            self._processes.add(process)
        try:
            yield process
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()  # type: ignore[union-attr]
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_LIMIT_S)
        finally:
            with self._lock:
                self._processes.discard(process)
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()  # type: ignore[union-attr]
