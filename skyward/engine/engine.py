"""Contract of an engine: the seam between calls and the code that turns them into results.

There are two engines: `direct`, and `hosted`, whose scheduler runs in a head. Only the pool, which creates one, knows
its class. Everything else above this layer sees these protocols. An engine without a fast path for waiting callers
implements `WaitingCallers` with its ordinary path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ..calls.futures import Future
from ..console.activity import ActorWork, RunningTask
from ..errors import SkywardError
from ..schedule.resources import Need
from ..schedule.scaling import Demand
from ..shared.messages import StoreRequest
from ..values.devices import Device, NodeResources
from ..values.machine import Machine, Machines
from ..values.ref import Ref
from ..wire.payloads import Encoded
from ..wire.task_channel import TaskChannel
from .builder import TaskBuilder
from .gang import Gang
from .live_actor import LiveActor
from .task_events import TaskCounts
from .tasks import Task

if TYPE_CHECKING:
    from ..values.launch_facts import GangLaunch


class NodeFacts(Protocol):
    """Facts about the nodes of an engine. Thread-safe."""

    @property
    def round_trip_s(self) -> float:
        """Longest round trip to a node; 0 on this machine, or before it is measured."""
        ...

    def refusal(self, nodes: tuple[int, ...] | None, need: Need | None, count: int) -> str:
        """Return why this number of nodes can never hold a need; "" if they can, or if a node is not known yet."""
        ...

    def ranks_per_node(self, launch: GangLaunch) -> int:
        """Return the number of ranks per node; for "auto", the fewest accelerators of any node, and at least 1."""
        ...

    def devices(self, node: int) -> tuple[Device, ...]:
        """Return the accelerators that calls see on a node; none while it is down. Nodes can share accelerators."""
        ...

    def resources(self, node: int) -> NodeResources | None:
        """Return what the calls of a node share; None while it is down."""
        ...

    def agent_pids(self) -> dict[int, int]:
        """Return the process ids of the agents, each on its own machine, by node."""
        ...

    def ask_usage(self, every_s: float) -> None:
        """Ask all nodes for NodeUsage at this interval; 0: stop."""
        ...


class PoolMembers(Protocol):
    """Nodes that come and go while the engine runs. Thread-safe. Nodes that are not there, and may come, rest."""

    keeps: Callable[[int], bool]
    """Tells whether something of the user's lives on a node beyond its calls. Such a node is in use."""

    @property
    def there(self) -> tuple[int, ...]:
        """Nodes that take calls, or are being replaced, in order."""
        ...

    @property
    def last(self) -> frozenset[int]:
        """Nodes that others depend on, so that they are given back last, and alone: the one with the head."""
        ...

    @property
    def is_idle(self) -> bool:
        """Return whether there is no open call, and no node keeps anything."""
        ...

    def demand(self) -> Demand:
        """Return the work by node, and the work that waits."""
        ...

    def expect(self, nodes: Iterable[int], slots: int) -> None:
        """Register nodes that are not there yet. Calls may name them, and then wait for them."""
        ...

    def join(self, machines: Sequence[Machine]) -> None:
        """Connect to the agents of resting nodes and use them: all of them, or none and raise.

        Raises:
            Unreachable: An agent does not answer.
            PoolClosed: The engine was closed meanwhile.
        """
        ...

    @property
    def leaving(self) -> frozenset[int]:
        """Nodes that get no new calls, because they will be given back."""
        ...

    def leave(self, node: int) -> None:
        """Send a node no new calls, so that it can be given back when those that run there have ended."""
        ...

    def stay(self, count: int) -> int:
        """Keep nodes that are leaving: those that waiting calls name, and others up to `count`. Returns how many."""
        ...

    def move_values(self, node: int) -> object:
        """Move the values that stay on a node to others, so that it can be given back. Call it until that succeeds."""
        ...

    def give_back(self, node: int) -> bool:
        """Stop using a node, and let its agent end. Returns False, and changes nothing, if the node is in use."""
        ...

    def refuse_resting(self, slots: int) -> None:
        """Fail the waiting calls that only resting nodes could run, because there are none to be had."""
        ...


class WaitingCallers(Protocol):
    """Fast path for callers that wait at once: they do the work of an engine thread themselves. Thread-safe."""

    def may_pull(self, _: int = 0) -> bool:
        """Tell whether the buffers of a waiting caller's call may stay in this process's memory (`PulledTask`)."""
        ...

    def may_hold(self, size: int) -> bool:
        """Tell whether copies of that many bytes may stay in this process's memory for a future (`HeldTask`)."""
        ...

    def stop_pulling(self) -> None:
        """Send all buffers from now on, because slots cannot read this process's memory."""
        ...

    def submit(self, task: Task, future: Future[Any], nodes: tuple[int, ...] | None = None) -> None:
        """Submit a task. If that is faster, wait briefly for its outcome in the calling thread."""
        ...

    def lead(self, task_id: int, future: Future[Any]) -> None:
        """Wait briefly for the outcome of a submitted task in the calling thread, if that is faster."""
        ...


class Streams(Protocol):
    """Items to and from running tasks. Thread-safe; nothing happens for a task that has ended."""

    @property
    def tells_each_item(self) -> bool:
        """Return whether a reader grants more with each item, so that another client can continue exactly there."""
        ...

    def grant(self, task_id: int, count: int) -> None:
        """Let a generator yield `count` more items."""
        ...

    def send_item(self, task_id: int, lane: int, item: Encoded) -> None:
        """Send an item of an input iterator."""
        ...

    def end_input(self, task_id: int, kind: int, lane: int) -> None:
        """Report to a task that its input iterator has ended (`kind` is IN_END) or raised (IN_ERROR)."""
        ...

    def close(self, task_id: int) -> None:
        """Close a generator whose reader is gone. Forget it if it was not sent yet."""
        ...

    def close_all(self) -> None:
        """Close all generators. Their readers get PoolClosed."""
        ...


class Questions(Protocol):
    """Questions to running calls. Thread-safe."""

    def call_named(self, name: str) -> int:
        """Return the number of the open call of that name; for an empty name, the only call outside of tasks.

        Raises:
            ControlFailed: There is no such call.
            UsageError: There are several.
        """
        ...

    def ask(self, call: int, question: bytes, timeout_s: float) -> bytes:
        """Ask a running call, or rank 0 of a gang, and wait for the answer.

        Raises:
            ControlFailed: There is no answer. `is_gone` is set if the call has ended.
        """
        ...


class Values(Protocol):
    """Values that stay on nodes. Thread-safe."""

    def put(self, payload: Encoded, nodes: tuple[int, ...]) -> Ref[Any]:
        """Make a reference of a packed value, and send its blobs to `nodes`.

        Raises:
            PoolClosed: The pool is closed.
            UsageError: There is no room to send a blob.
        """
        ...


class ActorEnds(Protocol):
    """Actors of the pool. Thread-safe."""

    find: Callable[[str], Encoded]
    """Packs the handle of a named actor, for tasks. Set by the pool. Raises UsageError if there is none."""

    def start(self, actor: LiveActor) -> None:
        """Make an actor. Its future is settled when its constructor has returned, or has failed.

        Raises:
            PoolClosed: The pool is closed.
        """
        ...

    def close(self, number: int, *, cancel: bool = False) -> None:
        """Begin to end an actor: its calls, its exit hook, its process. `cancel`: only its process. Idempotent."""
        ...

    def forget(self, number: int) -> None:
        """Close an actor soon, in another thread. For finalizers, which can run while the ledger is locked."""
        ...

    def close_all(self) -> None:
        """Begin to end all actors."""
        ...

    def work(self) -> tuple[ActorWork, ...]:
        """Return the actors that were made, or wait for a node, with the number of their calls."""
        ...


class Channels(Protocol):
    """Channels that tasks open to this program. Thread-safe."""

    def accept(self, name: str, timeout_s: float | None) -> TaskChannel:
        """Wait for a channel of that name that nobody has accepted yet, the oldest first.

        Raises:
            TimeoutError: None was opened in time.
            PoolClosed: The engine was closed.
        """
        ...


class SharedStore(Protocol):
    """Shared state of the pool, as the program sees it. Thread-safe."""

    def ask(self, request: StoreRequest) -> Any:
        """Carry out a request of the program, and return its value.

        Raises:
            TimeoutError: It could not be done in time, and was not.
            PoolClosed: The pool was closed.
            Exception: The error of the request.
        """
        ...

    async def ask_async(self, request: StoreRequest) -> Any:
        """Carry out a request while the event loop does other work."""
        ...


class Engine(Protocol):
    """Run tasks on machines with agents. Thread-safe. Call `start` once, and `close` at least once."""

    @property
    def nodes(self) -> NodeFacts: ...
    @property
    def members(self) -> PoolMembers: ...
    @property
    def leader(self) -> WaitingCallers: ...
    @property
    def streams(self) -> Streams: ...
    @property
    def questions(self) -> Questions: ...
    @property
    def channels(self) -> Channels: ...
    @property
    def shared(self) -> SharedStore: ...
    @property
    def values(self) -> Values: ...
    @property
    def actors(self) -> ActorEnds: ...
    @property
    def builder(self) -> TaskBuilder: ...

    # Life -----------------------------------------------------------------------------------------------------------

    def start(self, machines: list[Machine], source: Machines) -> None:
        """Connect to all agents.

        Args:
            machines: The machines of the pool's nodes.
            source: Source of replacements for lost machines.

        Raises:
            Unreachable: An agent does not answer. All links are closed again.
        """
        ...

    @property
    def carrier(self) -> Literal["direct", "ray"]:
        """Carrier of the calls now: connections of this program, or Ray between the nodes."""
        ...

    @property
    def was_started(self) -> bool:
        """Return whether the agents were reached, so that `close` has to stop them."""
        ...

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        """Wait until every call has its outcome or is cancelled. Return False on timeout."""
        ...

    def cancel_all(self, reason: SkywardError | None = None) -> None:
        """Fail every open call with `reason` (PoolClosed by default), and stop it where it runs."""
        ...

    def fail_waiting(self, error: SkywardError) -> None:
        """Fail every open call with `error`. There are no nodes, so none of them runs."""
        ...

    def wait_stopped(self) -> bool:
        """Wait for cancelled calls during their grace period. Return False if some still run."""
        ...

    def close(self) -> None:
        """Stop the agents, and fail open calls with PoolClosed. Idempotent."""
        ...

    # Calls ----------------------------------------------------------------------------------------------------------

    def submit(self, task: Task, *, nodes: tuple[int, ...] | None = None, after_s: float = 0.0) -> None:
        """Submit a task. The engine reports its outcome by calling the task's methods.

        Args:
            task: The task.
            nodes: Nodes that may run it; None: any node without a role.
            after_s: Seconds to wait before it may go to a node. It is open meanwhile, and can be cancelled.

        Raises:
            PoolClosed: The pool is closed.
        """
        ...

    def submit_gang(self, gang: Gang) -> None:
        """Start the ranks of a gang once all its nodes have room. Its future gets the outcome.

        Raises:
            PoolClosed: The pool is closed.
        """
        ...

    def cancel(self, task_id: int) -> None:
        """Stop a task wherever it is, and drop its outcome. Idempotent."""
        ...

    def cancel_gang(self, gang_id: int) -> None:
        """Stop all ranks of a gang, and drop its outcome. Idempotent."""
        ...

    def abandon(self, task_id: int) -> None:
        """Stop a task or a stream soon, in another thread. For finalizers, which can run while the ledger is locked."""
        ...

    # Monitoring -----------------------------------------------------------------------------------------------------

    def counts(self) -> TaskCounts:
        """Return how many slots are busy, and how many calls wait, ended and failed."""
        ...

    def why_waiting(self, call: int) -> str:
        """Return why a call has not begun, in one sentence; "" if it has. Raises nothing, and waits seconds at most."""
        ...

    def running(self) -> tuple[RunningTask, ...]:
        """Return the tasks that fill the slots of the nodes, with the progress lines they show."""
        ...

    def tell_tasks(self, is_heard: bool) -> None:
        """Emit TaskSent and TaskEnded from now on, or stop emitting them."""
        ...
