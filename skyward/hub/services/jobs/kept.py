"""Kept machines: a runner that waits, with its pool, for the next attempt that fits.

The attempt that started the runner stands for it, also when the runner serves another one: its token and its place with
the launcher are the runner's. While the machines wait, `kept_until` is set. Its nodes count as free for the scheduler,
which prefers them for jobs of the same kind. Any other job that gets them waits until the runner has given them back.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict

from ...model.capacity import MachineSetRecord, MachineSetSpec
from ...model.jobs import AttemptEnd, JobSpec
from ...store import attempts, identities
from ...store.attempts import AttemptRow
from ...store.jobs import JobRow
from ...store.transaction import ReadSnapshot, Transaction

CLOSE = "close"
"""Command to a runner that waits: it must give its machines back."""
_ALIKE = ("image", "pool", "secrets", "code_path", "code_folder", "nodes", "devices", "accelerator")
_ALIKE_TOO = ("vcpus", "memory_gib", "region", "labels")


def warm_of(project: int, owner: str, spec: JobSpec, code: str) -> str:
    """Return what a kept machine must have been used for, so that this job may use it.

    Project and owner, because processes of the earlier job may have left something behind; code, because its modules
    are imported there. A budget counts the whole life of a pool, and a sweep has one of its own, so they share none.
    Trials share with trials: the runner of another job may be too old for one.
    """
    if spec.budget_usd is not None or spec.sweep is not None:
        return ""
    fields = asdict(spec)
    alike = [fields[name] for name in (*_ALIKE, *_ALIKE_TOO)]
    kind: bool | str = bool(spec.command or spec.operation) if spec.trial is None else "trial"
    text = json.dumps([project, owner, code, kind, alike], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def kept_s(spec: JobSpec, machines: MachineSetSpec) -> float:
    """Return the seconds for which the machines of a job wait for the next one."""
    return machines.keep_s if spec.keep_s is None else spec.keep_s


def settle_runner(tx: Transaction, attempt: AttemptRow, end: AttemptEnd, keep_s: float | None) -> None:
    """Note what becomes of the runner of an attempt that ends. The caller writes the row of the attempt.

    Args:
        tx: The transaction.
        attempt: The attempt.
        end: How it ends.
        keep_s: Seconds for which the runner waits with its machines; None if they are gone.
    """
    until = None if keep_s is None else tx.now + int(keep_s * 1000)
    if attempt.runner is None and until is not None:
        attempt.kept_until = until
        return
    if attempt.token is not None:
        identities.delete_token(tx, attempt.token)
        attempt.token = None
    found = None if attempt.runner is None else attempts.attempt_numbered(tx, attempt.runner)
    if found is None:
        return
    runner = found[1]
    if end is AttemptEnd.WITHDRAWN:  # it has not heard of this attempt, and still has its machines
        runner.kept_until = tx.now
    elif until is not None:
        runner.kept_until = until
    else:
        give_back(tx, runner)
        return
    attempts.update_attempt(tx, runner)


def give_back(tx: Transaction, runner: AttemptRow) -> None:
    """Note that the machines of a runner are gone, and the runner with them."""
    if runner.token is not None:
        identities.delete_token(tx, runner.token)
    runner.token, runner.kept_until, runner.free_at, runner.command = None, None, None, ""
    attempts.update_attempt(tx, runner)


def close(tx: Transaction, runner: AttemptRow) -> None:
    """Tell a runner that waits to give its machines back."""
    if runner.command != CLOSE:
        runner.order(CLOSE)
        attempts.update_attempt(tx, runner)


def lose_kept(tx: Transaction, runner: AttemptRow, lease_s: float) -> None:
    """Note that a runner that waited is dead. Its machines end with their lease."""
    if runner.free_at is None:
        runner.free_at = tx.now + int(lease_s * 1000)
        runner.command = CLOSE
        attempts.update_attempt(tx, runner)


def kept_use(snapshot: ReadSnapshot) -> Mapping[str, tuple[int, float]]:
    """Return machine set -> nodes that wait for the next job, and what their waiting has cost so far."""
    found: dict[str, tuple[int, float]] = {}
    for _, runner in attempts.kept_attempts(snapshot):
        nodes, cost = found.get(runner.machines, (0, 0.0))
        found[runner.machines] = nodes + len(runner.node_numbers), cost + (runner.idle_cost or 0.0)
    return found


class KeptMachines:
    """Kept machines while a decision is made and written.

    Args:
        tx: The transaction.
        sets: Machine sets. The machines of drained and removed ones are given back.
    """

    def __init__(self, tx: Transaction, sets: Sequence[MachineSetRecord]) -> None:
        self._tx = tx
        self._kept = attempts.kept_attempts(tx, for_update=tx.for_update)
        stays = {record.spec.name for record in sets if not record.is_draining}
        for _, runner in self._kept:
            if runner.machines not in stays:
                close(tx, runner)

    @property
    def rows(self) -> list[AttemptRow]:
        return [runner for _, runner in self._kept]

    def warm(self, machines: str) -> Mapping[int, str]:
        """Return node -> what it is kept for, of one set."""
        return {
            node: CLOSE if runner.command == CLOSE else job.warm or CLOSE
            for job, runner in self._kept
            if runner.machines == machines
            for node in runner.node_numbers
        }

    def take(self, job: JobRow, machines: str, nodes: Sequence[int], taken: AbstractSet[int]) -> AttemptRow | None:
        """Return the runner that shall serve a job, and keep it no longer; None if none fits.

        Args:
            job: The job.
            machines: Name of the set on which it is placed.
            nodes: Nodes that it was given.
            taken: Other nodes of the set that are in use, or are given to others.
        """
        fitting = [
            (set(runner.node_numbers) != set(nodes), runner.pk, runner)
            for kept_job, runner in self._kept
            if runner.machines == machines and runner.command != CLOSE and job.warm and kept_job.warm == job.warm
            if set(runner.node_numbers) == set(nodes) or taken.isdisjoint(runner.node_numbers)
        ]
        if not fitting:
            return None
        *_, chosen = min(fitting)
        self._kept = [(job, runner) for job, runner in self._kept if runner.pk != chosen.pk]
        chosen.kept_until = None
        attempts.update_attempt(self._tx, chosen)
        return chosen

    def clear(self, machines: MachineSetSpec, nodes: Sequence[int], devices: Iterable[int]) -> list[int]:
        """Let runners leave nodes that another job gets. Return the obstacles that they are until then."""
        wanted, numbers, obstacles = set(nodes), set(devices), []
        for _, runner in self._kept:
            is_there = runner.machines == machines.name and not wanted.isdisjoint(runner.node_numbers)
            if is_there and not (machines.has_numbers and numbers.isdisjoint(runner.device_numbers)):
                close(self._tx, runner)
                obstacles.append(-runner.pk)
        return obstacles
