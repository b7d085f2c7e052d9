"""Files of MLflow's runs and logged models, by the address of their artifacts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import MissingDependency
from ..model.foreign import ForeignFile, ForeignFiles, local_folder
from ..model.refusal import Reason, Refusal
from .blobs import PIECE

if TYPE_CHECKING:
    from .mlflow_s3 import MlflowS3

PROXY = "mlflow-artifacts:"
"""Beginning of addresses of files that MLflow's server hands out."""
_S3 = "s3://"


class ArtifactRoots:
    """Folders and buckets in which MLflow keeps artifacts.

    Args:
        folder: Folder in place of `mlflow-artifacts:/`, see `local_folder`.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._s3: MlflowS3 | None = None

    def files(self, uri: str, owner: str) -> ForeignFiles | None:
        """Return the files at an address, or None where this machine cannot reach it.

        A user of MLflow chooses the place of an experiment, and MLflow adds the owner's id to it. So only such a folder
        is read: any other one could be a private folder of whoever imports.

        Args:
            uri: Address of the artifacts.
            owner: Id of the run or of the logged model.

        Raises:
            MissingDependency: The address is in S3, and boto3 is not installed.
        """
        parts = uri.rstrip("/").split("/")
        if parts[-2:] != [owner, "artifacts"] or ".." in parts:
            return partial(_refuse, uri) if uri.startswith((_S3, "/", "file:")) else None
        if uri.startswith(_S3):
            return partial(self._bucket(uri).files, uri)
        folder = local_folder(uri, self._folder)
        return None if folder is None else partial(folder_files, folder)

    def _bucket(self, uri: str) -> MlflowS3:
        if self._s3 is None:
            try:
                from .mlflow_s3 import MlflowS3
            except ImportError as error:
                problem = f"artifacts={uri!r}: are in S3, which needs {error.name}; pip install 'skyward[hub-s3]'"
                raise MissingDependency(problem, name=error.name) from None
            self._s3 = MlflowS3()
        return self._s3


def folder_files(root: Path) -> Iterator[ForeignFile]:
    """Yield the files below a folder. Links are left out: they may lead out of it."""
    for folder, _, names in os.walk(root):
        for name in sorted(names):
            path = Path(folder, name)
            if path.is_file() and not path.is_symlink():
                yield ForeignFile(path.relative_to(root).as_posix(), path.stat().st_size, partial(_read, path))


def _refuse(uri: str) -> Iterator[ForeignFile]:
    problem = "is no folder of its own, as MLflow makes them; copy its files there, and mend the address"
    raise Refusal(Reason.INVALID, f"artifact_uri={uri[:200]!r}: {problem}")


def _read(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            yield from iter(lambda: file.read(PIECE), b"")
    except OSError as error:
        problem = f"file={str(path)!r}: cannot be read ({error.strerror}); change its mode"
        raise Refusal(Reason.INVALID, problem) from None
