"""`skyward train report`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argparse import _SubParsersAction

__all__ = ["add_to"]

DESCRIPTION = """\
Writes an HTML page of a run that has ended, was killed or still runs: loss and evaluations, learning rate, rates,
memory of each rank, norms, tables. One file, which loads nothing from anywhere.
"""

EPILOG = """\
examples:
  skyward train report out/my-run
  skyward train report out/my-run --out my-run.html

from Python: skyward.training.report("out/my-run", to="my-run.html")
"""


def add_to(subcommands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subcommands.add_parser(
        "report",
        help="write an HTML page of a run from its logs",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("dir", metavar="DIR", help="the run's output_dir or logging_dir")
    parser.add_argument("--out", metavar="FILE", help="the page (report.html in DIR)")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from ..training.reporting import report

    print(report(arguments.dir, to=arguments.out))
    return 0
