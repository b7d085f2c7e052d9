"""Turns machines that answer to SSH into nodes, and shuts these down without leaving anything behind.

Used by every provider whose machines are not this one. It launches no machine and terminates none.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
import time
from collections.abc import Callable, Sequence

from ..bootstrap.code import gather
from ..core.interrupts import has_ended, shielded
from ..errors import NodeError, ProviderError, Unreachable
from ..events import Emit
from ..ssh import HostKeys, SSHTarget
from ..ssh.connect import Transport
from ..values.machine import Machine, PoolSpec
from .node_setup import NodeSetup, Orders, Place, RemoteNodeHandle, end_agent
from .rented import Host
from .user_data import LEASE_FILE, PREEMPTED_FILE

_BY_ITSELF_S = 8.0
"""Seconds for a node to exit by itself once it was told to end."""
_PORT = 22
_AUTH_GRACE_S = 60.0
"""Time for a rented machine to accept the pool's key: its sshd may answer before the key is installed."""
_PROBE_S = 2.0
_LOOK_S = 3.0


def bring_up(
    places: Sequence[Place],
    spec: PoolSpec,
    pool: str,
    nodes: Sequence[int],
    emit: Emit,
    *,
    lease_s: float,
    lease_file: str = "",
    notice_file: str = "",
    transport: Transport | None = None,
    connect_s: float | None = None,
) -> list[Machine]:
    """Set up nodes with these indices at these places, in parallel: all of them, or none and an error.

    Machines may still be booting. A lost connection is retried, up to five times per node. Ctrl-C, `spec.stop`, and
    the failure of one node stop the others. When this raises, nothing of the pool runs on any machine that can still
    be reached.

    Args:
        places: the machines, in the order of `nodes`.
        spec: what the pool requests.
        pool: name of the pool.
        nodes: indices of the nodes.
        emit: receives the events of the setup.
        lease_s: seconds after which an agent without contact shuts its node down.
        lease_file: file on the machine that the agent touches whenever its lease is renewed.
        notice_file: file on the machine that appears once the provider announces a preemption.
        transport: SSH transport; None for the first that is installed.
        connect_s: seconds for machines to answer; None for `spec.provision_timeout_s`.

    Raises:
        Unreachable: a machine does not answer, or a command hangs there.
        AuthFailed, HostKeyUnknown, HostKeyChanged: a machine cannot be logged in to.
        BootstrapFailed: the environment could not be built.
        NoCapacity: a machine is smaller than `spec` requests.
        ProviderError: an agent did not start.

    The error is that of the node which failed first, with its index as `node`. Its notes hold the others.
    """
    stop = threading.Event()
    orders = Orders(
        spec=spec,
        pool=pool,
        emit=emit,
        lease_s=lease_s,
        lease_file=lease_file,
        notice_file=notice_file,
        transport=transport,
        connect_s=spec.provision_timeout_s if connect_s is None else connect_s,
        stop=stop,
        code=gather(spec.image) if spec.code is None else spec.code,
        are_prepared=threading.Barrier(len(nodes)),
    )
    ways = [NodeSetup(place, node, orders) for place, node in zip(places, nodes, strict=True)]
    threads = [threading.Thread(target=way.go, name=f"skyward-node-{way.node}", daemon=True) for way in ways]
    try:
        for thread in threads:
            thread.start()
        _join(threads, orders)
        failed = sorted((way for way in ways if way.error is not None), key=lambda way: way.failed_at)
        if failed:
            raise _joined([way.error for way in failed if way.error is not None])
        return [way.machine for way in ways if way.machine is not None]
    except BaseException:
        stop.set()
        orders.are_prepared.abort()
        shielded(lambda: _abandon(ways, threads))
        raise


def _join(threads: list[threading.Thread], orders: Orders) -> None:
    """Wait until all nodes are set up or have failed. If the pool ends meanwhile, stop them."""
    for thread in threads:
        while not has_ended(thread):
            if orders.spec.stop.is_set():
                orders.stop.set()
                orders.are_prepared.abort()


def _abandon(ways: list[NodeSetup], threads: list[threading.Thread]) -> None:
    for thread in threads:
        if thread.ident is not None:
            thread.join()
    _in_parallel([way.abandon for way in ways])


def _joined(errors: list[BaseException]) -> BaseException:
    first, *others = errors
    for other in others:
        if not (isinstance(other, Unreachable) and other.was_stopped):
            first.add_note(f"and: {other}")
    return first


def end(machines: Sequence[Machine]) -> list[Machine]:
    """Wait until nodes that were told to end have exited, kill the rest, and close the connections.

    Returns the machines that could not be reached: their watchdogs shut them down when their leases expire.
    """
    unreached: list[Machine] = []

    def end_one(machine: Machine) -> None:
        node: RemoteNodeHandle = machine.handle
        try:
            end_agent(node, _BY_ITSELF_S)
        except (NodeError, ProviderError, OSError):
            unreached.append(machine)
        finally:
            node.connection.close()

    shielded(lambda: _in_parallel([functools.partial(end_one, machine) for machine in machines]))
    return unreached


def _in_parallel(actions: Sequence[Callable[[], object]]) -> None:
    threads = [threading.Thread(target=action, daemon=True) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        while not has_ended(thread):
            continue


# Rented machines ------------------------------------------------------------------------------------------------------


def bring_up_rented(hosts: list[Host], spec: PoolSpec, pool: str, nodes: list[int], emit: Emit) -> list[Machine]:
    """Start agents on all hosts, or on none and raise; see `bring_up`."""
    deadline = time.monotonic() + spec.provision_timeout_s
    keys: dict[int, tuple[str, ...]] = {}

    def fetch_keys(host: Host) -> None:
        keys[host.node] = _host_keys(host, deadline, spec.stop)

    _in_parallel([functools.partial(fetch_keys, host) for host in hosts])
    left_s = max(1.0, deadline - time.monotonic())
    return bring_up(
        [_place(host, keys.get(host.node, ())) for host in hosts],
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
    """Close the connections to machines that are gone."""
    for machine in machines:
        if isinstance(machine.handle, RemoteNodeHandle):
            machine.handle.connection.close()


def _place(host: Host, keys: tuple[str, ...]) -> Place:
    # Pinned by instance id and not by address: tomorrow another machine may have the address, but never the id.
    pinned = HostKeys(policy="pin", file=host.known_hosts, alias=host.instance.id)
    target = SSHTarget(
        host=host.address,
        port=_PORT,
        user=host.username,
        key_file=host.key_file,
        config_file="none",
        host_keys=HostKeys(policy="given", keys=keys) if keys else pinned,
    )
    return Place(
        target=target,
        private_address=host.instance.private_ip,
        public_address=host.instance.public_ip,
        auth_grace_s=_AUTH_GRACE_S,
    )


def _host_keys(host: Host, deadline: float, stop: threading.Event) -> tuple[str, ...]:
    """Fetch the host keys that the provider vouches for. Gives up once sshd answers, so that it never adds a delay."""
    while True:
        is_open = _answers(host.address)
        keys = host.ask_host_keys()
        if keys or is_open or time.monotonic() > deadline or stop.wait(_LOOK_S):
            return keys


def _answers(address: str) -> bool:
    # An OSError means that sshd is not up yet.
    with contextlib.suppress(OSError), socket.create_connection((address, _PORT), timeout=_PROBE_S):
        return True
    return False
