"""Parts of an engine whose scheduler runs in a head, as pools and calls see them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from ..calls.futures import Future
from ..console.activity import ActorWork
from ..errors import PoolClosed, SkywardError, UsageError
from ..schedule.resources import PLAIN, Need
from ..shared.messages import StoreRequest
from ..values.devices import Device, NodeResources
from ..values.launch_facts import GangLaunch
from ..wire.channel import CONTROL
from ..wire.frames import FrameKind
from ..wire.payloads import Encoded
from .builder import PackedCall
from .head.messages import ActorMessage
from .head.requests import Requests
from .head_link import HeadLink
from .ledger import MANY_OPEN, Ledger
from .link import NodeLink, resources_of
from .live_actor import LiveActor
from .nodes import supply_of
from .sent_inputs import SentInputs
from .shared_state import OutcomeFuture, SharedRequests
from .task_channels import TaskChannels
from .tasks import StreamTask, Task, cannot_send

_ASK_S = 5.0
"""Longest wait in seconds for a figure that a console shows."""


class HostedNodes:
    """Facts about the nodes, as the head last said them. Thread-safe."""

    def __init__(self, ledger: Ledger, requests: Requests) -> None:
        self._ledger = ledger
        self._requests = requests
        self._facts: dict[int, dict[str, Any]] = {}
        self._resources: dict[int, NodeResources] = {}
        self.link: HeadLink | None = None
        self._usage_every_s = 0.0

    def tell_again(self) -> None:
        """Ask the next head for the usage that somebody wants to see."""
        if self._usage_every_s:
            self.ask_usage(self._usage_every_s)

    def on_facts(self, message: bytes) -> None:
        """Take the facts of the nodes that are up. Needs the ledger's lock."""
        told = {int(node): facts for node, facts in json.loads(message).items()}
        before, self._facts = self._facts, {node: facts["facts"] for node, facts in told.items()}
        self._resources = {node: resources_of(facts) for node, facts in self._facts.items()}
        # The scheduler here places nothing. It only knows what fits no node.
        scheduler = self._ledger.scheduler
        for node in [node for node, facts in before.items() if self._facts.get(node) != facts]:
            scheduler.node_lost(node, will_return=True)
        for node in [node for node, facts in self._facts.items() if before.get(node) != facts]:
            scheduler.node_up(node, told[node]["slots"], supply_of(self._resources[node]))
        # From then on most others only wait behind those that have a slot, or are the next to get one.
        self._ledger.many = max(MANY_OPEN, 2 * sum(node["slots"] for node in told.values()))

    @property
    def round_trip_s(self) -> float:
        return 0.0 if self.link is None else self.link.channel.round_trip_s

    def refusal(self, nodes: tuple[int, ...] | None, need: Need | None, count: int) -> str:
        with self._ledger.lock:
            return self._ledger.scheduler.refusal(nodes, need or PLAIN, count)

    def ranks_per_node(self, launch: GangLaunch) -> int:
        ranks = launch.ranks_per_node
        if ranks != "auto":
            return ranks
        return max(1, min((len(own.devices) for own in self._resources.values()), default=0))

    def devices(self, node: int) -> tuple[Device, ...]:
        resources = self._resources.get(node)
        return () if resources is None else resources.devices

    def resources(self, node: int) -> NodeResources | None:
        return self._resources.get(node)

    def agent_pids(self) -> dict[int, int]:
        return {node: int(facts["pid"]) for node, facts in self._facts.items()}

    def ask_usage(self, every_s: float) -> None:
        self._usage_every_s = every_s
        self._requests.tell("ask_usage", every_s)


class HostedCallers:
    """Waiting callers of an engine without a fast path for them."""

    def __init__(self, submit: Callable[[Task, tuple[int, ...] | None], None], cancel: Callable[[int], None]) -> None:
        self._submit = submit
        self._cancel = cancel

    def may_pull(self, _: int = 0) -> bool:
        return False

    def may_hold(self, size: int) -> bool:
        return False

    def stop_pulling(self) -> None:
        """Do nothing: no buffer stays here."""

    def submit(self, task: Task, future: Future[Any], nodes: tuple[int, ...] | None = None) -> None:
        try:
            self._submit(task, nodes)
        except BaseException:  # Ctrl-C: the caller never gets the future, so nobody else could cancel the task
            self._cancel(task.id)
            raise

    def lead(self, task_id: int, future: Future[Any]) -> None:
        """Do nothing: the I/O thread reads the value."""


class HostedStreams:
    """Items to and from running tasks. Thread-safe.

    Args:
        ledger: Shared state of the client's engine.
        forget: Removes a task from the ledger, under its lock.
        took: Called with the number of a task and the number of its items that the user has read.
        inputs: Items of iterators that the calls have not taken.
        tells_each_item: Whether the pool is detached; see `Streams`.
    """

    def __init__(
        self,
        ledger: Ledger,
        forget: Callable[[Task], object],
        took: Callable[[int, int], object],
        inputs: SentInputs,
        *,
        tells_each_item: bool = False,
    ) -> None:
        self.tells_each_item = tells_each_item
        self._ledger = ledger
        self._forget = forget
        self._took = took
        self._inputs = inputs
        self.link: HeadLink | None = None

    def grant(self, task_id: int, count: int) -> None:
        with self._ledger:
            self._took(task_id, count)
            self._tell(task_id, FrameKind.CREDIT, count.to_bytes(4, "little"))

    def send_item(self, task_id: int, lane: int, item: Encoded) -> None:
        with self._ledger:
            is_open = task_id in self._ledger.tasks and self.link is not None
            if is_open and self._inputs.add(task_id, lane, item):
                assert self.link is not None
                self.link.send_stream_item(task_id, lane, item)
                self._ledger.dirty.add(self.link)

    def end_input(self, task_id: int, kind: int, lane: int) -> None:
        with self._ledger:
            is_open = task_id in self._ledger.tasks and self.link is not None
            if is_open and self._inputs.end(task_id, lane, kind):
                assert self.link is not None
                self.link.end_stream(kind, task_id, lane)
                self._ledger.dirty.add(self.link)

    def close(self, task_id: int) -> None:
        with self._ledger:
            task = self._ledger.tasks.get(task_id)
            if task is not None:
                task.is_cancelled = True
                self._tell(task_id, FrameKind.CLOSE)
                self._forget(task)

    def close_all(self) -> None:
        with self._ledger.lock:
            streams = [task for task in self._ledger.tasks.values() if isinstance(task, StreamTask)]
        for task in streams:
            problem = f"{task.name!r}: the pool was closed before the generator was read to its end"
            task.on_failed(PoolClosed(f"{problem}; read it inside the `with` block"))
            self.close(task.id)

    def _tell(self, task_id: int, kind: int, body: bytes = b"") -> None:
        with self._ledger:
            if task_id in self._ledger.tasks and self.link is not None:
                self.link.tell_of(task_id, kind, body)
                self._ledger.dirty.add(self.link)


class HostedQuestions:
    """Questions to running calls. Thread-safe."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    def call_named(self, name: str) -> int:
        return int(self._requests.ask("call_named", name))

    def ask(self, call: int, question: bytes, timeout_s: float) -> bytes:
        answer: bytes = self._requests.ask("ask", call, question, timeout_s)
        return answer


class HostedChannels(TaskChannels):
    """Channels that tasks open to this program, through the head."""

    link: HeadLink | None = None

    def _link_to(self, node: int) -> NodeLink | None:
        return self.link


class HostedShared(SharedRequests):
    """Shared state of the pool, which the head holds."""

    def __init__(self, requests: Requests, numbers: Iterator[int]) -> None:
        self._requests = requests
        self._numbers = numbers

    def begin(self, request: StoreRequest) -> tuple[int, OutcomeFuture]:
        number = next(self._numbers)
        return number, self._requests.begin("shared", number, request.fields())

    def withdraw(self, session: int) -> None:
        self._requests.begin("shared_withdraw", session)

    def forget(self, session: int) -> None:
        self._requests.begin("shared_forget", session)

    def end(self, session: int) -> None:
        self._requests.tell("shared_end", session)


class HostedActors:
    """Actors of the pool, which the head keeps. Thread-safe.

    Args:
        ledger: Shared state of the client's engine.
        requests: Requests to the head.
        survives: Whether actors outlive the head, because another one may follow.
    """

    find: Callable[[str], Encoded]
    """Packs the handle of a named actor, for tasks. Set by the pool."""

    def __init__(self, ledger: Ledger, requests: Requests, *, survives: bool = True) -> None:
        self._ledger = ledger
        self._requests = requests
        self._survives = survives
        self._forgotten: set[int] = set()
        """Actors that nobody can call, and whose end is not known yet."""
        self.link: HeadLink | None = None
        self.soon: Callable[[Callable[[], object]], object] = lambda action: None
        """Lets the I/O thread do something soon; for finalizers."""

    def start(self, actor: LiveActor) -> None:
        with self._ledger:
            self._ledger.require_open()
            link = self.link
            assert link is not None
            self._ledger.actors[actor.number] = actor
            self._start(link, actor)

    def go_on(self) -> None:
        """Send all actors to another head. Needs the ledger's lock."""
        link = self.link
        assert link is not None
        for actor in list(self._ledger.actors.values()):
            try:
                self._start(link, actor, had_head=True)
            except UsageError as error:  # no room to send its arguments
                self._ledger.after.append(partial(self._lost, actor, error))
                continue
            if actor.number in self._forgotten:
                self._forget(actor.number)
            elif actor.is_closing:
                has_calls = any(task.actor == actor.number for task in self._ledger.tasks.values())
                self.close(actor.number, cancel=not has_calls)  # else its exit hook may have begun

    def _start(self, link: HeadLink, actor: LiveActor, *, had_head: bool = False) -> None:
        steps = [self._send(link, actor, call) for call in (actor.constructor, actor.ending)]
        message = ActorMessage(
            number=actor.number,
            name=actor.name,
            constructor=steps[0],
            ending=steps[1],
            lanes=actor.lanes,
            nodes=actor.nodes,
            booking=(actor.gpus, actor.cpus, actor.memory_gib, actor.need),
            max_restarts=actor.max_restarts,
            restarts_left=actor.restarts_left,
            had_head=had_head,
            node=actor.node,
        )
        priority = link.priority_of(actor.number)
        made = self._requests.begin("start_actor", *message, priority=priority)
        ended = self._requests.begin("actor_closed", actor.number, priority=priority)
        made.add_done_callback(partial(self._made, actor, link))
        ended.add_done_callback(partial(self._ended, actor, link))

    def _send(self, link: HeadLink, actor: LiveActor, call: PackedCall) -> tuple[str, bytes, bytes]:
        try:
            link.send_parts(call.function, call.payload)
        except OSError as error:
            raise cannot_send(repr(actor.name), error) from error
        self._ledger.dirty.add(link)
        if call.payload.blobs or call.function.payload.blobs:
            link.stay_behind(actor.number)
        return call.name, call.function.digest, call.payload.body

    def _is_asked_again(self, link: HeadLink, error: BaseException | None) -> bool:
        """Return whether the head that was asked is gone, and another one has been asked the same."""
        return error is not None and self._survives and self.link is not link

    def _made(self, actor: LiveActor, link: HeadLink, future: Any) -> None:
        error = future.exception()
        if self._is_asked_again(link, error):
            return
        if error is None:
            actor.node, actor.is_made = future.result(), True
            actor.made.settle(None)
        else:
            actor.made.settle_error(error)

    def moved(self, number: int, node: int | None) -> None:
        """Note the node of an actor; None while it waits for one, because it restarts."""
        actor = self._ledger.actors.get(number)
        if actor is not None:
            actor.node = node
            actor.restarts_left -= node is None

    def _ended(self, actor: LiveActor, link: HeadLink, future: Any) -> None:
        error = future.exception()
        if not self._is_asked_again(link, error):
            self._lost(actor, error)

    def _lost(self, actor: LiveActor, error: BaseException | None) -> None:
        """Forget an actor that has ended."""
        with self._ledger:
            self._ledger.actors.pop(actor.number, None)
            self._forgotten.discard(actor.number)
            actor.is_made = False
            if self.link is not None:
                for call in (actor.constructor, actor.ending):
                    self.link.release_parts(call.function, call.payload)
        actor.constructor = actor.ending  # its arguments may hold the handles of other actors
        if error is None:
            actor.closed.settle(None)
        else:
            actor.closed.settle_error(error)

    def close(self, number: int, *, cancel: bool = False) -> None:
        actor = self._ledger.actors.get(number)
        if actor is not None:
            actor.is_closing = True
        priority = CONTROL if self.link is None else self.link.priority_of(number)
        self._requests.begin("close_actor", number, cancel, priority=priority)

    def forget(self, number: int) -> None:
        self.soon(lambda: self._forget(number))

    def _forget(self, number: int) -> None:
        if number in self._ledger.actors:
            self._forgotten.add(number)
        priority = CONTROL if self.link is None else self.link.priority_of(number)
        self._requests.begin("forget_actor", number, priority=priority)

    def close_all(self) -> None:
        with contextlib.suppress(SkywardError):  # the head is gone, and with it the actors
            self._requests.ask("close_actors")

    def work(self) -> tuple[ActorWork, ...]:
        work: tuple[ActorWork, ...] = self._requests.ask("actor_work", timeout_s=_ASK_S)
        return work

    def stop(self) -> None:
        """Forget all actors, because the engine ends. Needs the ledger's lock."""
        error = PoolClosed("pool: closed before the actor was made; make actors inside its `with` block")
        for actor in self._ledger.actors.values():
            self._ledger.after.append(lambda actor=actor: actor.closed.settle(None))  # type: ignore[misc]
            self._ledger.after.append(lambda actor=actor: actor.made.settle_error(error))  # type: ignore[misc]
        self._ledger.actors.clear()
