"""Spectral norms, the largest singular values of matrices, by power iteration from where it stood the last time."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["PowerIteration", "as_matrix"]


def as_matrix(weight: Tensor) -> Tensor:
    """A weight as the matrix (outputs, rest): a convolution's kernel (out, in, *window) has its window in the rest."""
    return weight.flatten(1)


class PowerIteration:
    """Estimates of the largest singular values of matrices that change little from one time to the next.

    Each step multiplies a direction by the matrix and its transpose, which turns it towards the largest singular
    vector: the error falls as (second / first singular value)^4 a step. The direction is kept by the matrix's name;
    the first time it is random (the same for a name everywhere) and takes twice the steps. An estimate is never above
    the norm but for rounding. An estimate waits for the device the first time only, for the direction to get there.

    steps: of each estimate, >= 1.
    """

    def __init__(self, *, steps: int) -> None:
        self.steps = steps
        self._directions: dict[str, Tensor] = {}

    def estimate(self, name: str, matrix: Tensor) -> Tensor:
        """The norm of `matrix`: (rows, columns), any real dtype. Gives a scalar on its device."""
        import torch

        matrix = matrix.detach()
        matrix = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T  # the shorter side's direction is kept
        matrix = matrix if matrix.dtype == torch.float64 else matrix.float()
        direction, is_first = self._direction(name, matrix)
        norm = matrix.new_zeros(())
        for _ in range(self.steps * 2 if is_first else self.steps):
            across = matrix @ direction
            across = across / across.norm().clamp_min(torch.finfo(matrix.dtype).tiny)
            turned = matrix.T @ across
            norm = turned.norm()
            # A matrix of zeros, or with a NaN, tells no direction: the old one stays, for when it is neither.
            direction = torch.where(norm.isfinite() & (norm > 0), turned / norm, direction)
        self._directions[name] = direction
        return norm

    def _direction(self, name: str, matrix: Tensor) -> tuple[Tensor, bool]:
        import torch

        size = matrix.shape[1]
        kept = self._directions.get(name)
        if kept is not None and kept.shape == (size,):
            return kept.to(device=matrix.device, dtype=matrix.dtype), False
        # A generator of its own: the run's random numbers are the same with and without this.
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        fresh = torch.randn(size, generator=generator, dtype=torch.float64)
        return (fresh / fresh.norm()).to(device=matrix.device, dtype=matrix.dtype), True

    def state_dict(self, names: Collection[str] | None = None) -> dict[str, Any]:
        """The directions of all matrices, or of those with these names, as text (base64 of little-endian floats): it
        fits any checkpoint, also one that is JSON.
        """
        return {
            name: {"dtype": str(each.dtype).removeprefix("torch."), "values": _as_text(each)}
            for name, each in self._directions.items()
            if names is None or name in names
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._directions = {name: _from_text(item["values"], item["dtype"]) for name, item in state.items()}


def _as_text(vector: Tensor) -> str:
    values = vector.detach().cpu().numpy()
    return base64.b64encode(values.astype(values.dtype.newbyteorder("<")).tobytes()).decode("ascii")


def _from_text(text: str, dtype: str) -> Tensor:
    import torch

    # A copy: what frombuffer gives of bytes cannot be written to.
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=getattr(torch, dtype)).clone()
