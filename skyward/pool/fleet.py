"""All pools of this user: those open on this machine, and those rented in the accounts that it knows.

`skyward ls`, `down` and `gc` print the results of these functions.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Literal

from ..core.records import dataclass
from ..errors import SkywardError, TerminateFailed, UsageError
from ..state import detached, live
from ..state.detached import DetachedPool
from ..state.journal import journals
from ..state.live import LivePool

if TYPE_CHECKING:
    from ..providers.cloud import CloudProvider
    from ..providers.reaper import Found

_FULL_NAME = re.compile(r".+-[0-9a-f]{8}")
_END_LIMIT_S = 120.0
"""Seconds that a program gets to close its pool before its machines are ended without it."""
_LOOK_S = 0.2


@dataclass(frozen=True, kw_only=True)
class FleetPool:
    """One pool.

    `state` is "open" (its program runs), "dead" (it does not), "detached" (it goes on without one) or "elsewhere" (its
    program runs on another machine). `skyward gc` ends the pools that are "dead" and cost money.
    """

    pool: str
    label: str
    provider: str
    state: Literal["open", "dead", "detached", "elsewhere"]
    nodes: int
    wanted: int
    """Number of nodes that were requested; the most of an elastic pool."""
    price_usd_per_hour: float
    spent_usd: float
    """Cost of the machines that exist now, by their prices."""
    age_s: float
    program: str = ""
    pid: int = 0
    instances: tuple[str, ...] = ()
    """The provider's ids of the rented machines."""
    least: int = 0
    """Fewest nodes of an elastic pool; 0 if it may have none, or is not known."""

    @property
    def is_resting(self) -> bool:
        """Return whether its program runs, and it has no nodes until its next call."""
        return self.state == "open" and not self.nodes


@dataclass(frozen=True, kw_only=True)
class Survey:
    """Pools that were found. `failures`: accounts that could not be queried, so nothing is known about them."""

    pools: tuple[FleetPool, ...]
    failures: tuple[SkywardError, ...] = field(default=())


def survey(providers: Iterable[CloudProvider] = (), *, is_local_only: bool = False) -> Survey:
    """Return all pools, oldest first. Queries the accounts of `providers` and of this machine's journals.

    Records of dead pools that rented nothing are removed: their nodes ended with them.

    Args:
        providers: Further accounts to query.
        is_local_only: Query no account.
    """
    open_pools = {pool.pool: pool for pool in _worth_a_look(live.live_pools())}
    machines: list[Found] = []
    failures: list[SkywardError] = []
    queried = list(providers)
    if not is_local_only and (queried or journals()):
        from ..providers import reaper  # slow to import, and needed only if something is rented

        machines, failures = reaper.ls(queried)
    by_pool: dict[str, list[Found]] = {}
    for machine in machines:
        by_pool.setdefault(machine.pool, []).append(machine)
    now = time.time()
    states = [_open_state(pool, by_pool.pop(name, []), now) for name, pool in open_pools.items()]
    alone = [pool for pool in detached.detached_pools() if not pool.has_ended and pool.pool not in open_pools]
    states += [
        _detached_state(pool, by_pool.pop(pool.pool, []), now, was_asked=not is_local_only and not failures)
        for pool in alone
    ]
    states += [_rented_state(name, of_pool, now) for name, of_pool in by_pool.items()]
    return Survey(pools=tuple(sorted(states, key=lambda s: (-s.age_s, s.pool))), failures=tuple(failures))


def end(pool: str, *, providers: Iterable[CloudProvider] = (), wait_s: float = _END_LIMIT_S) -> str:
    """End one pool, wherever its program runs, and return what was done, in words.

    A running program is asked to close the pool, and its calls raise PoolClosed. The machines of a dead program are
    ended from here. A pool of which nothing is left is not an error, so several callers may do this, and repeat it. A
    program that is stopped closes the pool as soon as it goes on.

    Args:
        pool: Full name of the pool; see `names_meant`.
        providers: Further accounts that are asked about a pool of which there is no record here.
        wait_s: Longest wait for the program, in seconds.

    Raises:
        TerminateFailed: Machines may still cost money; the error names them.
        UsageError: The program runs and does not close the pool.
        ProviderError: There is no record of the pool here, and an account that may have machines of it cannot be asked.
    """
    records = [record for record in live.live_pools() if record.pool == pool]
    alive = next((record for record in records if record.is_alive), None)
    is_closed = alive is not None and _asked(alive, wait_s)
    ended: list[str] = []
    was_rented = bool(journals(pool))
    if was_rented:
        from ..providers import reaper

        ended = reaper.reap(pool)
    if alive is not None and not is_closed and not ended:
        raise UsageError(
            f"pool {pool!r}: its program (process {alive.owner.pid}, {alive.program}) did not close it within "
            f"{wait_s:g} s; end the program with `kill {alive.owner.pid}`, and its nodes end with it"
        )
    waits = alive is not None and not is_closed and alive.is_alive
    if not waits:  # otherwise it would rent other machines once it goes on
        live.withdraw(pool)
    apart = detached.living(pool)
    if apart is not None and was_rented:  # its head has ended with its machine
        detached.end(apart, detached.DOWN)
    elif apart is not None:
        from .detaching import end_detached

        return end_detached(apart)
    if ended:
        later = "; its program does not answer, and closes the pool once it goes on" if waits else ""
        return f"ended {_count_of(ended)}: {', '.join(ended)}{later}"
    if is_closed:
        return "its program closed it"
    return "nothing is left of it" if records or was_rented else _without_record(pool, list(providers))


def _without_record(pool: str, providers: list[CloudProvider]) -> str:
    """Say that nothing here knows of a pool. Raises TerminateFailed: a known account has machines of it."""
    if providers or journals():
        from ..providers import reaper

        machines, failures = reaper.ls(providers)
        found = [machine.instance.id for machine in machines if machine.pool == pool]
        if found:
            raise TerminateFailed(
                f"pool {pool!r}: no record of it is on this machine, and {_count_of(found)} of it exist "
                f"({', '.join(found)}); end it on the machine of its program, or wait for `skyward gc` if that is dead",
                ids=tuple(found),
            )
        if failures:
            raise failures[0]
    return "no record of it is left on this machine"


def _count_of(machines: Sequence[str]) -> str:
    return f"{len(machines)} machine{'s' if len(machines) != 1 else ''}"


def goes_on(pool: str) -> bool:
    """Return whether a detached pool goes on without a program, so that its machines are not left over.

    Asks its provider and its head. A pool that cannot be reached counts: its machines end by themselves.

    Args:
        pool: Full name of a pool, which need not be a detached one.
    """
    if detached.living(pool) is None:
        return False
    from .detaching import glance

    with contextlib.suppress(SkywardError, TimeoutError, OSError):  # it is not reached, or its end is on record now
        glance(pool)
    return detached.living(pool) is not None


def names_meant(name: str) -> list[str]:
    """Return the full names of the pools that a user means: for a label, all pools with it. Raises UsageError."""
    known: dict[str, str] = {pool.pool: pool.label for pool in live.live_pools()}
    known |= {journal.pool: known.get(journal.pool, "") for journal in journals()}
    known |= {pool.pool: pool.name for pool in detached.detached_pools() if not pool.has_ended}
    if name in known:
        return [name]
    meant = sorted(pool for pool, label in known.items() if name and name in (label, pool.rpartition("-")[0]))
    if meant:
        return meant
    if _FULL_NAME.fullmatch(name):  # it ended after the user read its name
        return [name]
    advice = f"use one of {', '.join(sorted(known))}" if known else "open one first, because there are none"
    raise UsageError(f"pool {name!r}: no such pool on this machine; {advice}")


def output_of(name: str) -> str:
    """Return the full name of the pool whose output is kept: an open pool of that name or label, or the latest one."""
    from ..state.outputs import outputs

    meant = [pool for pool in live.live_pools() if name and name in (pool.pool, pool.label)]
    if meant:
        return max(meant, key=lambda pool: (pool.is_alive, pool.began)).pool
    kept: Sequence[str] = outputs()
    closed = [pool for pool in kept if name == pool or name[:15] == pool.rpartition("-")[0]]
    if not closed:
        advice = f"use one of {', '.join(kept)}" if kept else "run a pool first, because no output is kept yet"
        raise UsageError(f"pool {name!r}: no output is kept here; {advice}")
    return closed[-1]


def _asked(pool: LivePool, wait_s: float) -> bool:
    """Ask a program to close its pool. Returns whether it closed it, or ended, in time."""
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
        goes_alone = not pool.is_alive and detached.living(pool.pool) is not None
        if pool.is_alive or (pool.is_rented and journals(pool.pool) and not goes_alone):
            kept.append(pool)
        else:
            live.withdraw(pool.pool)
    return kept


def _open_state(pool: LivePool, rented: list[Found], now: float) -> FleetPool:
    price = _price(rented) if rented else pool.price_usd_per_hour
    spent = max(pool.spent_usd(now), _spent(rented, now))
    return FleetPool(
        pool=pool.pool,
        label=pool.label,
        provider=pool.provider,
        state="open" if pool.is_alive else "dead",
        nodes=max(len(pool.nodes), len(rented)),
        wanted=pool.wanted,
        least=pool.least,
        price_usd_per_hour=price,
        spent_usd=spent,
        age_s=now - pool.began,
        program=pool.program,
        pid=pool.owner.pid,
        instances=tuple(machine.instance.id for machine in rented),
    )


def _detached_state(pool: DetachedPool, rented: list[Found], now: float, *, was_asked: bool) -> FleetPool:
    """Describe a detached pool that no program on this machine has. `was_asked`: its provider lists no other machines.

    Whether a pool of your own machines has ended meanwhile is not known.
    """
    nodes, (least, most) = 1 + len(pool.others), pool.bounds
    is_dead = bool(pool.spending) and was_asked and not rented
    return FleetPool(
        pool=pool.pool,
        label=pool.name,
        provider=str(pool.provider["type"]),
        state="dead" if is_dead else "detached",
        nodes=len(rented) if pool.spending and was_asked else nodes,
        wanted=most,
        least=least,
        price_usd_per_hour=_price(rented),
        spent_usd=_spent(rented, now),
        age_s=now - pool.began,
        instances=tuple(machine.instance.id for machine in rented),
    )


def _rented_state(name: str, rented: list[Found], now: float) -> FleetPool:
    """Describe machines that no record of an open pool on this machine mentions."""
    owners = {machine.owner for machine in rented}
    launched = [machine.instance.launched_at for machine in rented if machine.instance.launched_at]
    return FleetPool(
        pool=name or "?",
        label="",
        provider=rented[0].provider,
        state="open" if "here" in owners else "dead" if owners == {"dead"} else "elsewhere",
        nodes=len(rented),
        wanted=len(rented),
        price_usd_per_hour=_price(rented),
        spent_usd=_spent(rented, now),
        age_s=now - min(launched, default=now),
        instances=tuple(machine.instance.id for machine in rented),
    )


def _price(rented: list[Found]) -> float:
    return sum(machine.price_usd_per_hour or 0.0 for machine in rented)


def _spent(rented: list[Found], now: float) -> float:
    return sum(
        (machine.price_usd_per_hour or 0.0) * max(0.0, now - machine.instance.launched_at) / 3600
        for machine in rented
        if machine.instance.launched_at
    )
