"""`skyward ps`: list the calls of a detached pool."""

from __future__ import annotations

import argparse

HELP = "list the calls of a detached pool"

DESCRIPTION = """\
Lists the calls of a detached pool that are open, or whose values nobody has taken. It only looks, so the pool may have
a client meanwhile. `skyward ls` shows the pools.
"""

EPILOG = """\
examples:
  skyward ps train
  skyward ps train --json
  skyward ps train --export train.pool   write a file by which you attach from another machine; keep it private
  skyward ps --from train.pool           look at the pool of such a file

exit status: 0 success, 1 there is no such pool, or its machine cannot be reached
from Python: sky.ComputePool.attach("train").calls()
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pool", metavar="POOL", nargs="?", help="name of a detached pool")
    parser.add_argument("--from", dest="file", metavar="FILE", help="file of a detached pool, instead of its name")
    parser.add_argument("--export", metavar="FILE", help="write such a file, with the keys of pool and rented machines")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    import sys
    import time

    from ..console.words import duration
    from ..pool.attach_file import adopt, export
    from ..pool.detaching import glance
    from .screen import as_json, table

    if bool(arguments.pool) == bool(arguments.file):
        arguments.parser.error("name one pool: POOL, or --from FILE")
    name = arguments.pool or adopt(arguments.file).pool
    seen = glance(name)
    if arguments.export:
        export(name, arguments.export)
        print(f"wrote {arguments.export}; who can read it can attach to the pool", file=sys.stderr)
    if arguments.json:
        calls = [
            {"id": call.number, "name": call.name, "state": call.state, "node": call.node, "since": call.since}
            for call in seen.calls
        ]
        others = {"left_s": seen.left_s, "is_ending": seen.is_ending, "lost": list(seen.lost)}
        print(as_json({"calls": calls, "more_calls": seen.more_calls, "client": seen.client, **others}))
        return 0
    rows = [
        (
            str(call.number),
            call.name,
            call.state,
            "-" if call.node is None else str(call.node),
            duration(max(0.0, time.time() - call.since)),
        )
        for call in seen.calls
    ]
    print("\n".join(table(("call", "name", "state", "node", "age"), rows, right=[0, 4])) if rows else "no calls")
    if seen.more_calls:
        print(f"and {seen.more_calls} more")
    if seen.lost:
        print(f"lost and not replaced: node {', '.join(map(str, seen.lost))}")
    client = seen.client
    if client:
        print(f"its client is process {client['pid']} ({client['program'] or 'python'}) on {client['host']}")
    else:
        warning = "warning: " if seen.is_ending else ""
        print(f"{warning}no client; it ends in {duration(seen.left_s)}, unless one attaches")
    return 0
