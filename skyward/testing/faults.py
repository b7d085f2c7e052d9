"""Fault injection: kill processes of a pool, and see that your code copes.

Only processes of the given pool are touched. Each one is found by a walk down from the pool's own agent, is held by a
pidfd, and is checked again before it gets a signal.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable

from ..core.process import processes_below
from ..errors import UsageError
from ..pool.pool import ComputePool

_POLL_S = 0.01
_DEATH_LIMIT_S = 5.0


class Faults:
    """Kill processes of one open pool on this machine (Linux).

    A pool continues after each of these faults: a node replaces a dead slot, and the pool replaces a dead node. Calls
    that ran there raise SlotLost or NodeLost, or run again with `retries=`.

    Args:
        pool: an open pool of `sky.Local()`, opened by this process.

    Example:
        >>> import skyward as sky
        >>> from skyward.testing import Faults
        >>> with sky.ComputePool(sky.Local(), nodes=2) as pool:
        ...     pid = Faults(pool).kill_slot(node=1)
        ...     sky.compute(abs)(-1) >> pool
        1
    """

    def __init__(self, pool: ComputePool) -> None:
        self.pool = pool

    def agent(self, node: int = 0) -> int:
        """Return the process id of a node's agent.

        Args:
            node: number of the node.

        Raises:
            UsageError: the node is not up, or not on this machine.
        """
        agents = self.pool.agent_pids()
        if node not in agents:
            up = ", ".join(map(str, sorted(agents))) or "none"
            raise UsageError(f"node={node!r}: not up; use one of the nodes that are: {up}")
        if agents[node] not in processes_below(os.getpid()):
            raise UsageError(
                f"node={node}: its agent is not a child of this process; "
                "use a pool of sky.Local() on Linux, in the process that opened it"
            )
        return agents[node]

    def slots(self, node: int = 0) -> list[int]:
        """Return the process ids of the node's slots, and of ranks that run there, lowest first.

        Args:
            node: number of the node.

        Raises:
            UsageError: the node is not up, or not on this machine.
        """
        # The children of an agent are zygotes, and their children are slots. Processes of user code are further down.
        agent = self.agent(node)
        parents = {pid: _living_parent(pid) for pid in processes_below(agent)}
        return sorted(pid for pid, parent in parents.items() if parent in parents and parents[parent] == agent)

    def kill_slot(self, node: int = 0, *, pid: int | None = None, number: int = signal.SIGKILL) -> int:
        """Send a signal to a slot of the node, and return its process id.

        Args:
            node: number of the node.
            pid: the slot, as `os.getpid()` in a call returned it; None: any slot.
            number: the signal: SIGKILL, as from the out-of-memory killer, or SIGSEGV, as from a broken C extension.

        Raises:
            UsageError: the node has no such slot.
        """
        self.wait_until_whole()  # slots start while a pool opens, and again after a fault
        slots = self.slots(node)
        if not slots or (pid is not None and pid not in slots):
            raise UsageError(f"pid={pid!r}: not a slot of node {node}; use one of {slots}, or None")
        chosen = slots[0] if pid is None else pid
        _send(chosen, number, is_still=lambda: chosen in self.slots(node))
        return chosen

    def kill_node(self, node: int = 0) -> int:
        """Kill the node's agent, and with it everything on the node; return the agent's process id.

        Args:
            node: number of the node.

        Raises:
            UsageError: the node is not up, or not on this machine.
        """
        agent = self.agent(node)
        _send(agent, signal.SIGKILL, is_still=lambda: self.agent(node) == agent)
        return agent

    def is_whole(self) -> bool:
        """Return whether all nodes are up with all their slots."""
        slots = self.pool.concurrency if self.pool.spec.executor == "process" else 1
        try:
            return all(len(self.slots(node)) >= slots for node in range(self.pool.nodes))
        except UsageError:  # a node is down
            return False

    def wait_until_whole(self, timeout_s: float = 30.0) -> None:
        """Wait until the pool has replaced everything that was lost.

        Args:
            timeout_s: longest wait, in seconds.

        Raises:
            TimeoutError: the pool is not complete within `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while not self.is_whole():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.pool!r}: is still incomplete after {timeout_s:g} s; raise timeout_s")
            time.sleep(_POLL_S)


def _living_parent(pid: int) -> int | None:
    """Return the parent of a process; None if it has ended, even if its parent has not collected it yet."""
    try:
        with open(f"/proc/{pid}/status") as file:
            status = dict(line.split(":\t", 1) for line in file if ":\t" in line)
    except OSError:  # no such process
        return None
    return None if status["State"].startswith("Z") else int(status["PPid"])


def _send(pid: int, number: int, *, is_still: Callable[[], bool]) -> None:
    """Send the signal to exactly the process that was found, and wait for a SIGKILL to take effect.

    The pidfd is opened first and the process checked again afterwards, because its number may belong to another one.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:  # it has ended already
        return
    try:
        if is_still():
            signal.pidfd_send_signal(descriptor, number)
            if number == signal.SIGKILL:
                select.select([descriptor], [], [], _DEATH_LIMIT_S)
    except ProcessLookupError:  # it has ended already
        return
    finally:
        os.close(descriptor)
