"""Packing of a job: its call, and the user's modules, which must outlive this program."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import os
import pickle
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ...bootstrap.code import Code, gather
from ...calls.pending import PendingCompute
from ...errors import ArgumentNotPicklable, UsageError
from ...values.image import DEFAULT_IMAGE, Image
from ...values.secret import Secret
from ...wire.payloads import pickle_whole

_HERE = frozenset({"includes", "excludes", "lock", "pip_indexes"})
"""Fields of an image that are values of this machine: the code has the first two already."""


@dataclass(frozen=True, kw_only=True)
class PackedFile:
    """A file to be uploaded."""

    path: Path
    sha256: str


@dataclass(frozen=True, kw_only=True)
class PackedCode:
    """The user's modules as one archive, and where they belong.

    Attributes:
        path: Folders for `sys.path`, relative to the archive's root.
        folder: Working folder.
    """

    file: PackedFile
    path: Sequence[str]
    folder: str


def pack_call(call: PendingCompute[Any], folder: Path) -> PackedFile:
    """Write a call to a file: the launch of its processes, the function, and its arguments.

    Raises:
        UsageError: A job cannot run such a call.
        ArgumentNotPicklable: The function or an argument cannot be packed.
    """
    function = call.fn
    if function.iterator_parameters:
        raise UsageError(f"call={call.name}: takes a stream, which this program would feed; pass a list", field="call")
    if call.is_kept:
        raise UsageError(f"call={call.name}: keeps its value on a node, which ends; leave keep() out", field="call")
    if call.options.nodes is not None:
        raise UsageError(f"call={call.name}: has nodes= of its own; pass nodes= and on='all' instead", field="call")
    try:
        launch = pickle.dumps(function.launch)
        content = pickle_whole((function, call.args, call.kwargs, call.options.retry_on))
    except Exception as error:
        raise ArgumentNotPicklable(
            f"{call.name}(): cannot be sent: {type(error).__name__}: {error}; pass plain data, and make the rest "
            "inside the function",
            argument=call.name,
        ) from error
    path = folder / "call"
    path.write_bytes(len(launch).to_bytes(8, "little") + launch + content)
    return PackedFile(path=path, sha256=_hash_of(path))


@contextlib.contextmanager
def packed_code(image: Image | None, named: Sequence[str] = ()) -> Iterator[tuple[PackedCode, Path]]:
    """Pack the user's modules and the image's includes into a folder that is gone behind the block.

    Args:
        image: The image.
        named: Files in the working folder that a command names.

    Yields:
        The code, and the folder.

    Raises:
        UsageError: An include does not exist, or the modules are too large to be sent without includes.
    """
    code = gather(image or DEFAULT_IMAGE, named=named)
    with tempfile.TemporaryDirectory(prefix="skyward-job-") as name:
        folder = Path(name)
        path = folder / "code.tar.gz"
        with path.open("wb") as file:
            _write_archive(code, file)
        yield PackedCode(file=PackedFile(path=path, sha256=_hash_of(path)), path=code.path, folder=code.cwd), folder


def image_fields(image: Image | None) -> dict[str, Any]:
    """Return the fields of an image as plain data.

    Raises:
        UsageError: The image has a value that only this machine has.
    """
    if image is None:
        return {}
    made: dict[str, Any] = {}
    for name in image.given_fields():
        value = getattr(image, name)
        if name in ("lock", "pip_indexes"):
            raise UsageError(f"Image.{name}: jobs do not take it yet; list the packages in pip=", field=name)
        if name in _HERE:
            continue
        if name == "env":
            value = {key: item for key, item in value.items() if not isinstance(item, Secret)}
        made[name] = dict(value) if hasattr(value, "items") else list(value) if isinstance(value, tuple) else value
    made["python"] = image.python_version
    return made


def secret_names(image: Image | None) -> list[str]:
    """Return the names of an image's secrets, which are all that the hub may know of them.

    Raises:
        UsageError: A secret has a value of its own, or another name than its variable.
    """
    secrets = {} if image is None else {key: item for key, item in image.env.items() if isinstance(item, Secret)}
    for name, secret in secrets.items():
        if secret != Secret(name):
            raise UsageError(
                f"Image.env[{name!r}]: has a value, and the hub keeps no secrets; pass sky.Secret({name!r}), and give "
                "the launcher its value",
                field="env",
            )
    return list(secrets)


def _write_archive(code: Code, file: IO[bytes]) -> None:
    """Write the same archive for the same files, because its hash is its name: sorted, without times and owners."""
    with (
        gzip.GzipFile(fileobj=file, mode="wb", compresslevel=3, mtime=0, filename="") as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as archive,
    ):
        for place, source in sorted(code.sources.items()):
            with open(source, "rb") as content:
                status = os.fstat(content.fileno())
                entry = tarfile.TarInfo(place)
                entry.size, entry.mode = status.st_size, 0o755 if status.st_mode & 0o100 else 0o644
                archive.addfile(entry, content)


def _hash_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
