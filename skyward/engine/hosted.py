"""Engine whose scheduler runs in a head: the client sends it calls, and lends it the channels to the nodes.

Tasks, gangs and actors are made here as for the direct engine, and their outcomes are decoded here, because only this
process has the user's modules. Everything between is the head's (`engine.head`).

Threads: any thread may submit and cancel. One I/O thread reads the link to the head. One more passes on the bytes of
the channels that are lent.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import sys
import time
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal

from ..calls.futures import Future, may_wait, refuse_to_wait
from ..console.activity import RunningTask
from ..core import interrupts
from ..core.limits import raise_file_limit
from ..errors import HeadLost, InternalError, NodeLost, PoolClosed, Preempted, SkywardError, Unreachable, UsageError
from ..events import Emit, NodeReplaced, ignore
from ..schedule.scheduler import Scheduler
from ..values.machine import Gone, Machine, Machines
from ..wire.channel import BLOBS, CONTROL, RESULTS
from ..wire.frames import FrameKind
from .builder import TaskBuilder
from .dialler import CommandEnds, Dialler, Forgotten, Taken
from .followed import SessionNumbers
from .gang import Gang
from .head.kept_calls import CallFacts
from .head.messages import HeadConfig
from .head.place import HeadPlace
from .head.requests import Requests
from .head_link import HeadLink, HeadRepair, NoWidth
from .head_machines import HeadMachines
from .hosted_calls import HostedCalls
from .hosted_frames import HostedFrames
from .hosted_members import HostedMembers
from .hosted_parts import (
    HostedActors,
    HostedCallers,
    HostedChannels,
    HostedNodes,
    HostedQuestions,
    HostedShared,
    HostedStreams,
)
from .hosted_ray import HostedRay
from .hosted_values import HostedValues
from .ledger import Ledger
from .lender import Lender
from .liveness import Liveness
from .next_head import NextHead
from .other_heads import HeadCommand, OtherHeads
from .reader import Reader
from .task_events import TaskCounts
from .tasks import Task
from .threads import report

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
        are_apart: Whether the nodes are on other machines than this one.
        attaches: Whether the head has had another client before.
        takes_over: Whether to take the head from a client that is still there.
        left: Called when the head goes on without this client, because another one has taken it over.
        lost: Called with the reason when the head is gone, and no other one goes on.
    """

    _is_ending = False
    """Whether this client closes the pool, or leaves it."""

    def __init__(
        self,
        config: HeadConfig,
        place: HeadPlace,
        *,
        lines: LineSink | None = None,
        emit: Emit = ignore,
        raiser: RayRaiser | None = None,
        are_apart: bool | None = None,
        attaches: bool = False,
        takes_over: bool = False,
        left: Callable[[], object] = lambda: None,
        lost: Callable[[str], object] = lambda why: None,
    ) -> None:
        self._config = config
        self._attaches = attaches
        self._takes_over = takes_over
        self._replaces = not attaches
        """Whether this client replaces lost nodes."""
        self._on_left, self._on_lost, self._emit = left, lost, emit
        self._command: HeadCommand = tuple
        """Command that reaches the head."""
        self._token = os.urandom(8).hex()
        """Name of the session, which outlives the process of a head."""
        self._counts = TaskCounts(busy=0, queued=0, ended=0, failed=0)
        self._is_heard = False
        """Whether somebody wants to hear of each task."""
        self._numbers = numbers = SessionNumbers()
        self.ledger = ledger = Ledger(Scheduler(config.kept), numbers)
        self._ray = ray = HostedRay(raiser, ledger, attaches=attaches)
        self._machines = HeadMachines(ledger, self._on_node_lost, self._on_replaced)
        self.requests = requests = Requests(
            self._tell,
            self._later,
            verbs={**self._verbs(), **ray.verbs},
            slow={**self._machines.verbs, **self._slow_verbs(), **ray.slow_verbs},
            numbers=numbers,
        )
        self.nodes = HostedNodes(ledger, requests)
        is_detached = bool(config.detached_for_s)
        self.members = HostedMembers(
            ledger,
            requests,
            heads=lambda: self._heads,
            joined=self._raise_ray,
            left=ray.forget,
            is_detached=is_detached,
        )
        self._calls = calls = HostedCalls(ledger, requests, is_detached=is_detached)
        self.leader = HostedCallers(lambda task, nodes: self.submit(task, nodes=nodes), self.cancel)
        self.streams = HostedStreams(ledger, calls.forget, calls.took, calls.inputs, tells_each_item=is_detached)
        self.questions = HostedQuestions(requests)
        self.channels = HostedChannels(ledger, {})
        self.shared = HostedShared(requests, numbers)
        self.values = HostedValues(ledger, requests, ledger.numbers.__next__, keeps_copies=not is_detached)
        self.actors = HostedActors(ledger, requests, survives=not is_detached)
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
            why_gone=self._why_gone,
        )
        frames = HostedFrames(
            ledger,
            self.values,
            lines=lines,
            emit=emit,
            end=calls.end,
            on_facts=self._on_facts,
            came=calls.came,
            sent=calls.sent,
            took_input=calls.inputs.taken,
            read=calls.read if is_detached else None,
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
        self._linked = (calls, self.nodes, self.streams, self.channels, self.values, self.actors)
        self._next_head = next_head = NextHead(
            ledger,
            requests,
            self._repair,
            calls=calls,
            frames=frames,
            values=self.values,
            channels=self.channels,
            actors=self.actors,
            linked=self._linked,
            dialler=lambda: self._dialler(continues=True),
            told=self._tell_wishes,
            lost=self._end_without_head,
        )
        self._repair.succeed = self._go_on
        self._heads = OtherHeads(
            config,
            place,
            ledger,
            requests,
            next_head,
            dialler=self._dialler_to,
            machines=self._machines,
            lender=self._lender,
            ray=ray,
            are_apart=bool(config.node_folder) if are_apart is None else are_apart,
        )

    # Life -----------------------------------------------------------------------------------------------------------

    def start(self, machines: list[Machine], source: Machines | None) -> None:
        raise_file_limit()
        self._machines.source = source
        self.ledger.machines.update((machine.node, machine) for machine in machines)
        self._command = self._heads.start()
        dialler = self._dialler()
        try:
            ends, facts = dialler.dial_until(time.monotonic() + _DIAL_S, self._liveness.times)
        except Taken as error:
            advice = "close it or detach there, or attach with take_over=True"
            raise UsageError(f"pool {self._config.pool!r}: takes one client, and {error}; {advice}") from error
        except Forgotten as error:
            raise PoolClosed(f"pool {self._config.pool!r}: its head is gone; open the pool again") from error
        self._numbers.begin(facts["first_number"])
        dialler.channel.attach(ends, facts["received"])
        link = HeadLink(facts, dialler)
        link.named_by = self.values.named
        for part in self._linked:
            part.link = link
        with self.ledger.lock:
            self.ledger.is_open = True
            self._repair.watch(link)
        self._reader.start()
        _engines.add(self)
        if self._attaches:
            self._ask_in_time("there", "attach again")  # behind the facts of the nodes
        else:
            self._ask_in_time("use", "open the pool again", self._machines.told())
        self._raise_ray()
        self._heads.may_change = not self._config.detached_for_s

    def _ask_in_time(self, verb: str, advice: str, *arguments: Any) -> None:
        """Ask the head, which answers once it has reached the nodes. Raises Unreachable, with the advice."""
        try:
            self.requests.ask(verb, *arguments, timeout_s=_START_S)
        except TimeoutError:
            text = f"head of the pool: did not reach all nodes within {_START_S:g} s; {advice}"
            raise Unreachable(text) from None

    def _raise_ray(self) -> None:
        self._ray.raise_on(self._heads.node, self.requests.ask)

    def _dialler_to(self, command: HeadCommand) -> Dialler:
        """Return a dialler of another head."""
        self._command = command
        return self._dialler()

    def _dialler(self, *, continues: bool = False) -> Dialler:
        """Return a dialler of the head. `continues`: it goes on with the session of a killed one."""
        more: dict[str, Any] = {"host": socket.gethostname(), "program": os.path.basename(next(iter(sys.argv), ""))}
        more |= {"token": self._token, "replaces": self._replaces}
        if continues:
            more["continues"] = True
        elif self._attaches:
            more |= {"attach_key": self._config.attach_key, "takes_over": self._takes_over}
        command = self._command
        return Dialler(
            lambda: CommandEnds(command()),
            role="client",
            pool=self._config.pool,
            node=0,
            peer="head",
            is_known=self._attaches or continues,
            **more,
        )

    @property
    def _link(self) -> HeadLink | None:
        return self._calls.link

    @property
    def carrier(self) -> Literal["direct", "ray"]:
        return "ray" if self._ray.is_up else "direct"

    @property
    def was_started(self) -> bool:
        """Return False: the agents end by the word of who has their machines, not by that of the head."""
        return False

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        refuse_to_wait("closing the pool")
        ledger = self.ledger

        def is_idle() -> bool:
            return not ledger.is_open or not (ledger.arrivals or ledger.tasks or ledger.gangs)

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
        self._cancel(tasks, gangs, reason or _closed_early())
        if self._link is not None and self.ledger.is_open:
            with contextlib.suppress(SkywardError, TimeoutError):  # the head is gone, and everything with it
                self.requests.ask("cancel_all", timeout_s=_END_S)

    def fail_waiting(self, error: SkywardError) -> None:
        with self.ledger:
            tasks, gangs = list(self.ledger.tasks.values()), list(self.ledger.gangs.values())
            actors = list(self.ledger.actors)
        self._cancel(tasks, gangs, error)
        for number in actors:
            self.actors.close(number, cancel=True)

    def _cancel(self, tasks: list[Task], gangs: list[Gang], error: SkywardError) -> None:
        _fail(tasks, gangs, error)
        # The newest first: otherwise each cancelled one makes room for another, which is cancelled on its node.
        for task in sorted(tasks, key=lambda task: -task.id):
            self.cancel(task.id)
        for gang in gangs:
            self.cancel_gang(gang.id)

    def wait_stopped(self) -> bool:
        try:
            return bool(self.requests.ask("wait_stopped", timeout_s=self._config.cancel_grace_s + 2))
        except (SkywardError, TimeoutError):  # the head is gone
            return False

    def close(self) -> None:
        self._ask_counts()
        self._is_ending = True
        if self.ledger.is_open:
            with contextlib.suppress(SkywardError, TimeoutError):
                self.requests.ask("close", timeout_s=_END_S)
        self._end(_closed_early())
        self._reader.join()
        self._lender.close()
        self._release()

    def leave(self) -> None:
        """Leave the head and its calls to another client, and end everything here."""
        self._is_ending = True
        if self.ledger.is_open:
            with contextlib.suppress(SkywardError, TimeoutError):  # the head is gone, or not to be reached
                # Behind all calls and their blobs, so that everything has arrived.
                self.requests.begin("leave", priority=BLOBS).result(_END_S)
        self._end(_left())
        self._reader.join()
        self._lender.close()
        self._release(leaves=True)

    def await_arrival(self, limit_s: float) -> None:
        """Wait until the head has all calls that were made. Raises TimeoutError after these seconds; PoolClosed."""
        self.requests.begin("calls", priority=BLOBS).result(limit_s)  # older heads know it, too

    def why_needed(self, limit_s: float) -> str:
        """Return why a detached pool cannot go on without this client, after at most this time; empty: it can.

        Raises:
            HeadLost: It is gone.
        """
        why = self._ray.why_needed(limit_s)
        self.ledger.require_open()
        return why

    def _end(self, error: SkywardError) -> None:
        """Fail everything that is open, and let the I/O thread end."""
        self._ray.stop()
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
            self._heads.stop()
        self._ray.close(leaves=leaves)
        self.ledger.watcher.close()
        interrupts.restore()
        _engines.discard(self)

    def _head_lost(self, why: str, *, has_ended: bool = False, gone: Gone | None = None) -> None:
        """Go on with another head if there can be one. `OtherHeads.change` has the arguments."""
        if self._is_ending:  # it was told to end, or goes on alone
            self._end(_closed_early())
            return
        link = self._link
        assert link is not None
        try:
            goes_on = self._heads.change(link, why, has_ended=has_ended, gone=gone)
        except Exception as error:  # nobody else would end what waits for the head
            report(error)
            goes_on = False
        if not goes_on:
            self._end_without_head(why, is_preempted=gone is not None and gone.is_preempted)

    def _go_on(self, before: HeadLink, deadline: float) -> None:
        """Go on with the process that has begun for a killed head, and lend it channels of its own."""
        self._lender.end_all()
        self._next_head.go_on(before, deadline)

    def _why_gone(self) -> Gone | None:
        """Return why the head's machine is gone for certain; None: it may be there."""
        return self._heads.why_gone()

    def _end_without_head(self, why: str, *, is_preempted: bool = False) -> None:
        """End the engine, because its scheduler is gone, and with it what the calls became."""
        loss, end = (Preempted if is_preempted else NodeLost), ""
        if self._config.detached_for_s:
            loss, end = HeadLost, ", and a detached pool ends with it"
        text = f"head of the pool: is gone ({why}){end}; open the pool again, and send the calls again"
        error = self.ledger.ended_by = loss(text, node=0)
        self._on_lost(why)
        self._calls.count_lost()
        self._end(error)

    def _taken_over(self, why: str) -> None:
        """End the engine, because another client has the head now."""
        text = f"pool: another client has taken it over, {why}; attach with take_over=True to take it back"
        error = self.ledger.ended_by = PoolClosed(text)
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
        self._heads.forget_in_child()
        with contextlib.suppress(OSError):  # closed before the fork
            self.ledger.watcher.close_in_child()

    # Calls ----------------------------------------------------------------------------------------------------------

    def submit(self, task: Task, *, nodes: tuple[int, ...] | None = None, after_s: float = 0.0) -> None:
        self._calls.submit(task, nodes, after_s)

    def submit_gang(self, gang: Gang) -> None:
        self._calls.submit_gang(gang)

    def cancel(self, task_id: int) -> None:
        self._calls.cancel(task_id)

    def cancel_gang(self, gang_id: int) -> None:
        self._calls.cancel_gang(gang_id)

    def abandon(self, task_id: int) -> None:
        self._reader.abandon(task_id)

    def _stop_abandoned(self, task_id: int) -> None:
        task = self.ledger.tasks.get(task_id)
        if hasattr(task, "stream"):
            self.streams.close(task_id)
        else:
            self.cancel(task_id)

    def calls(self) -> list[CallFacts]:
        """Return the calls of a detached pool that are open, or whose outcome nobody has taken."""
        return self._calls.listed()

    def follow(self, number: int) -> Future[Any]:
        """Return a future of a call that this or an earlier client has made. Raises UsageError: there is none."""
        return self._calls.follow(number, self)

    def extend(self, seconds: float) -> None:
        """Let a detached pool go on for so much longer without a client."""
        self.requests.ask("extend", seconds)

    def limit(self, seconds: float) -> Future[None]:
        """Let a detached pool go on without a client for at most this long from now, once the head has replied."""
        return self.requests.begin("limit", seconds)

    def blueprint(self) -> tuple[bytes, tuple[str, ...]]:
        """Return what it takes to build a node of a detached pool, and the values of its secrets; else nothing."""
        try:
            data, secrets = self.requests.ask("blueprint", timeout_s=_ASK_S)
        except KeyError:  # the head of an older version
            return b"", ()
        return data, secrets

    def replace_lost(self) -> None:
        """Replace the nodes that a detached pool has lost, and those that it loses, as the client that opened it."""
        self._replaces = True
        self.requests.tell("replace_lost")

    def _on_facts(self, message: bytes) -> None:
        self.nodes.on_facts(message)
        up = set(self.nodes.agent_pids())
        self.members.have_come(up)
        if not self._replaces:
            for node in set(self.ledger.machines) - up:
                del self.ledger.machines[node]

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
            "actor_moved": self._actor_moved,
            "came": lambda: None,
            "forbid": self._forbid,
            "given_back": self._given_back,
            "inputs_at": self._inputs_at,
            "retried": self._retried,
            "thing": lambda kind, name, is_there: self._heads.note_thing((kind, name), is_there=is_there),
        }

    def _slow_verbs(self) -> dict[str, Callable[..., Any]]:
        return {"find_actor": self._find_actor, "put_again": self._put_again}

    def _actor_moved(self, number: int, node: int | None) -> None:
        self.actors.moved(number, node)

    def _retried(self, number: int, left: tuple[Any, ...]) -> None:
        self._calls.retried(number, left)

    def _forbid(self, numbers: list[int]) -> None:
        self._calls.forbid(numbers)

    def _given_back(self, node: int) -> None:
        self.members.given_back(node)

    def _inputs_at(self, number: int, positions: dict[int, tuple[Any, ...]]) -> None:
        self._calls.inputs_at(number, positions)

    def _on_node_lost(self, node: int, *, is_preempted: bool = False) -> None:
        if node not in self._machines.relieved:  # else nothing that is open here has run there
            self._calls.doubt(node, is_preempted=is_preempted)
        self._heads.node_replaced(node)
        self.members.node_lost(node)

    def _on_replaced(self, node: int, gone: Gone, seconds: float) -> None:
        """Leave a head whose rented machine ends, because its node has another one."""
        if node != self._heads.node or not self._heads.machine_ends or self._link is None:
            return
        self._repair.machine_gone(self._link, gone)
        if node in self.ledger.machines:  # the head hears of it no more, so it tells nobody
            self._emit(NodeReplaced(node=node, seconds=seconds))

    def _find_actor(self, name: str) -> bytes:
        payload = self.actors.find(name)
        if payload.blobs:
            raise InternalError(f"actor {name!r}: its handle is too large; report this bug")
        return payload.body

    def _put_again(self, digest: bytes) -> bool:
        return self.values.put_again(digest)

    # Monitoring -----------------------------------------------------------------------------------------------------

    def counts(self) -> TaskCounts:
        self._ask_counts()
        calls, counts = self._calls, self._counts
        # A head that follows a killed one has not counted the calls before.
        ended, failed = max(counts.ended, calls.ended), max(counts.failed, calls.failed)
        return dataclasses.replace(counts, ended=ended, failed=failed)

    def _ask_counts(self) -> None:
        if self.ledger.is_open:
            with contextlib.suppress(SkywardError, TimeoutError):  # the last known ones are better than none
                self._counts = self.requests.ask("counts", timeout_s=_ASK_S)

    def why_waiting(self, call: int) -> str:
        def note(done: Any) -> None:
            if done.exception() is None:
                self._calls.told_why(call, str(done.result()))

        asked = self.requests.begin("why_waiting", call)
        asked.add_done_callback(note)
        if may_wait():  # otherwise this thread brings the answer, for the next time
            with contextlib.suppress(SkywardError, TimeoutError):  # the last known one is better than none
                return str(asked.result(_ASK_S))
        return self._calls.why(call)

    def running(self) -> tuple[RunningTask, ...]:
        running: tuple[RunningTask, ...] = self.requests.ask("running", timeout_s=_ASK_S)
        return running

    def tell_tasks(self, is_heard: bool) -> None:
        self._is_heard = is_heard
        self.requests.tell("tell_tasks", is_heard)

    def _tell_wishes(self) -> None:
        """Tell another head what somebody here wants to hear of, and which nodes may come."""
        self.members.go_on()
        self.nodes.tell_again()
        if self._is_heard:
            self.tell_tasks(True)
        if self._replaces and self._attaches:
            self.replace_lost()
        if keys := self._ray.keys:
            self.requests.tell("ray_keys", *keys)


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
