"""Set-up of a driver: over an open pool, in a user's program or in a runner, or without one over jobs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...calls.options import CallOptions
from ...calls.pending import ComputeFunction, PendingCompute
from ...pool.pool import ComputePool
from ...values.launch import ProcessLaunch
from ..client.optuna_storage import OptunaStorage
from ..client.repeated import RepeatedRequests
from ..client.settings import Address
from ..client.trial import TrialTask
from ..model.sweep_config import SweepConfig
from .driver import SweepDriver
from .job_trials import JobTrials
from .places import PoolTrials, room_in, trial_call
from .plans import TrialSearch, check_root
from .population import PopulationSearch
from .study import StudySearch

CHECKPOINT_DIR = "SKYWARD_CHECKPOINT_DIR"
"""Variable that names the folder of a job's checkpoints, where its machines see one."""


def drive_in_pool(
    address: Address,
    row: Mapping[str, Any],
    config: SweepConfig,
    function: ComputeFunction[..., Any],
    pool: ComputePool,
    *,
    spool: Path,
) -> str:
    """Drive a sweep of this program in a pool, until it is over."""
    call = trial_call(function)
    return drive(address, row, config, pool, call, launch=function.launch, options=function.options, spool=spool)


def drive_as_jobs(
    address: Address,
    row: Mapping[str, Any],
    config: SweepConfig,
    path: str,
    *,
    spool: Path,
    on_driver: Callable[[SweepDriver], None],
) -> str:
    """Drive a sweep whose trials are jobs until it is over, and return its end.

    `path` is that of the driver's attempt in the hub, and `on_driver` is called with the driver before it begins.
    """
    check_root(config, config.checkpoint_dir)
    requests = RepeatedRequests(address)
    place = JobTrials(requests, row["id"], path)
    try:
        driver = SweepDriver(
            requests,
            row,
            config,
            lambda fence: _search(address, row["name"], config, fence),
            place,
            room=config.max_concurrent_trials or 8,
            spool=spool,
            root=config.checkpoint_dir,
        )
        on_driver(driver)
        return driver.run()
    finally:
        place.close()


def drive(
    address: Address,
    row: Mapping[str, Any],
    config: SweepConfig,
    pool: ComputePool,
    call: Callable[[TrialTask], PendingCompute[Any]],
    *,
    launch: ProcessLaunch,
    options: CallOptions,
    spool: Path,
    folder: str | None = None,
    on_driver: Callable[[SweepDriver], None] = lambda driver: None,
) -> str:
    """Drive a sweep in an open pool until it is over, and return its end.

    `folder` is that of its job, and `on_driver` is called with the driver before it begins.
    """
    resources = config.resources_per_trial
    root = config.checkpoint_dir or folder or os.environ.get(CHECKPOINT_DIR)
    check_root(config, root)
    driver = SweepDriver(
        RepeatedRequests(address),
        row,
        config,
        lambda fence: _search(address, row["name"], config, fence),
        PoolTrials(pool, call, resources),
        room=room_in(pool, options, launch, resources),
        spool=spool,
        root=root,
    )
    on_driver(driver)
    return driver.run()


def _search(address: Address, name: str, config: SweepConfig, fence: int) -> TrialSearch:
    storage = OptunaStorage(address, fence=fence)
    if config.strategy == "pbt":
        return PopulationSearch(storage, name, config)
    search = StudySearch(storage, name, config)
    for earlier in config.warm_start:
        search.add_earlier(earlier)
    return search
