"""Updates of the global tensors in few bits, made chunk by chunk while a round closes."""

from __future__ import annotations

import math
from collections.abc import Callable, MutableMapping

import torch

from .compression import BLOCK, Compressed, compress_into
from .frames import BUFFER_PREFIX
from .tensors import short_lived

EncodeChunk = Callable[[slice, torch.Tensor, torch.Tensor], None]
"""Function that encodes the step of a chunk: its slice of the flat tensor, its old values, and its new ones.

It sets the new values to those that a receiver of the update computes.
"""


class UpdateEncoder:
    """An update in bfloat16, or in 8 or 4 bits for a value.

    The global tensors move by the rounded update, so that they and those of the workers stay equal to the bit.

    Args:
        bits: 8 or 4; 0: bfloat16, which buffers have in any case.
        residuals: Rounding errors of the last update of each parameter, with `bits`. They change in place.
    """

    def __init__(self, bits: int, residuals: MutableMapping[str, torch.Tensor]) -> None:
        self._bits, self._residuals = bits, residuals
        self.update: dict[str, torch.Tensor | Compressed] = {}
        """The update of all tensors that were begun."""

    def begin(self, name: str, shape: tuple[int, ...]) -> EncodeChunk:
        """Return a function that encodes a tensor's chunks, of which each comes once."""
        if self._bits and not name.startswith(BUFFER_PREFIX):
            return self._in_bits(name, shape)
        self.update[name] = update = short_lived(shape, torch.bfloat16)

        def encode(chunk: slice, old: torch.Tensor, new: torch.Tensor) -> None:
            rounded = update.view(-1)[chunk].copy_(new.sub_(old))
            new.copy_(rounded).add_(old)

        return encode

    def _in_bits(self, name: str, shape: tuple[int, ...]) -> EncodeChunk:
        size = math.prod(shape)
        self.update[name] = update = Compressed(
            bits=self._bits,
            shape=shape,
            codes=short_lived((-(-size * self._bits // 8),), torch.uint8),
            scales=torch.empty(-(-size // BLOCK)),
        )
        if name not in self._residuals:
            self._residuals[name] = torch.zeros(shape)
        residuals = self._residuals[name].view(-1)

        def encode(chunk: slice, old: torch.Tensor, new: torch.Tensor) -> None:
            errors = residuals[chunk]
            values = compress_into(update.part(chunk), new.sub_(old).add_(errors))
            torch.sub(new, values, out=errors)
            torch.add(old, values, out=new)

        return encode
