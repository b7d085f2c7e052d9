"""Detached pools of this user, recorded so that any later process can attach to them.

Each has a file in `detached/` of the state folder, mode 0600, because it holds the key by which its head knows its
clients. The file stays when the pool has ended, so that whoever attaches too late learns why. The newest are kept.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import asdict, field, replace
from typing import Any

from ..core.ownership import make_private_folder
from ..core.records import dataclass
from ..errors import UsageError
from .journal import state_folder

_ENDING = ".json"
_CODE = ".code"
_KEPT_ENDED = 20
DOWN = "because of `skyward down`"
"""Reason of an end that a user has asked for."""


@dataclass(frozen=True, kw_only=True)
class DetachedPool:
    """Record of a detached pool. `pool` is its unique name; `name` is the one that its user gave it."""

    name: str
    pool: str
    began: float
    detached_for_s: float
    protocol: int
    """Version of the protocol that its head speaks."""
    version: str
    """Version of skyward on its machines."""
    key: str = field(repr=False)
    socket_path: str
    """Socket of the head on the machine of the first node."""
    process: tuple[str, str, str]
    """Outermost process of the head: its number, its start and its folder."""
    lease_s: float
    provider: dict[str, Any]
    """Type and arguments of the provider."""
    machine: dict[str, Any]
    """First node, as its provider describes it."""
    options: dict[str, Any]
    """Options of the pool that its clients need."""
    others: tuple[dict[str, Any], ...] = ()
    """Further nodes."""
    image: dict[str, Any] = field(default_factory=dict, repr=False)
    """Fields of the image by which a client raises Ray again; empty for one node."""
    spending: dict[str, Any] = field(default_factory=dict)
    """Cost of rented machines until the record was written; see `skyward.pool.cost.Spending.facts`."""
    ended_at: float = 0.0
    """Time of its end as far as this machine knows, in seconds since the epoch; 0: it may be there."""
    why: str = ""

    @property
    def has_ended(self) -> bool:
        return bool(self.ended_at)

    @property
    def instances(self) -> frozenset[str]:
        """Rented machines on record."""
        return frozenset(place["instance"] for place in (self.machine, *self.others) if "instance" in place)

    @property
    def may_have_several(self) -> bool:
        """Return whether the pool has several nodes, or is elastic."""
        return bool(self.image or self.others)

    @property
    def bounds(self) -> tuple[int, int]:
        """Fewest and most nodes."""
        nodes = self.options.get("nodes", 1)
        return (nodes, nodes) if isinstance(nodes, int) else (nodes[0], nodes[1])

    @property
    def is_elastic(self) -> bool:
        return self.bounds[0] < self.bounds[1]


def record(pool: DetachedPool) -> None:
    """Write a pool's file.

    Raises:
        UsageError: It cannot be written.
    """
    _write(_path(pool.pool), json.dumps(asdict(pool)).encode())


def keep_code(pool: DetachedPool, code: bytes) -> None:
    """Keep the user's code, which another process sends to new nodes, until the end of the pool.

    Raises:
        UsageError: It cannot be written.
    """
    _write(_path(pool.pool, _CODE), code)


def code_of(pool: DetachedPool) -> bytes | None:
    """Return the code that was kept for a pool; None if it is not on this machine."""
    try:
        with open(_path(pool.pool, _CODE), "rb") as file:
            return file.read()
    except OSError:  # another machine has opened the pool
        return None


def _write(path: str, content: bytes) -> None:
    """Write a private file. Readers see the old content or the new one."""
    try:
        make_private_folder(os.path.dirname(path))
        fd = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(fd, "wb") as file:
            file.write(content)
        os.replace(f"{path}.new", path)
    except OSError as error:
        raise UsageError(
            f"state folder: {path} cannot be written: {error.strerror}; a detached pool needs it, so check its "
            "permissions and the disk"
        ) from error


def end(pool: DetachedPool, why: str, *, at: float = 0.0) -> DetachedPool:
    """Note that a pool has ended, `at` that time or now, and return its last record.

    Only the words of later errors suffer if the file cannot be written.
    """
    last = replace(pool, ended_at=at or time.time(), why=why, key="")
    with contextlib.suppress(UsageError):
        record(last)
    with contextlib.suppress(OSError):  # there is none
        os.unlink(_path(pool.pool, _CODE))
    ended = [other for other in detached_pools() if other.has_ended]
    for old in sorted(ended, key=lambda other: other.ended_at)[:-_KEPT_ENDED]:
        with contextlib.suppress(OSError):  # another process removed it
            os.unlink(_path(old.pool))
    return last


def detached_pools() -> list[DetachedPool]:
    """Return all recorded pools, oldest first, also those that have ended."""
    folder = os.path.join(state_folder(), "detached")
    found = []
    with contextlib.suppress(OSError):  # no pool was ever detached here
        for name in os.listdir(folder):
            if name.endswith(_ENDING):
                # Removed meanwhile, or written by another version of skyward.
                with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                    found.append(_read(os.path.join(folder, name)))
    return sorted(found, key=lambda pool: (pool.began, pool.pool))


def living(name: str) -> DetachedPool | None:
    """Return the detached pool of that name that may be there; None if there is none."""
    pools = [pool for pool in detached_pools() if name in (pool.name, pool.pool) and not pool.has_ended]
    return pools[-1] if pools else None


def find(name: str) -> DetachedPool:
    """Return the detached pool of that name.

    Raises:
        UsageError: There is none, or it has ended. The message says which there are, or when and why it ended.
    """
    pool = living(name)
    if pool is not None:
        return pool
    pools = detached_pools()
    ended = [pool for pool in pools if name in (pool.name, pool.pool)]
    if ended:
        raise refuse_ended(ended[-1])
    known = sorted({pool.name for pool in pools if not pool.has_ended})
    advice = (
        f"use one of {', '.join(known)}"
        if known
        else 'open one first: sky.ComputePool(..., name="train", detached_for_s=3600)'
    )
    raise UsageError(
        f"pool={name!r}: no detached pool of that name on this machine; {advice}", field="name", value=name
    )


def refuse_ended(pool: DetachedPool) -> UsageError:
    """Return the error of whoever uses a pool that has ended: when, and why."""
    at = time.strftime("on %Y-%m-%d at %H:%M", time.localtime(pool.ended_at))
    return UsageError(f"pool={pool.name!r}: ended {at}, {pool.why}; open a new one", field="name", value=pool.name)


def _read(path: str) -> DetachedPool:
    with open(path, encoding="utf-8") as file:
        return pool_of(json.load(file))


def pool_of(fields: dict[str, Any]) -> DetachedPool:
    """Return a pool of the fields in a file. Raises TypeError, KeyError if they are not those of a pool."""
    known = DetachedPool.__dataclass_fields__
    fields = {key: value for key, value in fields.items() if key in known}  # newer versions may write more
    fields |= {name: tuple(fields[name]) for name in ("process", "others") if name in fields}
    options = fields["options"]
    if isinstance(options.get("nodes"), list):
        fields["options"] = {**options, "nodes": tuple(options["nodes"])}
    return DetachedPool(**fields)


def _path(pool: str, ending: str = _ENDING) -> str:
    return os.path.join(state_folder(), "detached", pool + ending)
