"""`skyward attach`: show the output of a detached pool, live."""

from __future__ import annotations

import argparse

HELP = "show the output of a detached pool, live"

DESCRIPTION = """\
Attaches to a detached pool, and shows the output of its calls: first what came while no program was there, then live.
Ctrl-C leaves the pool, and so does the end of its last call. Its calls go on, and no value is taken.
"""

EPILOG = """\
examples:
  skyward attach train
  skyward attach train --take-over     take it from a program that is connected
  skyward attach --from train.pool     a file that `skyward ps train --export train.pool` wrote on another machine

exit status: 0 success, 1 there is no such pool, or a program has it
from Python: sky.ComputePool.attach("train")
"""

_LOOK_S = 0.5


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pool", metavar="POOL", nargs="?", help="name of a detached pool")
    parser.add_argument("--from", dest="file", metavar="FILE", help="file of a detached pool, instead of its name")
    parser.add_argument("--take-over", action="store_true", help="take the pool from a program that is connected")


def run(arguments: argparse.Namespace) -> int:
    import contextlib
    import time

    from ..pool.pool import ComputePool

    if bool(arguments.pool) == bool(arguments.file):
        arguments.parser.error("name one pool: POOL, or --from FILE")
    pool = ComputePool.attach(arguments.pool, file=arguments.file, take_over=arguments.take_over)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            while any(call.state in ("waiting", "running") for call in pool.calls()):
                time.sleep(_LOOK_S)
    finally:
        if pool.is_active:
            pool.detach()
    return 0
