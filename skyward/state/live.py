"""Pools that are open on this machine, written down so that other processes of this user find them.

A file for each in `live/` of the state folder, 0600, there from when the pool starts until it is closed. One whose
owner is dead is of a program that was killed: it says what to look after, and is removed by who does.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace

from ..core.ownership import make_private_folder
from ..errors import UsageError
from .journal import Owner, state_folder

__all__ = ["LiveNode", "LivePool", "announce", "ask_to_end", "find", "is_asked_to_end", "live_pools", "withdraw"]

_ENDING = ".json"
_ASKED = ".end"


@dataclass(frozen=True, kw_only=True)
class LiveNode:
    """What another process needs to reach a node; see `skyward.values.machine.Machine`."""

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
    """`pool` is unique; `label` is the name that its user gave it, or empty."""

    pool: str
    label: str
    provider: str
    wanted: int
    """How many nodes it is to have."""
    is_rented: bool
    owner: Owner = field(default_factory=Owner.this_process)
    program: str = field(default_factory=_program)
    began: float = field(default_factory=time.time)
    nodes: tuple[LiveNode, ...] = ()

    @property
    def is_alive(self) -> bool:
        """Whether the process that opened it still runs."""
        return self.owner.is_alive()

    @property
    def price_usd_per_hour(self) -> float:
        return sum(node.price_usd_per_hour for node in self.nodes)

    def spent_usd(self, now: float) -> float:
        """So far, by the nodes that it has now."""
        return sum(node.price_usd_per_hour * max(0.0, now - node.since) / 3600 for node in self.nodes)


def announce(pool: LivePool) -> None:
    """Write it down, or what is new of it. A state folder that cannot be written costs the listing, nothing else."""
    path = _path(pool.pool, _ENDING)
    with contextlib.suppress(OSError, UsageError):  # see above: only the listing lacks it
        make_private_folder(os.path.dirname(path))
        fd = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(fd, "w", encoding="utf-8") as file:
            json.dump(asdict(pool), file)
        os.replace(f"{path}.new", path)  # who reads it finds the old one or the new one


def withdraw(pool: str) -> None:
    """It is closed. Idempotent."""
    for ending in (_ENDING, _ASKED):
        with contextlib.suppress(OSError):  # never written, or removed already
            os.unlink(_path(pool, ending))


def live_pools() -> list[LivePool]:
    """All that are written down, oldest first; `is_alive` tells those of killed programs."""
    return sorted(_read_all(), key=lambda pool: (pool.began, pool.pool))


def find(name: str) -> LivePool:
    """The open pool of that name or label; of several with one label, the youngest. Raises UsageError."""
    pools = live_pools()
    exact = [pool for pool in pools if pool.pool == name]
    matching = exact or [pool for pool in pools if pool.label == name]
    if not matching:
        known = ", ".join(pool.label or pool.pool for pool in pools) or "none"
        raise UsageError(f"no open pool on this machine is called {name!r}; there: {known}")
    return max(matching, key=lambda pool: (pool.is_alive, pool.began))


def ask_to_end(pool: str, reason: str) -> None:
    """Ask the process that has the pool to close it; it looks about once a second. Raises UsageError."""
    path = _path(pool, _ASKED)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(fd, "w", encoding="utf-8") as file:
            file.write(reason)
    except OSError as error:
        raise UsageError(f"state folder: {path} cannot be written: {error.strerror}") from error


def is_asked_to_end(pool: str) -> str:
    """Why, or empty."""
    try:
        with open(_path(pool, _ASKED), encoding="utf-8") as file:
            return file.read() or "it was asked to end"
    except OSError:  # nobody asked
        return ""


def with_nodes(pool: LivePool, nodes: tuple[LiveNode, ...]) -> LivePool:
    """The pool with these nodes; those that it had already keep their time."""
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
            # One that was removed meanwhile, or was written by another version of ours.
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
