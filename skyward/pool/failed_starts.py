"""Likely reasons of a start that failed, beyond the words of its error."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterable

from ..errors import NodeLost, SkywardError, Unreachable
from ..values.machine import Machine

_WANT_OF_ROOM = frozenset(
    (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOSPC, errno.EDQUOT, errno.E2BIG, errno.EFBIG)
)


def lacks_room(error: BaseException) -> bool:
    """Return whether descriptors, threads, processes, memory or disk space ran out."""
    if isinstance(error, SkywardError):
        return False
    lacks = isinstance(error, OSError) and error.errno in _WANT_OF_ROOM
    return lacks or isinstance(error, MemoryError) or str(error).startswith("can't start new thread")


def lease_ended(machines: Iterable[Machine], error: Unreachable | NodeLost) -> Unreachable | None:
    """Return the likely reason why a node does not answer: its lease ended in the start, when nobody renews it."""
    now = time.monotonic()
    leases = [
        machine.lease_s for machine in machines if machine.leased_at and now - machine.leased_at > machine.lease_s
    ]
    if not leases:
        return None
    return Unreachable(
        f"lease_s={leases[0]:g}: nobody reached the nodes for that long after their agents began, so they ended; set "
        f"a longer lease_s, such as 60 ({error})",
        node=error.node,
    )
