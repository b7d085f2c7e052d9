"""Replies of an exchange to a worker: where it stands in the rounds, and the parameters from which it goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from .compression import Compressed
from .dealing import Deal


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """Place of a worker in the rounds."""

    round: int
    """The open round."""
    is_awaited: bool
    """Whether the worker is a member of it, and has not submitted. Then it trains from the round's parameters."""
    has_model: bool
    """Whether there are global parameters. Without, the first worker offers its own."""
    keeps_delta: bool = False
    """Whether a delta for the base round that the worker named would count."""
    is_async: bool = False
    """Whether no worker waits for another. Then a worker's fragments take turns by the numbers of its updates."""
    local_steps: int | None = None
    """Advised inner steps of the worker's next rounds, if it has asked for advice (DyLU)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GlobalParameters:
    """Parameters from which a worker goes on."""

    round: int
    kind: Literal["parameters", "update"]
    """`parameters`: the values of the round. `update`: what to add to those of the round before, compressed."""
    tensors: Mapping[str, torch.Tensor | Compressed]
    """All tensors, or those of the fragment that the worker has sent."""
    is_counted: bool = True
    """Whether the worker's delta is in the mean."""
    warning: str = ""
    """Sentence for the worker's log."""
    deal: Deal | None = None
    """Rows of the round, by worker; None if they are not dealt."""
