"""Trials as calls of a pool: to its slots, or to several nodes at once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from ...calls.compute import compute
from ...calls.options import CallOptions
from ...calls.pending import ComputeFunction, PendingCompute
from ...errors import UsageError
from ...pool.pool import ComputePool
from ...values.launch import ProcessLaunch
from ..client.trial import Trial, TrialTask, run_trial
from ..model.sweep_config import TrialResources


class PoolTrials:
    """Place of trials in an open pool.

    Args:
        pool: The pool.
        call: Makes the call of a trial.
        resources: Resources of each trial.

    Raises:
        UsageError: The pool cannot run trials.
    """

    def __init__(
        self, pool: ComputePool, call: Callable[[TrialTask], PendingCompute[Any]], resources: TrialResources
    ) -> None:
        if pool.spec.executor == "thread":
            raise UsageError(
                "executor='thread': trials would share one process, and with it their run; use executor='process'",
                field="executor",
            )
        self._pool, self._call = pool, call
        wanted = {
            "gpus": resources.gpus,
            "cpus": resources.cpus,
            "memory_gib": resources.memory,
            "nodes": resources.nodes,
        }
        self._options = {name: value for name, value in wanted.items() if value is not None}

    def start(self, task: TrialTask) -> Future[Any]:
        """Send a trial to the pool."""
        name = f"{task.sweep}-{task.number}"
        return self._call(task).with_options(name=name, **self._options) > self._pool

    def leave(self, future: Future[Any]) -> None:
        """Cancel the call. The next driver starts the trial again."""
        future.cancel()


def trial_call(objective: ComputeFunction[[Trial], Any]) -> Callable[[TrialTask], PendingCompute[Any]]:
    """Return what makes the calls of an objective's trials, with its options and integrations."""
    return call_maker(run_trial, objective, objective.launch, objective.options)


def call_maker(
    function: Callable[[Any, TrialTask], Any], first: Any, launch: ProcessLaunch, options: CallOptions
) -> Callable[[TrialTask], PendingCompute[Any]]:
    """Return what makes a call `function(first, task)` for each task, under a launch and with options."""
    wrapped = compute(function)
    wrapped.launch = launch
    return lambda task: PendingCompute(wrapped, (first, task), {}, options)


def room_in(pool: ComputePool, options: CallOptions, launch: ProcessLaunch, resources: TrialResources) -> int:
    """Return the number of trials that a pool has room for. Others would wait with parameters of long ago."""
    nodes = resources.nodes or options.nodes
    if nodes is not None:
        return max(1, int(pool.nodes) // nodes)
    slots = pool.total_slots
    gpus = resources.gpus or options.gpus
    wanted = pool.spec.accelerator
    if gpus and wanted is not None:
        slots = min(slots, int(int(pool.nodes) * wanted.count / gpus))
    return max(1, int(pool.nodes) if launch.is_gang else slots)
