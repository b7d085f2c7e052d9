"""A shuffled order of `range(n)` that is computed where it is asked for, without a list of n numbers.

A cipher on numbers of b bits, 2**b >= n, is a permutation of them; numbers that land beyond n are enciphered again
until they land below it (cycle walking), which leaves a permutation of `range(n)`. So a node that needs every k-th
place of the order computes just those, in plain Python or in numpy, and gets the same numbers from both.

The alternatives: `random.shuffle` needs a list of all n (360 MB for ten million), `numpy.random.permutation` needs
numpy everywhere and an array of all n, and the two give different orders, so that a list and an array with the same
seed would no longer be aligned.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Permutation"]

# With 6, orders of fewer than ten elements were visibly not equally likely; with 12 a chi-square test sees nothing.
_ROUNDS = 12
# Small enough for the working arrays to stay in a core's L2 cache; twice as fast as one pass over ten million.
_BLOCK = 1 << 15


class Permutation:
    """The order of `range(n)` that `seed` gives; the same in every process, with and without numpy.

    `n` at least 0 and below 2**63, `seed` any whole number. Immutable; safe to share between threads.

        >>> sorted(Permutation(5, seed=1).take(range(5)))
        [0, 1, 2, 3, 4]
    """

    __slots__ = ("_bits", "_keys", "n")

    def __init__(self, n: int, *, seed: int) -> None:
        self.n = n
        self._bits = max(1, (n - 1).bit_length())
        digest = hashlib.shake_256(f"{seed}/{n}".encode()).digest(16 * _ROUNDS)
        mask = (1 << self._bits) - 1
        # An odd factor, for only those can be undone modulo 2**bits.
        self._keys = tuple(((factor | 1) & mask, added & mask) for factor, added in struct.iter_unpack("<QQ", digest))

    def take(self, places: range) -> Iterator[int]:
        """The elements at these places of the order, one by one. Every place in [0, n)."""
        return map(self._at, places)

    def take_array(self, places: range) -> NDArray[np.int64]:
        """The same as `take`, as an array of int64. Needs numpy."""
        import numpy as np

        taken = np.empty(len(places), dtype=np.int64)
        word = np.uint32 if self._bits <= 32 else np.uint64
        for start in range(0, len(places), _BLOCK):
            part = places[start : start + _BLOCK]
            block: NDArray[Any] = np.arange(part.start, part.stop, part.step, dtype=np.int64).astype(word)
            self._encipher_array(block)
            beyond = np.flatnonzero(block >= self.n)
            while len(beyond):
                again = block[beyond]
                self._encipher_array(again)
                block[beyond] = again
                beyond = beyond[again >= self.n]
            taken[start : start + len(part)] = block
        return taken

    def _at(self, place: int) -> int:
        number = self._encipher(place)
        while number >= self.n:
            number = self._encipher(number)
        return number

    # Multiplying by an odd number, adding, and folding the upper half onto the lower each can be undone, so each is a
    # permutation of the numbers of `bits` bits; multiplication carries changes upwards, the fold brings them down.
    def _encipher(self, number: int) -> int:
        mask, shift = (1 << self._bits) - 1, (self._bits + 1) // 2
        for factor, added in self._keys:
            number = (number * factor + added) & mask
            number ^= number >> shift
        return number

    def _encipher_array(self, numbers: NDArray[Any]) -> None:
        """In place. Unsigned overflow wraps, which leaves the low bits, the only ones kept, right."""
        word = numbers.dtype.type
        mask, shift = word((1 << self._bits) - 1), word((self._bits + 1) // 2)
        for factor, added in self._keys:
            numbers *= word(factor)
            numbers += word(added)
            numbers &= mask
            numbers ^= numbers >> shift
