"""An EC2 on this machine whose instances are hosts: the part in the tests. `tests.hosts.ec2_server` is the process."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.hosts.bed import ROOT, Bed
from tests.hosts.ec2_settings import Fault
from tests.hosts.host import Host

__all__ = ["Ec2", "Machine"]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """An instance, as the server knows it."""

    id: str
    state: str
    name: str
    address: str
    type: str
    zone: str
    tags: dict[str, str]


class Ec2:
    """The server. With `environment`, boto3 of this process or of a child process talks to it.

    `close` ends it, and all its instances.
    """

    def __init__(self, bed: Bed) -> None:
        self.bed = bed
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.hosts.ec2_server", str(bed.number)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        bed.own(self._process)
        assert self._process.stdout is not None
        self.endpoint_url = f"http://127.0.0.1:{int(self._process.stdout.readline())}"
        self.client_cidr = f"{bed.cloud_address}/32"
        """This machine, as the instances see it: for the rules of security groups."""

    @property
    def environment(self) -> dict[str, str]:
        """Return variables with which boto3 finds this EC2 and no other, and no credentials of the user."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint_url,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_SESSION_TOKEN": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_REGION": "us-east-1",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    # Settings.

    def set(self, **settings: Any) -> None:
        """Change how machines are made and ended from now on: the fields of `ec2_settings.Settings`."""
        self._ask("set", **settings)

    def fail(
        self,
        action: str,
        code: str = "InternalError",
        *,
        times: int | None = 1,
        message: str = "made to fail by a test",
        status: int = 400,
        is_done: bool = False,
        is_dropped: bool = False,
        where: Mapping[str, str] | None = None,
    ) -> None:
        """Let the next calls of an API action fail. See `ec2_settings.Fault`. `where` are instance_type, zone, ..."""
        fault = Fault(
            action=action,
            code=code,
            message=message,
            status=status,
            times=times,
            where=dict(where or {}),
            is_done=is_done,
            is_dropped=is_dropped,
        )
        self._ask("fail", **dataclasses.asdict(fault))

    def has_no_capacity(self, *, times: int | None = None, where: Mapping[str, str] | None = None) -> None:
        """Let no machines be available: of an instance_type, in a zone, on a market (spot or on-demand)."""
        message = "We currently do not have sufficient capacity in the Availability Zone you requested."
        self.fail("RunInstances", "InsufficientInstanceCapacity", times=times, status=500, message=message, where=where)

    def throttle(self, action: str = "*", *, times: int | None = 1) -> None:
        """Refuse calls because there are too many."""
        self.fail(action, "RequestLimitExceeded", times=times, status=503, message="Request limit exceeded.")

    def clear_faults(self) -> None:
        """Remove all faults."""
        self._ask("clear_faults")

    def interrupt(self, instance_id: str, *, in_s: float = 120.0) -> None:
        """Reclaim a spot instance: the notice is there now, the end comes `in_s` later."""
        self._ask("interrupt", instance_id=instance_id, in_s=in_s)

    def set_price(self, instance_type: str, usd: float, *, zone: str = "") -> None:
        """Set the price per hour: on demand, or with `zone` of the spot market there."""
        self._ask("price", instance_type=instance_type, usd=usd, zone=zone)

    # State.

    def machines(self, *states: str) -> list[Machine]:
        """Return the instances in these states, by default all, even if the server does not list them yet."""
        found = [Machine(**facts) for facts in self._ask("machines")]
        return [machine for machine in found if machine.state in states or not states]

    def machine(self, instance_id: str) -> Machine:
        """Return one instance. Raises KeyError."""
        return {machine.id: machine for machine in self.machines()}[instance_id]

    def host(self, instance_id: str) -> Host:
        """Return the host of an instance, to look into it, cut its link, or take its power."""
        machine = self.machine(instance_id)
        assert machine.name, f"{instance_id} has not booted"
        return Host(self.bed, machine.name, machine.address)

    def calls(self, action: str = "") -> list[dict[str, str]]:
        """Return the parameters of the calls of an action so far, as they were sent, or of all actions."""
        return [parameters for name, parameters in self._ask("calls") if action in ("", name)]

    def left(self) -> list[str]:
        """Return all leftovers: machines that are not gone, security groups, keys, placement groups, disks."""
        return [str(name) for name in self._ask("left")]

    def reset(self) -> None:
        """End all instances, and forget everything."""
        self._ask("reset")

    def close(self) -> None:
        """End the server and all its instances. Idempotent."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _ask(self, what: str, **arguments: Any) -> Any:
        body = json.dumps(arguments).encode()
        request = urllib.request.Request(f"{self.endpoint_url}/_tests/{what}", data=body, method="POST")
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)
