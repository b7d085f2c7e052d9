"""Running calls of a pool, as its program reaches them: control of a training, and channels that tasks open."""

from __future__ import annotations

from concurrent.futures import Future as StdFuture
from typing import TYPE_CHECKING, Any

from ..calls.pending import PendingCompute
from .life import PoolLife

if TYPE_CHECKING:
    from ..calls.control import Client
    from ..wire.task_channel import TaskChannel


class TaskAccess:
    """Part of a pool that talks to calls while they run. Thread-safe."""

    _life: PoolLife

    def control(
        self,
        task: StdFuture[Any] | PendingCompute[Any] | str | None = None,
        *,
        job_id: str | None = None,
        start_s: float = 60.0,
    ) -> Client:
        """Return a client for a training run in an open call: read its status, save, stop or abort it.

        It reaches the run's `skyward.training.TrainerControlCallback` through the pool's own channel to the node, with
        any provider; no port is opened. In a gang, rank 0 answers.

        Args:
            task: The call: its future, the pending call that was sent, or its name. None for the only open call.
            job_id: The run; None for the only run in that call.
            start_s: Longest wait for the run to begin, in seconds, on first use.

        Raises:
            UsageError: `task` is not one call. All other problems raise ControlFailed when the client is used.

        Example:
            future = train(data) > pool
            run = pool.control(future)
            print(run.status().global_step)
            run.save(wait_s=60)
        """
        self._life.running()
        from .remote_control import control_of

        return control_of(lambda: self._life.running()[0], task, job_id, start_s)

    def channel(self, name: str, timeout_s: float | None = None) -> TaskChannel:
        """Return the next channel that a task opened with `sky.channel(name)`, the oldest first.

        Each channel is returned once. A task opens one, and so does each rank of a gang.

        Args:
            name: Name of the channel.
            timeout_s: Longest wait in seconds; None: until there is one, or the pool is closed.

        Raises:
            TimeoutError: No task opened it in time.
            PoolClosed: The pool is not open.

        Example:
            future = train(data) > pool
            with pool.channel("progress", timeout_s=60) as channel:
                for message in channel:
                    print(message.decode())
        """
        from ..wire.task_channel import check_name

        return self._life.running()[0].channels.accept(check_name(name), timeout_s)
