"""Sources of batches: a map-style data set, an iterable, or a loader that the user made.

A *source* opens an epoch at any micro-batch, and avoids reading the batches before it where it can. A map-style data
set is indexed from there on. An iterable with a state is restored to it. Anything else is read up to the place.
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

Collate = Callable[[list[Any]], Any]


class Source(Protocol):
    """Source of one rank's batches; or of all ranks' batches, those of rank 0, 1, ... of each round in turn."""

    @property
    def loader(self) -> Any:
        """Data loader that callbacks receive."""

    @property
    def length(self) -> int | None:
        """Number of batches that an epoch reads. None: not known."""

    def open(self, epoch: int, *, skip: int) -> Iterator[MicroBatch]:
        """Open an epoch at its batch `skip`. Batches that must be read to get there are read before this returns."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the data set itself, if it has one."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Keep a state for the next `open`, which must be at the place where the state was taken."""


class MapSource:
    """Source of a data set with indices, read by a plan.

    Args:
        dataset: the data set.
        plan: assignment of samples to ranks.
        ranks: ranks whose shares are read here in each round.
        collate: makes a batch of a list of rows.
        options: further arguments of the DataLoader.
    """

    def __init__(
        self, dataset: Any, plan: BatchPlan, *, ranks: tuple[int, ...], collate: Collate, options: Mapping[str, Any]
    ) -> None:
        self._plan, self._ranks = plan, ranks
        self._sampler = _Sampler(plan, ranks)
        self.loader: DataLoader[Any] = DataLoader(
            _Seeded(dataset, plan.seed),
            batch_sampler=self._sampler,  # its batches begin with their number
            collate_fn=collate,
            # Without a generator of its own, every epoch would draw a number from the global one.
            generator=torch.Generator(),
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
    """Sampler of an epoch's batches from a round on. Each batch is (epoch, number of the batch), then the indices."""

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
    """Data set that returns whole batches, with generators seeded for each batch in worker processes.

    Random numbers of a batch (augmentation, masking) then do not depend on the batches that its worker made before, so
    they are the same after a resume.
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
            _seed_worker(hash((self._seed, epoch, number)) % 2**32)  # hashes of ints are the same in every process
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
    """Source of an iterable, which is read from its beginning.

    An iterable with `state_dict` is restored to its position. `set_epoch` is called if it has one.
    """

    def __init__(self, dataset: Any, *, batch_size: int, collate: Collate, drop_last: bool, options: Mapping[str, Any]):
        self._dataset = dataset
        self._batch_size, self._drop_last = batch_size, drop_last
        self._state: dict[str, Any] = {}
        self._begun: dict[str, Any] = {}
        self._is_over = False  # kept here, because a data set may rewind at its end, and its state does not show that
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
        # Workers read copies of the data set, so with workers only the loader knows the position.
        candidate = self.loader if self._has_workers else self._dataset
        return candidate if isinstance(candidate, Stateful) else None


class LoaderSource:
    """Source of a loader that the user made. One with a state (torchdata's StatefulDataLoader) is restored to it."""

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
        """Yield all batches, and restore the state `then` of the loader's generator after the first one."""
        # Samplers draw from the generator when the first batch is read, and torchdata's set it themselves. Only after
        # that can it be set for the epochs to come.
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
    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return iter(self._dataset)


def _begin(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of all generators at the beginning of an epoch.

    A shuffled iterable draws its order from them. For an epoch that is read again, they are first restored from
    `state`, so that the order is the same.
    """
    if "begun" in state:
        RNGState().load_state_dict(state["begun"])
    return RNGState().state_dict()


def _read_on(batches: Iterator[Any], skip: int) -> Iterator[MicroBatch]:
    for _ in range(skip):
        next(batches, None)
    return (MicroBatch(inputs=inputs, samples=size_of(inputs)) for inputs in batches)


def _loader_class(has_workers: bool) -> Any:
    """Return torchdata's StatefulDataLoader for loaders with workers, because it knows how far they have read."""
    if has_workers:
        try:
            from torchdata.stateful_dataloader import StatefulDataLoader
        except ImportError:  # optional; without it, batches are read again after a resume
            return DataLoader
        return StatefulDataLoader
    return DataLoader


def check_datasets(args: TrainingArguments, train_dataset: Any, eval_dataset: Any, *, reads: bool) -> None:
    """Check that the data sets fit the arguments.

    Args:
        args: settings of the run.
        train_dataset: the training data.
        eval_dataset: the evaluation data.
        reads: whether this rank needs the data sets.

    Raises:
        UsageError: they do not.
    """
    name = type(args).__name__
    if args.eval_strategy != "no" and eval_dataset is None and reads:
        raise UsageError(
            f"{name}.eval_strategy={args.eval_strategy!r}: there is no eval_dataset; pass one to the trainer, or set "
            "eval_strategy='no'"
        )
    if train_dataset is not None and not has_length(train_dataset) and args.max_steps <= 0:
        raise UsageError(
            f"{name}.max_steps={args.max_steps}: train_dataset has no length, so the end of an epoch is unknown; set "
            "max_steps=1 or more"
        )


def has_length(dataset: Any) -> bool:
    """Return whether `len` works. Some classes have the method, but no length."""
    try:
        return len(dataset) is not None
    except (TypeError, AttributeError, NotImplementedError):
        return False


def is_indexed(dataset: Any) -> bool:
    """Return whether samples are read by index."""
    return hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset | Mapping)


def is_loader(dataset: Any) -> bool:
    """Return whether an object yields batches already: torch's DataLoader, or torchdata's."""
    return isinstance(dataset, DataLoader) or type(dataset).__name__ == "StatefulDataLoader"


def loader_options(args: TrainingArguments, device: torch.device) -> dict[str, Any]:
    """Return the arguments of a DataLoader that do not depend on the data set."""
    return {
        "num_workers": args.dataloader_num_workers,
        "pin_memory": args.dataloader_pin_memory and device.type == "cuda",
        "persistent_workers": args.dataloader_persistent_workers and args.dataloader_num_workers > 0,
        "prefetch_factor": args.dataloader_prefetch_factor,
        "multiprocessing_context": args.dataloader_multiprocessing_context,
    }
