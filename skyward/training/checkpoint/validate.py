"""Whether replicas are replicas: what each rank says of its state, and what follows when they say different things."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import xxhash

from ...errors import ReplicationMismatch
from ..nested import leaves_of
from ..parts import local_of
from .patterns import SharingPattern, StateComponent, ValidationLevel
from .topology import Piece

__all__ = ["RTOL", "ATOL", "close_to", "differing", "digest_of", "fingerprints", "mismatch", "summary_of"]

RTOL, ATOL = 1e-5, 1e-8
_SAMPLES = 1024


def fingerprints(state: Any, level: ValidationLevel) -> dict[str, str]:
    """Of every leaf, by its path."""
    if level is ValidationLevel.QUICK:
        return {path: digest_of(_sample(leaf)) for path, leaf in leaves_of(state)}
    return {path: digest_of(leaf) for path, leaf in leaves_of(state)}


def digest_of(value: Any) -> str:
    """xxh3 of 128 bits, as hexadecimal, of a leaf: a tensor's dtype, shape and bytes; another value's pickle."""
    found = xxhash.xxh3_128()
    if isinstance(value, torch.Tensor):
        _add_tensor(found, value)
    elif value is None or isinstance(value, bool | int | float | str | bytes):
        found.update(f"{type(value).__name__}:{value!r}".encode())
    else:
        found.update(pickle.dumps(value, protocol=4))
    return found.hexdigest()


def _add_tensor(found: Any, tensor: torch.Tensor) -> None:
    found.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    plain = local_of(tensor.detach())
    if plain.layout is not torch.strided:
        plain = plain.coalesce() if plain.layout is torch.sparse_coo else plain.to_sparse_coo().coalesce()
        _add_tensor(found, plain.indices())
        plain = plain.values()
    if plain.numel():
        # As bytes: numpy has no bfloat16 and none of the 8-bit floats.
        flat = plain.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        found.update(cast("Any", flat.view(torch.uint8).numpy()))


def summary_of(prints: Mapping[str, str]) -> str:
    """One digest of all. The order of a dict is part of it no more than it is part of the state."""
    found = xxhash.xxh3_128()
    for path in sorted(prints):
        found.update(f"{path}={prints[path]};".encode())
    return found.hexdigest()


def differing(mine: Mapping[str, str], firsts: Mapping[str, str]) -> list[str]:
    """Paths that differ between a rank and the first of its piece, in the order of the first."""
    paths = [path for path in firsts if mine.get(path) != firsts[path]]
    return paths + [path for path in mine if path not in firsts]


def close_to(mine: Any, first: Any) -> bool:
    """FULL: values that are close, or equal where they are no numbers."""
    if isinstance(mine, torch.Tensor) and isinstance(first, torch.Tensor):
        one, other = local_of(mine).detach().cpu(), local_of(first).detach().cpu()
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        if not (one.is_floating_point() or one.is_complex()):
            return bool(torch.equal(one, other))
        if one.dtype.itemsize < 4:  # the 8-bit floats have no comparison of their own
            one, other = one.float(), other.float()
        return bool(torch.allclose(one, other, rtol=RTOL, atol=ATOL, equal_nan=True))
    if isinstance(mine, float) and isinstance(first, float):
        return close_to(torch.tensor(mine, dtype=torch.float64), torch.tensor(first, dtype=torch.float64))
    return digest_of(mine) == digest_of(first)


def mismatch(
    component: StateComponent, piece: Piece, found: Sequence[tuple[int, Sequence[str]]]
) -> ReplicationMismatch:
    """The error of a piece whose ranks differ. found: rank and the paths in which it differs from the first."""
    ranks = tuple(rank for rank, _ in found)
    paths = tuple(dict.fromkeys(path for _, differing_paths in found for path in differing_paths))
    shown = ", ".join(repr(path) for path in paths[:5]) + (f" and {len(paths) - 5} more" if len(paths) > 5 else "")
    who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    said = f"{who} differ{'' if len(ranks) > 1 else 's'} from rank {piece.writer} in {shown}"
    if component.sharing_pattern is SharingPattern.PER_GROUP:
        text = (
            f"{component.key}: sharing_pattern=PER_GROUP over {component.process_group_name!r}, but its members "
            f"{list(piece.members)} hold different states: {said}. A group is a set of replicas, of which one is "
            "written: this would lose the others' state. If the members are shards (pipeline stages, tensor-parallel "
            "parts), name the group of those that hold the same shard (the data-parallel one), or use PER_RANK"
        )
    else:
        text = (
            f"{component.key}: declared {component.sharing_pattern.name}, but {said}. Nothing was saved. If ranks "
            "should differ, use PER_RANK or PER_GROUP; else they have drifted apart"
        )
    return ReplicationMismatch(text, component=component.key, tensors=paths, ranks=ranks)


def _sample(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    plain = local_of(leaf.detach())
    if plain.layout is not torch.strided or plain.numel() <= _SAMPLES:
        return plain
    flat = plain.reshape(-1)
    # The last element too: what is appended to, or drifts from the end, shows there.
    at = torch.linspace(0, flat.numel() - 1, _SAMPLES, dtype=torch.float64).long().to(flat.device)
    return {"shape": tuple(plain.shape), "values": digest_of(flat[at])}
