"""What is kept on a node for the next pool: environments, downloads and code, under ~/.cache/skyward there."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ProviderError
from .payload import script
from .runner import Runner, text_of

__all__ = ["CACHE_LIMIT_GIB", "Cleared", "clear_cache"]

CACHE_LIMIT_GIB = 20.0
"""All that is kept by one user on one node; beyond it the least recently used environments go."""
_LIMIT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Cleared:
    """`kept`: environments that processes use, or that were used in the last quarter of an hour."""

    removed: tuple[str, ...]
    kept: tuple[str, ...]
    freed_gib: float


def clear_cache(run: Runner, *, patience_s: int = 60) -> Cleared:
    """Remove what this user's pools have left on a machine, but for what is in use. Idempotent.

    Pools that are being made ready there are waited for, for `patience_s`.

    Raises ProviderError if they take longer or the machine's shell does not answer, and what `run` raises.
    """
    order = script(("node.sh", "cache.sh", "clear.sh"), {"patience_s": str(patience_s)})
    done = run("exec sh -s", input=order, timeout_s=patience_s + _LIMIT_S)
    removed: list[str] = []
    kept: list[str] = []
    freed_kib = 0
    is_whole = False
    for line in text_of(done.stdout).splitlines():
        name, _, text = line.removeprefix("\1").partition(" ")
        if not line.startswith("\1"):
            continue
        if name == "removed":
            size, _, path = text.partition(" ")
            freed_kib += int(size or 0)
            removed.append(path)
        elif name == "kept":
            kept.append(text)
        elif name == "busy":
            raise ProviderError(f"the cache was not cleared: pools are being made ready there, by {text}; try again")
        is_whole |= name == "end"
    if not is_whole:
        raise ProviderError(f"the cache was not cleared: the shell there ended with code {done.code}")
    return Cleared(removed=tuple(removed), kept=tuple(kept), freed_gib=freed_kib / 2**20)
