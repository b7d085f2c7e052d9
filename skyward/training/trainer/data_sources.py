"""How the batches of an epoch are read: from a map-style data set, an iterable, or a loader that the user made.

A *source* opens an epoch at any micro-batch. What is skipped is not read where that can be: a map-style data set is
asked for what comes next only, an iterable with a state is put back to it. Others are read on to the place.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from ...errors import UsageError
from ..arguments import TrainingArguments
from ..checkpoint import RNGState
from ..events import Stateful
from .batches import BatchPlan, MicroBatch, Share, size_of

__all__ = [
    "Collate",
    "IterableSource",
    "LoaderSource",
    "MapSource",
    "Source",
    "check_datasets",
    "has_length",
    "is_indexed",
    "is_loader",
    "loader_options",
]

Collate = Callable[[list[Any]], Any]


class Source(Protocol):
    """Reads one rank's batches, or, for all ranks, those of rank 0, 1, ... of each round in turn."""

    @property
    def loader(self) -> Any:
        """What callbacks see as the data loader."""

    @property
    def length(self) -> int | None:
        """Batches that an epoch reads. None: not known."""

    def open(self, epoch: int, *, skip: int) -> Iterator[MicroBatch]:
        """An epoch from its batch `skip` on. What must be read to get there is read before this returns."""

    def state_dict(self) -> dict[str, Any]:
        """Where the data set itself is, if it can say so."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """For the next `open`, which must be of the place where the state was taken."""


class MapSource:
    """A data set with indices, by a plan. ranks: whose shares are read here, in each round."""

    def __init__(
        self, dataset: Any, plan: BatchPlan, *, ranks: tuple[int, ...], collate: Collate, options: Mapping[str, Any]
    ) -> None:
        self._plan, self._ranks = plan, ranks
        self._sampler = _Sampler(plan, ranks)
        self.loader: DataLoader[Any] = DataLoader(
            _Seeded(dataset, plan.seed),
            batch_sampler=self._sampler,  # its batches begin with their number
            collate_fn=collate,
            generator=torch.Generator(),  # or every epoch would draw a number from the global one
            **options,
        )

    @property
    def length(self) -> int | None:
        return len(self._plan) * len(self._ranks)

    def open(self, epoch: int, *, skip: int) -> Iterator[MicroBatch]:
        start = skip // len(self._ranks)
        self._sampler.epoch, self._sampler.start = epoch, start
        assert self.loader.generator is not None
        self.loader.generator.manual_seed(self._plan.seed ^ epoch)
        batches = iter(self.loader)
        counts = (
            (shares[rank].samples, sum(share.samples for share in shares))
            for shares in self._plan.rounds(epoch, start=start)
            for rank in self._ranks
        )
        return (
            MicroBatch(inputs=inputs, samples=own, samples_of_all=of_all)
            for inputs, (own, of_all) in zip(batches, counts, strict=True)
        )

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        return


class _Sampler:
    """The batches of an epoch from a round on: (epoch, number of the batch), then the indices."""

    def __init__(self, plan: BatchPlan, ranks: tuple[int, ...]) -> None:
        self._plan, self._ranks = plan, ranks
        self.epoch, self.start = 0, 0

    def __len__(self) -> int:
        return len(self._plan) * len(self._ranks)

    def __iter__(self) -> Iterator[list[Any]]:
        for number, shares in enumerate(self._plan.rounds(self.epoch, start=self.start), start=self.start):
            for rank in self._ranks:
                share: Share = shares[rank]
                yield [(self.epoch, number * self._plan.world_size + rank), *share.indices]


class _Seeded(Dataset[Any]):
    """Gives whole batches. In a worker process every batch has generators of its own, so that what is drawn for it
    (augmentation, masking) is the same however many batches that worker has made before, and after a resume.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset, self._seed = dataset, seed

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]

    def __getitems__(self, batch: list[Any]) -> list[Any]:
        (epoch, number), *indices = batch
        if get_worker_info() is not None:
            _seed_worker(hash((self._seed, epoch, number)) % 2**32)  # a hash of ints: the same in every process
        whole = getattr(self._dataset, "__getitems__", None)
        rows: list[Any] = whole(indices) if whole is not None else [self._dataset[index] for index in indices]
        return rows


def _seed_worker(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)


class IterableSource:
    """A data set that is read from its beginning. One with `state_dict` is put back to where it was; one with
    `set_epoch` is told the epoch.
    """

    def __init__(self, dataset: Any, *, batch_size: int, collate: Collate, drop_last: bool, options: Mapping[str, Any]):
        self._dataset = dataset
        self._batch_size, self._drop_last = batch_size, drop_last
        self._state: dict[str, Any] = {}
        self._begun: dict[str, Any] = {}
        self._is_over = False  # a data set may begin anew when it ends: its own state does not tell
        source = dataset if isinstance(dataset, IterableDataset) else _Iterated(dataset)
        self._has_workers = options.get("num_workers", 0) > 0
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # torchdata 0.11 on torch 2.13
            self.loader = _loader_class(self._has_workers)(
                source,
                batch_size=batch_size,
                collate_fn=collate,
                drop_last=drop_last,
                generator=torch.Generator(),
                **options,
            )

    @property
    def length(self) -> int | None:
        if not has_length(self._dataset):
            return None
        whole, rest = divmod(len(self._dataset), self._batch_size)
        return whole + (rest > 0 and not self._drop_last)

    def open(self, epoch: int, *, skip: int) -> Iterator[MicroBatch]:
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)
        self.loader.generator.manual_seed(epoch)
        state, self._state = self._state, {}
        self._is_over = bool(skip and state.get("is_over"))
        if self._is_over:
            return iter(())
        stateful = self._stateful()
        if skip and stateful is not None and "position" in state:
            stateful.load_state_dict(state["position"])
            skip = 0
        self._begun = _begin(state if skip else {})
        return self._until_it_is_over(_read_on(iter(self.loader), skip))

    def _until_it_is_over(self, reads: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        for read in reads:
            self._is_over = read.samples < self._batch_size
            yield read
        self._is_over = True

    def state_dict(self) -> dict[str, Any]:
        stateful = self._stateful()
        state = {"is_over": self._is_over, "begun": self._begun}
        return state if stateful is None else state | {"position": stateful.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self._state = dict(state_dict)

    def _stateful(self) -> Stateful | None:
        """With workers the data set of this process is not the one that is read: only the loader knows."""
        candidate = self.loader if self._has_workers else self._dataset
        return candidate if isinstance(candidate, Stateful) else None


class LoaderSource:
    """A loader that the user made, as it is. One with a state (torchdata's StatefulDataLoader) is put back to it."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._state: dict[str, Any] = {}
        self._begun: dict[str, Any] = {}
        self._generator_begun: torch.Tensor | None = None
        self._is_over = False

    @property
    def length(self) -> int | None:
        return len(self.loader) if has_length(self.loader) else None

    def open(self, epoch: int, *, skip: int) -> Iterator[MicroBatch]:
        parts: list[Any] = [self.loader, getattr(self.loader, "sampler", None), getattr(self.loader, "dataset", None)]
        for part in parts:
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        state, self._state = self._state if skip else {}, {}
        self._is_over = bool(state.get("is_over"))
        if self._is_over:
            return self._until_it_is_over(iter(()), state.get("generator"))
        if "position" in state and isinstance(self.loader, Stateful):
            self.loader.load_state_dict(state["position"])
            skip = 0
        generator = getattr(self.loader, "generator", None)
        if generator is not None and "generator_begun" in state and skip:
            generator.set_state(state["generator_begun"])
        self._generator_begun = None if generator is None else generator.get_state()
        self._begun = _begin(state if skip else {})
        reads = _read_on(iter(self.loader), skip)
        return self._until_it_is_over(reads, state.get("generator"))

    def _until_it_is_over(self, reads: Iterator[MicroBatch], then: torch.Tensor | None) -> Iterator[MicroBatch]:
        """then: the state of the loader's generator for the epochs to come. Samplers draw from it when the first batch
        is asked for, and torchdata's set it themselves.
        """
        first = next(reads, None)
        if then is not None and self.loader.generator is not None:
            self.loader.generator.set_state(then)
        if first is not None:
            yield first
            yield from reads
        self._is_over = True

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"is_over": self._is_over, "begun": self._begun}
        generator = getattr(self.loader, "generator", None)
        if generator is not None:
            state |= {"generator": generator.get_state(), "generator_begun": self._generator_begun}
        return state | {"position": self.loader.state_dict()} if isinstance(self.loader, Stateful) else state

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self._state = dict(state_dict)


class _Iterated(IterableDataset[Any]):
    """Any iterable, as torch wants it."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return iter(self._dataset)


def _begin(state: dict[str, Any]) -> dict[str, Any]:
    """The generators as they are when an epoch begins, which is where a shuffled one draws its order. With the state of
    one that began before, as they were then: what is read again is the same.
    """
    if "begun" in state:
        RNGState().load_state_dict(state["begun"])
    return RNGState().state_dict()


def _read_on(batches: Iterator[Any], skip: int) -> Iterator[MicroBatch]:
    for _ in range(skip):
        next(batches, None)
    return (MicroBatch(inputs=inputs, samples=size_of(inputs)) for inputs in batches)


def _loader_class(has_workers: bool) -> Any:
    """With workers, torchdata's StatefulDataLoader where it is installed: it knows how far they have read."""
    if has_workers:
        try:
            from torchdata.stateful_dataloader import StatefulDataLoader
        except ImportError:  # it is optional: without it batches are read again after a resume
            return DataLoader
        return StatefulDataLoader
    return DataLoader


def check_datasets(args: TrainingArguments, train_dataset: Any, eval_dataset: Any, *, reads: bool) -> None:
    """Check that the data sets are there that the arguments need. reads: this rank needs them.

    Raises: UsageError.
    """
    name = type(args).__name__
    if args.eval_strategy != "no" and eval_dataset is None and reads:
        raise UsageError(f"{name}.eval_strategy={args.eval_strategy!r}: needs an eval_dataset, or 'no'")
    if train_dataset is not None and not has_length(train_dataset) and args.max_steps <= 0:
        raise UsageError(
            f"{name}.max_steps={args.max_steps}: the train_dataset has no length, so nobody knows when an epoch "
            "ends; say how many steps, above 0"
        )


def has_length(dataset: Any) -> bool:
    """Whether `len` works: some classes have the method, and no length."""
    try:
        return len(dataset) is not None
    except (TypeError, AttributeError, NotImplementedError):  # it has no length
        return False


def is_indexed(dataset: Any) -> bool:
    """Whether samples are read by their number."""
    return hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset | Mapping)


def is_loader(dataset: Any) -> bool:
    """Whether it gives batches already: torch's DataLoader, or torchdata's."""
    return isinstance(dataset, DataLoader) or type(dataset).__name__ == "StatefulDataLoader"


def loader_options(args: TrainingArguments, device: torch.device) -> dict[str, Any]:
    """The arguments of a DataLoader that say how, not what."""
    return {
        "num_workers": args.dataloader_num_workers,
        "pin_memory": args.dataloader_pin_memory and device.type == "cuda",
        "persistent_workers": args.dataloader_persistent_workers and args.dataloader_num_workers > 0,
        "prefetch_factor": args.dataloader_prefetch_factor,
        "multiprocessing_context": args.dataloader_multiprocessing_context,
    }
