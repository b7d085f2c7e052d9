"""`skyward gc`: remove what dead pools left on this machine."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argparse import _SubParsersAction

__all__ = ["add_to"]

HELP = "remove what dead pools left on this machine"

DESCRIPTION = """\
Removes what pools of yours left on this machine when they could not close themselves: processes, sockets, spooled
results. A pool that is still open is not touched, and a pool cleans up after itself within seconds even when its
program was killed: expect to find nothing.
"""

EPILOG = "from Python: skyward.providers.local.collect_garbage()"


def add_to(subcommands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subcommands.add_parser(
        "gc",
        help=HELP,
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)


def run(_arguments: argparse.Namespace) -> int:
    from ..providers.local import collect_garbage

    found = collect_garbage()
    for what in found:
        print(f"removed {what}")
    if not found:
        print("nothing of ours is left on this machine")
    return 0
