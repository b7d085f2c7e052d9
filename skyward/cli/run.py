"""`skyward run`: list, show and compare runs of a hub."""

from __future__ import annotations

import argparse
import json
import math
import time
from typing import TYPE_CHECKING, Any

from ..core.printable import printable

if TYPE_CHECKING:
    from ..hub.client.reading import LoggedRun

HELP = "list, show and compare runs of a hub"

DESCRIPTION = """\
Shows runs that were logged to a hub. SKYWARD_HUB_URL and SKYWARD_HUB_TOKEN name the hub; `skyward hub up` prints them.
"""

EPILOG = """\
examples:
  skyward run list --filter "metrics.loss < 0.1" --order-by "metrics.loss ASC"
  skyward run show 0af7651916cd43dd8448eb211c80319c
  skyward run compare RUN_A RUN_B --metrics loss,accuracy

exit status: 0 success, 1 the hub does not answer, or there is no such run
from Python: skyward.hub.runs(), skyward.hub.run()
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION")
    listing = actions.add_parser(
        "list",
        help="list runs, the newest first",
        description="Lists runs, the newest first.",
        epilog="example: skyward run list --experiment digits --filter \"params.lr = '0.1'\"",
    )
    listing.add_argument("--experiment", help="name of an experiment (default: all of the project)")
    listing.add_argument("--filter", help='condition in MLflow\'s grammar, such as "metrics.loss < 0.1"')
    listing.add_argument("--order-by", action="append", default=[], help='such as "metrics.loss ASC"; repeatable')
    listing.add_argument("--limit", type=int, default=50, help="largest number of runs (default: 50)")
    listing.add_argument("--json", action="store_true", help="print JSON")
    listing.set_defaults(run=_list)
    show = actions.add_parser(
        "show",
        help="show a run",
        description="Shows a run with its parameters, tags and latest metrics.",
        epilog="example: skyward run show 0af7651916cd43dd8448eb211c80319c",
    )
    show.add_argument("id", metavar="RUN", help="id of the run; see `skyward run list`")
    show.add_argument("--json", action="store_true", help="print JSON")
    show.set_defaults(run=_show)
    compare = actions.add_parser(
        "compare",
        help="compare metrics and differing parameters of runs",
        description="Compares the latest metrics of runs, and the parameters in which they differ.",
        epilog="example: skyward run compare RUN_A RUN_B --metrics loss,accuracy",
    )
    compare.add_argument("id", nargs="+", metavar="RUN", help="ids of runs")
    compare.add_argument("--metrics", default="", help="names of metrics, separated by commas (default: all)")
    compare.add_argument("--json", action="store_true", help="print JSON")
    compare.set_defaults(run=_compare)


def _list(arguments: argparse.Namespace) -> int:
    from ..hub.client.reading import runs
    from .screen import table

    found = runs(arguments.filter, arguments.order_by, experiment=arguments.experiment, limit=arguments.limit)
    if arguments.json:
        print(json.dumps([_fields(run) for run in found], indent=2))
        return 0
    rows = [
        [run.id, printable(run.name), printable(run.experiment), run.status, _moment(run.started_at), _metrics(run)]
        for run in found
    ]
    print("\n".join(table(["run", "name", "experiment", "status", "started (UTC)", "metrics"], rows)))
    return 0


def _show(arguments: argparse.Namespace) -> int:
    from ..hub.client.reading import run

    found = run(arguments.id)
    if arguments.json:
        print(json.dumps(_fields(found), indent=2))
        return 0
    print(f"{found.id}  {printable(found.name)}  {found.status}  experiment {printable(found.experiment)}")
    print(f"  started {_moment(found.started_at)} UTC by {printable(found.user)}")
    if found.error:
        print(f"  error: {printable(found.error)}")
    for title, values in (("parameters", found.params), ("metrics", found.metrics), ("tags", found.tags)):
        if values:
            print(f"{title}:")
            print("\n".join(f"  {printable(key)}: {printable(_text(values[key]))}" for key in sorted(values)))
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    from ..hub.client.reading import run
    from .screen import table

    found = [run(run_id) for run_id in arguments.id]
    wanted = [name for name in arguments.metrics.split(",") if name]
    keys = wanted or sorted({key for each in found for key in each.metrics})
    names = sorted({name for each in found for name in each.params})
    differing = [name for name in names if len({each.params.get(name) for each in found}) > 1]
    metrics = {key: [each.metrics.get(key) for each in found] for key in keys}
    params = {name: [each.params.get(name) for each in found] for name in differing}
    if arguments.json:
        plain = {key: [_plain(value) for value in values] for key, values in metrics.items()}
        print(json.dumps({"runs": arguments.id, "metrics": plain, "params": params}, indent=2))
        return 0
    rows = [[printable(key), *(_text(value) for value in values)] for key, values in metrics.items()]
    rows += [[printable(name), *(printable(_text(value)) for value in values)] for name, values in params.items()]
    print("\n".join(table(["", *(printable(each.name or each.id[:8]) for each in found)], rows)))
    return 0


def _fields(run: LoggedRun) -> dict[str, Any]:
    names = ("id", "name", "experiment", "status", "user", "started_at", "ended_at", "error", "params", "tags")
    return {
        **{name: getattr(run, name) for name in names},
        "metrics": {key: _plain(value) for key, value in run.metrics.items()},
    }


def _plain(value: float | None) -> float | str | None:
    """Return a number that JSON can hold: NaN and infinities become texts."""
    return value if value is None or math.isfinite(value) else str(value)


def _metrics(run: LoggedRun) -> str:
    return printable(" ".join(f"{key}={_text(value)}" for key, value in sorted(run.metrics.items())[:4]))


def _text(value: object) -> str:
    return "-" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def _moment(milliseconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(milliseconds / 1000))
