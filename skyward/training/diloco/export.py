"""Export of the global model, as a file that `from_pretrained` reads."""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets

from ...errors import UsageError
from ..checkpoint.retention import latest_checkpoint
from .frames import BUFFER_PREFIX, FROZEN_PREFIX, ArrayFrame, decode, encode

MODEL_FILE = "model.safetensors"


def saved_model(save_dir: str | os.PathLike[str]) -> ArrayFrame:
    """Return the global model of the newest save in a server's folder.

    Raises:
        UsageError: There is no save, or its file is broken.
    """
    path = latest_checkpoint(save_dir)
    if path is None:
        raise UsageError(f"save_dir={os.fspath(save_dir)!r}: has no save; name the save_dir of a server")
    with open(os.path.join(path, MODEL_FILE), "rb") as file:
        return decode(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)))


def export_model(frame: ArrayFrame, folder: str | os.PathLike[str]) -> str:
    """Write a model into a folder, beside its config.json if there is one, and return the path of the file.

    A program that reads the folder at the same time finds the old file or the new one.

    Args:
        frame: The model, as a server or its save has it. Tied weights have their first name only.
        folder: Folder to write to, which may not exist yet.
    """
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, MODEL_FILE)
    unfinished = f"{path}.{secrets.token_hex(8)}"
    arrays = {
        name.removeprefix(BUFFER_PREFIX).removeprefix(FROZEN_PREFIX): array for name, array in frame.arrays.items()
    }
    try:
        with open(unfinished, "wb") as file:
            for piece in encode(arrays, {"format": "pt"}):
                file.write(piece)
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        raise
    return path
