"""Rule that assigns samples to ranks and micro-batches, so that any batch can be made again.

The order of an epoch is drawn from (seed, epoch) by a generator of its own. A *round* is one micro-batch of every rank.
Every sample is read exactly once in an epoch. If the last round is not full, the ranks share the rest. A rank that gets
none of it reads another rank's first sample with weight 0, because all ranks must take part in each step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Share:
    """Part of a round that one rank reads."""

    indices: tuple[int, ...]
    """Numbers of the samples in the data set."""
    samples: int
    """Number of `indices` that count; 0 if the only sample is borrowed from another rank."""


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Batch that the model receives in one call."""

    inputs: Any
    samples: int
    """Samples of this rank that count."""
    samples_of_all: int | None = None
    """Samples of all ranks that count. None: this rank cannot know."""


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """Plan of the batches of a data set with `size` samples; `batch_size` is that of one rank."""

    size: int
    batch_size: int
    world_size: int = 1
    shuffle: bool = False
    drop_last: bool = False
    seed: int = 0

    def __len__(self) -> int:
        """Number of rounds in an epoch."""
        whole, rest = divmod(self.size, self.batch_size * self.world_size)
        return whole + (rest > 0 and not self.drop_last)

    def order(self, epoch: int) -> list[int]:
        """Return all indices in the order in which the epoch reads them."""
        if not self.shuffle:
            return list(range(self.size))
        # The seed has 64 bits: the run's seed above, the epoch below. With their sum as the seed, epoch 1 of seed 42
        # and epoch 0 of seed 43 would have the same order.
        generator = torch.Generator().manual_seed((self.seed << 31) ^ epoch)
        order: list[int] = torch.randperm(self.size, generator=generator).tolist()
        return order

    def rounds(self, epoch: int, *, start: int = 0) -> Iterator[list[Share]]:
        """Yield the shares of all ranks for each round from `start` on."""
        order = self.order(epoch)
        width = self.batch_size * self.world_size
        for number in range(start, len(self)):
            yield self._share_out(order[number * width : (number + 1) * width])

    def _share_out(self, indices: list[int]) -> list[Share]:
        least, rest = divmod(len(indices), self.world_size)
        shares: list[Share] = []
        begin = 0
        for rank in range(self.world_size):
            count = least + (rank < rest)
            own = tuple(indices[begin : begin + count]) or (indices[0],)
            shares.append(Share(indices=own, samples=count))
            begin += count
        return shares


def size_of(inputs: Any) -> int:
    """Return the number of samples in a batch: the first dimension of its first tensor, or 1 without tensors."""
    if isinstance(inputs, torch.Tensor):
        return int(inputs.shape[0]) if inputs.ndim else 1
    values = inputs.values() if isinstance(inputs, Mapping) else inputs if isinstance(inputs, list | tuple) else ()
    for value in values:
        if isinstance(value, torch.Tensor) and value.ndim:
            return int(value.shape[0])
    return 1
