"""The contract of an engine: the seam between calls and whatever turns them into results.

There is one engine, `direct`. Only the pool, which makes it, knows its class; everything else above this layer sees
these protocols. An engine without a faster way for waiting callers implements `WaitingCallers` by its ordinary one.
"""

from __future__ import annotations

from typing import Any, Protocol

from ..calls.futures import Future
from ..errors import SkywardError
from ..values.launch import ProcessLaunch
from ..values.machine import Machine, Machines
from ..wire.payloads import Encoded
from .builder import TaskBuilder
from .gang import Gang
from .task_events import TaskCounts
from .tasks import Task

__all__ = ["Engine", "NodeFacts", "Questions", "Streams", "WaitingCallers"]


class NodeFacts(Protocol):
    """Facts about the nodes of an engine. Thread-safe."""

    @property
    def round_trip_s(self) -> float:
        """Longest round trip to a node; 0 on this machine, or before it is measured."""
        ...

    def ranks_per_node(self, launch: ProcessLaunch) -> int:
        """Return the ranks of a gang on each node; "auto": the fewest accelerators of any node, at least 1."""
        ...

    def devices(self, node: int) -> tuple[str, ...]:
        """Return the accelerators that calls see on a node; none while it is down. Nodes may share some."""
        ...

    def agent_pids(self) -> dict[int, int]:
        """Return the process ids of the agents, each on its own machine, by node."""
        ...

    def ask_usage(self, every_s: float) -> None:
        """Ask all nodes for NodeUsage at this interval; 0: stop."""
        ...


class WaitingCallers(Protocol):
    """Let callers that wait at once do the work of a thread of the engine. Thread-safe."""

    def may_pull(self) -> bool:
        """Whether the buffers of a call with a waiting caller may stay in this process's memory (`PulledTask`)."""
        ...

    def stop_pulling(self) -> None:
        """Send all buffers from now on: slots cannot read this process's memory."""
        ...

    def submit(self, task: Task, future: Future[Any], nodes: tuple[int, ...] | None = None) -> None:
        """Submit a task, and perhaps wait for its outcome in this thread for a moment."""
        ...

    def lead(self, task_id: int, future: Future[Any]) -> None:
        """Wait for the outcome of a submitted task in this thread for a moment, if that is faster."""
        ...


class Streams(Protocol):
    """Items to and from running tasks. Thread-safe; nothing happens for a task that has ended."""

    def grant(self, task_id: int, count: int) -> None:
        """Let a generator yield `count` more items."""
        ...

    def send_item(self, task_id: int, lane: int, item: Encoded) -> None:
        """Send an item of an input iterator."""
        ...

    def end_input(self, task_id: int, kind: int, lane: int) -> None:
        """Tell a task that its input iterator has ended (IN_END) or raised (IN_ERROR)."""
        ...

    def close(self, task_id: int) -> None:
        """Close a generator whose reader is gone, or forget it if it was not sent yet."""
        ...

    def close_all(self) -> None:
        """Close all generators. Their readers get PoolClosed."""
        ...


class Questions(Protocol):
    """Questions to running calls. Thread-safe."""

    def call_named(self, name: str) -> int:
        """Return the open call of that name; for an empty name, the only open call that no task has made.

        Raises:
            ControlFailed: there is none.
            UsageError: there are several.
        """
        ...

    def ask(self, call: int, question: bytes, timeout_s: float) -> bytes:
        """Ask a running call, or rank 0 of a gang, and wait for the answer.

        Raises:
            ControlFailed: there is no answer; `is_gone`: the call has ended.
        """
        ...


class Engine(Protocol):
    """Run tasks on machines with agents. Thread-safe. Call `start` once, and `close` at least once."""

    @property
    def nodes(self) -> NodeFacts: ...
    @property
    def leader(self) -> WaitingCallers: ...
    @property
    def streams(self) -> Streams: ...
    @property
    def questions(self) -> Questions: ...
    @property
    def builder(self) -> TaskBuilder: ...

    # Life -----------------------------------------------------------------------------------------------------------

    def start(self, machines: list[Machine], source: Machines) -> None:
        """Connect to all agents. `source`: gives replacements for lost machines.

        Raises:
            Unreachable: an agent does not answer; the links that were opened are closed.
        """
        ...

    @property
    def was_started(self) -> bool:
        """Whether the agents were reached, so that `close` tells them to end."""
        ...

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        """Wait until every call has its outcome or is cancelled. False: the time was up."""
        ...

    def cancel_all(self, reason: SkywardError | None = None) -> None:
        """Fail every open call with `reason`, by default PoolClosed, and stop it where it runs."""
        ...

    def wait_stopped(self) -> bool:
        """Wait for the grace period of cancelled calls. False: some still run, and end with their node."""
        ...

    def close(self) -> None:
        """Tell the agents to end, and fail open calls with PoolClosed. Idempotent."""
        ...

    # Calls ----------------------------------------------------------------------------------------------------------

    def submit(self, task: Task, *, nodes: tuple[int, ...] | None = None) -> None:
        """Submit a task, which gets its outcome by its own methods.

        Args:
            nodes: where it may go; None: any node that is kept for no role.

        Raises:
            PoolClosed
        """
        ...

    def submit_gang(self, gang: Gang) -> None:
        """Start the ranks of a gang once all its nodes have room; its future gets the outcome. Raises PoolClosed."""
        ...

    def cancel(self, task_id: int) -> None:
        """Stop a task wherever it is; nobody gets its outcome. Idempotent."""
        ...

    def cancel_gang(self, gang_id: int) -> None:
        """Stop all ranks of a gang; nobody gets its outcome. Idempotent."""
        ...

    def abandon(self, task_id: int) -> None:
        """Stop a task or a stream soon, in another thread: for finalizers, which may interrupt any code of ours."""
        ...

    # Monitoring -----------------------------------------------------------------------------------------------------

    def counts(self) -> TaskCounts:
        """Return how many slots are busy, and how many calls wait, ended and failed."""
        ...

    def tell_tasks(self, is_heard: bool) -> None:
        """Emit TaskSent and TaskEnded from now on, or stop emitting them."""
        ...
