"""`skyward train`: list, watch, control and report trainings."""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import TYPE_CHECKING

from ..core.printable import printable

if TYPE_CHECKING:
    from ..calls.control import CommandState, RunStatus
    from ..training.control import Endpoint

    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]

HELP = "watch, save, stop, abort and report trainings"

DESCRIPTION = """\
Controls your trainings on this machine that use a skyward.training.TrainerControlCallback. A training inside a call of
a pool needs TrainerControlCallback(enable_http=True); otherwise only its own program reaches it, with pool.control().
"""

EPILOG = """\
examples:
  skyward train list
  skyward train watch my-run
  skyward train save-stop my-run --wait 600
  skyward train abort my-run --yes        do not ask for confirmation
  skyward train report out/my-run         write a page about the run in this folder

exit status: 0 success, 1 the command failed or is still pending
from Python: skyward.training.control.find(), runs(), sweep(); skyward.training.report()
"""

_WATCH_DESCRIPTION = """\
Follows a training until it ends. On a terminal, shows its loss curve, rates, memory and ranks (needs
skyward[training]); elsewhere, prints a line for each record of its log. Ctrl-C stops watching, not the training.
"""

_REPORT_DESCRIPTION = """\
Writes an HTML page about a run that has ended, was killed or still runs: loss and evaluations, learning rate, rates,
memory of each rank, norms and tables. The page is one file and loads nothing from the network.
"""

_REPORT_EPILOG = """\
examples:
  skyward train report out/my-run
  skyward train report out/my-run --out my-run.html
  skyward train report my-job              a run that is still active on this machine
  skyward train report out/a out/b         several runs laid over each other

from Python: skyward.training.report("out/my-run", to="my-run.html")
"""

_WAIT_S = 30.0

_COMMANDS = {
    "save": ("save_checkpoint", "save a checkpoint and go on"),
    "stop": ("graceful_stop", "end after this step; a checkpoint is saved first, unless its save_strategy is 'no'"),
    "save-stop": ("save_and_stop", "save a checkpoint, then end"),
    "abort": ("abort", "end after this step without a checkpoint; asks first"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    listing = commands.add_parser(
        "list",
        help="list running trainings",
        description="Lists running trainings, oldest first.",
        epilog="example: skyward train list --json",
    )
    listing.add_argument("--json", action="store_true", help="print JSON")
    listing.set_defaults(run=_list)

    status = commands.add_parser(
        "status",
        help="show the progress of a training",
        description="Shows the progress of a training.",
        epilog="example: skyward train status my-run",
    )
    status.add_argument("job", metavar="JOB", help="id of the training; see `skyward train list`")
    status.add_argument("--json", action="store_true", help="print JSON")
    status.set_defaults(run=_status)

    for name, (command, what) in _COMMANDS.items():
        example = f"example: skyward train {name} my-run --wait 600"
        own = commands.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.", epilog=example)
        own.add_argument("job", metavar="JOB", help="id of the training; see `skyward train list`")
        own.add_argument(
            "--wait",
            type=float,
            default=_WAIT_S,
            metavar="SECONDS",
            help=f"wait at most this long for the command to be executed; 0: do not wait (default: {_WAIT_S:g})",
        )
        if command == "abort":
            own.add_argument("--yes", action="store_true", help="do not ask for confirmation")
        own.set_defaults(run=_send, command=command)

    cleanup = commands.add_parser(
        "cleanup",
        help="remove files of killed trainings",
        description="Removes the files of trainings whose process is dead. Running trainings are left alone.",
        epilog="example: skyward train cleanup",
    )
    cleanup.add_argument("job", metavar="JOB", nargs="?", help="clean up after this training only")
    cleanup.set_defaults(run=_cleanup)

    watch = commands.add_parser(
        "watch",
        help="follow a training until it ends",
        description=_WATCH_DESCRIPTION,
        epilog="example: skyward train watch my-run",
    )
    watch.add_argument("job", metavar="JOB", help="id of the training; see `skyward train list`")
    watch.add_argument(
        "--every", type=float, default=1.0, metavar="SECONDS", help="time between two updates (default: 1)"
    )
    watch.set_defaults(run=_watch)

    _add_report(commands)


def _add_report(commands: _Commands) -> None:
    report = commands.add_parser(
        "report",
        help="write an HTML page of a run from its logs",
        description=_REPORT_DESCRIPTION,
        epilog=_REPORT_EPILOG,
    )
    report.add_argument(
        "run_dir",
        nargs="+",
        metavar="DIR|JOB",
        help="the run's output_dir or logging_dir, or its id while it runs; several runs are laid over each other",
    )
    report.add_argument(
        "--out", metavar="FILE", help="the page (report.html in the folder; comparison.html for several runs)"
    )
    report.set_defaults(run=_report)


def _list(arguments: argparse.Namespace) -> int:
    from ..training.control import runs
    from .screen import as_json, table

    statuses = [(endpoint, _asked(endpoint)) for endpoint in runs()]
    if arguments.json:
        print(as_json([status if status is not None else endpoint for endpoint, status in statuses]))
        return 0
    if not statuses:
        print("no training listens")
        return 0
    rows = [_row(endpoint, status) for endpoint, status in statuses]
    print("\n".join(table(("job", "state", "step", "epoch", "loss", "age", "process"), rows, right=[2, 3, 4, 5, 6])))
    return 0


def _asked(endpoint: Endpoint) -> RunStatus | None:
    """None: it does not answer."""
    from ..errors import SkywardError
    from ..training.control.client import client_of

    try:
        return client_of(endpoint).status()
    except SkywardError as error:
        print(f"skyward: {error}", file=sys.stderr)
        return None


def _row(endpoint: Endpoint, status: RunStatus | None) -> tuple[str, ...]:
    from ..console.words import duration

    age = duration(max(0.0, time.time() - endpoint.started_at))
    if status is None:
        return endpoint.job_id, "silent", "-", "-", "-", age, str(endpoint.pid)
    step = f"{status.global_step}/{status.max_steps}" if status.max_steps > 0 else str(status.global_step)
    epoch = "-" if status.epoch is None else f"{status.epoch:.2f}"
    loss = status.logs.get("loss")
    shown = f"{loss:.4g}" if isinstance(loss, float) else "-" if loss is None else str(loss)
    return endpoint.job_id, status.status, step, epoch, shown, age, str(endpoint.pid)


def _status(arguments: argparse.Namespace) -> int:
    from ..training.control import find
    from .screen import as_json

    status = find(arguments.job).status()
    if arguments.json:
        print(as_json(status))
        return 0
    of = f" of {status.max_steps}" if status.max_steps > 0 else ""
    epoch = "" if status.epoch is None else f", epoch {status.epoch:.2f}"
    ranks = "1 rank" if status.world_size == 1 else f"{status.world_size} ranks"
    print(printable(f"{status.job_id}: {status.status}, step {status.global_step}{of}{epoch}, {ranks}"))
    for name, value in status.logs.items():
        print(f"  {printable(f'{name}: {value}')}")
    return 0


def _send(arguments: argparse.Namespace) -> int:
    from ..training.control import find
    from .screen import is_sure

    client = find(arguments.job)
    if arguments.command == "abort" and not arguments.yes:
        action = f"abort {arguments.job}"
        if not is_sure(action, f"{action}? What it has learnt since its last checkpoint is lost."):
            return 1
    state = client.send(arguments.command, wait_s=max(0.0, arguments.wait))
    print(f"{arguments.job}: {_in_words(state)}")
    return 0 if state.state == "executed" or (not state.is_final and arguments.wait <= 0) else 1


def _in_words(state: CommandState) -> str:
    what = {
        "save_checkpoint": "a checkpoint is saved",
        "graceful_stop": "it has ended",
        "save_and_stop": "it is saved and has ended",
        "abort": "it has ended without a checkpoint",
    }.get(state.command, state.command)
    if state.state == "executed":
        return f"{what}, at step {state.step}"
    if state.state == "applied":
        return f"all ranks know, from step {state.step} on; it is not done yet"
    if state.state == "waiting":
        return "it is asked, and takes it at the end of its step"
    return (
        f"it is not known whether {what}: {state.detail}" if state.state == "unknown" else f"not done: {state.detail}"
    )


def _cleanup(arguments: argparse.Namespace) -> int:
    from ..training.control import sweep

    removed = sweep(arguments.job)
    print("\n".join(f"removed {job}" for job in removed) if removed else "nothing is left of killed trainings")
    return 0


def _watch(arguments: argparse.Namespace) -> int:
    from ..training.control import find
    from ..training.control.watch import watch

    print(watch(find(arguments.job), every_s=max(0.05, arguments.every)))
    return 0


def _report(arguments: argparse.Namespace) -> int:
    from ..training.reporting import report

    first, *others = map(_folder, arguments.run_dir)
    print(report(first, *others, to=arguments.out))
    return 0


def _folder(named: str) -> str:
    """The folder that is named, or that of a run on this machine which listens under that name."""
    from ..errors import UsageError
    from ..training.control.endpoint import endpoint_of

    if os.path.isdir(named):
        return named
    try:
        endpoint = endpoint_of(named)
    except UsageError:  # no job could have that name
        return named
    return (endpoint and (endpoint.logging_dir or endpoint.output_dir)) or named
