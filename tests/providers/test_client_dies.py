"""A program that rents machines dies, and the keeper's command ends all of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from tests.providers.moto_server import ec2_server
from tests.waiting import until

CLIENT = """
import sys
import skyward as sky
from skyward.providers.local import Local

class Rented(sky.AWS):
    def bring_up(self, hosts, spec, pool, nodes, emit):
        here = Local()
        return here.launch(spec, here.offers(spec), pool, nodes, emit)

    def let_go(self, machines):
        Local().terminate(machines)

def hang():
    import time
    time.sleep(600)

provider = Rented(endpoint_url=sys.argv[1], ami="ami-785db401", client_cidr="192.0.2.1/32", instance_types=["m5.large"])
with sky.ComputePool(provider, nodes=2, allocation="on-demand", logs=False, console=False) as pool:
    print("open", flush=True)
    sky.compute(hang)() >> pool
"""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with ec2_server() as url:
        yield url


@pytest.fixture
def ec2(server: str) -> Iterator[Any]:
    client = boto3.client("ec2", region_name="us-east-1", endpoint_url=server)
    yield client
    client.close()


def running(ec2: Any) -> list[str]:
    filters = [{"Name": "instance-state-name", "Values": ["pending", "running"]}]
    found = ec2.describe_instances(Filters=filters)["Reservations"]
    return [instance["InstanceId"] for reservation in found for instance in reservation["Instances"]]


@pytest.mark.parametrize("signals", [(signal.SIGKILL,), (signal.SIGTERM,), (signal.SIGINT,), (signal.SIGINT,) * 2])
def test_no_rented_machine_outlives_its_program(
    server: str, ec2: Any, tmp_path: Path, signals: tuple[signal.Signals, ...]
) -> None:
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state"), "XDG_CACHE_HOME": str(tmp_path.parent)}
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, server], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert client.stdout is not None
        assert client.stdout.readline() == "open\n", client.communicate()[1]
        assert len(running(ec2)) == 2
        for number in signals:
            client.send_signal(number)
        client.communicate(timeout=60)
    finally:
        client.kill()
        client.communicate()
    until(lambda: running(ec2) == [], 60)
    until(lambda: ec2.describe_key_pairs()["KeyPairs"] == [], 60)
    until(lambda: not any((tmp_path / "state" / "skyward" / "pools").iterdir()), 60)
