"""The instances of the fake EC2 are hosts: their life, their user data, their console and metadata.

This runs in the server's process. `install` hooks into moto, which keeps the books. Every hook says how moto differs.
"""

from __future__ import annotations

import base64
import hashlib
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from moto.core.responses import ActionResult
from moto.core.types import Base64EncodedString
from moto.core.utils import utcnow
from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models.elastic_network_interfaces import NetworkInterface
from moto.ec2.models.instances import Instance, InstanceBackend, InstanceState, StateReason
from moto.ec2.models.subnets import Subnet
from moto.ec2.models.vpcs import VPCBackend
from moto.ec2.responses.general import General

from tests.hosts.bed import Bed, run
from tests.hosts.ec2_images import image_of
from tests.hosts.ec2_metadata import Metadata
from tests.hosts.ec2_settings import Settings
from tests.hosts.host import Host

__all__ = ["Machines", "describe"]

_CODES = {"pending": 0, "running": 16, "shutting-down": 32, "terminated": 48, "stopping": 64, "stopped": 80}
_TERMINATE = Instance.terminate
_LOOK_S = 0.1
_REBOOT = 133  # how systemd-nspawn ends when the system inside wants to boot again
_USER_DATA_UNIT = """[Unit]
Description=what cloud-init does with user data
After=network.target dbus.service
ConditionPathExists=!/var/lib/cloud/instance/boot-finished
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/var/lib/cloud/instance/scripts/part-001
ExecStartPost=/usr/bin/touch /var/lib/cloud/instance/boot-finished
KillMode=process
TimeoutStartSec=infinity
StandardOutput=append:/var/log/cloud-init-output.log
StandardError=append:/var/log/cloud-init-output.log
[Install]
WantedBy=multi-user.target
"""


class _Machine:
    """One instance. `wanted` is the state that was last requested, and its thread carries it out."""

    def __init__(self, instance: Instance, settings: Settings) -> None:
        self.instance = instance
        self.settings = settings
        self.host: Host | None = None
        self.metadata: Metadata | None = None
        self.changed = threading.Condition()
        self.wanted = "running"
        self.is_given_back = False
        self.group_ids = {group.id for group in _groups(instance)}
        self.listed_at = time.monotonic() + settings.list_after_s

    @property
    def id(self) -> str:
        return str(self.instance.id)

    @property
    def state(self) -> str:
        return str(self.instance.state)

    def enter(self, state: str) -> None:
        self.instance._state = InstanceState(state, _CODES[state])

    def want(self, state: str, reason: str = "", message: str = "") -> None:
        with self.changed:
            if self.wanted == "terminated":
                return
            self.wanted = state
            if reason:
                self.instance.state_reason = StateReason(message, reason)
            self.changed.notify_all()

    def waits(self, seconds: float) -> bool:
        """Wait for that time. Returns True if the wanted state is now another than a running machine."""
        with self.changed:
            self.changed.wait_for(lambda: self.wanted != "running", timeout=seconds)
            return self.wanted != "running"


class Machines:
    """All instances of the server, and the hooks that make them."""

    def __init__(self, bed: Bed, settings: Settings) -> None:
        self.bed = bed
        self.settings = settings
        self._machines: dict[str, _Machine] = {}
        self._lock = threading.Lock()
        self._tokens: dict[str, tuple[str, Any]] = {}
        self._applied: dict[str, str] = {}
        self.asked = threading.local()
        """What the request of this thread says that moto does not read: placement_group."""

    # Called by the control of the server.

    def get(self, instance_id: str) -> _Machine:
        """Return a machine. Raises KeyError."""
        return self._machines[instance_id]

    def all(self) -> list[_Machine]:
        return list(self._machines.values())

    def of_placement_group(self, name: str) -> list[str]:
        """Return the instances in it that are not gone."""
        return [m.id for m in self.all() if m.state != "terminated" and m.instance.placement.group_name == name]

    def of_security_group(self, group_id: str) -> list[str]:
        """Return the instances that it protects and that are not gone."""
        return [m.id for m in self.all() if m.state != "terminated" and group_id in m.group_ids]

    def interrupt(self, instance_id: str, in_s: float) -> None:
        """Announce to a spot instance that it will be reclaimed, and do it."""
        machine = self.get(instance_id)
        assert machine.metadata is not None, f"{instance_id} does not run"
        machine.metadata.announce(in_s)

        def take() -> None:
            machine.waits(in_s)
            reason = "Server.SpotInstanceTermination"
            machine.want("terminated", reason, f"{reason}: Spot instance termination")

        threading.Thread(target=take, daemon=True).start()

    def console(self, instance_id: str) -> str:
        """Return what EC2 shows of the console: empty at first, then also the output of cloud-init."""
        machine = self.get(instance_id)
        host = machine.host
        if host is None or time.monotonic() < machine.listed_at + machine.settings.console_after_s:
            return ""
        text = host.console()
        with suppress(OSError):
            key = host.host_key()
            digest = base64.b64encode(hashlib.sha256(base64.b64decode(key.split()[1])).digest()).decode().rstrip("=")
            line = f"256 SHA256:{digest} root@{host.name} (ED25519)"
            text += (
                f"<14>ci-info: -----BEGIN SSH HOST KEY FINGERPRINTS-----\r\n<14>ci-info: {line}\r\n"
                "<14>ci-info: -----END SSH HOST KEY FINGERPRINTS-----\r\n"
                f"-----BEGIN SSH HOST KEY KEYS-----\r\n{key} root@{host.name}\r\n-----END SSH HOST KEY KEYS-----\r\n"
            )
        return text

    def end_all(self) -> None:
        """Terminate everything, and wait for it."""
        for machine in self.all():
            machine.want("terminated")
        for machine in self.all():
            with machine.changed:
                machine.changed.wait_for(lambda machine=machine: machine.state == "terminated", timeout=30)  # type: ignore[misc]
        self._machines.clear()
        self._tokens.clear()
        self._applied.clear()

    def apply_security_groups(self) -> None:
        """Let hosts drop packets that their groups do not let in.

        This is called after each call that may have changed that.
        """
        if not self.settings.enforces_security_groups:
            return
        for machine in self.all():
            if machine.state == "running" and machine.host is not None and machine.host.is_on:
                rules = _rules(machine.instance)
                if self._applied.get(machine.id) != rules:
                    self._applied[machine.id] = rules
                    with suppress(RuntimeError):  # it may be shut down by now
                        run(["ip", "netns", "exec", machine.host.machine, "nft", rules])

    # The life of an instance.

    def _begin(self, instance: Instance) -> None:
        machine = _Machine(instance, self.settings.copy())
        machine.enter("pending")
        self._machines[machine.id] = machine
        threading.Thread(target=self._live, args=[machine], name=machine.id, daemon=True).start()

    def _live(self, machine: _Machine) -> None:
        try:
            begun = time.monotonic()
            if machine.wanted != "terminated":
                self._boot(machine)
            if not machine.waits(machine.settings.pending_s - (time.monotonic() - begun)):
                machine.enter("running")
                self.apply_security_groups()
            while machine.wanted != "terminated":
                self._watch(machine)
        except Exception as error:  # whatever it was, the machine must not stay
            traceback.print_exc()
            machine.instance.state_reason = StateReason(f"Server.InternalError: {error!r}", "Server.InternalError")
        finally:
            self._end(machine)

    def _boot(self, machine: _Machine) -> None:
        instance, settings = machine.instance, machine.settings
        address = str(instance.private_ip)
        pair = instance.ec2_backend.key_pairs.get(instance.key_name)
        public = pair.material_public.decode() if pair is not None else ""
        host = machine.host
        if host is None:
            user = image_of(instance.image_id).user
            host = Host(
                self.bed, f"ip-{address.replace('.', '-')}", address, users={user: public}, has_uv=settings.has_uv
            )
            machine.host = host
            host.make()
            if settings.software:
                host.unpack(settings.software)
            if instance.user_data and settings.boots != "never":
                _write_user_data(host, base64.b64decode(str(instance.user_data)))
        host.start(ssh_after_s=float("inf") if settings.boots == "never" else settings.ssh_after_s)
        machine.metadata = Metadata(host.machine, instance, public)

    def _watch(self, machine: _Machine) -> None:
        """Wait until another state is wanted, or the machine does something by itself."""
        with machine.changed:
            machine.changed.wait(_LOOK_S)
        host, wanted = machine.host, machine.wanted
        assert host is not None
        if wanted == "stopped" and machine.state != "stopped":
            machine.enter("stopping")
            host.power_loss(is_silent=False)
            self._quiet(machine)
            machine.enter("stopped")
        elif wanted == "running" and machine.state == "stopped":
            machine.enter("pending")
            self._applied.pop(machine.id, None)
            self._boot(machine)
            machine.enter("running")
            self.apply_security_groups()
        elif wanted == "running" and (code := host.exit_code) is not None:
            self._fell(machine, host, code)

    def _fell(self, machine: _Machine, host: Host, code: int) -> None:
        """Handle a host that is off although nobody requested it."""
        if code == _REBOOT:
            self._quiet(machine)
            self._applied.pop(machine.id, None)
            self._boot(machine)
            self.apply_security_groups()
        elif code == 0:  # it powered itself off; after a power loss EC2 goes on calling it running
            behaviour = machine.instance.instance_initiated_shutdown_behavior
            reason = "Client.InstanceInitiatedShutdown"
            wanted = "terminated" if behaviour == "terminate" else "stopped"
            machine.want(wanted, reason, f"{reason}: Instance initiated shutdown")

    def _quiet(self, machine: _Machine) -> None:
        if machine.metadata is not None:
            machine.metadata.close()
            machine.metadata = None

    def _end(self, machine: _Machine) -> None:
        machine.want("terminated")
        machine.enter("shutting-down")
        begun = time.monotonic()
        try:
            self._quiet(machine)
            if machine.host is not None:
                machine.host.destroy()
            if not machine.is_given_back:  # it ended by itself
                self._give_back(machine)
            time.sleep(max(0.0, machine.settings.shutdown_s - (time.monotonic() - begun)))
        finally:
            with machine.changed:
                machine.enter("terminated")
                machine.changed.notify_all()

    # The hooks.

    def install(self) -> None:
        """Hook into moto's classes, permanently, because this is the server's process."""
        self._install_making()
        self._install_ending()
        self._install_looking()
        self._install_network()

    def _install_making(self) -> None:
        made = InstanceBackend.run_instances

        def run_instances(backend: Any, image_id: str, count: int, user_data: Any, groups: Any, **options: Any) -> Any:
            """Make instances once for each token. moto makes new ones for the same token."""
            _choose_subnet(backend, options)
            token = options.get("client_token")
            digest = repr((image_id, count, user_data, options.get("instance_type"), options.get("subnet_id")))
            with self._lock:
                if token and token != "ABCDE" and token in self._tokens:
                    earlier, reservation = self._tokens[token]
                    if earlier != digest:
                        raise EC2ClientError(
                            "IdempotentParameterMismatch", "Arguments on this idempotent request are inconsistent"
                        )
                    return reservation
                reservation = made(backend, image_id, count, user_data, groups, **options)
                self._tokens[str(token)] = (digest, reservation)
            for instance in reservation.instances:
                instance.placement.group_name = getattr(self.asked, "placement_group", "")
                self._begin(instance)
            return reservation

        _set(InstanceBackend, run_instances=run_instances)

    def _give_back(self, machine: _Machine) -> None:
        """Give back its disks and network interfaces, which is all that moto does at a termination."""
        machine.is_given_back = True
        reason = machine.instance.state_reason
        _TERMINATE(machine.instance)
        machine.instance.state_reason = reason

    def _install_ending(self) -> None:
        def terminate(instance: Instance) -> InstanceState:
            """Terminate instances gradually. moto's are gone at once."""
            before = instance._state
            machine = self._machines.get(instance.id)
            if machine is None or machine.wanted == "terminated":
                return before
            if before.name == "pending" and machine.settings.refuses_terminate_while_pending:
                raise EC2ClientError(
                    "IncorrectInstanceState",
                    f"The instance '{instance.id}' is not in a state from which it can be terminated.",
                )
            self._give_back(machine)
            machine.enter("shutting-down")
            machine.want(
                "terminated", "Client.UserInitiatedShutdown", "Client.UserInitiatedShutdown: User initiated shutdown"
            )
            return before

        def stop(instance: Instance) -> InstanceState:
            before = instance._state
            self.get(instance.id).want("stopped", "Client.UserInitiatedShutdown", "User initiated shutdown")
            return before

        def start(instance: Instance) -> InstanceState:
            before = instance._state
            self.get(instance.id).want("running")
            return before

        _set(Instance, terminate=terminate, stop=stop, start=start)

    def _install_looking(self) -> None:
        listed = InstanceBackend.all_reservations

        def all_reservations(backend: Any, filters: Any = None) -> Any:
            """List new instances only after a while. moto lists them at once."""
            now, found = time.monotonic(), []
            for reservation in listed(backend, filters):
                hidden = {m.id for m in self.all() if m.listed_at > now}
                reservation.instances = [i for i in reservation.instances if i.id not in hidden]
                if reservation.instances:
                    found.append(reservation)
            return found

        def get_console_output(response: Any) -> ActionResult:
            """Return the console. moto's is that of a machine of 2006."""
            instance_id = response._get_param("InstanceId")
            response.ec2_backend.get_instance(instance_id)
            output = Base64EncodedString.from_raw_string(self.console(instance_id))
            return ActionResult({"InstanceId": instance_id, "Timestamp": utcnow(), "Output": output})

        _set(InstanceBackend, all_reservations=all_reservations)
        _set(General, get_console_output=get_console_output)

    def _install_network(self) -> None:
        network = f"{self.bed.cloud_network}.0.0/16"

        def create_default_vpc(backend: Any) -> Any:
            vpc = backend.create_vpc(cidr_block=network, is_default=True)
            for zone in backend.describe_availability_zones():
                backend.create_default_subnet(zone.name)
            return vpc

        def check_auto_public_ip(interface: Any) -> None:
            """Assign addresses of this machine. moto's are random, and nothing may ever connect to a real machine."""
            if str(interface.public_ip_auto_assign).lower() == "true":
                interface.public_ip = interface.private_ip_address

        def del_subnet_ip(subnet: Any, address: str) -> None:
            """Keep an address for a while. moto gives it to the next at once, while the old host may still end."""

        _set(VPCBackend, create_default_vpc=create_default_vpc)
        _set(NetworkInterface, check_auto_public_ip=check_auto_public_ip)
        _set(Subnet, del_subnet_ip=del_subnet_ip)


def _choose_subnet(backend: Any, options: dict[str, Any]) -> None:
    """Take the default subnet of the zone, as EC2 does. moto invents an address instead."""
    interfaces = options.get("nics") or []
    if options.get("subnet_id") or any("SubnetId" in interface for interface in interfaces):
        return
    defaults = backend.get_default_subnets()
    subnet = defaults[options.get("placement") or min(defaults)].id
    if interfaces:
        interfaces[0]["SubnetId"] = subnet
    else:
        options["subnet_id"] = subnet


def _set(target: type, **methods: Callable[..., Any]) -> None:
    for name, method in methods.items():
        setattr(target, name, method)


def _write_user_data(host: Host, data: bytes) -> None:
    host.write("/var/lib/cloud/instance/user-data.txt", data.decode(errors="replace"), mode=0o600)
    if data.startswith(b"#!"):  # the one kind of user data that this cloud-init knows
        host.write("/var/lib/cloud/instance/scripts/part-001", data.decode(), mode=0o700)
        host.write("/etc/systemd/system/cloud-final.service", _USER_DATA_UNIT)
        wants = host.path("/etc/systemd/system/multi-user.target.wants/cloud-final.service")
        wants.unlink(missing_ok=True)
        wants.symlink_to("/etc/systemd/system/cloud-final.service")
    elif data:
        raise RuntimeError(f"user data that is no script: {data[:60]!r}")


def _rules(instance: Instance) -> str:
    """Return the security groups of an instance as commands for nft."""
    lines = []
    for group in _groups(instance):
        for rule in group.ingress_rules:
            sources = [found["CidrIp"]] if (found := rule.ip_range).get("CidrIp") else []
            if other := rule.source_group.get("GroupId"):
                reservations = instance.ec2_backend.reservations.values()
                members = (member for reservation in reservations for member in reservation.instances)
                sources += sorted(
                    str(member.private_ip)
                    for member in members
                    if other in {g.id for g in _groups(member)} and member.nics
                )
            ports = (
                ""
                if rule.ip_protocol in ("-1", "icmp")
                else f"{rule.ip_protocol} dport {rule.from_port}-{rule.to_port}"
            )
            protocol = "ip protocol icmp" if rule.ip_protocol == "icmp" else ports
            lines += [f"add rule ip groups input ip saddr {source} {protocol} accept" for source in sources]
    return "\n".join(
        [
            "add table ip groups",
            "delete table ip groups",
            "add table ip groups",
            "add chain ip groups input { type filter hook input priority 10; policy drop; }",
            "add rule ip groups input ct state established,related accept",
            'add rule ip groups input iifname "lo" accept',
            *dict.fromkeys(lines),
        ]
    )


def _groups(instance: Instance) -> list[Any]:
    found = {group.id: group for group in instance.security_groups}
    for interface in instance.nics.values():
        found |= {group.id: group for group in interface.group_set}
    return list(found.values())


def describe(machine: _Machine) -> dict[str, Any]:
    """Describe it for the test's process."""
    host = machine.host
    return {
        "id": machine.id,
        "state": machine.state,
        "name": host.name if host is not None else "",
        "address": str(machine.instance.private_ip),
        "type": machine.instance.instance_type,
        "zone": machine.instance.availability_zone,
        "tags": {tag["key"]: tag["value"] for tag in machine.instance.get_tags()},
    }
