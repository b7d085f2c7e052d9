"""Checkpoints of torch.distributed.checkpoint in a `Folder`, on a disk or in a store, digested while written.

No pickle is loaded unchecked. The `.metadata` file is a pickle, and may name only the classes of such metadata. Values
that are not tensors are written as by `plain`; torch's own planners would unpickle whatever a file contains.
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

from ...errors import UsageError
from ...stores.folders import Folder
from ...stores.hashed_file import HashingFile
from .manifest import corrupt
from .plain import to_plain
from .writer import load_plain

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
"""Classes and functions of such metadata. None of them does more than keep its arguments."""


def writer_of(system: FolderSystem) -> Any:
    """Return torch's writer, set to write to `system`."""
    writer: Any = FileSystemWriter("", sync_files=False)  # `Folder.create` makes each file durable when it closes
    writer.fs, writer.path = system, ""
    return writer


def reader_of(folder: Folder, *, allow_pickle: bool = False) -> Any:
    """Return a reader of the checkpoint in `folder`.

    Raises:
        UsageError: the metadata names a class or function that may run code.
        CheckpointCorrupt: the metadata is damaged.
        FileNotFoundError: there is no metadata.
    """
    with folder.open(_METADATA) as file:
        metadata = _metadata_in(file, where=f"{folder.path}/{_METADATA}", allow_pickle=allow_pickle)
    reader: Any = _Reader(metadata)
    reader.fs = FolderSystem(folder)
    return reader


class _Reader(FileSystemReader):
    """Reader with metadata that was read beforehand, because torch's own reading would run any pickle."""

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
    """File system of torch.distributed.checkpoint on top of a `Folder`.

    `written` has the files that were made, by name, with their sizes and digests.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self.written: dict[str, HashingFile] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        if mode == "rb":
            with self._folder.open(path) as stream:
                yield stream
            return
        # torch writes the metadata under a temporary name and renames it. Here nothing counts before the commit, so it
        # gets its final name at once.
        name = path.removesuffix(".tmp")
        with self._folder.create(name) as file:
            yield file
        self.written[name] = file

    def concat_path(self, path: Any, suffix: str) -> str:
        return suffix

    def rename(self, path: Any, new_path: Any) -> None:
        """Do nothing: `create_stream` gave the file its final name."""

    def init_path(self, path: Any) -> Any:
        return path

    def mkdir(self, path: Any) -> None:
        """Do nothing: `Folder.create` makes folders."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def exists(self, path: Any) -> bool:
        return False  # every save writes to a new folder

    def rm_file(self, path: Any) -> None:
        """Do nothing: there is never a file to replace."""


class PlainSavePlanner(DefaultSavePlanner):
    def __init__(self, *, where: str, allow_pickle: bool) -> None:
        super().__init__()
        self._where, self._allow_pickle = where, allow_pickle

    def check(self, state: Any) -> None:
        """Raise UsageError for a value that could not be loaded again."""
        to_plain(state, where=self._where, allow_pickle=self._allow_pickle)

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002  # torch's name
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
    """Fill an existing state dict."""


class WholeLoadPlanner(_ReadsPlainValues, _EmptyStateDictLoadPlanner):
    """Build the state dict from the metadata."""


def _metadata_in(file: BinaryIO, *, where: str, allow_pickle: bool = False) -> Any:
    """Read the metadata from an open file; `allow_pickle` permits any class.

    Raises:
        UsageError: the metadata names another class or function.
        CheckpointCorrupt: the metadata is damaged.
    """
    try:
        return (pickle.Unpickler(file) if allow_pickle else _MetadataReader(file, where)).load()
    except UsageError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise corrupt(where, f"the metadata cannot be read ({type(error).__name__}: {error})") from error


class _MetadataReader(pickle.Unpickler):
    def __init__(self, file: BinaryIO, where: str) -> None:
        super().__init__(file)
        self._where = where

    def find_class(self, module: str, name: str, /) -> Any:
        # Compare exact pairs: a name with dots would reach everything that a module has imported.
        if (module, name) in _CLASSES:
            return super().find_class(module, name)
        if module == "torch" and name.isidentifier() and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        raise UsageError(
            f"{self._where}: names {module}.{name}, which does not belong in the metadata of "
            "torch.distributed.checkpoint, and loading it may run code; if you trust the checkpoint, pass "
            "allow_pickle=True (--allow-pickle)"
        )
