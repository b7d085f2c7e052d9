"""Tasks, gangs and futures of the client's calls in a head. Everything that happens to them goes to the client."""

from __future__ import annotations

import threading
from typing import Any, ClassVar, Protocol

from ...calls.futures import Future
from ...core.records import dataclass
from ...wire.frames import FrameKind
from ..gang import Gang, RankTask
from ..retries import RetriesLeft
from ..tasks import Loss, Received, Task, TaskFailure, UndecodedFailure
from .client_link import ClientLink
from .fed_inputs import FedInputs
from .requests import Answer


class CallNews(Protocol):
    """Takes to the client what happens to its calls, by their numbers."""

    link: ClientLink
    inputs: FedInputs
    """Iterators of the calls."""

    def sent(self, number: int) -> None:
        """Tell that a call was sent to its node."""
        ...

    def retried(self, number: int, left: RetriesLeft) -> None:
        """Tell that a call begins again, and the retries that are left."""
        ...

    def value(self, kind: int, number: int, received: Received, *, lane: int = 0, is_last: bool = False) -> None:
        """Send a value, or a part or an item of one."""
        ...

    def outcome(self, number: int, status: str, content: Any) -> None:
        """Send any other end of a call than its value."""
        ...

    def gang_values(self, gang: Gang) -> None:
        """Send the values of all ranks of a gang."""
        ...

    def gang_failed(self, gang: Gang) -> None:
        """Send the failures of the ranks of a gang."""
        ...


@dataclass(eq=False, kw_only=True)
class ClientTask(Task):
    """Task of the client. Everything that happens to it is sent there."""

    is_relayed: ClassVar[bool] = True

    client: CallNews
    count: int = 1
    """Number of the user's calls that it contains."""
    is_permitted: bool = False
    """Whether it may begin beside the head before the client knows of that."""
    skip: int = 0
    """Number of the next parts or items that the journal has already."""

    @property
    def calls(self) -> int:
        return self.count

    def on_sent(self) -> None:
        self.client.sent(self.id)

    def on_retry(self, pause_s: float) -> None:
        assert self.rerun is not None
        self.client.retried(self.id, self.rerun.retries.left(pause_s))

    def on_result(self, received: Received) -> None:
        self.client.value(FrameKind.RESULT, self.id, received, is_last=True)

    def on_part(self, received: Received) -> None:
        self._add(FrameKind.PART, received)

    def on_item(self, received: Received) -> None:
        self._add(FrameKind.ITEM, received)

    def _add(self, kind: int, received: Received) -> None:
        if self.skip:
            self.skip -= 1
        else:
            self.client.value(kind, self.id, received)

    def on_input_credit(self, lane: int) -> None:
        if self.client.inputs.took(self.id, lane):
            self.client.link.tell_of_task(FrameKind.IN_CREDIT, self.id, lane=lane)

    def on_error(self, failed: TaskFailure) -> None:
        self.client.outcome(self.id, "failed", failed)

    def on_failed(self, error: BaseException) -> None:
        self.client.outcome(self.id, "error", error)


@dataclass(eq=False, kw_only=True)
class ClientChunk(ClientTask):
    """Task whose losses the client handles, such as a chunk of a map."""

    handles_loss: ClassVar[bool] = True

    def on_lost(self, loss: Loss) -> None:
        self.client.outcome(self.id, "lost", loss)


@dataclass(eq=False, kw_only=True)
class ClientGang(Gang):
    """Gang of the client."""

    client: CallNews

    def spend_restart(self) -> float | None:
        pause_s = super().spend_restart()
        if pause_s is not None:
            starts = len(self.past) + 1
            self.client.retried(self.id, self.retries.left(pause_s, max_restarts=self.restarts_left, starts=starts))
        return pause_s


class Promise(Future[Any]):
    """Future whose outcome is the reply to a request of the client."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self._answer = answer
        self._settling = threading.Lock()

    def _is_first(self) -> bool:
        with self._settling:
            if self.done():
                return False
            super().settle(None)
            return True

    def settle(self, value: Any) -> None:
        if self._is_first():
            self._answer("ok", value)

    def settle_error(self, error: Any) -> None:
        if not self._is_first():
            return
        if isinstance(error, UndecodedFailure):
            self._answer("failed", error.failed)
        else:
            self._answer("error", error)


class GangFuture(Future[Any]):
    """Future of a gang of the client. The gang itself says what came of it."""

    def __init__(self, client: CallNews, number: int) -> None:
        super().__init__(call_id=number)
        self.client = client
        self.gang: Gang | None = None

    def set_running(self) -> None:
        self.client.sent(self.call_id)

    def settle(self, value: Any) -> None:
        assert self.gang is not None
        self.client.gang_values(self.gang)

    def settle_error(self, error: Any) -> None:
        gang = self.gang
        if gang is not None and gang.failures:
            self.client.gang_failed(gang)
        else:
            self.client.outcome(self.call_id, "error", error)


def must_be_known(task: Task) -> bool:
    """Return whether the client must know of a task before it begins beside the head."""
    if isinstance(task, RankTask):
        return isinstance(task.gang, ClientGang)
    # Calls of an actor stay in their order, and none of them begins again.
    return isinstance(task, ClientTask) and not task.is_permitted and not task.actor
