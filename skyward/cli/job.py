"""`skyward job`: submit jobs to a hub, follow them, and tell them what to do."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.printable import printable

if TYPE_CHECKING:
    from collections.abc import Callable

HELP = "submit jobs to a hub, follow and steer them"

DESCRIPTION = """\
Jobs are calls that wait their turn in a hub and outlive the program that submitted them. SKYWARD_HUB_URL and
SKYWARD_HUB_TOKEN name the hub; `skyward hub up` prints them.
"""

EPILOG = """\
examples:
  skyward job submit train.py:main --args '[3e-4]' --nodes 2 --on all
  skyward job list --status running
  skyward job logs ID
  skyward job why ID

exit status: 0 success, 1 the hub refuses or does not answer
from Python: skyward.hub.submit(), skyward.hub.jobs(), skyward.hub.job()
"""

_ORDERS = {
    "cancel": "end a job for good",
    "save": "tell a running job to save a checkpoint and go on",
    "retry": "let a job that failed or was cancelled begin again",
    "hold": "keep a waiting job from beginning",
    "release": "let a held job begin when its turn comes",
    "delete": "delete a job that is over, with output and value",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION")
    submit = _add(actions, "submit", "submit a call of a function in a Python file", "submit train.py:main --nodes 2")
    submit.add_argument("function", metavar="FILE:FUNCTION", help="function of a file, such as train.py:main")
    submit.add_argument("--args", default="[]", metavar="JSON", help="its arguments, as a JSON list or object")
    submit.add_argument("--on", choices=["one", "all"], default="one", help="one node, or each (default: one)")
    submit.add_argument("--nodes", type=int, default=1, metavar="N", help="nodes, all at once (default: 1)")
    submit.add_argument("--accelerator", metavar="NAME", help="accelerator of each node, such as A100")
    submit.add_argument("--project", metavar="NAME", help="project of the hub (default: the token's)")
    submit.add_argument("--name", metavar="NAME", help="name of the job (default: the function's)")
    submit.add_argument("--priority", choices=["low", "medium", "high"], default="medium")
    submit.add_argument("--max-duration-s", type=float, default=86_400.0, metavar="S", help="default: 86400")
    submit.add_argument("--preemptible", action="store_true", help="more urgent work may tell it to make way")
    submit.add_argument("--hold", action="store_true", help="wait until it is released")
    submit.set_defaults(run=_submit)
    listing = _add(actions, "list", "list jobs, the newest first", "list --status queued")
    listing.add_argument("--status", action="append", default=[], metavar="STATE", help="of this state; repeatable")
    listing.add_argument("--project", metavar="NAME", help="project of the hub (default: the token's)")
    listing.add_argument("--limit", type=int, default=50, metavar="N", help="greatest number (default: 50)")
    listing.add_argument("--json", action="store_true", help="print JSON")
    listing.set_defaults(run=_list)
    show = _with_id(_add(actions, "show", "show a job with its attempts", "show ID"), _show)
    show.add_argument("--json", action="store_true", help="print JSON")
    logs = _with_id(_add(actions, "logs", "print the output of a job, until it is over", "logs ID"), _logs)
    logs.add_argument("--no-follow", action="store_true", help="only the output that is there now")
    _with_id(_add(actions, "why", "say why a job waits, or why it ended as it did", "why ID"), _why)
    for order, text in _ORDERS.items():
        _with_id(_add(actions, order, text, f"{order} ID"), _order(order))


def _add(
    actions: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str, example: str
) -> argparse.ArgumentParser:
    own = actions.add_parser(
        name, help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=f"example: skyward job {example}"
    )
    own.set_defaults(parser=own)
    return own


def _with_id(parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
    parser.add_argument("id", help="id of the job")
    parser.set_defaults(run=run)
    return parser


def _submit(arguments: argparse.Namespace) -> int:
    from ..calls.compute import as_compute
    from ..errors import UsageError
    from ..hub.client.jobs import submit

    function = function_of(arguments.function)
    try:
        given = json.loads(arguments.args)
    except ValueError as error:
        raise UsageError(f"args={arguments.args!r}: is not JSON ({error}); write '[1, \"two\"]'") from None
    if not isinstance(given, list | dict):
        raise UsageError(f"args={arguments.args!r}: is neither a list nor an object; write '[{arguments.args}]'")
    compute = as_compute(function)
    call = compute(*given) if isinstance(given, list) else compute(**given)
    job = submit(
        call,
        on=arguments.on,
        nodes=arguments.nodes,
        accelerator=arguments.accelerator,
        project=arguments.project,
        name=arguments.name,
        priority=arguments.priority,
        max_duration_s=arguments.max_duration_s,
        preemptible=arguments.preemptible,
        hold=arguments.hold,
    )
    print(job.id)
    return 0


def function_of(text: str) -> Any:
    """Return a function of a file. Its folder is on the path from now on, as it is for a script."""
    from ..errors import UsageError

    file, _, name = text.partition(":")
    path = Path(file).absolute()
    if not name or not path.is_file() or path.suffix != ".py":
        raise UsageError(f"function={text!r}: is no function of a file; write train.py:main")
    sys.path.insert(0, str(path.parent))
    module = importlib.import_module(path.stem)
    if not callable(getattr(module, name, None)):
        raise UsageError(f"function={text!r}: {file} has no function of that name; check the spelling")
    return getattr(module, name)


def _list(arguments: argparse.Namespace) -> int:
    from ..hub.client.jobs import job_rows
    from .screen import table

    rows = job_rows(arguments.status, project=arguments.project, limit=arguments.limit)
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return 0
    cells = [
        [row["id"], printable(row["name"]), row["status"], str(row["spec"]["nodes"]), _time(row), printable(row["why"])]
        for row in rows
    ]
    print("\n".join(table(["job", "name", "status", "nodes", "submitted (UTC)", "why"], cells)))
    return 0


def _show(arguments: argparse.Namespace) -> int:
    from ..hub.client.jobs import job_row
    from .screen import table

    row = job_row(arguments.id)
    if arguments.json:
        print(json.dumps(row, indent=2))
        return 0
    for name in ("id", "name", "status", "why", "project", "user", "priority"):
        print(f"{name:<9} {printable(str(row[name]))}")
    print(f"{'submitted':<9} {_time(row)} UTC")
    cells = [
        [str(one["number"]), one["machines"], ",".join(map(str, one["nodes"])), one["end"], printable(one["error"])]
        for one in row["attempts"]
    ]
    print("\n".join(["", *table(["attempt", "machines", "nodes", "end", "error"], cells)]))
    return 0


def _logs(arguments: argparse.Namespace) -> int:
    from ..hub.client.jobs import job

    for line in job(arguments.id).logs(follow=not arguments.no_follow):
        print(printable(line), flush=True)
    return 0


def _why(arguments: argparse.Namespace) -> int:
    from ..hub.client.jobs import job_row

    row = job_row(arguments.id)
    print(f"{row['status']}: {printable(row['why'])}" if row["why"] else row["status"])
    return 0


def _order(order: str) -> Callable[[argparse.Namespace], int]:
    def run(arguments: argparse.Namespace) -> int:
        from ..errors import HubError
        from ..hub.client.jobs import job

        found = job(arguments.id)
        if order == "cancel" and not found.cancel():
            raise HubError(f"job={arguments.id}: is over already; see `skyward job why {arguments.id}`")
        if order != "cancel":
            getattr(found, order)()
        return 0

    return run


def _time(row: dict[str, Any]) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(row["created_at"] / 1000))
