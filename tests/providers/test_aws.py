"""AWS against moto's EC2: the requests, the created resources, and their removal."""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError

import skyward
from skyward import accelerators
from skyward.errors import AuthFailed, NoCapacity, OutcomeUnknown, ProviderError, QuotaExceeded, Throttled, UsageError
from skyward.events import Emit
from skyward.providers.any_of import AnyOf, FullOffers, SourceEntry
from skyward.providers.aws import AWS
from skyward.providers.aws import prices as aws_prices
from skyward.providers.aws import types as aws_types
from skyward.providers.aws.clients import clients
from skyward.providers.aws.ec2 import host_keys_in
from skyward.providers.clock import Clock
from skyward.providers.rented import JOURNAL_TAG, Host, Request
from skyward.state.journal import journals
from skyward.testing.provider_suite import ProviderSuite
from skyward.testing.virtual_clock import FastClock
from skyward.values.machine import Machine, PoolSpec
from skyward.values.topology import Peer
from tests.providers.moto_server import ec2_server

AMI = "ami-785db401"


class MotoAWS(AWS):
    """AWS whose machines are moto's and have no inside: bringing them up is only simulated."""

    @property
    def clock(self) -> Clock:
        return FastClock()

    def bring_up(self, hosts: list[Host], spec: PoolSpec, pool: str, nodes: list[int], emit: Emit) -> list[Machine]:
        assert all(os.path.exists(host.key_file) and host.username == "ubuntu" for host in hosts)
        return [
            Machine(
                node=host.node,
                socket_path="",
                folder="",
                pid=0,
                peer=Peer(node=host.node, private_ip=host.instance.private_ip),
                slots=spec.concurrency,
                lease_s=host.lease_s,
            )
            for host in hosts
        ]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with ec2_server() as url:
        yield url


@pytest.fixture(autouse=True)
def folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def provider(server: str) -> MotoAWS:
    return MotoAWS(endpoint_url=server, ami=AMI, client_cidr="192.0.2.1/32")


@pytest.fixture
def ec2(server: str) -> Iterator[Any]:
    client = boto3.client("ec2", region_name="us-east-1", endpoint_url=server)
    yield client
    client.close()


class TestAWS(ProviderSuite):
    pass


def test_a_region_without_machines_is_left_for_the_next(server: str, provider: MotoAWS) -> None:
    provider = replace(provider, instance_types=("m5.large",))
    far = replace(provider, region="eu-west-1")
    source = AnyOf([SourceEntry(provider=far), SourceEntry(provider=provider)], "first", FullOffers())
    spec = PoolSpec(nodes=2, vcpus=2, allocation="on-demand")
    offers = source.offers(spec)
    assert [offer.region for offer in offers] == sorted(offer.region for offer in offers)
    for _ in offers:
        fails_once(far, "RunInstances", "InsufficientInstanceCapacity")
    machines = source.launch(spec, offers, "mine", [0, 1], lambda event: None)
    assert {machine.offer.region for machine in machines if machine.offer is not None} == {"us-east-1"}
    for one in (far, provider):
        listed = one.cloud().describe({JOURNAL_TAG: None})
        assert len([instance for instance in listed if instance.is_billed]) == (2 if one is provider else 0)
    source.terminate(machines)
    assert source.settle("mine")
    assert journals() == []
    assert far.cloud().shared() == provider.cloud().shared() == []


def launched(provider: MotoAWS, spec: PoolSpec) -> list[Machine]:
    return provider.launch(spec, provider.offers(spec), "mine", list(range(spec.nodes)), lambda event: None)


def requested(provider: MotoAWS, spec: PoolSpec) -> Request:
    """Return the requests that a launch would send, for a pool in a journal called abc."""
    tags = {"skyward:journal": "abc", "skyward:attempt": "abc-0"}
    key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJd8DvYTmqq8zBqZMEpvYQAzDeC8Fs9e7x2bDYNqyLWP"
    return Request(
        pool="mine",
        token="abc-0",
        offer=provider.offers(spec)[0],
        count=1,
        least=1,
        lease_s=600.0,
        tags=tags,
        public_key=key,
    )


def fails_once(provider: MotoAWS, operation: str, code: str) -> None:
    """Let the next call of this operation fail with that error. The error names the resources of the call."""
    api = clients(provider.region, provider.profile, provider.endpoint_url)
    event = f"before-call.ec2.{operation}"

    def fail(params: dict[str, Any], **_: Any) -> None:
        api.ec2.meta.events.unregister(event, fail)
        answer: Any = {"Error": {"Code": code, "Message": f"of {params['body']}"}, "ResponseMetadata": {}}
        raise ClientError(answer, operation)

    api.ec2.meta.events.register(event, fail)


def unlike(sent: Any, planned: Any, at: str = "") -> list[str]:
    """Return where the sent request differs from the planned. "<what>" stands for a value unknown to a plan."""
    if isinstance(sent, dict) and isinstance(planned, dict) and set(sent) == set(planned):
        return [there for key in sent for there in unlike(sent[key], planned[key], f"{at}.{key}")]
    if isinstance(sent, list) and isinstance(planned, list) and len(sent) == len(planned):
        return [there for n in range(len(sent)) for there in unlike(sent[n], planned[n], f"{at}.{n}")]
    if isinstance(planned, bytes):
        return unlike(sent.decode(), planned.decode(), at)
    if sent == planned:
        return []
    pattern = "[^<>]+".join(re.escape(part) for part in re.split("<[a-z ]+>", str(planned)))
    is_filled_in = "<" in str(planned) and re.fullmatch(pattern, str(sent))
    return [] if is_filled_in else [f"{at}: {sent!r}, planned: {planned!r}"]


class TestWhatIsMade:
    def test_machines_end_when_they_power_off_and_have_no_loose_ends(self, provider: MotoAWS, ec2: Any) -> None:
        machines = launched(provider, PoolSpec(nodes=2, allocation="on-demand"))
        ids = [machine.handle.instance for machine in machines]
        for found in ec2.describe_instances(InstanceIds=ids)["Reservations"][0]["Instances"]:
            assert found["MetadataOptions"]["HttpTokens"] == "required"
            assert all(disk["Ebs"]["DeleteOnTermination"] for disk in found["BlockDeviceMappings"])
            tags = {tag["Key"]: tag["Value"] for tag in found["Tags"]}
            assert tags["skyward:pool"] == "mine"
            assert tags["skyward:lease-s"] == "600"
            assert {"skyward:journal", "skyward:owner", "skyward:attempt", "Name"} <= set(tags)
            attribute = ec2.describe_instance_attribute(
                InstanceId=found["InstanceId"], Attribute="instanceInitiatedShutdownBehavior"
            )
            assert attribute["InstanceInitiatedShutdownBehavior"]["Value"] == "terminate"
        provider.terminate(machines)

    def test_ssh_is_open_to_the_client_only_and_all_ports_among_members(self, provider: MotoAWS, ec2: Any) -> None:
        machines = launched(provider, PoolSpec(nodes=2, allocation="on-demand"))
        (journal,) = journals("mine")
        name = f"skyward-{journal.id}"
        filters = [{"Name": "group-name", "Values": [name]}]
        (group,) = ec2.describe_security_groups(Filters=filters)["SecurityGroups"]
        ssh, members = sorted(group["IpPermissions"], key=lambda rule: rule["IpProtocol"], reverse=True)
        assert [r["CidrIp"] for r in ssh["IpRanges"]] == ["192.0.2.1/32"]
        assert (ssh["FromPort"], ssh["ToPort"], ssh.get("UserIdGroupPairs", [])) == (22, 22, [])
        assert [pair["GroupId"] for pair in members["UserIdGroupPairs"]] == [group["GroupId"]]
        assert members["IpRanges"] == []
        assert [key["KeyName"] for key in ec2.describe_key_pairs()["KeyPairs"]] == [name]
        provider.terminate(machines)
        assert ec2.describe_security_groups(Filters=filters)["SecurityGroups"] == []
        assert ec2.describe_key_pairs()["KeyPairs"] == []

    def test_spot_is_one_time_and_ends_when_it_is_reclaimed(self, provider: MotoAWS, ec2: Any) -> None:
        spec = PoolSpec(allocation="spot")
        offer = provider.offers(spec)[0]
        run = provider.plan(spec, offer, "mine")[-1]
        assert run.operation == "RunInstances"
        assert run.parameters["InstanceMarketOptions"] == {
            "MarketType": "spot",
            "SpotOptions": {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"},
        }
        machines = launched(provider, spec)
        (journal,) = journals("mine")
        assert all(found.is_spot for found in provider.cloud().describe({"skyward:journal": journal.id}))
        provider.terminate(machines)

    def test_the_sent_requests_follow_the_plan(self, provider: MotoAWS, monkeypatch: pytest.MonkeyPatch) -> None:
        spec = PoolSpec(nodes=2, allocation="on-demand")
        planned = provider.plan(spec, provider.offers(spec)[0], "mine")
        sent: list[tuple[str, Any]] = []
        api = clients(provider.region, provider.profile, provider.endpoint_url)
        api.ec2.meta.events.register_first(
            "before-parameter-build.ec2", lambda params, model, **_: sent.append((model.name, dict(params)))
        )
        machines = launched(provider, spec)
        provider.terminate(machines)
        made = [(name, params) for name, params in sent if not name.startswith(("Describe", "Terminate", "Delete"))]
        assert [name for name, _ in made if name != "GetConsoleOutput"] == [call.operation for call in planned]
        for (_, params), call in zip(made, planned, strict=False):
            if "UserData" in params:
                params["UserData"] = base64.b64decode(params["UserData"]).decode()
            assert unlike(params, call.parameters) == []

    def test_user_data_has_no_secret_and_starts_with_the_watchdog(self, provider: MotoAWS) -> None:
        spec = PoolSpec(allocation="on-demand")
        script = provider.plan(spec, provider.offers(spec)[0], "mine")[-1].parameters["UserData"]
        assert script.splitlines()[0] == "#!/bin/sh"
        assert "/run/skyward/lease" in script
        assert "169.254.169.254" not in script  # EC2 announces the end of spot machines only
        assert "AWS_" not in script
        assert "PRIVATE" not in script

    def test_several_nodes_with_a_fast_network_share_a_placement_group(self, server: str) -> None:
        provider = MotoAWS(
            endpoint_url=server, ami=AMI, client_cidr="192.0.2.1/32", instance_types=["g4dn.12xlarge", "g4dn.xlarge"]
        )
        spec = PoolSpec(nodes=2, allocation="on-demand", accelerator=accelerators.T4(count=4))
        calls = {call.operation: call.parameters for call in provider.plan(spec, provider.offers(spec)[0], "mine")}
        assert calls["CreatePlacementGroup"]["Strategy"] == "cluster"
        assert calls["RunInstances"]["NetworkInterfaces"][0]["InterfaceType"] == "efa"
        assert "AuthorizeSecurityGroupEgress" in calls
        one = replace(spec, nodes=1)
        calls = {call.operation: call.parameters for call in provider.plan(one, provider.offers(one)[0], "mine")}
        assert "CreatePlacementGroup" not in calls
        assert "InterfaceType" not in calls["RunInstances"]["NetworkInterfaces"][0]

    def test_a_later_offer_with_a_fast_network_has_its_placement_group_removed_too(self, server: str, ec2: Any) -> None:
        types = ["m5.large", "g4dn.12xlarge"]
        provider = MotoAWS(endpoint_url=server, ami=AMI, client_cidr="192.0.2.1/32", instance_types=types)
        spec = PoolSpec(nodes=2, allocation="on-demand")
        slow, fast = (next(o for o in provider.offers(spec) if o.instance_type == name) for name in types)
        groups: list[str] = []  # moto knows no placement groups

        def answer(model: Any, params: dict[str, Any], **_: Any) -> tuple[Any, dict[str, Any]]:
            name = params["body"]["GroupName"]
            groups.append(name) if model.name.startswith("Create") else groups.remove(name)
            return SimpleNamespace(status_code=200), {}

        events: Any = clients(provider.region, provider.profile, provider.endpoint_url).ec2.meta.events
        for operation in ("CreatePlacementGroup", "DeletePlacementGroup"):
            events.register_first(f"before-call.ec2.{operation}", answer)
        request = requested(provider, spec)
        provider.cloud().prepare(replace(request, nodes=2, offer=slow))
        assert groups == []
        provider.cloud().prepare(replace(request, nodes=2, offer=fast))
        assert groups == ["skyward-abc"]
        assert provider.cloud().clean_up(request.tags) == []
        assert groups == []
        for operation in ("CreatePlacementGroup", "DeletePlacementGroup"):
            events.unregister(f"before-call.ec2.{operation}", answer)
        assert ec2.describe_key_pairs()["KeyPairs"] == []

    @pytest.mark.parametrize(
        ("operation", "code"),
        [
            ("AuthorizeSecurityGroupIngress", "InvalidGroup.NotFound"),
            ("RunInstances", "InvalidKeyPair.NotFound"),
            ("RunInstances", "InvalidGroup.NotFound"),
        ],
    )
    def test_resources_made_a_moment_ago_may_be_unknown_yet(
        self, provider: MotoAWS, ec2: Any, operation: str, code: str
    ) -> None:
        fails_once(provider, operation, code)
        machines = launched(provider, PoolSpec(allocation="on-demand"))
        provider.terminate(machines)
        assert ec2.describe_key_pairs()["KeyPairs"] == []

    def test_a_group_whose_create_call_lost_its_answer_is_found_by_its_name(self, provider: MotoAWS, ec2: Any) -> None:
        spec = PoolSpec(allocation="on-demand")
        group: list[str] = []

        def make_it_first(params: dict[str, Any], **_: Any) -> None:
            if not group:  # as a try that has made it without its tags being listed yet
                group.append(ec2.create_security_group(**{**params, "TagSpecifications": []})["GroupId"])

        api = clients(provider.region, provider.profile, provider.endpoint_url)
        event = "provide-client-params.ec2.CreateSecurityGroup"
        api.ec2.meta.events.register_first(event, make_it_first)
        try:
            request = requested(provider, spec)
            provider.cloud().prepare(request)
            (found,) = ec2.describe_security_groups(GroupIds=group)["SecurityGroups"]
            assert len(found["IpPermissions"]) == 2
        finally:
            api.ec2.meta.events.unregister(event, make_it_first)
            ec2.delete_security_group(GroupId=group[0])
            provider.cloud().clean_up(request.tags)

    def test_a_client_with_a_new_address_is_let_in_and_the_old_address_is_not(
        self, provider: MotoAWS, ec2: Any
    ) -> None:
        request = requested(provider, PoolSpec(allocation="on-demand"))
        for address in ("192.0.2.1/32", "198.51.100.7/32"):
            provider = replace(provider, client_cidr=address)
            provider.cloud().prepare(request)
            filters = [{"Name": "group-name", "Values": ["skyward-abc"]}]
            (group,) = ec2.describe_security_groups(Filters=filters)["SecurityGroups"]
            ssh = [rule for rule in group["IpPermissions"] if rule["IpProtocol"] == "tcp"]
            assert [r["CidrIp"] for rule in ssh for r in rule["IpRanges"]] == [address]
        assert provider.cloud().clean_up(request.tags) == []

    def test_further_disks_of_an_image_go_with_the_machine(self, provider: MotoAWS, ec2: Any) -> None:
        made = ec2.run_instances(ImageId=AMI, InstanceType="m5.large", MinCount=1, MaxCount=1)
        (instance,) = made["Instances"]
        image = ec2.create_image(InstanceId=instance["InstanceId"], Name="mine")["ImageId"]
        ec2.terminate_instances(InstanceIds=[instance["InstanceId"]])
        disks = [{"DeviceName": "/dev/sda1", "Ebs": {}}, {"DeviceName": "/dev/sdf", "Ebs": {"VolumeSize": 500}}]
        answer = {"Images": [{"ImageId": image, "RootDeviceName": "/dev/sda1", "BlockDeviceMappings": disks}]}
        provider = replace(provider, ami=image)
        api = clients(provider.region, provider.profile, provider.endpoint_url)
        event = "after-call.ec2.DescribeImages"

        def say(parsed: dict[str, Any], **_: Any) -> None:
            parsed.update(answer)

        api.ec2.meta.events.register(event, say)
        try:
            spec = PoolSpec(allocation="on-demand")
            run = provider.plan(spec, provider.offers(spec)[0], "mine")[-1].parameters
        finally:
            api.ec2.meta.events.unregister(event, say)
        named = {disk["DeviceName"]: disk["Ebs"] for disk in run["BlockDeviceMappings"]}
        assert named["/dev/sdf"] == {"DeleteOnTermination": True}
        assert named["/dev/sda1"]["DeleteOnTermination"]


class TestOffers:
    def test_a_subnet_has_one_zone(self, server: str, ec2: Any) -> None:
        subnets = ec2.describe_subnets()["Subnets"]
        subnet = next(s for s in subnets if s["AvailabilityZone"] == "us-east-1c")["SubnetId"]
        provider = AWS(endpoint_url=server, ami=AMI, subnet_id=subnet)
        assert {offer.zone for offer in provider.offers(PoolSpec())} == {"us-east-1c"}
        with pytest.raises(UsageError, match="subnet_id=.* in us-east-1c, which is not in zones="):
            replace(provider, zones=["us-east-1a"]).offers(PoolSpec())
        with pytest.raises(UsageError, match="subnet_id='subnet-0123': does not exist"):
            replace(provider, subnet_id="subnet-0123").offers(PoolSpec())

    def test_accelerators_agree_with_our_tables(self, provider: MotoAWS) -> None:
        offers = provider.offers(PoolSpec(accelerator=accelerators.A10G()))
        assert offers[0].accelerator == accelerators.A10G()
        assert {o.instance_type.partition(".")[0] for o in offers} == {"g5"}
        assert provider.offers(PoolSpec(accelerator=accelerators.A100(count=8, memory="40GB")))
        assert provider.offers(PoolSpec(accelerator=accelerators.H100(count=8, form_factor="SXM")))

    def test_a_number_of_accelerators_that_no_machine_has_is_refused_with_the_existing_ones(
        self, provider: MotoAWS
    ) -> None:
        with pytest.raises(NoCapacity, match=r"exactly A100 80GB; request .*8x A100 40GB \(p4d.24xlarge\)"):
            provider.offers(PoolSpec(accelerator=accelerators.A100()))

    def test_a_price_names_its_source(self, provider: MotoAWS) -> None:
        spot, on_demand = (provider.offers(PoolSpec(allocation=kind))[0] for kind in ("spot", "on-demand"))
        assert spot.price_source == "EC2 spot price history, now"
        assert "bundled with skyward" in on_demand.price_source
        assert "2025-07" in on_demand.price_source

    def test_in_other_regions_the_bundled_table_is_an_upper_estimate(self, server: str) -> None:
        here, there = (
            AWS(region=region, endpoint_url=server, ami=AMI, instance_types=["m5.large"]).offers(
                PoolSpec(allocation="on-demand")
            )[0]
            for region in ("us-east-1", "sa-east-1")
        )
        assert there.price_usd_per_hour == pytest.approx(1.6 * here.price_usd_per_hour)
        assert "x 1.6 for sa-east-1" in there.price_source

    def test_burstable_types_are_priced_at_full_load(self, server: str) -> None:
        types = ["t3.micro", "t4g.small", "t2.medium", "m5.large"]
        provider = AWS(endpoint_url=server, ami=AMI, instance_types=types, zones=["us-east-1a"])
        offers = {o.instance_type: o for o in provider.offers(PoolSpec(allocation="on-demand"))}
        assert offers["t3.micro"].price_usd_per_hour == pytest.approx(0.0104 + 2 * 0.9 * 0.05)
        assert offers["t4g.small"].price_usd_per_hour == pytest.approx(0.0168 + 2 * 0.8 * 0.04)
        assert "and 0.09 for the CPU credits" in offers["t3.micro"].price_source
        assert "credits" not in offers["m5.large"].price_source
        assert next(iter(offers)) == "t4g.small"  # the order is by the whole price

    def test_a_device_whose_driver_no_image_has_is_refused_before_it_is_rented(self, server: str) -> None:
        provider = AWS(endpoint_url=server)
        assert provider.offers(PoolSpec(accelerator=accelerators.T4()))
        with pytest.raises(UsageError, match=r"AWS.ami=None: .*'ubuntu'.* driver for 8x V100"):
            provider.offers(PoolSpec(accelerator=accelerators.V100(count=8, memory="32GB")))
        debian = replace(provider, system="debian")
        with pytest.raises(UsageError, match=r"AWS.ami=None: .*'debian'.* driver for T4"):
            debian.offers(PoolSpec(accelerator=accelerators.T4()))
        assert replace(debian, ami=AMI).offers(PoolSpec(accelerator=accelerators.T4()))

    def test_machines_that_cannot_boot_an_image_or_are_unavailable_are_no_offers(self, server: str) -> None:
        def facts(name: str, **more: Any) -> dict[str, Any]:
            return {
                "InstanceType": name,
                "VCpuInfo": {"DefaultVCpus": 2},
                "MemoryInfo": {"SizeInMiB": 8192},
                "ProcessorInfo": {"SupportedArchitectures": ["x86_64"]},
                **more,
            }

        found = [
            facts("m5.large", SupportedUsageClasses=["on-demand", "spot"]),
            facts("p5e.48xlarge", SupportedUsageClasses=["capacity-block"]),
            facts("m1.large", SupportedVirtualizationTypes=["paravirtual"]),
            facts("m5.metal", BareMetal=True),
        ]
        zones = [{"InstanceType": one["InstanceType"], "Location": "us-east-1a"} for one in found]
        pages = {
            "describe_instance_types": [{"InstanceTypes": found}],
            "describe_instance_type_offerings": [{"InstanceTypeOfferings": zones}],
        }
        ec2 = SimpleNamespace(get_paginator=lambda name: SimpleNamespace(paginate=lambda **_: pages[name]))
        kept = aws_types._fetched(SimpleNamespace(ec2=ec2))  # type: ignore[arg-type]
        assert {name: one["has_on_demand"] for name, one in kept.items()} == {"m5.large": True, "p5e.48xlarge": False}

    def test_prices_are_read_from_the_pricing_apis_documents(self) -> None:
        document = {
            "product": {"attributes": {"instanceType": "m5.large"}},
            "terms": {
                "OnDemand": {"X": {"priceDimensions": {"Y": {"unit": "Hrs", "pricePerUnit": {"USD": "0.0960000000"}}}}}
            },
        }
        assert aws_prices._read([json.dumps(document)]) == {"m5.large": 0.096}

    def test_only_named_types_and_zones_are_offered(self, server: str) -> None:
        provider = AWS(endpoint_url=server, ami=AMI, instance_types=["m5.large"], zones=["us-east-1b"])
        offers = provider.offers(PoolSpec())
        assert {(o.instance_type, o.zone) for o in offers} == {("m5.large", "us-east-1b")}
        with pytest.raises(UsageError, match=r"m5.huge.*not offered in us-east-1"):
            AWS(endpoint_url=server, ami=AMI, instance_types=["m5.huge"]).offers(PoolSpec())


class TestFailures:
    @pytest.mark.parametrize(
        ("code", "status", "error"),
        [
            ("InsufficientInstanceCapacity", 500, NoCapacity),
            ("VcpuLimitExceeded", 400, QuotaExceeded),
            ("RequestLimitExceeded", 503, Throttled),
            ("IncorrectInstanceState", 400, Throttled),
            ("UnauthorizedOperation", 403, AuthFailed),
            ("ExpiredToken", 403, AuthFailed),
            ("InvalidSignatureException", 400, AuthFailed),
            ("InsufficientFreeAddressesInSubnet", 400, NoCapacity),
            ("InternalError", 500, OutcomeUnknown),
            ("WhoKnows", 502, OutcomeUnknown),
            ("InvalidParameterValue", 400, ProviderError),
        ],
    )
    def test_aws_errors_are_classified(self, code: str, status: int, error: type[Exception]) -> None:
        from skyward.providers.aws.failures import translated

        answer: Any = {"Error": {"Code": code, "Message": "why"}, "ResponseMetadata": {"HTTPStatusCode": status}}
        with pytest.raises(error, match=f"RunInstances: {code}: why") as caught, translated("RunInstances"):
            raise ClientError(answer, "RunInstances")
        assert type(caught.value) is error

    @pytest.mark.parametrize(
        ("code", "advice"),
        [
            ("UnauthorizedOperation", r"why\. These credentials may not make this call; .* listed in guides/aws.md"),
            ("ExpiredToken", r"have expired; renew them"),
            ("RequestExpired", r"clock or the secret key is wrong"),
            ("AuthFailure", r"the region is not enabled"),
        ],
    )
    def test_refused_credentials_come_with_advice(self, code: str, advice: str) -> None:
        from skyward.providers.aws.failures import translated

        why = "why. Encoded authorization failure message: " + 900 * "x"
        answer: Any = {"Error": {"Code": code, "Message": why}, "ResponseMetadata": {"HTTPStatusCode": 403}}
        with pytest.raises(AuthFailed, match=advice) as caught, translated("RunInstances"):
            raise ClientError(answer, "RunInstances")
        assert "xxx" not in str(caught.value)

    def test_renewed_credentials_are_found_by_a_running_program(
        self, provider: MotoAWS, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        api = clients(provider.region, provider.profile, provider.endpoint_url)

        def key() -> str:
            return str(api.ec2._get_credentials().access_key)  # type: ignore[attr-defined]

        expired = {"Error": {"Code": "ExpiredToken", "Message": "it was for an hour"}}
        assert key() == "test"
        events: Any = api.ec2.meta.events
        events.register_first("before-call.ec2", lambda **_: (SimpleNamespace(status_code=400), expired))
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "renewed")
        with pytest.raises(AuthFailed, match="renew them"):
            provider.cloud().describe({})
        assert key() == "renewed"
        provider.cloud().describe({})

    def test_the_guide_names_every_call_that_a_policy_must_allow(self) -> None:
        package = Path(aws_prices.__file__).parent
        text = " ".join(path.read_text() for path in package.glob("*.py"))
        called = set(re.findall(r'(?:translated|_make|_removed)\("([A-Z]\w+)"', text)) - {"GetCallerIdentity"}
        assert len(called) > 20
        guide = (Path(skyward.__file__).parents[1] / "guides" / "aws.md").read_text()
        assert [call for call in called if call not in guide] == []

    def test_no_server_is_an_unknown_outcome_and_no_credentials_an_auth_failure(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        with pytest.raises(OutcomeUnknown, match="is a region"):
            AWS(endpoint_url="http://127.0.0.1:9", ami=AMI).cloud().scope()
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        with pytest.raises(AuthFailed, match="credentials"):
            AWS(endpoint_url="http://127.0.0.1:10", ami=AMI).cloud().scope()

    def test_an_unknown_outcome_says_that_a_retry_may_help(self) -> None:
        from botocore.exceptions import ReadTimeoutError

        from skyward.providers.aws.failures import translated

        answer: Any = {"Error": {"Code": "InternalError", "Message": "why."}}
        for failure in (ClientError(answer, "RunInstances"), ReadTimeoutError(endpoint_url="https://nowhere")):
            match = "; retry, then run `skyward gc`"
            with pytest.raises(OutcomeUnknown, match=match) as caught, translated("RunInstances"):
                raise failure
            assert caught.value.retryable

    def test_an_error_page_of_a_proxy_is_an_unknown_outcome(self) -> None:
        from botocore.parsers import create_parser

        from skyward.providers.aws.failures import translated

        page = {"status_code": 502, "headers": {}, "body": b"<!doctype html><title>Sign in, please</title>"}
        shape: Any = None  # it does not come so far as to need one
        said = r"RunInstances: .*not from AWS: .*Sign in.*proxy"
        with pytest.raises(OutcomeUnknown, match=said), translated("RunInstances"):
            create_parser("ec2").parse(page, shape)

    def test_a_missing_image_is_an_error_of_the_user(self, server: str) -> None:
        provider = AWS(endpoint_url=server, client_cidr="192.0.2.1/32")
        spec = PoolSpec(allocation="on-demand")
        with pytest.raises(ProviderError, match=r"canonical/ubuntu/server/24.04.*name one: AWS\(ami="):
            provider.plan(spec, provider.offers(spec)[0], "mine")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("region", "moon"),
        ("ami", "my-image"),
        ("zones", "us-east-1a"),
        ("zones", ["eu-west-1a"]),
        ("system", "windows"),
        ("ubuntu_version", "noble"),
        ("username", "root; rm"),
        ("subnet_id", "net"),
        ("vpc", "net"),
        ("security_group_id", "group"),
        ("instance_profile_arn", "me"),
        ("client_cidr", "everywhere"),
        ("placement", ""),
        ("efa", "always"),
        ("disk_gib", 1),
        ("max_price", -1.0),
        ("lease_s", 5.0),
        ("tags", {"skyward:pool": "x"}),
        ("endpoint_url", "ftp://x"),
    ],
)
def test_each_field_is_checked_and_named(field: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"AWS.{field}"):
        AWS(**{field: value})


def test_host_keys_are_read_from_the_console() -> None:
    console = (
        "boot\n-----BEGIN SSH HOST KEY KEYS-----\nssh-ed25519 AAAAC3 root@ip\necdsa-sha2-nistp256 AAAAE2 root@ip\n"
        "-----END SSH HOST KEY KEYS-----\nlogin:"
    )
    assert host_keys_in(console) == ("ssh-ed25519 AAAAC3", "ecdsa-sha2-nistp256 AAAAE2")
    assert host_keys_in(console[:60]) == ()
    assert host_keys_in("") == ()


def test_a_reclaimed_machine_is_told_apart_from_one_that_is_cut_off(provider: MotoAWS, ec2: Any) -> None:
    machines = launched(provider, PoolSpec(nodes=2, allocation="on-demand"))
    assert provider.why_gone(machines[0]) is None
    ec2.terminate_instances(InstanceIds=[machines[0].handle.instance])
    gone = provider.why_gone(machines[0])
    assert gone is not None
    assert "User initiated" in gone.reason
    assert not gone.is_preempted
    assert provider.why_gone(machines[1]) is None
    provider.terminate(machines)
