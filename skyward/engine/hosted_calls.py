"""Calls of a client on their way to its head and back: tasks and gangs, and those of earlier clients that it follows.

The client counts the frames of each open call. When the head of a detached pool was killed, the client tells the next
one how far it is with each of them (`head.kept_calls` has the rules), and gets the rest. A call that the next head does
not know was never begun, because a head journals a call first. So the client sends it again.

Any other head has no journal, and the client's books stand for it. When such a head is gone, the client sends all open
calls to another one, and says how far it is with each (`head.taken_up` has the rules).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any, NamedTuple

from ..calls.futures import Future
from ..calls.named_options import pack_options
from ..core.records import dataclass
from ..errors import NodeLost, UsageError
from ..values.launch_facts import LaunchFacts
from ..wire.channel import CONTROL
from ..wire.frames import FrameKind
from ..wire.stream import StreamChannel
from ..wire.tasks import TaskHead
from .followed import Follower, follow_up
from .gang import Gang
from .head.kept_calls import CallFacts, CallPosition
from .head.messages import CallMessage, GangMessage, OpenCall, pack_call
from .head.requests import Requests
from .head_link import HeadLink
from .ledger import Ledger
from .sent_inputs import InputPosition, SentInputs
from .tasks import CallTask, Loss, Task, cannot_send

_PERMITTED = 16
"""Most open calls that may begin beside the head before they are known here. They are in doubt if that node is lost."""
_ENDINGS = FrameKind.UNCALL, FrameKind.CLOSE
"""Frames by which the client gives up a call. A head that has none of that name ignores them."""


@dataclass(slots=True)
class _Progress:
    """How far an open call is here."""

    message: CallMessage | None
    """Content of its CALL frame; None if an earlier client has made it."""
    link: HeadLink | None
    """Link by which it was sent, with its function and blobs."""
    received: int = 0
    """Number of its frames that have come, of those that the head counts."""
    taken: int = 0
    """Number of its items that the user has read."""
    values: int = 0
    """Number of its items, or parts, that have come."""
    is_permitted: bool = False
    """Whether it may begin beside the head before it is known here."""
    is_in_doubt: bool = False
    """Whether a node that is gone may have run it."""
    is_preempted: bool = False
    """Whether the provider took back the machine of such a node."""
    cleared: frozenset[int] = frozenset()
    """Nodes that certainly have not run it with an earlier head."""
    was_told: bool = False
    """Whether another head had it before this one."""
    left: tuple[Any, ...] | None = None
    """Retries that are left to it, as the head has told; None: it has spent none."""
    why: str = ""
    """Reason why it waited when the head was asked last."""

    @property
    def has_inputs(self) -> bool:
        """Return whether this client feeds an iterator to it."""
        return self.message is not None and TaskHead(*self.message.head).inputs > 0

    def doubt(self, lost: AbstractSet[int], home: int | None = None, *, is_preempted: bool = False) -> None:
        """Note that nodes are gone that may have run it. `home`: node of its actor."""
        nodes = (home,) if home is not None else None if self.message is None else self.message.may_go_to
        if lost and (nodes is None or not lost.isdisjoint(nodes)):
            self.is_in_doubt = True
            self.is_preempted |= is_preempted


class HeadLoss(NamedTuple):
    """Loss of a head, as far as it puts open calls in doubt."""

    lost: frozenset[int] = frozenset()
    """Nodes whose machines are gone with it, and may have run any of them, or that it had relieved."""
    noted: frozenset[int] = frozenset()
    """Those of them that the head had relieved, or found lost itself. What the latter may have run is in doubt already.
    """
    beside: frozenset[int] = frozenset()
    """Node beside the head, where only permitted calls begin before they are known here; none for one on this machine.
    """
    is_preempted: bool = False
    """Whether the provider took the machines of the lost nodes back."""
    is_none: bool = False
    """Whether the head has handed over to the next one: no node has had any of the open calls."""


class HostedCalls:
    """Open calls of a client. Thread-safe, except `end`, `forget` and what is for another head: these need the lock.

    Args:
        ledger: Shared state of the client's engine.
        requests: Requests to the head.
        is_detached: Whether the head goes on when it was killed.
    """

    def __init__(self, ledger: Ledger, requests: Requests, *, is_detached: bool) -> None:
        self._ledger = ledger
        self._requests = requests
        self._is_detached = is_detached
        ledger.take_in = self._take_in
        self._progress: dict[int, _Progress] = {}
        """Progress of each open call."""
        self._permitted = 0
        """Number of calls that may begin beside the head before they are known here."""
        self.inputs = SentInputs()
        self.link: HeadLink | None = None
        self.ended = self.failed = 0
        """Numbers of this client's calls that have ended, and that have failed. A head counts from its own start."""

    # To the head ------------------------------------------------------------------------------------------------------

    def submit(self, task: Task, nodes: tuple[int, ...] | None, after_s: float) -> None:
        if nodes is None and not (after_s or task.actor) and self._ledger.leave(task):
            return
        with self._ledger:
            self._ledger.require_open()
            self._submit(task, nodes, after_s)

    def _take_in(self, task: Task) -> None:
        """Send a task that was left to this block, whose caller has its future already."""
        try:
            self._ledger.require_open()
            self._submit(task, None, 0.0)
        except Exception as error:  # the pool was closed meanwhile
            self._ledger.tasks.pop(task.id, None)
            self._ledger.after.append(partial(task.on_failed, error))

    def _submit(self, task: Task, nodes: tuple[int, ...] | None, after_s: float) -> None:
        message = CallMessage(
            name=task.name,
            function=task.function.digest,
            head=tuple(task.head),
            options=pack_options(task.options),
            nodes=nodes,
            timeout_s=task.timeout_s,
            expected_ns=task.expected_ns,
            may_move=task.may_move,
            handles_loss=task.handles_loss,
            calls=task.calls,
            in_bulk=task.in_bulk,
            after_s=after_s,
        )
        self._ledger.tasks[task.id] = task
        self._begin(task, message)

    def submit_gang(self, gang: Gang) -> None:
        more = GangMessage(LaunchFacts.of(gang.launch), gang.launch_bytes, gang.some_of, gang.ranks_per_node)
        message = CallMessage(
            name=gang.name,
            function=gang.function.digest,
            head=tuple(gang.head),
            options=pack_options(gang.options),
            nodes=gang.nodes,
            gang=more,
        )
        with self._ledger:
            self._ledger.require_open()
            self._ledger.gangs[gang.id] = gang
            self._begin(gang, message)

    def _begin(self, call: Task | Gang, message: CallMessage) -> None:
        """Send a call. Fail it if there is no room for that."""
        link = self.link
        assert link is not None
        progress = self._progress.setdefault(call.id, _Progress(message, link))
        progress.link = link
        if not progress.is_permitted and self._permitted < _PERMITTED and not isinstance(call, Gang):
            progress.is_permitted = True
            self._permitted += 1
        body = pack_call(message, call.payload.body)
        actor = call.actor if isinstance(call, Task) else 0
        try:
            link.send_call(call.id, body, call.function, call.payload, behind=actor, is_permitted=progress.is_permitted)
        except OSError as error:
            self._fail(call, cannot_send(repr(call.name), error))
            return
        self._ledger.dirty.add(link)

    def _fail(self, call: Task | Gang, error: BaseException) -> None:
        fail = call.on_failed if isinstance(call, Task) else call.future.settle_error
        self._ledger.after.append(lambda: fail(error))
        self.end(call, ok=False)

    def cancel(self, task_id: int) -> None:
        with self._ledger:
            task = self._ledger.tasks.get(task_id)
            if task is not None:
                task.is_cancelled = True
                self._uncall(task_id)
                self.forget(task)

    def cancel_gang(self, gang_id: int) -> None:
        with self._ledger:
            gang = self._ledger.gangs.get(gang_id)
            if gang is not None:
                gang.is_cancelled = True
                self._uncall(gang_id)
                self.forget(gang)

    def _uncall(self, number: int) -> None:
        if self.link is not None:
            self.link.tell_of(number, FrameKind.UNCALL)
            self._ledger.dirty.add(self.link)

    def read(self, number: int) -> None:
        """Tell the head that the outcome of a call was read, so that no other client gets it."""
        with self._ledger:
            if self._ledger.is_open:
                self._uncall(number)

    def end(self, call: Task | Gang, *, ok: bool) -> None:
        """Count a call that has ended, and forget it."""
        self._count(call, ok=ok)
        self.forget(call)

    def count_lost(self) -> None:
        """Count all open calls as failed, because the head is gone."""
        with self._ledger:
            calls: list[Task | Gang] = [*self._ledger.tasks.values(), *self._ledger.gangs.values()]
            for call in calls:
                self._count(call, ok=False)

    def _count(self, call: Task | Gang, *, ok: bool) -> None:
        calls = call.calls if isinstance(call, Task) else 1
        self.ended += calls
        if not ok:
            self.failed += calls

    def forget(self, call: Task | Gang) -> None:
        """Forget a call that has ended, or that nobody waits for."""
        progress = self._progress.pop(call.id, None)
        self.inputs.forget(call.id)
        self._permitted -= progress is not None and progress.is_permitted
        if isinstance(call, Gang):
            self._ledger.gangs.pop(call.id, None)
        else:
            self._ledger.tasks.pop(call.id, None)
        link = self.link
        if link is not None and (progress is None or progress.link is link):
            link.ended(call.id, call.function, call.payload)
            if link.channel.has_output:
                self._ledger.dirty.add(link)
        if not self._ledger.tasks and not self._ledger.gangs:
            self._ledger.idle.notify_all()

    # Calls of earlier clients -----------------------------------------------------------------------------------------

    def listed(self) -> list[CallFacts]:
        """Return the calls of a detached pool that are open, or whose outcome nobody has taken."""
        calls: list[CallFacts] = self._requests.ask("calls")
        return calls

    def follow(self, number: int, engine: Follower) -> Future[Any]:
        """Return a future of a call that this or an earlier client has made. Raises UsageError: there is none."""
        with self._ledger:
            own = self._ledger.tasks.get(number), self._ledger.gangs.get(number)
        for call in own:
            if isinstance(call, CallTask | Gang):
                return call.future
        if own[0] is not None:
            raise UsageError(f"call={number}: this program reads its values already; use the iterator that it has")
        facts: CallFacts = self._requests.ask("call", number)
        future, followed = follow_up(facts, engine)
        with self._ledger:
            self._ledger.require_open()
            if isinstance(followed, Gang):
                self._ledger.gangs[number] = followed
            else:
                self._ledger.tasks[number] = followed
            self._progress[number] = _Progress(None, None, received=facts.first, taken=facts.first)
        try:
            self._requests.ask("follow", number)
        except BaseException:
            with self._ledger:
                self.forget(followed)
            raise
        return future

    # Another head -----------------------------------------------------------------------------------------------------

    def came(self, number: int, *, is_value: bool = False) -> None:
        """Count a frame of a call. `is_value`: it brings an item, or a part."""
        progress = self._progress.get(number)
        if progress is not None:
            progress.received += 1
            progress.values += is_value

    def took(self, number: int, count: int) -> None:
        """Count items of a call that the user has read."""
        progress = self._progress.get(number)
        if progress is not None:
            progress.taken += count

    def sent(self, number: int) -> None:
        """Note that a call is on its way to a node, which has no item of its iterators."""
        if self.inputs.waits(number):
            self._resume_inputs(number, {})

    def inputs_at(self, number: int, positions: dict[int, tuple[Any, ...]]) -> None:
        """Go on with the iterators of a call that runs. `positions`: fields of their `InputPosition`, by argument."""
        with self._ledger:
            self._resume_inputs(number, {lane: InputPosition(*fields) for lane, fields in positions.items()})

    def _resume_inputs(self, number: int, positions: dict[int, InputPosition]) -> None:
        task, link = self._ledger.tasks.get(number), self.link
        if task is None or link is None:
            return
        try:
            missed = self.inputs.resume(link, number, positions)
        except OSError as error:
            failure = cannot_send(repr(task.name), error)
            self.cancel(number)
            self._ledger.after.append(lambda: task.on_failed(failure))
            return
        for lane, count in missed.items():
            self._ledger.after += [partial(task.on_input_credit, lane)] * count
        self._ledger.dirty.add(link)

    def end_again(self, before: HeadLink, link: HeadLink) -> None:
        """Tell the next head which calls were read or given up, if the killed one may have missed that."""
        assert isinstance(before.channel, StreamChannel)
        for kind in _ENDINGS:
            for number, _ in before.channel.unacknowledged(kind):
                link.channel.queue(kind, number, priority=CONTROL)

    def go_on(self, link: HeadLink, failed: Callable[[BaseException], object]) -> None:
        """Go on with all open calls over a link to the next head. `failed` gets the error if it cannot go on."""
        for number, progress in self._progress.items():
            if progress.has_inputs:
                self.inputs.wait(number)
        resumed = self._requests.begin("resume", [tuple(position) for position in self._positions()])
        resumed.add_done_callback(partial(self._resumed, link, failed))

    def retried(self, number: int, left: tuple[Any, ...]) -> None:
        """Note the retries that are left to a call. Needs no lock: it is called where frames are read."""
        progress = self._progress.get(number)
        if progress is not None:
            progress.left = left

    @property
    def permitted(self) -> int:
        """Number of open calls that may begin beside the head before they are known here."""
        return self._permitted

    def forbid(self, numbers: Iterable[int]) -> None:
        """Note that calls which wait in the head begin beside it only once they are known here."""
        with self._ledger:
            for number in numbers:
                progress = self._progress.get(number)
                if progress is not None and progress.is_permitted:
                    progress.is_permitted = False
                    self._permitted -= 1

    def told_why(self, number: int, why: str) -> None:
        """Note why a call waits, as the head has told. Needs no lock: it is called where frames are read."""
        progress = self._progress.get(number)
        if progress is not None:
            progress.why = why

    def why(self, number: int) -> str:
        """Return the reason why a call waited when the head was asked last."""
        progress = self._progress.get(number)
        return "" if progress is None else progress.why

    def doubt(self, node: int, *, is_preempted: bool = False) -> None:
        """Note that a node is gone, which may have run any open call that was sent to a node.

        The head has asked for another machine, and before that it has told of each call that it had sent. It knows
        nothing of what an earlier head had sent.

        Args:
            node: The node.
            is_preempted: Whether the provider took its machine back.
        """
        with self._ledger:
            for number, progress in self._progress.items():
                home = self._home_of(self._ledger.tasks.get(number))
                if self._is_begun(number):
                    progress.doubt({node}, home, is_preempted=is_preempted)
                elif progress.was_told:
                    progress.doubt({node} - progress.cleared, home, is_preempted=is_preempted)

    def send_all_again(self, before: HeadLink, link: HeadLink, loss: HeadLoss) -> list[OpenCall]:
        """Send all open calls to another head, and return how far those are that an earlier one may have had.

        Args:
            before: Link to the earlier head.
            link: Link to that head.
            loss: Loss of the earlier one.
        """
        assert isinstance(before.channel, StreamChannel)
        unsent = {number for number, _, _ in before.channel.take_unsent(FrameKind.CALL)}
        told: list[OpenCall] = []
        for number, progress in list(self._progress.items()):
            call = self._ledger.tasks.get(number) or self._ledger.gangs.get(number)
            if call is None or progress.message is None:
                continue
            is_begun, was_permitted = self._is_begun(number), progress.is_permitted
            self._permitted -= was_permitted
            progress.is_permitted = False
            if progress.has_inputs:
                self.inputs.wait(number)
            self._begin(call, progress.message)
            if number in unsent and not progress.was_told:
                continue
            home = self._home_of(call)
            is_known = was_permitted or is_begun or (isinstance(call, Task) and call.actor)
            progress.cleared = loss.noted if is_known else loss.noted | loss.beside
            if loss.is_none:
                progress.cleared = frozenset(self._ledger.machines)
                progress.is_in_doubt = progress.is_preempted = False
            progress.doubt(loss.lost - progress.cleared, home, is_preempted=loss.is_preempted)
            progress.was_told = True
            told.append(
                OpenCall(
                    number,
                    progress.values,
                    progress.taken,
                    is_begun,
                    progress.is_in_doubt,
                    tuple(progress.cleared),
                    progress.left,
                    progress.is_preempted,
                )
            )
        return told

    def _positions(self) -> list[CallPosition]:
        return [
            CallPosition(number, progress.received, progress.taken, self._is_begun(number))
            for number, progress in self._progress.items()
        ]

    def _home_of(self, call: Task | Gang | None) -> int | None:
        """Return the node of the actor of a call; None if it is of none, or the actor waits for one."""
        actor = self._ledger.actors.get(call.actor) if isinstance(call, Task) and call.actor else None
        return None if actor is None else actor.node

    def _is_begun(self, number: int) -> bool:
        task, gang = self._ledger.tasks.get(number), self._ledger.gangs.get(number)
        return (task is not None and task.attempt > 0) or (gang is not None and gang.future.running())

    def _resumed(self, link: HeadLink, failed: Callable[[BaseException], object], done: Any) -> None:
        """Send the calls that the next head does not know, and fail those that cannot be sent again."""
        error = done.exception()
        with self._ledger:
            if self.link is not link or not self._ledger.is_open:
                return  # it was killed too: the one after it is asked
            for number in () if error is not None else done.result():
                call = self._ledger.tasks.get(number) or self._ledger.gangs.get(number)
                if call is not None:
                    self._send_again(call)
        if error is not None:
            failed(error)

    def _send_again(self, call: Task | Gang) -> None:
        message = self._progress[call.id].message
        is_new = not isinstance(call, Task) or not (call.attempt or call.actor)
        if message is not None and is_new:
            self._begin(call, message)
        elif isinstance(call, Task) and call.handles_loss:
            loss = Loss(node=0, started=None, is_node=True)
            self.forget(call)
            self._ledger.after.append(lambda: call.on_lost(loss))
        else:
            self._fail(call, _lost_with_head(call.name))


def _lost_with_head(name: str) -> NodeLost:
    return NodeLost(f"{name!r}: the head of the pool was killed, and the call with it; send it again", node=0)
