"""A gang on the client's side: its ranks start together, and fail or succeed as one."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from ..calls.futures import Future
from ..calls.options import CallOptions
from ..core.printable import printable
from ..errors import GangHung, RendezvousFailed, TaskTimeout
from ..values.launch import ProcessLaunch
from ..values.topology import Peer, Rank
from ..wire.payloads import Encoded
from ..wire.tasks import TaskHead
from .devices import are_shared
from .hangs import Hang, Late
from .tasks import Loss, Received, Task, TaskFailure, WireFunction, loss_error

__all__ = ["Gang", "RankTask", "class_name", "make_ranks"]

_FAIL_AGAIN = (
    "ArgumentNotPicklable",
    "MissingDependency",
    "PayloadNotLoadable",
    "ResultNotPicklable",
    "TaskTimeout",
    "UsageError",
)
"""Errors that another start would end with too; one has cost the whole training already."""

_OF_ANOTHER = "RankFailed"
"""Of `skyward.training`, which this layer does not know."""

_ADVICE = re.compile(r"\. (?:The pool goes on|Give the call)")


@dataclass(eq=False, kw_only=True)
class Gang:
    """One gang call. `nodes` None: any one node of `one_of`, or of those that are kept for no role.

    `future` gets a list, one value for each node, or one value.
    """

    id: int
    name: str
    launch: ProcessLaunch
    launch_bytes: bytes
    function: WireFunction
    payload: Encoded
    head: TaskHead
    options: CallOptions
    nodes: tuple[int, ...] | None
    one_of: tuple[int, ...] | None = None
    ranks_per_node: int
    future: Future[Any]
    retries_left: int = 0
    """Further starts after the loss of a process or node, or after what `retry_on` names."""
    restarts_left: int = 0
    """Further starts after any other failure, but what would fail again."""
    placed: tuple[int, ...] = ()
    port: int = 0
    tasks: dict[int, RankTask] = field(default_factory=dict)
    open: set[int] = field(default_factory=set)
    values: dict[int, Received] = field(default_factory=dict)
    failures: list[tuple[float, int, BaseException | TaskFailure]] = field(default_factory=list)
    """(when it happened on its node, rank, error as it came), in the order they arrived."""
    is_stopping: bool = False
    is_cancelled: bool = False
    is_final: bool = False
    """It cannot be started again: nodes that it needs are gone for good."""
    port_retries: int = 1
    hang: Hang | None = None
    """What was found of a hang in this start."""
    late: Late | None = None
    """Set when the time of this start is up."""
    is_nested: bool = False
    """A task has called it."""
    parent: int | None = None
    """That task, or the gang that it is a rank of."""
    past: list[str] = field(default_factory=list)
    """Of each start that failed before this one: why, in a line."""

    @property
    def is_complete(self) -> bool:
        return len(self.values) == (1 if self.nodes is None else len(self.placed))

    def value(self) -> Any:
        """What the caller gets: of each node, the value of its first rank."""
        firsts = [self.values[rank].decode() for rank in sorted(self.values)]
        return firsts[0] if self.nodes is None else firsts

    def wait_shown(self) -> None:
        """Wait a moment until what its ranks printed is shown."""
        for task in self.tasks.values():
            if task.shown is not None:
                task.shown()

    def cause(self) -> tuple[int, BaseException | TaskFailure]:
        """The rank that failed first, and how.

        Ranks fail because one failed: the first by the clock of its node is the cause, and a rank whose process was
        killed is a cause before all that raised or aborted. `RankFailed` only says that another rank has failed.
        """
        own = [failure for failure in self.failures if class_name(failure[2]) != _OF_ANOTHER]
        _, rank, error = min(own or self.failures, key=lambda failure: failure[0])
        return rank, error

    def raise_error(self) -> NoReturn:
        """Raise the cause, with the other failures as notes. To be called once: notes are added."""
        rank, came = self.cause()
        error = _exception(came)
        others = sorted(((r, e) for _, r, e in self.failures if r != rank), key=lambda other: other[0])
        if isinstance(error, GangHung | TaskTimeout):
            error.add_note("All ranks were stopped.")
        elif self.launch.is_gang and len(self.tasks) > 1:
            error.add_note(f"Rank {rank} of {len(self.tasks)} failed first; the other ranks were stopped.")
        for other_rank, other in others:
            error.add_note(f"Rank {other_rank} then: {_one_line(other)}")
        if self.past:
            starts = "\n".join(f"  {number}: {why}" for number, why in enumerate([*self.past, "this error"], start=1))
            error.add_note(f"The gang was started {len(self.past) + 1} times:\n{starts}")
        raise error

    # Starting again -------------------------------------------------------------------------------------------------

    def spend_restart(self) -> bool:
        """Whether it is started again after the failures it has; if so, one of what allows it is used up."""
        if self.is_final:
            return False
        if self.port_retries > 0 and any(class_name(e) == RendezvousFailed.__name__ for _, _, e in self.failures):
            self.port_retries -= 1
            return True
        _, came = self.cause()
        name = class_name(came)
        is_wanted = name in ("SlotLost", "NodeLost", "Preempted")
        if self.retries_left > 0 and not is_wanted and self.options.retry_on:  # only then is it unpickled here
            is_wanted = isinstance(_exception(came), self.options.retry_on)
        if self.retries_left > 0 and is_wanted:
            self.retries_left -= 1
            return True
        if self.restarts_left > 0 and name not in _FAIL_AGAIN:
            self.restarts_left -= 1
            return True
        return False

    def reset(self) -> None:
        """Before it is started again."""
        rank, came = self.cause()
        # Without what could be done about it: it is done.
        self.past.append(f"rank {rank}: {_ADVICE.split(_one_line(came))[0]}")
        self.tasks, self.open, self.values = {}, set(), {}
        self.failures, self.is_stopping, self.port, self.placed, self.hang = [], False, 0, (), None
        self.late = None


def _exception(came: BaseException | TaskFailure) -> BaseException:
    return came.error() if isinstance(came, TaskFailure) else came


def class_name(came: BaseException | TaskFailure) -> str:
    """Of the exception, without unpickling it: that is for the caller's thread."""
    return came.failure.type_name.rpartition(".")[2] if isinstance(came, TaskFailure) else type(came).__name__


def _one_line(came: BaseException | TaskFailure) -> str:
    message = came.failure.message if isinstance(came, TaskFailure) else str(came)
    return printable(f"{class_name(came)}: {(message.splitlines() or [''])[0]}")


def make_ranks(
    gang: Gang, peers: dict[int, Peer], devices: dict[int, tuple[str, ...]], interfaces: dict[int, str]
) -> list[Rank]:
    """The ranks of a gang that was placed: node by node, so a node's ranks are neighbours."""
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
            accelerators=len(devices[peer.node]),
            shares_devices=shares_devices,
            peers=members,
            interface=interfaces[peer.node],
            restart_count=len(gang.past),
        )
        for node_rank, peer in enumerate(members)
        for local_rank in range(local)
    ]


@dataclass(eq=False, kw_only=True)
class RankTask(Task):
    """One rank. It reports to its gang through the engine."""

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
            # Frameworks abort a process when another one is gone: that death counts from its time.
            at = loss.at if loss.signal == signal.SIGABRT else 0.0
            self.gang.failures.append((at, self.rank, error))
        self.ended(self)
