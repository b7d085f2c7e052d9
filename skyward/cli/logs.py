"""`skyward logs`: show the output of a pool's calls."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ..core.printable import coloured

if TYPE_CHECKING:
    from ..state.outputs import OutputLine

HELP = "show the output of a pool's calls"

DESCRIPTION = """\
Shows the output of a pool's calls; each line names its node and rank. This machine keeps the last 8 to 16 MiB of each
of your last 20 pools, in files that only you can read. Pools with logs=False keep no output.
"""

EPILOG = """\
examples:
  skyward logs train
  skyward logs train -f           follow until the pool is closed
  skyward logs train -n 50 --time

from Python: skyward.state.outputs.read_output()
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pool", metavar="POOL", help="name of a pool; of several, the newest")
    parser.add_argument("-f", "--follow", action="store_true", help="follow the output until the pool is closed")
    parser.add_argument("-n", "--tail", type=int, metavar="LINES", help="show only the last LINES lines")
    parser.add_argument("--time", action="store_true", help="show the time of each line")


def run(arguments: argparse.Namespace) -> int:
    from ..pool.fleet import output_of
    from ..state import live
    from ..state.outputs import read_output

    pool = output_of(arguments.pool)

    def is_open() -> bool:
        return any(other.pool == pool and other.is_alive for other in live.live_pools())

    follow = is_open if arguments.follow or is_open() else None
    if follow is not None and not arguments.follow:  # with a predicate, no output yet from an open pool is not an error
        follow = _never
    for line in read_output(pool, tail=arguments.tail, follow_while=follow):
        print(_shown(line, arguments.time), flush=arguments.follow)
    return 0


def _never() -> bool:
    return False


def _shown(line: OutputLine, has_time: bool) -> str:
    text = coloured(line.text)  # files of older versions may hold control sequences
    if not has_time:
        return text
    import datetime

    at = datetime.datetime.fromtimestamp(line.at).astimezone()
    return f"{at:%Y-%m-%d %H:%M:%S} {text}"
