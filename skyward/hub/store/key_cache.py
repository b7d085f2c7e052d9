"""Cache of the integers that stand for names."""

from __future__ import annotations

CACHED = 200_000
"""Names in the cache of a process. Beyond that it starts afresh, because a process must not grow for ever."""


class KeyCache:
    """Committed keys, by project and name. Only the writer's thread uses it."""

    def __init__(self) -> None:
        self._ids: dict[tuple[int, str], int] = {}

    def get(self, project: int, name: str) -> int | None:
        return self._ids.get((project, name))

    def add(self, ids: dict[tuple[int, str], int]) -> None:
        """Remember keys of a transaction that was committed."""
        if len(self._ids) + len(ids) > CACHED:
            self._ids.clear()
        self._ids.update(ids)
