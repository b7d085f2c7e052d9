"""The mean of a round's deltas, and how far they agree with it, in one pass over them.

The pass goes through all deltas at once, in chunks. Each chunk of the mean is handed on while it is in the processor's
cache. The angle to the mean is unknown before the mean is, so its chunks are read twice, the second time from the
cache. That costs two thirds of what the sum costs. Angles are figures for people, so a few chunks of each tensor do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from .compression import CHUNK, Compressed
from .frames import BUFFER_PREFIX, ArrayFrame
from .tensors import FlatTensors, product_of, squares_of

MEASURED = 8
"""Angles are measured on one of so many chunks of each tensor, from its first one on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaSummary:
    """Figures of the pass."""

    norm: float
    """Norm of the mean, without the buffers."""
    cosines: Mapping[str, float | None]
    """For each worker: cosine between its delta and the mean, or the direction that was given. None without an angle:
    one of both is 0. It is that of all values in tensors of one chunk, and of about an eighth in large ones."""


class DeltaMeans:
    """Weighted mean of deltas, with the angles to it.

    It is summed in float64, in the order of the workers' ids. So a repeated run is equal to the bit, and the mean of
    equal deltas is that delta, to the bit. Memory is a few chunks, however many workers there are.

    Args:
        deltas: Frames of all workers, with the same names and shapes.
        weights: Share of each in the mean, above 0.
        direction: Tensors to compare the deltas with, float32; None: their mean. Missing names count as 0. A chunk of
            them is read before that of the mean is handed on, so they may change with it.
    """

    def __init__(
        self,
        deltas: Mapping[str, ArrayFrame],
        weights: Mapping[str, float],
        *,
        direction: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self._workers = sorted(deltas)
        self._tables = [FlatTensors(deltas[worker]) for worker in self._workers]
        self._weights = [weights[worker] for worker in self._workers]
        self._direction = direction
        self.shapes: Mapping[str, tuple[int, ...]] = self._tables[0].shapes
        """Shapes of all tensors, by name."""
        self._row, self._sums = torch.empty(CHUNK, dtype=torch.float64), torch.empty(CHUNK, dtype=torch.float64)
        self._mean, self._part = torch.empty(CHUNK), torch.empty(CHUNK)
        self._squares = 0.0
        self._dots, self._lengths = [0.0] * len(self._workers), [0.0] * len(self._workers)
        """Products with the direction, and with itself, of each delta's measured chunks."""
        self._compared = 0.0
        """Product of the direction with itself, in the same chunks."""

    def chunks(self, name: str) -> Iterator[tuple[slice, torch.Tensor]]:
        """Return the mean of a tensor, chunk by chunk.

        Each is a slice of the flat tensor, and its values in float32. The next one overwrites them.
        """
        begin = 0
        for received in zip(*(table.chunks(name) for table in self._tables), strict=True):
            parts = [part.decoded() if isinstance(part, Compressed) else part for part in received]
            size = len(parts[0])
            chunk = slice(begin, begin + size)
            sums = self._sum(parts, size).div_(sum(self._weights))
            mean = self._mean[:size].copy_(sums)
            if not name.startswith(BUFFER_PREFIX):
                self._squares += squares_of(mean)
                if begin // CHUNK % MEASURED == 0:
                    self._compare(name, chunk, parts, mean)
            yield chunk, mean
            begin += size

    def summary(self) -> DeltaSummary:
        """Return the figures of the chunks that were asked for."""
        lengths = [math.sqrt(length) * math.sqrt(self._compared) for length in self._lengths]
        return DeltaSummary(
            norm=math.sqrt(self._squares),
            cosines=dict(zip(self._workers, map(_cosine, self._dots, lengths), strict=True)),
        )

    def _sum(self, parts: Sequence[torch.Tensor], size: int) -> torch.Tensor:
        """Return the weighted sum of chunks in float64, in the order of the workers' ids."""
        sums, row = self._sums[:size], self._row[:size]
        for number, (part, weight) in enumerate(zip(parts, self._weights, strict=True)):
            values = (sums if number == 0 else row).copy_(part)
            if weight != 1:
                values.mul_(weight)
            if number:
                sums.add_(values)
        return sums

    def _compare(self, name: str, chunk: slice, parts: Sequence[torch.Tensor], mean: torch.Tensor) -> None:
        """Add to the scalar products. Chunks in bfloat16 are widened again, which is cheaper than keeping them wide."""
        if self._direction is not None:
            known = self._direction.get(name)
            mean = torch.zeros_like(mean) if known is None else known.reshape(-1)[chunk]
        self._compared += product_of(mean, mean)
        values = self._part[: len(mean)]
        for number, part in enumerate(parts):
            wide = part if part.dtype is mean.dtype else values.copy_(part)
            self._dots[number] += product_of(wide, mean)
            self._lengths[number] += product_of(wide, wide)


def _cosine(dot: float, lengths: float) -> float | None:
    return max(-1.0, min(1.0, dot / lengths)) if lengths and math.isfinite(dot / lengths) else None
