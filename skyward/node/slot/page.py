"""Shared page: numbers in memory that a slot's process and its agent both map.

An array of u64 with one group of numbers per lane:

    CURRENT  running task, 0 for none         INDEX    offset of the latest begun call of a chunk
    CANCEL   task to interrupt                DRAINED  bytes of output that the agent has read (written by the agent)
    ENDED    count of ended tasks             READING  1 while the agent reads output that DRAINED does not count yet

When the process dies, the agent reads from it exactly what had begun.
"""

from __future__ import annotations

import mmap

CURRENT, INDEX, CANCEL, DRAINED, ENDED, READING = range(6)
PAGE_GROUP = 6
"""Numbers per lane."""


def map_page(fd: int, lanes: int) -> memoryview:
    """Map the shared page as numbers, one group per lane."""
    size = max(4096, lanes * PAGE_GROUP * 8)
    return memoryview(mmap.mmap(fd, size)).cast("Q")
