"""The process of the fake EC2: moto's server, with hosts for instances, faults on demand, and additions to moto.

`python -m tests.hosts.ec2_server BED` prints its port, and ends when its standard input does. Everything below /_tests/
is the control: a JSON object in, one out.
"""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qsl
from xml.sax.saxutils import escape

from tests.hosts.bed import Bed
from tests.hosts.ec2_answers import ON_DEMAND_USD, Answers, Refused
from tests.hosts.ec2_images import write_images
from tests.hosts.ec2_settings import Fault, Settings

StartResponse = Callable[..., Any]

_ACCOUNT = "123456789012"


def main() -> None:
    bed = Bed(int(sys.argv[1]))
    images = bed.folder / "amis.json"
    write_images(images)
    os.environ.update(
        MOTO_AMIS_PATH=str(images),
        MOTO_ENABLE_AMI_VALIDATION="true",
        MOTO_EC2_ENABLE_INSTANCE_TYPE_VALIDATION="true",
        MOTO_ENABLE_KEYPAIR_VALIDATION="true",
    )
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    application = Application(bed)
    server = make_server("127.0.0.1", 0, application, threaded=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests; the end of the pipe ends this
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    sys.stdin.read()
    application.machines.end_all()


class Application:
    """WSGI application in front of moto's own."""

    def __init__(self, bed: Bed) -> None:
        # It is imported late, because moto reads its environment at import.
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

        from tests.hosts.ec2_machines import Machines

        self.settings = Settings()
        _keep_types(ON_DEMAND_USD)
        self.machines = Machines(bed, self.settings)
        self.machines.install()
        self.answers = Answers(self.machines.of_placement_group)
        self.faults: list[Fault] = []
        self.calls: list[tuple[str, dict[str, str]]] = []
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        environ["wsgi.input"] = io.BytesIO(body)
        if environ["PATH_INFO"].startswith("/_tests/"):
            answer = getattr(self, f"control_{environ['PATH_INFO'].removeprefix('/_tests/')}")(**json.loads(body))
            return _send(start_response, 200, "application/json", json.dumps(answer))
        try:
            if target := environ.get("HTTP_X_AMZ_TARGET"):
                return self._json(environ, start_response, target, json.loads(body or b"{}"))
            return self._query(environ, start_response, dict(parse_qsl(body.decode(), keep_blank_values=True)))
        except Refused as error:
            if environ.get("HTTP_X_AMZ_TARGET"):
                answer = json.dumps({"__type": error.code, "message": error.message})
                return _send(start_response, error.status, "application/x-amz-json-1.1", answer)
            errors = f"<Error><Code>{error.code}</Code><Message>{escape(error.message)}</Message></Error>"
            answer = f"<Response><Errors>{errors}</Errors><RequestID>fake</RequestID></Response>"
            return _send(start_response, error.status, "text/xml", answer)

    # The API.

    def _json(
        self, environ: dict[str, Any], start_response: StartResponse, target: str, body: dict[str, Any]
    ) -> Iterable[bytes]:
        action = target.rpartition(".")[2]
        self.calls.append((action, {key: str(value) for key, value in body.items()}))
        if fault := self._struck(action, {}):
            raise Refused(fault.code, fault.message, fault.status)
        answer = self.answers.json(target, body)
        if answer is None:
            return self._moto(environ, start_response)  # type: ignore[no-any-return]
        return _send(start_response, 200, "application/x-amz-json-1.1", answer)

    def _query(self, environ: dict[str, Any], start_response: StartResponse, form: dict[str, str]) -> Iterable[bytes]:
        action, region = form.get("Action", ""), _region(environ)
        self.calls.append((action, form))
        fault = self._struck(action, _facts(form, region))
        if fault is None:
            return self._carried_out(environ, start_response, form, region)
        if fault.is_done:
            self._carried_out(environ, lambda *_: None, form, region)
        if fault.is_dropped:
            with suppress(OSError):
                environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        raise Refused(fault.code or "InternalError", fault.message, fault.status)

    def _carried_out(
        self, environ: dict[str, Any], start_response: StartResponse, form: dict[str, str], region: str
    ) -> list[bytes]:
        action, group = form.get("Action", ""), form.get("GroupId", "")
        if action == "DeleteSecurityGroup" and (users := self.machines.of_security_group(group)):
            raise Refused("DependencyViolation", f"resource {group} has a dependent object: {users[0]}")
        placement = form.get("Placement.GroupName", "")
        if placement and placement not in self.answers.placement_groups:
            raise Refused("InvalidPlacementGroup.Unknown", f"The Placement Group '{placement}' is unknown.")
        answer = self.answers.ec2(action, form, _zones(region))
        if answer is not None:
            return _send(start_response, 200, "text/xml", answer)
        self.machines.asked.placement_group = placement
        chunks = [b"".join(self._moto(environ, start_response))]
        if "SecurityGroup" in action or action in ("RunInstances", "ModifyInstanceAttribute"):
            self.machines.apply_security_groups()
        return chunks

    def _struck(self, action: str, facts: dict[str, str]) -> Fault | None:
        with self._lock:
            return next((fault for fault in self.faults if fault.strikes(action, facts)), None)

    # The control, which `tests.hosts.ec2.Ec2` calls over HTTP.

    def control_set(self, **settings: Any) -> None:
        for name, value in settings.items():
            assert hasattr(self.settings, name), name
            setattr(self.settings, name, value)

    def control_fail(self, **fault: Any) -> None:
        with self._lock:
            self.faults.append(Fault(**fault))

    def control_clear_faults(self) -> None:
        with self._lock:
            self.faults.clear()

    def control_calls(self) -> list[tuple[str, dict[str, str]]]:
        return self.calls

    def control_machines(self) -> list[dict[str, Any]]:
        from tests.hosts.ec2_machines import describe

        return [describe(machine) for machine in self.machines.all()]

    def control_interrupt(self, instance_id: str, in_s: float) -> None:
        self.machines.interrupt(instance_id, in_s)

    def control_price(self, instance_type: str, usd: float, zone: str = "") -> None:
        if zone:
            self.answers.spot_usd[instance_type, zone] = usd
        else:
            self.answers.on_demand_usd[instance_type] = usd

    def control_left(self) -> list[str]:
        from moto.ec2.models import ec2_backends

        left = [machine.id for machine in self.machines.all() if machine.state != "terminated"]
        for backend in ec2_backends[_ACCOUNT].values():
            groups = (group for groups in backend.groups.values() for group in groups.values())
            left += [f"{group.id} {group.name}" for group in groups if group.name != "default"]
            left += [f"{pair.id} {pair.key_name}" for pair in backend.key_pairs.values()]
            # Their disks go with them. moto also has those of images, which are in no machine.
            left += [volume.id for volume in backend.volumes.values() if volume.attachment is not None]
        return left + self.answers.placement_groups

    def control_reset(self) -> None:
        from moto.core.model_instances import reset_model_data
        from moto.ec2.models import ec2_backends

        self.control_clear_faults()
        self.control_set(**vars(Settings()))
        self.calls.clear()
        self.machines.end_all()
        self.answers.reset()
        for backend in list(ec2_backends[_ACCOUNT].values()):
            backend.reset()
        reset_model_data()


def _keep_types(names: Collection[str]) -> None:
    """Keep only these of moto's 1,400 instance types: reading all would take a client 3 s in each test."""
    from moto.ec2.models.instance_types import INSTANCE_TYPE_OFFERINGS, INSTANCE_TYPES, InstanceTypeBackend

    for name in set(INSTANCE_TYPES) - set(names):
        del INSTANCE_TYPES[name]
    InstanceTypeBackend.instance_types = [kept for kept in InstanceTypeBackend.instance_types if kept.name in names]
    for by_region in INSTANCE_TYPE_OFFERINGS.values():
        for offerings in by_region.values():
            offerings[:] = [offering for offering in offerings if offering["InstanceType"] in names]


def _facts(form: dict[str, str], region: str) -> dict[str, str]:
    """Return the properties of a call that a fault may match."""
    from moto.ec2.models import ec2_backends

    subnet = form.get("SubnetId") or form.get("NetworkInterface.1.SubnetId", "")
    zone = form.get("Placement.AvailabilityZone", "")
    if subnet and not zone:
        with suppress(Exception):  # moto reports the mistake
            zone = ec2_backends[_ACCOUNT][region].get_subnet(subnet).availability_zone
    market = "spot" if form.get("InstanceMarketOptions.MarketType") == "spot" else "on-demand"
    return {
        "instance_type": form.get("InstanceType", ""),
        "zone": zone,
        "market": market,
        "instance_id": form.get("InstanceId.1", form.get("InstanceId", "")),
    }


def _region(environ: dict[str, Any]) -> str:
    """Return the region for which the request was signed."""
    words = environ.get("HTTP_AUTHORIZATION", "").partition("Credential=")[2].split("/")
    return words[2] if len(words) > 2 else "us-east-1"


def _zones(region: str) -> list[str]:
    from moto.ec2.models import ec2_backends

    return [zone.name for zone in ec2_backends[_ACCOUNT][region].describe_availability_zones()]


def _send(start_response: StartResponse, status: int, kind: str, text: str) -> list[bytes]:
    content = text.encode()
    start_response(f"{status} -", [("Content-Type", kind), ("Content-Length", str(len(content)))])
    return [content]


if __name__ == "__main__":
    main()
