"""Snapshots of the tasks that nodes run, for a console that polls a few times a second."""

from __future__ import annotations

from ..console.activity import RunningTask
from .gang import RankTask
from .ledger import Ledger
from .log_router import LogRouter


def running_tasks(ledger: Ledger, logs: LogRouter) -> tuple[RunningTask, ...]:
    """Return the tasks that fill the slots of the nodes, with the progress lines they show. Call it under the lock."""
    progress = logs.progress()
    placed = [(node, task_id) for node, task_ids in ledger.scheduler.running().items() for task_id in task_ids]
    for gang in ledger.gangs.values():
        placed += [(task.node, task.id) for task in gang.tasks.values() if task.id in ledger.tasks]
    running = []
    for node, task_id in placed:
        task = ledger.tasks.get(task_id)
        if task is None or task.is_cancelled:
            continue
        rank = task.rank if isinstance(task, RankTask) else None
        running.append(
            RunningTask(
                task=task_id,
                node=node,
                name=task.name,
                rank=rank,
                calls=task.calls,
                progress=progress.get(task_id, ""),
            )
        )
    return tuple(running)
