"""Function that a pool's slot runs; models and contents stay in its process for the next evaluations."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ....calls.compute import compute
from ....node.slot.runtime import current_call
from ..worker import ContentsMissing, Scored, Worker
from .packed import PackedJob, unpack

_worker = Worker()


@dataclass(frozen=True, kw_only=True)
class Reply:
    """Result of a job, or the contents that it lacks."""

    scored: Scored | None
    missing: tuple[str, ...] = ()
    """Digests of missing contents, if `scored` is None."""
    holder: str
    """Unique name of the answering process."""
    node: int | None
    """Number of the node in its pool."""


@compute
def evaluate(packed: PackedJob, contents: dict[str, bytes], state: object) -> Reply:
    """Score a state; raise the evaluation's exception, or PayloadNotLoadable."""
    call = current_call()
    node = None if call is None else call.node
    holder = f"{_boot_id()} {os.getpid()}"
    try:
        parts = unpack(_worker, packed, contents)
    except ContentsMissing as error:
        return Reply(scored=None, missing=error.digests, holder=holder, node=node)
    scored = _worker.run(**parts, cache_key=packed.cache_key, state=state)
    return Reply(scored=scored, holder=holder, node=node)


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:  # not Linux
        return os.uname().nodename
