"""References of the client to values that stay on nodes. Used under the ledger's lock.

The client knows each by a number. It holds the value here until it says that the reference is gone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

from ...errors import InternalError, RefLost, SkywardError
from ...wire.blobs import Blob
from ..kept_values import KeptBlob

Place = tuple[bytes, int, int]
"""A reference as the client gets it: name and size of the blob, and number."""


class ClientReferences:
    """Blobs that lie on nodes, and that the client has references to.

    Args:
        next_number: Returns a number that nothing else has.
        was_killed: Whether an earlier process of this head was killed, with the references that it held.
    """

    def __init__(self, next_number: Callable[[], int], *, was_killed: bool = False) -> None:
        self._next_number = next_number
        self._was_killed = was_killed
        self._held: dict[int, KeptBlob] = {}
        self._refused: dict[int, tuple[bytes, SkywardError]] = {}
        self._by_name: weakref.WeakValueDictionary[bytes, KeptBlob] = weakref.WeakValueDictionary()

    def hold(self, blobs: Iterable[KeptBlob]) -> list[Place]:
        """Hold blobs for the client, and return what it needs to refer to them."""
        places: list[Place] = []
        for blob in blobs:
            number = self._next_number()
            self._held[number] = blob
            self._by_name[blob.digest] = blob
            places.append((blob.digest, blob.size, number))
        return places

    def hold_as(self, places: Iterable[Place], blobs: Iterable[KeptBlob]) -> None:
        """Hold blobs for the client by the numbers that it has given them."""
        for (digest, _, number), blob in zip(places, blobs, strict=True):
            self._held[number] = blob
            self._by_name[digest] = blob

    @property
    def blobs(self) -> tuple[KeptBlob, ...]:
        """Blobs that are held for the client, each once."""
        return tuple({id(blob): blob for blob in self._held.values()}.values())

    def refuse(self, places: Iterable[Place], error: SkywardError) -> None:
        """Note why there is nothing to hold for some references. Their use raises that."""
        self._refused.update((number, (digest, error)) for digest, _, number in places)

    def release(self, number: int) -> None:
        """Forget a reference that the client has forgotten."""
        self._held.pop(number, None)
        self._refused.pop(number, None)

    def hold_only(self, numbers: Iterable[int]) -> None:
        """Forget all other references: the client that had them is gone."""
        self._held = {number: self._held[number] for number in numbers if number in self._held}

    def named(self, digest: bytes) -> Blob | None:
        """Return the blob of that name that some reference of the client still holds."""
        return self._by_name.get(digest)

    def missing(self, digest: bytes, what: str) -> SkywardError:
        """Return the error of a blob that nobody holds for the client."""
        for refused, error in self._refused.values():
            if refused == digest:
                return error
        if self._was_killed:
            return RefLost(
                f"ref: the head of the pool was killed, and with it the place of {what}; make the value again"
            )
        return InternalError(f"head: the client has no reference to {what}; report this bug")
