"""`skyward down`: end pools, whoever has them."""

from __future__ import annotations

import argparse
import sys

__all__ = ["add_options", "run"]

HELP = "end a pool: its calls, its nodes, what it has rented"

DESCRIPTION = """\
Ends pools. A program that runs is asked to close its pool, and its open calls raise PoolClosed; what a dead program
has rented is ended from here. Names are those of `skyward ls`, or of named pools: then all that are open by that name.
"""

EPILOG = """\
examples:
  skyward down train
  skyward down train-1f2e3d4c --yes     without asking
  skyward down --all

exit status: 0 nothing is left of them, 1 something may be; it is named
from Python: skyward.pool.fleet.end()
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pool", nargs="*", metavar="POOL", help="name of a pool")
    parser.add_argument("--all", action="store_true", help="all pools of yours on this machine")
    parser.add_argument("--yes", action="store_true", help="do not ask")


def run(arguments: argparse.Namespace) -> int:
    from ..errors import SkywardError
    from ..pool.fleet import end
    from .screen import is_sure

    if bool(arguments.pool) == arguments.all:
        arguments.parser.error("name the pools to end, or give --all")
    names = _names(arguments)
    if not names:
        print("no pool of this machine is open, and none has left anything on record")
        return 0
    action = f"end {', '.join(names)}"
    if not arguments.yes and not is_sure(action, f"{action}?"):
        return 1
    status = 0
    for name in names:
        try:
            print(f"{name}: {end(name)}", flush=True)
        except SkywardError as error:
            print(f"skyward: {name}: {error}", file=sys.stderr)
            status = 1
    return status


def _names(arguments: argparse.Namespace) -> list[str]:
    from ..pool.fleet import names_meant, survey

    if arguments.all:
        return [pool.pool for pool in survey().pools if pool.state != "elsewhere"]
    return list(dict.fromkeys(meant for name in arguments.pool for meant in names_meant(name)))
