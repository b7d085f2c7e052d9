"""Actors: objects that live in processes of their own on nodes, and the order of their calls.

An actor takes no slot. The scheduler knows only those that book resources, and finds their nodes. Its calls wait here
in the order in which they were made, and some are sent ahead. The agent gives them to the actor's process one after
another. A call of an actor is otherwise a task as any other: output, errors, streams and the direct line are the same.

A call runs at most once. When the process dies, calls that had begun fail with ActorLost. The others wait for the next
process, if the actor may restart, or fail too.
"""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Callable
from typing import NamedTuple

from ..console.activity import ActorWork
from ..errors import ActorLost, PoolClosed, UsageError
from ..schedule.actions import Settle, Unsettle
from ..values.devices import Grant
from ..wire.frames import Frame, FrameKind
from ..wire.payloads import Encoded
from ..wire.tasks import ActorOrder
from .builder import TaskBuilder
from .direct_lines import DirectLines
from .ledger import Ledger
from .link import Readable
from .live_actor import LiveActor, StepTask
from .nodes import NodeLinks
from .task_dispatcher import TaskDispatcher
from .tasks import Loss, Task, TaskFailure, death_of, in_words_of, undecoded

_log = logging.getLogger(__name__)

_AHEAD = 64
"""Most calls of an actor that are sent before it can begin them."""


class Actors:
    """Actors of an engine. Thread-safe; `submit`, `ended`, `lost` and the handlers of frames need the ledger's lock.

    Args:
        ledger: Shared state of the engine.
        lines: Direct lines, one for each actor that runs one call at a time.
        dispatcher: Sends the calls.
        nodes: Tells when a node is there.
        builder: Builds the tasks of constructors and exit hooks.
        kept: Nodes with a role, where an actor lives only if it names them.
    """

    def __init__(
        self,
        ledger: Ledger,
        lines: DirectLines,
        dispatcher: TaskDispatcher,
        nodes: NodeLinks,
        builder: TaskBuilder,
        kept: frozenset[int],
    ) -> None:
        self._ledger = ledger
        self._lines = lines
        self._dispatcher = dispatcher
        self._builder = builder
        self._kept = kept
        self._ends: dict[int, ActorEnd] = {}
        """Ends of actors that the program may still call."""
        self._leaving: dict[int, LiveActor] = {}
        """Ended actors whose resources stay booked until their process is gone."""
        self.soon: Callable[[Callable[[], object]], object] = lambda action: None
        """Lets the I/O thread do something soon; for finalizers."""
        self.find: Callable[[str], Encoded]
        """Packs the handle of a named actor, for tasks. Set by the pool. Raises UsageError if there is none."""
        dispatcher.actors = self
        dispatcher.handlers |= {Settle: self._settled, Unsettle: self._refused}
        nodes.on_up.append(self._node_up)

    # For the pool ---------------------------------------------------------------------------------------------------

    def start(self, actor: LiveActor) -> None:
        """Make an actor. Its future is settled when its constructor has returned, or has failed.

        Raises:
            PoolClosed: The pool is closed.
        """
        with self._ledger:
            self._ledger.require_open()
            actor.tell = self._ledger.tell
            self._ledger.actors[actor.number] = actor
            self._place(actor)

    def close(self, number: int, *, cancel: bool = False) -> None:
        """Begin to end an actor: its calls first, then its exit hook, then its process. Idempotent.

        Args:
            number: Number of the actor.
            cancel: Whether to cancel its calls, and to end its process without the exit hook.
        """
        with self._ledger:
            actor = self._ledger.actors.get(number)
            if actor is None or (actor.is_closing and not cancel):
                return
            actor.is_closing = True
            end = ActorEnd(f"{actor.name!r}: was closed; make another one", "it was closed", actor.node)
            if cancel or actor.node is None:
                self._end(actor, end)
                return
            if not actor.is_forgotten:
                self._ends[number] = end

            def ended(failure: BaseException | TaskFailure | None) -> None:
                with self._ledger:
                    self._end(actor, end, failure)

            task = actor.step(self._builder, actor.ending, ended)
            self._ledger.tasks[task.id] = task
            actor.waiting.append(task)
            self._pump(actor)

    def forget(self, number: int) -> None:
        """Close an actor soon, in another thread, because nobody can call it. For finalizers."""
        self.soon(lambda: self._forget(number))

    def _forget(self, number: int) -> None:
        with self._ledger:
            self._ends.pop(number, None)
            actor = self._ledger.actors.get(number)
            if actor is not None:
                actor.is_forgotten = True
                self.close(number)

    def close_all(self) -> None:
        """Begin to end all actors."""
        for number in list(self._ledger.actors):
            self.close(number)

    def cancel_all(self) -> None:
        """End all actors at once."""
        for number in list(self._ledger.actors):
            self.close(number, cancel=True)

    def work(self) -> tuple[ActorWork, ...]:
        """Return the actors that were made, or wait for a node, with the number of their calls."""
        with self._ledger.lock:
            return tuple(actor.work for actor in self._ledger.actors.values())

    def stop(self) -> None:
        """Forget all actors, because the engine ends. Needs the ledger's lock."""
        self.soon = lambda action: None
        error = PoolClosed("pool: closed before the actor was made; make actors inside its `with` block")
        for actor in [*self._ledger.actors.values(), *self._leaving.values()]:
            self._drop_line(actor)
            self._ledger.after.append(lambda actor=actor: actor.closed.settle(None))  # type: ignore[misc]
            self._ledger.after.append(lambda actor=actor: actor.made.settle_error(error))  # type: ignore[misc]
        self._ledger.actors.clear()
        self._leaving.clear()

    # Calls ----------------------------------------------------------------------------------------------------------

    def submit(self, task: Task, *, is_alone: bool) -> None:
        """Queue a call, and send it if its actor has room."""
        actor = self._ledger.actors.get(task.actor)
        if actor is None or actor.is_closing:
            end = self._ends.get(task.actor) or _FORGOTTEN
            self._fail(task, end.error())
            return
        actor.waiting.append(task)
        self._pump(actor, task if is_alone else None)

    def took_up(self, task: Task) -> None:
        self._ledger.actors[task.actor].sent[task.id] = task

    def ended(self, task: Task) -> None:
        actor = self._ledger.actors.get(task.actor)
        if actor is None:
            return
        if actor.sent.pop(task.id, None) is None and task in actor.waiting:
            actor.waiting.remove(task)
        actor.unbegun.discard(task.id)
        if actor.gone is not None:
            self._settle(actor, actor.gone)
        elif actor.waiting:
            self._pump(actor)

    def lost(self, task: Task, loss: Loss) -> None:
        actor = self._ledger.actors.get(task.actor)
        if actor is not None:
            actor.is_made = False  # nothing more goes to this process
        if actor is None or task.is_cancelled or isinstance(task, StepTask):
            self._dispatcher.finish(task, loss.node)  # the end of the process, which follows, decides about a step
        elif loss.started is False and actor.on_line != task.id:
            self._dispatcher.release(task, loss.node)
            actor.unbegun.add(task.id)
            if actor.gone is not None:
                self._settle(actor, actor.gone)
        else:
            self._report(task, self._end_of(actor, loss).error(started=loss.started, stack=loss.stack))
            self._dispatcher.finish(task, loss.node)

    def _fail(self, task: Task, error: BaseException) -> None:
        self._dispatcher.forget(task)
        self._report(task, error)

    def _report(self, task: Task, error: BaseException) -> None:
        if not task.is_cancelled:
            self._ledger.after.append(lambda: task.on_failed(error))

    def _pump(self, actor: LiveActor, alone: Task | None = None) -> None:
        """Send the calls that the actor has room for, in order."""
        while actor.waiting and actor.is_made and actor.node is not None:
            task = actor.waiting[0]
            # A timeout begins when the call is sent, so such a call is not sent ahead.
            room = actor.lanes + (_AHEAD if task.timeout_s is None else 0)
            if len(actor.sent) >= room:
                return
            actor.waiting.popleft()
            self._send(actor, task, actor.node, is_alone=task is alone)

    def _send(self, actor: LiveActor, task: Task, node: int, *, is_alone: bool = False) -> None:
        actor.sent[task.id] = task
        self._dispatcher.perform(self._dispatcher.send(task, node, is_alone=is_alone))

    # Actors of an earlier head, with the ledger locked ----------------------------------------------------------------

    def take_up(self, actor: LiveActor, node: int, devices: tuple[int, ...] | None, *, is_made: bool) -> None:
        """Go on with an actor that has a process on a node.

        Args:
            actor: The actor.
            node: The node.
            devices: Devices that it has booked there.
            is_made: Whether its constructor has returned. If not, its process is ended, and that decides.
        """
        actor.tell = self._ledger.tell
        self._ledger.actors[actor.number] = actor
        actor.node, actor.has_process, actor.is_made = node, True, is_made
        if actor.need is not None:
            self._ledger.scheduler.take_up_actor(actor.number, node, actor.need, devices)
            actor.grant = Grant.of_booking(devices, gpus=actor.gpus, cpus=actor.cpus, memory_gib=actor.memory_gib)
        if is_made:
            self._ledger.after.append(lambda: actor.made.settle(None))
        else:
            self._ledger.tell(node, FrameKind.END_ACTOR, actor.number)

    def lose(self, actor: LiveActor, loss: Loss) -> ActorEnd:
        """Restart an actor whose process was lost with an earlier head, or give it up. Return how it was lost."""
        actor.tell = self._ledger.tell
        self._ledger.actors[actor.number] = actor
        end = self._end_of(actor, loss)
        self._again(actor, loss)
        return end

    # Life -----------------------------------------------------------------------------------------------------------

    def _place(self, actor: LiveActor) -> None:
        """Find a node for an actor, or let it wait for one: where its resources are free, or with the fewest actors."""
        ledger = self._ledger
        if actor.need is not None:
            action = ledger.scheduler.submit_actor(actor.number, nodes=actor.nodes, need=actor.need)
            self._dispatcher.perform(action)
            return
        there = [
            node
            for node, link in ledger.links.items()
            if link.channel.is_attached and (node not in self._kept if actor.nodes is None else node in actor.nodes)
        ]
        if not there:
            return
        used = [other.node for other in ledger.actors.values()]
        self._begin(actor, min(there, key=lambda node: (used.count(node), node)))

    def _settled(self, action: Settle) -> None:
        """Start an actor where its resources are booked."""
        actor = self._ledger.actors[action.actor]
        actor.grant = Grant.of_booking(action.devices, gpus=actor.gpus, cpus=actor.cpus, memory_gib=actor.memory_gib)
        self._begin(actor, action.node)

    def _refused(self, action: Unsettle) -> None:
        """Give up an actor whose resources no node can hold."""
        actor = self._ledger.actors[action.actor]
        text = f"{actor.name!r}: {action.why}"
        error = UsageError(text)  # words: ok, schedule/reasons.py says what to do
        self._ledger.after.append(lambda: actor.made.settle_error(error))
        self._end(actor, ActorEnd(text, action.why, None))

    def _begin(self, actor: LiveActor, node: int) -> None:
        """Start the process of an actor, and make the object there."""
        ledger = self._ledger
        actor.node, actor.has_process = node, True
        actor.moved(node)
        order = ActorOrder(lanes=actor.lanes, grant=actor.grant)
        ledger.tell(node, FrameKind.START_ACTOR, actor.number, pickle.dumps(order))
        task = actor.step(self._builder, actor.constructor, lambda error: self._constructed(actor, error))
        ledger.tasks[task.id] = task
        self._send(actor, task, node)

    def _node_up(self, _: int) -> None:
        for actor in list(self._ledger.actors.values()):
            if actor.node is None and actor.need is None:
                self._place(actor)

    def _constructed(self, actor: LiveActor, failure: BaseException | TaskFailure | None) -> None:
        with self._ledger:
            if actor.number not in self._ledger.actors:
                return
            if failure is None:
                actor.is_made = True
                self._ledger.after.append(lambda: actor.made.settle(None))
                self._pump(actor)
                return
            reason = f"its constructor raised {in_words_of(failure)}"
            self._ledger.after.append(lambda: actor.made.settle_error(undecoded(failure)))
            self._end(actor, _end(actor, reason, actor.node))

    def on_gone(self, link: Readable, frame: Frame) -> None:
        """Restart an actor whose process has died, or give it up. Its calls were reported before."""
        self._leave(frame.ident)
        actor = self._ledger.actors.get(frame.ident)
        if actor is None or actor.node != link.node:
            return
        actor.has_process = False
        fields = json.loads(frame.body)
        loss = Loss(
            node=link.node,
            signal=fields["signal"],
            exit_code=fields["exit_code"],
            stack=fields["stack"],
            why=fields["why"],
            memory_gib=fields.get("memory_gib"),
        )
        actor.is_made, actor.gone = False, loss
        self._settle(actor, loss)

    def _settle(self, actor: LiveActor, loss: Loss) -> None:
        """Go on after the death of a process, once the fate of each call that was sent to it is known.

        Answers may still be on their way, on the line or behind blobs. Calls that the agent got too late come back.
        """
        if actor.sent.keys() <= actor.unbegun:
            self._again(actor, loss)

    def node_lost(self, node: int) -> None:
        """Handle that a node is gone, with the actors on it."""
        for number in [number for number, actor in self._leaving.items() if actor.node == node]:
            self._leave(number)
        for actor in [actor for actor in self._ledger.actors.values() if actor.node == node]:
            loss = self._ledger.node_loss(node, started=None)
            self._drop_line(actor)
            actor.is_made, actor.gone, actor.has_process = False, None, False
            for task in list(actor.sent.values()):
                if task.id not in actor.unbegun:
                    self._fail(task, self._end_of(actor, loss).error(started=None))
            self._again(actor, loss)

    def _again(self, actor: LiveActor, loss: Loss) -> None:
        """Restart an actor whose process is gone, or give it up."""
        self._drop_line(actor)
        actor.is_made, actor.gone = False, None
        end = self._end_of(actor, loss)
        if not actor.restarts_left or actor.is_closing:
            self._end(actor, end)
            return
        actor.restarts_left -= 1
        node, actor.node = actor.node, None
        actor.moved(None)
        back = [task for task in actor.sent.values() if task.id in actor.unbegun]
        for task in back:
            del actor.sent[task.id]
            if task.is_cancelled:
                self._dispatcher.forget(task)
        actor.unbegun.clear()
        actor.waiting.extendleft(task for task in reversed(back) if not task.is_cancelled)
        _log.warning("actor %r of node %d: %s; it is restarted", actor.name, loss.node, end.reason)
        if actor.need is not None and node is not None and not loss.is_node:
            self._begin(actor, node)  # it keeps its resources
            return
        self._free(actor)
        self._place(actor)
        if actor.node is None and not self._may_come(actor):
            self._end(actor, end)

    def _may_come(self, actor: LiveActor) -> bool:
        """Return whether there may be a node for an actor later."""
        known = self._ledger.scheduler.demand(self._ledger.resting).known
        return any(node not in self._kept if actor.nodes is None else node in actor.nodes for node in known)

    def _end(self, actor: LiveActor, end: ActorEnd, failure: BaseException | TaskFailure | None = None) -> None:
        """Forget an actor, end its process, and fail the calls that it still has."""
        if self._ledger.actors.get(actor.number) is not actor:
            return
        self._drop_line(actor)
        actor.is_made, actor.is_closing = False, True
        if not actor.is_forgotten:
            self._ends[actor.number] = end
        for task in [*actor.sent.values(), *actor.waiting]:
            if actor.node is not None and task.id in actor.sent:
                self._dispatcher.release(task, actor.node)
            self._fail(task, end.error())
        if actor.node is not None:
            self._ledger.tell(actor.node, FrameKind.END_ACTOR, actor.number)
        del self._ledger.actors[actor.number]
        self._ledger.after.append(lambda: actor.made.settle_error(end.error()))
        actor.end_failure = failure
        self._leaving[actor.number] = actor
        # The caller of `close` may use its devices at once, so the process must be gone.
        if actor.need is None or not actor.has_process:
            self._leave(actor.number)

    def _leave(self, number: int) -> None:
        """Give back the resources of an ended actor, and let those go on who wait for its end."""
        actor = self._leaving.pop(number, None)
        if actor is None:
            return
        self._free(actor)
        actor.constructor = actor.ending  # its arguments may hold the handles of other actors
        failure = actor.end_failure
        if failure is None:
            self._ledger.after.append(lambda: actor.closed.settle(None))
        else:
            self._ledger.after.append(lambda: actor.closed.settle_error(undecoded(failure)))

    def _free(self, actor: LiveActor) -> None:
        """Give back the resources of an actor that has no process, or end its wait for them."""
        if actor.need is not None:
            self._dispatcher.perform(self._ledger.scheduler.actor_gone(actor.number))

    def why_waiting(self, number: int) -> str:
        """Return why an actor was not made yet, in one sentence; "" if it was, or is being made."""
        actor = self._ledger.actors.get(number)
        if actor is None or actor.node is not None:
            return ""
        return self._ledger.scheduler.why_waiting(number) or "waits for a node: none is there"

    def _drop_line(self, actor: LiveActor) -> None:
        """Close the line of an actor whose calls the agent no longer reports."""
        actor.on_line = 0
        self._lines.drop(actor)

    def _end_of(self, actor: LiveActor, loss: Loss) -> ActorEnd:
        if not loss.is_node:
            reason = f"its process {death_of(loss)}"
        else:
            reason = f"its node was {'taken back by its provider' if loss.is_preempted else 'lost'}"
        return _end(actor, reason, loss.node)


class ActorEnd(NamedTuple):
    """End of an actor, in words. Each call gets an error of its own, because raising one adds to its traceback."""

    text: str
    reason: str
    node: int | None

    def error(self, *, started: bool | None = False, stack: str = "") -> ActorLost:
        error = ActorLost(self.text, node=self.node, started=started)
        error.reason = self.reason
        if stack:
            error.add_note(f"Python stack at that moment:\n{stack}")
        return error


_FORGOTTEN = ActorEnd(
    "actor: is gone, because the program holds no handle of it; keep a handle, or give the actor a name",
    "no handle of it was left",
    None,
)


def _end(actor: LiveActor, reason: str, node: int | None) -> ActorEnd:
    count = actor.max_restarts
    advice = f"raise max_restarts={count}, or make another" if count else "set max_restarts=1 or more to restart it"
    if actor.restarts_left:
        advice = "it is restarted; call it again if the call may run twice"
    return ActorEnd(f"{actor.name!r} on node {node}: {reason}; {advice}", reason, node)
