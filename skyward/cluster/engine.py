"""What any engine gives its pool: the seam between calls and whatever turns them into results.

`direct` is the one there is. Everything above this layer knows an engine by these protocols only, but for the pool,
which makes one. What an engine cannot do faster than by its ordinary way (`WaitingCallers`) it does in that.
"""

from __future__ import annotations

from typing import Any, Protocol

from ..errors import SkywardError
from ..futures import Future
from ..launch import Launch
from ..machine import Machine, Machines
from ..wire.payloads import Encoded
from .builder import TaskBuilder
from .gang import Gang
from .tasks import Task
from .telling import TaskCounts

__all__ = ["Engine", "NodeFacts", "Questions", "Streams", "WaitingCallers"]


class NodeFacts(Protocol):
    """What is known of an engine's nodes. Thread-safe."""

    @property
    def round_trip_s(self) -> float:
        """To the node that is farthest away; 0 on this machine, and where it is not known yet."""
        ...

    def ranks_per_node(self, launch: Launch) -> int:
        """Of a gang; "auto": one for each accelerator of the node that has fewest, and one where there are none."""
        ...

    def devices(self, node: int) -> tuple[str, ...]:
        """Names of the accelerators that calls see on one node; two nodes on one machine may share some."""
        ...

    def agent_pids(self) -> dict[int, int]:
        """Of the nodes that are up: the process id of the agent, on its machine."""
        ...

    def ask_usage(self, every_s: float) -> None:
        """From now on each node says how busy it is, as NodeUsage; 0: no more."""
        ...


class WaitingCallers(Protocol):
    """For callers that wait at once: they may do what a thread of the engine would do for them. Thread-safe."""

    def may_pull(self) -> bool:
        """Whether the buffers of a call whose caller waits may stay in this process's memory (`PulledTask`)."""
        ...

    def stop_pulling(self) -> None:
        """Slots cannot read this process's memory: buffers of all further calls travel."""
        ...

    def submit(self, task: Task, future: Future[Any], nodes: tuple[int, ...] | None = None) -> None:
        """`Engine.submit`, and perhaps wait a moment for the outcome in this thread."""
        ...

    def lead(self, task_id: int, future: Future[Any]) -> None:
        """The caller of `Engine.submit` waits now: perhaps wait a moment for the outcome in this thread."""
        ...


class Streams(Protocol):
    """Items to and from tasks that run. Thread-safe; what is about a task that has ended is dropped."""

    def grant(self, task_id: int, count: int) -> None:
        """The reader took `count` items of what a task yields."""
        ...

    def send_item(self, task_id: int, lane: int, item: Encoded) -> None:
        """The next of what the iterator of an argument gives."""
        ...

    def end_input(self, task_id: int, kind: int, lane: int) -> None:
        """The iterator that feeds a task has ended (IN_END) or raised (IN_ERROR)."""
        ...

    def close(self, task_id: int) -> None:
        """The consumer is gone. A generator that was not sent is forgotten, a running one is closed."""
        ...

    def close_all(self) -> None:
        """Stop the generators that run: their readers get PoolClosed."""
        ...


class Questions(Protocol):
    """Questions to a call while it runs. Thread-safe."""

    def call_named(self, name: str) -> int:
        """The open call of that name, or, for an empty one, the only open call but for those that tasks have made.

        Raises: ControlFailed when there is none, UsageError when there are several.
        """
        ...

    def ask(self, call: int, question: bytes, timeout_s: float) -> bytes:
        """The answer of a call, of a gang's rank 0.

        Raises: ControlFailed; `is_gone`: the call has ended.
        """
        ...


class Engine(Protocol):
    """Runs tasks on machines that have agents. Thread-safe. `start` once, `close` once (or more)."""

    @property
    def nodes(self) -> NodeFacts: ...
    @property
    def leading(self) -> WaitingCallers: ...
    @property
    def streams(self) -> Streams: ...
    @property
    def asking(self) -> Questions: ...
    @property
    def builder(self) -> TaskBuilder: ...

    # Life -----------------------------------------------------------------------------------------------------------

    def start(self, machines: list[Machine], source: Machines) -> None:
        """Connect to all agents. `source`: where others come from when some are lost.

        Raises Unreachable; what was connected is closed again.
        """
        ...

    @property
    def was_started(self) -> bool:
        """Whether the agents were reached (and told to end by `close`)."""
        ...

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        """Wait until no outcome is to be told any more. False: the time was up."""
        ...

    def cancel_all(self, reason: SkywardError | None = None) -> None:
        """Fail every open call with `reason`, else PoolClosed, and stop it where it runs."""
        ...

    def wait_stopped(self) -> bool:
        """Give the calls that were cancelled their grace to end. False: some did not, and end with their node."""
        ...

    def close(self) -> None:
        """Tell the agents to end and fail what is still open with PoolClosed. Idempotent."""
        ...

    # Calls ----------------------------------------------------------------------------------------------------------

    def next_id(self) -> int:
        """A number that no other task or gang of this engine has."""
        ...

    def submit(self, task: Task, *, nodes: tuple[int, ...] | None = None) -> None:
        """`nodes`: those that it may go to; None: any that is kept for no role.

        Raises PoolClosed. Everything else is told to the task.
        """
        ...

    def submit_gang(self, gang: Gang) -> None:
        """Start its ranks once all its nodes have room. Raises PoolClosed; everything else is told to its future."""
        ...

    def cancel(self, task_id: int) -> None:
        """Stop a task wherever it is; its outcome is told to nobody. Idempotent."""
        ...

    def cancel_gang(self, gang_id: int) -> None:
        """Stop all its ranks; its outcome is told to nobody. Idempotent."""
        ...

    def abandon(self, task_id: int) -> None:
        """Stop a task or a stream soon, by another thread: for finalizers, which may run within anything of ours."""
        ...

    # For those who look ---------------------------------------------------------------------------------------------

    def counts(self) -> TaskCounts:
        """How much is going on."""
        ...

    def tell_tasks(self, is_heard: bool) -> None:
        """Whether TaskSent and TaskEnded are emitted, from now on."""
        ...
