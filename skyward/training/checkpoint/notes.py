"""Notes of durable saves, one line of JSON each, for whoever started this process and wants to know."""

from __future__ import annotations

import json
import logging
import os

NOTES = "SKYWARD_CHECKPOINT_NOTES"
"""Variable with the path of a file to which rank 0 appends a line for each durable save. A hub sets it for its jobs."""

_log = logging.getLogger(__name__)


def note_save(path: str, step: int | None, size_bytes: int, took_s: float) -> None:
    """Append a line about a save. A file that cannot be written costs the note, not the training."""
    file = os.environ.get(NOTES, "")
    if not file:
        return
    note = {"path": path, "step": step, "bytes": size_bytes, "seconds": round(took_s, 3)}
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, f"{json.dumps(note)}\n".encode())  # one write: whole lines, whoever else appends
        finally:
            os.close(descriptor)
    except OSError as error:
        _log.warning("%s: could not note a save: %s", file, error)
