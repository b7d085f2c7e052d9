"""Find what was meant by a name that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["suggestion"]

_CUTOFF = 0.72
"""Above difflib's 0.6, where "gpus" is near "vcpus" and "volumes" is near "roles"."""


def suggestion(name: str, known: Iterable[str]) -> str | None:
    """The nearest of the known names; None where none is near enough to be meant."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=_CUTOFF)
    return near[0] if near else None
