"""A folder of ours, on a disk or in a store, as torch.distributed.checkpoint's file system; digested on the way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta

from .dcp_metadata import METADATA, metadata_in
from .folders import Folder
from .hashing import HashingFile

__all__ = ["FolderSystem", "reader_of", "writer_of"]


def writer_of(system: FolderSystem) -> Any:
    writer: Any = FileSystemWriter("", sync_files=False)  # a file of ours is durable when it is closed
    writer.fs, writer.path = system, ""
    return writer


def reader_of(folder: Folder, *, allow_pickle: bool = False) -> Any:
    """Raises: UsageError, CheckpointCorrupt, as `metadata_in` does; FileNotFoundError."""
    with folder.open(METADATA) as file:
        metadata = metadata_in(file, where=f"{folder.path}/{METADATA}", allow_pickle=allow_pickle)
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
