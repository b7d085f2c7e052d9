"""The Cloud protocol over EC2: instances and their parameters. Network, images and offers have their own modules."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ...errors import ProviderError
from ...values.machine import Offer, PoolSpec
from ..rented import ApiCall, Instance, Request, State
from ..user_data import PREEMPTED_FILE
from .clients import clients
from .failures import NotThere, NotYet, translated
from .images import image_for
from .network import Network
from .offers import offers
from .settings import Ec2Settings

_STATES: dict[str, State] = {
    "pending": "pending",
    "running": "running",
    "stopping": "pending",  # not gone: it can be started again, and its disk is still billed
    "stopped": "pending",
    "shutting-down": "ending",
    "terminated": "gone",
}
# Source: EC2 user guide, "Spot Instance interruption notices": 404 until a notice exists, two minutes before the end.
_NOTICES = f"""\
#!/bin/sh
at=http://169.254.169.254/latest
while sleep 5; do
    token=$(curl -s -m 2 -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 300' "$at/api/token") || continue
    notice=$(curl -s -f -m 2 -H "X-aws-ec2-metadata-token: $token" "$at/meta-data/spot/instance-action") || continue
    printf '%s\\n' "$notice" >{PREEMPTED_FILE}.new
    mv {PREEMPTED_FILE}.new {PREEMPTED_FILE}
done
"""
_SPOT_REASONS = ("Server.SpotInstanceTermination", "Server.SpotInstanceShutdown")


class Ec2:
    """One account in one region; see `Cloud`. Cheap to create: connections and caches are shared."""

    name: ClassVar[str] = "aws"
    credentials: ClassVar[str] = "found as boto3 finds them: environment, ~/.aws, SSO, an instance's role"
    capabilities: ClassVar[frozenset[str]] = frozenset({"spot", "idempotent-create", "console-host-keys"})
    # Source: EC2 pricing, "billed per second, with a minimum of 60 seconds" (Linux).
    minimum_billed_s: ClassVar[float] = 60.0
    # Source: EC2 API, "Eventual consistency" names no bound; a minute is far above every reported delay.
    settle_s: ClassVar[float] = 60.0
    notices: ClassVar[str] = _NOTICES

    def __init__(self, config: Ec2Settings) -> None:
        self._aws = config
        self._clients = clients(config.region, config.profile, config.endpoint_url)

    @property
    def username(self) -> str:
        return self._aws.username or ("admin" if self._aws.system == "debian" else "ubuntu")

    def scope(self) -> str:
        return f"aws:{self._clients.account}:{self._aws.region}"

    def offers(self, spec: PoolSpec) -> list[Offer]:
        return offers(self._clients, self._aws, spec)

    def plan(self, request: Request) -> list[ApiCall]:
        network = Network(self._clients, self._aws)
        run = self._run_parameters(request, network.places(request, is_plan=True))
        return [*network.plan(request), ApiCall(operation="RunInstances", parameters=run)]

    def prepare(self, request: Request) -> None:
        Network(self._clients, self._aws).prepare(request)

    def create(self, request: Request) -> list[Instance]:
        parameters = self._run_parameters(request, Network(self._clients, self._aws).places(request))
        try:
            with translated("RunInstances"):
                answer = self._clients.ec2.run_instances(**parameters)
        except NotThere as error:
            if not _names_ours(error, parameters, self._aws):
                raise
            raise NotYet(str(error), code=error.code) from error
        return [_instance(instance) for instance in answer["Instances"]]

    def describe(self, tags: Mapping[str, str | None]) -> list[Instance]:
        filters: list[Any] = [
            {"Name": "tag-key", "Values": [name]} if value is None else {"Name": f"tag:{name}", "Values": [value]}
            for name, value in tags.items()
        ]
        instances: list[Instance] = []
        with translated("DescribeInstances"):
            for page in self._clients.ec2.get_paginator("describe_instances").paginate(Filters=filters):
                for reservation in page["Reservations"]:
                    instances += [_instance(instance) for instance in reservation["Instances"]]
        return instances

    def terminate(self, ids: Sequence[str]) -> None:
        try:
            with translated("TerminateInstances"):
                self._clients.ec2.terminate_instances(InstanceIds=list(ids))
        except NotThere:  # EC2 rejects the whole request for one unknown id, so retry each id by itself
            if len(ids) > 1:
                for instance_id in ids:
                    self.terminate([instance_id])

    def clean_up(self, tags: Mapping[str, str]) -> list[str]:
        return Network(self._clients, self._aws).clean_up(tags)

    def shared(self) -> list[dict[str, str]]:
        return Network(self._clients, self._aws).found()

    def host_keys(self, instance_id: str) -> tuple[str, ...]:
        try:
            with translated("GetConsoleOutput"):
                answer = self._clients.ec2.get_console_output(InstanceId=instance_id, Latest=True)
        except ProviderError:  # some types have no console output; then the first contact pins the key
            return ()
        return host_keys_in(answer.get("Output", ""))

    def _run_parameters(self, request: Request, places: dict[str, Any]) -> dict[str, Any]:
        aws, offer = self._aws, request.offer
        image = image_for(self._clients, aws, offer)
        named = {**aws.tags, "Name": f"skyward {request.pool}", **request.tags}
        tags = [{"Key": key, "Value": value} for key, value in named.items()]
        kinds = ["instance", "volume", *(["spot-instances-request"] if offer.is_spot else [])]
        parameters: dict[str, Any] = {
            "ClientToken": request.token,
            "ImageId": image.id,
            "InstanceType": offer.instance_type,
            "MinCount": request.least,
            "MaxCount": request.count,
            "UserData": request.user_data,
            "InstanceInitiatedShutdownBehavior": "terminate",  # so that powering off ends the billing
            "MetadataOptions": {"HttpTokens": "required", "HttpEndpoint": "enabled", "HttpPutResponseHopLimit": 1},
            "BlockDeviceMappings": [
                {
                    "DeviceName": image.root_device,
                    "Ebs": {"VolumeSize": aws.disk_gib, "VolumeType": "gp3", "DeleteOnTermination": True},
                },
                # An image may keep its further volumes after termination, and they would be billed: override that.
                *({"DeviceName": device, "Ebs": {"DeleteOnTermination": True}} for device in image.more_devices),
            ],
            "TagSpecifications": [{"ResourceType": kind, "Tags": tags} for kind in kinds],
            **places,
        }
        if aws.instance_profile_arn:
            parameters["IamInstanceProfile"] = {"Arn": aws.instance_profile_arn}
        if offer.is_spot:
            spot: dict[str, Any] = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
            if aws.max_price is not None:
                spot["MaxPrice"] = f"{aws.max_price:g}"
            parameters["InstanceMarketOptions"] = {"MarketType": "spot", "SpotOptions": spot}
        return parameters


def _names_ours(error: NotThere, parameters: Mapping[str, Any], aws: Ec2Settings) -> bool:
    """Return whether EC2 misses a resource that `prepare` has just created, and not one that the user named."""
    made = [parameters["KeyName"]]
    if not aws.security_group_id:
        made += parameters["NetworkInterfaces"][0]["Groups"]
    if aws.placement in ("auto", "cluster"):
        made += filter(None, [parameters["Placement"].get("GroupName")])
    return any(name in str(error) for name in made)


def _instance(description: Mapping[str, Any]) -> Instance:
    reason = description.get("StateReason", {})
    return Instance(
        id=description["InstanceId"],
        state=_STATES[description["State"]["Name"]],
        tags={tag["Key"]: tag["Value"] for tag in description.get("Tags", [])},
        private_ip=description.get("PrivateIpAddress") or "",
        public_ip=description.get("PublicIpAddress") or "",
        instance_type=description["InstanceType"],
        zone=description.get("Placement", {}).get("AvailabilityZone", ""),
        is_spot=description.get("InstanceLifecycle") == "spot",
        launched_at=description["LaunchTime"].timestamp(),
        reason=reason.get("Message", ""),
        is_preempted=reason.get("Code") in _SPOT_REASONS,
        # Source: EC2 API, "StateReason": Client.* blames the account (its keys, its limits) or a request of its own.
        is_refused=str(reason.get("Code", "")).startswith("Client."),
    )


def host_keys_in(output: str) -> tuple[str, ...]:
    """Extract the host keys that cloud-init prints on the console at first boot.

    Source: cloud-init, module "keys to console": between BEGIN and END SSH HOST KEY KEYS.
    """
    try:  # botocore decodes the answer, but a proxy or a test server may send it without base64
        text = base64.b64decode(output, validate=True).decode("utf-8", "replace") if " " not in output else output
    except ValueError:
        text = output
    _, begins, rest = text.partition("-----BEGIN SSH HOST KEY KEYS-----")
    keys, ends, _ = rest.partition("-----END SSH HOST KEY KEYS-----")
    if not (begins and ends):
        return ()
    return tuple(" ".join(line.split()[:2]) for line in keys.splitlines() if line.startswith(("ssh-", "ecdsa-")))
