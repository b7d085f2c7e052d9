"""Interface between evaluators and the places where evaluations run. Imports no framework."""

from __future__ import annotations

import hashlib
import threading
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Protocol

import cloudpickle

from ...errors import ArgumentNotPicklable

WARMED_SLOTS = 4
"""Most slots of one dispatcher to warm up, because each keeps a model from then on."""


class Content:
    """Value that is sent to a worker once, identified by a digest of its pickle.

    It is pickled at most once, on first use. A worker in this process takes the value itself, so nothing is pickled.
    Thread-safe.

    Args:
        value: the value. Do not change it afterwards, because a worker that has it does not get it again.
        field: name for errors, such as "eval_fn".

    Example:
        >>> Content([1, 2], "payload").digest == Content([1, 2], "payload").digest
        True
    """

    def __init__(self, value: Any, field: str) -> None:
        self.value, self.field = value, field
        self._lock = threading.Lock()
        self._data: bytes | None = None
        self._digest = ""

    def __repr__(self) -> str:
        return f"<Content {self.field}>"

    @property
    def data(self) -> bytes:
        """Pickle of the value, by cloudpickle; raises ArgumentNotPicklable."""
        with self._lock:
            if self._data is None:
                try:
                    data = cloudpickle.dumps(self.value, protocol=5)
                except Exception as error:
                    raise ArgumentNotPicklable(
                        f"{self.field}: cannot be sent to another process ({type(error).__name__}: {error}); create "
                        "what cannot be pickled (open files, loaders with workers, locks) inside the function",
                        argument=self.field,
                    ) from error
                self._digest = hashlib.blake2b(data, digest_size=16).hexdigest()
                self._data = data
            return self._data

    @property
    def digest(self) -> str:
        """Digest of `data`, 32 hexadecimal digits; raises ArgumentNotPicklable."""
        _ = self.data
        return self._digest


@dataclass(frozen=True, kw_only=True)
class Job:
    """One evaluation for a worker: `eval_fn(load(factory(), state), payload)`.

    A worker keeps the model under `cache_key` and calls `factory()` if it has none. One evaluation at a time uses it.

    Example:
        A dispatcher of your own gets jobs in `submit`:

            def submit(self, job: Job) -> Future[Outcome]:
                return self.executor.submit(self.score, job)
    """

    factory: Content
    """() -> model; only the architecture matters, not the weights."""
    load: Content
    """(model, state) -> None; loads the weights."""
    eval_fn: Content
    """(model, payload) -> dict of metrics."""
    payload: Content
    cache_key: str | None
    """None creates a new model for each evaluation."""
    state: Any
    """Nested dicts and lists of host tensors or arrays. Read-only; valid until the job's future is done."""
    step: int
    snapshot_id: str
    timeout_s: float | None = None
    """Limit of the running time in seconds, without waiting; None means no limit."""
    is_warm_up: bool = False
    """True if the job scores nothing, so its duration says nothing about evaluations."""


def _nothing(*_: object) -> None:
    """Accept anything and do nothing."""


NOTHING = Content(_nothing, "nothing")


def warm_up_of(job: Job) -> Job:
    """Return a job that imports, creates and keeps everything that `job` needs, and scores nothing."""
    return replace(job, load=NOTHING, eval_fn=NOTHING, state=None, step=0, snapshot_id="warm-up", is_warm_up=True)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a job. Times are seconds since 1970, by the clock of the process that submitted.

    Example:
        >>> Outcome(value={"loss": 0.5}, worker="node 1", started_at=10.0, finished_at=12.5).load_s
        0.0
    """

    value: Any
    """Return value of `eval_fn`, unchecked."""
    worker: str
    started_at: float
    finished_at: float
    load_s: float = 0.0
    """Seconds after `started_at` until the model had its weights."""
    transfer_s: float = 0.0
    """Seconds before `started_at` that the state was in transfer, if known."""


class Dispatcher(Protocol):
    """Interface to a place where evaluations run. Implementations are thread-safe.

    Optional members:

    - `is_elsewhere`: whether it uses none of this machine's hardware; the gate then needs no trial
    - `is_backpressured()`: whether it is behind; otherwise a threshold of `pressure()` decides
    - `prepare(job)`: warm up all workers for jobs like this one, and return the futures of the warm-ups

    A cancelled future must be done soon, whatever the evaluation does: kill a process, or abandon a thread and free its
    slot.

    Example:
        Any object with these members works as `compute=` of an evaluator:

            evaluator = AsyncEvaluator(make_model, score, data, compute=MyDispatcher())
    """

    @property
    def name(self) -> str:
        """Name for records and plots: "in-process", "subprocess", "node 1"."""

    @property
    def shares_memory(self) -> bool:
        """Return whether workers read `job.state` and the values of contents directly, without a copy."""

    @property
    def slots(self) -> int:
        """Number of evaluations that can run at once."""

    def submit(self, job: Job) -> Future[Outcome]:
        """Start or queue a job.

        A background thread calls this, so it may take as long as pickling and copying take. The future raises the
        evaluation's exception, TimeoutError, or the reason why the worker is gone.
        """

    def pressure(self) -> float:
        """Return the expected wait in seconds of a job that is submitted now; 0.0 if it would start at once."""

    def close(self, *, cancel: bool = False) -> None:
        """Wait for running jobs, or cancel them, and end everything this object started (never a given pool)."""
