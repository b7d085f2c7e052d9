"""Control of a training run in a call of a pool, through the pool's own channel to its node."""

from __future__ import annotations

import concurrent.futures
import json
from collections.abc import Callable, Mapping
from typing import Any

from ..calls.control import Client, check_job_id
from ..calls.futures import Future
from ..calls.pending import PendingCompute
from ..engine.engine import Engine
from ..engine.questions import NOBODY
from ..errors import ControlFailed, PoolClosed, UsageError

Task = concurrent.futures.Future[Any] | PendingCompute[Any] | str | None


def control_of(running: Callable[[], Engine], task: Task, job_id: str | None, start_s: float) -> Client:
    """Return a client; see `ComputePool.control`. `running` returns the engine, or raises."""
    if job_id is not None:
        check_job_id(job_id)
    return Client(_CallTransport(running, task), job_id, start_s=start_s)


class _CallTransport:
    """Transport to one call. A name is looked up once, with the first request."""

    def __init__(self, running: Callable[[], Engine], task: Task) -> None:
        self._running = running
        self._name = ""
        self._call = 0
        self._was_answered = False
        if isinstance(task, PendingCompute):
            self._name = task.name
        elif isinstance(task, str):
            self._name = task
        elif isinstance(task, Future) and task.call_id:
            self._call = task.call_id
        elif task is not None:
            raise UsageError(
                f"task={task!r}: is not one call; pass its future, the pending call, its name, or nothing if only one "
                "is open"
            )

    def __repr__(self) -> str:
        return f"<the channel of a pool to {f'call {self._call}' if self._call else self._name or 'its only call'}>"

    def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None, *, timeout_s: float
    ) -> tuple[int, dict[str, Any]]:
        question = json.dumps({"method": method, "path": path, "body": None if body is None else dict(body)})
        try:
            engine = self._running()
            self._call = self._call or engine.questions.call_named(self._name)
            answer = json.loads(engine.questions.ask(self._call, question.encode(), timeout_s))
        except PoolClosed as error:
            raise ControlFailed(str(error), is_gone=True) from error
        except ControlFailed as error:
            if self._was_answered and error.reason == NOBODY:  # the call is ending, or restarting
                raise ControlFailed("control: the run has ended; read the value of its call", is_gone=True) from error
            raise
        self._was_answered = True
        return int(answer["status"]), dict(answer["body"])
