"""Machine prices in a region: on demand from the Pricing API, spot from the current price history."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Sequence
from typing import Any

from ...errors import ProviderError
from . import price_table
from .cached import cached
from .clients import Clients
from .failures import translated
from .settings import Ec2Settings

_MAX_AGE_S = 86400.0
_FEW = 12
"""Most types to query one by one; for more, the price list of the whole region is cheaper."""
_SPOT_KINDS = frozenset({"Linux/UNIX", "Linux/UNIX (Amazon VPC)"})


def on_demand_prices(api: Clients, aws: Ec2Settings, types: Sequence[str]) -> dict[str, tuple[float, str]]:
    """Return price in USD per hour and its source, by type. Types with unknown prices are missing."""
    queried = sorted(types) if len(types) <= _FEW else []
    key = f"prices-{aws.region}" + "".join(f"-{name}" for name in queried) + ("-test" if aws.endpoint_url else "")
    try:
        kept = cached(key, _MAX_AGE_S, lambda: _fetch(api, aws.region, queried))
        day = datetime.datetime.fromtimestamp(kept.at, datetime.UTC).strftime("%Y-%m-%d")
        known = {name: (price, f"AWS Pricing API, {day}") for name, price in kept.value.items()}
    except ProviderError:
        known = {}
    return known | {name: entry for name in types if name not in known and (entry := _from_table(name, aws.region))}


def _from_table(name: str, region: str) -> tuple[float, str] | None:
    price = price_table.on_demand(name, region)
    if price is None:
        return None
    note = "" if region in price_table.SAME_REGIONS else f" x {price_table.OTHER_REGIONS:g} for {region}"
    return price, f"table of {price_table.DATE} bundled with skyward{note}: the AWS Pricing API did not answer"


def _fetch(api: Clients, region: str, types: Sequence[str]) -> dict[str, float]:
    prices: dict[str, float] = {}
    for instance_type in types or [""]:
        filters = {
            "regionCode": region,
            "operatingSystem": "Linux",
            "tenancy": "Shared",
            "preInstalledSw": "NA",
            "capacitystatus": "Used",
            **({"instanceType": instance_type} if instance_type else {}),
        }
        wanted = [{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in filters.items()]
        with translated("GetProducts"):
            for page in api.pricing.get_paginator("get_products").paginate(ServiceCode="AmazonEC2", Filters=wanted):
                prices.update(_read(page["PriceList"]))
    return prices


def _read(products: Iterable[str]) -> dict[str, float]:
    """Read prices out of the Pricing API's documents.

    Source: AWS Price List, "Reading the service price list file": product -> terms -> OnDemand -> price dimensions.
    """
    prices: dict[str, float] = {}
    for text in products:
        document: dict[str, Any] = json.loads(text)
        name = document["product"]["attributes"].get("instanceType")
        for term in document.get("terms", {}).get("OnDemand", {}).values():
            for dimension in term["priceDimensions"].values():
                price = float(dimension["pricePerUnit"].get("USD", 0))
                if name and price > 0 and dimension.get("unit") == "Hrs":
                    prices[name] = price
    return prices


def spot_prices(api: Clients, types: Sequence[str]) -> dict[tuple[str, str], float]:
    """Return current spot prices in USD per hour, by (type, zone)."""
    prices: dict[tuple[str, str], tuple[Any, float]] = {}
    now = datetime.datetime.now(datetime.UTC)
    names: Any = list(types)
    with translated("DescribeSpotPriceHistory"):
        pages = api.ec2.get_paginator("describe_spot_price_history").paginate(
            InstanceTypes=names, StartTime=now, EndTime=now, ProductDescriptions=["Linux/UNIX"]
        )
        for page in pages:
            for quote in page["SpotPriceHistory"]:
                key = (quote["InstanceType"], quote["AvailabilityZone"])
                if quote["ProductDescription"] in _SPOT_KINDS:
                    entry = (quote["Timestamp"], float(quote["SpotPrice"]))
                    prices[key] = max(prices.get(key, entry), entry)
    return {key: price for key, (_, price) in prices.items()}
