"""L2 norms of many tensors at the price of a few kernels and one wait for the device.

`measure(tensors)` starts the norms of this rank's parts (one fused kernel for each device and dtype) and gives
`PendingNorms`, which has waited for nothing. Its `values()` and `total()` add up what other ranks hold of sharded
tensors, one all-reduce for each dimension of their mesh whatever their number, and wait for the device once.

Sharded tensors are DTensors (fully_shard, tensor parallelism). A tensor's norm is the root of the sum of the squares
of its shards' norms; dimensions of the mesh along which it is replicated add nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

__all__ = ["PendingNorms", "is_sharded", "measure", "named_parameters", "unmeasurable"]

WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""What torch.compile, activation checkpointing and FSDP put into the names of parameters. Not DDP's `module`, a name
that models use themselves: callbacks are given models that are unwrapped."""


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that have a norm, each once, by the names that they have without wrappers. Integers (of
    quantized layers) are left out.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() or parameter.is_complex():
            yield _unwrapped(name), parameter


def unmeasurable(model: nn.Module) -> str | None:
    """Why the norms of this model's parameters cannot be told; None where they can."""
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            return f"parameter {_unwrapped(name)!r} is on the meta device, so it has no values"
        if getattr(parameter, "_fsdp_flattened", False):
            return (
                f"parameter {_unwrapped(name)!r} is a slice of an FSDP1 FlatParameter, whose norm no rank knows; "
                "shard with torch.distributed.fsdp.fully_shard"
            )
    return None


def is_sharded(tensor: Tensor) -> bool:
    """Whether other ranks hold parts of it (a DTensor), so that all of them have to take part."""
    # By what it has, not by class: torch.distributed.tensor takes long to import, and is not there in every build.
    return hasattr(tensor, "placements") and hasattr(tensor, "to_local")


@dataclass(frozen=True, slots=True)
class _Part:
    """What this rank holds of a tensor, and the dimensions of which mesh it is to be summed over."""

    local: Tensor
    mesh: Any
    dims: tuple[int, ...]


class PendingNorms:
    """Norms on their way. `values` and `total` are collective where a tensor is sharded."""

    def __init__(self, parts: Mapping[str, _Part]) -> None:
        self._names = list(parts)
        self._groups: dict[tuple[Any, tuple[int, ...]], list[int]] = {}
        for at, part in enumerate(parts.values()):
            if part.dims:
                self._groups.setdefault((part.mesh, part.dims), []).append(at)
        self._order, self._norms = _local_norms([part.local for part in parts.values()])

    @property
    def is_sharded(self) -> bool:
        """Whether other ranks hold parts of them."""
        return bool(self._groups)

    def values(self) -> dict[str, float]:
        """Each tensor's norm, by its name. Waits for the device once."""
        if not self._names:
            return {}
        return dict(zip(self._names, self._squares().sqrt().tolist(), strict=True))

    def total(self) -> float:
        """The norm of all tensors as one vector. Waits for the device once."""
        if not self._names:
            return 0.0
        return float(self._squares().sum().sqrt().item())

    def _squares(self) -> Tensor:
        """Their squares, in the order of the names, summed over ranks."""
        import torch

        # Squares of float32 norms leave its range beyond 1e19; a device without float64 has to do with that.
        device = self._norms[0].device
        wide = torch.float32 if device.type == "mps" else torch.float64
        found = torch.cat([each.to(device=device, dtype=wide, non_blocking=True) for each in self._norms])
        squares = torch.empty_like(found)
        squares[torch.tensor(self._order, device=device)] = found.square()
        for (mesh, dims), places in self._groups.items():
            _sum_over(squares, torch.tensor(places, device=device), mesh, dims)
        return squares


def measure(tensors: Mapping[str, Tensor]) -> PendingNorms:
    """Starts the L2 norms of these tensors, as they are now. Waits for nothing; talks to no other rank, except where
    a DTensor is a pending sum (Partial).
    """
    return PendingNorms({name: _part(tensor.detach()) for name, tensor in tensors.items()})


def _part(tensor: Any) -> _Part:
    mesh, dims = None, tuple[int, ...]()
    if is_sharded(tensor):
        tensor = _without_pending_sums(tensor)
        mesh = tensor.device_mesh
        dims = tuple(
            dim
            for dim, placement in enumerate(tensor.placements)
            if not placement.is_replicate() and mesh.size(dim) > 1
        )
        tensor = tensor.to_local()
    if tensor.is_sparse:  # the gradient of nn.Embedding(sparse=True)
        tensor = tensor.coalesce().values()
    return _Part(tensor, mesh, dims)


def _without_pending_sums(tensor: Any) -> Any:
    if not any(placement.is_partial() for placement in tensor.placements):
        return tensor
    from torch.distributed.tensor import Replicate

    return tensor.redistribute(placements=[Replicate() if each.is_partial() else each for each in tensor.placements])


def _local_norms(tensors: Sequence[Tensor]) -> tuple[list[int], list[Tensor]]:
    """One vector of norms for each device and dtype, and the places of its elements among `tensors`."""
    import torch

    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for at, tensor in enumerate(tensors):
        alike.setdefault((tensor.device, tensor.dtype), []).append(at)
    norms = []
    for (_, dtype), places in alike.items():
        # Half precision overflows at 65504, and loses what it adds up long before.
        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else None
        norms.append(torch.stack(torch._foreach_norm([tensors[at] for at in places], 2, dtype=wide)))
    return [at for places in alike.values() for at in places], norms


def _sum_over(squares: Tensor, places: Tensor, mesh: Any, dims: tuple[int, ...]) -> None:
    import torch.distributed as dist

    # The mesh's groups may know its own device only; with CPU offload the shards lie elsewhere.
    part = squares[places].to(mesh.device_type)
    for dim in dims:
        dist.all_reduce(part, group=mesh.get_group(dim))
    squares[places] = part.to(squares.device)


def _unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)
