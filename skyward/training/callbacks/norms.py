"""L2 norms of many tensors, for a few kernels and one wait for the device.

`measure(tensors)` starts the norms of this rank's shards, one fused kernel for each device and dtype. It returns
`PendingNorms` without waiting. `values()` and `total()` add the shards of other ranks and wait for the device once.
That takes one all-reduce for each dimension of the device mesh, whatever the number of tensors.

Sharded tensors are DTensors (fully_shard, tensor parallelism). A tensor's norm is the square root of the sum of its
shards' squared norms; mesh dimensions along which it is replicated add nothing.

A rank that holds a part of the model (a pipeline stage) measures that part under the whole model's names.
`parameters_to_measure` chooses what a rank measures, and `joined` merges the results of all ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..agree import Ranks
from ..parts import is_dtensor, part_of

if TYPE_CHECKING:
    from torch import Tensor, nn

_log = logging.getLogger(__name__)

WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Name parts that torch.compile, activation checkpointing and FSDP insert into parameter names.

DDP's `module` is not among them: models use that name themselves, and callbacks get an unwrapped model.
"""


def named_parameters(model: nn.Module, trainer: Any = None) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield each floating-point or complex parameter once, with its name free of wrappers.

    Integer parameters (of quantized layers) have no norm. Parameters of a `ModelPart` get the whole model's names.
    """
    part = part_of(trainer)
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() or parameter.is_complex():
            yield _unwrapped(name if part is None else part.names.get(name, name)), parameter


def parameters_to_measure(model: nn.Module, trainer: Any, ranks: Ranks) -> dict[str, nn.Parameter]:
    """Return the parameters that this rank measures.

    Rank 0 measures all of them, every rank its sharded ones, and a rank with a part of the model that part.
    """
    parameters = dict(named_parameters(model, trainer))
    part = part_of(trainer)
    if part is not None:
        return parameters if part.is_counted else {}
    return parameters if ranks.rank == 0 or any(is_dtensor(parameter) for parameter in parameters.values()) else {}


def joined(ranks: Ranks, measured: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the measurements of all ranks, by the model's names. Collective."""
    return {name: value for values in ranks.exchange(dict(measured)) for name, value in values.items()}


def can_be_measured(
    model: Any, ranks: Ranks, *, who: str, why_else: Callable[[Any], str | None] = lambda model: None
) -> bool:
    """Return whether this model's parameters have norms, and warn if they do not. Collective.

    A reason on one rank counts for all, so that no rank waits for one that is turned off.

    Args:
        model: the run's model, or anything else that a producer passes.
        ranks: the ranks that decide together.
        who: name of the callback, for the warning.
        why_else: returns a further reason against it for a torch module, or None.
    """
    reasons = ranks.exchange(unmeasurable(model) or why_else(model))
    reason = next((reason for reason in reasons if reason is not None), None)
    if reason is not None:
        leave_out(who, reason, ranks)
    return reason is None


def leave_out(who: str, reason: str, ranks: Ranks) -> None:
    """Warn, once for all ranks, that a callback turns itself off."""
    if ranks.rank == 0:
        _log.warning("%s is disabled: %s", who, reason)


def unmeasurable(model: Any) -> str | None:
    """Return why this model's parameters have no norms, or None if they have."""
    if not callable(getattr(model, "named_parameters", None)):
        return f"the run's model is of type {type(model).__name__}, not a torch module"
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            return f"parameter {_unwrapped(name)!r} is on the meta device, so it has no values"
        if getattr(parameter, "_fsdp_flattened", False):
            return (
                f"parameter {_unwrapped(name)!r} is a slice of an FSDP1 FlatParameter, whose norm no rank knows; "
                "shard with torch.distributed.fsdp.fully_shard"
            )
    return None


@dataclass(frozen=True, slots=True)
class _Alike:
    """Tensors that one kernel can measure: same device, dtype and sharded mesh dimensions."""

    names: list[str]
    locals: list[Tensor]
    mesh: Any
    dims: tuple[int, ...]

    def norms(self) -> Tensor:
        """Return the norm of this rank's shard of each tensor."""
        import torch

        # float16 overflows at 65504, and both half types lose precision in the sum long before that.
        is_half = self.locals[0].dtype in (torch.float16, torch.bfloat16)
        return torch.stack(torch._foreach_norm(self.locals, 2, dtype=torch.float32 if is_half else None))


class PendingNorms:
    """Norms that the device is still computing. `values` and `total` are collective if a tensor is sharded."""

    def __init__(self, groups: Sequence[_Alike], names: Sequence[str]) -> None:
        self._names = names
        self._groups = [(group, group.norms()) for group in groups]
        for group in groups:
            group.locals.clear()  # the kernels hold their input; our references would keep gradients alive

    @property
    def is_sharded(self) -> bool:
        """Return whether other ranks hold shards of these tensors."""
        return any(group.dims for group, _ in self._groups)

    def values(self) -> dict[str, float]:
        """Return each tensor's norm by name. Waits for the device once."""
        if not self._groups:
            return {}
        found: list[float] = self._squares().sqrt().tolist()
        by_name = dict(zip((name for group, _ in self._groups for name in group.names), found, strict=True))
        return by_name if len(self._groups) == 1 else {name: by_name[name] for name in self._names}

    def total(self) -> float:
        """Return the norm of all tensors as one vector. Waits for the device once."""
        return float(self._squares().sum().sqrt().item()) if self._groups else 0.0

    def _squares(self) -> Tensor:
        """Return the squared norms in group order, summed over ranks.

        No tensor is made from Python numbers here, because copying those to a device would be another wait.
        """
        import torch

        device = self._groups[0][1].device
        found = []
        for group, norms in self._groups:
            # Squares of float32 norms overflow beyond 1e19. MPS has no float64, so it keeps that limit.
            wide = torch.float32 if norms.device.type == "mps" else torch.float64
            squares = norms.to(wide).square()
            if group.dims:
                squares = _summed(squares, group.mesh, group.dims)
            found.append(squares.to(device, non_blocking=True))
        return found[0] if len(found) == 1 else torch.cat(found)


def measure(tensors: Mapping[str, Tensor]) -> PendingNorms:
    """Start the L2 norms of these tensors as they are now.

    Does not wait, and does not communicate, except for a DTensor with a pending sum (Partial).
    """
    import torch

    groups: dict[tuple[Any, ...], _Alike] = {}
    with torch.no_grad():
        for name, tensor in tensors.items():
            local, mesh, dims = _shard_of(tensor) if is_dtensor(tensor) else (tensor, None, ())
            if local.is_sparse:  # the gradient of nn.Embedding(sparse=True)
                local = local.coalesce().values()
            key = (local.device, local.dtype, mesh, dims)
            group = groups.get(key)
            if group is None:
                group = groups[key] = _Alike([], [], mesh, dims)
            group.names.append(name)
            group.locals.append(local)
        return PendingNorms(list(groups.values()), list(tensors))


def _shard_of(tensor: Any) -> tuple[Tensor, Any, tuple[int, ...]]:
    """Return this rank's shard of a DTensor, its mesh, and the mesh dimensions to sum over."""
    if any(placement.is_partial() for placement in tensor.placements):
        from torch.distributed.tensor import Replicate

        whole = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
        tensor = tensor.redistribute(placements=whole)
    mesh = tensor.device_mesh
    dims = tuple(
        dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate() and mesh.size(dim) > 1
    )
    return tensor.to_local(), mesh, dims


def _summed(squares: Tensor, mesh: Any, dims: tuple[int, ...]) -> Tensor:
    import torch.distributed as dist

    # With CPU offload the shards are on the CPU, and the mesh's process groups may only know the mesh's device.
    squares = squares.to(mesh.device_type)
    for dim in dims:
        dist.all_reduce(squares, group=mesh.get_group(dim))
    return squares


def _unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)
