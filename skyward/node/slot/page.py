"""The shared page: numbers in memory that a slot's process and its agent both map.

An array of u64, one group of numbers for each lane:

    CURRENT  the task that runs, 0: none      INDEX    offset of the call of a chunk that was begun last
    CANCEL   the task to be interrupted       DRAINED  bytes of output that the agent has read (written by the agent)
    ENDED    how many tasks have ended        READING  1 while the agent reads output, which DRAINED does not count yet

When the process dies, the agent reads there exactly what had begun.
"""

from __future__ import annotations

import mmap

__all__ = ["CANCEL", "CURRENT", "DRAINED", "ENDED", "INDEX", "PAGE_GROUP", "READING", "map_page"]

CURRENT, INDEX, CANCEL, DRAINED, ENDED, READING = range(6)
PAGE_GROUP = 6
"""Numbers of each lane."""


def map_page(fd: int, lanes: int) -> memoryview:
    """The shared page as numbers; one group for each lane."""
    size = max(4096, lanes * PAGE_GROUP * 8)
    return memoryview(mmap.mmap(fd, size)).cast("Q")
