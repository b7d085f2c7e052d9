"""Gangs on the client's side: their ranks start together, and succeed or fail as one."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import field
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from ..calls.futures import Future
from ..calls.options import CallOptions
from ..core.printable import printable
from ..core.records import dataclass
from ..errors import GangHung, RendezvousFailed, TaskTimeout
from ..values.devices import Grant, share, shared_view
from ..values.launch import RankValues
from ..values.topology import Peer, Rank
from ..wire.payloads import Encoded
from ..wire.tasks import TaskHead
from .devices import are_shared
from .retries import Retries, has_retry_on, is_retried_on
from .tasks import Loss, Received, Task, TaskFailure, WireFunction, loss_error

if TYPE_CHECKING:
    from ..values.launch_facts import GangLaunch
    from .hangs import Hang, Late

_FAIL_AGAIN = (
    "ArgumentNotPicklable",
    "MissingDependency",
    "OutOfMemory",
    "PayloadNotLoadable",
    "ResultNotPicklable",
    "TaskTimeout",
    "UsageError",
)
"""Errors that every restart would repeat, at the cost of the whole training."""

_OF_ANOTHER = "RankFailed"
"""Error of `skyward.training` that means that another rank failed. Compared by name, because this layer must not import
that package.
"""

BEFORE_THIS_HEAD = "with an earlier head of the pool"
"""Reason of a start's failure that only a head knew that is gone."""

_ADVICE = re.compile(r"(?: \(the pool continues\))?; set (?:retries|max_restarts)=")


@dataclass(eq=False, kw_only=True)
class Gang:
    """Gang call.

    It runs on all of `nodes`, and then `future` gets a list of values. If `nodes` is None, it runs on any `count` nodes
    of `some_of`, or of those without a role if that is None too. Without a `count` it runs on one of them, and `future`
    gets one value. `launch.returns` chooses the ranks; the value of all ranks of one node is a list, too.
    """

    id: int
    name: str
    launch: GangLaunch
    launch_bytes: bytes
    function: WireFunction
    payload: Encoded
    head: TaskHead
    options: CallOptions
    nodes: tuple[int, ...] | None
    some_of: tuple[int, ...] | None = None
    count: int | None = None
    ranks_per_node: int
    future: Future[Any]
    retries: Retries
    """Restarts left for lost processes and nodes, and for the errors of `retry_on`."""
    restarts_left: int = 0
    """Restarts left for any other failure, except those that would be repeated."""
    placed: tuple[int, ...] = ()
    port: int = 0
    tasks: dict[int, RankTask] = field(default_factory=dict)
    open: set[int] = field(default_factory=set)
    values: dict[int, Received] = field(default_factory=dict)
    failures: list[tuple[float, int, BaseException | TaskFailure]] = field(default_factory=list)
    """(time by its node's clock, rank, error as it arrived) of each failure, in the order of arrival."""
    is_stopping: bool = False
    is_cancelled: bool = False
    is_final: bool = False
    """Whether nodes that it needs are gone for good, so that it cannot be restarted."""
    port_retries: int = 1
    devices: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Indexes of the devices that are booked for it, by node; all devices of a node that is not in it."""
    hang: Hang | None = None
    """Hang that was detected in this start."""
    late: Late | None = None
    """Set when this start has exceeded its timeout."""
    is_nested: bool = False
    """Whether a task made the call."""
    parent: int | None = None
    """Task that made the call, or the gang that this task is a rank of."""
    past: list[str] = field(default_factory=list)
    """Reason of each earlier start's failure, in one line."""
    world_size: int = 0
    """Number of ranks of a gang that another process has started; 0: that of `tasks`."""

    @property
    def is_on_one(self) -> bool:
        """Return whether the caller gets one value instead of a list."""
        return self.nodes is None and self.count is None

    @property
    def is_complete(self) -> bool:
        return self.values.keys() == {rank for rank, task in self.tasks.items() if task.delivers}

    def delivers(self, rank: int) -> bool:
        """Return whether the caller gets the value of a rank."""
        if self.launch.returns == "ranks":
            return True
        is_of_each_node = self.launch.returns == "nodes" and not self.is_on_one
        return rank % self.ranks_per_node == 0 if is_of_each_node else rank == 0

    def value(self) -> Any:
        """Return the caller's value, made of those of the ranks that deliver."""
        values = [self.values[rank].decode() for rank in sorted(self.values)]
        if self.launch.returns == "ranks":
            return RankValues(chain.from_iterable(values))
        return values[0] if self.is_on_one else values

    def wait_shown(self) -> None:
        """Wait briefly until the output of its ranks is shown."""
        for task in self.tasks.values():
            if task.shown is not None:
                task.shown()

    def cause(self) -> tuple[int, BaseException | TaskFailure]:
        """Return the rank that failed first, and its error.

        One failing rank makes the others fail, so the earliest failure by its node's clock is the cause. A rank whose
        process was killed counts as earlier than ranks that raised or aborted (time 0). `RankFailed` is never the cause
        unless there is nothing else, because it only reports the failure of another rank.
        """
        own = [failure for failure in self.failures if class_name(failure[2]) != _OF_ANOTHER]
        _, rank, error = min(own or self.failures, key=lambda failure: failure[0])
        return rank, error

    def raise_error(self) -> NoReturn:
        """Raise the cause, with the other failures as notes. Call it once, because each call adds notes."""
        error = _exception(self.cause()[1])
        for note in self.notes():
            error.add_note(note)
        raise error

    def notes(self) -> list[str]:
        """Return notes for the error that is the cause: what else happened. Nothing is unpickled."""
        rank, failure = self.cause()
        notes: list[str] = []
        others = sorted(((r, e) for _, r, e in self.failures if r != rank), key=lambda other: other[0])
        if isinstance(failure, GangHung | TaskTimeout):
            notes.append("All ranks were stopped.")
        elif self.launch.is_gang and (ranks := self.world_size or len(self.tasks)) > 1:
            notes.append(f"Rank {rank} of {ranks} failed first; the other ranks were stopped.")
        for other_rank, other in others:
            notes.append(f"Rank {other_rank} then failed: {_one_line(other)}")
        if self.past:
            starts = "\n".join(f"  {number}: {why}" for number, why in enumerate([*self.past, "this error"], start=1))
            notes.append(f"The gang was started {len(self.past) + 1} times:\n{starts}")
        return notes

    # Starting again -------------------------------------------------------------------------------------------------

    def spend_restart(self) -> float | None:
        """Use up one of the allowed restarts after the recorded failures.

        Returns:
            Seconds to wait before the restart; None: it is not restarted.
        """
        if self.is_final:
            return None
        # Bad luck with the port is not the user's failure, so it has an allowance of its own and comes first.
        if self.port_retries > 0 and any(class_name(e) == RendezvousFailed.__name__ for _, _, e in self.failures):
            self.port_retries -= 1
            return 0.0
        _, failure = self.cause()
        name = class_name(failure)
        is_node_loss = name in ("NodeLost", "Preempted")
        is_retryable = is_node_loss or name == "SlotLost"
        if not is_retryable and self.options.retries and has_retry_on(self.options):
            # Only `retry_on` needs the class itself. Otherwise the I/O thread must not unpickle the user's exception.
            is_retryable = (
                is_retried_on(self.options, failure.failure, failure.error)
                if isinstance(failure, TaskFailure)
                else isinstance(failure, self.options.retry_on)
            )
        pause_s = self.retries.spend(is_node_loss=is_node_loss) if is_retryable else None
        if pause_s is None and self.restarts_left > 0 and name not in _FAIL_AGAIN:
            self.restarts_left -= 1
            pause_s = self.retries.next_pause_s()
        return pause_s

    def reset(self) -> None:
        """Clear the state of the failed start before a restart."""
        rank, failure = self.cause()
        # Leave out the advice to allow restarts: this gang has just been allowed one.
        self.past.append(f"rank {rank}: {_ADVICE.split(_one_line(failure))[0]}")
        self.tasks, self.open, self.values = {}, set(), {}
        self.failures, self.is_stopping, self.port, self.placed, self.hang = [], False, 0, (), None
        self.late = None


def _exception(error: BaseException | TaskFailure) -> BaseException:
    return error.error() if isinstance(error, TaskFailure) else error


def class_name(error: BaseException | TaskFailure) -> str:
    """Return the name of the exception's class without unpickling it, which only the caller's thread may do."""
    return error.failure.type_name.rpartition(".")[2] if isinstance(error, TaskFailure) else type(error).__name__


def _one_line(error: BaseException | TaskFailure) -> str:
    message = error.failure.message if isinstance(error, TaskFailure) else str(error)
    return printable(f"{class_name(error)}: {(message.splitlines() or [''])[0]}")


def parts_of_ranks(gang: Gang, booked: tuple[int, ...]) -> list[tuple[Grant, tuple[int, ...]]]:
    """Return the grant of each rank on a node, and the devices that its process sees.

    Args:
        gang: The gang.
        booked: Indexes of its devices on the node.
    """
    local = gang.ranks_per_node
    shares = [share(booked, rank, local) for rank in range(local)]
    everything = shared_view(shares) if gang.launch.sees_neighbours else None
    cpus, memory_gib = gang.options.cpus, gang.options.memory_gib
    grants = [Grant(devices=own, cpus=cpus, memory_gib=memory_gib) for own in shares]
    return [(grant, grant.devices or () if everything is None else everything) for grant in grants]


def make_ranks(
    gang: Gang, peers: dict[int, Peer], devices: dict[int, tuple[str, ...]], interfaces: dict[int, str]
) -> list[Rank]:
    """Return the ranks of a placed gang, numbered node by node, so that a node's ranks are neighbours.

    Args:
        gang: The gang.
        peers: Its nodes.
        devices: Identifiers of its devices on each node.
        interfaces: Network interface of each node.
    """
    members = tuple(peers[node] for node in gang.placed)
    local = gang.ranks_per_node
    shares_devices = are_shared((devices[node] for node in gang.placed), local)
    return [
        Rank(
            rank=node_rank * local + local_rank,
            world_size=len(members) * local,
            local_rank=local_rank,
            local_world_size=local,
            node=peer.node,
            node_rank=node_rank,
            nodes=len(members),
            head_addr=members[0].private_ip,
            head_port=gang.port,
            local_addr=peer.private_ip,
            accelerators=len(visible),
            devices=tuple(visible.index(device) for device in grant.devices or ()),
            shares_devices=shares_devices,
            peers=members,
            interface=interfaces[peer.node],
            restart_count=len(gang.past),
        )
        for node_rank, peer in enumerate(members)
        for local_rank, (grant, visible) in enumerate(parts_of_ranks(gang, tuple(range(len(devices[peer.node])))))
    ]


@dataclass(eq=False, kw_only=True)
class RankTask(Task):
    """Task of one rank, which reports to its gang."""

    handles_loss = True

    gang: Gang
    node: int
    delivers: bool
    ended: Callable[[RankTask], None]
    restart_count: int = 0

    @property
    def call(self) -> tuple[int, int]:
        return self.gang.id, self.restart_count

    def on_result(self, received: Received) -> None:
        assert self.rank is not None
        if self.delivers:
            self.gang.values[self.rank] = received
        self.ended(self)

    def on_error(self, failed: TaskFailure) -> None:
        assert self.rank is not None
        if not failed.failure.is_cancelled:
            self.gang.failures.append((failed.failure.at, self.rank, failed))
        self.ended(self)

    def on_failed(self, error: BaseException) -> None:
        assert self.rank is not None
        self.gang.failures.append((0.0, self.rank, error))
        self.ended(self)

    def on_lost(self, loss: Loss) -> None:
        assert self.rank is not None
        if not self.is_cancelled:
            error = loss_error(loss, f"{self.name} (rank {self.rank})", self.tail, again="max_restarts=1")
            # Frameworks abort a process when a peer is gone, so an abort keeps its time and may be an effect. Any other
            # death gets time 0 and counts as the cause.
            at = loss.at if loss.signal == signal.SIGABRT else 0.0
            self.gang.failures.append((at, self.rank, error))
        self.ended(self)


class StartedRank(NamedTuple):
    """Rank that a node has, as its agent tells the next head."""

    gang: int
    restart_count: int
    rank: int
    world_size: int
    node: int
    nodes: tuple[int, ...]
    """Nodes of the gang, in their order."""
    port: int
    devices: tuple[int, ...] | None
    """Devices of the node that the gang has booked; None: it books none."""

    @classmethod
    def of(cls, task: RankTask) -> StartedRank:
        gang = task.gang
        assert task.rank is not None
        return cls(
            gang.id,
            task.restart_count,
            task.rank,
            len(gang.placed) * gang.ranks_per_node,
            task.node,
            gang.placed,
            gang.port,
            gang.devices.get(task.node),
        )

    @classmethod
    def parse(cls, note: Sequence[Any]) -> StartedRank:
        """Return a rank as an agent tells it: in JSON there are no tuples."""
        rank = cls(*note)
        devices = None if rank.devices is None else tuple(rank.devices)
        return rank._replace(nodes=tuple(rank.nodes), devices=devices)
