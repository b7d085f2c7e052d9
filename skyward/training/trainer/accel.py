"""Training with Hugging Face Accelerate: its processes, precision and wrappers in our loop."""

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


class AccelTrainer(Trainer):
    """`Trainer` whose model and optimizer are prepared by an `accelerate.Accelerator`.

    The trainer reads the batches itself, not Accelerate, so a run still resumes bit for bit. Callbacks receive the
    `AcceleratedOptimizer`. `Trainer` and `AccelTrainer` read each other's checkpoints. A save does not compare the
    optimizers of the ranks, because their wrappers have different states.

    Args:
        model: as for `Trainer`.
        args: as for `Trainer`.
        accelerator: an Accelerator for one process, or for several with the same model (DDP), with
            `gradient_accumulation_steps=1`. None: make one from `args` (`bf16`, `fp16`, `use_cpu`, `ddp_*`); it joins
            an open process group, or opens that of `accelerate launch`.
        **options: as for `Trainer`.

    Raises:
        UsageError: as for `Trainer`, or the accelerator uses DeepSpeed, FSDP or Megatron.

    Example:
        Train with an accelerator of your own::

            trainer = AccelTrainer(model, args, accelerator=Accelerator(mixed_precision="bf16"), train_dataset=data)
            trainer.train()
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
                f"AccelTrainer: the accelerator has {self.accelerator.num_processes} processes, but torch's process "
                f"group has {ranks.world_size}; set WORLD_SIZE, RANK and LOCAL_RANK, and on CPUs "
                "ACCELERATE_USE_CPU=true or Accelerator(cpu=True), or use @sky.integrations.accelerate, which sets all "
                "of them"
            )
        return ranks

    def _check_accelerator(self) -> None:
        kind = str(self.accelerator.distributed_type.value)
        if kind != "NO" and not kind.startswith("MULTI_"):
            raise UsageError(
                f"accelerator.distributed_type={kind}: AccelTrainer supports one process, or several with the same "
                "model; use Trainer with a model sharded by torch's fully_shard instead"
            )
        accumulates = self.accelerator.gradient_accumulation_steps
        if accumulates != 1:
            raise UsageError(
                f"accelerator.gradient_accumulation_steps={accumulates}: must be 1; set it in TrainingArguments instead"
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
    """Precision by Accelerate. Its state is that of the accelerator's scaler."""

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
        # Without GPUs, cpu=True is needed too, or each rank would take itself for the only process.
        cpu=args.use_cpu or not torch.cuda.is_available(),
        kwargs_handlers=[DistributedDataParallelKwargs(**ddp_options(args))],
    )
