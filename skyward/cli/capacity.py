"""`skyward capacity`: the machines that jobs of a hub may use, and how much of them is whose."""

from __future__ import annotations

import argparse
import json
from typing import Any

from .layout import add_command

HELP = "list, declare, drain and share the machines of a hub's jobs"

DESCRIPTION = """\
Machine sets are declared as data; credentials stay with the launchers. SKYWARD_HUB_URL and SKYWARD_HUB_TOKEN name the
hub. All actions but `list` and `quotas` need an owner's token.
"""

EPILOG = """\
examples:
  skyward capacity list
  skyward capacity add here --provider '{"type": "local"}' --nodes 4
  skyward capacity add lab --provider '{"type": "ssh", "hosts": ["a", "b"]}' --nodes 2 --accelerator A100 --devices 8
  skyward capacity drain lab
  skyward capacity quota research --weight 2 --devices A100=16 --usd-per-month 5000

exit status: 0 success, 1 the hub refuses or does not answer
from Python: skyward.hub.client.capacity
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION")
    listing = add_command(actions, "list", "list machine sets and their use", "capacity list")
    listing.add_argument("--json", action="store_true", help="print JSON")
    listing.set_defaults(run=_list)
    add = add_command(
        actions, "add", "declare a machine set, or change one", 'capacity add here --provider \'{"type": "local"}\''
    )
    add.add_argument("name", help="name of the set")
    add.add_argument("--provider", required=True, metavar="JSON", help='provider, such as {"type": "local"}')
    add.add_argument("--kind", choices=["fixed", "elastic", "external"], default="fixed", help="default: fixed")
    add.add_argument("--nodes", type=int, default=1, metavar="N", help="most nodes at once (default: 1)")
    add.add_argument("--devices", type=int, default=1, metavar="N", help="devices of a node (default: 1)")
    add.add_argument("--accelerator", default="", metavar="NAME", help="type of the devices")
    add.add_argument("--vcpus", type=int, default=0, metavar="N", help="virtual CPUs of a node")
    add.add_argument("--memory-gib", type=float, default=0.0, metavar="GIB", help="memory of a node")
    add.add_argument("--region", default="", metavar="NAME", help="region of the machines")
    add.add_argument("--label", action="append", default=[], metavar="NAME", help="jobs may ask for it; repeatable")
    add.add_argument(
        "--project",
        action="append",
        metavar="NAME",
        help="project that may use them; repeatable, '*' for all (default: yours for fixed machines, else all)",
    )
    add.add_argument("--usd-per-hour", type=float, default=0.0, metavar="USD", help="price of a node")
    add.add_argument("--max-usd-per-hour", type=float, metavar="USD", help="most that all nodes may cost together")
    add.add_argument(
        "--keep", default="0", metavar="TIME", help="how long machines wait for the next job, such as 10m (default: 0)"
    )
    add.set_defaults(run=_declare)
    for name, text in (
        ("drain", "let running jobs end on a set, and begin none"),
        ("undrain", "let jobs begin on a drained set again"),
        ("remove", "remove a set that no job uses"),
    ):
        own = add_command(actions, name, text, f"capacity {name} lab")
        own.add_argument("name", help="name of the set")
        own.set_defaults(run=_change, change=name)
    quotas = add_command(actions, "quotas", "list quotas of jobs and their use", "capacity quotas")
    quotas.add_argument("--json", action="store_true", help="print JSON")
    quotas.set_defaults(run=_quotas)
    _add_quota(
        add_command(
            actions, "quota", "set what the jobs of a project or user may use", "capacity quota nlp --devices A100=16"
        )
    )


def _add_quota(own: argparse.ArgumentParser) -> None:
    own.add_argument("name", help="name of the project, or of the user with --user")
    own.add_argument("--user", action="store_true", help="the name is a user's")
    own.add_argument("--remove", action="store_true", help="remove the quota")
    own.add_argument("--weight", type=float, default=1.0, metavar="X", help="part beside other projects (default: 1)")
    own.add_argument(
        "--devices", action="append", default=[], type=_devices, metavar="KIND=N", help="devices of its own; repeatable"
    )
    own.add_argument("--no-borrow", action="store_true", help="never more than its own devices, even idle ones")
    own.add_argument("--nodes", type=int, metavar="N", help="most nodes at once")
    own.add_argument("--jobs", type=int, metavar="N", help="most jobs that run at once")
    own.add_argument("--usd-per-day", type=float, metavar="USD", help="most that its jobs may cost in a day of UTC")
    own.add_argument("--usd-per-month", type=float, metavar="USD", help="most that its jobs may cost in a month of UTC")
    own.set_defaults(run=_set_quota)


def _devices(text: str) -> tuple[str, int]:
    kind, is_given, count = text.rpartition("=")
    if not (is_given and kind and count.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not KIND=N; write A100=16, or node=4 for nodes without any")
    return kind, int(count)


def _list(arguments: argparse.Namespace) -> int:
    from ..hub.client.capacity import machine_sets
    from .screen import table

    rows = machine_sets()
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return 0
    print("\n".join(table(["set", "provider", "kind", "nodes", "used", "kept", "devices", "state"], map(_cells, rows))))
    return 0


def _cells(row: dict[str, Any]) -> list[str]:
    machines = row["machines"]
    devices = f"{machines['devices']} {machines['accelerator']}" if machines["accelerator"] else "-"
    state = "draining" if row["is_draining"] else "open"
    provider = str(machines["provider"]["type"])
    kept = str(row["kept_nodes"]) + (f" (${row['kept_cost_usd']:.2f})" if row["kept_cost_usd"] else "")
    nodes = [str(machines["nodes"]), str(row["used_nodes"]), kept]
    return [row["name"], provider, machines["kind"], *nodes, devices, state]


def _declare(arguments: argparse.Namespace) -> int:
    from ..errors import UsageError
    from ..hub.client.capacity import declare
    from ..hub.client.job_file import seconds_of

    try:
        provider = json.loads(arguments.provider)
    except ValueError as error:
        raise UsageError(
            f'provider={arguments.provider!r}: is not JSON ({error}); write \'{{"type": "local"}}\''
        ) from None
    facts = (
        "kind",
        "nodes",
        "devices",
        "accelerator",
        "vcpus",
        "memory_gib",
        "region",
        "usd_per_hour",
        "max_usd_per_hour",
    )
    declare(
        arguments.name,
        provider,
        labels=arguments.label,
        projects=arguments.project,
        keep_s=0.0 if arguments.keep == "0" else seconds_of("keep", arguments.keep),
        **{name: getattr(arguments, name) for name in facts},
    )
    return 0


def _change(arguments: argparse.Namespace) -> int:
    from ..hub.client.capacity import drain, remove

    if arguments.change == "remove":
        remove(arguments.name)
    else:
        drain(arguments.name, is_draining=arguments.change == "drain")
    return 0


def _quotas(arguments: argparse.Namespace) -> int:
    from ..hub.client.capacity import quotas
    from .screen import table

    rows = quotas()
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return 0
    header = ["of", "name", "weight", "devices", "nodes", "jobs", "USD today", "USD this month"]
    print("\n".join(table(header, map(_quota_cells, rows))) if rows else "no quotas: jobs have no limits")
    return 0


def _quota_cells(row: dict[str, Any]) -> list[str]:
    quota = row["quota"]
    kinds = sorted({*quota["devices"], *row["devices"]})
    devices = ", ".join(f"{row['devices'].get(kind, 0)} of {quota['devices'].get(kind, '-')} {kind}" for kind in kinds)
    counts = [_of(row[name], quota[name]) for name in ("nodes", "jobs")]
    money = [_of(f"{row[f'{when}_usd']:.2f}", quota[limit]) for when, limit in _MONEY]
    weight = f"{quota['weight']:g}" if row["holder"] == "project" else "-"
    return [row["holder"], row["name"], weight, devices or "-", *counts, *money]


_MONEY = (("today", "usd_per_day"), ("month", "usd_per_month"))


def _of(used: object, most: object) -> str:
    return str(used) if most is None else f"{used} of {most}"


def _set_quota(arguments: argparse.Namespace) -> int:
    from ..hub.client.capacity import set_quota

    limits: dict[str, Any] = {
        "weight": arguments.weight,
        "devices": dict(arguments.devices),
        "may_borrow": not arguments.no_borrow,
        **{name: getattr(arguments, name) for name in ("nodes", "jobs", "usd_per_day", "usd_per_month")},
    }
    set_quota(arguments.name, is_user=arguments.user, **({} if arguments.remove else limits))
    return 0
