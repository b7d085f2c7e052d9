"""Answers of the server to requests that moto does not know: prices, public parameters, placement groups."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping
from typing import Any
from xml.sax.saxutils import escape

from tests.hosts.ec2_images import PARAMETERS

__all__ = ["ON_DEMAND_USD", "Answers", "Refused", "numbered"]

ON_DEMAND_USD = {
    "t3.micro": 0.0104, "t3.medium": 0.0416, "t3.large": 0.0832, "t3.xlarge": 0.1664,
    "m5.large": 0.096, "m5.xlarge": 0.192, "m6i.large": 0.096, "m7i.large": 0.1008, "m7g.large": 0.0816,
    "c5.large": 0.085, "c5.xlarge": 0.17, "c6i.large": 0.085, "c7i.large": 0.08925, "c7g.large": 0.0725,
    "r5.large": 0.126, "r6i.large": 0.126, "c5n.18xlarge": 3.888,
    "g4dn.xlarge": 0.526, "g5.xlarge": 1.006, "g5.2xlarge": 1.212, "g5.12xlarge": 5.672, "g6.xlarge": 0.8048,
    "p3.2xlarge": 3.06, "p4d.24xlarge": 21.957, "p5.48xlarge": 55.04, "trn1.2xlarge": 1.34375,
}  # fmt: skip
"""USD per hour. Plausible, and few enough to read: there are no other instance types."""
_SPOT_SHARE = 0.3
_NAMESPACE = "http://ec2.amazonaws.com/doc/2016-11-15/"


class Refused(Exception):
    """An answer that is an error of the API."""

    def __init__(self, code: str, message: str, status: int = 400) -> None:
        super().__init__(code, message)
        self.code, self.message, self.status = code, message, status


class Answers:
    """Answers. `ec2` and `json` return the body of an answer, or None if moto answers."""

    def __init__(self, uses_of_group: Callable[[str], list[str]]) -> None:
        self.spot_usd: dict[tuple[str, str], float] = {}
        self.on_demand_usd = dict(ON_DEMAND_USD)
        self._placement_groups: dict[str, dict[str, Any]] = {}
        self._uses_of_group = uses_of_group

    def reset(self) -> None:
        """Forget everything that was made and set."""
        self.spot_usd.clear()
        self.on_demand_usd = dict(ON_DEMAND_USD)
        self._placement_groups.clear()

    @property
    def placement_groups(self) -> list[str]:
        return sorted(self._placement_groups)

    # JSON: Pricing and SSM.

    def json(self, target: str, body: Mapping[str, Any]) -> str | None:
        """Answer a JSON request. `target` is the header that names service and operation."""
        match target.rpartition(".")[2]:
            case "GetProducts":
                wanted = {found["Field"]: found["Value"] for found in body.get("Filters", [])}
                names = [wanted["instanceType"]] if "instanceType" in wanted else sorted(self.on_demand_usd)
                region = wanted.get("regionCode", "us-east-1")
                products = [self._product(name, region) for name in names if name in self.on_demand_usd]
                return json.dumps({"FormatVersion": "aws_v1", "PriceList": products})
            case "GetParameter" if str(body.get("Name", "")).startswith("/aws/service/"):
                name = body["Name"]
                if name not in PARAMETERS:
                    raise Refused("ParameterNotFound", name)
                return json.dumps(
                    {"Parameter": {"Name": name, "Type": "String", "Value": PARAMETERS[name], "Version": 1}}
                )
        return None

    def _product(self, name: str, region: str) -> str:
        dimension = {"unit": "Hrs", "pricePerUnit": {"USD": f"{self.on_demand_usd[name]:.10f}"}}
        attributes = {"instanceType": name, "regionCode": region, "operatingSystem": "Linux", "tenancy": "Shared"}
        term = {"priceDimensions": {"A.B.C": dimension}, "termAttributes": {}}
        product = {"productFamily": "Compute Instance", "attributes": attributes, "sku": "A"}
        return json.dumps({"product": product, "serviceCode": "AmazonEC2", "terms": {"OnDemand": {"A.B": term}}})

    # EC2's own protocol.

    def ec2(self, action: str, form: Mapping[str, str], zones: list[str]) -> str | None:
        """Answer a request in EC2's protocol. `form` holds the parameters as they were sent. Raises Refused."""
        match action:
            case "DescribeSpotPriceHistory":
                return self._spot_history(numbered(form, "InstanceType"), zones)
            case "CreatePlacementGroup":
                return self._create_placement_group(form)
            case "DescribePlacementGroups":
                return self._describe_placement_groups(form)
            case "DeletePlacementGroup":
                return self._delete_placement_group(form["GroupName"])
        return None

    def _spot_history(self, types: list[str], zones: list[str]) -> str:
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
        items = ""
        for name in types or sorted(self.on_demand_usd):
            for number, zone in enumerate(zones):
                usual = self.on_demand_usd.get(name, 0) * _SPOT_SHARE * (1 + 0.05 * number)
                if price := self.spot_usd.get((name, zone), usual):
                    items += (
                        f"<item><instanceType>{name}</instanceType><productDescription>Linux/UNIX</productDescription>"
                        f"<spotPrice>{price:.6f}</spotPrice><timestamp>{now}</timestamp>"
                        f"<availabilityZone>{zone}</availabilityZone></item>"
                    )
        return _xml("DescribeSpotPriceHistory", f"<spotPriceHistorySet>{items}</spotPriceHistorySet><nextToken/>")

    def _create_placement_group(self, form: Mapping[str, str]) -> str:
        name = form["GroupName"]
        if name in self._placement_groups:
            raise Refused("InvalidPlacementGroup.Duplicate", f"The placement group '{name}' already exists.")
        keys = [key for key in form if key.startswith("TagSpecification.") and key.endswith(".Key")]
        tags = {form[key]: form[f"{key.removesuffix('Key')}Value"] for key in keys}
        self._placement_groups[name] = {"strategy": form.get("Strategy", "cluster"), "tags": tags}
        return _xml("CreatePlacementGroup", f"<placementGroup>{self._placement_group(name)}</placementGroup>")

    def _describe_placement_groups(self, form: Mapping[str, str]) -> str:
        names = numbered(form, "GroupName")
        if unknown := sorted(set(names) - set(self._placement_groups)):
            raise Refused("InvalidPlacementGroup.Unknown", f"The Placement Group '{unknown[0]}' is unknown.")
        filters = {form[f"Filter.{n}.Name"]: numbered(form, f"Filter.{n}.Value") for n in _numbers(form, "Filter")}

        def fits(name: str) -> bool:
            facts = {"group-name": name, "state": "available"}
            facts |= {f"tag:{key}": value for key, value in self._placement_groups[name]["tags"].items()}
            return all(facts.get(key) in values for key, values in filters.items())

        found = [name for name in names or self.placement_groups if fits(name)]
        items = "".join(f"<item>{self._placement_group(name)}</item>" for name in found)
        return _xml("DescribePlacementGroups", f"<placementGroupSet>{items}</placementGroupSet>")

    def _delete_placement_group(self, name: str) -> str:
        if name not in self._placement_groups:
            raise Refused("InvalidPlacementGroup.Unknown", f"The Placement Group '{name}' is unknown.")
        if self._uses_of_group(name):
            raise Refused(
                "InvalidPlacementGroup.InUse", f"The placement group '{name}' is in use and may not be deleted."
            )
        del self._placement_groups[name]
        return _xml("DeletePlacementGroup", "<return>true</return>")

    def _placement_group(self, name: str) -> str:
        group = self._placement_groups[name]
        tags = "".join(
            f"<item><key>{escape(key)}</key><value>{escape(value)}</value></item>"
            for key, value in group["tags"].items()
        )
        return (
            f"<groupName>{escape(name)}</groupName><strategy>{group['strategy']}</strategy><state>available</state>"
            f"<groupId>pg-{abs(hash(name)):017x}</groupId><tagSet>{tags}</tagSet>"
        )


def numbered(form: Mapping[str, str], name: str) -> list[str]:
    """Return the values of a list parameter: InstanceType.1, InstanceType.2, ..."""
    return [form[f"{name}.{n}"] for n in _numbers(form, name) if f"{name}.{n}" in form]


def _numbers(form: Mapping[str, str], name: str) -> list[int]:
    found = {key.removeprefix(f"{name}.").partition(".")[0] for key in form if key.startswith(f"{name}.")}
    return sorted(int(number) for number in found if number.isdigit())


def _xml(action: str, inner: str) -> str:
    return f'<{action}Response xmlns="{_NAMESPACE}"><requestId>fake</requestId>{inner}</{action}Response>'
