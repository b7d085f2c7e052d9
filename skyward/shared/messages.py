"""Requests and answers of shared state, and their form on the wire.

A value is pickled once, by the task or program that sends it. Everywhere else it is bytes. Keys are plain data and are
compared as Python compares them. So the messages hold only plain data, and marshal reads them: unlike pickle it builds
nothing but plain data, so the program unpickles nothing in the thread that reads all links.
"""

from __future__ import annotations

import marshal
import threading
from dataclasses import field
from typing import Any, Final, NamedTuple

from ..core.records import dataclass
from ..errors import InternalError, StateLost, UsageError

CHANNEL: Final = "skyward.shared"
"""Name of the channels between tasks and the program that carry these messages."""
VALUE_LIMIT: Final = 64 << 20
"""Most bytes of a request or an answer."""
_VERSION = 2
"""Format of marshal: the newest one that gives equal bytes for equal values. Every Python reads it."""

OK, WITHDRAWN, REFUSED = 0, 1, 2
"""Status of an answer: done, not done because nobody waits for it, or not done because of an error."""

REQUEST, WITHDRAW, FORGET, LEAVE = 0, 1, 2, 3
"""Kinds of messages from a task. WITHDRAW: answer now, whatever has happened. FORGET: undo it, because nobody has read
the answer. LEAVE: the call has ended; free its leases."""

_ERRORS: dict[str, type[Exception]] = {
    cls.__name__: cls for cls in (IndexError, InternalError, StateLost, UsageError, threading.BrokenBarrierError)
}


class StoreAnswer(NamedTuple):
    """Answer to a request. `value` is the name of an error's class and its message if the status is REFUSED."""

    session: int
    number: int
    status: int
    value: Any


@dataclass(slots=True)
class StoreRequest:
    """One operation on one thing.

    Attributes:
        kind: Kind of the thing, such as "dict".
        name: Its name.
        verb: The operation.
        arguments: Its arguments, plain data.
        options: Fixed properties of the thing, such as the number of parties. All who use it must agree.
        timeout_s: Longest wait in seconds; None for no limit. Operations that never wait ignore it.
        can_wait: Whether the operation may have to wait.
        is_lease: Whether the end of the call matters to the thing.
    """

    kind: str
    name: str
    verb: str
    arguments: tuple[Any, ...] = ()
    options: tuple[Any, ...] = ()
    timeout_s: float | None = None
    can_wait: bool = False
    is_lease: bool = field(default=False)

    @property
    def may_park(self) -> bool:
        """Return whether the request may wait in the store."""
        return self.can_wait and self.timeout_s != 0

    def fields(self) -> tuple[Any, ...]:
        return self.kind, self.name, self.verb, self.arguments, self.options, self.may_park

    def timed_out(self) -> TimeoutError:
        return TimeoutError(
            f"{self.kind}={self.name!r}: {self.verb} could not be done within {self.timeout_s or 0:g} s; "
            "pass a larger timeout_s, or None to wait without a limit"
        )

    def result(self, status: int, value: Any) -> Any:
        """Return the value of an answer, or raise its error."""
        if status == OK:
            return value
        if status == WITHDRAWN:
            raise self.timed_out()
        kind, message = value
        raise _ERRORS.get(kind, InternalError)(message)


def pack_message(*fields: Any) -> bytes:
    return marshal.dumps(fields, _VERSION)


def unpack_message(body: bytes) -> Any:
    return marshal.loads(body)


def size_of(key: Any) -> int:
    """Return about how many bytes a key takes. Equal keys give equal numbers: 1, 1.0 and True are one key."""
    if isinstance(key, str | bytes):
        return len(key)
    if isinstance(key, tuple):
        return sum(map(size_of, key))
    if isinstance(key, float):
        key = int(key) if key.is_integer() else None
    return 8 if key is None else key.bit_length() // 8
