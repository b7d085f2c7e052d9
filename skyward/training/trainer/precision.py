"""Deterministic algorithms, mixed precision, and clipping of gradients."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from typing import Any

import torch

from ..arguments import TrainingArguments
from .world import full

_SETTINGS = {
    "CUDA_LAUNCH_BLOCKING": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":16:8",
    "ASCEND_LAUNCH_BLOCKING": "1",
    "HCCL_DETERMINISTIC": "1",
    "FLASH_ATTENTION_DETERMINISTIC": "1",
}
"""Environment variables of device libraries. Source: transformers 5.23, enable_full_determinism."""


class Precision:
    """Autocast to bf16 or fp16, the latter with a scaled loss. Its state is the scaler's, or empty."""

    def __init__(self, args: TrainingArguments, device: torch.device) -> None:
        self._device = device
        self._dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
        self._scaler: torch.amp.GradScaler | None = None
        self.restart()

    def restart(self) -> None:
        """Reset the scaler for a new training."""
        self._scaler = torch.amp.GradScaler(self._device.type) if self._dtype is torch.float16 else None

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context for forward and loss, in evaluation too."""
        if self._dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, dtype=self._dtype)

    def backward(self, loss: torch.Tensor) -> None:
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()

    def clip(
        self, optimizer: torch.optim.Optimizer, parameters: Iterable[torch.nn.Parameter], max_norm: float
    ) -> torch.Tensor:
        """Scale gradients down to `max_norm` (0: leave them). Return their norm before: (), on the device, no sync."""
        self.unscale(optimizer)
        trained = [parameter for parameter in parameters if parameter.grad is not None]
        if max_norm > 0:
            return full(torch.nn.utils.clip_grad_norm_(trained, max_norm))
        return full(torch.nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None]))

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the loss scale. Call it once per step."""
        if self._scaler is not None:
            self._scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Run the optimizer's step. Return whether it was made: fp16 skips a step whose gradients overflowed."""
        if self._scaler is None:
            optimizer.step()
            return True
        before = self._scaler.get_scale()
        self._scaler.step(optimizer)
        self._scaler.update()
        # The scaler does not report a skipped step. It lowers its scale after one, and only then.
        return self._scaler.get_scale() >= before

    def state_dict(self) -> dict[str, Any]:
        return {} if self._scaler is None else self._scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        if self._scaler is not None and state_dict:
            self._scaler.load_state_dict(state_dict)


def make_deterministic(args: TrainingArguments) -> None:
    """Restrict torch to deterministic algorithms in this process, with `full_determinism`.

    An operation without one then raises a RuntimeError that names it.
    """
    # Called before a device is used, because device libraries read the environment only once.
    if args.full_determinism:
        os.environ.update(_SETTINGS)
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
