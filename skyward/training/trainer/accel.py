"""Training through Hugging Face Accelerate: its processes, precision, wrapped model and optimizer; our loop."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...errors import UsageError
from ..agree import Ranks
from ..arguments import TrainingArguments
from ..checkpoint import SharingPattern, StateComponent
from .precision import Precision
from .trainer import Trainer
from .world import ddp_options

__all__ = ["AccelTrainer"]


class AccelTrainer(Trainer):
    """A `Trainer` whose model and optimizer are prepared by an `accelerate.Accelerator`.

    accelerator: the user's own, for one process or several that hold the same model (DDP); None: one that is made from
        `args` (`bf16`, `fp16`, `use_cpu`, `ddp_*`), which takes a process group that is open as its own, and opens that
        of `accelerate launch`. Its `gradient_accumulation_steps` must be 1: the Trainer accumulates.

    Everything else is as in `Trainer`: batches are read by ours, so that a run goes on to the bit. Callbacks see the
    `AcceleratedOptimizer`. A checkpoint is the same as a `Trainer`'s, and either reads the other's; the optimizers of
    ranks are not compared when it is saved, since their wrappers have states of their own.

    Raises: UsageError, also for an accelerator of DeepSpeed, FSDP or Megatron.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        *,
        accelerator: Any = None,
        **options: Any,
    ) -> None:
        self.accelerator = accelerator
        super().__init__(model, args, **options)

    def _make_ranks(self) -> Ranks:
        if self.accelerator is None:
            self.accelerator = _accelerator_for(self.args)
        self._check_accelerator()
        ranks = super()._make_ranks()
        if ranks.world_size != self.accelerator.num_processes:
            raise UsageError(
                f"AccelTrainer: its accelerator has {self.accelerator.num_processes} processes, and torch's process "
                f"group {ranks.world_size}; it looks for WORLD_SIZE, RANK and LOCAL_RANK, and on the CPU for "
                "ACCELERATE_USE_CPU=true or Accelerator(cpu=True); @sky.integrations.accelerate sets all of them"
            )
        return ranks

    def _check_accelerator(self) -> None:
        kind = str(self.accelerator.distributed_type.value)
        if kind != "NO" and not kind.startswith("MULTI_"):
            raise UsageError(
                f"AccelTrainer: accelerator.distributed_type={kind}: one process, or several with the same model, are "
                "supported; shard a model by torch's fully_shard and give it to Trainer instead"
            )
        accumulates = self.accelerator.gradient_accumulation_steps
        if accumulates != 1:
            raise UsageError(
                f"AccelTrainer: accelerator.gradient_accumulation_steps={accumulates}: must be 1; set it in the "
                "TrainingArguments"
            )

    def _make_device(self) -> torch.device:
        device: torch.device = self.accelerator.device
        return device

    def _make_precision(self) -> Precision:
        return _AcceleratedPrecision(self.args, self.device, self.accelerator)

    def _wrap(self) -> None:
        from accelerate.optimizer import AcceleratedOptimizer

        self.model_wrapped = self.accelerator.prepare_model(self.model_wrapped)
        if not isinstance(self.optimizer, AcceleratedOptimizer):
            self.optimizer = self.accelerator.prepare_optimizer(self.optimizer)

    def _component(self, key: str, stateful: Any, pattern: SharingPattern) -> StateComponent:
        is_compared = pattern is SharingPattern.REPLICATED and key == "model"
        return StateComponent(key, stateful, pattern, validate_replication=is_compared)


class _AcceleratedPrecision(Precision):
    """What Accelerate does to losses and gradients. Its state is that of the accelerator's scaler."""

    def __init__(self, args: TrainingArguments, device: torch.device, accelerator: Any) -> None:
        self._accelerator = accelerator
        super().__init__(args, device)

    def restart(self) -> None:
        self._scaler = self._accelerator.scaler

    def autocast(self) -> Any:
        return self._accelerator.autocast()

    def backward(self, loss: torch.Tensor) -> None:
        self._accelerator.backward(loss)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        self._accelerator.unscale_gradients(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        optimizer.step()
        return not getattr(optimizer, "step_was_skipped", False)


def _accelerator_for(args: TrainingArguments) -> Any:
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs

    precision = "bf16" if args.bf16 else "fp16" if args.fp16 else "no"
    return Accelerator(
        mixed_precision=precision,
        # A world without accelerators is one too: each rank would believe that it is alone.
        cpu=args.use_cpu or not torch.cuda.is_available(),
        kwargs_handlers=[DistributedDataParallelKwargs(**ddp_options(args))],
    )
