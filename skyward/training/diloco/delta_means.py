"""The mean of a round's deltas, and how far they agree with it, in one pass over them.

The pass goes through all deltas at once, in chunks. Each chunk of the mean is handed on while it is in the processor's
cache. Whole deltas would need a copy for each worker, because the angle to the mean is unknown before the mean is. A
second pass would read them from memory again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .frames import BUFFER_PREFIX, ArrayFrame
from .tensors import CHUNK, FlatTensors, decode_into, squares_of

_IN_ORDER = 16
"""Most rows that `torch.sum` adds one after another. Of more it makes partial sums, so later rows are added by hand."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaSummary:
    """Figures of the pass."""

    norm: float
    """Norm of the mean, without the buffers."""
    cosines: Mapping[str, float | None]
    """For each worker: cosine between its delta and the mean, or the direction that was given. None without an angle:
    one of both is 0."""


class DeltaMeans:
    """Weighted mean of deltas, with the angles to it.

    The mean is that of `DeltaMean`, to the bit. Memory is two chunks of float32 for each worker.

    Args:
        deltas: Frames of all workers, with the same names and shapes.
        weights: Share of each in the mean, above 0.
        norms: Norm of each, without the buffers.
        direction: Tensors to compare the deltas with, float32; None: their mean. Missing names count as 0. A chunk of
            them is read before that of the mean is handed on, so they may change with it.
    """

    def __init__(
        self,
        deltas: Mapping[str, ArrayFrame],
        weights: Mapping[str, float],
        norms: Mapping[str, float],
        *,
        direction: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self._workers = sorted(deltas)
        self._tables = [FlatTensors(deltas[worker]) for worker in self._workers]
        self._weights = [weights[worker] for worker in self._workers]
        self._norms = [norms[worker] for worker in self._workers]
        self._direction = direction
        self.shapes: Mapping[str, tuple[int, ...]] = self._tables[0].shapes
        """Shapes of all tensors, by name."""
        self._rows = torch.empty(len(self._workers), CHUNK, dtype=torch.float64)
        self._sums, self._mean = torch.empty(CHUNK, dtype=torch.float64), torch.empty(CHUNK)
        self._full = list(self._blocks(CHUNK))
        self._dots = torch.zeros(len(self._workers), dtype=torch.float64)
        self._squares, self._compared = 0.0, 0.0

    def chunks(self, name: str) -> Iterator[tuple[slice, torch.Tensor]]:
        """Return the mean of a tensor, chunk by chunk.

        Each is a slice of the flat tensor, and its values in float32. The next one overwrites them.
        """
        begin = 0
        for parts in zip(*(table.chunks(name) for table in self._tables), strict=True):
            size = math.prod(parts[0].shape)
            chunk = slice(begin, begin + size)
            for row, part, weight in zip(self._rows, parts, self._weights, strict=True):
                decode_into(row[:size], part)
                if weight != 1:
                    row[:size].mul_(weight)
            blocks = self._full if size == CHUNK else list(self._blocks(size))
            for block in blocks:
                block.sum_by(sum(self._weights))
            mean = self._mean[:size].copy_(self._sums[:size])
            if not name.startswith(BUFFER_PREFIX):
                self._squares += squares_of(mean)
                self._compare(name, chunk, blocks)
            yield chunk, mean
            begin += size

    def summary(self) -> DeltaSummary:
        """Return the figures of the chunks that were asked for."""
        length = math.sqrt(self._squares if self._direction is None else self._compared)
        lengths = [weight * norm * length for weight, norm in zip(self._weights, self._norms, strict=True)]
        return DeltaSummary(
            norm=math.sqrt(self._squares),
            cosines=dict(zip(self._workers, map(_cosine, self._dots.tolist(), lengths), strict=True)),
        )

    def _blocks(self, size: int) -> Iterator[_Block]:
        """Cut the first columns into blocks that torch does not share between threads."""
        columns = max(1, CHUNK // len(self._workers))
        parts = zip(self._rows[:, :size].split(columns, 1), self._sums[:size].split(columns), strict=True)
        return (_Block(rows, rows[:_IN_ORDER], rows[_IN_ORDER:].unbind(), sums) for rows, sums in parts)

    def _compare(self, name: str, chunk: slice, blocks: list[_Block]) -> None:
        if self._direction is None:
            for block in blocks:
                self._dots.addmv_(block.rows, block.sums)
        elif name in self._direction:
            other = self._direction[name].reshape(-1)[chunk]
            self._compared += squares_of(other)
            for block, part in zip(blocks, other.double().split(len(blocks[0].sums)), strict=True):
                self._dots.addmv_(block.rows, part)


class _Block(NamedTuple):
    """Some columns of a chunk: a row for each worker, and their sums."""

    rows: torch.Tensor
    first: torch.Tensor
    later: tuple[torch.Tensor, ...]
    sums: torch.Tensor

    def sum_by(self, weight: float) -> None:
        """Set the sums to those of the rows, divided by a weight."""
        torch.sum(self.first, 0, out=self.sums)
        for row in self.later:
            self.sums.add_(row)
        self.sums.div_(weight)


def _cosine(dot: float, lengths: float) -> float | None:
    return max(-1.0, min(1.0, dot / lengths)) if lengths and math.isfinite(dot / lengths) else None
