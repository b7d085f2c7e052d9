"""Queues, locks, semaphores, barriers and events of a pool: things that a task can wait for."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from .operation import Plan, SharedThing, check_count, operation

V = TypeVar("V")


class SharedQueue(SharedThing, Generic[V]):
    """Queue of values, first in and first out; `sky.queue(name)` in a task, `pool.queue(name)` outside.

    Each value is taken by one reader. None is a value. It lives as long as the pool. Thread-safe.

    Args:
        name: 1 to 200 characters.
        maxsize: Most values that wait; 0 for any number. `put` waits for room. All who use the queue pass the same.

    Raises:
        UsageError: This code does not run in a task, or an argument is not legal. Operations raise it if another
            maxsize is in use, and if the values of the pool would exceed 1 GiB.

    Example:
        >>> import skyward as sky
        >>> with sky.ComputePool(provider=sky.Local()) as pool:
        ...     work = pool.queue("work")
        ...     future = sky.compute(lambda: sky.queue("work").get(timeout_s=60))() > pool
        ...     work.put("first")
        ...     future.result()
        'first'
    """

    kind = "queue"

    def __init__(self, name: str, maxsize: int = 0) -> None:
        super().__init__(name)
        self._set_options(maxsize)

    def _set_options(self, *options: Any) -> None:
        self._maxsize = check_count("maxsize", options[0], 0)

    def _options(self) -> tuple[Any, ...]:
        return (self._maxsize,)

    @operation
    def put(self, value: V, timeout_s: float | None = None) -> Plan[None]:
        """Add a value at the end, and wait while the queue is full.

        Args:
            value: The value.
            timeout_s: Longest wait in seconds, >= 0; None for no limit.

        Raises:
            TimeoutError: There was no room in time. The value was not added.
        """
        yield self._wait_request("put", self._dump(value), timeout_s=timeout_s)

    @operation
    def get(self, timeout_s: float | None = None) -> Plan[V]:
        """Take the first value, and wait while there is none.

        Args:
            timeout_s: Longest wait in seconds, >= 0; None for no limit.

        Raises:
            TimeoutError: There was no value in time. None was taken.
        """
        value: V = self._load((yield self._wait_request("get", timeout_s=timeout_s)))
        return value

    @operation
    def count(self) -> Plan[int]:
        """Return the number of values that wait."""
        count: int = yield self._request("count")
        return count

    @operation
    def clear(self) -> Plan[int]:
        """Remove all values that wait. Return how many."""
        count: int = yield self._request("clear")
        return count

    def __len__(self) -> int:
        return self.count()

    def __bool__(self) -> bool:
        return self.count() > 0


class _Permits(SharedThing):
    """Common part of locks and semaphores: leases of permits."""

    def _options(self) -> tuple[Any, ...]:
        return (1,)

    @operation
    def acquire(self, timeout_s: float | None = None) -> Plan[int]:
        """Wait for a permit and hold it. Permits are granted in the order of the requests.

        Args:
            timeout_s: Longest wait in seconds, >= 0; None for no limit.

        Returns:
            Fencing number: larger than that of every earlier holder of anything in this pool. A storage that remembers
            the largest number it has seen can refuse a late write of an earlier holder.

        Raises:
            TimeoutError: No permit was free in time.
        """
        fence: int = yield self._wait_request("acquire", timeout_s=timeout_s, is_lease=True)
        return fence

    @operation
    def release(self) -> Plan[None]:
        """Free the permit that this call acquired last.

        Raises:
            UsageError: This call holds none.
        """
        yield self._request("release")

    @operation
    def is_current(self, fence: int) -> Plan[bool]:
        """Return whether the holder with that fencing number still holds its permit."""
        is_current: bool = yield self._request("holds", fence)
        return is_current

    def __enter__(self) -> int:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    async def __aenter__(self) -> int:
        return await self.acquire.aio()

    async def __aexit__(self, *_: object) -> None:
        await self.release.aio()


class SharedLock(_Permits):
    """Lock that one call of a pool holds at a time; `sky.lock(name)` in a task, `pool.lock(name)` outside.

    A lease of the call: it is free when the call ends, whether it returns, raises, is cancelled, or dies with its
    process or node. Any thread of the call may release it. It is not reentrant: a second `acquire` waits for the first
    holder, as with `threading.Lock`. In a `with` block, `as` binds the fencing number.

    Args:
        name: 1 to 200 characters.

    Raises:
        UsageError: This code does not run in a task, or the name is not legal.

    Example:
        >>> import skyward as sky
        >>> @sky.compute
        ... def write(line: str) -> int:
        ...     with sky.lock("report") as fence:
        ...         return fence
        >>> with sky.ComputePool(provider=sky.Local()) as pool:
        ...     first, second = write("a") >> pool, write("b") >> pool
        ...     first < second
        True
    """

    kind = "lock"

    @operation
    def is_locked(self) -> Plan[bool]:
        """Return whether a call holds the lock now."""
        held, _ = yield self._request("state")
        return bool(held)


class SharedSemaphore(_Permits):
    """Some permits that calls hold; `sky.semaphore(name, permits)` in a task, `pool.semaphore(...)` outside.

    Permits are leases: those of a call that ends are free. One call may hold several.

    Args:
        name: 1 to 200 characters.
        permits: Number of permits, >= 1. All who use the semaphore pass the same.

    Raises:
        UsageError: This code does not run in a task, or an argument is not legal. Operations raise it if another number
            is in use.

    Example:
        >>> import skyward as sky
        >>> def download(url: str) -> str:
        ...     with sky.semaphore("downloads", 2):
        ...         return url
        >>> with sky.ComputePool(provider=sky.Local(), concurrency=3) as pool:
        ...     pool.map(download, ["a", "b", "c"])
        ['a', 'b', 'c']
    """

    kind = "semaphore"

    def __init__(self, name: str, permits: int) -> None:
        super().__init__(name)
        self._set_options(permits)

    def _set_options(self, *options: Any) -> None:
        self._number = check_count("permits", options[0], 1)

    def _options(self) -> tuple[Any, ...]:
        return (self._number,)

    @operation
    def available(self) -> Plan[int]:
        """Return the number of free permits."""
        held, _ = yield self._request("state")
        return self._number - int(held)


class SharedBarrier(SharedThing):
    """Meeting of several calls; `sky.barrier(name, parties)` in a task, `pool.barrier(name, parties)` outside.

    It works as `threading.Barrier` and can be used again and again. A call that has waited is a party until it ends. If
    a party gives up, fails or dies, the barrier is broken: all who wait, now or later, get BrokenBarrierError instead
    of waiting forever. `reset` makes it new.

    Args:
        name: 1 to 200 characters.
        parties: Number of waits that release each other, >= 1. All who use the barrier pass the same.

    Raises:
        UsageError: This code does not run in a task, or an argument is not legal. Operations raise it if another number
            is in use.

    Example:
        >>> import skyward as sky
        >>> @sky.compute
        ... def meet() -> int:
        ...     return sky.barrier("start", 2).wait(timeout_s=60)
        >>> with sky.ComputePool(provider=sky.Local(), nodes=2) as pool:
        ...     sorted(meet() @ pool)
        [0, 1]
    """

    kind = "barrier"

    def __init__(self, name: str, parties: int) -> None:
        super().__init__(name)
        self._set_options(parties)

    def _set_options(self, *options: Any) -> None:
        self._parties = check_count("parties", options[0], 1)

    def _options(self) -> tuple[Any, ...]:
        return (self._parties,)

    @property
    def parties(self) -> int:
        """Number of waits that release each other."""
        return self._parties

    @operation
    def wait(self, timeout_s: float | None = None) -> Plan[int]:
        """Wait until as many have arrived as there are parties.

        Args:
            timeout_s: Longest wait in seconds, >= 0; None for no limit.

        Returns:
            Place in the order of arrival, in [0, parties): a different one for each.

        Raises:
            TimeoutError: The others did not come in time. The barrier is broken then.
            threading.BrokenBarrierError: A party gave up, failed or died, or somebody called `abort` or `reset`.
        """
        index: int = yield self._wait_request("wait", timeout_s=timeout_s, is_lease=True)
        return index

    @operation
    def abort(self) -> Plan[None]:
        """Break the barrier."""
        yield self._request("abort")

    @operation
    def reset(self) -> Plan[None]:
        """Make the barrier new. All who wait get BrokenBarrierError."""
        yield self._request("reset")

    @operation
    def waiting(self) -> Plan[int]:
        """Return how many wait now."""
        waiting, _ = yield self._request("state")
        return int(waiting)

    @operation
    def is_broken(self) -> Plan[bool]:
        """Return whether the barrier is broken."""
        _, is_broken = yield self._request("state")
        return bool(is_broken)


class SharedEvent(SharedThing):
    """Flag that calls can wait for; `sky.event(name)` in a task, `pool.event(name)` outside.

    Args:
        name: 1 to 200 characters.

    Raises:
        UsageError: This code does not run in a task, or the name is not legal.

    Example:
        >>> import skyward as sky
        >>> with sky.ComputePool(provider=sky.Local()) as pool:
        ...     future = sky.compute(lambda: sky.event("go").wait(timeout_s=60))() > pool
        ...     pool.event("go").set()
        ...     future.result()
    """

    kind = "event"

    @operation
    def set(self) -> Plan[None]:
        """Set the flag, and let all who wait continue."""
        yield self._request("set")

    @operation
    def clear(self) -> Plan[None]:
        """Clear the flag."""
        yield self._request("clear")

    @operation
    def is_set(self) -> Plan[bool]:
        """Return whether the flag is set."""
        is_set: bool = yield self._request("get")
        return is_set

    @operation
    def wait(self, timeout_s: float | None = None) -> Plan[None]:
        """Wait until the flag is set.

        Args:
            timeout_s: Longest wait in seconds, >= 0; None for no limit.

        Raises:
            TimeoutError: It was not set in time.
        """
        yield self._wait_request("wait", timeout_s=timeout_s)
