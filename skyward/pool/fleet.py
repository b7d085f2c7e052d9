"""Every pool of this user: those that are open on this machine, and what is rented in the accounts that it knows.

What `skyward ls`, `down` and `gc` print is what these give.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from ..errors import SkywardError, UsageError
from ..state import live
from ..state.journal import journals
from ..state.live import LivePool

if TYPE_CHECKING:
    from ..providers.cloud import CloudProvider
    from ..providers.reaper import Found

__all__ = ["FleetPool", "Survey", "end", "names_meant", "output_of", "survey"]

_FULL_NAME = re.compile(r".+-[0-9a-f]{8}")
_END_LIMIT_S = 120.0
"""Seconds that a program gets to close its pool when it is asked to, before what it rented is ended without it."""
_LOOK_S = 0.2


@dataclass(frozen=True, kw_only=True)
class FleetPool:
    """One pool. `state`: "open" (its program runs), "dead" (it does not), "elsewhere" (of another machine's program).

    What costs money and is "dead" is what `skyward gc` ends.
    """

    pool: str
    label: str
    provider: str
    state: Literal["open", "dead", "elsewhere"]
    nodes: int
    wanted: int
    price_usd_per_hour: float
    spent_usd: float
    """By the prices of the machines that exist now."""
    age_s: float
    program: str = ""
    pid: int = 0
    instances: tuple[str, ...] = ()
    """The provider's ids of what is rented."""


@dataclass(frozen=True, kw_only=True)
class Survey:
    """`failures`: accounts that could not be asked; nothing is known of what is there."""

    pools: tuple[FleetPool, ...]
    failures: tuple[SkywardError, ...] = field(default=())


def survey(providers: Iterable[CloudProvider] = (), *, is_local_only: bool = False) -> Survey:
    """All pools, oldest first; those of `providers` and of this machine's journals by asking the accounts.

    Records of dead pools that rented nothing are removed: their nodes have ended with them.
    """
    open_pools = {pool.pool: pool for pool in _worth_a_look(live.live_pools())}
    found: list[Found] = []
    failures: list[SkywardError] = []
    given = list(providers)
    if not is_local_only and (given or journals()):
        from ..providers import reaper  # only where something is rented: its imports take their time

        found, failures = reaper.ls(given)
    by_pool: dict[str, list[Found]] = {}
    for one in found:
        by_pool.setdefault(one.pool, []).append(one)
    now = time.time()
    states = [_open_state(pool, by_pool.pop(name, []), now) for name, pool in open_pools.items()]
    states += [_rented_state(name, machines, now) for name, machines in by_pool.items()]
    return Survey(pools=tuple(sorted(states, key=lambda s: (-s.age_s, s.pool))), failures=tuple(failures))


def end(pool: str, *, wait_s: float = _END_LIMIT_S) -> str:
    """End one pool, wherever its program is: what was done, in words. `pool` is its full name, see `names_meant`.

    A program that runs is asked to close it, and sees PoolClosed; what is left of a dead one is ended from here. When
    nothing is left of it that is no error, so this may be done again and by several.

    Raises:
        TerminateFailed: machines may still cost money; the error names them.
        UsageError: its program runs and does not close it.
    """
    alive = next((p for p in live.live_pools() if p.pool == pool and p.is_alive), None)
    is_closed = alive is not None and _asked(alive, wait_s)
    ended: list[str] = []
    if journals(pool):
        from ..providers import reaper

        ended = reaper.reap(pool)
    if alive is not None and not is_closed and not ended:
        raise UsageError(
            f"pool {pool!r}: its program (process {alive.owner.pid}, {alive.program}) was asked to close it and has "
            f"not within {wait_s:g} s; end the program, `kill {alive.owner.pid}`, and its nodes end with it"
        )
    live.withdraw(pool)
    if ended:
        return f"ended {len(ended)} machine{'s' if len(ended) != 1 else ''}: {', '.join(ended)}"
    return "its program has closed it" if is_closed else "nothing is left of it"


def names_meant(name: str) -> list[str]:
    """The full names of the pools that a user calls so: of a label, all that have it. Raises UsageError."""
    known: dict[str, str] = {pool.pool: pool.label for pool in live.live_pools()}
    known |= {journal.pool: known.get(journal.pool, "") for journal in journals()}
    if name in known:
        return [name]
    meant = sorted(pool for pool, label in known.items() if name in (label, pool.rpartition("-")[0]))
    if meant:
        return meant
    if _FULL_NAME.fullmatch(name):  # it has ended since whoever asks has read it
        return [name]
    there = ", ".join(sorted(known)) or "none"
    raise UsageError(f"no pool of this machine is called {name!r}; there: {there}")


def output_of(name: str) -> str:
    """The full name of the pool of that name or label whose output is kept: an open one, else the last one."""
    from ..state.outputs import outputs

    meant = [pool for pool in live.live_pools() if name in (pool.pool, pool.label)]
    if meant:
        return max(meant, key=lambda pool: (pool.is_alive, pool.began)).pool
    kept: Sequence[str] = outputs()
    closed = [pool for pool in kept if name == pool or name[:15] == pool.rpartition("-")[0]]
    if not closed:
        raise UsageError(f"no output of a pool called {name!r} is kept here; there: {', '.join(kept) or 'none'}")
    return closed[-1]


def _asked(pool: LivePool, wait_s: float) -> bool:
    """Whether its program has closed it, or ended, in time."""
    live.ask_to_end(pool.pool, f"the pool was ended by `skyward down {pool.label or pool.pool}`")
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        if not pool.is_alive or all(other.pool != pool.pool for other in live.live_pools()):
            return True
        time.sleep(_LOOK_S)
    return False


def _worth_a_look(pools: list[LivePool]) -> list[LivePool]:
    kept = []
    for pool in pools:
        if pool.is_alive or (pool.is_rented and journals(pool.pool)):
            kept.append(pool)
        else:
            live.withdraw(pool.pool)
    return kept


def _open_state(pool: LivePool, found: list[Found], now: float) -> FleetPool:
    price = sum(one.price_usd_per_hour or 0.0 for one in found) if found else pool.price_usd_per_hour
    spent = max(pool.spent_usd(now), _spent(found, now))
    return FleetPool(
        pool=pool.pool,
        label=pool.label,
        provider=pool.provider,
        state="open" if pool.is_alive else "dead",
        nodes=max(len(pool.nodes), len(found)),
        wanted=pool.wanted,
        price_usd_per_hour=price,
        spent_usd=spent,
        age_s=now - pool.began,
        program=pool.program,
        pid=pool.owner.pid,
        instances=tuple(one.instance.id for one in found),
    )


def _rented_state(name: str, found: list[Found], now: float) -> FleetPool:
    """Machines that this machine's records of open pools say nothing of."""
    owners = {one.owner for one in found}
    launched = [one.instance.launched_at for one in found if one.instance.launched_at]
    return FleetPool(
        pool=name or "?",
        label="",
        provider=found[0].provider,
        state="open" if "here" in owners else "dead" if owners == {"dead"} else "elsewhere",
        nodes=len(found),
        wanted=len(found),
        price_usd_per_hour=sum(one.price_usd_per_hour or 0.0 for one in found),
        spent_usd=_spent(found, now),
        age_s=now - min(launched, default=now),
        instances=tuple(one.instance.id for one in found),
    )


def _spent(found: list[Found], now: float) -> float:
    return sum(
        (one.price_usd_per_hour or 0.0) * max(0.0, now - one.instance.launched_at) / 3600
        for one in found
        if one.instance.launched_at
    )
