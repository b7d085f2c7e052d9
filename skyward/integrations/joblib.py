"""joblib on a pool: every `Parallel` call, and so all of scikit-learn, runs on the pool's slots.

joblib cuts the calls into batches, this backend sends each batch as one task. What joblib does in its process-based
backends holds here: automatic batch sizes, `n_jobs`, generators, timeouts, nesting. Large arrays cross once to each
node; a slot maps them and may write to its own view.
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

from ..calls.compute import PendingCompute
from ..calls.options import CallOptions
from ..errors import MissingDependency
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
    raise MissingDependency("joblib is not installed: pip install 'skyward[joblib]'") from error

from .joblib_batch import ThreadsOfSlot, run_batch, travelling

__all__ = ["BatchWait", "SkywardBackend", "joblib_backend", "sklearn_backend"]

_log = logging.getLogger(__name__)

_LEAST_BATCH_S = 0.2
"""As joblib has it. Its batches at the end of the input are small, so that few slots wait there."""
_GAPS_PER_BATCH = 5.0
_LONGEST_AIM_S = 0.5
_LOOK_S = 0.25
"""Seconds after which joblib looks again all the same."""
_TIMEOUT_SHARE = 0.1
"""Of a `timeout` of joblib's: the most that it may be late."""

T = TypeVar("T")


class JoblibProvider(Protocol):
    """What is asked of a pool's provider."""

    @property
    def shares_files(self) -> bool: ...


class Pool(Protocol):
    """What is asked of a pool."""

    @property
    def provider(self) -> JoblibProvider: ...
    @property
    def total_slots(self) -> int: ...
    def submit_sharing(self, pending: PendingCompute[T], seen: SeenArrays | None) -> Future[T]: ...


PoolT = TypeVar("PoolT", bound=Pool)


@contextlib.contextmanager
def joblib_backend(pool: PoolT, *, n_jobs: int = -1, retries: int = 0) -> Iterator[PoolT]:
    """Inside the block, joblib runs on `pool`; afterwards on what it ran on before.

    As joblib's own contexts it holds in this thread only. Nothing is registered and nothing stays.

    Args:
        pool: an open pool.
        n_jobs: for calls that set none: -1 for every slot of the pool, n for n at once.
        retries: how often a batch may be run again after the loss of its node or slot, >= 0.

    Raises:
        UsageError: an argument is out of its range.

    Example:
        >>> with joblib_backend(pool):  # doctest: +SKIP
        ...     Parallel()(delayed(sqrt)(i) for i in range(10))
    """
    backend = SkywardBackend(pool=pool, retries=retries)
    with parallel_config(backend=backend, n_jobs=n_jobs):
        yield pool


@contextlib.contextmanager
def sklearn_backend(pool: PoolT, *, n_jobs: int = -1, retries: int = 0) -> Iterator[PoolT]:
    """`joblib_backend` for scikit-learn: estimators and searches with `n_jobs=None` or -1 run on `pool`.

    Raises MissingDependency where scikit-learn is not installed.
    """
    try:
        importlib.import_module("sklearn")
    except ImportError as error:
        raise MissingDependency("scikit-learn is not installed: pip install 'skyward[sklearn]'") from error
    with joblib_backend(pool, n_jobs=n_jobs, retries=retries):
        yield pool


class SkywardBackend(ParallelBackendBase):  # type: ignore[misc]  # joblib ships no types
    """A joblib backend on an open pool; give it to `joblib.parallel_config` or `Parallel(backend=...)`.

    It holds no state of a call, so any number of `Parallel` objects may share it, in several threads too: each of
    them gets a backend of its own when it is configured.
    """

    supports_retrieve_callback = True
    supports_sharedmem = False
    default_n_jobs = -1

    def __init__(self, *, pool: Pool, retries: int = 0, nesting_level: int | None = None) -> None:
        super().__init__(nesting_level=nesting_level)
        self.pool = pool
        self.options = CallOptions(retries=retries)

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        """How many calls run at once: all slots for -1 and None, one less for -2, never more than there are."""
        if n_jobs == 0:
            raise ValueError("n_jobs == 0 in Parallel has no meaning")
        slots = self.pool.total_slots
        if n_jobs is None:
            return slots
        return min(n_jobs, slots) if n_jobs > 0 else max(slots + 1 + n_jobs, 1)

    def configure(self, n_jobs: int = 1, parallel: Any = None, **options: Any) -> int:
        """Hand over: to this process for `n_jobs=1`, else to a backend of the call's own."""
        self.effective_n_jobs(n_jobs)
        if n_jobs == 1:
            raise FallbackToBackend(SequentialBackend(nesting_level=self.nesting_level))
        raise FallbackToBackend(SkywardPoolBackend(self))

    def submit(self, func: Any, callback: Any = None) -> Any:
        raise RuntimeError("SkywardBackend is configured by a Parallel object before anything is submitted")


@dataclass(eq=False)
class _Batch:
    """What joblib keeps of a batch that it submitted."""

    calls: Callable[[], list[Any]]
    callback: Callable[[Future[Any]], object] | None


class SkywardPoolBackend(AutoBatchingMixin, ParallelBackendBase):  # type: ignore[misc]  # joblib ships no types
    """The backend of one `Parallel` object: its batches under way, its arrays, its batch size.

    joblib calls `submit` from the user's thread and from the thread that runs its callbacks. That one is ours and not
    the pool's: a callback reads the user's iterable, which may wait for the pool, and unpickles results.
    """

    supports_retrieve_callback = True

    def __init__(self, shared: SkywardBackend) -> None:
        super().__init__(nesting_level=shared.nesting_level)
        self._shared = shared
        self._lock = threading.Lock()
        self._limit = 0
        self._waiting: deque[_Batch] = deque()
        self._running: dict[_Batch, Future[Any] | None] = {}  # None: it is being sent
        self._is_aborted = False
        self._seen: SeenArrays | None = None
        self._ended: queue.SimpleQueue[tuple[_Batch, Future[Any]] | None] | None = None
        self._reader = BatchWait()
        self._elapsed_s = 0.0
        self._last_end = 0.0
        self._completed = 0
        self._gap_s = 0.0

    # Life -----------------------------------------------------------------------------------------------------------

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        # Two at least: for one, joblib would run the calls in this process, and a pool of one slot is still
        # somewhere else. `_limit` keeps to the true number.
        return max(2, self._shared.effective_n_jobs(n_jobs))

    def configure(
        self,
        n_jobs: int = 1,
        parallel: Any = None,
        max_nbytes: int | None = None,
        mmap_mode: str | None = "r",
        **options: Any,
    ) -> int:
        """`max_nbytes` as for joblib's memmapping: from that size on an array is looked at once in a call.

        Arrays of a file travel by the file's name where the nodes have it, as joblib has it.
        """
        self.parallel = parallel
        self._limit = self._shared.effective_n_jobs(n_jobs)
        self._seen = SeenArrays(
            None if mmap_mode is None else max_nbytes, has_same_files=self._shared.pool.provider.shares_files
        )
        return self.effective_n_jobs(n_jobs)

    def start_call(self) -> None:
        self._is_aborted = False
        # joblib keeps what it had cut for a call that failed, and would run it as the beginning of this one.
        left = getattr(self.parallel, "_ready_batches", None)
        while left is not None and not left.empty():
            left.get_nowait()
        self._forget_arrays()

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
        """Stop what runs, wherever it is, and forget what waits."""
        with self._lock:
            self._is_aborted = True
            self._waiting.clear()
            futures = list(self._running.values())
        for future in reversed(futures):  # or one that waits on its node begins when one before it is stopped
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
        future.add_done_callback(lambda done: ended.put((batch, done)))
        if is_aborted:  # meanwhile, in another thread
            future.cancel()

    def _send(self, batch: _Batch) -> Future[Any]:
        try:
            pending = PendingCompute(run_batch, (travelling(batch.calls),), {}, self._options(batch.calls))
            return self._shared.pool.submit_sharing(pending, self._seen)
        except Exception as error:  # raised by the Parallel call: here it would end a thread of ours
            failed: Future[Any] = Future()
            failed.set_exception(error)
            return failed

    def _options(self, calls: Any) -> CallOptions:
        function = calls.items[0][0] if getattr(calls, "items", None) else calls
        name = getattr(function, "__name__", None) or type(function).__name__
        return CallOptions(retries=self._shared.options.retries, name=name)

    def _callbacks(self) -> queue.SimpleQueue[tuple[_Batch, Future[Any]] | None]:
        with self._lock:
            if self._ended is None:
                self._ended = queue.SimpleQueue()
                threading.Thread(
                    target=self._run_callbacks, args=(self._ended,), name="skyward-joblib", daemon=True
                ).start()
            return self._ended

    def _run_callbacks(self, ended: queue.SimpleQueue[tuple[_Batch, Future[Any]] | None]) -> None:
        while (entry := ended.get()) is not None:
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
            except BaseException:  # joblib's callback has noted what its call raised; the other batches go on
                _log.exception("a callback of joblib's raised:")
            del entry, batch, future, following  # no result lives on in a thread that waits

    # Batch size -----------------------------------------------------------------------------------------------------
    # joblib's rule, with two other numbers. It takes the time from sending a batch to its result for the time of the
    # calls; on a far machine that is long for the shortest of batches, which then stay short. And 0.2 s is worth
    # sending wherever the pool is. The size begins at 1 and is doubled, here twice while it is far too small: 10,000
    # calls of 1 ms on 20 slots are then 410 batches instead of 515, and take 3 % less time.

    @property
    def MIN_IDEAL_BATCH_DURATION(self) -> float:
        """Seconds that a batch should take: many times what a slot waits between two."""
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
        # In the thread that has just retrieved the result.
        self._measure_gap()
        super().batch_completed(batch_size, self._elapsed_s)

    def _measure_gap(self) -> None:
        """While batches wait for slots, a slot's time is that of its calls and of the gaps between them."""
        now = time.monotonic()
        between_s, self._last_end = now - self._last_end, now
        self._completed += 1
        has_settled = self._completed > 2 * self._limit  # the first batches also import
        if has_settled and len(self._running) >= self._limit:
            sample = self._limit * between_s - self._elapsed_s
            # Slowly: slots that started together end together, and the gap of one is then seen as that of all.
            self._gap_s += (sample - self._gap_s) / (8 * self._limit)


class BatchWait:
    """Wait for a batch of one `Parallel` object until it has ended, instead of looking for it all the time.

    joblib's `Parallel` looks every 10 ms whether the batch whose values come next is there, and that costs more than
    all else that the client does for a batch of 0.3 s: a process that wakes up where every core is busy finds nothing
    of its own in the caches. It looks by calling `get_status` of what it gave the backend as the batch's callback. So
    that is made to wait; joblib itself does not change, and where it looks in another way it does so every 10 ms.
    """

    def __init__(self) -> None:
        self._news = threading.Event()
        self._awaited: Any = None

    def watch(self, tracker: Any) -> None:
        """`tracker`: what joblib gave as the callback of a batch."""
        if hasattr(tracker, "get_status") and hasattr(tracker, "status"):
            # Weakly: a batch and its values must not live until the garbage collector comes.
            tracker.get_status = functools.partial(self._status, weakref.ref(tracker))

    def ended(self, tracker: Any) -> None:
        """Its callback has run."""
        awaited = self._awaited
        if awaited is not None and (awaited is tracker or awaited.status != TASK_PENDING or _aborts(awaited)):
            self._news.set()

    def _status(self, named: weakref.ref[Any], timeout: float | None = None) -> Any:
        tracker = named()
        assert tracker is not None, "who asks it holds it"
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
