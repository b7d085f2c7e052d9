"""How a state becomes a file, and a file a state again."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from typing import Any, cast

import torch

from ...errors import CheckpointCorrupt, UsageError
from .folders import Folder, LocalFolder, digest_of_file
from .manifest import FileEntry

__all__ = ["check_file", "read_state", "write_state"]

_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_ALIASES = "skyward.aliases"


def write_state(folder: Folder, name: str, state: Any, *, kind: str = "torch") -> tuple[int, str]:
    """Durable when it returns. kind: "torch" (torch.save) or "safetensors". Gives its bytes and digest."""
    with folder.create(name) as file:
        if kind == "safetensors":
            _write_safetensors(file, state)
        else:
            torch.save(state, cast("Any", file))
    return file.bytes, file.digest


def check_file(folder: Folder, entry: FileEntry, *, digest: bool = True) -> None:
    """Raises: CheckpointCorrupt, unless the file is there as it was written."""
    where = f"{folder.path}/{entry.path}"
    try:
        size = folder.size(entry.path)
    except FileNotFoundError:
        raise CheckpointCorrupt(f"{where}: the manifest names it, and it is not there", path=where) from None
    if size != entry.bytes:
        raise CheckpointCorrupt(f"{where}: has {size:,} bytes, and {entry.bytes:,} were written", path=where)
    if digest and entry.digest:
        found = digest_of_file(folder, entry.path)
        if found != entry.digest:
            raise CheckpointCorrupt(f"{where}: its digest is {found}, and {entry.digest} was written", path=where)


def read_state(folder: Folder, entry: FileEntry, *, allow_pickle: bool = False) -> Any:
    """Checks the file, then loads it to the CPU.

    Raises: CheckpointCorrupt; UsageError for objects of classes that torch does not load unasked.
    """
    check_file(folder, entry)
    where = f"{folder.path}/{entry.path}"
    if entry.format == "safetensors":
        return _read_safetensors(folder, entry.path)
    try:
        with folder.open(entry.path) as file:
            return torch.load(file, map_location="cpu", weights_only=not allow_pickle)
    except pickle.UnpicklingError as error:
        if "weights_only" not in str(error).lower() and "weights only" not in str(error).lower():
            raise CheckpointCorrupt(f"{where}: cannot be loaded: {error}", path=where) from error
        raise UsageError(
            f"{where}: has objects of classes that are not loaded unasked, because loading them may run code. If you "
            f"trust the file, pass allow_pickle=True, or allow the classes by "
            f"torch.serialization.add_safe_globals([...]). {error}"
        ) from error
    except (EOFError, RuntimeError) as error:
        raise CheckpointCorrupt(f"{where}: cannot be loaded: {error}", path=where) from error


def _write_safetensors(file: Any, state: Any) -> None:
    """The format's own writer refuses tied weights and cannot be hashed on its way; the format is a page long.

    Source: https://huggingface.co/docs/safetensors, "Format".
    """
    if not isinstance(state, Mapping) or not all(isinstance(each, torch.Tensor) for each in state.values()):
        raise UsageError("format 'safetensors' takes a flat dict of tensors; leave the metadata out to use torch's")
    header: dict[str, Any] = {}
    first: dict[Any, str] = {}
    aliases: dict[str, str] = {}
    data: list[torch.Tensor] = []
    offset = 0
    for name, tensor in state.items():
        identity = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.numel() and identity in first:
            aliases[name] = first[identity]
            continue
        first[identity] = name
        if tensor.dtype not in _DTYPES:
            raise UsageError(f"format 'safetensors' has no {tensor.dtype} ({name!r})")
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        data.append(tensor)
        offset += size
    header["__metadata__"] = {"format": "pt", _ALIASES: json.dumps(aliases)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for tensor in data:
        if tensor.numel():
            file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def _read_safetensors(folder: Folder, name: str) -> dict[str, torch.Tensor]:
    from safetensors import safe_open
    from safetensors.torch import load

    if name.endswith(".index.json"):
        with folder.open(name) as file:
            shards = sorted(set(json.loads(file.read())["weight_map"].values()))
        state: dict[str, torch.Tensor] = {}
        for shard in shards:
            state.update(_read_safetensors(folder, shard))
        return state
    if isinstance(folder, LocalFolder):
        # Mapped, then copied: once, and the tensors outlive the file.
        with safe_open(f"{folder.path}/{name}", framework="pt") as mapped:
            state = {each: mapped.get_tensor(each).clone() for each in mapped.keys()}  # noqa: SIM118  # it is no dict
            metadata = mapped.metadata() or {}
    else:
        with folder.open(name) as file:
            raw = file.read()
        state = load(raw)
        length = int.from_bytes(raw[:8], "little")
        metadata = json.loads(raw[8 : 8 + length]).get("__metadata__", {})
    for alias, first in json.loads(metadata.get(_ALIASES, "{}")).items():
        state[alias] = state[first]
    return state
