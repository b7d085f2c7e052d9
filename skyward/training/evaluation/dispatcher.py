"""The seam between what asks for evaluations and where they run. No framework is imported here."""

from __future__ import annotations

import hashlib
import threading
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Protocol

import cloudpickle

from ...errors import ArgumentNotPicklable

__all__ = ["NOTHING", "WARMED_SLOTS", "Content", "Dispatcher", "Job", "Outcome", "warm_up_of"]

WARMED_SLOTS = 4
"""Slots of one dispatcher that are warmed up at most: each holds a model from then on."""


class Content:
    """A value that goes to a worker once, named by what its pickle holds.

    Pickled when it is first asked for, at most once; a worker in this process takes the value itself, and then nothing
    is pickled. Thread-safe.

    Args:
        value: must not be changed from now on: what a worker has got is not sent again.
        field: how errors name it, such as "eval_fn".
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
        """Its pickle, by cloudpickle. Raises: ArgumentNotPicklable."""
        with self._lock:
            if self._data is None:
                try:
                    data = cloudpickle.dumps(self.value, protocol=5)
                except Exception as error:
                    raise ArgumentNotPicklable(
                        f"{self.field}: it cannot be sent to another process: {type(error).__name__}: {error}; make "
                        "what cannot be pickled (open files, loaders with workers, locks) inside the function",
                        argument=self.field,
                    ) from error
                self._digest = hashlib.blake2b(data, digest_size=16).hexdigest()
                self._data = data
            return self._data

    @property
    def digest(self) -> str:
        """Of `data`, 32 hexadecimal digits. Raises: ArgumentNotPicklable."""
        _ = self.data
        return self._digest


@dataclass(frozen=True, kw_only=True)
class Job:
    """One evaluation, as a worker gets it: `eval_fn(load(factory(), state), payload)`.

    The model is made by `factory()` when the worker has none under `cache_key`, and is used by one evaluation at a
    time.
    """

    factory: Content
    """Makes the architecture; its weights do not matter."""
    load: Content
    """(model, state) -> None: puts the weights in."""
    eval_fn: Content
    """(model, payload) -> metrics, a dictionary."""
    payload: Content
    cache_key: str | None
    """None: the model is made anew for each evaluation."""
    state: Any
    """Nested dicts and lists of host tensors or arrays. Not to be changed; it stays as it is until the future of the
    job is done."""
    step: int
    snapshot_id: str
    timeout_s: float | None = None
    """Seconds of running, not of waiting. None: no limit."""
    is_warm_up: bool = False
    """It scores nothing, so its duration says nothing about evaluations."""


def _nothing(*_: object) -> None:
    """Do nothing."""


NOTHING = Content(_nothing, "nothing")


def warm_up_of(job: Job) -> Job:
    """Make a job that imports, makes and keeps what `job` needs, and scores nothing."""
    return replace(job, load=NOTHING, eval_fn=NOTHING, state=None, step=0, snapshot_id="warm-up", is_warm_up=True)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a worker gives back. Times are seconds since 1970 by the clock of the process that submitted."""

    value: Any
    """What `eval_fn` returned, whatever that is."""
    worker: str
    started_at: float
    finished_at: float
    load_s: float = 0.0
    """Of the time between them, seconds until the model was there with its weights."""
    transfer_s: float = 0.0
    """Seconds before `started_at` in which the state was on its way, where that is known."""


class Dispatcher(Protocol):
    """Where evaluations run. Thread-safe.

    One may say more: `is_elsewhere`, whether it uses none of this machine's hardware (the gate needs no trial then);
    `is_backpressured()`, whether it is behind, where it knows better than a threshold of its `pressure()`; and
    `prepare(job)`, which warms up all of its workers for jobs like this one and returns the futures of the warm-ups.

    A future that is cancelled must become done soon, whatever the evaluation does: a process is ended, a thread is
    left alone and counts no more.
    """

    @property
    def name(self) -> str:
        """For records and pictures: "in-process", "subprocess", "node 1"."""

    @property
    def shares_memory(self) -> bool:
        """True: workers read `job.state` and the values of contents as they are."""

    @property
    def slots(self) -> int:
        """Evaluations that run at once."""

    def submit(self, job: Job) -> Future[Outcome]:
        """Start it, or queue it. May take as long as handing over takes (pickling, copying): it is called by a
        background thread. The future raises what the evaluation raised, TimeoutError, or why the worker is gone.
        """

    def pressure(self) -> float:
        """Seconds that a job would be expected to wait if it were submitted now; 0.0: it would start at once."""

    def close(self, *, cancel: bool = False) -> None:
        """Ends what this object started (never a pool that it was given): waits for what runs, or cancels it."""
