"""Engine whose scheduler runs in a head: the client sends it calls, and lends it the channels to the nodes.

Tasks, gangs and actors are made here as for the direct engine, and their outcomes are decoded here, because only this
process has the user's modules. Everything between is the head's (`engine.head`).

Threads: any thread may submit and cancel. One I/O thread reads the link to the head. One more passes on the bytes of
the channels that are lent.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import socket
import sys
import time
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal

from ..calls.futures import Future, refuse_to_wait
from ..calls.named_options import pack_options
from ..console.activity import RunningTask
from ..core import interrupts
from ..core.limits import raise_file_limit
from ..errors import InternalError, NodeLost, PoolClosed, SkywardError, UsageError
from ..events import Emit, ignore
from ..schedule.scheduler import Scheduler
from ..values.launch_facts import LaunchFacts
from ..values.machine import Machine, Machines
from ..wire.channel import BLOBS, CONTROL, RESULTS
from ..wire.frames import FrameKind
from .builder import TaskBuilder
from .dialler import CommandEnds, Dialler, Forgotten, Taken
from .followed import SessionNumbers, follow_up
from .gang import Gang
from .head.kept_calls import CallFacts
from .head.messages import CallMessage, GangMessage, HeadConfig, pack_call
from .head.place import HeadPlace
from .head.requests import Requests
from .head_link import HeadLink, HeadRepair, NoWidth
from .hosted_frames import HostedFrames
from .hosted_parts import (
    HostedActors,
    HostedCallers,
    HostedChannels,
    HostedMembers,
    HostedNodes,
    HostedQuestions,
    HostedShared,
    HostedStreams,
)
from .hosted_values import HostedValues
from .ledger import Ledger
from .lender import Lender
from .liveness import Liveness
from .reader import Reader
from .task_events import TaskCounts
from .tasks import CallTask, Task, cannot_send

if TYPE_CHECKING:
    from .log_router import LineSink
    from .ray.raiser import RayRaiser

_DIAL_S = 20.0
_START_S = 60.0
"""Longest wait in seconds until the head has reached all nodes."""
_ASK_S = 5.0
_END_S = 10.0

_engines: weakref.WeakSet[HostedEngine] = weakref.WeakSet()


class HostedEngine:
    """Engine (see `skyward.engine.engine`) whose scheduler runs in a head.

    Args:
        config: Configuration of the head.
        place: Starts and ends the process of the head.
        lines: Destination of the calls' output.
        emit: Takes events.
        raiser: Raises Ray to carry the links between the nodes; None: the client's channels carry them.
        attaches: Whether the head has had another client before.
        takes_over: Whether to take the head from a client that is still there.
        left: Called when the head goes on without this client: another one has taken it over, or the head was killed
            and has begun again.
    """

    def __init__(
        self,
        config: HeadConfig,
        place: HeadPlace,
        *,
        lines: LineSink | None = None,
        emit: Emit = ignore,
        raiser: RayRaiser | None = None,
        attaches: bool = False,
        takes_over: bool = False,
        left: Callable[[], object] = lambda: None,
    ) -> None:
        self._config = config
        self._attaches = attaches
        self._takes_over = takes_over
        self._on_left = left
        self._is_up = False
        """Whether the head has taken the nodes."""
        self._place = place
        self._raiser = raiser
        self._counts = TaskCounts(busy=0, queued=0, ended=0, failed=0)
        self._link: HeadLink | None = None
        self._source: Machines | None = None
        self._numbers = numbers = SessionNumbers()
        self.ledger = ledger = Ledger(Scheduler(config.kept), numbers)
        self.requests = requests = Requests(
            self._tell,
            self._later,
            verbs={"actor_moved": self._actor_moved, **(raiser.verbs if raiser else {})},
            slow={**self._verbs(), **(raiser.slow_verbs if raiser else {})},
            numbers=numbers,
        )
        self.nodes = HostedNodes(ledger, requests)
        self.members = HostedMembers(requests)
        self.leader = HostedCallers(lambda task, nodes: self.submit(task, nodes=nodes), self.cancel)
        is_detached = bool(config.detached_for_s)
        self.streams = HostedStreams(ledger, self._forget, tells_each_item=is_detached)
        self.questions = HostedQuestions(requests)
        self.channels = HostedChannels(ledger, {})
        self.shared = HostedShared(requests, numbers)
        self.values = HostedValues(ledger, requests, ledger.numbers.__next__)
        self.actors = HostedActors(ledger, requests)
        self.builder = TaskBuilder(
            ledger.numbers.__next__, self.nodes.ranks_per_node, self.cancel_gang, config.default_timeout_s
        )
        self._lender = Lender(self._tell, ledger.machines.get)
        self._liveness = Liveness()
        self._repair = HeadRepair(
            ledger,
            self._liveness,
            config.detached_for_s or config.lease_s,
            self._head_lost,
            self._taken_over,
            self._began_again,
        )
        frames = HostedFrames(
            ledger,
            self.values,
            lines=lines,
            emit=emit,
            forget=self._forget,
            on_facts=self.nodes.on_facts,
            read=self._read if is_detached else None,
            plain={
                **self._lender.handlers,
                FrameKind.REQUEST: requests.on_frame,
                FrameKind.REPLY: requests.on_frame,
            },
            others={
                FrameKind.FETCHED: self.values.on_fetched,
                FrameKind.CHANNEL: self.channels.on_open,
                FrameKind.MESSAGE: self.channels.on_frame,
                FrameKind.TAKEN: self.channels.on_frame,
                FrameKind.END_CHANNEL: self.channels.on_frame,
            },
        )
        self._reader = Reader(
            ledger,
            frames,
            self._repair,
            self._repair,
            NoWidth(),
            self._liveness,
            recall=lambda: None,
            stop=self._stop_abandoned,
            died=self._die,
        )
        self.values.soon = self.actors.soon = self._reader.soon

    # Life -----------------------------------------------------------------------------------------------------------

    def start(self, machines: list[Machine], source: Machines) -> None:
        raise_file_limit()
        self._source = source
        self.ledger.machines.update((machine.node, machine) for machine in machines)
        argv = self._place.start(self._config)
        dialler = Dialler(
            functools.partial(CommandEnds, argv),
            role="client",
            pool=self._config.pool,
            node=0,
            peer="head",
            is_known=self._attaches,
            **self._greeting(),
        )
        try:
            ends, facts = dialler.dial_until(time.monotonic() + _DIAL_S, self._liveness.times)
        except Taken as error:
            advice = "close it or detach there, or attach with take_over=True"
            raise UsageError(f"pool {self._config.pool!r}: takes one client, and {error}; {advice}") from error
        except Forgotten as error:
            raise PoolClosed(f"pool {self._config.pool!r}: its head is gone; open the pool again") from error
        self._numbers.begin(facts["first_number"])
        dialler.channel.attach(ends, facts["received"])
        link = self._link = HeadLink(facts, dialler)
        link.named_by = self.values.named
        for part in (self.nodes, self.streams, self.channels, self.values, self.actors):
            part.link = link
        with self.ledger.lock:
            self.ledger.is_open = True
            self._repair.watch(link)
        self._reader.start()
        _engines.add(self)
        if self._attaches:
            self.requests.ask("there", timeout_s=_START_S)  # behind the facts of the nodes
        else:
            self.requests.ask("use", [_plain(machine) for machine in machines], timeout_s=_START_S)
        self._is_up = True
        if self._raiser is not None:
            self._raiser.begin(self.ledger.machines, machines[0].node, self.requests.ask)

    def _greeting(self) -> dict[str, Any]:
        """Return what the head is told of this process."""
        who = {"host": socket.gethostname(), "program": os.path.basename(next(iter(sys.argv), ""))}
        if not self._attaches:
            return who
        return {**who, "attach_key": self._config.attach_key, "takes_over": self._takes_over}

    @property
    def carrier(self) -> Literal["direct", "ray"]:
        return "ray" if self._raiser is not None and self._raiser.is_up else "direct"

    @property
    def was_started(self) -> bool:
        """Return False: the agents end by the word of who has their machines, not by that of the head."""
        return False

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        refuse_to_wait("closing the pool")
        ledger = self.ledger

        def is_idle() -> bool:
            return not ledger.is_open or not (ledger.tasks or ledger.gangs)

        with ledger.idle:
            if timeout_s is None:
                interrupts.wait_for(lambda slice_s: ledger.idle.wait_for(is_idle, slice_s))
            elif not ledger.idle.wait_for(is_idle, timeout_s):
                return False
        try:
            return not ledger.is_open or bool(self.requests.ask("wait_idle", timeout_s))
        except SkywardError:  # the head is gone, and with it everything to wait for
            return True

    def cancel_all(self, reason: SkywardError | None = None) -> None:
        with self.ledger:
            tasks, gangs = list(self.ledger.tasks.values()), list(self.ledger.gangs.values())
        error = reason or _closed_early()
        _fail(tasks, gangs, error)
        # The newest first: otherwise each cancelled one makes room for another, which is cancelled on its node.
        for task in sorted(tasks, key=lambda task: -task.id):
            self.cancel(task.id)
        for gang in gangs:
            self.cancel_gang(gang.id)
        if self._link is not None and self.ledger.is_open:
            with contextlib.suppress(SkywardError, TimeoutError):  # the head is gone, and everything with it
                self.requests.ask("cancel_all", timeout_s=_END_S)

    def wait_stopped(self) -> bool:
        try:
            return bool(self.requests.ask("wait_stopped", timeout_s=self._config.cancel_grace_s + 2))
        except (SkywardError, TimeoutError):  # the head is gone
            return False

    def close(self) -> None:
        self._ask_counts()
        if self.ledger.is_open:
            with contextlib.suppress(SkywardError, TimeoutError):
                self.requests.ask("close", timeout_s=_END_S)
        self._end(_closed_early())
        self._reader.join()
        self._lender.close()
        self._release()

    def leave(self) -> None:
        """Leave the head and its calls to another client, and end everything here."""
        if self.ledger.is_open:
            with contextlib.suppress(SkywardError, TimeoutError):  # the head is gone, or not to be reached
                # Behind all calls and their blobs, so that everything has arrived.
                self.requests.begin("leave", priority=BLOBS).result(_END_S)
        self._end(_left())
        self._reader.join()
        self._lender.close()
        self._release(leaves=True)

    def _end(self, error: SkywardError) -> None:
        """Fail everything that is open, and let the I/O thread end."""
        if self._raiser is not None:
            self._raiser.stop()
        with self.ledger:
            tasks, gangs = self.ledger.close_all()
            self.channels.close()
            self.values.close()
            self.actors.stop()
        self.requests.close(error)
        _fail(tasks, gangs, error)
        self.ledger.watcher.wake()

    def _release(self, *, leaves: bool = False) -> None:
        if self._link is not None:
            self._link.close()
        if not leaves:
            self._place.stop()
        if self._raiser is not None:
            self._raiser.close()
        self.ledger.watcher.close()
        interrupts.restore()
        _engines.discard(self)

    def _head_lost(self, why: str) -> None:
        """End the engine, because its scheduler is gone, and with it what the calls became."""
        text = f"head of the pool: is gone ({why}); open the pool again, and send the calls again"
        error = self.ledger.ended_by = NodeLost(text, node=0)
        self._end(error)

    def _taken_over(self, why: str) -> None:
        """End the engine, because another client has the head now."""
        text = f"pool: another client has taken it over, {why}; attach with take_over=True to take it back"
        error = self.ledger.ended_by = PoolClosed(text)
        self._on_left()
        self._end(error)

    def _began_again(self) -> None:
        """End the engine, because its head was killed. The next one keeps the pool for a client that attaches."""
        text = (
            "head of the pool: was killed and has begun again, so this program has left the pool; attach to it with "
            "sky.ComputePool.attach() for the values that it keeps"
        )
        error = self.ledger.ended_by = NodeLost(text, node=0)
        if self._is_up:
            self._on_left()
        self._end(error)

    def _die(self, cause: BaseException) -> None:
        error = InternalError(f"I/O thread of the pool: died of {type(cause).__name__}: {cause}; report this bug")
        error.__cause__ = cause
        self._end(error)

    def forget_in_child(self) -> None:
        """Close the descriptors and the pool in a forked child of the client."""
        self.ledger.forget_in_child()
        if self._link is not None:
            self._link.channel.close_in_child()
        self._lender.forget_in_child()
        self._place.forget_in_child()
        with contextlib.suppress(OSError):  # closed before the fork
            self.ledger.watcher.close_in_child()

    # Calls ----------------------------------------------------------------------------------------------------------

    def submit(self, task: Task, *, nodes: tuple[int, ...] | None = None, after_s: float = 0.0) -> None:
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
        with self.ledger:
            self.ledger.require_open()
            self.ledger.tasks[task.id] = task
            if not self._send(task, message):
                self._forget(task)

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
        with self.ledger:
            self.ledger.require_open()
            self.ledger.gangs[gang.id] = gang
            if not self._send(gang, message):
                self._forget(gang)

    def _send(self, call: Task | Gang, message: CallMessage) -> bool:
        """Send a call. Return False if there is no room for that, and fail the call."""
        link = self._link
        assert link is not None
        body = pack_call(message, call.payload.body)
        actor = call.actor if isinstance(call, Task) else 0
        try:
            link.send_call(call.id, body, call.function, call.payload, behind=actor)
        except OSError as error:
            failure = cannot_send(repr(call.name), error)
            fail = call.on_failed if isinstance(call, Task) else call.future.settle_error
            self.ledger.after.append(lambda: fail(failure))
            return False
        self.ledger.dirty.add(link)
        return True

    def cancel(self, task_id: int) -> None:
        with self.ledger:
            task = self.ledger.tasks.get(task_id)
            if task is not None:
                task.is_cancelled = True
                self._uncall(task_id)
                self._forget(task)

    def cancel_gang(self, gang_id: int) -> None:
        with self.ledger:
            gang = self.ledger.gangs.get(gang_id)
            if gang is not None:
                gang.is_cancelled = True
                self._uncall(gang_id)
                self._forget(gang)

    def _uncall(self, number: int) -> None:
        if self._link is not None:
            self._link.tell_of(number, FrameKind.UNCALL)
            self.ledger.dirty.add(self._link)

    def abandon(self, task_id: int) -> None:
        self._reader.abandon(task_id)

    def _stop_abandoned(self, task_id: int) -> None:
        task = self.ledger.tasks.get(task_id)
        if hasattr(task, "stream"):
            self.streams.close(task_id)
        else:
            self.cancel(task_id)

    def _read(self, number: int) -> None:
        """Tell the head that the outcome of a call was read, so that no other client gets it."""
        with self.ledger:
            if self.ledger.is_open:
                self._uncall(number)

    # Calls of an earlier client ---------------------------------------------------------------------------------------

    def calls(self) -> list[CallFacts]:
        """Return the calls of a detached pool that are open, or whose outcome nobody has taken."""
        calls: list[CallFacts] = self.requests.ask("calls")
        return calls

    def extend(self, seconds: float) -> None:
        """Let a detached pool go on for so much longer without a client."""
        self.requests.ask("extend", seconds)

    def follow(self, number: int) -> Future[Any]:
        """Return a future of a call that this or an earlier client has made.

        Raises:
            UsageError: There is no such call.
        """
        with self.ledger:
            own = self.ledger.tasks.get(number), self.ledger.gangs.get(number)
        for call in own:
            if isinstance(call, CallTask | Gang):
                return call.future
        if own[0] is not None:
            raise UsageError(f"call={number}: this program reads its values already; use the iterator that it has")
        facts: CallFacts = self.requests.ask("call", number)
        future, followed = follow_up(facts, self)
        with self.ledger:
            self.ledger.require_open()
            if isinstance(followed, Gang):
                self.ledger.gangs[number] = followed
            else:
                self.ledger.tasks[number] = followed
        try:
            self.requests.ask("follow", number)
        except BaseException:
            with self.ledger:
                self._forget(followed)
            raise
        return future

    def _forget(self, call: Task | Gang) -> None:
        """Forget a call that has ended, or that nobody waits for. Needs the ledger's lock."""
        if isinstance(call, Gang):
            self.ledger.gangs.pop(call.id, None)
        else:
            self.ledger.tasks.pop(call.id, None)
        link = self._link
        if link is not None:
            link.ended(call.id, call.function, call.payload)
            if link.channel.has_output:
                self.ledger.dirty.add(link)
        if not self.ledger.tasks and not self.ledger.gangs:
            self.ledger.idle.notify_all()

    # To the head -----------------------------------------------------------------------------------------------------

    def _tell(self, kind: int, number: int, body: bytes = b"", lane: int = 0, priority: int | None = None) -> None:
        with self.ledger:
            if self._link is not None:
                is_lent = kind in self._lender.handlers
                chosen = (RESULTS if is_lent else CONTROL) if priority is None else priority
                self._link.channel.queue(kind, number, body, lane=lane, priority=chosen)
                self.ledger.dirty.add(self._link)

    def _later(self, action: Callable[[], object]) -> None:
        """Call a function at the end of this block of the ledger, without the lock."""
        self.ledger.after.append(action)

    # Verbs of the head ----------------------------------------------------------------------------------------------

    def _verbs(self) -> dict[str, Callable[..., Any]]:
        return {
            "replace": self._replace,
            "prepare_replacement": lambda node: self._machines().prepare_replacement(node),
            "give_up": lambda node: self._machines().give_up(node),
            "why_gone": lambda node: self._machines().why_gone(node),
            "find_actor": self._find_actor,
        }

    def _actor_moved(self, number: int, node: int | None) -> None:
        self.actors.moved(number, node)

    def _machines(self) -> Machines:
        assert self._source is not None
        return self._source

    def _replace(self, node: int) -> Machine | None:
        machine = self._machines().replace(node)
        if machine is None:
            return None
        with self.ledger:
            self.ledger.machines[node] = machine
        return _plain(machine)

    def _find_actor(self, name: str) -> bytes:
        payload = self.actors.find(name)
        if payload.blobs:
            raise InternalError(f"actor {name!r}: its handle is too large; report this bug")
        return payload.body

    # Monitoring -----------------------------------------------------------------------------------------------------

    def counts(self) -> TaskCounts:
        self._ask_counts()
        return self._counts

    def _ask_counts(self) -> None:
        if self.ledger.is_open:
            with contextlib.suppress(SkywardError, TimeoutError):  # the last known ones are better than none
                self._counts = self.requests.ask("counts", timeout_s=_ASK_S)

    def why_waiting(self, call: int) -> str:
        return str(self.requests.ask("why_waiting", call))

    def running(self) -> tuple[RunningTask, ...]:
        running: tuple[RunningTask, ...] = self.requests.ask("running", timeout_s=_ASK_S)
        return running

    def tell_tasks(self, is_heard: bool) -> None:
        self.requests.tell("tell_tasks", is_heard)


def _plain(machine: Machine) -> Machine:
    """Return a machine without what only this process can use."""
    return dataclasses.replace(
        machine, channel=(), terminal=(), files=(), dial=None, login=None, offer=None, handle=None
    )


def _left() -> PoolClosed:
    return PoolClosed("pool: this program has left it, and its calls go on; attach to it again")


def _closed_early() -> PoolClosed:
    return PoolClosed("pool: closed before the call ended; wait for its value inside the `with` block")


def _fail(tasks: Iterable[Task], gangs: Iterable[Gang], error: SkywardError) -> None:
    """Fail all these tasks and gangs, without the lock."""
    for task in tasks:
        if not task.is_cancelled:
            task.on_failed(error)
    for gang in gangs:
        gang.future.settle_error(error)


def _forget_all_in_child() -> None:
    for engine in list(_engines):
        engine.forget_in_child()


os.register_at_fork(after_in_child=_forget_all_in_child)
