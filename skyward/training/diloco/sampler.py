"""`DiLoCoSampler`: reads the rows that each round deals to this worker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from ...errors import UsageError
from .callback import DiLoCoCallback
from .worker import DiLoCoWorker


class DiLoCoSampler(Sampler[int]):
    """Sampler for any `DataLoader` of torch: the workers of a server read different rows, and share each epoch.

    Give it to the loader of each worker, with the same data set and the same seed. In each round the server tells its
    members and the place in the epoch, and each member reads every K-th row from there. So no row is read twice in an
    epoch, also when workers join or leave. A worker that joins reads on where the others are. Rows that a slower or
    lost worker did not reach in its round are skipped in that epoch.

    Without a server it reads all rows. In a process group each rank reads other rows, so let each rank have its own
    loader: `dispatch_batches=False` for `DDPTrainer`.

    Iterating goes on where the last iteration ended, across epochs and rounds. The position is in the worker's
    checkpoint too, so a resumed run reads the same rows again. Tell a trainer that skips batches after a resume not to
    do so: `ignore_data_skip=True` for ours and for Hugging Face's. Rows that the loader's processes had read ahead are
    then skipped.

    A round relies on answers that come in time. If the server does not answer, a worker reads on, and others may read
    those rows again. In `async_mode` there are no rounds, so the sampler refuses it.

    Args:
        data_source: Data set, or any object with its length.
        worker: `DiLoCoWorker` or `DiLoCoCallback` of this process.
        shuffle: Read each epoch in another random order.
        seed: Seed of the orders, the same for all workers.
        num_workers: Workers by which an epoch is divided for `len`; None: those of the present round. Trainers ask for
            the length before they begin, when no round is known. So set it, or `max_steps`.

    Raises:
        UsageError: The data set is empty, or an argument is not legal.

    Example:
        >>> from skyward.training.diloco import DiLoCoCallback
        >>> callback = DiLoCoCallback(sync_every=100)
        >>> sampler = DiLoCoSampler(range(6), callback, seed=1, num_workers=2)
        >>> loader = torch.utils.data.DataLoader(range(6), batch_size=2, sampler=sampler)
        >>> len(sampler)
        3
    """

    is_dealt_to_ranks = True
    """Each rank has rows of its own, so a trainer whose rank 0 reads for all refuses the sampler."""

    def __init__(
        self,
        data_source: Sized,
        worker: DiLoCoWorker | DiLoCoCallback,
        *,
        shuffle: bool = True,
        seed: int = 0,
        num_workers: int | None = None,
    ) -> None:
        if len(data_source) == 0:
            raise UsageError("data_source: has no rows; pass one with at least one row")
        if num_workers is not None and (isinstance(num_workers, bool) or num_workers < 1):
            raise UsageError(f"num_workers={num_workers!r}: must be a whole number >= 1; leave it out, for example")
        self._rows, self._worker = len(data_source), worker
        self._shuffle, self._seed, self._num_workers = shuffle, seed, num_workers
        self._order: tuple[int, torch.Tensor] | None = None
        """An epoch, and its order."""

    def __len__(self) -> int:
        """Return the rows of this process in an epoch, at least one."""
        workers = self._num_workers or self._worker.hand.workers
        return max(1, self._rows // workers)

    def __iter__(self) -> Iterator[int]:
        for _ in range(len(self)):
            yield self._row(self._worker.hand.draw())

    def _row(self, position: int) -> int:
        epoch, place = divmod(position, self._rows)
        if not self._shuffle:
            return place
        if self._order is None or self._order[0] != epoch:
            generator = torch.Generator().manual_seed(self._seed + epoch)
            self._order = epoch, torch.randperm(self._rows, generator=generator)
        return int(self._order[1][place])

    def state_dict(self) -> dict[str, Any]:
        """Return the position, as values for JSON. It is part of the worker's state too."""
        return self._worker.hand.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue at a position that `state_dict` returned."""
        self._worker.hand.load_state_dict(state_dict)
