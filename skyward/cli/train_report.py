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
  skyward train report my-job              one that still runs on this machine

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
    parser.add_argument(
        "run_dir", metavar="DIR|JOB", help="the run's output_dir or logging_dir; or its id while it runs"
    )
    parser.add_argument("--out", metavar="FILE", help="the page (report.html in the folder)")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from ..training.reporting import report

    print(report(_folder(arguments.run_dir), to=arguments.out))
    return 0


def _folder(named: str) -> str:
    """The folder that is named, or that of a run on this machine which listens under that name."""
    import os

    from ..errors import UsageError
    from ..training.control.endpoint import endpoint_of

    if os.path.isdir(named):
        return named
    try:
        endpoint = endpoint_of(named)
    except UsageError:  # no job could have that name
        return named
    return (endpoint and (endpoint.logging_dir or endpoint.output_dir)) or named
