"""Methods of a pool that return its shared things by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from ..engine.engine import SharedStore
    from ..node.slot.shared.containers import SharedCounter, SharedDict, SharedList, SharedSet
    from ..node.slot.shared.operation import SharedThing
    from ..node.slot.shared.waits import SharedBarrier, SharedEvent, SharedLock, SharedQueue, SharedSemaphore

S = TypeVar("S", bound="SharedThing")


class SharedNames:
    """Shared things of a pool in its program: `pool.dict(name)` is what `sky.dict(name)` is in a task.

    A class of its own because three of the methods are called like built-in types.
    """

    @property
    def job_id(self) -> str:
        """Unique name of the pool."""
        raise NotImplementedError

    def shared_store(self) -> SharedStore:
        """Return the store of the pool. Raises PoolClosed."""
        raise NotImplementedError

    def _shared(self, cls: type[S], name: str, *options: Any) -> S:
        from ..node.slot.shared.operation import thing_of

        self.shared_store()
        return thing_of(cls, self.job_id, name, *options)

    def dict(self, name: str) -> SharedDict[Any, Any]:
        """Return the shared dictionary of that name; see `sky.dict`. Raises PoolClosed."""
        from ..node.slot.shared.containers import SharedDict

        return self._shared(SharedDict, name)

    def list(self, name: str) -> SharedList[Any]:
        """Return the shared list of that name; see `sky.list`. Raises PoolClosed."""
        from ..node.slot.shared.containers import SharedList

        return self._shared(SharedList, name)

    def set(self, name: str) -> SharedSet[Any]:
        """Return the shared set of that name; see `sky.set`. Raises PoolClosed."""
        from ..node.slot.shared.containers import SharedSet

        return self._shared(SharedSet, name)

    def counter(self, name: str) -> SharedCounter:
        """Return the shared counter of that name; see `sky.counter`. Raises PoolClosed."""
        from ..node.slot.shared.containers import SharedCounter

        return self._shared(SharedCounter, name)

    def queue(self, name: str, maxsize: int = 0) -> SharedQueue[Any]:
        """Return the shared queue of that name; see `sky.queue`. Raises PoolClosed."""
        from ..node.slot.shared.waits import SharedQueue

        return self._shared(SharedQueue, name, maxsize)

    def lock(self, name: str) -> SharedLock:
        """Return the shared lock of that name; see `sky.lock`. The program's leases end with the pool."""
        from ..node.slot.shared.waits import SharedLock

        return self._shared(SharedLock, name)

    def semaphore(self, name: str, permits: int) -> SharedSemaphore:
        """Return the shared semaphore of that name; see `sky.semaphore`. The program's permits end with the pool."""
        from ..node.slot.shared.waits import SharedSemaphore

        return self._shared(SharedSemaphore, name, permits)

    def barrier(self, name: str, parties: int) -> SharedBarrier:
        """Return the shared barrier of that name; see `sky.barrier`. Raises PoolClosed."""
        from ..node.slot.shared.waits import SharedBarrier

        return self._shared(SharedBarrier, name, parties)

    def event(self, name: str) -> SharedEvent:
        """Return the shared event of that name; see `sky.event`. Raises PoolClosed."""
        from ..node.slot.shared.waits import SharedEvent

        return self._shared(SharedEvent, name)
