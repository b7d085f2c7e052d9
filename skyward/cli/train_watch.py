"""`skyward train watch`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argparse import _SubParsersAction

__all__ = ["add_to"]

DESCRIPTION = """\
Shows a training until it ends: on a terminal its loss curve, rates, memory and ranks (needs skyward[training]),
elsewhere a line for each record of its log. Ctrl-C ends the watching; the training goes on.
"""


def add_to(subcommands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subcommands.add_parser(
        "watch",
        help="follow a training until it ends",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("job", metavar="JOB", help="its id; see `skyward train list`")
    parser.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="between two looks (1)")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from ..training.control import find
    from ..training.control.watch import watch

    print(watch(find(arguments.job), every_s=max(0.05, arguments.every)))
    return 0
