"""Norms and spectral norms of each parameter, logged at evaluations."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from ...errors import UsageError
from ..agree import Alone, Ranks
from ..events import TrainerCallback
from ..parts import is_dtensor, part_of
from .jsonlog import JsonLogWriter
from .norms import can_be_measured, joined, measure, parameters_to_measure

if TYPE_CHECKING:
    from torch import Tensor


class ParameterNormLogger(TrainerCallback):
    """Write norms of the parameters to `parameter_norms.json` at evaluations.

    The file is in `args.logging_dir`; without one the callback does nothing. Each record has `norms`, the L2 norm by
    parameter name, and `spectral_norms`, the largest singular value of each parameter with two dimensions or more. A
    convolution kernel counts as the matrix (out channels, everything else).

    Spectral norms are estimates by power iteration, never above the true value. Each continues from the last
    evaluation, also in a resumed run, so they soon agree to a fraction of a percent.

    Rank 0 measures alone. Norms of sharded parameters (DTensors) are summed over ranks. For spectral norms the ranks
    gather one whole matrix at a time for rank 0. In a pipeline every rank measures its stage, and rank 0 writes the
    whole model's norms. The callback warns once and turns itself off if parameters are on the meta device.

    Args:
        log_norms: write `norms`; None means True.
        log_spectral_norms: write `spectral_norms`.
        power_iter_steps: products with each matrix and its transpose per evaluation, at least 1; doubled at the first.

    Raises:
        UsageError: `power_iter_steps` is below 1.

    Example:
        >>> ParameterNormLogger(power_iter_steps=20).log_spectral_norms
        True
    """

    on_error = "disable"
    collective_events = frozenset({"on_train_begin", "on_evaluate"})

    def __init__(
        self, log_norms: bool | None = None, log_spectral_norms: bool = True, power_iter_steps: int = 10
    ) -> None:
        if power_iter_steps < 1:
            raise UsageError(
                f"ParameterNormLogger.power_iter_steps={power_iter_steps!r}: must be at least 1; "
                "set power_iter_steps=1 or more"
            )
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
        record: dict[str, Any] = {}
        if self.log_norms:
            record["norms"] = measure(parameters).values()
        if self.log_spectral_norms:
            record["spectral_norms"] = self._spectral_norms(parameters, estimates_here=is_part or world.rank == 0)
        if is_part:
            record = self._joined(world, record)
        if record:
            self._writer.write_record(state.global_step, state.epoch, record)

    def on_train_end(self, **_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Close the file, which is a complete array at every instant."""
        self._writer.close()

    def state_dict(self) -> dict[str, Any]:
        return {"writer": self._writer.state_dict(), "directions": self._iteration.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._writer.load_state_dict(state_dict["writer"])
        self._iteration.load_state_dict(state_dict["directions"])

    def _joined(self, ranks: Ranks, record: Mapping[str, Any]) -> dict[str, Any]:
        """Return the whole model's record; rank 0 also gets the other stages' directions, which it saves."""
        directions = joined(ranks, self._iteration.state_dict(record.get("spectral_norms", {})))
        if ranks.rank == 0:
            self._iteration.load_state_dict(directions)
        return {kind: joined(ranks, norms) for kind, norms in record.items()}

    def _spectral_norms(self, parameters: Mapping[str, Tensor], *, estimates_here: bool) -> dict[str, float]:
        """Start all estimates, then wait for the device once."""
        import torch

        estimates: dict[str, Tensor] = {}
        failure: Exception | None = None
        for name, parameter in parameters.items():
            if parameter.ndim < 2 or parameter.numel() == 0 or parameter.is_complex():
                continue
            matrix = _whole(parameter)
            if not estimates_here or failure is not None:
                # Gathering a matrix is collective. After a failure this rank still gathers the remaining ones,
                # because the other ranks would wait for it forever.
                continue
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
    """Return a weight as the matrix (outputs, rest); a convolution's window counts to the rest."""
    return weight.flatten(1)


class PowerIteration:
    """Estimate the largest singular values of matrices that change little between calls.

    Each step multiplies a direction by the matrix and its transpose, which turns it towards the largest singular
    vector. The error falls by (second / first singular value)^4 per step. The direction is kept by the matrix's name.
    The first one is random, the same for a name everywhere, and gets twice the steps. Apart from rounding, an estimate
    never exceeds the norm. Only the first waits for the device, when its direction is copied there.

    Args:
        steps: iterations per estimate, at least 1.
    """

    def __init__(self, *, steps: int) -> None:
        self.steps = steps
        self._directions: dict[str, Tensor] = {}

    def estimate(self, name: str, matrix: Tensor) -> Tensor:
        """Return the spectral norm of `matrix` (rows, columns), of any real dtype, as a scalar on its device."""
        import torch

        matrix = matrix.detach()
        matrix = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T  # the direction of the shorter side is kept
        matrix = matrix if matrix.dtype == torch.float64 else matrix.float()
        direction, is_first = self._direction(name, matrix)
        norm = matrix.new_zeros(())
        for _ in range(self.steps * 2 if is_first else self.steps):
            across = matrix @ direction
            across = across / across.norm().clamp_min(torch.finfo(matrix.dtype).tiny)
            turned = matrix.T @ across
            norm = turned.norm()
            # A matrix of zeros, or with a NaN, has no direction; the old one stays for when the matrix is sound again.
            direction = torch.where(norm.isfinite() & (norm > 0), turned / norm, direction)
        self._directions[name] = direction
        return norm

    def _direction(self, name: str, matrix: Tensor) -> tuple[Tensor, bool]:
        import torch

        size = matrix.shape[1]
        kept = self._directions.get(name)
        if kept is not None and kept.shape == (size,):
            return kept.to(device=matrix.device, dtype=matrix.dtype), False
        # A private generator, so that the run draws the same random numbers with and without this callback.
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        fresh = torch.randn(size, generator=generator, dtype=torch.float64)
        return (fresh / fresh.norm()).to(device=matrix.device, dtype=matrix.dtype), True

    def state_dict(self, names: Collection[str] | None = None) -> dict[str, Any]:
        """Return the directions of the named matrices (None: of all) as base64 of little-endian floats.

        Text fits into any checkpoint, also one that is JSON.
        """
        return {
            name: {"dtype": str(direction.dtype).removeprefix("torch."), "values": _as_text(direction)}
            for name, direction in self._directions.items()
            if names is None or name in names
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._directions = {name: _from_text(item["values"], item["dtype"]) for name, item in state.items()}


def _as_text(vector: Tensor) -> str:
    values = vector.detach().cpu().numpy()
    return base64.b64encode(values.astype(values.dtype.newbyteorder("<")).tobytes()).decode("ascii")


def _from_text(text: str, dtype: str) -> Tensor:
    import torch

    # frombuffer of bytes is read-only, so the bytes are copied first.
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=getattr(torch, dtype)).clone()
