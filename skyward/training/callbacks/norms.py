"""L2 norms of many tensors at the price of a few kernels and one wait for the device.

`measure(tensors)` starts the norms of this rank's parts (one fused kernel for each device and dtype) and gives
`PendingNorms`, which has waited for nothing. Its `values()` and `total()` add up what other ranks hold of sharded
tensors, one all-reduce for each dimension of their mesh whatever their number, and wait for the device once.

Sharded tensors are DTensors (fully_shard, tensor parallelism). A tensor's norm is the root of the sum of the squares
of its shards' norms; dimensions of the mesh along which it is replicated add nothing.

A rank that holds a part of the model (a pipeline's stage) measures that part, under the model's names.
`parameters_to_measure` says what a rank measures, `joined` puts together what the ranks have measured.
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

__all__ = [
    "PendingNorms",
    "can_be_measured",
    "joined",
    "leave_out",
    "measure",
    "named_parameters",
    "parameters_to_measure",
    "unmeasurable",
]

_log = logging.getLogger(__name__)

WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""What torch.compile, activation checkpointing and FSDP put into the names of parameters. Not DDP's `module`, a name
that models use themselves: callbacks are given models that are unwrapped."""


def named_parameters(model: nn.Module, trainer: Any = None) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that have a norm, each once, by the names that they have without wrappers. Integers (of
    quantized layers) are left out. Those of a `ModelPart` have the names of the whole model.
    """
    part = part_of(trainer)
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() or parameter.is_complex():
            yield _unwrapped(name if part is None else part.names.get(name, name)), parameter


def parameters_to_measure(model: nn.Module, trainer: Any, ranks: Ranks) -> dict[str, nn.Parameter]:
    """What this rank measures: rank 0 everything, every rank what is sharded, and each its part of the model."""
    parameters = dict(named_parameters(model, trainer))
    part = part_of(trainer)
    if part is not None:
        return parameters if part.is_counted else {}
    return parameters if ranks.rank == 0 or any(is_dtensor(parameter) for parameter in parameters.values()) else {}


def joined(ranks: Ranks, measured: Mapping[str, Any]) -> dict[str, Any]:
    """What all ranks have measured of their parts, by the model's names. Collective."""
    return {name: value for each in ranks.exchange(dict(measured)) for name, value in each.items()}


def can_be_measured(
    model: Any, ranks: Ranks, *, who: str, why_else: Callable[[Any], str | None] = lambda model: None
) -> bool:
    """Return whether the norms of this model's parameters can be told; warn where they cannot. Collective.

    A reason of one rank is every rank's.

    Args:
        who: the callback, for the warning.
        why_else: a further reason, asked for a module of torch.
    """
    reasons = ranks.exchange(unmeasurable(model) or why_else(model))
    reason = next((reason for reason in reasons if reason is not None), None)
    if reason is not None:
        leave_out(who, reason, ranks)
    return reason is None


def leave_out(who: str, reason: str, ranks: Ranks) -> None:
    """Warn, once for all ranks, that a callback does nothing."""
    if ranks.rank == 0:
        _log.warning("%s is left out: %s", who, reason)


def unmeasurable(model: Any) -> str | None:
    """Return why the norms of this model's parameters cannot be told; None where they can."""
    if not callable(getattr(model, "named_parameters", None)):
        return f"the run's model is of type {type(model).__name__}: no module of torch"
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
    """Tensors that one kernel can measure: of one device and dtype, split over the same dimensions of a mesh."""

    names: list[str]
    locals: list[Tensor]
    mesh: Any
    dims: tuple[int, ...]

    def norms(self) -> Tensor:
        """Of what this rank holds of each."""
        import torch

        # Half precision overflows at 65504, and loses what it adds up long before.
        is_half = self.locals[0].dtype in (torch.float16, torch.bfloat16)
        return torch.stack(torch._foreach_norm(self.locals, 2, dtype=torch.float32 if is_half else None))


class PendingNorms:
    """Norms on their way. `values` and `total` are collective where a tensor is sharded."""

    def __init__(self, groups: Sequence[_Alike], names: Sequence[str]) -> None:
        self._names = names
        self._groups = [(group, group.norms()) for group in groups]
        for group in groups:
            group.locals.clear()  # what is measured may be freed

    @property
    def is_sharded(self) -> bool:
        """Whether other ranks hold parts of them."""
        return any(group.dims for group, _ in self._groups)

    def values(self) -> dict[str, float]:
        """Each tensor's norm, by its name. Waits for the device once."""
        if not self._groups:
            return {}
        found: list[float] = self._squares().sqrt().tolist()
        by_name = dict(zip((name for group, _ in self._groups for name in group.names), found, strict=True))
        return by_name if len(self._groups) == 1 else {name: by_name[name] for name in self._names}

    def total(self) -> float:
        """The norm of all tensors as one vector. Waits for the device once."""
        return float(self._squares().sum().sqrt().item()) if self._groups else 0.0

    def _squares(self) -> Tensor:
        """Their squares, by group, summed over ranks. No tensor is made from numbers here: copying those to a device
        would be a wait of its own.
        """
        import torch

        device = self._groups[0][1].device
        found = []
        for group, norms in self._groups:
            # Squares of float32 norms leave its range beyond 1e19; a device without float64 has to do with that.
            wide = torch.float32 if norms.device.type == "mps" else torch.float64
            squares = norms.to(wide).square()
            if group.dims:
                squares = _summed(squares, group.mesh, group.dims)
            found.append(squares.to(device, non_blocking=True))
        return found[0] if len(found) == 1 else torch.cat(found)


def measure(tensors: Mapping[str, Tensor]) -> PendingNorms:
    """Starts the L2 norms of these tensors, as they are now. Waits for nothing; talks to no other rank, except where
    a DTensor is a pending sum (Partial).
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
    """What this rank holds of a DTensor, its mesh, and the dimensions of that which it is to be summed over."""
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

    # The mesh's groups may know its own device only; with CPU offload the shards lie elsewhere.
    squares = squares.to(mesh.device_type)
    for dim in dims:
        dist.all_reduce(squares, group=mesh.get_group(dim))
    return squares


def _unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)
