"""The `.metadata` of torch.distributed.checkpoint, a pickle, read without running what else a pickle may name."""

from __future__ import annotations

import pickle
from typing import Any, BinaryIO

import torch

from ...errors import CheckpointCorrupt, UsageError

__all__ = ["METADATA", "metadata_in"]

METADATA = ".metadata"

_DCP = "torch.distributed.checkpoint"
_OLD = "torch.distributed._shard.sharded_tensor.metadata"
_CLASSES = frozenset(
    {
        *(
            (f"{_DCP}.metadata", name)
            for name in (
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        (f"{_DCP}.filesystem", "_StorageInfo"),
        (_OLD, "TensorProperties"),
        (_OLD, "MEM_FORMAT_ENCODING"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
        ("builtins", "set"),
        ("collections", "OrderedDict"),
        ("pathlib", "PosixPath"),
        ("pathlib", "PurePosixPath"),
        ("pathlib._local", "PosixPath"),
        ("pathlib._local", "PurePosixPath"),
    }
)
"""What it is made of. None of these does more than keep the values that it is given."""


def metadata_in(file: BinaryIO, *, where: str, allow_pickle: bool = False) -> Any:
    """Read the metadata from an open file. allow_pickle: with all that a pickle may do.

    Raises: UsageError for any other class or function; CheckpointCorrupt.
    """
    try:
        return (pickle.Unpickler(file) if allow_pickle else _Reader(file, where)).load()
    except UsageError:
        raise
    except Exception as error:  # a damaged pickle raises whatever its damage comes to
        raise CheckpointCorrupt(
            f"{where}: the metadata cannot be read: {type(error).__name__}: {error}", path=where
        ) from error


class _Reader(pickle.Unpickler):
    def __init__(self, file: BinaryIO, where: str) -> None:
        super().__init__(file)
        self._where = where

    def find_class(self, module: str, name: str, /) -> Any:
        # Exact pairs: a name with dots in it would reach whatever a module has imported.
        if (module, name) in _CLASSES:
            return super().find_class(module, name)
        if module == "torch" and name.isidentifier() and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        raise UsageError(
            f"{self._where}: names {module}.{name}, which the metadata of torch.distributed.checkpoint has no use for, "
            "and which is not loaded unasked, because that may run code; if you trust the checkpoint, pass "
            "allow_pickle=True (--allow-pickle)"
        )
