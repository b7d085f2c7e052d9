"""`@batched`: single calls of an actor's method, gathered into lists."""

from __future__ import annotations

import functools
import inspect
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from ..core.bounds import is_positive
from ..errors import UsageError

A = TypeVar("A")
X = TypeVar("X")
Y = TypeVar("Y")

_MOST = "_skyward_max_size"
"""Attribute of a batched method: the most items in a list."""
_LOOK_S = 0.05
"""Pause after which a waiting call looks whether it was cancelled: Python raises that in a thread between two waits."""


def batched(*, max_size: int, wait_s: float) -> Callable[[Callable[[A, list[X]], list[Y]]], Callable[[A, X], Y]]:
    """Gather calls of an actor's method: it gets a list of items, and each caller gets one value.

    A model is often as fast for 32 inputs as for one. Callers send single items, and the method sees lists. The actor
    needs `concurrency` > 1, because only calls that run at once can be gathered. With 1 it is refused, unless
    `max_size` is 1. It runs one list at a time.

    Args:
        max_size: Most items in a list, >= 1. At most `concurrency` of the actor can come together.
        wait_s: Longest time that an item waits for others before the method is called, in seconds, >= 0.

    Returns:
        A decorator of methods that take one list and return a list of the same length. If the method
        raises, each call in the list raises its error. If it returns a list of another length, each raises UsageError.

    Raises:
        UsageError: A value is illegal.

    Example:
        >>> import skyward as sky
        >>> @sky.actor(concurrency=32)
        ... class Model:
        ...     @sky.batched(max_size=32, wait_s=0.01)
        ...     def predict(self, xs: list[float]) -> list[float]:
        ...         return [2 * x for x in xs]
        >>> Model.local().predict(3.0)
        6.0
    """
    if isinstance(max_size, bool) or not isinstance(max_size, int) or max_size < 1:
        raise UsageError(
            f"max_size={max_size!r}: must be a whole number >= 1; set max_size=32", field="max_size", value=max_size
        )
    if not is_positive(wait_s, or_zero=True):
        raise UsageError(
            f"wait_s={wait_s!r}: must be a number of seconds >= 0; set wait_s=0.01", field="wait_s", value=wait_s
        )

    def decorate(method: Callable[[A, list[X]], list[Y]]) -> Callable[[A, X], Y]:
        slot = f"_batches_of_{method.__name__}"

        @functools.wraps(method)
        def call_one(self: A, item: X, /) -> Y:
            # `setdefault` is atomic, so that all threads of the object share one.
            batches: _Batches[X, Y] = vars(self).setdefault(slot, _Batches(max_size, wait_s))
            return batches.run(functools.partial(method, self), item, method.__qualname__)

        del call_one.__dict__["__wrapped__"]
        name = _parameter(method)
        one = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        setattr(call_one, _MOST, max_size)
        call_one.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # read by inspect.signature
            [one, inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY)]
        )
        return call_one

    return decorate


def check_concurrency(cls: type, concurrency: int) -> None:
    """Refuse an actor that runs one call at a time if a method wants to gather several. Raises UsageError."""
    for name in dir(cls):
        most = getattr(inspect.getattr_static(cls, name), _MOST, 1)
        if concurrency == 1 and most > 1:
            raise UsageError(
                f"concurrency=1: {cls.__name__}.{name} gathers up to {most} calls, but they come one at a time; write "
                f"@sky.actor(concurrency={most})",
                field="concurrency",
                value=concurrency,
            )


def _parameter(method: Callable[..., Any]) -> str:
    """Return the name of the list of items. Raises UsageError unless the method takes self and one list."""
    names = list(inspect.signature(method).parameters)
    if len(names) != 2:  # self and the list
        raise UsageError(
            f"{method.__qualname__}({', '.join(names)}): a batched method takes self and one list; write "
            "def predict(self, xs)"
        )
    return names[1]


class _Item(Generic[X, Y]):
    """One call: its item, and its value or error."""

    __slots__ = ("error", "has_left", "is_done", "item", "value", "wake")

    value: Y

    def __init__(self, item: X) -> None:
        self.item = item
        self.error: BaseException | None = None
        self.is_done = False
        self.has_left = False
        """Whether its caller is gone, with the value or cancelled."""
        self.wake = threading.Event()
        """Set to let its caller look again."""


class _Batches(Generic[X, Y]):
    """Calls of one method of one object that wait to be gathered. Thread-safe.

    The first waiting caller leads: it waits for others, and calls the method for all of them in its own thread. So no
    thread is needed. A cancellation may come at any instruction of the leader. So items stay in the line until they are
    done, and a leader whose caller has left is no leader.

    Each caller has an event of its own. With one condition for all of them, every new item woke every thread.
    """

    def __init__(self, max_size: int, wait_s: float) -> None:
        self._max_size = max_size
        self._wait_s = wait_s
        self._lock = threading.Lock()
        self._line: list[_Item[X, Y]] = []
        self._leader: _Item[X, Y] | None = None

    def run(self, method: Callable[[list[X]], list[Y]], item: X, name: str) -> Y:
        mine: _Item[X, Y] = _Item(item)
        try:
            with self._lock:
                self._line.append(mine)
                if self._leader is not None and len(self._line) >= self._max_size:
                    self._leader.wake.set()
            while self._takes_the_lead(mine):
                self._lead(mine, method, name)
        finally:
            mine.has_left = True
        if mine.error is not None:
            raise mine.error
        return mine.value

    def _takes_the_lead(self, mine: _Item[X, Y]) -> bool:
        """Wait until the call is done or may lead. Return whether it leads."""
        while True:
            with self._lock:
                if mine.is_done:
                    if self._leader is mine:
                        self._pass_on()
                    return False
                if self._leader is None or self._leader.has_left or self._leader is mine:
                    self._leader = mine
                    return True
                mine.wake.clear()
            mine.wake.wait(_LOOK_S)

    def _pass_on(self) -> None:
        """Let the next waiting caller lead. Needs the lock."""
        self._leader = None
        waiting = self._open()
        if waiting:
            waiting[0].wake.set()

    def _lead(self, mine: _Item[X, Y], method: Callable[[list[X]], list[Y]], name: str) -> None:
        """Wait for others, call the method once, and give each its value."""
        batch = self._gather(mine)
        error: Exception | None = None
        values: list[Y] = []
        try:
            values = method([one.item for one in batch])
            if not hasattr(values, "__len__"):
                error = UsageError(
                    f"{name}: returned {type(values).__name__}; return a list with a value for each item"
                )
            elif len(values) != len(batch):
                error = UsageError(f"{name}: returned {len(values)} values for {len(batch)} items; return one for each")
        except Exception as raised:
            error = raised
        with self._lock:
            for index, one in enumerate(batch):
                if error is None:
                    one.value = values[index]
                one.error = error
                one.is_done = True
            self._line[:] = self._open()
        for one in batch:
            one.wake.set()

    def _gather(self, mine: _Item[X, Y]) -> list[_Item[X, Y]]:
        """Return the items of the next list, once they are enough or have waited long enough."""
        deadline = time.monotonic() + self._wait_s
        while True:
            with self._lock:
                waiting = self._open()
                left_s = deadline - time.monotonic()
                if len(waiting) >= self._max_size or left_s <= 0:
                    return waiting[: self._max_size]
                mine.wake.clear()
            mine.wake.wait(min(left_s, _LOOK_S))

    def _open(self) -> list[_Item[X, Y]]:
        return [one for one in self._line if not (one.is_done or one.has_left)]
