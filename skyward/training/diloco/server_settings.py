"""Settings of a server, the same for each way to start one, and the checks of them. No framework is loaded."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace

from ...errors import UsageError
from ..evaluation.legal import check_at_least
from .algorithm import OUTER_LR, OUTER_MOMENTUM, DelayedNesterov, OuterOptimizer, OuterSGD
from .settings import check_bits

WEIGHTINGS = ("equal", "samples", "tokens")
"""Weights of the workers in the mean. Source: arXiv 1602.05629 (weights by the number of examples)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DiLoCoSettings:
    """Settings of a server; `DiLoCoServer` describes them.

    Raises:
        UsageError: A value is not legal, or does not go with the others.
    """

    num_workers: int | None = 1
    """None: as many as the call that comes first has; see `for_call`."""
    min_workers: int = 1
    outer_optimizer: OuterOptimizer | None = None
    outer_lr: float = OUTER_LR
    outer_momentum: float = OUTER_MOMENTUM
    save_dir: str | os.PathLike[str] | None = None
    save_every_n_rounds: int = 1
    heartbeat_timeout: float = 120.0
    bf16_answers: bool = False
    quantization_bits: int = 0
    async_mode: bool = False
    dn_buffer_size: int = 0
    weighting: str = "equal"

    def __post_init__(self) -> None:
        check_at_least("min_workers", self.min_workers, 1)
        if self.num_workers is not None:
            check_at_least("num_workers", self.num_workers, self.min_workers)
        check_at_least("save_every_n_rounds", self.save_every_n_rounds, 1)
        check_at_least("dn_buffer_size", self.dn_buffer_size, 0)
        check_bits("quantization_bits", self.quantization_bits)
        if self.weighting not in WEIGHTINGS:
            raise UsageError(f"weighting={self.weighting!r}: is unknown; use one of {', '.join(map(repr, WEIGHTINGS))}")
        _check_number("outer_lr", self.outer_lr, lambda lr: lr > 0, f"> 0; set {OUTER_LR}, for example")
        _check_number("outer_momentum", self.outer_momentum, lambda m: 0 <= m < 1, f"in [0, 1); set {OUTER_MOMENTUM}")
        _check_number("heartbeat_timeout", self.heartbeat_timeout, lambda s: s >= 0, ">= 0; set seconds, or 0 for none")
        (self._check_async if self.async_mode else self._check_synchronous)()
        self._check_optimizer()

    def _check_async(self) -> None:
        if self.min_workers != 1:
            raise UsageError(
                f"min_workers={self.min_workers}: each update is a round in asynchronous mode; leave it at 1"
            )
        if self.weighting != "equal":
            raise UsageError(
                f"weighting={self.weighting!r}: each update is applied alone in async_mode; leave it at 'equal'"
            )
        if self.quantization_bits:
            raise UsageError(
                f"quantization_bits={self.quantization_bits}: asynchronous answers are whole parameters; set it to 0, "
                "and use the workers' quantization_bits"
            )

    def _check_synchronous(self) -> None:
        if self.dn_buffer_size:
            raise UsageError(f"dn_buffer_size={self.dn_buffer_size}: is for asynchronous updates; set async_mode=True")

    def _check_optimizer(self) -> None:
        if self.outer_optimizer is None:
            return
        if self.dn_buffer_size:
            raise UsageError(f"dn_buffer_size={self.dn_buffer_size}: the outer_optimizer ignores it; give one of both")
        if (self.outer_lr, self.outer_momentum) != (OUTER_LR, OUTER_MOMENTUM):
            raise UsageError(
                f"outer_lr={self.outer_lr!r}, outer_momentum={self.outer_momentum!r}: the outer_optimizer ignores "
                "them; give one of both"
            )

    def for_call(self, workers: int) -> DiLoCoSettings:
        """Return the settings of a server whose first worker is in a call with that many of them."""
        return replace(self, num_workers=self.num_workers or max(workers, self.min_workers))

    def make_outer(self) -> OuterOptimizer:
        """Return the outer optimizer."""
        if self.outer_optimizer is not None:
            return self.outer_optimizer
        lr, momentum = self.outer_lr, self.outer_momentum
        if self.async_mode:
            return DelayedNesterov(lr=lr, momentum=momentum, every=self.dn_buffer_size or self.num_workers or 1)
        return OuterSGD(lr=lr, momentum=momentum, nesterov=momentum != 0)


def _check_number(field: str, value: float, is_legal: Callable[[float], bool], legal: str) -> None:
    """Raise UsageError unless a value is a finite number that is legal."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not (math.isfinite(value) and is_legal(value)):
        raise UsageError(f"{field}={value!r}: must be a finite number {legal}", field=field, value=value)
