"""Resources that the machines of one pool share in EC2: security group, key pair, placement group. Found by tag.

The key pair is created first and deleted last. While it exists, its tags tell which other resources to delete.
"""

from __future__ import annotations

import functools
import ipaddress
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import NoCapacity, ProviderError, UsageError
from ..rented import JOURNAL_TAG, ApiCall, Request
from .clients import Clients, clients
from .failures import NotThere, NotYet, soon_there, translated
from .settings import Ec2Settings
from .types import has_efa

_PLACEMENT_TAG = "skyward:placement-group"
_ADDRESS_URL = "https://checkip.amazonaws.com"
_ADDRESS_LIMIT_S = 10.0
_IN_USE = ("DependencyViolation", "InvalidGroup.InUse", "InvalidPlacementGroup.InUse")


class Network:
    """Shared resources in one account and region. Stateless."""

    def __init__(self, api: Clients, aws: Ec2Settings) -> None:
        self._api = api
        self._aws = aws

    # Making -----------------------------------------------------------------------------------------------------------

    def prepare(self, request: Request) -> None:
        """Create all missing resources. Raises NotYet while a new resource is not known everywhere yet."""
        keys = self._keys(_by_journal(request.tags))
        if not keys:
            self._make("ImportKeyPair", self._key(request))
        if placement := self._own_placement(request):
            if keys and not _placements(keys):  # earlier offers needed no placement group
                tag = {"Key": _PLACEMENT_TAG, "Value": placement}
                with soon_there():
                    self._make("CreateTags", {"Resources": [key["KeyPairId"] for key in keys], "Tags": [tag]})
            self._make("CreatePlacementGroup", self._placement(request, placement))
        if not self._aws.security_group_id:
            group = self._group_id(request.tags) or self._made_group(request)
            with soon_there():
                self._let_in(group, request)

    def _let_in(self, group: str, request: Request) -> None:
        ssh, members = self._ingress(group)
        for rule in (ssh, members):  # one call each: EC2 rejects all rules of a call if one of them exists
            self._make("AuthorizeSecurityGroupIngress", {"GroupId": group, "IpPermissions": [rule]})
        for old in self._others_let_in(group, ssh):
            self._make("RevokeSecurityGroupIngress", {"GroupId": group, "IpPermissions": [old]})
        if self._uses_efa(request):
            self._make("AuthorizeSecurityGroupEgress", {"GroupId": group, "IpPermissions": [_among_members(group)]})

    def _made_group(self, request: Request) -> str:
        parameters = self._group(request)
        made = self._make("CreateSecurityGroup", parameters)
        if made:
            return str(made["GroupId"])
        # It exists: an earlier try whose answer was lost has created it, and its tags might still be unlisted.
        names: Any = [{"Name": "group-name", "Values": [parameters["GroupName"]]}]
        with translated("DescribeSecurityGroups"):
            groups = self._api.ec2.describe_security_groups(Filters=names)["SecurityGroups"]
        if not groups:
            raise NotYet(f"aws: security group {parameters['GroupName']} exists, but is not listed yet")
        return groups[0]["GroupId"]

    def _others_let_in(self, group: str, ssh: Mapping[str, Any]) -> list[dict[str, Any]]:
        """List SSH rules for previous addresses of this machine."""
        with translated("DescribeSecurityGroups"):
            groups = self._api.ec2.describe_security_groups(GroupIds=[group])["SecurityGroups"]
        ports = {name: ssh[name] for name in ("IpProtocol", "FromPort", "ToPort")}
        now = {entry["CidrIp"] for entry in ssh["IpRanges"]}
        return [
            {**ports, "IpRanges": [{"CidrIp": entry["CidrIp"]}]}
            for rule in (groups[0]["IpPermissions"] if groups else [])
            if all(rule.get(name) == value for name, value in ports.items())
            for entry in rule.get("IpRanges", [])
            if entry["CidrIp"] not in now
        ]

    def plan(self, request: Request) -> list[ApiCall]:
        """List the calls of `prepare` for a pool that has no resources yet."""
        calls = [("ImportKeyPair", self._key(request))]
        if placement := self._own_placement(request):
            calls.append(("CreatePlacementGroup", self._placement(request, placement)))
        if not self._aws.security_group_id:
            group = "<id of the security group>"
            calls.append(("CreateSecurityGroup", self._group(request)))
            for rule in self._ingress(group, is_plan=True):
                calls.append(("AuthorizeSecurityGroupIngress", {"GroupId": group, "IpPermissions": [rule]}))
            if self._uses_efa(request):
                egress = {"GroupId": group, "IpPermissions": [_among_members(group)]}
                calls.append(("AuthorizeSecurityGroupEgress", egress))
        return [ApiCall(operation=operation, parameters=parameters) for operation, parameters in calls]

    def places(self, request: Request, *, is_plan: bool = False) -> dict[str, Any]:
        """Return the network, key and placement parameters of RunInstances."""
        group = self._aws.security_group_id or (
            "<id of the security group>" if is_plan else self._group_id(request.tags)
        )
        if not group:
            raise NotYet(f"aws: security group {_name(request.tags)} is new, and not listed yet")
        interface: dict[str, Any] = {
            "DeviceIndex": 0,
            "SubnetId": self._subnet(request.offer.zone),
            "Groups": [group],
            "AssociatePublicIpAddress": True,
            "DeleteOnTermination": True,
        }
        if self._uses_efa(request):
            # Only on the first network card: EC2 gives a machine with several interfaces no public address.
            interface["InterfaceType"] = "efa"
        placement: dict[str, Any] = {"AvailabilityZone": request.offer.zone}
        if name := self._own_placement(request) or self._named_placement():
            placement["GroupName"] = name
        return {"KeyName": _name(request.tags), "NetworkInterfaces": [interface], "Placement": placement}

    def _make(self, operation: str, parameters: dict[str, Any]) -> Any:
        """Make one API call. A duplicate is not an error: an earlier try whose answer was lost created it."""
        method = "".join("_" + c.lower() if c.isupper() else c for c in operation)[1:]
        try:
            with translated(operation):
                return getattr(self._api.ec2, method)(**parameters)
        except ProviderError as error:
            if not error.code.endswith("Duplicate"):
                raise
            return {}

    def _key(self, request: Request) -> dict[str, Any]:
        tags = dict(request.shared_tags)
        if placement := self._own_placement(request):
            tags[_PLACEMENT_TAG] = placement
        return {
            "KeyName": _name(request.tags),
            "PublicKeyMaterial": request.public_key.encode(),
            "TagSpecifications": self._tagged("key-pair", tags),
        }

    def _group(self, request: Request) -> dict[str, Any]:
        return {
            "GroupName": _name(request.tags),
            "Description": f"skyward pool {request.pool}",
            "VpcId": self._vpc(),
            "TagSpecifications": self._tagged("security-group", request.shared_tags),
        }

    def _placement(self, request: Request, name: str) -> dict[str, Any]:
        tags = self._tagged("placement-group", request.shared_tags)
        return {"GroupName": name, "Strategy": "cluster", "TagSpecifications": tags}

    def _ingress(self, group: str, *, is_plan: bool = False) -> list[dict[str, Any]]:
        cidr = self._aws.client_cidr
        if cidr == "auto":
            cidr = "<this machine's address>/32" if is_plan else f"{_own_address()}/32"
        ssh = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": cidr}]}
        return [ssh, _among_members(group)]

    def _tagged(self, kind: str, tags: Mapping[str, str]) -> list[dict[str, Any]]:
        both = {**self._aws.tags, **tags}
        return [{"ResourceType": kind, "Tags": [{"Key": k, "Value": v} for k, v in both.items()]}]

    # Where ------------------------------------------------------------------------------------------------------------

    def _uses_efa(self, request: Request) -> bool:
        if self._aws.efa == "auto":
            return request.nodes > 1 and has_efa(self._aws, request.offer.instance_type)
        return self._aws.efa

    def _own_placement(self, request: Request) -> str:
        """Name of the placement group to create for the pool; "" for none."""
        is_wanted = self._aws.placement == "cluster" or (
            self._aws.placement == "auto" and has_efa(self._aws, request.offer.instance_type)
        )
        return _name(request.tags) if is_wanted and request.nodes > 1 else ""

    def _named_placement(self) -> str:
        return "" if self._aws.placement in ("auto", "cluster", "none") else self._aws.placement

    def _group_id(self, tags: Mapping[str, str]) -> str | None:
        filters: Any = _by_journal(tags)
        with translated("DescribeSecurityGroups"):
            groups = self._api.ec2.describe_security_groups(Filters=filters)["SecurityGroups"]
        return groups[0]["GroupId"] if groups else None

    def _vpc(self) -> str:
        if self._aws.vpc:
            return self._aws.vpc
        if self._aws.subnet_id:
            with translated("DescribeSubnets"):
                return self._api.ec2.describe_subnets(SubnetIds=[self._aws.subnet_id])["Subnets"][0]["VpcId"]
        with translated("DescribeVpcs"):
            vpcs = self._api.ec2.describe_vpcs(Filters=[{"Name": "is-default", "Values": ["true"]}])["Vpcs"]
        if not vpcs:
            raise UsageError(f"AWS.vpc=None: {self._aws.region} has no default VPC; name one: AWS(vpc='vpc-...')")
        return vpcs[0]["VpcId"]

    def _subnet(self, zone: str) -> str:
        if self._aws.subnet_id:
            return self._aws.subnet_id
        vpc = self._vpc()
        filters: Any = [{"Name": "vpc-id", "Values": [vpc]}, {"Name": "availability-zone", "Values": [zone]}]
        with translated("DescribeSubnets"):
            subnets = self._api.ec2.describe_subnets(Filters=filters)["Subnets"]
        if not subnets:
            raise NoCapacity(
                f"aws: {vpc} has no subnet in {zone}; choose zones that have one with AWS(zones=...), or name a subnet "
                "with AWS(subnet_id=...)"
            )
        # Prefer the zone's default subnet, then one that assigns public addresses. The id breaks ties, because a
        # repeated call with the same token must name the same subnet.
        order = ("DefaultForAz", "MapPublicIpOnLaunch")
        return max(subnets, key=lambda s: (*(bool(s.get(name)) for name in order), s["SubnetId"]))["SubnetId"]

    # Removing ---------------------------------------------------------------------------------------------------------

    def clean_up(self, tags: Mapping[str, str]) -> list[str]:
        """Delete all resources and return the names of those that are still in use."""
        filters: Any = _by_journal(tags)
        left: list[str] = []
        keys = self._keys(filters)
        for placement in _placements(keys):
            left += self._removed("DeletePlacementGroup", {"GroupName": placement}, placement)
        with translated("DescribeSecurityGroups"):
            groups = self._api.ec2.describe_security_groups(Filters=filters)["SecurityGroups"]
        for group in groups:
            left += self._removed("DeleteSecurityGroup", {"GroupId": group["GroupId"]}, group["GroupId"])
        if not left:
            for key in keys:
                left += self._removed("DeleteKeyPair", {"KeyName": key["KeyName"]}, key["KeyName"])
            # EC2 reports success when it deletes a key it does not find, so only a listing proves that it is gone.
            left = left or [key["KeyName"] for key in self._keys(filters)] if keys else left
        return left

    def found(self) -> list[dict[str, str]]:
        """Return the tags of every pool's key pair: where one exists, there may be other resources."""
        keys = self._keys([{"Name": "tag-key", "Values": [JOURNAL_TAG]}])
        return [{tag["Key"]: tag["Value"] for tag in key.get("Tags", [])} for key in keys]

    def _keys(self, filters: Any) -> list[Any]:
        with translated("DescribeKeyPairs"):
            return list(self._api.ec2.describe_key_pairs(Filters=filters)["KeyPairs"])

    def _removed(self, operation: str, parameters: dict[str, Any], name: str) -> list[str]:
        try:
            self._make(operation, parameters)
        except NotThere:  # gone already
            return []
        except ProviderError as error:
            if error.code in _IN_USE:
                return [name]
            raise
        return []


def subnet_zone(aws: Ec2Settings) -> str:
    """Return the zone of the configured subnet. Raises UsageError if the subnet does not exist."""
    assert aws.subnet_id is not None
    return _zone_of_subnet(aws.region, aws.profile, aws.endpoint_url, aws.subnet_id)


@functools.lru_cache(maxsize=64)
def _zone_of_subnet(region: str, profile: str | None, endpoint_url: str | None, subnet: str) -> str:
    try:
        with translated("DescribeSubnets"):
            subnets = clients(region, profile, endpoint_url).ec2.describe_subnets(SubnetIds=[subnet])["Subnets"]
    except NotThere as error:
        raise UsageError(
            f"AWS.subnet_id={subnet!r}: does not exist in {region}; name a subnet of this region"
        ) from error
    return subnets[0]["AvailabilityZone"]


def _name(tags: Mapping[str, str]) -> str:
    return f"skyward-{tags.get(JOURNAL_TAG, '<journal id>')}"


def _placements(keys: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of placement groups in the tags of key pairs."""
    return [tag["Value"] for key in keys for tag in key.get("Tags", []) if tag["Key"] == _PLACEMENT_TAG]


def _by_journal(tags: Mapping[str, str]) -> list[dict[str, Any]]:
    return [{"Name": f"tag:{JOURNAL_TAG}", "Values": [tags[JOURNAL_TAG]]}]


def _among_members(group: str) -> dict[str, Any]:
    return {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group}]}


def _own_address() -> str:
    """Return this machine's public address, as Amazon sees it. Raises UsageError."""
    try:
        with urllib.request.urlopen(_ADDRESS_URL, timeout=_ADDRESS_LIMIT_S) as answer:
            # A network with a sign-in page answers with something else, and one with only IPv6 with no IPv4 address.
            return str(ipaddress.IPv4Address(answer.read(64).decode("ascii").strip()))
    except (OSError, urllib.error.URLError, ValueError) as error:
        raise UsageError(
            f"AWS.client_cidr='auto': could not determine this machine's public address from {_ADDRESS_URL} ({error}); "
            "set it: AWS(client_cidr='203.0.113.7/32')"
        ) from error
