"""A worker of several ranks: rank 0 talks to the server, and the others get its parameters by the process group.

The ranks have whole copies of the model (DDP) or shards of it (`fully_shard`); see `rank_tensors`.

Each rank counts the steps by a schedule of its own, so ranks meet only where parameters may have changed. Rank 0's
place in the schedule travels with them. With DyLU, rank 0 follows advice at those places only, so it travels too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from ...errors import UsageError
from ..parts import unwrapped
from .dealing import Hand
from .rank_tensors import RankTensors
from .schedule import SyncSchedule
from .tensors import in_rounds, refuse_deepspeed
from .worker import DiLoCoWorker, innermost


class WorkerOfRanks:
    """Worker whose model is on all ranks of the default process group, with a copy on each, or in shards.

    Each rank makes one, and calls each method at the same step.

    Args:
        model: Model that is trained.
        optimizer: Its optimizer; None: the loop calls `count_step` after each step.
        server_addr: Address of the server.
        options: Options of `DiLoCoWorker`.

    Raises:
        UsageError: An option is not legal, or the model is sharded by other means than `fully_shard`.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, server_addr: str, **options: Any
    ) -> None:
        refuse_deepspeed(model, optimizer)
        self._tensors = RankTensors(unwrapped(model))
        self._optimizer = innermost(optimizer)
        is_leader = dist.get_rank() == 0
        self._leader = DiLoCoWorker(self._tensors.whole, None, server_addr, **options) if is_leader else None
        self._schedule = SyncSchedule(
            sync_every=options["sync_every"],
            num_fragments=options["num_fragments"],
            delay=options["fragment_sync_delay"],
        )
        self._hook: Any = None
        self.hand = Hand()
        """Rows of this rank, for a `DiLoCoSampler`."""

    @property
    def sync_metrics(self) -> dict[str, float]:
        """Metrics of rank 0; none on the others."""
        return {} if self._leader is None else self._leader.sync_metrics

    def start(self) -> None:
        """Join, and load the global parameters; see `DiLoCoWorker.start`. All ranks raise the same error.

        Raises:
            UsageError: As there, or the ranks have different models, such as the stages of a pipeline.
        """
        layouts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(layouts, [(name, tuple(tensor.shape)) for name, tensor in self._tensors.own.items()])
        if any(layout != layouts[0] for layout in layouts):
            raise UsageError(
                "model: differs between the ranks of its process group, as the stages of a pipeline do; use DDP or "
                "fully_shard (FSDP2) inside a worker"
            )
        self.hand.split(dist.get_rank(), dist.get_world_size())
        self._tensors.gather(self._tensors.own)
        error: list[str | None] = [None]
        if self._leader is not None:
            self._leader.hand = self.hand
            try:
                self._leader.start()
            except UsageError as refusal:
                error = [str(refusal)]
        dist.broadcast_object_list(error)
        if error[0] is not None:
            raise UsageError(error[0])
        self._share(self._tensors.own)
        self._tensors.watch()
        if self._optimizer is not None:
            self._hook = self._optimizer.register_step_post_hook(lambda *_: self.count_step())

    def count_step(self) -> None:
        """Count an inner step. Where the schedule sends or applies, take over the parameters of rank 0 then.

        Raises:
            UsageError: The ranks do not train as one.
        """
        acts = bool(self._schedule.advance())
        if acts:
            self._tensors.check_together()
            self._tensors.gather(in_rounds(self._tensors.own))
        if self._leader is not None:
            self._leader.count_step()
        if acts:
            self._share(in_rounds(self._tensors.own))

    def count_tokens(self, tokens: int) -> None:
        """Count tokens of this rank. Those of rank 0 stand for all; see `DiLoCoWorker.count_tokens`."""
        if self._leader is not None:
            self._leader.count_tokens(tokens * dist.get_world_size())

    def count_loss(self, loss: float | torch.Tensor) -> None:
        """Count a loss of this rank. That of rank 0 stands for all; see `DiLoCoWorker.count_loss`."""
        if self._leader is not None:
            self._leader.count_loss(loss)

    def finish(self) -> None:
        """Apply a fragment on its way; see `DiLoCoWorker.finish`."""
        self._tensors.gather(in_rounds(self._tensors.own))
        if self._leader is not None:
            self._leader.finish()
        self._share(in_rounds(self._tensors.own))

    def stop(self) -> None:
        """Leave the server, and count no more steps. It does not wait for other ranks. Idempotent."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if self._leader is not None:
            self._leader.stop()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of rank 0; nothing on the others."""
        return {} if self._leader is None else self._leader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a state that rank 0 returned."""
        if self._leader is not None:
            self._leader.hand = self.hand
            self._leader.load_state_dict(state)

    def _share(self, names: Iterable[str]) -> None:
        """Give some of rank 0's tensors, its place in the schedule, and its deal of rows to all ranks."""
        places: list[Any] = [None, None]
        if self._leader is not None:
            places = [self._leader.state_dict()["schedule"], self.hand.state_dict()]
        dist.broadcast_object_list(places)
        self._schedule.load_state_dict(places[0])
        if self._leader is None:
            self.hand.load_state_dict(places[1])
        self._tensors.share(names)
