"""How a state becomes a file, and a file a state again."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch

from ...errors import CheckpointCorrupt, UsageError
from .folders import Folder, LocalFolder, digest_of_file
from .hashed_file import HashingFile, digest_of
from .manifest import FileEntry
from .plain import from_plain, to_plain

__all__ = ["check_file", "check_is_zip", "load_plain", "read_state", "serialise", "write_state"]

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


def write_state(
    folder: Folder, name: str, state: Any, *, kind: str = "torch", key: str = "", allow_pickle: bool = False
) -> tuple[int, str]:
    """Durable when it returns. kind: "torch" (torch.save) or "safetensors". Gives its bytes and digest.

    key: the component, for an error. allow_pickle: write objects of any class, which load by `allow_pickle` only.
    Raises: UsageError for a state that could not be loaded again.
    """
    if kind == "torch":
        state = to_plain(state, where=f"StateComponent {key!r}", allow_pickle=allow_pickle)
    with folder.create(name) as file:
        serialise(file, state, kind)
    return file.bytes, file.digest


def serialise(file: HashingFile, state: Any, kind: str) -> None:
    """kind: as `write_state`'s."""
    if kind == "safetensors":
        _write_safetensors(file, state)
        return
    with _without_crc32():
        torch.save(state, cast("Any", file))


def _without_crc32() -> AbstractContextManager[object]:
    """torch.save's checksums take as long as the write, and torch.load looks at none: the digest says more."""
    if hasattr(torch.serialization, "set_crc32_options"):
        from torch.utils.serialization import config

        return config.patch("save.compute_crc32", False)  # type: ignore[attr-defined, no-any-return]  # this thread's
    return nullcontext()  # torch before 2.6


def check_file(folder: Folder, entry: FileEntry, *, digest: bool = True) -> None:
    """Raises: CheckpointCorrupt, unless the file is there as it was written."""
    where = f"{folder.path}/{entry.path}"
    try:
        size = folder.size(entry.path)
    except FileNotFoundError:
        raise _missing(where) from None
    _check_size(where, entry, size)
    if digest and entry.digest:
        _check_digest(where, entry, digest_of_file(folder, entry.path))


def read_state(
    folder: Folder, entry: FileEntry, *, beside: Sequence[FileEntry] = (), allow_pickle: bool = False
) -> Any:
    """Checks the file, then loads it to the CPU. beside: the component's other files, which an index may name.

    Raises: CheckpointCorrupt; UsageError for objects of classes that torch does not load unasked.
    """
    where = f"{folder.path}/{entry.path}"
    raw = _checked(folder, entry)
    if entry.format == "safetensors":
        return _read_safetensors(folder, entry.path, raw, {file.path: file for file in beside})
    try:
        with folder.open(entry.path) if raw is None else io.BytesIO(raw) as file:
            return load_plain(file, where=where, allow_pickle=allow_pickle)
    except (EOFError, RuntimeError) as error:
        raise CheckpointCorrupt(f"{where}: cannot be loaded: {error}", path=where) from error


def load_plain(file: Any, *, where: str, allow_pickle: bool = False) -> Any:
    """Load what `to_plain` and torch.save wrote. Raises: CheckpointCorrupt; UsageError, as `read_state` does."""
    if not allow_pickle and _runs_old_formats():
        check_is_zip(file, where)
    try:
        return from_plain(torch.load(file, map_location="cpu", weights_only=not allow_pickle))
    except pickle.UnpicklingError as error:
        if "weights_only" not in str(error).lower() and "weights only" not in str(error).lower():
            raise CheckpointCorrupt(f"{where}: cannot be loaded: {error}", path=where) from error
        raise UsageError(
            f"{where}: has objects of classes that are not loaded unasked, because loading them may run code. If you "
            f"trust the file, pass allow_pickle=True, or allow the classes by "
            f"torch.serialization.add_safe_globals([...]). {error}"
        ) from error
    except (ValueError, KeyError, TypeError) as error:  # of a mark
        raise CheckpointCorrupt(f"{where}: cannot be loaded: {type(error).__name__}: {error}", path=where) from error


def _runs_old_formats() -> bool:
    """Before 2.6 torch ran code of a file in its format from before 1.6, also with `weights_only`: CVE-2025-32434."""
    return tuple(map(int, torch.__version__.split(".")[:2])) < (2, 6)


def check_is_zip(file: Any, where: str) -> None:
    """Raises: UsageError for any other format."""
    begin = file.read(4)
    file.seek(0)
    if begin != b"PK\x03\x04":
        raise UsageError(
            f"{where}: is in a format from before torch 1.6, which torch {torch.__version__} does not load without "
            "running its code; use torch 2.6 or newer, or pass allow_pickle=True if you trust the file"
        )


def _checked(folder: Folder, entry: FileEntry) -> bytes | None:
    """Looks at a file's size and digest. Gives its contents, where it would otherwise cross a network twice."""
    if isinstance(folder, LocalFolder):
        check_file(folder, entry)
        return None
    where = f"{folder.path}/{entry.path}"
    raw = folder.read([entry.path]).get(entry.path)
    if raw is None:
        raise _missing(where)
    _check_size(where, entry, len(raw))
    if entry.digest:
        _check_digest(where, entry, digest_of(raw))
    return raw


def _missing(where: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(f"{where}: the manifest names it, and it is not there", path=where)


def _check_size(where: str, entry: FileEntry, size: int) -> None:
    if size != entry.bytes:
        raise CheckpointCorrupt(f"{where}: has {size:,} bytes, and {entry.bytes:,} were written", path=where)


def _check_digest(where: str, entry: FileEntry, found: str) -> None:
    if found != entry.digest:
        raise CheckpointCorrupt(f"{where}: its digest is {found}, and {entry.digest} was written", path=where)


def _write_safetensors(file: Any, state: Any) -> None:
    """The format's own writer refuses tied weights and cannot be hashed on its way; the format is a page long.

    Source: https://huggingface.co/docs/safetensors, "Format".
    """
    if not isinstance(state, Mapping) or not all(isinstance(item, torch.Tensor) for item in state.values()):
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


def _read_safetensors(
    folder: Folder, name: str, raw: bytes | None, beside: Mapping[str, FileEntry]
) -> dict[str, torch.Tensor]:
    """raw: the file's contents, where they are here already. beside: other files that are to be checked, by path."""
    from safetensors import safe_open
    from safetensors.torch import load

    if name.endswith(".index.json"):
        text = raw if raw is not None else folder.read([name])[name]
        state: dict[str, torch.Tensor] = {}
        for shard in sorted(set(json.loads(text)["weight_map"].values())):
            path = name.rpartition("/")[0] + "/" + shard if "/" in name else shard
            known = beside.get(path)
            state.update(_read_safetensors(folder, path, None if known is None else _checked(folder, known), {}))
        return state
    if raw is None and isinstance(folder, LocalFolder):
        # Mapped, then copied: once, and the tensors outlive the file.
        with safe_open(f"{folder.path}/{name}", framework="pt") as mapped:
            state = {key: mapped.get_tensor(key).clone() for key in mapped.keys()}  # noqa: SIM118  # it is no dict
            metadata = mapped.metadata() or {}
    else:
        raw = raw if raw is not None else folder.read([name])[name]
        state = load(raw)
        length = int.from_bytes(raw[:8], "little")
        metadata = json.loads(raw[8 : 8 + length]).get("__metadata__", {})
    for alias, first in json.loads(metadata.get(_ALIASES, "{}")).items():
        state[alias] = state[first]
    return state
