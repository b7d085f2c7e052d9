"""Last words of a detached pool: a file beside the folder of its head, which says when the pool ended and why.

The folder goes with the head. A client that attaches too late finds the file, unless the machine has started again.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import time
from typing import Any

_ENDING = ".ended"
_KEPT = 20


def write_last_words(folder: str, why: str) -> None:
    """Say why the head with this folder ends now. Only the words of a later error suffer if there is no room."""
    with contextlib.suppress(OSError):
        fd = os.open(folder + _ENDING, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with open(fd, "w", encoding="utf-8") as file:
            json.dump({"at": time.time(), "why": why}, file)
        written = glob.glob(os.path.join(glob.escape(os.path.dirname(folder)), "*" + _ENDING))
        for path in sorted(written, key=os.path.getmtime)[:-_KEPT]:
            os.unlink(path)


def read_last_words(folder: str) -> dict[str, Any]:
    """Return why the head with this folder has ended, and its age, by the clock of this machine; empty if unknown."""
    try:
        with open(folder + _ENDING, encoding="utf-8") as file:
            words = json.load(file)
        return {"why": str(words["why"]), "age_s": max(0.0, time.time() - float(words["at"]))}
    except (OSError, ValueError, KeyError):  # the machine was started again, or the disk was full
        return {}
