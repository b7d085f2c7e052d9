"""How large each parameter is, and how much each matrix can stretch, at evaluations."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ...errors import UsageError
from ..agree import Alone, Ranks
from ..events import TrainerCallback
from ..parts import is_dtensor, part_of
from .jsonlog import JsonLogWriter
from .norms import can_be_measured, joined, measure, parameters_to_measure

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ParameterNormLogger", "PowerIteration", "as_matrix"]


class ParameterNormLogger(TrainerCallback):
    """Writes norms of the parameters to `parameter_norms.json` in `args.logging_dir`, at evaluations.

    Records have `norms`, the L2 norm of each parameter, and `spectral_norms`, the largest singular value of each
    with two dimensions or more; a convolution's kernel counts as the matrix (out, everything else). Spectral norms
    are estimates by power iteration, never above the truth: each goes on from where it stood at the last evaluation,
    also in a run that resumes, so they soon are exact to a fraction of a per cent.

    Rank 0 measures alone. Sharded parameters (DTensors) have their norms added up; for spectral norms every rank
    gathers one whole matrix at a time, and rank 0 goes on with it. In a pipeline every rank measures its stage, and
    rank 0 writes the whole model's.
    With parameters that have no values (meta device) it warns once and does nothing.

    log_norms: None: True.
    power_iter_steps: products with each matrix and its transpose at an evaluation, >= 1; twice as many at the first.

    Raises: UsageError for steps out of range.
    """

    on_error = "disable"
    collective_events = frozenset({"on_train_begin", "on_evaluate"})

    def __init__(
        self, log_norms: bool | None = None, log_spectral_norms: bool = True, power_iter_steps: int = 10
    ) -> None:
        if power_iter_steps < 1:
            raise UsageError(f"power_iter_steps is {power_iter_steps!r}; give 1 or more")
        self.log_norms = log_norms is not False
        self.log_spectral_norms = log_spectral_norms
        self._iteration = PowerIteration(steps=power_iter_steps)
        self._writer = JsonLogWriter("parameter_norms.json")
        self._is_off = True

    def on_train_begin(self, args: Any, state: Any, model: Any = None, ranks: Ranks | None = None, **_: Any) -> None:
        self._is_off = getattr(args, "logging_dir", None) is None
        if self._is_off:
            return
        world = ranks or Alone()
        self._is_off = not can_be_measured(model, world, who="ParameterNormLogger")
        if not self._is_off and world.rank == 0:
            self._writer.open(args.logging_dir, global_step=state.global_step)

    def on_evaluate(
        self, state: Any, model: Any = None, trainer: Any = None, ranks: Ranks | None = None, **_: Any
    ) -> None:
        if self._is_off:
            return
        world, is_part = ranks or Alone(), part_of(trainer) is not None
        parameters: dict[str, Tensor] = dict(parameters_to_measure(model, trainer, world))
        if not parameters and not is_part:
            return
        found: dict[str, Any] = {}
        if self.log_norms:
            found["norms"] = measure(parameters).values()
        if self.log_spectral_norms:
            found["spectral_norms"] = self._spectral_norms(parameters, estimates_here=is_part or world.rank == 0)
        if is_part:
            found = self._joined(world, found)
        if found:
            self._writer.write_record(state.global_step, state.epoch, found)

    def on_train_end(self, **_: Any) -> None:
        self.close()

    def close(self) -> None:
        """The file is whole as it is; this ends the use of it."""
        self._writer.close()

    def state_dict(self) -> dict[str, Any]:
        return {"writer": self._writer.state_dict(), "directions": self._iteration.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._writer.load_state_dict(state_dict["writer"])
        self._iteration.load_state_dict(state_dict["directions"])

    def _joined(self, ranks: Ranks, found: Mapping[str, Any]) -> dict[str, Any]:
        """Of the whole model. Checkpoints are rank 0's, so it gets the other stages' directions, too."""
        directions = joined(ranks, self._iteration.state_dict(found.get("spectral_norms", {})))
        if ranks.rank == 0:
            self._iteration.load_state_dict(directions)
        return {kind: joined(ranks, norms) for kind, norms in found.items()}

    def _spectral_norms(self, parameters: Mapping[str, Tensor], *, estimates_here: bool) -> dict[str, float]:
        """All estimates are started, then waited for once."""
        import torch

        estimates: dict[str, Tensor] = {}
        failure: Exception | None = None
        for name, parameter in parameters.items():
            if parameter.ndim < 2 or parameter.numel() == 0 or parameter.is_complex():
                continue
            matrix = _whole(parameter)
            if not estimates_here or failure is not None:
                continue  # the other ranks gather what is left of the matrices with this one, whatever happens here
            try:
                estimates[name] = self._iteration.estimate(name, as_matrix(matrix))
            except Exception as error:
                failure = error
        if failure is not None:
            raise failure
        if not estimates:
            return {}
        device = next(iter(estimates.values())).device
        values = torch.stack([estimate.to(device, torch.float32, non_blocking=True) for estimate in estimates.values()])
        return dict(zip(estimates, values.tolist(), strict=True))


def _whole(parameter: Any) -> Tensor:
    detached = parameter.detach()
    return detached.full_tensor() if is_dtensor(parameter) else detached  # type: ignore[no-any-return]


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
