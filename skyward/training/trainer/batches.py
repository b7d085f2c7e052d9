"""Which samples each rank reads in each micro-batch of an epoch: a rule, so that any batch can be made again.

The order of an epoch is drawn from (seed, epoch) by a generator of its own. A *round* is one micro-batch of every
rank. Every sample is read exactly once in an epoch: where the last round is not full, the ranks share what is left, and
a rank that gets none reads another's first sample with a weight of 0, since all ranks must take part in each step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["BatchPlan", "MicroBatch", "Share", "size_of"]


@dataclass(frozen=True, kw_only=True)
class Share:
    """One rank's part of a round. samples: how many of `indices` count (0 where the sample is another rank's)."""

    indices: tuple[int, ...]
    samples: int


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """What the model is given at once. samples: that count, of this rank; samples_of_all: of all ranks' batches, None
    where this rank cannot know.
    """

    inputs: Any
    samples: int
    samples_of_all: int | None = None


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """The batches of a data set of `size` samples. batch_size: of one rank."""

    size: int
    batch_size: int
    world_size: int = 1
    shuffle: bool = False
    drop_last: bool = False
    seed: int = 0

    def __len__(self) -> int:
        """Rounds in an epoch."""
        whole, rest = divmod(self.size, self.batch_size * self.world_size)
        return whole + (rest > 0 and not self.drop_last)

    def order(self, epoch: int) -> list[int]:
        """All indices, in the order in which the epoch reads them."""
        if not self.shuffle:
            return list(range(self.size))
        # A generator's seed has 64 bits: the run's seed above, the epoch below, so no two runs share an epoch.
        generator = torch.Generator().manual_seed((self.seed << 31) ^ epoch)
        order: list[int] = torch.randperm(self.size, generator=generator).tolist()
        return order

    def rounds(self, epoch: int, *, start: int = 0) -> Iterator[list[Share]]:
        """From round `start` on, the shares of all ranks."""
        order = self.order(epoch)
        width = self.batch_size * self.world_size
        for number in range(start, len(self)):
            yield self._share_out(order[number * width : (number + 1) * width])

    def _share_out(self, indices: list[int]) -> list[Share]:
        each, more = divmod(len(indices), self.world_size)
        shares: list[Share] = []
        at = 0
        for rank in range(self.world_size):
            count = each + (rank < more)
            mine = tuple(indices[at : at + count]) or (indices[0],)
            shares.append(Share(indices=mine, samples=count))
            at += count
        return shares


def size_of(inputs: Any) -> int:
    """How many samples a batch has: the first dimension of its first tensor. 1 where it has none."""
    if isinstance(inputs, torch.Tensor):
        return int(inputs.shape[0]) if inputs.ndim else 1
    values = inputs.values() if isinstance(inputs, Mapping) else inputs if isinstance(inputs, list | tuple) else ()
    for value in values:
        if isinstance(value, torch.Tensor) and value.ndim:
            return int(value.shape[0])
    return 1
