"""A checkpoint of torch.distributed.checkpoint in a folder of ours, on a disk or in a store, digested on the way.

Nothing is unpickled as it comes. Its `.metadata`, a pickle, may name what it is made of only; values that are no
tensors are as `plain` has them, where its own planners unpickle whatever a file says.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint._nested_dict import set_element  # type: ignore[attr-defined]
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import ReadItem, WriteItem, WriteItemType

from ...errors import CheckpointCorrupt, UsageError
from .folders import Folder
from .hashed_file import HashingFile
from .plain import to_plain
from .writer import load_plain

__all__ = ["FolderSystem", "PlainLoadPlanner", "PlainSavePlanner", "WholeLoadPlanner", "reader_of", "writer_of"]

_METADATA = ".metadata"

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


def writer_of(system: FolderSystem) -> Any:
    writer: Any = FileSystemWriter("", sync_files=False)  # a file of ours is durable when it is closed
    writer.fs, writer.path = system, ""
    return writer


def reader_of(folder: Folder, *, allow_pickle: bool = False) -> Any:
    """Raises: UsageError for metadata that names what may run code; CheckpointCorrupt; FileNotFoundError."""
    with folder.open(_METADATA) as file:
        metadata = _metadata_in(file, where=f"{folder.path}/{_METADATA}", allow_pickle=allow_pickle)
    reader: Any = _Reader(metadata)
    reader.fs = FolderSystem(folder)
    return reader


class _Reader(FileSystemReader):
    """One whose metadata was read beforehand, so that it is not read with all that a pickle may do."""

    def __init__(self, metadata: Any) -> None:
        super().__init__("")
        self.path: Any = ""
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        if getattr(self._metadata, "storage_meta", None) is None:
            self._metadata.storage_meta = StorageMeta()
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata


class FolderSystem(FileSystemBase):
    """written: the files that were made, by their names, with bytes and digests."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self.written: dict[str, HashingFile] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        if mode == "rb":
            with self._folder.open(path) as stream:
                yield stream
            return
        # Its metadata goes to another name first, and then has its own: here nothing counts before the commit.
        name = path.removesuffix(".tmp")
        with self._folder.create(name) as file:
            yield file
        self.written[name] = file

    def concat_path(self, path: Any, suffix: str) -> str:
        return suffix

    def rename(self, path: Any, new_path: Any) -> None:
        """It has that name already."""

    def init_path(self, path: Any) -> Any:
        return path

    def mkdir(self, path: Any) -> None:
        """`create` does."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def exists(self, path: Any) -> bool:
        return False  # every save has a new folder

    def rm_file(self, path: Any) -> None:
        """There is none to be replaced."""


class PlainSavePlanner(DefaultSavePlanner):
    def __init__(self, *, where: str, allow_pickle: bool) -> None:
        super().__init__()
        self._where, self._allow_pickle = where, allow_pickle

    def check(self, state: Any) -> None:
        """Raises: UsageError for a value that could not be loaded again."""
        to_plain(state, where=self._where, allow_pickle=self._allow_pickle)

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002  # its name there
        if write_item.type == WriteItemType.BYTE_IO:
            object = to_plain(object, where=self._where, allow_pickle=self._allow_pickle)  # noqa: A001
        return super().transform_object(write_item, object)


class _ReadsPlainValues(DefaultLoadPlanner):
    def __init__(self, *, where: str, allow_pickle: bool) -> None:
        super().__init__()
        self._where, self._allow_pickle = where, allow_pickle

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        loaded = load_plain(value, where=f"{self._where}: {name}", allow_pickle=self._allow_pickle)
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], loaded)
        else:
            self.state_dict[name] = loaded


class PlainLoadPlanner(_ReadsPlainValues):
    """Fills a state dict that is there."""


class WholeLoadPlanner(_ReadsPlainValues, _EmptyStateDictLoadPlanner):
    """Makes the state dict from the metadata."""


def _metadata_in(file: BinaryIO, *, where: str, allow_pickle: bool = False) -> Any:
    """Read the metadata from an open file. allow_pickle: with all that a pickle may do.

    Raises: UsageError for any other class or function; CheckpointCorrupt.
    """
    try:
        return (pickle.Unpickler(file) if allow_pickle else _MetadataReader(file, where)).load()
    except UsageError:
        raise
    except Exception as error:  # a damaged pickle raises whatever its damage comes to
        raise CheckpointCorrupt(
            f"{where}: the metadata cannot be read: {type(error).__name__}: {error}", path=where
        ) from error


class _MetadataReader(pickle.Unpickler):
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
