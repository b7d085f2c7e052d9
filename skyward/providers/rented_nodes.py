"""From rented machines that run to nodes: who they are, by which key, and then the way of every remote machine."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

from ..events import Emit
from ..ssh import HostKeys, SSHTarget
from ..values.machine import Machine, PoolSpec
from . import remote
from .rented import Host
from .user_data import LEASE_FILE, PREEMPTED_FILE

__all__ = ["bring_up", "let_go"]

_PORT = 22
_AUTH_GRACE_S = 60.0
"""A machine's sshd may answer before the key of the pool is in place."""
_PROBE_S = 2.0
_LOOK_S = 3.0


def bring_up(hosts: list[Host], spec: PoolSpec, pool: str, nodes: list[int], emit: Emit) -> list[Machine]:
    """Agents on all of the hosts, or none of them and an error; see `remote.bring_up`."""
    deadline = time.monotonic() + spec.provision_timeout_s
    keys = _in_parallel([lambda host=host: _host_keys(host, deadline, spec.stop) for host in hosts])  # type: ignore[misc]
    places = [_place(host, found) for host, found in zip(hosts, keys, strict=True)]
    left_s = max(1.0, deadline - time.monotonic())
    return remote.bring_up(
        places,
        spec,
        pool,
        nodes,
        emit,
        lease_s=hosts[0].lease_s,
        lease_file=LEASE_FILE,
        notice_file=PREEMPTED_FILE,
        connect_s=left_s,
    )


def let_go(machines: list[Machine]) -> None:
    """Close what leads to machines that are gone."""
    for machine in machines:
        if isinstance(machine.handle, remote.RemoteNodeHandle):
            machine.handle.connection.close()


def _place(host: Host, keys: tuple[str, ...]) -> remote.Place:
    # An address may be another machine's tomorrow, an id never is.
    pinned = HostKeys(policy="pin", file=host.known_hosts, alias=host.instance.id)
    target = SSHTarget(
        host=host.address,
        port=_PORT,
        user=host.username,
        key_file=host.key_file,
        config_file="none",
        host_keys=HostKeys(policy="given", keys=keys) if keys else pinned,
    )
    return remote.Place(
        target=target,
        private_address=host.instance.private_ip,
        public_address=host.instance.public_ip,
        auth_grace_s=_AUTH_GRACE_S,
    )


def _host_keys(host: Host, deadline: float, stop: threading.Event) -> tuple[str, ...]:
    """Those that the provider vouches for, as long as that holds up nothing: until the machine's sshd answers."""
    while True:
        is_open = _answers(host.address)
        keys = host.ask_host_keys()
        if keys or is_open or time.monotonic() > deadline or stop.wait(_LOOK_S):
            return keys


def _answers(address: str) -> bool:
    # It does not answer yet.
    with contextlib.suppress(OSError), socket.create_connection((address, _PORT), timeout=_PROBE_S):
        return True
    return False


def _in_parallel(actions: list[Callable[[], tuple[str, ...]]]) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = [()] * len(actions)

    def act(at: int) -> None:
        found[at] = actions[at]()

    threads = [threading.Thread(target=act, args=(at,), daemon=True) for at in range(len(actions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(0.5)  # Ctrl-C comes through between two of these
    return found
