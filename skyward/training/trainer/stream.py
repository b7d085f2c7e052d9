"""Stream of this rank's micro-batches: read here, or read by rank 0 and sent to all ranks."""

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


class Stream:
    """Stream of micro-batches, epoch by epoch, from any position. Its state is that of the source.

    Args:
        source: reads this rank's batches. With `dispatches` it reads every rank's batches on rank 0, and is None
            elsewhere.
        ranks: ranks of the run.
        dispatches: rank 0 reads for all ranks.
        is_planned: all ranks read the same number of batches, without an exchange.
        shares: batch of a round that each rank receives, with `dispatches`; None: each its own.

    Attributes:
        rounds: micro-batches in an epoch; None: not known.
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
        """Data loader that callbacks receive; None on ranks that do not read."""
        return None if self._source is None else self._source.loader

    @property
    def sharing_pattern(self) -> SharingPattern:
        """Sharing pattern of the state: global if one rank reads, else one state per rank."""
        is_one = self._dispatches or self._ranks.world_size == 1
        return SharingPattern.GLOBAL if is_one else SharingPattern.PER_RANK

    def open(self, epoch: int, *, skip: int) -> None:
        """Go to micro-batch `skip` of an epoch."""
        if self._dispatches:
            self._batches = self._handed_out(epoch, skip)
            return
        assert self._source is not None
        batches = self._source.open(epoch, skip=skip)
        is_alone = self._ranks.world_size == 1
        self._batches = (replace(batch, samples_of_all=batch.samples) for batch in batches) if is_alone else batches

    def take(self, count: int) -> list[MicroBatch]:
        """Return the next `count` micro-batches; fewer at the end of the epoch, the same number on every rank."""
        batches = list(islice(self._batches, count))
        if self._ranks.world_size == 1 or self._dispatches:
            return batches
        # Without a plan, ranks may run out of data at different steps. A rank with more batches drops them, because the
        # gradient all-reduce of its next step would wait for the others forever.
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
        """Yield the batches that rank 0 sends: one per round and rank, then None, or an error as text.

        Rank 0 sends its error before it raises, so no rank waits forever.
        """
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
            received: list[Any] = [None]
            torch.distributed.scatter_object_list(received, parts if is_reader else None, src=0, group=self._group)
            if failed is not None:
                raise failed
            if isinstance(received[0], str):
                raise RankFailed(rank=0, error=received[0], where="reading the data")
            if received[0] is None:
                return
            yield received[0]


def _parts(reads: list[MicroBatch], world: int) -> list[MicroBatch | None]:
    """Return a round's batches. Ranks without one get the first again, with weight 0."""
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
    """Make the stream of a data set, an iterable or a loader. Collective.

    Args:
        dataset: the data; may be None on ranks that do not read, with `dispatch_batches=True`.
        args: settings of the run.
        ranks: ranks of the run.
        device: this rank's device.
        collate: makes a batch of a list of rows.
        is_training: whether the data is for training, or for evaluation.
        shares: batch of a round that each rank receives from rank 0, where several receive the same; None: `args`
            decides who reads.

    Raises:
        UsageError: a rank that reads has no data set, or rank 0 reads for all from a loader that deals rows to ranks.
    """
    dispatches = ranks.world_size > 1 and (shares is not None or _dispatches(dataset, args))
    is_planned = dispatches or is_map_style(dataset)
    if dispatches and ranks.rank > 0:
        return Stream(None, ranks=ranks, dispatches=True, is_planned=True, shares=shares)
    if dataset is None:
        name = "train_dataset" if is_training else "eval_dataset"
        raise UsageError(f"{name}=None: this rank has no data to read; pass a {name}")
    width = 1 if shares is None else max(shares) + 1
    readers = tuple(range(width if shares is not None else ranks.world_size)) if dispatches else (ranks.rank,)
    world = width if shares is not None else ranks.world_size
    source = _source(dataset, args, world, readers, device, collate, is_training=is_training)
    return Stream(source, ranks=ranks, dispatches=dispatches, is_planned=is_planned, shares=shares)


def is_map_style(dataset: Any) -> bool:
    """Return whether samples have indices, so that ranks can share them out without reading them."""
    return not is_loader(dataset) and is_indexed(dataset) and has_length(dataset)


def _dispatches(dataset: Any, args: TrainingArguments) -> bool:
    sampler = getattr(dataset, "sampler", None)
    is_dealt = getattr(sampler, "is_dealt_to_ranks", False)
    if is_dealt and args.dispatch_batches:
        raise UsageError(
            f"dispatch_batches=True: {type(sampler).__name__} deals each rank a share of the rows, and rank 0 would "
            "read only its own, for all ranks; set dispatch_batches=False"
        )
    if args.dispatch_batches is not None:
        return args.dispatch_batches
    if is_loader(dataset):  # with a DistributedSampler, too, each rank reads its own batches
        return not (is_dealt or isinstance(sampler, torch.utils.data.DistributedSampler))
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
    """Make the source of a data set; a round has `world` shares, of which this process reads `readers`."""
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
