"""Comparison of replicas: fingerprints of each rank's state, and the error if they differ."""

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

RTOL, ATOL = 1e-5, 1e-8
_SAMPLES = 1024


def fingerprints(state: Any, level: ValidationLevel) -> dict[str, str]:
    """Return a digest of every leaf, by its path."""
    if level is ValidationLevel.QUICK:
        return {path: digest_of(_sample(leaf)) for path, leaf in leaves_of(state)}
    return {path: digest_of(leaf) for path, leaf in leaves_of(state)}


def digest_of(value: Any) -> str:
    """Return a leaf's xxh3 (128 bits, hexadecimal): of a tensor's dtype, shape and bytes, or of a value's pickle."""
    digest = xxhash.xxh3_128()
    if isinstance(value, torch.Tensor):
        _add_tensor(digest, value)
    elif value is None or isinstance(value, bool | int | float | str | bytes):
        digest.update(f"{type(value).__name__}:{value!r}".encode())
    else:
        digest.update(pickle.dumps(value, protocol=4))
    return digest.hexdigest()


def _add_tensor(digest: Any, tensor: torch.Tensor) -> None:
    digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    plain = local_of(tensor.detach())
    if plain.layout is not torch.strided:
        plain = plain.coalesce() if plain.layout is torch.sparse_coo else plain.to_sparse_coo().coalesce()
        _add_tensor(digest, plain.indices())
        plain = plain.values()
    if plain.numel():
        # Hash raw bytes, because numpy has no bfloat16 and no 8-bit floats.
        flat = plain.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        digest.update(cast("Any", flat.view(torch.uint8).numpy()))


def summary_of(prints: Mapping[str, str]) -> str:
    """Return one digest of all fingerprints. The order of a dict is not part of its state, nor of the digest."""
    digest = xxhash.xxh3_128()
    for path in sorted(prints):
        digest.update(f"{path}={prints[path]};".encode())
    return digest.hexdigest()


def differing(prints: Mapping[str, str], firsts: Mapping[str, str]) -> list[str]:
    """Return paths that differ between a rank and the first of its piece, in the order of the first."""
    paths = [path for path in firsts if prints.get(path) != firsts[path]]
    return paths + [path for path in prints if path not in firsts]


def close_to(value: Any, first: Any) -> bool:
    """Compare for level FULL: numbers must be close, other values equal."""
    if isinstance(value, torch.Tensor) and isinstance(first, torch.Tensor):
        one, other = local_of(value).detach().cpu(), local_of(first).detach().cpu()
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        if not (one.is_floating_point() or one.is_complex()):
            return bool(torch.equal(one, other))
        if one.dtype.itemsize < 4:  # torch cannot compare 8-bit floats
            one, other = one.float(), other.float()
        return bool(torch.allclose(one, other, rtol=RTOL, atol=ATOL, equal_nan=True))
    if isinstance(value, float) and isinstance(first, float):
        return close_to(torch.tensor(value, dtype=torch.float64), torch.tensor(first, dtype=torch.float64))
    return digest_of(value) == digest_of(first)


def mismatch(
    component: StateComponent, piece: Piece, differences: Sequence[tuple[int, Sequence[str]]]
) -> ReplicationMismatch:
    """Make the error of a piece whose ranks differ; `differences` holds each rank with its differing paths."""
    ranks = tuple(rank for rank, _ in differences)
    paths = tuple(dict.fromkeys(path for _, differing_paths in differences for path in differing_paths))
    shown = ", ".join(repr(path) for path in paths[:5]) + (f" and {len(paths) - 5} more" if len(paths) > 5 else "")
    who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    difference = f"{who} differ{'' if len(ranks) > 1 else 's'} from rank {piece.writer} in {shown}"
    if component.sharing_pattern is SharingPattern.PER_GROUP:
        text = (
            f"{component.key}: sharing_pattern=PER_GROUP over {component.process_group_name!r}, but its members "
            f"{list(piece.members)} hold different states: {difference}. Only one replica of a group is written, so "
            "the others' states would be lost; if the members are shards (pipeline stages, tensor-parallel parts), "
            "name the group of those that hold the same shard (the data-parallel one), or use PER_RANK"
        )
    else:
        text = (
            f"{component.key}: declared {component.sharing_pattern.name}, but {difference}. Nothing was saved. The "
            "ranks may have drifted apart; if they should differ, use PER_RANK or PER_GROUP"
        )
    return ReplicationMismatch(text, component=component.key, tensors=paths, ranks=ranks)


def _sample(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    plain = local_of(leaf.detach())
    if plain.layout is not torch.strided or plain.numel() <= _SAMPLES:
        return plain
    flat = plain.reshape(-1)
    # The sample includes the last element, because appended values and drift from the end show there.
    at = torch.linspace(0, flat.numel() - 1, _SAMPLES, dtype=torch.float64).long().to(flat.device)
    return {"shape": tuple(plain.shape), "values": digest_of(flat[at])}
