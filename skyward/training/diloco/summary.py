"""The mean of a round's deltas, and how far they agree with it, in one pass over them.

The pass goes through all deltas at once, in chunks that stay in the processor's cache. Whole deltas would need a copy
for each worker, because the angle to the mean is unknown before the mean is. A second pass would read them from memory
again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .algorithm import DeltaMean
from .compression import BLOCK
from .frames import BUFFER_PREFIX, ArrayFrame
from .tensors import FlatTensors

CHUNK = 255 * BLOCK
"""Values of a chunk: 128 KiB of float32 for each worker. Whole blocks, so that compressed arrays can be cut there.

torch shares arrays of 2**15 values between threads, which wait for each other with busy processors.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaSummary:
    """Outcome of the pass."""

    mean: Mapping[str, torch.Tensor]
    norm: float
    """Norm of the mean, without the buffers."""
    cosines: Mapping[str, float | None]
    """For each worker: cosine between its delta and the mean, or the direction that was given. None without an angle:
    one of both is 0."""


def summarize(
    deltas: Mapping[str, ArrayFrame],
    weights: Mapping[str, float],
    norms: Mapping[str, float],
    *,
    direction: Mapping[str, torch.Tensor] | None = None,
) -> DeltaSummary:
    """Return the weighted mean of deltas, with the angles to it.

    The mean is that of `DeltaMean`, to the bit. Further memory is a chunk for each worker.

    Args:
        deltas: Frames of all workers, with the same names and shapes.
        weights: Share of each in the mean, above 0.
        norms: Norm of each, without the buffers.
        direction: Tensors to compare the deltas with, float32; None: their mean. Missing names count as 0.
    """
    workers = sorted(deltas)
    tables = {worker: FlatTensors(deltas[worker]) for worker in workers}
    dots = dict.fromkeys(workers, 0.0)
    mean, squares, compared = {}, 0.0, 0.0
    for name, shape in tables[workers[0]].shapes.items():
        flat = torch.empty(math.prod(shape))
        other = flat if direction is None else direction.get(name, torch.empty(0)).reshape(-1)
        for begin in range(0, len(flat), CHUNK):
            chunk = slice(begin, begin + CHUNK)
            parts = {worker: tables[worker].part(name, chunk) for worker in workers}
            sums = DeltaMean()
            for worker, part in parts.items():
                sums.add(worker, {name: part}, weight=weights[worker])
            flat[chunk] = sums.take()[name]
            if name.startswith(BUFFER_PREFIX):
                continue
            squares += _dot(flat[chunk], flat[chunk])
            if len(other):
                compared += _dot(other[chunk], other[chunk])
                for worker, part in parts.items():
                    dots[worker] += _dot(part, other[chunk])
        mean[name] = flat.reshape(shape)
    length = math.sqrt(compared)
    return DeltaSummary(
        mean=mean,
        norm=math.sqrt(squares),
        cosines={worker: _cosine(dots[worker], norms[worker] * length) for worker in workers},
    )


def _dot(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.dot(one, other))


def _cosine(dot: float, lengths: float) -> float | None:
    return max(-1.0, min(1.0, dot / lengths)) if lengths and math.isfinite(dot / lengths) else None
