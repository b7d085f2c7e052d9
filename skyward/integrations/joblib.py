"""joblib on a pool: every `Parallel` call, and so all of scikit-learn, runs on the pool's slots.

joblib cuts the calls into batches, and this backend sends each batch as one task. Everything that joblib's
process-based backends offer works here: automatic batch sizes, `n_jobs`, generators, timeouts and nesting. A large
array crosses the network once per node; each slot maps it and may write to its own copy.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from ..calls.options import CallOptions
from ..calls.pending import PendingCompute
from ..errors import MissingDependency, UsageError
from ..wire.seen import SeenArrays

try:
    from joblib import parallel_config
    from joblib.parallel import (
        TASK_PENDING,
        AutoBatchingMixin,
        FallbackToBackend,
        ParallelBackendBase,
        SequentialBackend,
    )
except ImportError as error:
    raise MissingDependency(
        "joblib: not installed here; run `pip install 'skyward[joblib]'`", name=error.name
    ) from error

from .joblib_batch import ThreadsOfSlot, run_batch, travelling

_log = logging.getLogger(__name__)

_LEAST_BATCH_S = 0.2
"""Shortest batch to aim at. Source: joblib. It cuts small batches at the end of the input, so few slots idle."""
_GAPS_PER_BATCH = 5.0
_LONGEST_AIM_S = 0.5
_LOOK_S = 0.25
"""Longest pause, in seconds, between two looks of joblib at the status of a batch."""
_TIMEOUT_SHARE = 0.1
"""Greatest delay of joblib's `timeout`, as a share of it."""

T = TypeVar("T")


class JoblibProvider(Protocol):
    """Part of a provider that this backend needs."""

    @property
    def shares_files(self) -> bool: ...


class Pool(Protocol):
    """Part of a pool that this backend needs."""

    @property
    def provider(self) -> JoblibProvider: ...
    @property
    def total_slots(self) -> int: ...
    def submit_sharing(self, pending: PendingCompute[T], seen: SeenArrays | None) -> Future[T]: ...


PoolT = TypeVar("PoolT", bound=Pool)


@contextlib.contextmanager
def joblib_backend(pool: PoolT, *, n_jobs: int = -1, retries: int = 0) -> Iterator[PoolT]:
    """Run joblib on `pool` inside the block.

    Like joblib's own contexts, it applies to the current thread only. The previous backend is restored at the end.

    Args:
        pool: an open pool.
        n_jobs: default for calls that set none. -1 uses every slot of the pool, n runs n calls at once.
        retries: how often a batch may run again after its node or slot was lost, >= 0.

    Yields:
        The pool.

    Raises:
        UsageError: an argument is out of range.

    Example:
        >>> with joblib_backend(pool):  # doctest: +SKIP
        ...     Parallel()(delayed(sqrt)(i) for i in range(10))
    """
    backend = SkywardBackend(pool=pool, retries=retries)
    with parallel_config(backend=backend, n_jobs=n_jobs):
        yield pool


@contextlib.contextmanager
def sklearn_backend(pool: PoolT, *, n_jobs: int = -1, retries: int = 0) -> Iterator[PoolT]:
    """Run scikit-learn on `pool` inside the block: estimators and searches with `n_jobs=None` or -1 use its slots.

    Args:
        pool: an open pool.
        n_jobs: default for calls that set none. -1 uses every slot of the pool, n runs n calls at once.
        retries: how often a batch may run again after its node or slot was lost, >= 0.

    Yields:
        The pool.

    Raises:
        MissingDependency: scikit-learn is not installed.
        UsageError: an argument is out of range.

    Example:
        >>> with sklearn_backend(pool):  # doctest: +SKIP
        ...     GridSearchCV(SVC(), {"C": [1, 10]}).fit(X, y)
    """
    try:
        importlib.import_module("sklearn")
    except ImportError as error:
        raise MissingDependency(
            "scikit-learn: not installed here; run `pip install 'skyward[sklearn]'`", name=error.name
        ) from error
    with joblib_backend(pool, n_jobs=n_jobs, retries=retries):
        yield pool


class SkywardBackend(ParallelBackendBase):  # type: ignore[misc]  # joblib ships no types
    """Joblib backend on an open pool; pass it to `joblib.parallel_config` or `Parallel(backend=...)`.

    It keeps no state of a call. Any number of `Parallel` objects may share it, also in several threads, because each
    of them gets a backend of its own when it is configured.

    Args:
        pool: an open pool.
        retries: how often a batch may run again after its node or slot was lost, >= 0.
        nesting_level: joblib's own.

    Raises:
        UsageError: `pool` is no pool, or `retries` is out of range.

    Example:
        with joblib.parallel_config(backend=SkywardBackend(pool=pool)):
            Parallel()(delayed(sqrt)(i) for i in range(10))
    """

    supports_retrieve_callback = True
    supports_sharedmem = False
    default_n_jobs = -1

    def __init__(self, *, pool: Pool, retries: int = 0, nesting_level: int | None = None) -> None:
        if not hasattr(pool, "submit_sharing"):
            raise UsageError(
                f"pool={pool!r}: not a pool; pass the open one: with sky.ComputePool(...) as pool",
                field="pool",
                value=pool,
            )
        super().__init__(nesting_level=nesting_level)
        self.pool = pool
        self.options = CallOptions(retries=retries)

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        """Return how many calls run at once: all slots for -1 and None, one less for -2, never more than exist."""
        if n_jobs == 0:
            # joblib's own words, because callers and its tests match them.
            raise ValueError("n_jobs == 0 in Parallel has no meaning")  # words: ok, for the same reason
        slots = self.pool.total_slots
        if n_jobs is None:
            return slots
        return min(n_jobs, slots) if n_jobs > 0 else max(slots + 1 + n_jobs, 1)

    def configure(self, n_jobs: int = 1, parallel: Any = None, **options: Any) -> int:
        """Hand over to this process for `n_jobs=1`, otherwise to a backend of this call only."""
        self.effective_n_jobs(n_jobs)
        if n_jobs == 1:
            raise FallbackToBackend(SequentialBackend(nesting_level=self.nesting_level))
        raise FallbackToBackend(SkywardPoolBackend(self))

    def submit(self, func: Any, callback: Any = None) -> Any:
        raise RuntimeError("SkywardBackend: not configured by a Parallel object; call joblib.Parallel(...) with it")


@dataclass(eq=False)
class _Batch:
    """Handle that joblib keeps of a submitted batch."""

    calls: Callable[[], list[Any]]
    callback: Callable[[Future[Any]], object] | None


_Entry = tuple[_Batch, Future[Any]] | threading.Event
"""A batch that has ended, or an event to set once the callbacks before it have returned."""

_CALLBACK_THREAD = "skyward-joblib"
_LAST_CALLBACKS_S = 1.0
"""Longest wait for callbacks at the end of a call. One that reads the user's iterable may take any time."""


class SkywardPoolBackend(AutoBatchingMixin, ParallelBackendBase):  # type: ignore[misc]  # joblib ships no types
    """Backend of one `Parallel` object, with its running batches, its arrays and its batch size.

    joblib calls `submit` from the user's thread and from the thread that runs its callbacks. That thread belongs to
    this backend. The pool's own thread must not run callbacks: a callback reads the user's iterable, which may wait for
    the pool, and it unpickles results.
    """

    supports_retrieve_callback = True

    def __init__(self, shared: SkywardBackend) -> None:
        super().__init__(nesting_level=shared.nesting_level)
        self._shared = shared
        self._lock = threading.Lock()
        self._limit = 0
        self._waiting: deque[_Batch] = deque()
        self._running: dict[_Batch, Future[Any] | None] = {}  # None while the batch is being sent
        self._is_aborted = False
        self._seen: SeenArrays | None = None
        self._ended: queue.SimpleQueue[_Entry | None] | None = None
        self._reader = BatchWait()
        self._elapsed_s = 0.0
        self._last_end = 0.0
        self._completed = 0
        self._gap_s = 0.0

    # Life -----------------------------------------------------------------------------------------------------------

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        # At least 2: with one, joblib would run the calls in this process, but a pool of one slot is elsewhere.
        # `_limit` keeps the true number.
        return max(2, self._shared.effective_n_jobs(n_jobs))

    def configure(
        self,
        n_jobs: int = 1,
        parallel: Any = None,
        max_nbytes: int | None = None,
        mmap_mode: str | None = "r",
        **options: Any,
    ) -> int:
        """Take over joblib's memmapping options.

        From `max_nbytes` on, an array is hashed once per call. Arrays of a file travel by the file's name if the nodes
        have the same file, as in joblib.
        """
        self.parallel = parallel
        self._limit = self._shared.effective_n_jobs(n_jobs)
        self._seen = SeenArrays(
            None if mmap_mode is None else max_nbytes, has_same_files=self._shared.pool.provider.shares_files
        )
        return self.effective_n_jobs(n_jobs)

    def start_call(self) -> None:
        self._is_aborted = False
        # joblib keeps batches that it cut for a failed call, and would run them at the start of this one.
        left = getattr(self.parallel, "_ready_batches", None)
        while left is not None and not left.empty():
            left.get_nowait()
        self._forget_arrays()

    def stop_call(self) -> None:
        """Wait for callbacks of this call that are under way. A late one would send a batch of it in the next call."""
        with self._lock:
            ended = self._ended
        if ended is None or threading.current_thread().name == _CALLBACK_THREAD:
            return
        have_returned = threading.Event()
        ended.put(have_returned)
        have_returned.wait(_LAST_CALLBACKS_S)

    @contextlib.contextmanager
    def retrieval_context(self) -> Iterator[None]:
        """Raise the error of an input that failed when all its batches had ended.

        joblib looks for errors only while a batch runs, and would return an empty list.
        """
        with super().retrieval_context():
            yield
        if getattr(self.parallel, "_aborting", False):
            self.parallel._raise_error_fast()

    def _forget_arrays(self) -> None:
        if self._seen is not None:
            self._seen.clear()

    def terminate(self) -> None:
        self.reset_batch_stats()
        self._forget_arrays()
        with self._lock:
            ended, self._ended = self._ended, None
        if ended is not None:
            ended.put(None)

    def abort_everything(self, ensure_ready: bool = True) -> None:
        """Cancel all running batches, on every node, and drop the waiting ones."""
        with self._lock:
            self._is_aborted = True
            self._waiting.clear()
            futures = list(self._running.values())
        for future in reversed(futures):  # in the other order, stopping one batch would start the next on its node
            if future is not None:
                future.cancel()

    def get_nested_backend(self) -> tuple[ParallelBackendBase, None]:
        level = (self.nesting_level or 0) + 1
        if level > 1:
            return SequentialBackend(nesting_level=level), None
        return ThreadsOfSlot(nesting_level=level), None

    # Batches --------------------------------------------------------------------------------------------------------

    def submit(self, func: Callable[[], list[Any]], callback: Callable[[Future[Any]], object] | None = None) -> Any:
        batch = _Batch(func, callback)
        self._reader.watch(callback)
        with self._lock:
            if len(self._running) >= self._limit < self._shared.pool.total_slots:
                self._waiting.append(batch)
                return batch
            self._running[batch] = None
        self._start(batch)
        return batch

    apply_async = submit  # joblib before 1.5

    def _start(self, batch: _Batch) -> None:
        ended = self._callbacks()
        future = self._send(batch)
        with self._lock:
            self._running[batch] = future
            is_aborted = self._is_aborted
        # Added only now: the callback removes the batch from `_running`, so it has to be in there.
        future.add_done_callback(lambda done: ended.put((batch, done)))
        if is_aborted:  # another thread called `abort_everything` meanwhile
            future.cancel()

    def _send(self, batch: _Batch) -> Future[Any]:
        try:
            pending = PendingCompute(run_batch, (travelling(batch.calls),), {}, self._options(batch.calls))
            return self._shared.pool.submit_sharing(pending, self._seen)
        except Exception as error:  # the Parallel call raises it later; raised here it would end the callback thread
            failed: Future[Any] = Future()
            failed.set_exception(error)
            return failed

    def _options(self, calls: Any) -> CallOptions:
        function = calls.items[0][0] if getattr(calls, "items", None) else calls
        name = getattr(function, "__name__", None) or type(function).__name__
        return CallOptions(retries=self._shared.options.retries, name=name)

    def _callbacks(self) -> queue.SimpleQueue[_Entry | None]:
        with self._lock:
            if self._ended is None:
                self._ended = queue.SimpleQueue()
                threading.Thread(
                    target=self._run_callbacks, args=(self._ended,), name=_CALLBACK_THREAD, daemon=True
                ).start()
            return self._ended

    def _run_callbacks(self, ended: queue.SimpleQueue[_Entry | None]) -> None:
        while (entry := ended.get()) is not None:
            if isinstance(entry, threading.Event):
                entry.set()
                continue
            batch, future = entry
            with self._lock:
                self._running.pop(batch, None)
                following = self._waiting.popleft() if self._waiting else None
                if following is not None:
                    self._running[following] = None
            try:
                if following is not None:
                    self._start(following)
                if batch.callback is not None:
                    batch.callback(future)
                    self._reader.ended(batch.callback)
            except BaseException:  # joblib's callback has recorded the error of its call; the other batches continue
                _log.exception("joblib: a callback raised an error")
            del entry, batch, future, following  # otherwise the waiting thread would keep a result alive

    # Batch size -----------------------------------------------------------------------------------------------------
    # This is joblib's rule with two changes. joblib takes the time from sending a batch to its result for the time of
    # its calls. On a distant machine that is long even for the shortest batches, so they would stay short. And a batch
    # of 0.2 s is worth sending wherever the pool is. The size starts at 1 and doubles, here twice while it is far too
    # small: 10,000 calls of 1 ms on 20 slots then make 410 batches instead of 515, and take 3 % less time.

    @property
    def MIN_IDEAL_BATCH_DURATION(self) -> float:
        """Duration that a batch should have, in seconds: many times the gap that a slot has between two batches."""
        return min(max(_LEAST_BATCH_S, _GAPS_PER_BATCH * self._gap_s), _LONGEST_AIM_S)

    def compute_batch_size(self) -> int:
        if 0 < self._smoothed_batch_duration < self.MIN_IDEAL_BATCH_DURATION / 8:
            self._effective_batch_size *= 2
        size: int = super().compute_batch_size()
        return size

    def retrieve_result_callback(self, future: Future[tuple[float, list[Any]]]) -> list[Any]:
        self._elapsed_s, values = future.result()
        return values

    def batch_completed(self, batch_size: int, duration: float) -> None:
        # joblib calls this in the thread that has just retrieved the result, so `_elapsed_s` belongs to this batch.
        self._measure_gap()
        super().batch_completed(batch_size, self._elapsed_s)

    def _measure_gap(self) -> None:
        """Update the mean gap: while batches wait for slots, a slot's time consists of its calls and the gaps."""
        now = time.monotonic()
        between_s, self._last_end = now - self._last_end, now
        self._completed += 1
        has_settled = self._completed > 2 * self._limit  # the first batches also import modules
        if has_settled and len(self._running) >= self._limit:
            sample = self._limit * between_s - self._elapsed_s
            # A small weight: slots that start together end together, and one slot's gap then looks like everyone's.
            self._gap_s += (sample - self._gap_s) / (8 * self._limit)


class BatchWait:
    """Wait that blocks until a batch of one `Parallel` object ends, instead of polling.

    joblib's `Parallel` polls every 10 ms for the batch whose values come next. With batches of 0.3 s that costs more
    than everything else the client does: a process that wakes up while every core is busy has lost its caches. joblib
    polls by `get_status` of the callback that it passed with the batch. This class makes that call wait, and leaves
    joblib itself alone. A version of joblib that polls in another way still does so every 10 ms.
    """

    def __init__(self) -> None:
        self._news = threading.Event()
        self._awaited: Any = None

    def watch(self, tracker: Any) -> None:
        """Watch a batch; `tracker` is the callback that joblib passed with it."""
        if hasattr(tracker, "get_status") and hasattr(tracker, "status"):
            # A weak reference: otherwise a cycle would keep the batch and its values until the garbage collector runs.
            tracker.get_status = functools.partial(self._status, weakref.ref(tracker))

    def ended(self, tracker: Any) -> None:
        """Record that the callback of a batch has run."""
        awaited = self._awaited
        if awaited is not None and (awaited is tracker or awaited.status != TASK_PENDING or _aborts(awaited)):
            self._news.set()

    def _status(self, named: weakref.ref[Any], timeout: float | None = None) -> Any:
        tracker = named()
        assert tracker is not None, "the caller holds a reference"
        look = type(tracker).get_status
        look_s = _LOOK_S if timeout is None else min(_LOOK_S, _TIMEOUT_SHARE * timeout)
        deadline = time.monotonic() + look_s
        try:
            self._awaited = tracker
            while True:
                self._news.clear()
                status = look(tracker, timeout=timeout)
                left_s = deadline - time.monotonic()
                if status != TASK_PENDING or _aborts(tracker) or left_s <= 0:
                    return status
                self._news.wait(left_s)
        finally:
            self._awaited = None


def _aborts(tracker: Any) -> bool:
    return bool(getattr(tracker.parallel, "_aborting", False))
