"""The micro-batches of this rank: read here, or read by rank 0 and handed out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import torch

from ...errors import UsageError
from ..agree import RankFailed, Ranks
from ..arguments import TrainingArguments
from ..checkpoint import SharingPattern
from .batches import BatchPlan, MicroBatch
from .data_sources import (
    Collate,
    IterableSource,
    LoaderSource,
    MapSource,
    Source,
    has_length,
    is_indexed,
    is_loader,
    loader_options,
)

__all__ = ["Stream", "is_map_style", "make_stream"]


class Stream:
    """One epoch after another, from any place. Stateful: its state is that of the source, at the last batch taken.

    source: reads this rank's batches; with `dispatches`, reads every rank's on rank 0 (None elsewhere).
    is_planned: all ranks read equally many batches, without asking one another.
    shares: where it dispatches, which batch of a round each rank gets; None: each its own.
    rounds: in an epoch; None where that is not known.
    """

    def __init__(
        self,
        source: Source | None,
        *,
        ranks: Ranks,
        dispatches: bool,
        is_planned: bool,
        shares: tuple[int, ...] | None = None,
    ) -> None:
        self._shares = tuple(range(ranks.world_size)) if shares is None else shares
        self._width = max(self._shares) + 1
        self._source = source
        self._ranks = ranks
        self._dispatches = dispatches and ranks.world_size > 1
        self._is_planned = is_planned
        self._batches: Iterator[MicroBatch] = iter(())
        length = None if source is None else source.length
        if self._dispatches:
            length = ranks.share(length)
            length = None if length is None else -(-length // self._width)
            self._group = torch.distributed.new_group(backend="gloo")
        self.rounds: int | None = length

    @property
    def loader(self) -> Any:
        """None on ranks that do not read."""
        return None if self._source is None else self._source.loader

    @property
    def sharing_pattern(self) -> SharingPattern:
        """Of its state: one where one rank reads, the only one or rank 0."""
        is_one = self._dispatches or self._ranks.world_size == 1
        return SharingPattern.GLOBAL if is_one else SharingPattern.PER_RANK

    def open(self, epoch: int, *, skip: int) -> None:
        """Goes to micro-batch `skip` of an epoch."""
        if self._dispatches:
            self._batches = self._handed_out(epoch, skip)
            return
        assert self._source is not None
        batches = self._source.open(epoch, skip=skip)
        is_alone = self._ranks.world_size == 1
        self._batches = (replace(batch, samples_of_all=batch.samples) for batch in batches) if is_alone else batches

    def take(self, count: int) -> list[MicroBatch]:
        """The next `count`; fewer at the end of the epoch, and then as many on every rank."""
        batches = list(islice(self._batches, count))
        if self._ranks.world_size == 1 or self._dispatches:
            return batches
        if not self._is_planned and self._ranks.flags(len(batches) < count):
            batches = batches[: min(self._ranks.exchange(len(batches)))]
        return batches

    def state_dict(self) -> dict[str, Any]:
        return {} if self._source is None else self._source.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        if self._source is not None:
            self._source.load_state_dict(state_dict)

    def _handed_out(self, epoch: int, skip: int) -> Iterator[MicroBatch]:
        is_reader = self._ranks.rank == 0
        reads: Iterator[MicroBatch] = iter(())
        failed: Exception | None = None
        if is_reader:
            assert self._source is not None
            try:
                reads = self._source.open(epoch, skip=skip * self._width)
            except Exception as error:
                failed = error
        return self._receive(reads, failed)

    def _receive(self, reads: Iterator[MicroBatch], failed: Exception | None) -> Iterator[MicroBatch]:
        """Each round: rank 0 sends everybody a batch, None at the end, or what went wrong: nobody waits for ever."""
        is_reader = self._ranks.rank == 0
        while True:
            parts: list[Any] = []
            if is_reader and failed is None:
                try:
                    round_of = _parts(list(islice(reads, self._width)), self._width)
                    parts = [round_of[share] for share in self._shares]
                except Exception as error:
                    failed = error
            if failed is not None:
                parts = [f"{type(failed).__name__}: {failed}"] * self._ranks.world_size
            mine: list[Any] = [None]
            torch.distributed.scatter_object_list(mine, parts if is_reader else None, src=0, group=self._group)
            if failed is not None:
                raise failed
            if isinstance(mine[0], str):
                raise RankFailed(rank=0, error=mine[0], where="reading the data")
            if mine[0] is None:
                return
            yield mine[0]


def _parts(reads: list[MicroBatch], world: int) -> list[MicroBatch | None]:
    """A round's batches. Ranks for which there is none get the first again, which counts for nothing there."""
    if not reads:
        return [None] * world
    total = sum(read.samples for read in reads)
    own = [*reads, *(replace(reads[0], samples=0) for _ in range(world - len(reads)))]
    return [replace(read, samples_of_all=total) for read in own]


def make_stream(
    dataset: Any,
    *,
    args: TrainingArguments,
    ranks: Ranks,
    device: torch.device,
    collate: Collate,
    is_training: bool,
    shares: tuple[int, ...] | None = None,
) -> Stream:
    """The stream of a data set, an iterable or a loader. Collective where there are several ranks.

    dataset: may be None on ranks that do not read, with `dispatch_batches=True`.
    shares: rank 0 reads; which batch of a round each rank gets, where some get the same. None: as `args` say.
    """
    dispatches = ranks.world_size > 1 and (shares is not None or _dispatches(dataset, args))
    is_planned = dispatches or is_map_style(dataset)
    if dispatches and ranks.rank > 0:
        return Stream(None, ranks=ranks, dispatches=True, is_planned=True, shares=shares)
    if dataset is None:
        raise UsageError(f"{'train' if is_training else 'eval'}_dataset=None: there is nothing to read")
    width = 1 if shares is None else max(shares) + 1
    readers = tuple(range(width if shares is not None else ranks.world_size)) if dispatches else (ranks.rank,)
    world = width if shares is not None else ranks.world_size
    source = _source(dataset, args, world, readers, device, collate, is_training=is_training)
    return Stream(source, ranks=ranks, dispatches=dispatches, is_planned=is_planned, shares=shares)


def is_map_style(dataset: Any) -> bool:
    """Whether samples have numbers, so that ranks can share them out without reading them."""
    return not is_loader(dataset) and is_indexed(dataset) and has_length(dataset)


def _dispatches(dataset: Any, args: TrainingArguments) -> bool:
    if args.dispatch_batches is not None:
        return args.dispatch_batches
    if is_loader(dataset):  # a sampler for several ranks says that each reads its own
        return not isinstance(getattr(dataset, "sampler", None), torch.utils.data.DistributedSampler)
    return not is_map_style(dataset)


def _source(
    dataset: Any,
    args: TrainingArguments,
    world: int,
    readers: tuple[int, ...],
    device: torch.device,
    collate: Collate,
    *,
    is_training: bool,
) -> Source:
    """world: how many shares a round has; readers: those that are read here."""
    if is_loader(dataset):
        return LoaderSource(dataset)
    batch_size = args.train_batch_size if is_training else args.eval_batch_size
    drop_last = is_training and args.dataloader_drop_last
    options = loader_options(args, device)
    if not is_map_style(dataset):
        return IterableSource(dataset, batch_size=batch_size, collate=collate, drop_last=drop_last, options=options)
    plan = BatchPlan(
        size=len(dataset),
        batch_size=batch_size,
        world_size=world,
        shuffle=is_training and args.train_sampling_strategy == "random",
        drop_last=drop_last,
        seed=args.seed if args.data_seed is None else args.data_seed,
    )
    return MapSource(dataset, plan, ranks=readers, collate=collate, options=options)
