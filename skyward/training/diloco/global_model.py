"""`GlobalModel`: the parameters that all workers share, and the outer step that moves them when a round closes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from .algorithm import DelayedNesterov, OuterOptimizer, OuterSGD
from .compression import CHUNK, Compressed
from .delta_means import DeltaMeans
from .frames import BUFFER_PREFIX
from .tensors import short_lived
from .update_encoder import UpdateEncoder


class GlobalModel:
    """Tensors in float32 on the CPU, with their outer optimizer. The caller holds a lock.

    A step goes through them chunk by chunk: mean of the deltas, outer step, and answer, while the chunk is in the
    processor's cache. A tensor itself never changes. A step puts a new one in its place, so a reader of the old one is
    not disturbed, and a second model is never needed.

    Args:
        outer: Outer optimizer of the parameters.
        bits: Bits of a value in updates, 8 or 4; 0: bfloat16.
        kept_buffers: Number of rounds whose buffers are kept, because deltas are relative to them.
    """

    def __init__(self, outer: OuterOptimizer, *, bits: int, kept_buffers: int) -> None:
        self.tensors: dict[str, torch.Tensor] | None = None
        """Parameters, and buffers under `BUFFER_PREFIX`; None until `take`. A reader without a lock needs a copy."""
        self.outer = outer
        self.residuals: dict[str, torch.Tensor] = {}
        """Rounding errors of the last updates, with `bits`."""
        self._bits, self._kept = bits, kept_buffers
        self._buffers: dict[int, dict[str, torch.Tensor]] = {}

    def take(self, tensors: Mapping[str, torch.Tensor], round_number: int) -> None:
        """Take over tensors as those of a round. Nothing may change them afterwards."""
        self.tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        self.remember_buffers(round_number)

    def restore(
        self,
        tensors: Mapping[str, torch.Tensor],
        outer: Mapping[str, Any],
        residuals: Mapping[str, torch.Tensor],
        round_number: int,
    ) -> None:
        """Take over the state of a save at the beginning of a round."""
        self.take(tensors, round_number)
        self.outer.load_state_dict(outer)
        self.residuals = dict(residuals) if self._bits else {}

    def remember_buffers(self, round_number: int) -> None:
        """Keep the present buffers as those of a round, and forget the oldest."""
        tensors = self.tensors or {}
        self._buffers[round_number] = {name: tensors[name] for name in tensors if name.startswith(BUFFER_PREFIX)}
        self._buffers.pop(round_number - self._kept, None)

    def step(
        self, means: DeltaMeans, *, buffer_round: int, buffer_share: float, is_rounded: bool
    ) -> dict[str, torch.Tensor | Compressed] | None:
        """Take an outer step with the mean of deltas.

        Args:
            means: The mean, of all tensors or some.
            buffer_round: Round whose buffers the deltas are relative to. Without them, buffers stay as they are.
            buffer_share: Weight of the deltas' buffers, above 0 and at most 1.
            is_rounded: Whether to move by an update that is rounded for the wire.

        Returns:
            That update; None if it is not rounded.
        """
        assert self.tensors is not None
        encoder = UpdateEncoder(self._bits, self.residuals) if is_rounded else None
        buffers = self._buffers.get(buffer_round, {})
        # Only these two are known to step chunk by chunk. Any other optimizer may look at all gradients at once.
        whole = {} if type(self.outer) in (OuterSGD, DelayedNesterov) else self._stepped(means)
        for name, shape in means.shapes.items():
            old = self.tensors[name]
            new = whole.pop(name, None)
            if new is not None:
                moved = _chunks_of(new)
            elif name.startswith(BUFFER_PREFIX):
                new = short_lived(shape)
                moved = _buffer_moved(means, name, old, new, buffers.get(name), buffer_share)
            else:
                new = short_lived(shape)
                moved = self._parameter_moved(means, name, old, new)
            encode = None if encoder is None else encoder.begin(name, shape)
            for chunk in moved:
                if encode is not None:
                    encode(chunk, old.view(-1)[chunk], new.view(-1)[chunk])
            self.tensors[name] = new
        return None if encoder is None else encoder.update

    def _parameter_moved(self, means: DeltaMeans, name: str, old: torch.Tensor, new: torch.Tensor) -> Iterator[slice]:
        """Set the new values of a parameter, and return each chunk after its step."""
        assert isinstance(self.outer, OuterSGD | DelayedNesterov)
        step = self.outer.begin(name, old)
        for chunk, mean in means.chunks(name):
            step(chunk, new.view(-1)[chunk].copy_(old.view(-1)[chunk]), mean)
            yield chunk

    def _stepped(self, means: DeltaMeans) -> dict[str, torch.Tensor]:
        """Return the parameters after a step of any optimizer, which needs whole gradients."""
        assert self.tensors is not None
        gradients, stepped = {}, {}
        for name, shape in means.shapes.items():
            if not name.startswith(BUFFER_PREFIX):
                gradients[name], stepped[name] = torch.empty(shape), self.tensors[name].clone()
                for chunk, mean in means.chunks(name):
                    gradients[name].view(-1)[chunk] = mean
        self.outer.step({**self.tensors, **stepped}, gradients)
        return stepped


def _buffer_moved(
    means: DeltaMeans, name: str, old: torch.Tensor, new: torch.Tensor, base: torch.Tensor | None, share: float
) -> Iterator[slice]:
    """Set the new values of a buffer, and return each chunk."""
    new.copy_(old)
    for chunk, mean in means.chunks(name):
        if base is not None:
            new.view(-1)[chunk].lerp_(base.view(-1)[chunk] - mean, share)
        yield chunk


def _chunks_of(tensor: torch.Tensor) -> Iterator[slice]:
    return (slice(begin, begin + CHUNK) for begin in range(0, math.prod(tensor.shape), CHUNK))
