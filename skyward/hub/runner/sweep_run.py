"""A job that runs a sweep: its driver is in the runner, and its trials are calls to the job's pool."""

from __future__ import annotations

from typing import Any

from ...calls.compute import PendingCompute
from ...errors import HubError, HubUnreachable, MissingDependency, PoolClosed
from ...pool.pool import ComputePool
from ...wire.payloads import pickle_whole
from ..client.connection import HubConnection, path_of
from ..client.fluent import current_spool
from ..client.reading import needed_address
from ..model.sweep_config import parse_config
from .packed_call import run_packed_trial


def run_sweep(pool: ComputePool, pending: PendingCompute[bytes], number: int) -> bytes:
    """Run a sweep whose objective is the function of a packed call. Return its packed number and end.

    Raises:
        PoolClosed: It did not end, and goes on with the next attempt: the pool was closed, or the hub is away.
        MissingDependency: Optuna is not installed here.
        UsageError: Another program runs it, or its configuration is not possible.
    """
    try:
        from ..search.driver import SweepInterrupted
        from ..search.local import CHECKPOINT_DIR, drive
        from ..search.places import call_maker
    except ModuleNotFoundError as error:
        raise MissingDependency(
            "sweep: needs Optuna where the launcher runs; pip install 'skyward[hpo]' there", name=error.name
        ) from error
    address = needed_address("sweeps")  # the launcher named it in this process's environment
    maker = call_maker(run_packed_trial, pending.args[:2], pending.fn.launch, pending.options)
    try:
        with HubConnection(address) as connection:
            row: dict[str, Any] = connection.json("GET", path_of("v1", "hpo", str(number)))
        config = parse_config(row["config"])
        end = drive(
            address,
            row,
            config,
            pool,
            maker,
            launch=pending.fn.launch,
            options=pending.options,
            spool=current_spool(),
            folder=pending.args[1].get(CHECKPOINT_DIR),
        )
    except (SweepInterrupted, HubUnreachable) as error:
        raise PoolClosed(f"sweep={number}: has not ended ({error}); it goes on with the next attempt") from error
    except HubError as error:
        if error.retryable:
            raise PoolClosed(f"sweep={number}: has not ended ({error}); it goes on with the next attempt") from error
        raise
    return pickle_whole({"sweep": number, "end": end})
