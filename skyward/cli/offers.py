"""`skyward offers`: list machines that providers offer now, with prices."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..values.machine import Offer

HELP = "list machines that you could rent now, with prices"

DESCRIPTION = """\
Lists the machines that providers offer now for one node, in the order in which a pool would try them. Several
providers, regions or accelerators are compared in one table. Rents nothing.
"""

EPILOG = """\
examples:
  skyward offers --provider aws --accelerator A10G
  skyward offers --provider aws --region eu-central-1 --vcpus 8 --memory 32 --allocation on-demand
  skyward offers --provider aws --region us-east-1 --region eu-west-1 --accelerator A100 --accelerator H100
  skyward offers --pool train --json       for a pool of skyward.toml

from Python: sky.ComputePool(provider, ...).offers()
"""

_ALL = 0


def add_options(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--provider",
        metavar="NAME",
        action="append",
        help="provider: aws, or one of [providers] in skyward.toml; repeat it for any of several",
    )
    which.add_argument("--pool", metavar="NAME", help="use the requirements of this pool of skyward.toml")
    add_wishes(parser)
    parser.add_argument(
        "--limit", type=int, default=20, metavar="N", help="show at most N offers; 0: all (default: 20)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_wishes(parser: argparse.ArgumentParser) -> None:
    """Add the options that are fields of a pool."""
    parser.add_argument("--region", action="append", help="region of the provider; repeat it for any of several")
    parser.add_argument(
        "--accelerator",
        metavar="NAME",
        action="append",
        help='accelerator, such as A100 or "RTX 4090"; repeat it for any of several',
    )
    parser.add_argument("--selection", choices=("cheapest", "first", "fastest"), help="order of several sources")
    parser.add_argument("--count", type=int, metavar="N", help="accelerators per node")
    parser.add_argument("--vcpus", type=int, metavar="N", help="virtual CPUs per node, at least")
    parser.add_argument("--memory", type=float, metavar="GIB", help="memory per node in GiB, at least")
    parser.add_argument("--architecture", choices=("x86_64", "arm64"), help="architecture of the CPU")
    kinds = ("spot", "on-demand", "spot-if-available", "cheapest")
    parser.add_argument("--allocation", choices=kinds, help="how to rent")
    parser.add_argument("--nodes", type=int, metavar="N", help="number of nodes")
    parser.add_argument("--max-hourly-cost", type=float, metavar="USD", help="limit for all nodes together")


def fields_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Build the arguments of the pool, with its provider, from the command line."""
    from ..accelerators import Accelerator
    from ..errors import UsageError
    from ..pool.config import pool_fields, provider_named
    from ..pool.pool import ComputePool

    fields = (
        pool_fields(arguments.pool, ComputePool.__init__)
        if arguments.pool is not None
        else {"any_of": [provider_named(name) for name in arguments.provider]}
    )
    regions: list[str] = arguments.region or []
    given = {
        "region": regions[0] if len(regions) == 1 else regions or None,
        "selection": arguments.selection,
        "vcpus": arguments.vcpus,
        "memory_gib": arguments.memory,
        "architecture": arguments.architecture,
        "allocation": arguments.allocation,
        "nodes": arguments.nodes,
        "max_hourly_cost": arguments.max_hourly_cost,
    }
    fields |= {name: value for name, value in given.items() if value is not None}
    if arguments.accelerator is not None:
        count = arguments.count or 1
        fields["accelerator"] = [Accelerator.from_name(name, count=count) for name in arguments.accelerator]
    elif arguments.count is not None:
        raise UsageError(f"--count={arguments.count}: needs an accelerator; add --accelerator NAME")
    return fields


def run(arguments: argparse.Namespace) -> int:
    from ..pool.pool import ComputePool
    from .screen import as_json

    offers = ComputePool(**fields_of(arguments)).offers()
    shown = offers if arguments.limit == _ALL else offers[: arguments.limit]
    if arguments.json:
        print(as_json(shown))
        return 0
    print("\n".join(describe(shown)))
    if len(shown) < len(offers):
        print(f"and {len(offers) - len(shown)} more; --limit 0 shows them", file=sys.stderr)
    return 0


def describe(offers: Sequence[Offer]) -> list[str]:
    """Format the offers as a table."""
    from .screen import table

    rows = [
        (
            offer.provider,
            offer.instance_type,
            str(offer.vcpus or "?"),
            f"{round(offer.memory_gib, 1):g}" if offer.memory_gib else "?",
            str(offer.accelerator) if offer.accelerator is not None else "-",
            "spot" if offer.is_spot else "on demand" if offer.price_usd_per_hour else "-",
            # Four digits, because spot prices within a region differ by less than a cent.
            f"${offer.price_usd_per_hour:,.4f}" if offer.price_usd_per_hour else "yours",
            offer.zone or offer.region or "-",
        )
        for offer in offers
    ]
    names = ("provider", "machine", "vcpus", "gib", "accelerator", "rent", "per hour", "where")
    return table(names, rows, right=[2, 3, 6])
