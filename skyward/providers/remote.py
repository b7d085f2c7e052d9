"""Machines that answer to SSH become nodes: connected, prepared, an agent started; and in the end nothing is left.

Used by every provider whose machines are not this one. It makes no machine and ends none.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence

from ..bootstrap.code import gather
from ..errors import NodeError, ProviderError, Unreachable
from ..events import Emit
from ..ssh.connect import Transport
from ..values.machine import Machine, PoolSpec
from .node_setup import NodeSetup, Orders, Place, RemoteNodeHandle, end_agent
from .termination import shielded

__all__ = ["RemoteNodeHandle", "Place", "bring_up", "end"]

_BY_ITSELF_S = 8.0
"""Seconds that a node that was told to end gets for it."""


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
    """Nodes with these indices at these places, all at a time; all of them, or none and an error.

    `lease_file`: a file over there that the agent touches whenever its lease is renewed.
    `notice_file`: one that is there once the provider has announced that it takes the machine back.

    Machines may still be booting, for `connect_s`, by default `spec.provision_timeout_s`. A connection that is lost on
    the way is made anew, up to five times for each node. Ctrl-C, `spec.stop`, and the failure of one node, stop the
    others; when this raises, nothing of ours runs on any of them that can still be reached.

    Raises:
        The error of the node that failed first, with its index as `node`, the others in its notes: Unreachable,
        AuthFailed, HostKeyUnknown, HostKeyChanged, BootstrapFailed, NoCapacity where a machine is smaller than `spec`
        asks, ProviderError where the agent does not start.
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
        for thread in threads:
            while thread.is_alive():
                thread.join(0.5)  # Ctrl-C comes through between two of these
                if spec.stop.is_set():
                    stop.set()
                    orders.are_prepared.abort()
        failed = sorted((way for way in ways if way.error is not None), key=lambda way: way.failed_at)
        if failed:
            raise _joined([way.error for way in failed if way.error is not None])
        return [way.machine for way in ways if way.machine is not None]
    except BaseException:
        stop.set()
        orders.are_prepared.abort()
        shielded(lambda: _abandon(ways, threads))
        raise


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
    """Wait until these nodes, which were told to end, have; kill what is left of them, and close the connections.

    Returns those that could not be reached: their watchdogs end them when their leases are over.
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
        thread.join()
