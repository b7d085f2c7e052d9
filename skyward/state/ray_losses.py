"""Reason why Ray was last lost, or did not come up, in a pool of this user: a file of the state folder, mode 0600.

`skyward doctor` shows it, because a program may not have kept the line that said so. A Ray that stands removes it.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import asdict

from ..core.ownership import make_private_folder
from ..core.records import dataclass
from ..errors import UsageError
from .journal import state_folder

_FILE = "ray-loss.json"


@dataclass(frozen=True, kw_only=True)
class RayLoss:
    """Loss of a pool's Ray. `at` is in seconds since the epoch."""

    pool: str
    reason: str
    at: float


def note_loss(pool: str, reason: str) -> None:
    """Keep the reason. Without room or permission for it, only the report lacks it."""
    with contextlib.suppress(OSError, UsageError):
        path = os.path.join(make_private_folder(state_folder()), _FILE)
        fd = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(fd, "w", encoding="utf-8") as file:
            json.dump(asdict(RayLoss(pool=pool, reason=reason, at=time.time())), file)
        os.replace(f"{path}.new", path)


def forget_loss() -> None:
    """Forget the reason, because a Ray stands. Idempotent."""
    with contextlib.suppress(OSError, UsageError):
        os.unlink(os.path.join(state_folder(), _FILE))


def last_loss() -> RayLoss | None:
    """Return the last loss; None: there was none since a Ray stood."""
    try:
        with open(os.path.join(state_folder(), _FILE), encoding="utf-8") as file:
            return RayLoss(**json.load(file))
    except (OSError, UsageError, ValueError, TypeError):  # no file, or half of one after a power loss
        return None
