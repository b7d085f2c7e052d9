"""Calls and time of a detached pool, as its clients reach them."""

from __future__ import annotations

from typing import Any

from ..calls.futures import Future
from ..calls.listed import Call
from ..core.bounds import is_positive
from ..errors import UsageError
from .life import PoolLife


class DetachedAccess:
    """Part of a pool that goes on without its program. Thread-safe."""

    _life: PoolLife

    def calls(self) -> list[Call]:
        """Return the calls of a detached pool that are open, or whose outcome nobody has taken, oldest first.

        Calls of maps are not among them: a map ends with its program.

        Raises:
            UsageError: The pool is not detached.
            PoolClosed: The pool is not open.

        Example:
            pool = sky.ComputePool.attach("train")
            print(pool.calls())      # [Call(id=2, name='train', state='running', node=0, since=1795281234.5)]
            pool.detach()
        """
        facts = self._life.detached()[1].calls()
        return [Call(id=f.number, name=f.name, state=f.state, node=f.node, since=f.since) for f in facts]

    def future(self, call: Call | int) -> Future[Any]:
        """Return a future of a call of a detached pool, which another program may have made.

        The value is delivered once: whoever reads it takes it. For a generator function, it is an iterator that begins
        with the first item that was not taken.

        Args:
            call: The call, or its number.

        Raises:
            UsageError: There is no such call, its value was taken, or the pool is not detached.
            PoolClosed: The pool is not open.

        Example:
            pool = sky.ComputePool.attach("train")
            values = [pool.future(call).result() for call in pool.calls()]
            pool.detach()
        """
        return self._life.detached()[1].follow(call.id if isinstance(call, Call) else call)

    def detach(self) -> None:
        """Leave a detached pool to another client. Its calls go on, and futures of this program raise PoolClosed.

        This waits until the pool's scheduler has all calls, and with several nodes before that until Ray carries them
        to all nodes, for at most 5 minutes each.

        Raises:
            UsageError: The pool is not detached, Ray does not carry the calls, the scheduler does not have them, or
                `budget_usd` is spent when rented machines have ended; the message says what is missing.
            PoolClosed: The pool is not open.

        Example:
            pool = sky.ComputePool(sky.SSH(hosts=["gpu1"]), name="train", detached_for_s=8 * 3600).start()
            train(data) > pool
            pool.detach()
        """
        self._life.detach()

    def extend(self, seconds: float) -> None:
        """Let a detached pool go on for longer without a client. Its budget stays what it is.

        Args:
            seconds: Further seconds, > 0.

        Raises:
            UsageError: The pool is not detached, or `seconds` is illegal.
            PoolClosed: The pool is not open.

        Example:
            pool = sky.ComputePool.attach("train")
            pool.extend(3600)
            pool.detach()
        """
        if not is_positive(seconds):
            raise UsageError(
                f"extend.seconds={seconds!r}: must be a number of seconds > 0; pass 3600 for an hour",
                field="seconds",
                value=seconds,
            )
        detachment, engine = self._life.detached()
        engine.extend(seconds)
        detachment.extend(seconds)
