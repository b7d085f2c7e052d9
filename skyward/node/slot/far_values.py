"""Values that stay on nodes, behind the references of a task.

A task gets such a reference from its own calls (`keep`), from `put`, or in the value of a call. It knows the blobs by
name. `Ref.get()` reads them from its own node. From another node they come as the arguments of a call do. When the task
forgets the last blob of an outcome, the client is told; when the task ends, the client knows by itself.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Protocol

from ...core.records import dataclass
from ...errors import UsageError
from ...values.ref import Elsewhere, Pickled, load
from ...wire.blobs import Blob, NamedBlob


class HoldingCaller(Protocol):
    """Caller of a task, as its references see it."""

    def fetch(self, blobs: Sequence[Blob], /) -> list[Blob]:
        """Get the bytes of blobs, and wait for them. Raises RefLost, or UsageError if the task has ended."""
        ...

    def until_end(self, blob: Blob, /) -> None:
        """Take a blob that must not be forgotten before the task has ended."""
        ...

    def forget(self, number: int, /) -> None:
        """Tell the client that the references of an outcome are gone. Takes no lock, because a finalizer calls it."""
        ...


class TaskHold:
    """Hold of a task on the references in one outcome: the call of that number had it."""

    def __init__(self, caller: HoldingCaller, number: int) -> None:
        self.caller = caller
        self._number = number

    def __del__(self) -> None:
        self.caller.forget(self._number)


class FarBlob(Blob, Elsewhere):
    """Blob that the task knows by name only."""

    def __init__(self, digest: bytes, size: int, hold: TaskHold) -> None:
        super().__init__(digest, size, -1)
        self.hold = hold

    def here(self) -> None:
        return None

    def map(self) -> Any:
        return self

    def held(self, pickled: Pickled) -> FarValue:
        return FarValue(pickled)


@dataclass(frozen=True, slots=True)
class FarValue:
    """Value behind a reference of a task; see `Held`."""

    pickled: Pickled

    @property
    def nbytes(self) -> int:
        sizes = (part.size if isinstance(part, Blob) else memoryview(part).nbytes for part in self.pickled.buffers)
        return len(self.pickled.data or b"") + sum(sizes)

    @property
    def nodes(self) -> tuple[int, ...]:
        return ()

    def get(self) -> Any:
        far = [part for part in self.pickled.buffers if isinstance(part, FarBlob)]
        blobs = iter(far[0].hold.caller.fetch(far))
        parts = [next(blobs).map() if isinstance(part, FarBlob) else bytearray(part) for part in self.pickled.buffers]
        return load(self.pickled.data, *map(pickle.PickleBuffer, parts))


def with_bytes(blobs: Iterable[Blob]) -> Iterator[Blob]:
    """Yield blobs with a file each, for a value that stays: it has the bytes of the references in it.

    Raises:
        RefLost: The nodes that held a value are gone.
        OSError: There is no free descriptor, or no room for a file.
    """
    for blob in blobs:
        here = blob.hold.caller.fetch([blob])[0] if isinstance(blob, FarBlob) else blob.here()
        assert here is not None
        here.open()
        yield here


def unknown(blobs: Iterable[Blob], names: Collection[bytes]) -> Iterator[Blob]:
    """Yield the blobs that the client does not know, with a file each. `names`: blobs that came with the task.

    Those of references stay until the end of the task: in its value they must outlive its way to the client.

    Raises:
        UsageError: A reference belongs to a task that has ended.
        OSError: There is no free descriptor, or no room for a file.
    """
    for blob in blobs:
        if isinstance(blob, FarBlob):
            blob.hold.caller.until_end(blob)
        elif not isinstance(blob, NamedBlob) or blob.digest not in names:
            here = blob.here()
            assert here is not None
            here.open()
            yield here


def ended() -> UsageError:
    """Return the error of a reference whose task has ended."""
    return UsageError(
        "ref: belongs to a task that has ended, and was freed with it; return it from that task, or keep the value "
        "in the program that opened the pool"
    )
