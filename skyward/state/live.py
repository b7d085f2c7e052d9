"""Open pools of this machine, recorded so that other processes of this user find them.

Each has a file in `live/` of the state folder, mode 0600, from its start until it is closed. A file whose owner is dead
belongs to a killed program. It tells the cleaning process what to check, and that process removes it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, field, replace

from ..core.ownership import make_private_folder
from ..core.records import dataclass
from ..errors import UsageError
from .journal import Owner, state_folder

_ENDING = ".json"
_ASKED = ".end"


@dataclass(frozen=True, kw_only=True)
class LiveNode:
    """Data that another process needs to reach a node; see `skyward.values.machine.Machine`."""

    node: int
    socket_path: str = ""
    pid: int = 0
    channel: tuple[str, ...] = ()
    terminal: tuple[str, ...] = ()
    address: str = ""
    instance_type: str = ""
    is_spot: bool = False
    price_usd_per_hour: float = 0.0
    since: float = field(default_factory=time.time)


def _program() -> str:
    return os.path.basename(next(iter(getattr(sys, "argv", ())), "")) or "python"


@dataclass(frozen=True, kw_only=True)
class LivePool:
    """Record of an open pool. `pool` is its unique name; `label` is the name that its user gave it, or empty."""

    pool: str
    label: str
    provider: str
    wanted: int
    """Number of nodes that were requested; the most of an elastic pool."""
    is_rented: bool
    least: int = 0
    """Fewest nodes that an elastic pool has in use; 0: as many as it wants."""
    owner: Owner = field(default_factory=Owner.this_process)
    program: str = field(default_factory=_program)
    began: float = field(default_factory=time.time)
    nodes: tuple[LiveNode, ...] = ()

    @property
    def is_alive(self) -> bool:
        """Return whether the process that opened the pool still runs."""
        return self.owner.is_alive()

    @property
    def price_usd_per_hour(self) -> float:
        return sum(node.price_usd_per_hour for node in self.nodes)

    def spent_usd(self, now: float) -> float:
        """Return the cost so far of the current nodes."""
        return sum(node.price_usd_per_hour * max(0.0, now - node.since) / 3600 for node in self.nodes)


def announce(pool: LivePool) -> None:
    """Write or update a pool's record. Only the listing suffers if the state folder is not writable."""
    path = _path(pool.pool, _ENDING)
    with contextlib.suppress(OSError, UsageError):  # only the listing suffers
        make_private_folder(os.path.dirname(path))
        fd = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(fd, "w", encoding="utf-8") as file:
            json.dump(asdict(pool), file)
        os.replace(f"{path}.new", path)  # atomic: readers see the old record or the new one


def withdraw(pool: str) -> None:
    """Remove the record of a closed pool. Idempotent."""
    for ending in (_ENDING, _ASKED):
        with contextlib.suppress(OSError):  # never written, or removed already
            os.unlink(_path(pool, ending))


def live_pools() -> list[LivePool]:
    """Return all recorded pools, oldest first; `is_alive` tells those of killed programs."""
    return sorted(_read_all(), key=lambda pool: (pool.began, pool.pool))


def find(name: str) -> LivePool:
    """Return the open pool with that name or label; the youngest if several share the label. Raises UsageError."""
    pools = live_pools()
    exact = [pool for pool in pools if pool.pool == name]
    matching = exact or [pool for pool in pools if name and pool.label == name]
    if not matching:
        known = ", ".join(dict.fromkeys(pool.label or pool.pool for pool in pools))
        advice = f"use one of {known}" if known else "open one first, because none is open"
        raise UsageError(f"pool {name!r}: no open pool of that name on this machine; {advice}")
    return max(matching, key=lambda pool: (pool.is_alive, pool.began))


def ask_to_end(pool: str, reason: str) -> None:
    """Ask the pool's process to close it; it checks about once a second. Raises UsageError."""
    path = _path(pool, _ASKED)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(fd, "w", encoding="utf-8") as file:
            file.write(reason)
    except OSError as error:
        raise UsageError(
            f"state folder: {path} cannot be written: {error.strerror}; check its permissions and the disk"
        ) from error


def is_asked_to_end(pool: str) -> str:
    """Return the reason for a request to end the pool, or ""."""
    try:
        with open(_path(pool, _ASKED), encoding="utf-8") as file:
            return file.read() or "another process asked to end it"
    except OSError:  # no request
        return ""


def with_nodes(pool: LivePool, nodes: tuple[LiveNode, ...]) -> LivePool:
    """Return the pool with these nodes; nodes that it already had keep their start time."""
    known = {(node.node, node.socket_path): node.since for node in pool.nodes}
    return replace(pool, nodes=tuple(replace(n, since=known.get((n.node, n.socket_path), n.since)) for n in nodes))


def _read_all() -> Iterator[LivePool]:
    folder = os.path.join(state_folder(), "live")
    try:
        names = os.listdir(folder)
    except OSError:  # no pool was ever announced here
        return
    for name in names:
        if name.endswith(_ENDING):
            # Removed meanwhile, or written by another version of skyward.
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                yield _read(os.path.join(folder, name))


def _read(path: str) -> LivePool:
    with open(path, encoding="utf-8") as file:
        fields = json.load(file)
    fields["owner"] = Owner(**fields["owner"])
    fields["nodes"] = tuple(
        LiveNode(**{**node, "channel": tuple(node["channel"]), "terminal": tuple(node["terminal"])})
        for node in fields["nodes"]
    )
    return LivePool(**fields)


def _path(pool: str, ending: str) -> str:
    return os.path.join(state_folder(), "live", pool + ending)
