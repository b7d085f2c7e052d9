"""Communication between the ranks of a run that cannot deadlock when one rank raises.

Callbacks exchange data through `Ranks.exchange`, an all-gather. A rank whose callback raised joins the next exchange of
its peers, whichever that is, with a `RankFailure` instead of a value. The peers raise it as `RankFailed`, so no rank
waits forever. Torch is imported only if there is more than one rank.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar, cast

from ..errors import UsageError

T = TypeVar("T")

TIMEOUT_S = 1800.0
"""Timeout of an exchange; torch's default for gloo collectives."""


class RankFailed(RuntimeError):
    """Another rank failed while this one waited for it.

    Attributes:
        rank: number of the rank that failed.
        error: type and text of its exception.
        where: the operation that failed, such as "MyCallback.on_save".

    Example:
        >>> from skyward.training import RankFailed
        >>> print(RankFailed(rank=1, error="ValueError: bad row", where="reading the data"))
        rank 1: failed in reading the data (ValueError: bad row); read its own error there
    """

    def __init__(self, *, rank: int, error: str, where: str) -> None:
        super().__init__(f"rank {rank}: failed in {where} ({error}); read its own error there")
        self.rank, self.error, self.where = rank, error, where

    def __reduce__(self) -> tuple[Any, ...]:
        return _rank_failed, (self.rank, self.error, self.where)


def _rank_failed(rank: int, error: str, where: str) -> RankFailed:
    return RankFailed(rank=rank, error=error, where=where)


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """Message of a rank that raised, sent in place of a value."""

    rank: int
    error: str
    where: str

    @classmethod
    def of(cls, rank: int, error: BaseException, where: str) -> RankFailure:
        """Describe an exception of this rank."""
        return cls(rank=rank, error=f"{type(error).__name__}: {error}", where=where)


class Ranks(Protocol):
    """Processes of one training run. All ranks call the methods together, in the same order.

    `Alone` implements it for one process, `TorchRanks` for torch's process group. Callbacks receive it as `ranks`.

    Example:
        >>> from skyward.training import Alone, Ranks
        >>> def mean_loss(ranks: Ranks, loss: float) -> float:
        ...     return sum(ranks.exchange(loss)) / ranks.world_size
        >>> mean_loss(Alone(), 0.5)
        0.5
    """

    @property
    def rank(self) -> int:
        """Number of this process, from 0."""

    @property
    def world_size(self) -> int:
        """Number of processes."""

    @property
    def local_rank(self) -> int:
        """Number of this process on its machine, from 0."""

    def exchange(self, value: T) -> list[T]:
        """Return every rank's value, ordered by rank. Collective.

        Args:
            value: a small object that can be pickled.

        Raises:
            RankFailed: another rank called `fail` instead.
        """

    def fail(self, failure: RankFailure) -> None:
        """Answer the other ranks' next exchange with a failure. Raises nothing."""

    def flags(self, bits: int) -> int:
        """Return the bits that at least one rank has set. Collective: one small all-reduce, cheap enough for each step.

        Args:
            bits: flags of this rank, at most 63 bits.
        """

    def share(self, value: T, *, source: int = 0) -> T:
        """Return the value of rank `source` on all ranks. Collective.

        Args:
            value: a small object that can be pickled; used on rank `source` only.
            source: the rank that has the value.

        Raises:
            RankFailed: another rank called `fail` instead.
        """


@dataclass(frozen=True)
class Alone:
    """World of one rank: a `Ranks` whose exchanges return at once.

    Example:
        >>> from skyward.training import Alone
        >>> Alone().exchange("loss")
        ['loss']
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0

    def exchange(self, value: T) -> list[T]:
        return [value]

    def fail(self, failure: RankFailure) -> None:
        return

    def flags(self, bits: int) -> int:
        return bits

    def share(self, value: T, *, source: int = 0) -> T:
        return value


class TorchRanks:
    """Ranks of torch's default process group.

    They communicate over a gloo group of their own, on the CPU. Their exchanges can therefore not interleave with the
    collectives of training. All ranks construct it together.

    Args:
        timeout_s: seconds that an exchange waits for the slowest rank, above 0.

    Raises:
        UsageError: torch.distributed is not initialized.

    Example:
        An all-gather of a loss, within a process group::

            torch.distributed.init_process_group("gloo")
            ranks = TorchRanks(timeout_s=600)
            losses = ranks.exchange(loss.item())
    """

    def __init__(self, *, timeout_s: float = TIMEOUT_S) -> None:
        import torch
        import torch.distributed as dist

        if not dist.is_initialized():
            raise UsageError(
                "TorchRanks: torch.distributed is not initialized; call init_process_group, or use "
                "@sky.integrations.torch"
            )
        self._dist, self._torch = dist, torch
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def group(self) -> Any:
        """Gloo process group of the exchanges."""
        return self._group

    def exchange(self, value: T) -> list[T]:
        answers = self._gather(value)
        for answer in answers:
            if isinstance(answer, RankFailure):
                raise RankFailed(rank=answer.rank, error=answer.error, where=answer.where)
        return cast("list[T]", answers)

    def fail(self, failure: RankFailure) -> None:
        self._gather(failure)

    def flags(self, bits: int) -> int:
        word = self._torch.tensor([bits], dtype=self._torch.int64)
        self._dist.all_reduce(word, op=self._dist.ReduceOp.BOR, group=self._group)
        return int(word.item())

    def share(self, value: T, *, source: int = 0) -> T:
        return cast("T", self.exchange(value if self.rank == source else None)[source])

    def _gather(self, value: object) -> Sequence[object]:
        answers: list[object] = [None] * self.world_size
        self._dist.all_gather_object(answers, value, group=self._group)
        return answers


def ranks_of_this_process(*, timeout_s: float = TIMEOUT_S) -> Ranks:
    """Return `TorchRanks` if torch's process group has several ranks, else `Alone`. Collective.

    Args:
        timeout_s: seconds that an exchange waits for the slowest rank, above 0.

    Returns:
        The ranks of this process's run.

    Example:
        >>> from skyward.training import ranks_of_this_process
        >>> ranks_of_this_process().world_size
        1
    """
    import sys

    # Looked up instead of imported: a process that never imported torch.distributed is alone.
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return Alone()
    return TorchRanks(timeout_s=timeout_s)
