"""Future of a call: a standard future whose value is unpickled by the first thread that reads it.

The thread that reads the channel never unpickles. Unpickling imports the user's modules, and it would deadlock with a
thread that holds an import lock while it waits for the value. The functions below wait for futures, and cancel their
calls when the wait ends early.
"""

from __future__ import annotations

import concurrent.futures
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ..core import interrupts
from ..core.html import card
from ..core.user_lines import drop_our_frames
from ..errors import UsageError
from . import undecoded
from .undecoded import Undecoded

T = TypeVar("T")

_logger = logging.getLogger("concurrent.futures")

this_thread = threading.local()
"""`brings_values` is set in I/O threads."""


def may_wait() -> bool:
    """Return whether this thread may wait for a value. The I/O thread would never end: it delivers the values."""
    return not getattr(this_thread, "brings_values", False)


def refuse_to_wait(action: str) -> None:
    """Raise UsageError in an I/O thread."""
    if not may_wait():
        raise UsageError(
            f"{action}: a done-callback cannot wait for another call, because its thread delivers all values; "
            "chain the calls with another callback, or wait in another thread"
        )


_PENDING, _RUNNING = "PENDING", "RUNNING"
_CANCELLED, _CANCELLED_AND_NOTIFIED, _FINISHED = "CANCELLED", "CANCELLED_AND_NOTIFIED", "FINISHED"
_OPEN = (_PENDING, _RUNNING)


class _Remote(Exception):
    """Holder of an undecoded error, in the place where a standard future keeps its exception."""

    def __init__(self, error: Undecoded) -> None:
        super().__init__("undecoded")
        self.error = error


class Failures:
    """Failed calls of a pool whose futures nobody has read. Thread-safe."""

    _KEPT = 8

    def __init__(self) -> None:
        self.unread = 0
        self._first: list[Future[Any]] = []
        self._lock = threading.RLock()  # reentrant: a signal handler may read a future in the same thread

    def failed(self, future: Future[Any]) -> None:
        with self._lock:
            if future.is_read:  # a waiting thread was faster than this count
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
        """Return the first unread error and mark it as read; None if only later ones are left."""
        with self._lock:
            first = self._first[0] if self._first else None
        return None if first is None else first.exception()


class _Contained:
    """Callback wrapper that keeps exceptions, even SystemExit, away from the thread that delivers values."""

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
    """Future of a call's value, made by `f(x) > pool` and `pool.submit(...)`.

    A `concurrent.futures.Future` that works with `wait`, `as_completed` and asyncio. The only difference: `cancel()`
    also stops a running call, and returns True if the value will not be delivered. A running call gets SIGINT (a
    KeyboardInterrupt in Python code), then after a grace period SIGKILL.

    Example:
        >>> import skyward as sky
        >>> with sky.ComputePool(provider=sky.Local()) as pool:
        ...     future = sky.compute(abs)(-2) > pool
        ...     future.result(timeout=60)
        2
    """

    # Without a dictionary an open future takes half the memory, and fewer lines of the processor's cache.
    __slots__ = (
        "_exception",
        "_is_strict",
        "_lead",
        "_made_callbacks",
        "_made_condition",
        "_made_waiters",
        "_result",
        "_state",
        "_stop",
        "call_id",
        "failures",
        "shown",
        "why",
    )

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
        why: Callable[[int], str] | None = None,
    ) -> None:
        """Make a future. `call_id` is the engine's number of the call, 0 for several; `stop` and `lead` receive it."""
        # The fields of the standard future. Its own `__init__` would also make a condition, which consists of nine
        # objects: most of what the garbage collector has to visit while thousands of futures wait. So a change of the
        # state needs `undecoded.brief`, and the condition too once there is one and somebody has to be told.
        self._state = _PENDING
        self._result: Any = None
        self._exception: BaseException | None = None
        self._made_waiters: list[Any] | None = None
        self._made_callbacks: list[Callable[[Any], object]] | None = None
        self._made_condition: threading.Condition | None = None
        # Plain functions and a number instead of closures: thousands of futures may wait, and the garbage collector
        # visits each object that they hold.
        self._stop = stop
        self._lead = lead  # lets the waiting thread do some of the I/O thread's work, which saves a thread switch
        self._is_strict = is_strict  # as in the standard library: a running call cannot be cancelled
        self.call_id = call_id
        self.failures = failures
        """Counter of this future while it has failed and nobody has read it."""
        self.why = why
        """Function that tells why the call of this number waits."""
        self.shown: Callable[[], None] | None = None
        """Wait briefly until the call's output is shown, so that the output comes before the value."""

    if not TYPE_CHECKING:  # there they are the attributes of the standard future

        @property
        def _waiters(self) -> list[Any]:
            """Waiters of the standard future, such as those of `concurrent.futures.wait`. Most futures have none."""
            if self._made_waiters is None:
                self._made_waiters = []
            return self._made_waiters

        @property
        def _done_callbacks(self) -> list[Callable[[Any], object]]:
            """Callbacks of the standard future. Most futures have none."""
            if self._made_callbacks is None:
                self._made_callbacks = []
            return self._made_callbacks

        @property
        def _condition(self) -> threading.Condition:
            """Condition of the standard future, made when a thread waits. Most futures are read when they are done."""
            if self._made_condition is None:
                made = threading.Condition()
                with undecoded.brief:
                    if self._made_condition is None:
                        self._made_condition = made
            return self._made_condition

    def __repr__(self) -> str:
        # The standard repr names the class of the value or error, which is not known before it is decoded.
        text = super().__repr__().replace("raised _Remote", "raised")
        is_encoded = isinstance(self._result, Undecoded)
        return text.replace(f"returned {type(self._result).__name__}", "returned") if is_encoded else text

    def cancel(self) -> bool:
        """Cancel the call, even if it is running. Returns False if the value has already arrived."""
        is_new = False
        # A signal handler that raises in the middle would leave the state set and the waiters not notified.
        interrupts.hold()
        try:
            is_new = self._move((_PENDING,) if self._is_strict else _OPEN, _CANCELLED_AND_NOTIFIED)
        finally:
            try:
                interrupts.let_go()
            finally:
                if is_new and self._stop is not None:
                    self._stop(self.call_id)
        if is_new:
            self._call_callbacks()
        return self.cancelled()

    def _move(
        self, states: tuple[str, ...], state: str, result: Any = None, exception: BaseException | None = None
    ) -> bool:
        """Move from one of `states` to another, and tell those who wait. In other states, only return False."""
        with undecoded.brief:
            if self._made_condition is None:  # nobody waits, because waiters need the condition
                if self._state not in states:
                    return False
                self._result, self._exception = result, exception
                self._state = state
                return True
        with self._made_condition:
            with undecoded.brief:  # `set_running` takes this lock alone
                if self._state not in states:
                    return False
                self._result, self._exception = result, exception
                self._state = state
            for waiter in self._made_waiters or ():
                _tell(waiter, self)
            self._made_condition.notify_all()
            return True

    def cancelled(self) -> bool:
        """Return whether the call was cancelled."""
        return self._state in (_CANCELLED, _CANCELLED_AND_NOTIFIED)  # the standard method would make a condition

    @property
    def why_waiting(self) -> str:
        """Reason why the call has not begun, such as "waits for 2 GPUs: 1 free"; empty once it has begun, or ended.

        It is looked up now, and may have changed when you read it. Inside tasks it is always empty. A done-callback
        cannot wait for the head of a pool: there it is the reason that was looked up last.
        """
        return "" if self.why is None or self.done() else self.why(self.call_id)

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        """Call `fn` with this future when it is done, or at once if it is.

        Exceptions of `fn` are logged. They affect neither other callbacks nor other calls.
        """
        super().add_done_callback(_Contained(fn))

    def set_running(self) -> None:
        """Mark the call as sent to a node. No effect if it is cancelled.

        Engines call this with their lock. So it never waits for the condition: `concurrent.futures.wait` holds that of
        each of its futures while it reads errors, and an error may need the engine's lock when it is decoded.
        """
        with undecoded.brief:
            if self._state == _PENDING:  # nobody waits for this change, so nobody is told
                self._state = _RUNNING

    def running(self) -> bool:
        """Return whether the call was sent to a node and has not ended."""
        return self._state == _RUNNING  # as `set_running`, without the condition

    def done(self) -> bool:
        """Return whether the call has ended or was cancelled."""
        return self._state not in _OPEN

    def settle(self, value: Any) -> None:
        """Set the value, which may be Undecoded. Dropped if the future was cancelled."""
        if self._move(_OPEN, _FINISHED, value) and self._made_callbacks is not None:
            self._call_callbacks()

    def settle_error(self, error: BaseException | Undecoded) -> None:
        """Set the error, which may be Undecoded. Dropped if the future was cancelled."""
        exception = _Remote(error) if isinstance(error, Undecoded) else error
        if not self._move(_OPEN, _FINISHED, None, exception):
            return
        self._call_callbacks()
        if self.failures is not None:
            self.failures.failed(self)

    def _call_callbacks(self) -> None:
        if self._made_callbacks is not None:
            self._invoke_callbacks()  # type: ignore[attr-defined]  # typeshed leaves it out

    def _count_read(self) -> None:
        if self.failures is not None:
            self.failures.read(self)

    @property
    def has_failed(self) -> bool:
        """Return whether the call is known to have raised. Nothing is unpickled to find out."""
        return self._state == _FINISHED and self._exception is not None

    def _state_in_words(self) -> str:
        if self._state in (_CANCELLED, _CANCELLED_AND_NOTIFIED):
            return "cancelled"
        if self._state == _FINISHED:
            return "failed" if self.has_failed else "done"
        return "running" if self._state == _RUNNING else "waiting"

    def _repr_html_(self) -> str:
        hints = {
            "done": "`.result()` returns its value",
            "failed": "`.result()` raises its error, `.exception()` returns it",
            "cancelled": "`.result()` raises CancelledError",
        }
        state = self._state_in_words()
        hint = hints.get(state, "`.result()` waits for its value; `.cancel()` stops the call")
        return card("Future", f"of call {self.call_id}, {state}", hint=hint)

    def result(self, timeout: float | None = None) -> T:
        """Wait for the value and return it.

        Args:
            timeout: Longest wait in seconds; None for no limit.

        Raises:
            TimeoutError: The value did not arrive in time. The call goes on.
            CancelledError: The call was cancelled.
            UsageError: This is a done-callback of another call. Its thread delivers the values, so it cannot wait for
                one.
            Exception: Any exception of the function, as itself.
        """
        if self._state in _OPEN:
            timeout = self._wait_ended(timeout)
        try:
            has_value = self._state == _FINISHED and self._exception is None
            value: Any = self._result if has_value else super().result(timeout)
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
            if self.shown is not None:
                self._wait_shown()
            if not isinstance(value, Undecoded):
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
        """Wait for the call and return its exception, or None if it returned a value.

        Args:
            timeout: Longest wait in seconds; None for no limit.
        """
        if self._state in _OPEN:
            interrupts.wait_for(self._wait_done, timeout)
            timeout = 0.0
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

    def _wait_ended(self, timeout_s: float | None) -> float:
        """Wait for the end, and return how long to wait for it then."""
        if timeout_s is None:
            refuse_to_wait("result()")
            if self._lead is not None:
                self._lead(self.call_id, self)
        interrupts.wait_for(self._wait_done, timeout_s)
        return 0.0

    def _wait_done(self, timeout_s: float | None) -> bool:
        with self._condition:
            return self._condition.wait_for(lambda: self._state not in _OPEN, timeout_s)

    def _wait_shown(self) -> None:
        # The I/O thread must not wait for a terminal.
        if self.shown is not None and not getattr(this_thread, "brings_values", False):
            self.shown()


def _tell(waiter: Any, future: Future[Any]) -> None:
    """Tell a waiter of the standard library that a future is done."""
    if future.cancelled():
        waiter.add_cancelled(future)
    elif future.has_failed:
        waiter.add_exception(future)
    else:
        waiter.add_result(future)


def value_of(future: Future[T]) -> T:
    """Wait for the value. Any interruption of the wait, such as Ctrl-C, cancels the call."""
    try:
        return future.result()
    finally:
        if not future.done():
            future.cancel()
        del future


def values_of(futures: list[Future[T]]) -> list[T]:
    """Wait for all values, in order. The earliest error cancels the other calls and is raised."""
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
    """Return whether all futures have ended, or one has failed."""
    done, left = concurrent.futures.wait(futures, timeout_s, return_when=concurrent.futures.FIRST_EXCEPTION)
    return not left or any(future.cancelled() or future.has_failed for future in futures if future in done)


def streamed(futures: list[Future[T]], *, ordered: bool) -> Iterator[T]:
    """Yield values as they arrive. Leaving early, or an error, cancels the other calls."""
    try:
        for future in futures if ordered else _as_completed(futures):
            yield future.result()
    finally:
        _stop(futures)


def _as_completed(futures: list[Future[T]]) -> Iterator[concurrent.futures.Future[T]]:
    """Yield each future once it has ended."""
    # The standard `as_completed` waits in one piece, so a Ctrl-C could come too late; see `interrupts.wait_for`.
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
    """Cancel open calls, newest first: otherwise a waiting call would start in the slot of a cancelled one."""
    for future in reversed(futures):
        if not future.done():
            future.cancel()


def joined(futures: list[Future[Any]], failures: Failures | None = None) -> Future[tuple[Any, ...]]:
    """Return a future of all values. The first error, or cancelling this future, cancels the other calls.

    `failures` counts the future if it fails.
    """

    def stop(_: int = 0) -> None:
        _stop(futures)

    def why(_: int) -> str:
        return next((reason for future in futures if (reason := future.why_waiting)), "")

    all_of_them: Future[tuple[Any, ...]] = Future(stop, failures=failures, why=why)
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
        elif is_last:  # decoded by the first reader
            all_of_them.settle(Undecoded(lambda: tuple(f.result() for f in futures)))

    if not futures:
        all_of_them.settle(())
    for future in futures:
        future.add_done_callback(one_done)
    return all_of_them


def _why_behind_others(_: int) -> str:
    return "waits for the calls among its arguments"


def followed(
    first: Future[T],
    send: Callable[[T], Future[Any]],
    *,
    is_strict: bool = False,
    failures: Failures | None = None,
) -> Future[Any]:
    """Return a future of the call that `send` sends with the value of another future. Cancelling it cancels both."""
    open_ones: list[Future[Any]] = [first]

    def stop(_: int = 0) -> None:
        _stop(open_ones)

    last: Future[Any] = Future(stop, is_strict=is_strict, failures=failures, why=_why_behind_others)

    # Neither callback refers to the future that calls it, and `open_ones` ends empty: in a cycle, values would stay in
    # memory until the garbage collector finds them.
    def begin(resolved: Future[T]) -> None:
        open_ones.clear()
        if resolved.cancelled():
            last.cancel()
        elif resolved.has_failed:
            last.settle_error(Undecoded(resolved.result))
        else:
            try:
                sent = send(resolved.result())
            except BaseException as error:
                last.settle_error(error)
                return
            open_ones.append(sent)
            last.call_id, last.why = sent.call_id, sent.why
            last.set_running()
            if last.cancelled():  # between the two steps
                stop()
            sent.add_done_callback(end)

    def end(sent: Future[Any]) -> None:
        open_ones.clear()
        last.shown = sent.shown
        if sent.cancelled():
            last.cancel()
        elif sent.has_failed:
            last.settle_error(Undecoded(sent.result))
        else:
            last.settle(Undecoded(sent.result))

    first.add_done_callback(begin)
    return last
