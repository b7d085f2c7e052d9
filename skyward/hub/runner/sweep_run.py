"""A job that runs a sweep: its driver is in the runner, and its trials are calls to the job's pool, or jobs too."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ...calls.pending import PendingCompute
from ...errors import HubError, HubUnreachable, MissingDependency, PoolClosed
from ...pool.pool import ComputePool
from ...wire.payloads import pickle_whole
from ..client.connection import HubConnection, path_of
from ..client.fluent import current_spool
from ..client.reading import needed_address
from ..client.settings import Address
from ..model.sweep_config import parse_config
from .launch_file import CHECKPOINT_DIR
from .packed_call import run_packed_trial

if TYPE_CHECKING:
    from ..search.driver import SweepDriver


class SweepRun:
    """Run of a sweep in an attempt. Orders may come from another thread, also before the sweep has begun.

    Args:
        number: Number of the sweep.
        env: Variables of its job's image, which may name the folder of checkpoints.
    """

    def __init__(self, number: int, env: Mapping[str, str]) -> None:
        self._number, self._env = number, env
        self._driver: SweepDriver | None = None
        self._lock = threading.Lock()
        self._makes_way = False

    def make_way(self) -> None:
        """Let the running trials save and stop. `run` then raises PoolClosed, unless the sweep is over."""
        with self._lock:
            self._makes_way = True
            if self._driver is not None:
                self._driver.make_way()

    def save(self) -> None:
        """Let the running trials save."""
        with self._lock:
            if self._driver is not None:
                self._driver.save()

    def run(self, pool: ComputePool, pending: PendingCompute[bytes]) -> bytes:
        """Run the sweep, whose objective is the function of a packed call. Return its packed number and end.

        Raises:
            PoolClosed: It did not end, and goes on with the next attempt: the pool was closed, the hub is away, or its
                trials have made way.
            MissingDependency: Optuna is not installed here.
            UsageError: Another program runs it, or its configuration is not possible.
        """
        with _optuna_needed():
            from ..search.local import drive
            from ..search.places import call_maker
        maker = call_maker(run_packed_trial, pending.args, pending.fn.launch, pending.options)

        def work(address: Address, row: Mapping[str, Any]) -> str:
            return drive(
                address,
                row,
                parse_config(row["config"]),
                pool,
                maker,
                launch=pending.fn.launch,
                options=pending.options,
                spool=current_spool(),
                folder=pending.args[1].get(CHECKPOINT_DIR) or self._env.get(CHECKPOINT_DIR),
                on_driver=self._begin,
            )

        return _driven(self._number, work)

    def _begin(self, driver: SweepDriver) -> None:
        with self._lock:
            self._driver = driver
            if self._makes_way:
                driver.make_way()


class JobsSweepRun:
    """Run of a sweep whose trials are jobs. `leave` may come from another thread, also before the sweep has begun.

    Args:
        number: Number of the sweep.
        job: Id of the driver's job.
        attempt: Number of its attempt.
    """

    def __init__(self, number: int, job: str, attempt: int) -> None:
        self._number, self._path = number, path_of("v1", "jobs", job, "attempts", str(attempt))
        self._driver: SweepDriver | None = None
        self._lock = threading.Lock()
        self._leaves = False

    def leave(self) -> None:
        """Let `run` raise PoolClosed, unless the sweep is over. The trials go on, and the next driver finds them."""
        with self._lock:
            self._leaves = True
            if self._driver is not None:
                self._driver.leave()

    def run(self) -> bytes:
        """Run the sweep, and return its packed number and end. Raises as `SweepRun.run` does."""
        with _optuna_needed():
            from ..search.local import drive_as_jobs

        def work(address: Address, row: Mapping[str, Any]) -> str:
            config = parse_config(row["config"])
            return drive_as_jobs(address, row, config, self._path, spool=current_spool(), on_driver=self._begin)

        return _driven(self._number, work)

    def _begin(self, driver: SweepDriver) -> None:
        with self._lock:
            self._driver = driver
            if self._leaves:
                driver.leave()


def _driven(number: int, work: Callable[[Address, Mapping[str, Any]], str]) -> bytes:
    """Drive a sweep by its row in the hub, and return its packed number and end."""
    from ..search.driver import SweepInterrupted

    address = needed_address("sweeps")  # the launcher named it in this process's environment
    try:
        with HubConnection(address) as connection:
            row: dict[str, Any] = connection.json("GET", path_of("v1", "hpo", str(number)))
        return pickle_whole({"sweep": number, "end": work(address, row)})
    except HubError as error:
        if not error.retryable and not isinstance(error, HubUnreachable):
            raise
        raise _unfinished(number, error) from error
    except SweepInterrupted as error:
        raise _unfinished(number, error) from error


def _unfinished(number: int, error: Exception) -> PoolClosed:
    return PoolClosed(f"sweep={number}: has not ended ({error}); it goes on with the next attempt")


@contextmanager
def _optuna_needed() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingDependency(
            "sweep: needs Optuna where the launcher runs; pip install 'skyward[hpo]' there", name=error.name
        ) from error
