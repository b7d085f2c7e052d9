"""`sky.AWS(...)`: Amazon EC2 machines in your own account."""

from __future__ import annotations

import dataclasses
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import field
from typing import Any, ClassVar, Literal

from ...core.bounds import is_positive
from ...core.frozenmap import FrozenMap
from ...core.records import dataclass
from ...core.signatures import checked_options
from ...errors import UsageError
from ..cloud import CloudProvider
from ..rented import Cloud

_PATTERNS = {
    # field: (pattern, an example)
    "region": (r"[a-z]{2,}(-[a-z]+)+-\d", "us-east-1"),
    "ami": (r"ami-[0-9a-z]+", "ami-0123456789abcdef0"),
    "subnet_id": (r"subnet-[0-9a-z]+", "subnet-0123456789abcdef0"),
    "vpc": (r"vpc-[0-9a-z]+", "vpc-0123456789abcdef0"),
    "security_group_id": (r"sg-[0-9a-z]+", "sg-0123456789abcdef0"),
    "instance_profile_arn": (r"arn:aws[\w-]*:iam::\d*:instance-profile/.+", "arn:aws:iam::1234:instance-profile/me"),
    "ubuntu_version": (r"\d\d\.\d\d", "24.04"),
    "username": (r"[a-z_][a-z0-9_-]*", "ubuntu"),
    "endpoint_url": (r"https?://.+", "http://127.0.0.1:5000"),
}


@checked_options
@dataclass(frozen=True, kw_only=True)
class AWS(CloudProvider):
    """Amazon EC2 machines, rented for a pool and terminated with it.

    Credentials are found as `aws` and boto3 find them: environment, `~/.aws`, SSO, or an instance's role. Each pool
    gets its own key pair and security group, which admits SSH from `client_cidr` and all traffic among its members.
    A pool that requests nothing in particular gets x86_64 machines without an accelerator and with 2 GiB or more.

    Args:
        region: AWS region, such as "us-east-1".
        zones: availability zones to use; empty for all. The nodes of a pool always share one zone.
        instance_types: instance types to use; empty for all that fit.
        ami: image to boot. None takes the current image of `system`. Ubuntu's image brings the NVIDIA driver or AWS
            Neuron for machines with such devices; Debian's brings neither.
        system: "ubuntu" (of `ubuntu_version`) or "debian" (12).
        ubuntu_version: Ubuntu release, such as "24.04".
        username: login name. None takes the system's: "ubuntu" or "admin".
        subnet_id: subnet to use, which also fixes the zone. None takes the VPC's subnet in the chosen zone.
        vpc: VPC to use. None takes the default VPC.
        security_group_id: existing security group to use unchanged. It must admit SSH from here, and traffic among
            its members. None creates one per pool.
        instance_profile_arn: IAM instance profile of the machines; None for none.
        client_cidr: addresses that may reach SSH, such as "203.0.113.7/32". "auto" takes this machine's public
            address, as https://checkip.amazonaws.com sees it. If it has changed when a machine is replaced, the old
            address loses access.
        placement: "auto" creates a cluster placement group for several nodes whose type has EFA; "cluster" creates
            one for any several nodes; "none" creates none. Any other text names an existing group.
        efa: "auto" adds an EFA network interface for several nodes whose type has it; True always, False never.
        disk_gib: size of the root disk in GiB, 8 to 16384.
        max_price: highest price of one machine in USD per hour, also the spot bid; None for no limit.
        exclude_burstable: leave out t2, t3 and t4g, whose CPUs are throttled or cost extra under sustained load.
            Prices of burstable types include the CPU credits of full load.
        lease_s: seconds without contact after which a machine terminates itself, >= 60.
        tags: tags for every resource that the pool creates. Keys cannot start with "skyward:" or "aws:".
        profile: profile of `~/.aws/config`; None for the default one.
        endpoint_url: another server of the same API, for tests.

    Raises:
        UsageError: an option is not legal; the message names it.

    Example:
        >>> AWS(region="eu-central-1", instance_types=["g5.xlarge"], max_price=1.5).region
        'eu-central-1'
    """

    name: ClassVar[str] = "aws"
    extra: ClassVar[str] = "aws"

    region: str = "us-east-1"
    zones: Sequence[str] = ()
    instance_types: Sequence[str] = ()
    ami: str | None = None
    system: Literal["ubuntu", "debian"] = "ubuntu"
    ubuntu_version: str = "24.04"
    username: str | None = None
    subnet_id: str | None = None
    vpc: str | None = None
    security_group_id: str | None = None
    instance_profile_arn: str | None = None
    client_cidr: str = "auto"
    placement: str = "auto"
    efa: Literal["auto"] | bool = "auto"
    disk_gib: int = 100
    max_price: float | None = None
    exclude_burstable: bool = False
    lease_s: float = 600.0
    tags: FrozenMap[str] | dict[str, str] = field(default_factory=FrozenMap)
    profile: str | None = None
    endpoint_url: str | None = None

    def __post_init__(self) -> None:
        for name, (pattern, example) in _PATTERNS.items():
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and re.fullmatch(pattern, value)):
                raise UsageError(f"AWS.{name}={value!r}: not a legal {name}; write one such as {example!r}")
        for name in ("zones", "instance_types"):
            value = getattr(self, name)
            if isinstance(value, str) or not all(isinstance(item, str) and item for item in value):
                raise UsageError(f"AWS.{name}={value!r}: must be a list of names; write {name}=['...']")
            object.__setattr__(self, name, tuple(value))
        for zone in self.zones:
            if not zone.startswith(self.region):
                raise UsageError(
                    f"AWS.zones={list(self.zones)!r}: {zone} is not in region={self.region!r}; name zones of one region"
                )
        self._check_choices()
        self._check_numbers()
        self._check_cidr()
        self._check_tags()

    def _check_choices(self) -> None:
        if self.system not in ("ubuntu", "debian"):
            raise UsageError(f"AWS.system={self.system!r}: unknown system; set 'ubuntu' or 'debian'")
        if not isinstance(self.placement, str) or not self.placement:
            raise UsageError(
                f"AWS.placement={self.placement!r}: not a placement; set 'auto', 'cluster', 'none' or a group's name"
            )
        if self.efa not in ("auto", True, False):
            raise UsageError(f"AWS.efa={self.efa!r}: not a choice; set 'auto', True or False")

    def _check_numbers(self) -> None:
        if isinstance(self.disk_gib, bool) or not isinstance(self.disk_gib, int) or not 8 <= self.disk_gib <= 16384:
            raise UsageError(
                f"AWS.disk_gib={self.disk_gib!r}: must be a whole number from 8 to 16384; set disk_gib=100"
            )
        if self.max_price is not None and not is_positive(self.max_price):
            raise UsageError(
                f"AWS.max_price={self.max_price!r}: must be a number of USD per hour > 0; set max_price=1.5, or None "
                "for no limit"
            )
        if not is_positive(self.lease_s) or self.lease_s < 60:
            raise UsageError(f"AWS.lease_s={self.lease_s!r}: must be a number of seconds >= 60; set lease_s=600")

    def _check_cidr(self) -> None:
        if self.client_cidr != "auto":
            try:
                ipaddress.IPv4Network(self.client_cidr)
            except ValueError as error:
                raise UsageError(
                    f"AWS.client_cidr={self.client_cidr!r}: not an IPv4 network ({error}); set 'auto' or one such as "
                    "'203.0.113.7/32'"
                ) from None

    def _check_tags(self) -> None:
        for key, value in dict(self.tags).items():
            if not isinstance(key, str) or not isinstance(value, str) or key.startswith(("skyward:", "aws:")):
                raise UsageError(
                    f"AWS.tags={dict(self.tags)!r}: {key!r} is not a legal tag; give text for keys and values, and "
                    "start no key with skyward: or aws:"
                )
        object.__setattr__(self, "tags", FrozenMap(self.tags))

    def cloud(self) -> Cloud:
        """Return the EC2 API of this account and region. Raises MissingDependency."""
        from .ec2 import Ec2  # imports boto3, which only pools on AWS need

        return Ec2(self)

    def fields(self) -> dict[str, Any]:
        """Return the tags, and the options that differ from their defaults, as plain data."""
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        values = {name: getattr(self, name) for name in defaults}
        plain = {name: list(v) if isinstance(v, tuple) else v for name, v in values.items() if v != defaults[name]}
        return {**{k: v for k, v in plain.items() if k != "tags" and v != []}, "tags": dict(self.tags)}
