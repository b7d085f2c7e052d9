"""`skyward experiment`: list the experiments of a hub."""

from __future__ import annotations

import argparse
import json
import time

from ..core.printable import printable

HELP = "list the experiments of a hub"

DESCRIPTION = """\
Shows experiments of a hub. SKYWARD_HUB_URL and SKYWARD_HUB_TOKEN name the hub; `skyward hub up` prints them.
"""

EPILOG = """\
example: skyward experiment list
exit status: 0 success, 1 the hub does not answer
from Python: skyward.hub.experiments()
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION")
    listing = actions.add_parser(
        "list",
        help="list the experiments of the project",
        description="Lists the experiments of the project.",
        epilog="example: skyward experiment list --json",
    )
    listing.add_argument("--json", action="store_true", help="print JSON")
    listing.set_defaults(run=_list)


def _list(arguments: argparse.Namespace) -> int:
    from ..hub.client.reading import experiments
    from .screen import table

    found = experiments()
    if arguments.json:
        print(json.dumps(found, indent=2))
        return 0
    rows = [
        [row["id"], printable(row["name"]), time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(row["updated_at"] / 1000))]
        for row in found
    ]
    print("\n".join(table(["id", "experiment", "changed (UTC)"], rows)))
    return 0
