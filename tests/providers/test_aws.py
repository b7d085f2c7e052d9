"""AWS against moto's EC2: what is asked for, what is made, and that nothing of it stays."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import boto3
import pytest

from skyward import accelerators
from skyward.errors import AuthFailed, NoCapacity, OutcomeUnknown, ProviderError, QuotaExceeded, Throttled, UsageError
from skyward.events import Emit
from skyward.journal import journals
from skyward.machine import Machine, PoolSpec
from skyward.providers.aws import AWS
from skyward.providers.aws import prices as aws_prices
from skyward.providers.aws.clients import clients
from skyward.providers.aws.ec2 import _host_keys
from skyward.providers.clock import Clock
from skyward.providers.rented import Host
from skyward.testing.provider_suite import ProviderSuite
from skyward.testing.virtual_clock import FastClock
from skyward.topology import Peer
from tests.providers.moto_server import ec2_server

AMI = "ami-785db401"


class MotoAWS(AWS):
    """Machines of moto have nothing inside: what would be brought up is said to be up."""

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


def launched(provider: MotoAWS, spec: PoolSpec) -> list[Machine]:
    return provider.launch(spec, provider.offers(spec), "mine", list(range(spec.nodes)), lambda event: None)


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

    def test_ssh_is_open_to_the_client_only_and_everything_among_members(self, provider: MotoAWS, ec2: Any) -> None:
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

    def test_spot_is_one_time_and_ends_when_it_is_taken_back(self, provider: MotoAWS, ec2: Any) -> None:
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

    def test_the_plan_is_what_is_sent(self, provider: MotoAWS, monkeypatch: pytest.MonkeyPatch) -> None:
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
            assert set(params) == set(call.parameters)

    def test_user_data_has_no_secret_and_starts_with_the_watchdog(self, provider: MotoAWS) -> None:
        spec = PoolSpec(allocation="on-demand")
        script = provider.plan(spec, provider.offers(spec)[0], "mine")[-1].parameters["UserData"]
        assert script.splitlines()[0] == "#!/bin/sh"
        assert "/run/skyward/lease" in script
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


class TestOffers:
    def test_accelerators_are_those_of_our_tables(self, provider: MotoAWS) -> None:
        offers = provider.offers(PoolSpec(accelerator=accelerators.A10G()))
        assert offers[0].accelerator == accelerators.A10G()
        assert {o.instance_type.partition(".")[0] for o in offers} == {"g5"}
        assert provider.offers(PoolSpec(accelerator=accelerators.A100(count=8, memory="40GB")))
        assert provider.offers(PoolSpec(accelerator=accelerators.H100(count=8, form_factor="SXM")))

    def test_a_number_of_accelerators_that_no_machine_has_says_which_there_are(self, provider: MotoAWS) -> None:
        with pytest.raises(NoCapacity, match=r"just A100 80GB; there is .*8x A100 40GB \(p4d.24xlarge\)"):
            provider.offers(PoolSpec(accelerator=accelerators.A100()))

    def test_a_price_says_where_it_is_from(self, provider: MotoAWS) -> None:
        spot, on_demand = (provider.offers(PoolSpec(allocation=kind))[0] for kind in ("spot", "on-demand"))
        assert spot.price_source == "EC2 spot price history, now"
        assert "bundled with skyward" in on_demand.price_source
        assert "2025-07" in on_demand.price_source

    def test_elsewhere_the_bundled_table_is_an_upper_estimate(self, server: str) -> None:
        here, there = (
            AWS(region=region, endpoint_url=server, ami=AMI, instance_types=["m5.large"]).offers(
                PoolSpec(allocation="on-demand")
            )[0]
            for region in ("us-east-1", "sa-east-1")
        )
        assert there.price_usd_per_hour == pytest.approx(1.6 * here.price_usd_per_hour)
        assert "x 1.6 for sa-east-1" in there.price_source

    def test_prices_are_read_from_the_pricing_apis_documents(self) -> None:
        document = {
            "product": {"attributes": {"instanceType": "m5.large"}},
            "terms": {
                "OnDemand": {"X": {"priceDimensions": {"Y": {"unit": "Hrs", "pricePerUnit": {"USD": "0.0960000000"}}}}}
            },
        }
        assert aws_prices._read([json.dumps(document)]) == {"m5.large": 0.096}

    def test_named_types_and_zones_only(self, server: str) -> None:
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
            ("InternalError", 500, OutcomeUnknown),
            ("WhoKnows", 502, OutcomeUnknown),
            ("InvalidParameterValue", 400, ProviderError),
        ],
    )
    def test_aws_errors_are_told_by_class(self, code: str, status: int, error: type[Exception]) -> None:
        from botocore.exceptions import ClientError

        from skyward.providers.aws.failures import translated

        answer: Any = {"Error": {"Code": code, "Message": "why"}, "ResponseMetadata": {"HTTPStatusCode": status}}
        with pytest.raises(error, match=f"RunInstances: {code}: why") as caught, translated("RunInstances"):
            raise ClientError(answer, "RunInstances")
        assert type(caught.value) is error

    def test_no_server_is_an_unknown_outcome_and_no_credentials_an_auth_failure(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        with pytest.raises(OutcomeUnknown):
            AWS(endpoint_url="http://127.0.0.1:9", ami=AMI).cloud().scope()
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        with pytest.raises(AuthFailed, match="credentials"):
            AWS(endpoint_url="http://127.0.0.1:10", ami=AMI).cloud().scope()

    def test_an_image_that_is_not_there_is_asked_of_the_user(self, server: str) -> None:
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
    assert _host_keys(console) == ("ssh-ed25519 AAAAC3", "ecdsa-sha2-nistp256 AAAAE2")
    assert _host_keys(console[:60]) == ()
    assert _host_keys("") == ()


def test_a_machine_that_was_taken_back_is_told_from_one_that_is_cut_off(provider: MotoAWS, ec2: Any) -> None:
    machines = launched(provider, PoolSpec(nodes=2, allocation="on-demand"))
    assert provider.why_gone(machines[0]) is None
    ec2.terminate_instances(InstanceIds=[machines[0].handle.instance])
    assert "User initiated" in str(provider.why_gone(machines[0]))
    assert provider.why_gone(machines[1]) is None
    provider.terminate(machines)
