"""`skyward ls`: list this user's pools and rented machines."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..pool.fleet import FleetPool

HELP = "list your open pools and rented machines, with costs"

DESCRIPTION = """\
Lists your open pools on this machine, and your rented machines in the accounts that are on record here or that
skyward.toml or --provider name. A "resting" pool has no nodes until its next call. A "detached" pool goes on without
a program: `skyward ps` shows its calls. The program of a "dead" pool is gone: its machines shut down when their lease
expires, or at once with `skyward gc`.
"""

EPILOG = """\
examples:
  skyward ls
  skyward ls --provider aws --json
  skyward ls --local              do not query providers

exit status: 0 success, 1 an account could not be queried, or machines of a dead pool cost money
from Python: skyward.pool.fleet.survey()
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--provider", action="append", default=[], metavar="NAME", help="also check this provider; repeatable"
    )
    parser.add_argument("--local", action="store_true", help="only pools on this machine; query no provider")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    from ..pool.config import rented_providers
    from ..pool.fleet import survey
    from ..state.journal import journals
    from .screen import as_json

    providers, wrong = ([], []) if arguments.local else rented_providers(arguments.provider)
    was_asked = bool(providers or journals()) and not arguments.local
    fleet = survey(providers, is_local_only=arguments.local)
    failures = [*wrong, *fleet.failures]
    if arguments.json:
        print(as_json({"pools": fleet.pools, "failures": [str(failure) for failure in failures]}))
    elif fleet.pools:
        print("\n".join(describe(fleet.pools)))
    else:
        rented = "" if failures else ", and nothing is rented" if was_asked else " (no provider was checked)"
        print(f"no pool is open{rented}")
    for failure in failures:
        print(f"skyward: {failure}", file=sys.stderr)
    orphans = [pool for pool in fleet.pools if pool.state == "dead" and pool.instances]
    if orphans and not arguments.json:
        print(
            "skyward: machines of dead pools cost money until their lease expires; `skyward gc` terminates them",
            file=sys.stderr,
        )
    return 1 if failures or orphans else 0


def _size(pool: FleetPool) -> str:
    is_elastic = pool.least != pool.wanted and pool.state != "elsewhere" and (pool.pid or pool.state == "detached")
    return f"{pool.least}-{pool.wanted}" if is_elastic else str(pool.wanted)


def describe(pools: Sequence[FleetPool]) -> list[str]:
    """Format the pools as a table, with a total where something costs money."""
    from ..console.words import duration, usd
    from .screen import table

    rows: list[tuple[str, ...]] = [
        (
            pool.pool,
            pool.provider,
            "resting" if pool.is_resting else pool.state,
            f"{pool.nodes}/{_size(pool)}",
            duration(pool.age_s),
            usd(pool.price_usd_per_hour) if pool.price_usd_per_hour else "-",
            usd(pool.spent_usd) if pool.spent_usd else "-",
            f"{pool.program} ({pool.pid})" if pool.pid else ", ".join(pool.instances),
        )
        for pool in pools
    ]
    price, spent = sum(p.price_usd_per_hour for p in pools), sum(p.spent_usd for p in pools)
    if price and len(pools) > 1:
        rows.append(("all", "", "", "", "", usd(price), usd(spent), ""))
    header = ("pool", "provider", "state", "nodes", "age", "per hour", "so far", "program")
    return table(header, rows, right=[3, 4, 5, 6])
