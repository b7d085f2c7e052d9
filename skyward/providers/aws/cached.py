"""What costs seconds to ask and changes rarely, kept in the user's cache folder with its age."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...core.ownership import check_path, make_private_folder
from ...errors import ProviderError, UsageError

__all__ = ["Kept", "cache_folder", "cached"]


@dataclass(frozen=True, kw_only=True)
class Kept:
    """`at`: seconds since the epoch, when it was asked for."""

    value: Any
    at: float


def cache_folder() -> str:
    """`$XDG_CACHE_HOME/skyward/aws`, else `~/.cache/skyward/aws`. Raises UsageError, see `skyward.core.ownership`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        base = os.path.expanduser("~/.cache")
    folder = os.path.join(base, "skyward", "aws")
    check_path(folder)
    return folder


def cached(key: str, max_age_s: float, fetch: Callable[[], Any]) -> Kept:
    """What `fetch` gives, or gave at most `max_age_s` ago in any process; where it fails now, whatever it gave last.

    Raises what `fetch` raises where nothing was kept.
    """
    path = os.path.join(cache_folder(), f"{key}.json")
    old = _read(path)
    if old is not None and 0 <= time.time() - old.at <= max_age_s:
        return old
    try:
        new = Kept(value=fetch(), at=time.time())
    except ProviderError:
        if old is None:
            raise
        return old
    with contextlib.suppress(OSError, UsageError):  # it is only a cache
        _write(path, new)
    return new


def _read(path: str) -> Kept | None:
    try:
        with open(path, encoding="utf-8") as file:
            kept = json.load(file)
        return Kept(value=kept["value"], at=float(kept["at"]))
    except (OSError, ValueError, KeyError, TypeError):  # not kept, or by another version: ask again
        return None


def _write(path: str, kept: Kept) -> None:
    make_private_folder(os.path.dirname(path))
    partial = f"{path}.{os.getpid()}"
    with open(partial, "w", encoding="utf-8") as file:
        json.dump({"at": kept.at, "value": kept.value}, file)
    os.replace(partial, path)
