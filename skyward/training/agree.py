"""The ranks of a run, as callbacks talk to one another: nothing here waits for a rank that has raised.

Whatever passes between ranks on a callback's behalf goes through `Ranks.exchange`. Exchanges are all-gathers of
tagged messages, so a rank whose callback raised can answer the exchange that its peers are in, whichever it is, with
its failure; it is raised there as `RankFailed`, and no rank is left waiting. Torch is imported for a world of more
than one rank only.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar, cast

from ..errors import UsageError

__all__ = ["Alone", "RankFailed", "Ranks", "TorchRanks", "ranks_of_this_process"]

T = TypeVar("T")

TIMEOUT_S = 1800.0
"""How long an exchange waits for the slowest rank: torch's own default for its collectives."""


class RankFailed(RuntimeError):
    """Another rank failed while this one waited for it. Fields: rank, error (its text), where (what it was doing)."""

    def __init__(self, *, rank: int, error: str, where: str) -> None:
        super().__init__(f"rank {rank} failed in {where}: {error}")
        self.rank, self.error, self.where = rank, error, where

    def __reduce__(self) -> tuple[Any, ...]:
        return _rank_failed, (self.rank, self.error, self.where)


def _rank_failed(rank: int, error: str, where: str) -> RankFailed:
    return RankFailed(rank=rank, error=error, where=where)


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """What a rank that raised says to the others."""

    rank: int
    error: str
    where: str

    @classmethod
    def of(cls, rank: int, error: BaseException, where: str) -> RankFailure:
        return cls(rank=rank, error=f"{type(error).__name__}: {error}", where=where)


class Ranks(Protocol):
    """The processes of one run. Each method that takes part in an exchange is called by all ranks, in one order."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def local_rank(self) -> int: ...

    def exchange(self, value: T) -> list[T]:
        """Every rank's value, by rank. Values are pickled: small ones.

        Raises: RankFailed where a rank has raised instead.
        """

    def fail(self, failure: RankFailure) -> None:
        """Takes part in the others' next exchange by a failure. Raises nothing."""

    def flags(self, bits: int) -> int:
        """The bits (at most 62) that any rank has set: one small all-reduce, made for every step."""

    def share(self, value: T, *, source: int = 0) -> T:
        """Rank `source`'s value, on all ranks. Raises: as `exchange`."""


@dataclass(frozen=True)
class Alone:
    """A world of one rank."""

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
    """The ranks of torch's default process group, which talk over a gloo group of their own: never in between the
    collectives of training, and on CPU. All ranks make it together.
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
        """The gloo group that they talk over."""
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
    """Those of torch's process group where there is one of more than one rank, else `Alone`. Collective.

    timeout_s: how long an exchange of these waits for the slowest rank.
    """
    import sys

    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return Alone()
    return TorchRanks(timeout_s=timeout_s)
