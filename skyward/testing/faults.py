"""Fault injection: kill what a pool stands on, and see that your code copes.

Only processes of the given pool are ever touched: each one is found by walking down from the pool's own agent, is
held by a descriptor, and is checked again before the signal is sent.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable

from ..errors import UsageError
from ..node.agent.watchdog import processes_below
from ..pool.pool import ComputePool

__all__ = ["Faults"]

_POLL_S = 0.01
_DEATH_LIMIT_S = 5.0


class Faults:
    """Kills processes of one open pool on this machine (Linux).

    A pool goes on after each of these faults: a dead slot is replaced by its node, a dead node by the pool. What
    happens to calls that ran there is what the test is about: SlotLost, NodeLost, or another run with `retries=`.

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
        """The process id of the node's agent. Raises UsageError if it is not up, or not on this machine."""
        agents = self.pool.agent_pids()
        if node not in agents:
            raise UsageError(f"node: {node!r}; the nodes that are up are {', '.join(map(str, sorted(agents)))}")
        if agents[node] not in processes_below(os.getpid()):
            raise UsageError(
                f"node: the agent of node {node} is no process below this one; "
                "faults are for pools of sky.Local() on Linux, in the process that opened them"
            )
        return agents[node]

    def slots(self, node: int = 0) -> list[int]:
        """The process ids of the node's slots (and of the ranks that run there), lowest first."""
        # An agent's children are zygotes, and a zygote's children are slots; what user code starts is further down.
        agent = self.agent(node)
        parents = {pid: _living_parent(pid) for pid in processes_below(agent)}
        return sorted(pid for pid, parent in parents.items() if parent in parents and parents[parent] == agent)

    def kill_slot(self, node: int = 0, *, pid: int | None = None, number: int = signal.SIGKILL) -> int:
        """Send a signal to a slot of the node; returns its process id.

        Args:
            pid: which one: what `os.getpid()` said in a call; None: any.
            number: the signal: SIGKILL as the out-of-memory killer sends it, SIGSEGV as a bad C extension does.

        Raises UsageError if the node has no such slot.
        """
        self.wait_until_whole()  # slots are made while a pool opens, and again after a fault
        slots = self.slots(node)
        if not slots or (pid is not None and pid not in slots):
            raise UsageError(f"pid: {pid!r}; the slots of node {node} are {slots}")
        chosen = slots[0] if pid is None else pid
        _send(chosen, number, is_still=lambda: chosen in self.slots(node))
        return chosen

    def kill_node(self, node: int = 0) -> int:
        """Kill the node's agent, and with it all that runs on the node; returns the agent's process id."""
        agent = self.agent(node)
        _send(agent, signal.SIGKILL, is_still=lambda: self.agent(node) == agent)
        return agent

    def is_whole(self) -> bool:
        """Whether all nodes are up with all their slots."""
        slots = self.pool.concurrency if self.pool.spec.executor == "process" else 1
        try:
            return all(len(self.slots(node)) >= slots for node in range(self.pool.nodes))
        except UsageError:  # a node is away
            return False

    def wait_until_whole(self, timeout_s: float = 30.0) -> None:
        """Wait until the pool has replaced what was lost. Raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while not self.is_whole():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.pool!r} was not whole again after {timeout_s:g} s")
            time.sleep(_POLL_S)


def _living_parent(pid: int) -> int | None:
    """None: the process has ended, though its parent may not know yet."""
    try:
        with open(f"/proc/{pid}/status") as file:
            status = dict(line.split(":\t", 1) for line in file if ":\t" in line)
    except OSError:  # no such process
        return None
    return None if status["State"].startswith("Z") else int(status["PPid"])


def _send(pid: int, number: int, *, is_still: Callable[[], bool]) -> None:
    """The signal, to the process that was found and to no other that got its number since; SIGKILL is waited for."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:  # it has ended by itself
        return
    try:
        if is_still():
            signal.pidfd_send_signal(descriptor, number)
            if number == signal.SIGKILL:
                select.select([descriptor], [], [], _DEATH_LIMIT_S)
    except ProcessLookupError:  # it has ended by itself
        return
    finally:
        os.close(descriptor)
