"""Cache on disk for slow, rarely changing answers, in the user's cache folder, with their age."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from typing import Any

from ...core.ownership import check_path, make_private_folder
from ...core.records import dataclass
from ...errors import ProviderError, UsageError


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A cached value. `at`: when it was fetched, in seconds since the epoch."""

    value: Any
    at: float


def cache_folder() -> str:
    """Path of the cache: `$XDG_CACHE_HOME/skyward/aws`, else `~/.cache/skyward/aws`.

    Raises:
        UsageError: the folder is not safely the user's own; see `skyward.core.ownership`.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        base = os.path.expanduser("~/.cache")
    folder = os.path.join(base, "skyward", "aws")
    check_path(folder)
    return folder


def cached(key: str, max_age_s: float, fetch: Callable[[], Any]) -> Kept:
    """Return a fresh enough cached value, or fetch one. If the fetch fails, return the stale value.

    Args:
        key: name of the value's file.
        max_age_s: oldest acceptable age in seconds. The cache is shared by all processes of the user.
        fetch: gets a new value.

    Raises:
        ProviderError: `fetch` raised it, and no value is cached.
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
    with contextlib.suppress(OSError, UsageError):  # an unwritable cache costs time, not the result
        _write(path, new)
    return new


def _read(path: str) -> Kept | None:
    try:
        with open(path, encoding="utf-8") as file:
            kept = json.load(file)
        return Kept(value=kept["value"], at=float(kept["at"]))
    except (OSError, ValueError, KeyError, TypeError):  # missing, or written by another version: fetch again
        return None


def _write(path: str, kept: Kept) -> None:
    make_private_folder(os.path.dirname(path))
    partial = f"{path}.{os.getpid()}"
    with open(partial, "w", encoding="utf-8") as file:
        json.dump({"at": kept.at, "value": kept.value}, file)
    os.replace(partial, path)
