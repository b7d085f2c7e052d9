"""The fake EC2: its instances are machines that boot, run user data, let their key in, and are gone when terminated."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError, ConnectionClosedError

from tests.hosts.bed import pids_in
from tests.hosts.ec2 import Ec2
from tests.hosts.host import Host
from tests.waiting import until

pytestmark = pytest.mark.hosts


class Account:
    """Resources that a user of EC2 makes by hand: a key, a security group, instances."""

    def __init__(self, ec2: Ec2, folder: Path) -> None:
        self.ec2 = ec2
        self.api = boto3.client("ec2", config=Config(retries={"total_max_attempts": 1}))
        self.key_file = folder / "key"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.key_file], check=True)
        self.api.import_key_pair(KeyName="mine", PublicKeyMaterial=Path(f"{self.key_file}.pub").read_bytes())
        group = self.api.create_security_group(GroupName="mine", Description="mine")
        self.group = group["GroupId"]
        self.allow(22, ec2.client_cidr)
        ssm = boto3.client("ssm")
        name = "/aws/service/canonical/ubuntu/server/24.04/stable/current/amd64/hvm/ebs-gp3/ami-id"
        self.image = ssm.get_parameter(Name=name)["Parameter"]["Value"]

    def allow(self, port: int, cidr: str) -> None:
        rule: Any = {"IpProtocol": "tcp", "FromPort": port, "ToPort": port, "IpRanges": [{"CidrIp": cidr}]}
        self.api.authorize_security_group_ingress(GroupId=self.group, IpPermissions=[rule])

    def run(self, count: int = 1, **options: Any) -> list[str]:
        asked: dict[str, Any] = {
            "ImageId": self.image,
            "InstanceType": "m5.large",
            "KeyName": "mine",
            "SecurityGroupIds": [self.group],
            "MinCount": count,
            "MaxCount": count,
            **options,
        }
        return [found["InstanceId"] for found in self.api.run_instances(**asked)["Instances"]]

    def run_spot(self) -> str:
        return self.run(InstanceMarketOptions={"MarketType": "spot"})[0]

    def describe(self, instance: str) -> Any:
        return self.api.describe_instances(InstanceIds=[instance])["Reservations"][0]["Instances"][0]

    def state(self, instance: str) -> str:
        return str(self.describe(instance)["State"]["Name"])

    def booted(self, instance: str) -> Host:
        until(lambda: self.state(instance) == "running")
        host = self.ec2.host(instance)
        until(host.answers_ssh)
        return host

    def ssh(self, host: Host, command: str) -> subprocess.CompletedProcess[str]:
        options = [f"IdentityFile={self.key_file}", f"UserKnownHostsFile={host.bed.known_hosts}", "IdentitiesOnly=yes"]
        flags = [word for option in [*options, "BatchMode=yes", "ConnectTimeout=5"] for word in ("-o", option)]
        return subprocess.run(
            ["ssh", "-F", "none", *flags, f"ubuntu@{host.address}", command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture
def account(ec2: Ec2, tmp_path: Path) -> Account:
    return Account(ec2, tmp_path)


def _unit(host: Host, name: str) -> str:
    return host.run("systemctl", "is-active", name, check=False).stdout.strip()


def test_instances_boot_run_their_user_data_and_end(
    account: Account, ec2: Ec2, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = time.monotonic()
    instances = account.run(3, UserData="#!/bin/sh\nid -un > /root/ran\nhostname >> /root/ran\n")
    assert {account.state(instance) for instance in instances} <= {"pending", "running"}
    hosts = [account.booted(instance) for instance in instances]
    with capsys.disabled():
        print(f"\nssh answered on 3 instances {time.monotonic() - begun:.2f} s after run_instances")
    for instance, host in zip(instances, hosts, strict=True):
        seen = account.describe(instance)
        assert seen["PublicIpAddress"] == seen["PrivateIpAddress"] == host.address
        assert account.ssh(host, "whoami; sudo whoami").stdout == "ubuntu\nroot\n"
        until(lambda host=host: _unit(host, "cloud-final") == "active", within_s=90)  # type: ignore[misc]
        assert host.path("/root/ran").exists(), host.run("systemctl", "status", "cloud-final", check=False).stdout
        assert host.read("/root/ran") == f"root\n{host.name}\n"
    account.api.terminate_instances(InstanceIds=instances)
    until(lambda: {account.state(instance) for instance in instances} == {"terminated"})
    assert not any(pids_in(host.machine) for host in hosts)


def test_an_instance_that_powers_itself_off_is_terminated_if_made_so(account: Account) -> None:
    ends = account.run(InstanceInitiatedShutdownBehavior="terminate")[0]
    stops = account.run()[0]
    for instance in (ends, stops):
        account.booted(instance).run("systemctl", "poweroff")
    until(lambda: (account.state(ends), account.state(stops)) == ("terminated", "stopped"))
    assert account.describe(ends)["StateReason"]["Code"] == "Client.InstanceInitiatedShutdown"
    account.api.start_instances(InstanceIds=[stops])
    account.booted(stops)


def test_an_instance_that_lost_its_power_still_counts_as_running(account: Account, ec2: Ec2) -> None:
    instance = account.run()[0]
    account.booted(instance).power_loss()
    assert account.state(instance) == "running"
    account.api.terminate_instances(InstanceIds=[instance])
    until(lambda: account.state(instance) == "terminated")


def test_security_groups_are_enforced(account: Account) -> None:
    first, second = (account.booted(instance) for instance in account.run(2))
    for host in (first, second):
        host.run("systemd-run", "-q", "python3", "-m", "http.server", "8000")

    def reaches(command: list[str]) -> bool:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    fetch = [
        "curl",
        "-s",
        "-o",
        "/dev/null",
        "--noproxy",
        "*",
        "--connect-timeout",
        "1",
        f"http://{second.address}:8000/",
    ]
    until(lambda: second.run(*fetch, check=False).returncode == 0)
    assert not reaches(fetch), "from outside"
    assert first.run(*fetch, check=False).returncode != 0, "from another member"
    among: Any = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": account.group}]}
    account.api.authorize_security_group_ingress(GroupId=account.group, IpPermissions=[among])
    assert first.run(*fetch, check=False).returncode == 0
    assert not reaches(fetch)
    account.allow(8000, account.ec2.client_cidr)
    assert reaches(fetch)


def test_capacity_is_missing_for_a_type_a_zone_or_a_market(account: Account, ec2: Ec2) -> None:
    ec2.has_no_capacity(where={"instance_type": "c5.large", "zone": "us-east-1a", "market": "spot"})
    spot: Any = {"InstanceMarketOptions": {"MarketType": "spot"}}
    here: Any = {"Placement": {"AvailabilityZone": "us-east-1a"}, "InstanceType": "c5.large"}
    with pytest.raises(ClientError, match="InsufficientInstanceCapacity"):
        account.run(**here, **spot)
    account.run(**here)
    account.run(**{**here, "Placement": {"AvailabilityZone": "us-east-1b"}}, **spot)
    ec2.has_no_capacity(times=2)
    for _ in range(2):
        with pytest.raises(ClientError, match="InsufficientInstanceCapacity"):
            account.run()
    account.run()
    assert len(ec2.machines()) == 3


def test_calls_are_throttled(account: Account, ec2: Ec2) -> None:
    ec2.throttle("DescribeInstances", times=2)
    for _ in range(2):
        with pytest.raises(ClientError, match="RequestLimitExceeded"):
            account.api.describe_instances()
    account.api.describe_instances()


@pytest.mark.parametrize("is_dropped", [False, True])
def test_a_create_call_with_an_error_may_have_created(account: Account, ec2: Ec2, is_dropped: bool) -> None:
    ec2.fail("RunInstances", "InternalError", status=500, is_done=True, is_dropped=is_dropped)
    with pytest.raises(ConnectionClosedError if is_dropped else ClientError):
        account.run(ClientToken="once")
    assert len(ec2.machines()) == 1
    assert account.run(ClientToken="once") == [ec2.machines()[0].id]
    assert len(ec2.machines()) == 1


def test_a_token_stands_for_one_request(account: Account) -> None:
    account.run(ClientToken="once")
    with pytest.raises(ClientError, match="IdempotentParameterMismatch"):
        account.run(ClientToken="once", InstanceType="c5.large")


def test_a_new_instance_is_not_listed_yet(account: Account, ec2: Ec2) -> None:
    ec2.set(list_after_s=1.0)
    instance = account.run()[0]
    with pytest.raises(ClientError, match=r"InvalidInstanceID.NotFound"):
        account.describe(instance)
    with pytest.raises(ClientError, match=r"InvalidInstanceID.NotFound"):
        account.api.terminate_instances(InstanceIds=[instance])
    assert account.api.describe_instances()["Reservations"] == []
    until(lambda: account.api.describe_instances()["Reservations"])
    account.booted(instance)


def test_terminate_is_refused_while_pending(account: Account, ec2: Ec2) -> None:
    ec2.set(refuses_terminate_while_pending=True, pending_s=1.5)
    instance = account.run()[0]
    with pytest.raises(ClientError, match="IncorrectInstanceState"):
        account.api.terminate_instances(InstanceIds=[instance])
    until(lambda: account.state(instance) == "running")
    account.api.terminate_instances(InstanceIds=[instance])
    until(lambda: account.state(instance) == "terminated")


def test_boots_are_slow_or_never_end(account: Account, ec2: Ec2) -> None:
    ec2.set(ssh_after_s=2.0)
    slow = account.run()[0]
    ec2.set(boots="never")
    never = account.run(UserData="#!/bin/sh\ntouch /root/ran\n")[0]
    until(lambda: account.state(slow) == account.state(never) == "running")
    assert not ec2.host(slow).answers_ssh()
    account.booted(slow)
    assert not ec2.host(never).answers_ssh()
    assert not ec2.host(never).path("/root/ran").exists()
    account.api.terminate_instances(InstanceIds=[never])
    until(lambda: account.state(never) == "terminated")


def test_a_spot_instance_gets_a_notice_and_is_reclaimed(account: Account, ec2: Ec2) -> None:
    instance = account.run_spot()
    host = account.booted(instance)
    assert account.describe(instance)["InstanceLifecycle"] == "spot"
    at = "http://169.254.169.254/latest"
    token = host.run(
        "curl", "-s", "-X", "PUT", "-H", "X-aws-ec2-metadata-token-ttl-seconds: 60", f"{at}/api/token"
    ).stdout

    def read(path: str) -> subprocess.CompletedProcess[str]:
        return host.run(
            "curl", "-sf", "-H", f"X-aws-ec2-metadata-token: {token}", f"{at}/meta-data/{path}", check=False
        )

    assert read("instance-id").stdout == instance
    assert read("spot/instance-action").returncode
    ec2.interrupt(instance, in_s=1.0)
    assert json.loads(read("spot/instance-action").stdout)["action"] == "terminate"
    until(lambda: account.state(instance) == "terminated")
    assert account.describe(instance)["StateReason"]["Code"] == "Server.SpotInstanceTermination"


def test_metadata_need_a_token_if_the_instance_was_made_so(account: Account) -> None:
    instance = account.run(MetadataOptions={"HttpTokens": "required", "HttpEndpoint": "enabled"})[0]
    host = account.booted(instance)
    url = "http://169.254.169.254/latest/meta-data/instance-id"
    assert host.run("curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", url).stdout == "401"


def test_the_console_shows_the_host_key(account: Account) -> None:
    instance = account.run()[0]
    host = account.booted(instance)
    output = account.api.get_console_output(InstanceId=instance)["Output"]
    assert f"\n{host.host_key()} root@{host.name}" in output
    fingerprint = subprocess.run(
        ["ssh-keygen", "-lf", "-"], input=host.host_key(), capture_output=True, text=True, check=True
    ).stdout.split()[1]
    assert fingerprint in output


def test_prices_are_known_and_change(ec2: Ec2) -> None:
    pricing, api = boto3.client("pricing"), boto3.client("ec2")
    ec2.set_price("g5.xlarge", 2.5)
    wanted: Any = [{"Type": "TERM_MATCH", "Field": "instanceType", "Value": "g5.xlarge"}]
    product = json.loads(pricing.get_products(ServiceCode="AmazonEC2", Filters=wanted)["PriceList"][0])
    (term,) = product["terms"]["OnDemand"].values()
    assert [float(found["pricePerUnit"]["USD"]) for found in term["priceDimensions"].values()] == [2.5]
    ec2.set_price("m5.large", 0.05, zone="us-east-1c")
    history = api.describe_spot_price_history(InstanceTypes=["m5.large"])["SpotPriceHistory"]
    by_zone = {found["AvailabilityZone"]: float(found["SpotPrice"]) for found in history}
    assert by_zone["us-east-1c"] == 0.05
    assert by_zone["us-east-1a"] < by_zone["us-east-1b"] < 0.096


def test_services_that_moto_lacks_are_there(account: Account) -> None:
    tags: Any = [{"ResourceType": "placement-group", "Tags": [{"Key": "pool", "Value": "x"}]}]
    account.api.create_placement_group(GroupName="close", Strategy="cluster", TagSpecifications=tags)
    found = account.api.describe_placement_groups(Filters=[{"Name": "tag:pool", "Values": ["x"]}])["PlacementGroups"]
    assert [group["GroupName"] for group in found] == ["close"]
    instance = account.run(Placement={"GroupName": "close"})[0]
    with pytest.raises(ClientError, match=r"InvalidPlacementGroup.InUse"):
        account.api.delete_placement_group(GroupName="close")
    with pytest.raises(ClientError, match="DependencyViolation"):
        account.api.delete_security_group(GroupId=account.group)
    account.api.terminate_instances(InstanceIds=[instance])
    until(lambda: account.state(instance) == "terminated")
    account.api.delete_placement_group(GroupName="close")


@pytest.mark.parametrize(
    "wrong", [{"ImageId": "ami-00000000000000000"}, {"InstanceType": "m5.huge"}, {"KeyName": "unknown"}]
)
def test_resources_that_do_not_exist_are_refused(account: Account, wrong: dict[str, Any]) -> None:
    with pytest.raises(ClientError, match="Invalid"):
        account.run(**wrong)


def test_leftovers_are_named(account: Account, ec2: Ec2) -> None:
    instance = account.run()[0]
    left = ec2.left()
    assert instance in left
    account.booted(instance)
    account.api.terminate_instances(InstanceIds=[instance])
    until(lambda: account.state(instance) == "terminated")
    account.api.delete_security_group(GroupId=account.group)
    account.api.delete_key_pair(KeyName="mine")
    assert ec2.left() == []
    assert [call["InstanceId.1"] for call in ec2.calls("TerminateInstances")] == [instance]
