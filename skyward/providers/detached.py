"""Nodes that go on without the client that started them: what another process needs to reach them again."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ..bootstrap.containers import Container
from ..ssh import HostKeys, SSHTarget, connect
from ..ssh.connect import Transport
from ..values.machine import Machine
from .node_setup import Place, RemoteNodeHandle, machine_at


def describe_machine(machine: Machine) -> dict[str, Any]:
    """Return plain data about a node, from which `reach_machine` makes it again. It holds no secret."""
    handle: RemoteNodeHandle = machine.handle
    return {
        "node": machine.node,
        "socket_path": machine.socket_path,
        "address": machine.peer.private_ip,
        "slots": machine.slots,
        "lease_s": machine.lease_s,
        "interface": machine.interface,
        "watchdog": handle.watchdog,
        "started": handle.started,
        "folder": handle.folder,
        "python": handle.python,
        "path": handle.path,
        "root": handle.root,
        "cwd": handle.cwd,
        "place": asdict(handle.place),
        "container": None if handle.container is None else asdict(handle.container),
    }


def reach_machine(description: dict[str, Any], transport: Transport | None) -> Machine:
    """Connect to the machine of a node.

    Raises:
        Unreachable, AuthFailed, HostKeyUnknown, HostKeyChanged: It cannot be logged in to.
    """
    place, container = description["place"], description.get("container")  # versions before 2026-12 have none
    target = place["target"]
    keys = target["host_keys"]
    here = SSHTarget(**{**target, "host_keys": HostKeys(**{**keys, "keys": tuple(keys["keys"])})})
    handle = RemoteNodeHandle(
        connection=connect(here, transport=transport),
        node=description["node"],
        watchdog=description["watchdog"],
        started=description["started"],
        folder=description["folder"],
        python=tuple(description["python"]),
        path=tuple(description["path"]),
        root=description["root"],
        cwd=description["cwd"],
        place=Place(**{**place, "target": here}),
        container=None if container is None else Container(**{**container, "options": tuple(container["options"])}),
    )
    return machine_at(
        handle,
        node=description["node"],
        socket_path=description["socket_path"],
        address=description["address"],
        slots=description["slots"],
        lease_s=description["lease_s"],
        interface=description["interface"],
    )
