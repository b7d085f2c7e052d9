"""`sky.AWS(...)`: machines of Amazon EC2, in an account of yours."""

from __future__ import annotations

import dataclasses
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from ...core.bounds import is_positive
from ...core.frozenmap import FrozenMap
from ...core.signatures import checked_options
from ...errors import UsageError
from ..cloud import CloudProvider
from ..rented import Cloud

__all__ = ["AWS"]

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
    """Machines of Amazon EC2, rented for a pool and ended with it.

    Credentials are found as `aws` and boto3 find them: environment, `~/.aws`, SSO, an instance's role. Each pool has
    a key pair and a security group of its own: ssh from `client_cidr` only, and everything among its members.
    Where a pool asks for nothing in particular, machines have x86_64 processors, no accelerator, and 2 GiB or more.

    Args:
        region: such as "us-east-1".
        zones: availability zones that may be used; (): all. The nodes of a pool are always together in one.
        instance_types: that may be used; (): all that fit.
        ami: the image to boot; None: the current one of `system`; Ubuntu's has NVIDIA's driver or AWS Neuron where the
            machine has such devices, Debian's has neither.
        system: "ubuntu", of `ubuntu_version`, or "debian" (12).
        username: who logs in; None: that of the system ("ubuntu", "admin").
        subnet_id, vpc: where; None: the default VPC, and its subnet in the zone. With a subnet, only its zone is used.
        security_group_id: an existing one to use as it is; it must let ssh in from here and members reach each other.
        instance_profile_arn: the role that the machines have; None: none.
        client_cidr: who may reach ssh, such as "203.0.113.7/32". "auto": the address that this machine has on the
            internet, as https://checkip.amazonaws.com sees it; when that has changed and a machine is replaced, the old
            one is let in no more.
        placement: "auto": a cluster placement group of the pool's own for several nodes with a network fast enough to
            use it (those that have EFA); "cluster": always for several nodes; "none"; or the name of yours.
        efa: "auto": an EFA network interface where the type has it and there are several nodes; True; False.
        disk_gib: size of the root disk, >= 8.
        max_price: USD per hour for one machine at most; spot bids it too. None: no limit.
        exclude_burstable: leave out t2, t3 and t4g, whose processors are theirs only for a while, or cost extra: their
            prices here are those of full load, with the CPU credits that it takes.
        lease_s: seconds without contact after which a machine ends by itself, >= 60.
        tags: of everything that is made.
        profile: of `~/.aws/config`.
        endpoint_url: another server of the same API, for tests.

    Raises:
        UsageError: a field is not legal; the message names it.

    Example:
        >>> AWS(region="eu-central-1", instance_types=["g5.xlarge"]).region
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
                raise UsageError(f"AWS.{name}: {value!r}; it looks like {example!r}")
        for name in ("zones", "instance_types"):
            value = getattr(self, name)
            if isinstance(value, str) or not all(isinstance(item, str) and item for item in value):
                raise UsageError(f"AWS.{name}: {value!r}; it is a list of names")
            object.__setattr__(self, name, tuple(value))
        for zone in self.zones:
            if not zone.startswith(self.region):
                raise UsageError(f"AWS.zones: {zone!r} is not in region={self.region!r}")
        self._check_choices()
        self._check_numbers()
        self._check_cidr()
        self._check_tags()

    def _check_choices(self) -> None:
        if self.system not in ("ubuntu", "debian"):
            raise UsageError(f"AWS.system: {self.system!r}; it is 'ubuntu' or 'debian'")
        if not isinstance(self.placement, str) or not self.placement:
            raise UsageError(f"AWS.placement: {self.placement!r}; it is 'auto', 'cluster', 'none' or a group's name")
        if self.efa not in ("auto", True, False):
            raise UsageError(f"AWS.efa: {self.efa!r}; it is 'auto', True or False")

    def _check_numbers(self) -> None:
        if isinstance(self.disk_gib, bool) or not isinstance(self.disk_gib, int) or not 8 <= self.disk_gib <= 16384:
            raise UsageError(f"AWS.disk_gib: {self.disk_gib!r}; it is a whole number of GiB from 8 to 16384")
        if self.max_price is not None and not is_positive(self.max_price):
            raise UsageError(f"AWS.max_price: {self.max_price!r}; it is a number of USD per hour > 0")
        if not is_positive(self.lease_s) or self.lease_s < 60:
            raise UsageError(f"AWS.lease_s: {self.lease_s!r}; it is a number of seconds >= 60")

    def _check_cidr(self) -> None:
        if self.client_cidr != "auto":
            try:
                ipaddress.IPv4Network(self.client_cidr)
            except ValueError as error:
                raise UsageError(
                    f"AWS.client_cidr: {self.client_cidr!r}; it is 'auto' or looks like '203.0.113.7/32' ({error})"
                ) from None

    def _check_tags(self) -> None:
        for key, value in dict(self.tags).items():
            if not isinstance(key, str) or not isinstance(value, str) or key.startswith(("skyward:", "aws:")):
                raise UsageError(f"AWS.tags: {key!r}: {value!r}; both are text, and skyward: and aws: are reserved")
        object.__setattr__(self, "tags", FrozenMap(self.tags))

    def cloud(self) -> Cloud:
        from .ec2 import Ec2  # boto3: only where machines are looked at or made

        return Ec2(self)

    def fields(self) -> dict[str, Any]:
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        given = {name: getattr(self, name) for name in defaults}
        plain = {name: list(v) if isinstance(v, tuple) else v for name, v in given.items() if v != defaults[name]}
        return {**{k: v for k, v in plain.items() if k != "tags" and v != []}, "tags": dict(self.tags)}
