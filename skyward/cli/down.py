"""`skyward down`: end pools of any process of this user."""

from __future__ import annotations

import argparse

HELP = "end a pool, its calls and its machines"

DESCRIPTION = """\
Ends pools. If the pool's program still runs, it closes the pool, and its open calls raise PoolClosed. If the program
is dead, this command terminates the machines that it rented. It ends a detached pool on its machine. Give a name from
`skyward ls`, or the name of a named pool to end every open pool of that name.
"""

EPILOG = """\
examples:
  skyward down train
  skyward down train-1f2e3d4c --yes     do not ask for confirmation
  skyward down --all

exit status: 0 everything is gone, 1 something might remain and is named
from Python: skyward.pool.fleet.end()
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pool", nargs="*", metavar="POOL", help="name of a pool")
    parser.add_argument("--all", action="store_true", help="end all your pools on this machine")
    parser.add_argument("--yes", action="store_true", help="do not ask for confirmation")


def run(arguments: argparse.Namespace) -> int:
    from ..errors import SkywardError
    from ..pool.config import rented_providers
    from ..pool.fleet import end
    from .screen import complain, is_sure

    if bool(arguments.pool) == arguments.all:
        arguments.parser.error("POOL is missing; name the pools to end, or pass --all")
    names = _names(arguments)
    if not names:
        print("no pool is open on this machine, and no record of a dead one is left")
        return 0
    action = f"end {', '.join(names)}"
    if not arguments.yes and not is_sure(action, f"{action}?"):
        return 1
    providers, _ = rented_providers()
    status = 0
    for name in names:
        try:
            print(f"{name}: {end(name, providers=providers)}", flush=True)
        except (SkywardError, OSError) as error:  # the others are ended all the same
            complain(error, of=name)
            status = 1
    return status


def _names(arguments: argparse.Namespace) -> list[str]:
    from ..pool.fleet import names_meant, survey

    if arguments.all:
        return [pool.pool for pool in survey().pools if pool.state != "elsewhere"]
    return list(dict.fromkeys(meant for name in arguments.pool for meant in names_meant(name)))
