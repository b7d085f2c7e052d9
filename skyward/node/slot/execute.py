"""Execution of one task in a slot (a call, a chunk of calls or a generator), and of its outcome.

Each process loads a function once, by name if its name can be imported.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import field
from itertools import islice
from typing import Any, Protocol

from ...calls.pending import ComputeFunction
from ...core.by_value import set_running
from ...core.process import PACKAGE_ROOT
from ...core.records import dataclass
from ...errors import NotRun, PayloadNotLoadable, ResultNotPicklable, TaskExited, UsageError
from ...wire.blobs import Blob
from ...wire.failures import encode_failure, stamp_as
from ...wire.frames import KEPT, QUIET, Frame, FrameKind
from ...wire.numbers import pack_numbers, unpack_numbers
from ...wire.payloads import Encoded, Mappable, decode, encode, paused_collector, send_stays
from ...wire.pull import PullRefused
from ...wire.tasks import TASK_HEAD, InputStream, Mode, RaisedItem, TaskHead, parse, references
from .link import Replies
from .runtime import free_leases, leases

FLUSH_NS = 5_000_000
"""Longest interval between sends of a chunk's results, in nanoseconds. When a slot dies, at most the results of the
last few milliseconds are lost."""
BLOCK_NS = 50_000
"""Duration of a block of calls, in nanoseconds. Short calls run in blocks, because reading the clock would cost more
than the call."""
BLOCK = 1024
"""Most calls per block: as many of the shortest as `BLOCK_NS` has time for. When a slot dies within a block, all of its
calls count as begun."""

_OURS = os.path.join(PACKAGE_ROOT, "skyward") + os.sep
_OWN = frozenset({Blob})
"""Blobs that were made here. All others belong to references."""
_counter = itertools.count(1)
_names = 0, b""
"""This process, and the first half of the names of its results."""


class Cancelled(BaseException):
    """The client cancelled this task. Not an Exception, so that user code does not swallow it by accident."""


Arrived = tuple[Frame, tuple[Blob, ...]]
"""A frame with its blobs."""


class Inbox(Protocol):
    """Frames about the running task: credit, input items, close."""

    def wait(self) -> Arrived: ...
    def waiting(self) -> Iterator[Arrived]: ...


class Guard(Protocol):
    """Marks when user code runs, so that a cancel interrupts nothing else; see `guards`."""

    def user_code(self) -> contextlib.AbstractContextManager[None]: ...
    def our_code(self) -> contextlib.AbstractContextManager[None]: ...

    is_copy: bool
    """Whether user code forked this process. If so, it exits where the user code ends."""

    @property
    def index_cell(self) -> tuple[memoryview, int]:
        """Cell for the offset of the latest begun call of a chunk."""
        ...


def put_result_blob(data: memoryview) -> Blob:
    """Store a result. Not named by content: no result is sent twice, and hashing costs a third of a copy's time."""
    global _names
    owner, first = _names
    if owner != os.getpid():  # also in a fork
        first = os.urandom(8)  # not the number of the process, which one on another node may have too
        _names = os.getpid(), first
    return Blob.unnamed(data.cast("B"), first + next(_counter).to_bytes(8, "little"))


@dataclass(slots=True)
class TaskRun:
    """Execution of one task, from its first frame to its last."""

    frame: Frame
    head: TaskHead
    link: Replies
    functions: Functions
    blobs: tuple[Mappable, ...]
    inbox: Inbox
    guard: Guard
    deliver: bool = True
    """Whether anybody wants the value; if not, an empty one is sent."""
    before: Callable[[], None] | None = None
    """Runs first, as part of the task: integrations, and the pool's initializer."""
    after: Callable[[], None] | None = None
    """Runs when user code has returned, as part of the task: writable volumes are saved."""
    at_end: Callable[[int], int] = lambda task: 0
    """Runs after user code and before the last frame. Marks the end of the output, and returns the frame's flags."""
    _thread: int = 0
    """Id of the thread that runs the task; 0 once it has ended."""
    _credit: int = 0
    _inputs: dict[int, deque[Arrived]] = field(default_factory=dict)
    _index: int | None = None

    def run(self) -> None:
        """Run the task. User errors are sent, never raised; raises ChannelClosed when the agent is gone."""
        frame = self.frame
        self._thread = threading.get_ident()
        started = time.perf_counter_ns()
        try:
            head = self.head
            function, payload = self._load(head)
            if head.mode == Mode.CHUNK:
                result = self._run_chunk(function, payload, head.number)
            elif head.mode == Mode.STREAM:
                result = self._run_stream(function, payload, head)
            else:
                result = self._run_call(function, payload, head)
            if self.after is not None:
                with self.guard.user_code():
                    self.after()
        except BaseException as error:
            self._send_error(error)
        else:
            task = frame.ident
            if leases:
                free_leases(task, is_well=True)
            flags = self.at_end(task) | (KEPT if head.mode == Mode.KEEP else 0)
            self._send_value(result, time.perf_counter_ns() - started, flags)
        finally:
            self._thread = 0

    # Loading --------------------------------------------------------------------------------------------------------

    def _load(self, head: TaskHead) -> tuple[Callable[..., Any], Any]:
        # Loading imports user modules, which is user code too, and may be interrupted.
        with self.guard.user_code():
            if self.before is not None:
                self.before()
            function = self.functions.get(head.function)
            parsed = parse(self.frame.body, TASK_HEAD.size)
            try:
                payload = decode(parsed, self.blobs)
            except PullRefused:
                raise
            except Exception as error:
                raise explain_load_error(error, "an argument") from error
            return function, payload

    # Kinds of tasks -------------------------------------------------------------------------------------------------

    def _run_call(self, function: Callable[..., Any], payload: Any, head: TaskHead) -> Encoded:
        args, kwargs = self._with_inputs(payload) if head.inputs else payload
        with self.guard.user_code():
            value = function(*args, **kwargs)
        if not self.deliver:
            value = None
        if head.mode == Mode.KEEP:
            return self._encode(value, is_kept=True)
        return self._encode(value, may_stay=self.link.may_lend)

    def _run_chunk(self, function: Callable[..., Any], payload: Any, first: int) -> Encoded:
        items, star, return_exceptions, limit_ns = payload
        items = unpack_numbers(items)
        results: list[Any] = []
        sent, end, block = first, first + len(items), 1
        page, index_at = self.guard.index_cell
        clock = time.perf_counter_ns
        began = clock()
        flush_at = began + FLUSH_NS
        stop_at = math.inf if limit_ns is None else began + limit_ns
        source = iter(items)
        with self.guard.user_code():
            while (at := sent + len(results)) < end:
                # Written before the block begins: if the process dies in it, all calls of the block count as begun,
                # so that none of them runs twice.
                page[index_at] = min(at + block, end) - first - 1
                append = results.append
                try:
                    if star:
                        for item in islice(source, block):
                            append(function(*item))
                    else:
                        for item in islice(source, block):
                            append(function(item))
                except (Exception, SystemExit) as error:
                    if not return_exceptions:
                        # The error ends the task, and would take the results before it along: send them first.
                        self._index = sent + len(results)
                        with self.guard.our_code():
                            self._send_part(sent, results)
                        raise
                    append(_Raised(exited(error) if isinstance(error, SystemExit) else error))
                self._free_leases(results)
                if self.guard.is_copy:  # user code forked this process; the remaining calls belong to the original
                    break
                now = clock()
                block = _next_block(block, now - began)
                began = now
                if now >= flush_at and sent + len(results) < end:
                    with self.guard.our_code():
                        self._send_part(sent, results, return_exceptions)
                    sent, results, began = sent + len(results), [], clock()
                    flush_at = began + FLUSH_NS
                if now >= stop_at:
                    break  # calls that have not begun go back to the client
        return self._encode_results(sent, results, return_exceptions)

    def _free_leases(self, results: list[Any]) -> None:
        """Free what the call of a chunk that has just ended still holds. Each call frees its own."""
        if leases:
            with self.guard.our_code():
                free_leases(self.frame.ident, is_well=type(results[-1]) is not _Raised)

    def _send_part(self, start: int, results: list[Any], return_exceptions: bool = False) -> None:
        if results:
            payload = self._encode_results(start, results, return_exceptions)
            self.link.send_payload(FrameKind.PART, self.frame.ident, payload)

    def _encode_results(self, start: int, results: list[Any], return_exceptions: bool) -> Encoded:
        """Encode results so that one unpicklable result fails only its own call."""
        if (packed := pack_numbers(results)) is not None:
            return self._encode((start, packed))
        try:
            return self._encode((start, _portable(results) if return_exceptions else results))
        except ResultNotPicklable:
            for offset, result in enumerate(results):
                try:
                    if type(result) is not _Raised:
                        self._encode(result)
                except ResultNotPicklable as error:
                    if not return_exceptions:
                        self._index = start + offset
                        self._send_part(start, results[:offset])
                        raise
                    results[offset] = _Raised(error)
            return self._encode((start, _portable(results)))

    def _run_stream(self, function: Callable[..., Any], payload: Any, head: TaskHead) -> Encoded:
        self._credit = head.number
        args, kwargs = self._with_inputs(payload) if head.inputs else payload
        with self.guard.user_code():
            generator = iter(function(*args, **kwargs))
        try:
            while True:
                with self.guard.user_code():
                    try:
                        item = next(generator)
                    except StopIteration as stop:
                        return self._encode(stop.value)
                self.link.send_payload(FrameKind.ITEM, self.frame.ident, self._encode(item))
                self._credit -= 1
                self._take(self.inbox.waiting())
                while self._credit <= 0:
                    self._take([self.inbox.wait()])
        finally:
            close = getattr(generator, "close", None)
            if close is not None:
                with self.guard.user_code():
                    close()

    # Streams --------------------------------------------------------------------------------------------------------

    def _take(self, arrived: Iterable[Arrived]) -> None:
        for frame, blobs in arrived:
            if frame.ident != self.frame.ident:
                continue  # a late frame of an ended task
            if frame.kind == FrameKind.CREDIT:
                self._credit += int.from_bytes(frame.body, "little")
            elif frame.kind == FrameKind.CLOSE:
                raise Cancelled
            elif frame.kind in (FrameKind.IN_ITEM, FrameKind.IN_END, FrameKind.IN_ERROR):
                self._inputs.setdefault(frame.lane, deque()).append((frame, blobs))

    def _with_inputs(self, payload: Any) -> Any:
        args, kwargs = payload

        def opened(value: Any) -> Any:
            return self._input(value.lane) if isinstance(value, InputStream) else value

        return tuple(opened(a) for a in args), {k: opened(v) for k, v in kwargs.items()}

    def _input(self, lane: int) -> Iterator[Any]:
        """Iterate over an input stream for the user, granting one credit per item taken."""
        queue = self._inputs.setdefault(lane, deque())
        while True:
            if threading.get_ident() != self._thread:  # another thread would steal frames of the running task
                raise UsageError(
                    "iterator argument: only the thread that runs the function can read it, and only until the "
                    "function ends; read it there and pass the items on"
                )
            with self.guard.our_code():
                while not queue:
                    self._take([self.inbox.wait()])
                frame, blobs = queue.popleft()
                if frame.kind == FrameKind.IN_ITEM:
                    self.link.send(FrameKind.IN_CREDIT, self.frame.ident, lane=lane)
            if frame.kind == FrameKind.IN_END:
                return
            if frame.kind == FrameKind.IN_ERROR:
                why = frame.body.decode() or "raised on the client; see the client's own error"
                raise UsageError(f"iterator argument: {why}")  # words: ok, each reason says what to do
            yield decode(parse(frame.body), blobs)

    # Sending --------------------------------------------------------------------------------------------------------

    def _encode(self, value: Any, *, is_kept: bool = False, may_stay: Callable[[int], bool] | None = None) -> Encoded:
        try:
            encoded = encode(value, Blob.kept if is_kept else put_result_blob, may_stay=may_stay)
            return encoded if _OWN.issuperset(map(type, encoded.blobs)) else self._of_references(encoded, is_kept)
        except Exception as error:
            raise ResultNotPicklable(_why_not(value, error)) from error  # words: ok, NotRun says what to do

    def _of_references(self, encoded: Encoded, is_kept: bool) -> Encoded:
        """Leave out blobs that the client knows. A value that stays has the bytes itself."""
        from .far_values import unknown, with_bytes

        if not is_kept:
            names = {digest for digest, _ in references(self.frame.body, TASK_HEAD.size)}
            return encoded._replace(blobs=tuple(unknown(encoded.blobs, names)))
        with self.guard.user_code():  # the bytes may come from other nodes
            return encoded._replace(blobs=tuple(with_bytes(encoded.blobs)))

    def _send_value(self, value: Encoded, elapsed_ns: int, flags: int) -> None:
        """Send the last frame of a call that returned."""
        task = self.frame.ident
        if value.stays:
            # A value must follow its call's output, which comes through the agent.
            if flags & QUIET and self.link.lend(task, value, elapsed_ns):
                return
            try:
                value = send_stays(value, put_result_blob)
            except OSError as error:
                failed = ResultNotPicklable(_no_room("a value", error))
                self.link.send(FrameKind.ERROR, task, encode_failure(failed, hide=_OURS), flags=flags)
                return
        self.link.send_payload(FrameKind.RESULT, task, value, elapsed_ns, flags=flags)

    def _send_error(self, error: BaseException) -> None:
        is_cancelled = isinstance(error, Cancelled | KeyboardInterrupt)
        if isinstance(error, SystemExit):
            error = exited(error)
        if leases:
            free_leases(self.frame.ident, is_well=False)
        body = encode_failure(error, is_cancelled=is_cancelled, index=self._index, hide=_OURS)
        flags = self.at_end(self.frame.ident)
        self.link.send(FrameKind.ERROR, self.frame.ident, body, flags=flags)


_NO_ROOM = frozenset({errno.ENOMEM, errno.ENOSPC, errno.EFBIG, errno.EMFILE, errno.ENFILE})
"""Errors of the file of a large buffer."""


def _next_block(block: int, took_ns: int) -> int:
    """Return the number of calls of the next block of a chunk.

    Grow step by step, shrink at once: a block delays the flush, the limit, and the record of begun calls.
    """
    if took_ns < BLOCK_NS:
        return min(2 * block, BLOCK)
    return block if took_ns <= 2 * BLOCK_NS else 1


def _why_not(value: Any, error: Exception) -> str:
    """Explain why a value cannot be sent, and what to return instead."""
    kind = type(value).__qualname__
    if isinstance(error, NotRun):
        return f"the function returned a {kind}: {error}"
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        return _no_room(f"a {kind}", error)
    advice = "return plain data, arrays or a state dict instead"
    if isinstance(value, Iterator):
        advice = "to stream its items, yield them in the function; to return all of them, return a list"
    elif isinstance(value, Coroutine):
        advice = "return asyncio.run(...) of it"
    return f"the function returned a {kind} that cannot be pickled: {type(error).__name__}: {error}; {advice}"


def _no_room(what: str, error: OSError) -> str:
    return f"the function returned {what} without room on the node: {error.strerror}; return less, or free memory"


def exited(error: SystemExit) -> TaskExited:
    """Return what a call raises whose function called `sys.exit()`, instead of ending its caller."""
    exited = TaskExited(
        f"the task: called sys.exit({error.code!r}); end it by returning a value or raising an error",
        code=error.code if isinstance(error.code, int | str | None) else str(error.code),
    )
    stamp_as(exited, instead_of=error)
    return exited.with_traceback(error.__traceback__)


@dataclass(frozen=True)
class _Raised:
    """An exception among the results of a chunk, before it is made portable."""

    error: BaseException


def _portable(results: list[Any]) -> list[Any]:
    if _Raised not in set(map(type, results)):
        return results
    return [RaisedItem(encode_failure(r.error, hide=_OURS)) if type(r) is _Raised else r for r in results]


class Functions:
    """Functions by digest: payloads until first use, then the loaded functions. One thread adds, any thread reads."""

    def __init__(self) -> None:
        self._payloads: dict[bytes, tuple[bytes, tuple[Blob, ...]]] = {}
        self._loaded: dict[bytes, Callable[..., Any]] = {}
        self._holders: dict[bytes, set[str]] = {}
        self._latest = b""

    def add(self, digest: bytes, payload: bytes, blobs: tuple[Blob, ...], holder: str = "agent") -> None:
        """Add a function. `holder` sent it; the function stays until every holder has dropped it."""
        self._holders.setdefault(digest, set()).add(holder)
        if digest not in self._loaded:
            self._payloads[digest] = payload, blobs

    def get(self, digest: bytes) -> Callable[..., Any]:
        """Return the function, loading it on first use. Raises PayloadNotLoadable."""
        function = self._loaded.get(digest)
        if function is None:
            try:
                payload, blobs = self._payloads[digest]
                with paused_collector():
                    loaded = decode(parse(payload), blobs)
            except Exception as error:
                raise explain_load_error(error, "the function") from error
            function = self._loaded[digest] = _unwrapped(loaded)
            self._payloads.pop(digest, None)
        if digest != self._latest:
            self._latest = digest
            set_running(function)
        return function

    def drop(self, digest: bytes, holder: str = "agent") -> None:
        holders = self._holders.get(digest, set())
        holders.discard(holder)
        if holders:
            return
        self._holders.pop(digest, None)
        self._payloads.pop(digest, None)
        self._loaded.pop(digest, None)


def _unwrapped(function: Any) -> Callable[..., Any]:
    unwrapped: Callable[..., Any] = function.fn if isinstance(function, ComputeFunction) else function
    return unwrapped


def explain_load_error(error: Exception, subject: str) -> PayloadNotLoadable:
    """Explain an unpickling error: what is missing on the node, and what to do."""
    if isinstance(error, ModuleNotFoundError):
        hint = (
            f"the module {error.name!r} is not installed there; add it to Image(pip=[...]), or to "
            "Image(includes=[...]) if it is your own"
        )
    elif isinstance(error, AttributeError):
        hint = "the node has another version of that module; pin the version of this machine in Image(pip=[...])"
    else:
        hint = "its unpickling raised on the node; send plain data, arrays or paths"
    return PayloadNotLoadable(f"{subject} cannot be loaded on the node: {type(error).__name__}: {error}; {hint}")
