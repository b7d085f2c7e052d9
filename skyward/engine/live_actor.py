"""Record that the client keeps of an actor: its place, its calls in order, and the line to its process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import field
from typing import Any, Literal

from ..calls.futures import Future
from ..console.activity import ActorWork
from ..core.records import dataclass
from ..schedule.resources import Need
from ..values.devices import Grant
from ..wire.tasks import CallKind, actor_place
from .builder import PackedCall, TaskBuilder
from .link import LineEnd
from .tasks import Loss, Received, Task, TaskFailure

StepEnd = Callable[[BaseException | TaskFailure | None], object]
"""Function that gets the error of a step, which may be as it arrived, or None."""


@dataclass(eq=False, kw_only=True)
class StepTask(Task):
    """Constructor or exit hook of an actor."""

    done: StepEnd

    def on_result(self, received: Received) -> None:
        self.done(None)

    def on_error(self, failed: TaskFailure) -> None:
        self.done(failed)

    def on_failed(self, error: BaseException) -> None:
        self.done(error)


@dataclass(eq=False, kw_only=True)
class LiveActor(LineEnd):
    """Actor that was made, and neither closed nor lost. Used with the ledger locked."""

    number: int
    name: str
    constructor: PackedCall
    ending: PackedCall
    """Call of the exit hook."""
    lanes: int
    """Calls that its process takes at once."""
    nodes: tuple[int, ...] | None
    """Nodes that it may live on; None: any without a role."""
    need: Need | None = None
    """Resources that it books for its life; None if it asks for none."""
    gpus: float | None = None
    """Number of devices that it asks for, such as 0.25."""
    cpus: float | None = None
    """Processors that it asks for."""
    memory_gib: float | None = None
    """Memory that it asks for."""
    grant: Grant | None = None
    """Part of its node that it may use; None for all of it."""
    has_process: bool = False
    """Whether a process was ordered for it, and its end not yet reported."""
    max_restarts: int
    restarts_left: int
    tell: Callable[[int, int, int, bytes], None] = lambda node, kind, ident, body: None
    """Queues a frame for the agent of a node. The arguments are the node, the kind, the number and the body."""
    made: Future[Any]
    """Future of the creation."""
    closed: Future[None] = field(default_factory=Future)
    """Future of the end. An error of the exit hook is its error."""
    end_failure: BaseException | TaskFailure | None = None
    node: int | None = None
    """Node that it lives on; None while it waits for one."""
    moved: Callable[[int | None], object] = lambda node: None
    """Called with the node whenever that changes."""
    is_made: bool = False
    """Whether its constructor has returned, in the present process."""
    is_closing: bool = False
    is_forgotten: bool = False
    """Whether nobody can call it any longer."""
    gone: Loss | None = None
    """Death of its process, while the outcome of the call on its line is still unknown."""
    waiting: deque[Task] = field(default_factory=deque)
    """Calls that were not sent."""
    sent: dict[int, Task] = field(default_factory=dict)
    unbegun: set[int] = field(default_factory=set)
    """Sent calls that a dead process had not begun."""

    def __post_init__(self) -> None:
        LineEnd.__init__(self)

    @property
    def work(self) -> ActorWork:
        """State of the actor and the number of its open calls."""
        calls = sum(not isinstance(task, StepTask) for task in (*self.waiting, *self.sent.values()))
        if self.node is None:
            return ActorWork(name=self.name, node=None, state="waiting", calls=calls)
        state: Literal["starting", "alive", "closing"] = "closing" if self.is_closing else "starting"
        if self.is_made and not self.is_closing:
            state = "alive"
        return ActorWork(name=self.name, node=self.node, state=state, calls=calls)

    def tell_agent(self, kind: int, ident: int, body: bytes = b"") -> None:
        assert self.node is not None
        self.tell(self.node, kind, ident, body)

    def step(self, builder: TaskBuilder, call: PackedCall, done: StepEnd) -> StepTask:
        """Make the task of the constructor, or of the exit hook."""
        return builder.task(
            StepTask, builder.next_id(), call, CallKind.ACTOR, actor_place(self.number), actor=self.number, done=done
        )
