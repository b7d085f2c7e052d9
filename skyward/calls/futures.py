"""The future of a call: a standard one whose value is unpickled by the first thread that asks for it.

The thread that reads the channel never unpickles: that imports the user's modules, and it would deadlock with a thread
that holds an import lock while it waits for the value. The functions below wait for futures: an early end of the wait
stops their calls.
"""

from __future__ import annotations

import concurrent.futures
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

from ..core import interrupts
from ..core.user_lines import drop_our_frames
from ..errors import UsageError

__all__ = [
    "Failures",
    "Future",
    "Undecoded",
    "joined",
    "refuse_to_wait",
    "streamed",
    "this_thread",
    "value_of",
    "values_of",
]


T = TypeVar("T")

_logger = logging.getLogger("concurrent.futures")

this_thread = threading.local()
"""`brings_values` is set in the I/O threads."""


def refuse_to_wait(what: str) -> None:
    """Raise UsageError in a thread whose wait could never end, because it is the one that brings values."""
    if getattr(this_thread, "brings_values", False):
        raise UsageError(
            f"{what}: a done-callback cannot wait for another call: the thread that it runs in is the one that "
            "brings values; chain the calls with another callback, or wait in a thread of your own"
        )


_PENDING, _RUNNING = "PENDING", "RUNNING"
_CANCELLED, _CANCELLED_AND_NOTIFIED, _FINISHED = "CANCELLED", "CANCELLED_AND_NOTIFIED", "FINISHED"


class Undecoded:
    """A value or an error as it came. `decode` returns the value, or raises the error."""

    __slots__ = ("_decode", "_error", "_is_done", "_lock", "_value")

    def __init__(self, decode: Callable[[], Any]) -> None:
        self._decode: Callable[[], Any] | None = decode
        self._value: Any = None
        self._error: BaseException | None = None
        self._is_done = False
        self._lock = threading.Lock()

    def get(self) -> Any:
        with self._lock:
            if not self._is_done:
                assert self._decode is not None
                try:
                    self._value = self._decode()
                except BaseException as error:
                    if interrupts.is_from_handler(error):
                        raise  # it is not the call's: whoever asks next decodes anew
                    self._error = error
                self._is_done, self._decode = True, None
        if self._error is not None:
            raise self._error
        return self._value


class _Remote(Exception):
    """Holds an undecoded error where the standard future keeps its exception."""

    def __init__(self, error: Undecoded) -> None:
        super().__init__("undecoded")
        self.error = error


class Failures:
    """Calls of a pool that failed, until somebody reads their futures. Thread-safe."""

    _KEPT = 8

    def __init__(self) -> None:
        self.unread = 0
        self._first: list[Future[Any]] = []
        self._lock = threading.RLock()  # a signal handler may read a future, too

    def failed(self, future: Future[Any]) -> None:
        with self._lock:
            if future.is_read:  # whoever waited was quicker
                return
            self.unread += 1
            future.is_unread_failure = True
            if len(self._first) < self._KEPT:
                self._first.append(future)

    def read(self, future: Future[Any]) -> None:
        with self._lock:
            future.is_read = True
            if future.is_unread_failure:
                future.is_unread_failure = False
                self.unread -= 1
                if future in self._first:
                    self._first.remove(future)

    def first_error(self) -> BaseException | None:
        """The first error that is unread; it counts as read now. None where only later ones are."""
        with self._lock:
            first = self._first[0] if self._first else None
        return None if first is None else first.exception()


class _Contained:
    """Keep what a callback raises, SystemExit too, from the thread that brings all values."""

    def __init__(self, callback: Callable[[Any], object]) -> None:
        self._callback = callback

    def __call__(self, future: Any) -> None:
        try:
            self._callback(future)
        except Exception:
            raise  # the standard future logs it
        except BaseException:
            if not getattr(this_thread, "brings_values", False):
                raise
            _logger.exception("exception calling callback for %r", future)


class Future(concurrent.futures.Future[T]):
    """A `concurrent.futures.Future`: it works with `wait`, `as_completed` and asyncio.

    It differs in one thing: `cancel()` also stops a call that is running, and returns True if the value will not be
    delivered. A running call gets SIGINT (a KeyboardInterrupt in Python code), a grace, then SIGKILL.
    """

    is_read = False
    is_unread_failure = False

    def __init__(
        self,
        stop: Callable[[int], None] | None = None,
        *,
        call_id: int = 0,
        is_strict: bool = False,
        lead: Callable[[int, Future[Any]], None] | None = None,
        failures: Failures | None = None,
    ) -> None:
        """`call_id`: the engine's number of the call, 0 for several calls; `stop` and `lead` are called with it."""
        super().__init__()
        # Not closures: thousands of futures may wait, and the garbage collector walks over each object they hold.
        self._stop = stop
        self._lead = lead  # does a little of the I/O thread's work in the thread that waits
        self._is_strict = is_strict  # the standard library's meaning: a running call cannot be cancelled
        self.call_id = call_id
        self.failures = failures
        """Where it is counted if it fails, until it is read."""
        self.shown: Callable[[], None] | None = None
        """Waits a moment until what the call printed is shown: its output comes before its value."""

    def __repr__(self) -> str:
        # The standard one's, which names the class of the value or error: here that may not be known yet.
        return super().__repr__().replace("returned Undecoded", "returned").replace("raised _Remote", "raised")

    def cancel(self) -> bool:
        is_new = False
        interrupts.hold()  # half a cancel would leave others waiting
        try:
            with self._condition:
                if self._state == _FINISHED or (self._state == _RUNNING and self._is_strict):
                    return False
                is_new = self._state not in (_CANCELLED, _CANCELLED_AND_NOTIFIED)
                if is_new:
                    self._state = _CANCELLED_AND_NOTIFIED
                    self._condition.notify_all()
                    for waiter in self._waiters:
                        waiter.add_cancelled(self)
        finally:
            try:
                interrupts.let_go()
            finally:
                if is_new and self._stop is not None:
                    self._stop(self.call_id)
        if is_new:
            self._invoke_callbacks()  # type: ignore[attr-defined]  # typeshed leaves it out
        return True

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        """Call `fn` with the future when it is done, or at once.

        What it raises is logged, and harms neither other callbacks nor other calls.
        """
        super().add_done_callback(_Contained(fn))

    def set_running(self) -> None:
        """The call was sent to a node. Nothing happens if it is cancelled already."""
        with self._condition:
            if self._state == _PENDING:
                self._state = _RUNNING

    def settle(self, value: Any) -> None:
        """Set a value, which may be Undecoded; dropped if the future was cancelled."""
        try:
            self.set_result(value)
        except concurrent.futures.InvalidStateError:  # cancelled meanwhile
            return

    def settle_error(self, error: BaseException | Undecoded) -> None:
        try:
            self.set_exception(_Remote(error) if isinstance(error, Undecoded) else error)
        except concurrent.futures.InvalidStateError:  # cancelled meanwhile
            return
        if self.failures is not None:
            self.failures.failed(self)

    def _count_read(self) -> None:
        if self.failures is not None:
            self.failures.read(self)

    @property
    def has_failed(self) -> bool:
        """Whether the call is known to have raised; nothing is unpickled to say so."""
        return self._state == _FINISHED and self._exception is not None

    def result(self, timeout: float | None = None) -> T:
        """The value; waits for it. Raises what the call raised, CancelledError or TimeoutError.

        In a done-callback of another call it raises UsageError instead of waiting: that thread brings the values.
        """
        if timeout is None and self._state in (_PENDING, _RUNNING):
            refuse_to_wait("result()")
            if self._lead is not None:
                self._lead(self.call_id, self)
            interrupts.wait_for(self._wait_done)
        try:
            value: Any = super().result(timeout)
        except _Remote as held:
            self._count_read()
            self._wait_shown()
            remote = held.error
        except BaseException:
            if self.has_failed:
                self._count_read()
            self._wait_shown()
            del self  # no reference cycle through the traceback
            raise
        else:
            self._wait_shown()
            if type(value) is not Undecoded:
                return value  # type: ignore[no-any-return]
            remote = value
        try:
            return remote.get()  # type: ignore[no-any-return]
        except Exception as error:
            drop_our_frames(error)
            raise
        finally:
            del self, remote  # no reference cycle through the traceback

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What the call raised, None if it returned; waits for it."""
        error = super().exception(timeout)
        if error is not None:
            self._count_read()
        self._wait_shown()
        if error is not None and not isinstance(error, _Remote):
            return error
        remote: Any = error.error if isinstance(error, _Remote) else self._result
        if isinstance(remote, Undecoded):
            try:
                remote.get()
            except BaseException as raised:
                return raised
        return None

    def _wait_done(self, timeout_s: float | None) -> bool:
        with self._condition:
            return self._condition.wait_for(lambda: self._state not in (_PENDING, _RUNNING), timeout_s)

    def _wait_shown(self) -> None:
        # Not in the thread that brings values: it must not wait for a terminal.
        if self.shown is not None and not getattr(this_thread, "brings_values", False):
            self.shown()


def value_of(future: Future[T]) -> T:
    """Wait for the value; whatever interrupts the wait (Ctrl-C) stops the call."""
    try:
        return future.result()
    finally:
        if not future.done():
            future.cancel()
        del future


def values_of(futures: list[Future[T]]) -> list[T]:
    """All values in order; the first error, by time, stops the others and is raised."""
    refuse_to_wait("waiting for several calls")
    try:
        interrupts.wait_for(partial(_have_ended, futures))
        for future in futures:
            if future.done() and not future.cancelled():
                error = future.exception()
                if error is not None:
                    raise error
        return [future.result() for future in futures]
    finally:
        _stop(futures)
        del futures


def _have_ended(futures: list[Future[T]], timeout_s: float | None) -> bool:
    """Whether all have, or one has failed."""
    done, left = concurrent.futures.wait(futures, timeout_s, return_when=concurrent.futures.FIRST_EXCEPTION)
    return not left or any(future.cancelled() or future.has_failed for future in futures if future in done)


def streamed(futures: list[Future[T]], *, ordered: bool) -> Iterator[T]:
    """Values as they come; leaving early, or an error, stops the others."""
    try:
        for future in futures if ordered else _as_completed(futures):
            yield future.result()
    finally:
        _stop(futures)


def _as_completed(futures: list[Future[T]]) -> Iterator[concurrent.futures.Future[T]]:
    """Yield each future once it has ended. The standard `as_completed` waits unsliced: a Ctrl-C could come too late."""
    ended = threading.Semaphore(0)
    arrived: deque[concurrent.futures.Future[T]] = deque()

    def note(future: concurrent.futures.Future[T]) -> None:
        arrived.append(future)
        ended.release()

    for future in futures:
        future.add_done_callback(note)
    for _ in futures:
        interrupts.wait_for(lambda slice_s: ended.acquire(timeout=slice_s))
        yield arrived.popleft()


def _stop(futures: list[Future[T]]) -> None:
    """Cancel what is open, the newest first: none that waits begins in the place of one that was stopped."""
    for future in reversed(futures):
        if not future.done():
            future.cancel()


def joined(futures: list[Future[Any]], failures: Failures | None = None) -> Future[tuple[Any, ...]]:
    """A future of all values; the first error, or cancelling it, stops the others.

    `failures`: where it is counted if it fails.
    """

    def stop(_: int = 0) -> None:
        _stop(futures)

    all_of_them: Future[tuple[Any, ...]] = Future(stop, failures=failures)
    left = len(futures)
    lock = threading.Lock()

    def one_done(future: concurrent.futures.Future[Any]) -> None:
        nonlocal left
        with lock:
            left -= 1
            is_last = left == 0
        if future.cancelled():
            all_of_them.cancel()
        elif isinstance(future, Future) and future.has_failed:
            all_of_them.settle_error(Undecoded(future.result))
            stop()
        elif is_last:  # unpickled by whoever asks
            all_of_them.settle(Undecoded(lambda: tuple(f.result() for f in futures)))

    if not futures:
        all_of_them.settle(())
    for future in futures:
        future.add_done_callback(one_done)
    return all_of_them
