"""`skyward capacity`: list, declare and drain the machines that jobs of a hub may use."""

from __future__ import annotations

import argparse
import json
from typing import Any

HELP = "list, declare and drain the machines of a hub's jobs"

DESCRIPTION = """\
Machine sets are declared as data; credentials stay with the launchers. SKYWARD_HUB_URL and SKYWARD_HUB_TOKEN name the
hub. All actions but `list` need an owner's token.
"""

EPILOG = """\
examples:
  skyward capacity list
  skyward capacity add here --provider '{"type": "local"}' --nodes 4
  skyward capacity add lab --provider '{"type": "ssh", "hosts": ["a", "b"]}' --nodes 2 --accelerator A100 --devices 8
  skyward capacity drain lab

exit status: 0 success, 1 the hub refuses or does not answer
from Python: skyward.hub.client.capacity
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION")
    listing = _add(actions, "list", "list machine sets and their use", "list")
    listing.add_argument("--json", action="store_true", help="print JSON")
    listing.set_defaults(run=_list)
    add = _add(actions, "add", "declare a machine set, or change one", 'add here --provider \'{"type": "local"}\'')
    add.add_argument("name", help="name of the set")
    add.add_argument("--provider", required=True, metavar="JSON", help='provider, such as {"type": "local"}')
    add.add_argument("--kind", choices=["fixed", "elastic", "external"], default="fixed", help="default: fixed")
    add.add_argument("--nodes", type=int, default=1, metavar="N", help="most nodes at once (default: 1)")
    add.add_argument("--devices", type=int, default=1, metavar="N", help="devices of a node (default: 1)")
    add.add_argument("--accelerator", default="", metavar="NAME", help="type of the devices")
    add.add_argument("--vcpus", type=int, default=0, metavar="N", help="virtual CPUs of a node")
    add.add_argument("--memory-gib", type=float, default=0.0, metavar="GIB", help="memory of a node")
    add.add_argument("--usd-per-hour", type=float, default=0.0, metavar="USD", help="price of a node")
    add.set_defaults(run=_declare)
    for name, text in (
        ("drain", "let running jobs end on a set, and begin none"),
        ("undrain", "let jobs begin on a drained set again"),
        ("remove", "remove a set that no job uses"),
    ):
        own = _add(actions, name, text, f"{name} lab")
        own.add_argument("name", help="name of the set")
        own.set_defaults(run=_change, change=name)


def _add(
    actions: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str, example: str
) -> argparse.ArgumentParser:
    own = actions.add_parser(
        name, help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=f"example: skyward capacity {example}"
    )
    own.set_defaults(parser=own)
    return own


def _list(arguments: argparse.Namespace) -> int:
    from ..hub.client.capacity import machine_sets
    from .screen import table

    rows = machine_sets()
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return 0
    print("\n".join(table(["set", "provider", "kind", "nodes", "used", "devices", "state"], map(_cells, rows))))
    return 0


def _cells(row: dict[str, Any]) -> list[str]:
    machines = row["machines"]
    devices = f"{machines['devices']} {machines['accelerator']}" if machines["accelerator"] else "-"
    state = "draining" if row["is_draining"] else "open"
    provider = str(machines["provider"]["type"])
    return [row["name"], provider, machines["kind"], str(machines["nodes"]), str(row["used_nodes"]), devices, state]


def _declare(arguments: argparse.Namespace) -> int:
    from ..errors import UsageError
    from ..hub.client.capacity import declare

    try:
        provider = json.loads(arguments.provider)
    except ValueError as error:
        raise UsageError(
            f'provider={arguments.provider!r}: is not JSON ({error}); write \'{{"type": "local"}}\''
        ) from None
    facts = ("kind", "nodes", "devices", "accelerator", "vcpus", "memory_gib", "usd_per_hour")
    declare(arguments.name, provider, **{name: getattr(arguments, name) for name in facts})
    return 0


def _change(arguments: argparse.Namespace) -> int:
    from ..hub.client.capacity import drain, remove

    if arguments.change == "remove":
        remove(arguments.name)
    else:
        drain(arguments.name, is_draining=arguments.change == "drain")
    return 0
