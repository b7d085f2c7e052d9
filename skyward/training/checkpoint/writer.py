"""Conversion of a state to a file, and of a file to a state."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch

from ...errors import CheckpointCorrupt, UsageError
from ...stores.folders import Folder, LocalFolder, digest_of_file
from ...stores.hashed_file import HashingFile, digest_of
from .manifest import FileEntry, corrupt
from .plain import from_plain, to_plain

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
    """Write a state to a file, which is durable on return.

    Args:
        folder: folder to write to.
        name: name of the file.
        state: the state dict.
        kind: "torch" (torch.save) or "safetensors".
        key: key of the component, for an error.
        allow_pickle: write objects of any class, which load with `allow_pickle` only.

    Returns:
        Its size in bytes, and its digest.

    Raises:
        UsageError: the state could not be loaded again.
    """
    if kind == "torch":
        state = to_plain(state, where=f"StateComponent {key!r}", allow_pickle=allow_pickle)
    with folder.create(name) as file:
        serialise(file, state, kind)
    return file.bytes, file.digest


def serialise(file: HashingFile, state: Any, kind: str) -> None:
    """Serialise a state to an open file; `kind` is that of `write_state`."""
    if kind == "safetensors":
        _write_safetensors(file, state)
        return
    with _without_crc32():
        torch.save(state, cast("Any", file))


def _without_crc32() -> AbstractContextManager[object]:
    """Turn torch.save's checksums off: they take as long as the write, and torch.load ignores them."""
    if hasattr(torch.serialization, "set_crc32_options"):
        from torch.utils.serialization import config

        return config.patch("save.compute_crc32", False)  # type: ignore[attr-defined, no-any-return]  # this thread's
    return nullcontext()  # torch before 2.6


def check_file(folder: Folder, entry: FileEntry, *, digest: bool = True) -> None:
    """Raise CheckpointCorrupt unless the file is there as it was written."""
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
    """Check a file, then load it to the CPU.

    Args:
        folder: folder of the checkpoint.
        entry: the file.
        beside: other files of the component, which an index may name.
        allow_pickle: load objects of any class.

    Raises:
        CheckpointCorrupt: the file is missing or changed.
        UsageError: an object needs `allow_pickle`.
    """
    where = f"{folder.path}/{entry.path}"
    raw = _checked(folder, entry)
    if entry.format == "safetensors":
        return _read_safetensors(folder, entry.path, raw, {file.path: file for file in beside})
    try:
        with folder.open(entry.path) if raw is None else io.BytesIO(raw) as file:
            return load_plain(file, where=where, allow_pickle=allow_pickle)
    except (EOFError, RuntimeError) as error:
        raise corrupt(where, f"cannot be loaded ({error})") from error


def load_plain(file: Any, *, where: str, allow_pickle: bool = False) -> Any:
    """Load a file that `to_plain` and torch.save wrote. It raises the errors of `read_state`."""
    if not allow_pickle and _runs_old_formats():
        check_is_zip(file, where)
    try:
        return from_plain(torch.load(file, map_location="cpu", weights_only=not allow_pickle))
    except pickle.UnpicklingError as error:
        if "weights_only" not in str(error).lower() and "weights only" not in str(error).lower():
            raise corrupt(where, f"cannot be loaded ({error})") from error
        raise UsageError(
            f"{where}: has objects of classes whose loading may run code; if you trust the file, pass "
            f"allow_pickle=True, or allow the classes with torch.serialization.add_safe_globals([...]): {error}"
        ) from error
    except (ValueError, KeyError, TypeError) as error:  # raised for a damaged mark
        raise corrupt(where, f"cannot be loaded ({type(error).__name__}: {error})") from error


def _runs_old_formats() -> bool:
    """Return whether this torch runs code of files in the format before 1.6, even with `weights_only`.

    Source: CVE-2025-32434; torch 2.6 fixed it.
    """
    return tuple(map(int, torch.__version__.split(".")[:2])) < (2, 6)


def check_is_zip(file: Any, where: str) -> None:
    """Raise UsageError for another format than torch's current one."""
    begin = file.read(4)
    file.seek(0)
    if begin != b"PK\x03\x04":
        raise UsageError(
            f"{where}: is in a format from before torch 1.6, which torch {torch.__version__} cannot load without "
            "running its code; use torch 2.6 or newer, or pass allow_pickle=True if you trust the file"
        )


def _checked(folder: Folder, entry: FileEntry) -> bytes | None:
    """Check size and digest of a file. Return its contents if loading would transfer them over a network again."""
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
    return corrupt(where, "the manifest names it, but it is missing")


def _check_size(where: str, entry: FileEntry, size: int) -> None:
    if size != entry.bytes:
        raise corrupt(where, f"has {size:,} bytes, but {entry.bytes:,} were written")


def _check_digest(where: str, entry: FileEntry, digest: str) -> None:
    if digest != entry.digest:
        raise corrupt(where, f"its digest is {digest}, but {entry.digest} was written")


def _write_safetensors(file: Any, state: Any) -> None:
    """Write a file in the safetensors format.

    The format's own writer refuses tied weights, and cannot be hashed while it writes. The format is a page long.
    Source: https://huggingface.co/docs/safetensors, "Format".
    """
    if not isinstance(state, Mapping) or not all(isinstance(item, torch.Tensor) for item in state.values()):
        raise UsageError(
            "format='safetensors': the state is not a flat dict of tensors; remove it from the component's metadata"
        )
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
            raise UsageError(
                f"format='safetensors': cannot hold {tensor.dtype} ({name!r}); remove it from the component's metadata"
            )
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
    """Read a safetensors file; `raw` is its contents if known, `beside` the files that an index may name, by path."""
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
        # Map the file, then copy once: the tensors must outlive the file.
        with safe_open(f"{folder.path}/{name}", framework="pt") as mapped:
            state = {key: mapped.get_tensor(key).clone() for key in mapped.keys()}  # noqa: SIM118  # not a dict
            metadata = mapped.metadata() or {}
    else:
        raw = raw if raw is not None else folder.read([name])[name]
        state = load(raw)
        length = int.from_bytes(raw[:8], "little")
        metadata = json.loads(raw[8 : 8 + length]).get("__metadata__", {})
    for alias, first in json.loads(metadata.get(_ALIASES, "{}")).items():
        state[alias] = state[first]
    return state
