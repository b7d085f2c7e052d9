"""`skyward plan`: show the requests that a named pool would send to its provider."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..pool.pool import ComputePool

HELP = "show the requests that a pool would send (dry run)"

DESCRIPTION = """\
Shows the requests that a pool of skyward.toml would send to its provider for the first offer, with all parameters,
and the expected cost. Rents and changes nothing. "<...>" marks values that only the provider's answers give.
"""

EPILOG = """\
examples:
  skyward plan train
  skyward plan train --json

from Python: sky.ComputePool.named("train").plan()
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pool", metavar="NAME", help="name of a pool of skyward.toml")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    from ..pool.pool import ComputePool
    from .screen import as_json

    pool = ComputePool.named(arguments.pool)
    requests = pool.plan()
    if arguments.json:
        print(as_json({"forecast": pool.forecast(), "requests": requests}))
    else:
        print("\n".join([*describe(pool), "", *(_request(request) for request in requests)]))
    return 0


def describe(pool: ComputePool) -> list[str]:
    """Describe the machines and the cost of the pool, one line each."""
    from ..console.words import duration, usd

    forecast = pool.forecast()
    offer = forecast.offer
    rent = f", {'spot' if offer.is_spot else 'on demand'}" if offer.price_usd_per_hour else ""
    where = f" in {offer.zone or offer.region}" if offer.zone or offer.region else ""
    lines = [f"{forecast.nodes} x {offer.instance_type}{rent}{where}, provider {offer.provider}"]
    if forecast.price_usd_per_hour:
        lines.append(f"{usd(forecast.price_usd_per_hour)} per hour; at least {usd(forecast.minimum_usd)}")
    if forecast.lasts_s is not None:
        lines.append(f"the budget lasts {duration(forecast.lasts_s)}")
    return lines


def _request(request: Any) -> str:
    from .screen import as_json

    if hasattr(request, "operation"):
        return f"{request.operation} {as_json(request.parameters)}"
    return f"{type(request).__name__} {as_json(_shown(request))}"


def _shown(request: Any) -> Any:
    """Return the fields of a request. The environment is left out, because it is long and may hold secrets."""
    import dataclasses

    if not dataclasses.is_dataclass(request) or isinstance(request, type):
        return str(request)
    fields = {field.name: getattr(request, field.name) for field in dataclasses.fields(request)}
    if "env" in fields:
        fields["env"] = f"<{len(fields['env'])} variables>"
    return fields
