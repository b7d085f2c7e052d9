"""Values that stay on nodes, as the program has them that opened the pool: references, with or without a head."""

from __future__ import annotations

import pickle
from dataclasses import field
from typing import Any, Protocol

from ..core.records import dataclass
from ..values.ref import Pickled, Ref, load
from ..wire.blobs import Blob
from .tasks import Received


class KeptSource(Protocol):
    """Part of an engine that knows which nodes have a blob, and gets its bytes."""

    def nodes_of(self, blobs: tuple[Blob, ...]) -> tuple[int, ...]:
        """Return the nodes that have all of these blobs; none if there are no blobs."""
        ...

    def fetch(self, blobs: tuple[Blob, ...]) -> list[Blob]:
        """Get the bytes of blobs from the nodes, and wait for them. Raises RefLost; PoolClosed."""
        ...


class KeptReceived(Received):
    """Value that stays on its node, in place of which a reference is made."""

    __slots__ = ("values",)

    def __init__(self, body: bytes, blobs: tuple[Blob, ...], values: KeptSource) -> None:
        super().__init__(body, blobs)
        self.values = values

    def decode(self) -> Ref[Any]:
        parsed = self.parsed
        data = None if parsed.pickle_is_blob else bytes(parsed.pickle)
        return Ref(KeptValue(Pickled(data, self.blobs), self.values))


@dataclass(frozen=True, eq=False)
class KeptValue:
    """Value behind a reference of the program that opened the pool; see `Held`."""

    pickled: Pickled
    values: KeptSource = field(repr=False)

    @property
    def nbytes(self) -> int:
        sizes: list[int] = [blob.size for blob in self.pickled.buffers]
        return len(self.pickled.data or b"") + sum(sizes)

    @property
    def nodes(self) -> tuple[int, ...]:
        return self.values.nodes_of(self.pickled.buffers)

    def get(self) -> Any:
        buffers = [_bytes_of(blob) for blob in self.values.fetch(self.pickled.buffers)]
        return load(self.pickled.data, *(pickle.PickleBuffer(buffer) for buffer in buffers))


def _bytes_of(blob: Blob) -> Any:
    """Return bytes of a blob that the caller may write to. The blob keeps its own."""
    in_memory = blob.in_memory()
    return blob.map() if in_memory is None else bytearray(in_memory)
