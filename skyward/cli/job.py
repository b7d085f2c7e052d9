"""`skyward job`: submit jobs to a hub, follow them, and tell them what to do."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.printable import coloured, printable
from .layout import add_command

if TYPE_CHECKING:
    from collections.abc import Callable

    _Actions = argparse._SubParsersAction[argparse.ArgumentParser]

HELP = "submit jobs to a hub, follow and steer them"

DESCRIPTION = """\
Jobs are calls and commands that wait their turn in a hub and outlive the program that submitted them.
SKYWARD_HUB_URL and SKYWARD_HUB_TOKEN name the hub; `skyward hub up` prints them.
"""

EPILOG = """\
examples:
  skyward job submit train.py:main --args '[3e-4]' --nodes 2 --on all
  skyward job submit job.yaml
  skyward job submit --nodes 2 --max-duration 48h -- python train.py --lr 3e-4
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
    _add_submit(actions)
    listing = add_command(actions, "list", "list jobs, the newest first", "job list --status queued")
    listing.add_argument("--status", action="append", default=[], metavar="STATE", help="of this state; repeatable")
    listing.add_argument("--trials", action="store_true", help="also jobs that are trials of a sweep")
    listing.add_argument("--project", metavar="NAME", help="project of the hub (default: the token's)")
    listing.add_argument("--limit", type=int, default=50, metavar="N", help="greatest number (default: 50)")
    listing.add_argument("--json", action="store_true", help="print JSON")
    listing.set_defaults(run=_list)
    show = _with_id(add_command(actions, "show", "show a job with its attempts", "job show ID"), _show)
    show.add_argument("--json", action="store_true", help="print JSON")
    logs = _with_id(add_command(actions, "logs", "print the output of a job, until it is over", "job logs ID"), _logs)
    logs.add_argument("--no-follow", action="store_true", help="only the output that is there now")
    _with_id(add_command(actions, "why", "say why a job waits, or why it ended as it did", "job why ID"), _why)
    shell = add_command(actions, "ssh", "open a shell on a node of a running job", "job ssh ID 1 -- nvidia-smi")
    shell.add_argument("id", help="id of the job; run it on the machine of its launcher")
    shell.add_argument(
        "rest",
        nargs=argparse.REMAINDER,
        metavar="[NODE] [-- COMMAND]",
        help="number of the node (default: 0); a command",
    ).required = False  # as in Python 3.12
    shell.set_defaults(run=_ssh, parser=shell)
    forward = add_command(
        actions, "forward", "show a port of a running job's node on this machine", "job forward ID 6006 --node 1"
    )
    forward.add_argument("id", help="id of the job; run it on the machine of its launcher")
    forward.add_argument("port", type=int, metavar="PORT", help="port on the node's loopback")
    forward.add_argument("--node", type=int, default=0, metavar="N", help="number of the node (default: 0)")
    forward.add_argument(
        "--local", type=int, metavar="PORT", help="port on this machine (default: the same one, or a free one)"
    )
    forward.set_defaults(run=_forward)
    known = add_command(actions, "operations", "list named operations, or show one's schema", "job operations")
    known.add_argument("name", nargs="?", metavar="NAME", help="show the JSON schema of its parameters")
    known.set_defaults(run=_operations)
    for order, text in _ORDERS.items():
        _with_id(add_command(actions, order, text, f"job {order} ID"), _order(order))


def _add_submit(actions: _Actions) -> None:
    submit = add_command(
        actions, "submit", "submit a call, a command, or a file of YAML", "job submit --nodes 2 -- python train.py"
    )
    submit.add_argument(
        "what", nargs="*", metavar="WHAT", help="train.py:main (a function of a file), job.yaml, or a command"
    )
    submit.add_argument("--operation", metavar="NAME", help="run this operation; see `skyward job operations`")
    submit.add_argument("--params", default="{}", metavar="JSON", help="parameters of the operation, a JSON object")
    submit.add_argument("--args", default="[]", metavar="JSON", help="a call's arguments, as a JSON list or object")
    submit.add_argument("--on", choices=["one", "all"], default="one", help="a call: one node, or each (default: one)")
    submit.add_argument("--nodes", type=int, metavar="N", help="nodes, all at once (default: 1)")
    submit.add_argument("--accelerator", metavar="NAME", help="accelerator of each node, such as A100")
    submit.add_argument("--project", metavar="NAME", help="project of the hub (default: the token's)")
    submit.add_argument("--name", metavar="NAME", help="name of the job (default: the function's or the program's)")
    submit.add_argument("--priority", choices=["low", "medium", "high"], help="default: medium")
    submit.add_argument(
        *("--max-duration", "--max-duration-s"), dest="max_duration", metavar="TIME", help="such as 48h (default: 24h)"
    )
    submit.add_argument("--keep", metavar="TIME", help="how long its machines wait for your next job, such as 10m")
    submit.add_argument("--after", action="append", metavar="ID", help="begin when this job is completed; repeatable")
    submit.add_argument("--max-wait", metavar="TIME", help="give up if it does not run by then, such as 2h")
    submit.add_argument("--cron", metavar="EXPRESSION", help="submit it again and again, such as '0 3 * * *' (UTC)")
    submit.add_argument(
        "--notify", action="append", metavar="URL", help="tell this webhook how it goes; see --notify-secret"
    )
    submit.add_argument("--notify-secret", metavar="NAME", help="secret of the project that signs the messages")
    submit.add_argument("--notify-wait", metavar="TIME", help="also tell it after so much waiting, such as 2h")
    submit.add_argument("--preemptible", action="store_true", help="more urgent work may tell it to make way")
    submit.add_argument("--hold", action="store_true", help="wait until it is released")
    submit.set_defaults(run=_submit)


def _with_id(parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
    parser.add_argument("id", help="id of the job")
    parser.set_defaults(run=run)
    return parser


def _ssh(arguments: argparse.Namespace) -> int:
    from ..hub.client.jobs import job_row
    from . import shell
    from .job_forward import pool_of

    arguments.pool = pool_of(job_row(arguments.id), "open a shell").pool
    return shell.run(arguments)


def _forward(arguments: argparse.Namespace) -> int:
    from . import job_forward

    return job_forward.run(arguments)


def _operations(arguments: argparse.Namespace) -> int:
    from ..errors import UsageError
    from ..hub.client.job_command import operations
    from .screen import table

    rows = operations()
    if arguments.name is None:
        print("\n".join(table(["operation", "does"], [[row["name"], row["text"]] for row in rows])))
        return 0
    found = next((row for row in rows if row["name"] == arguments.name), None)
    if found is None:
        raise UsageError(f"operation={arguments.name!r}: no such operation; see `skyward job operations`")
    print(json.dumps(found["schema"], indent=2))
    return 0


def _submit(arguments: argparse.Namespace) -> int:
    from ..errors import UsageError

    if bool(arguments.what) == bool(arguments.operation):
        raise UsageError("job: nothing to submit, or two things; give WHAT or --operation")
    if arguments.operation:
        try:
            params = json.loads(arguments.params)
        except ValueError as error:
            raise UsageError(f"params={arguments.params!r}: is not JSON ({error}); write '{{\"path\": ...}}'") from None
        print(_submit_form(arguments, {"operation": arguments.operation, "params": params}))
        return 0
    first = arguments.what[0]
    is_alone = len(arguments.what) == 1
    if is_alone and first.endswith((".yaml", ".yml")):
        print(_submit_file(arguments, Path(first)))
    elif is_alone and (".py:" in first or first.endswith(".py")):
        print(_submit_call(arguments, first))
    else:
        print(_submit_form(arguments, {"command": arguments.what}))
    return 0


def _submit_call(arguments: argparse.Namespace, place: str) -> str:
    from ..calls.compute import as_compute
    from ..errors import UsageError
    from ..hub.client.job_file import seconds_of
    from ..hub.client.jobs import submit

    function = function_of(place)
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
        nodes=1 if arguments.nodes is None else arguments.nodes,
        accelerator=arguments.accelerator,
        project=arguments.project,
        name=arguments.name,
        priority=arguments.priority or "medium",
        max_duration_s=seconds_of("max-duration", arguments.max_duration or "24h"),
        preemptible=arguments.preemptible,
        keep_s=None if arguments.keep is None else seconds_of("keep", arguments.keep),
        after=arguments.after or (),
        max_wait_s=None if arguments.max_wait is None else seconds_of("max-wait", arguments.max_wait),
        cron=arguments.cron or "",
        hold=arguments.hold,
        notify=_targets(arguments) or (),
        notify_wait_s=None if arguments.notify_wait is None else seconds_of("notify-wait", arguments.notify_wait),
    )
    return job.id


def _submit_file(arguments: argparse.Namespace, path: Path) -> str:
    from ..hub.client.job_file import read_job_file

    return _submit_form(arguments, read_job_file(path))


def _submit_form(arguments: argparse.Namespace, form: dict[str, Any]) -> str:
    """Submit a command. Options of the command line win over those of the file."""
    from ..errors import UsageError
    from ..hub.client.job_command import submit_command

    if arguments.on != "one" or arguments.args != "[]":
        raise UsageError("--on and --args: are for calls of a function; a command runs on each of its --nodes")
    given: dict[str, dict[str, Any]] = {
        "": {
            "name": arguments.name,
            "priority": arguments.priority,
            "is_held": arguments.hold or None,
            "notify": _targets(arguments),
            "notify_wait": arguments.notify_wait,
        },
        "distributed": {"num_nodes": arguments.nodes},
        "resources": _machines(arguments.accelerator),
        "schedule": {
            "max_duration": arguments.max_duration,
            "preemptible": arguments.preemptible or None,
            "keep": arguments.keep,
            "after": arguments.after,
            "max_wait": arguments.max_wait,
            "cron": arguments.cron,
        },
    }
    for section, options in given.items():
        chosen = {name: value for name, value in options.items() if value is not None}
        if section and chosen:
            chosen = {section: {**(form.get(section) or {}), **chosen}}
        form = {**form, **chosen}
    return submit_command(form, project=arguments.project).id


def _targets(arguments: argparse.Namespace) -> list[dict[str, str]] | None:
    if arguments.notify is None:
        return None
    return [{"url": url, "secret": arguments.notify_secret or ""} for url in arguments.notify]


def _machines(accelerator: str | None) -> dict[str, Any]:
    from ..accelerators import Accelerator

    if accelerator is None:
        return {}
    kind = Accelerator.from_name(accelerator)
    return {"gpu_type": kind.name, "gpus": kind.count}


def function_of(text: str) -> Any:
    """Return a function of a file. Its folder is on the path from now on, as it is for a script."""
    from ..errors import UsageError

    file, _, name = text.partition(":")
    path = Path(file).absolute()
    if not name or not path.is_file() or path.suffix != ".py":
        raise UsageError(
            f"function={text!r}: is no function of a file; write train.py:main, or a command: python train.py"
        )
    sys.path.insert(0, str(path.parent))
    module = importlib.import_module(path.stem)
    if not callable(getattr(module, name, None)):
        raise UsageError(f"function={text!r}: {file} has no function of that name; check the spelling")
    return getattr(module, name)


def _list(arguments: argparse.Namespace) -> int:
    from ..hub.client.jobs import job_rows
    from .screen import table

    rows = job_rows(
        arguments.status, project=arguments.project, limit=arguments.limit, trials=str(arguments.trials).lower()
    )
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return 0
    cells = [
        [row["id"], printable(row["name"]), row["status"], str(row["spec"]["nodes"]), _time(row), printable(row["why"])]
        for row in rows
    ]
    print("\n".join(table(["job", "name", "status", "nodes", "submitted (UTC)", "why"], cells)))
    return 0


def _trials_of(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the jobs of the trials that a job drives."""
    from ..hub.client.jobs import job_rows

    spec = row["spec"]
    return [] if spec["trials"] is None else job_rows(project=row["project"], limit=1000, sweep=spec["sweep"])


def _show(arguments: argparse.Namespace) -> int:
    from ..hub.client.jobs import job_history, job_row
    from .screen import table

    row, news = job_row(arguments.id), job_history(arguments.id)["deliveries"]
    trials = _trials_of(row)
    if arguments.json:
        extra = {"trial_jobs": trials} if trials else {}
        print(json.dumps({**row, "deliveries": news, **extra}, indent=2))
        return 0
    for name in ("id", "name", "status", "why", "project", "user", "priority"):
        print(f"{name:<9} {printable(str(row[name]))}")
    print(f"{'submitted':<9} {_time(row)} UTC")
    cells = [
        [str(one["number"]), one["machines"], ",".join(map(str, one["nodes"])), one["end"], printable(one["error"])]
        for one in row["attempts"]
    ]
    print("\n".join(["", *table(["attempt", "machines", "nodes", "end", "error"], cells)]))
    if trials:
        rows = [
            [str(one["spec"]["trial"]["number"]), one["id"], one["status"], printable(one["why"])] for one in trials
        ]
        print("\n".join(["", *table(["trial", "job", "status", "why"], rows)]))
    if news:
        rows = [[one["kind"], printable(one["target"]), str(one["tries"]), _arrival(one)] for one in news]
        print("\n".join(["", *table(["news", "to", "tries", "arrived (UTC)"], rows)]))
    return 0


def _arrival(delivery: dict[str, Any]) -> str:
    if delivery["delivered_at"] is not None:
        return _clock(delivery["delivered_at"])
    return f"{'not yet' if delivery['next_at'] is not None else 'given up'}: {printable(delivery['error'])}".strip(": ")


def _logs(arguments: argparse.Namespace) -> int:
    from ..hub.client.jobs import job

    for line in job(arguments.id).logs(follow=not arguments.no_follow):
        print(coloured(line), flush=True)
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
    return _clock(row["created_at"])


def _clock(moment_ms: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(moment_ms / 1000))
