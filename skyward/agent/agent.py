"""The agent: what each frame does, and what happens when a process dies. Which slot gets which task: `placing`."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from ..errors import InternalError, RendezvousFailed
from ..slot.page import CURRENT
from ..slot.ports import PortLocks
from ..slot.zygote import ForkOrder
from ..topology import Rank
from ..wire.channel import Channel
from ..wire.ends import CAN_STRIPE
from ..wire.frames import PROTOCOL_VERSION, QUIET, Frame, Kind
from ..wire.tasks import TASK_KIND_AT, CallKind, NodeConfig, RankOrder
from .blobs import NodeBlobs
from .facts import node_facts
from .loop import Loop
from .nested import NestedCalls
from .notice import NoticeWatch
from .placing import Placing
from .questions import Questions
from .session import Session
from .slots import Slot, make_slot
from .spool import Spool
from .stacks import RankWatch, crash_of
from .usage import UsageMeter
from .watchdog import Lease, kill_session
from .zygotes import Zygote

__all__ = ["Agent"]

_MAX_EARLY_DEATHS = 5
_AGAIN_S = 1.0
"""Pause before the next try of something that the machine has no room for now."""
_RANK_ENDS_S = 5.0
"""How long a rank's process may take to end after its last frame; a thread of the user's may keep it for ever."""
_OF_RANKS = "skyward.slot.worker"
"""What a zygote has imported anyway. It stands in the preload lists of ranks, so that slots have other zygotes."""
_FINAL = (Kind.RESULT, Kind.ERROR)


class Agent:
    """Runs in one thread; `run` returns when the agent was told to end."""

    def __init__(self, config: NodeConfig, lease: Lease, listener: socket.socket) -> None:
        self._config = config
        self._lease = lease
        self._listener = listener
        self._loop = Loop()
        self._client: Session | None = None
        self._topology = b""
        self._placing = Placing(
            self._loop,
            NodeBlobs(config.folder, config.blob_limit_bytes),
            on_readable=self._on_slot_readable,
            on_recalled=lambda task: self._send(Kind.RECALLED, task),
        )
        self._spool = Spool(config.folder, config.blob_limit_bytes)
        self._ports = PortLocks(config.address)
        self._failed_ranks: dict[int, bytes] = {}
        """What to answer when the task of a rank comes that is dead already."""
        self._zygotes: dict[tuple[str, ...], Zygote] = {}
        self._by_pid: dict[int, Slot] = {}
        self._forking: dict[int, Slot] = {}
        self._watch = RankWatch(self._loop, lambda task, body: self._send(Kind.STACK, task, body, lane=1))
        self._questions = Questions(lambda task, body, lane: self._send(Kind.ANSWER, task, body, lane=lane))
        self._nested = NestedCalls(self._forward, self._spool.failure_of, self._on_call_ended)
        self._usage = UsageMeter(self._loop, lambda body: self._send(Kind.USAGE, body=body))
        self._notice = NoticeWatch(self._loop, config.notice_file, self._tell_notice)
        self._orders = 0
        self._lines = 0
        self._dead_line: tuple[int, int, int] = (0, 0, 0)
        """Of the slot that died last and had a direct line: the line's number, the task it was in, its exit code."""
        self._early_deaths = 0
        self._handlers: dict[int, Callable[[Frame], None]] = {
            Kind.TASK: self._on_task,
            Kind.FUNCTION: self._placing.add_function,
            Kind.BLOB: lambda frame: (self._nested.on_blob if frame.ident else self._placing.add_blob)(frame),
            Kind.DROP_BLOB: self._placing.drop_blob,
            Kind.DROP_FUNCTION: self._placing.drop_function,
            Kind.CANCEL: self._on_cancel,
            Kind.RECALL: self._on_recall,
            Kind.RANK: self._on_rank,
            Kind.TAKE_STACK: self._on_take_stack,
            Kind.RESERVE_PORT: self._on_reserve_port,
            Kind.RELEASE_PORT: lambda frame: self._ports.release(frame.lane),
            Kind.USAGE: lambda frame: self._usage.ask(frame.lane / 10),
            Kind.HOLD: self._on_hold,
            Kind.UNHOLD: self._on_unhold,
            Kind.SLOT_CONFIG: self._on_topology,
            Kind.CREDIT: self._placing.pass_on,
            Kind.CLOSE: self._on_close,
            Kind.IN_ITEM: self._placing.pass_on,
            Kind.IN_END: self._placing.pass_on,
            Kind.IN_ERROR: self._placing.pass_on,
            Kind.ASK: self._questions.on_ask,
            Kind.OUTCOME: self._nested.on_outcome,
        }

    def run(self) -> None:
        self._loop.watch(self._listener, self._accept)
        lanes = self._config.slots if self._config.executor == "thread" else 1
        for number in range(self._config.slots // lanes):
            self._start_slot(number)
        self._loop.run()
        self._end()

    # Connections ----------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:  # no descriptors, perhaps for a moment: whoever knocks can wait
            self._say(f"a connection waits: {error.strerror}")
            self._loop.forget(self._listener)
            self._loop.call_later(_AGAIN_S, lambda: self._loop.watch(self._listener, self._accept))
            return
        Session(self._loop, Channel(sock), self._config.log_limit_bytes, self._on_frame, self._on_session_closed)

    def _on_frame(self, session: Session, frame: Frame) -> None:
        handler = self._handlers.get(frame.kind) if session is self._client else None
        if handler is not None:
            handler(frame)
        elif frame.kind == Kind.LEASE:
            self._lease.renew()
        elif frame.kind == Kind.HELLO:
            self._on_hello(session, frame)
        elif frame.kind == Kind.SHUTDOWN:
            self._loop.stop()
        elif frame.kind == Kind.ATTACH:
            session.on_attach(frame)
        elif frame.kind == Kind.ANSWER:
            self._questions.on_answer(session, frame)
        elif session.role == "caller":
            self._nested.on_slot_frame(session, frame)

    def _on_hello(self, session: Session, frame: Frame) -> None:
        hello = json.loads(frame.body)
        if not PROTOCOL_VERSION - 1 <= hello["version"] <= PROTOCOL_VERSION:
            why = f"this agent speaks protocol {PROTOCOL_VERSION}, the client {hello['version']}"
            session.greet(Kind.GOODBYE, json.dumps({"reason": why}).encode())
            return
        token = hello.get("token", "")
        if "stripe" in hello:
            self._on_stripe(session, hello)
            return
        facts = node_facts(dict(self._config.env))
        facts |= {"version": PROTOCOL_VERSION, "node": self._config.node, "pid": os.getpid(), "can_stripe": CAN_STRIPE}
        if hello.get("is_resumed"):
            if self._client is None or self._client.token != token:
                reason = {"reason": "this agent does not know the session", "is_unknown": True}
                session.greet(Kind.GOODBYE, json.dumps(reason).encode())
                return
            self._client.take_over(session, hello["received"])
            session = self._client
        session.role, session.token, session.link = hello["role"], token, hello.get("link", 0)
        if session.role == "task":
            self._questions.answers(session, hello["task"])
        if session.role == "client" and session is not self._client:
            before, self._client = self._client, session
            self._notice.again()
            if before is not None and before.token:  # nobody comes back to it
                before.close()
        session.greet(Kind.WELCOME, json.dumps({**facts, "received": session.received}).encode())

    def _on_stripe(self, session: Session, hello: dict[str, Any]) -> None:
        """A further channel of the client's link, if it still has that one."""
        client = self._client
        its_link = None if client is None or not client.is_attached else (client.token, client.link)
        if client is None or its_link != (hello["token"], hello["link"]):
            session.greet(Kind.GOODBYE, json.dumps({"reason": "the link is no more", "is_unknown": True}).encode())
            return
        session.greet(Kind.WELCOME, b"{}")
        client.widen(session, hello["stripe"], hello["stripes"])

    def _on_session_closed(self, session: Session) -> None:
        self._questions.closed(session)
        self._nested.closed(session)
        # The lease, not the connection, decides when the work ends.
        if session is self._client:
            self._client = None
            self._failed_ranks.clear()

    # What tasks stand on --------------------------------------------------------------------------------------------

    def _on_topology(self, frame: Frame) -> None:
        self._topology = frame.body
        for slot in [*self._placing.slots, *self._placing.ranks.values()]:
            self._placing.send_to(slot, frame)
            self._send_line(slot)

    def _on_reserve_port(self, frame: Frame) -> None:
        port, why = 0, b""
        try:
            port = self._ports.reserve()
        except RendezvousFailed as error:
            why = str(error).encode()
        self._send(Kind.PORT, frame.ident, why, lane=port)

    # Tasks ----------------------------------------------------------------------------------------------------------

    def _on_task(self, frame: Frame) -> None:
        if frame.body[TASK_KIND_AT] == CallKind.GANG and frame.ident not in self._placing.ranks:
            # Its process has died, or was never made. A plain slot would run it as something else.
            self._send_lost(frame.ident, self._failed_ranks.pop(frame.ident, self._lost(frame.ident, None, 1)))
            return
        self._placing.add(frame)

    # The direct line ------------------------------------------------------------------------------------------------

    def _send_line(self, slot: Slot) -> None:
        """Give the client its end, behind what the slot must know before a task reaches it there."""
        client = self._client
        if slot.line is not None and client is not None and client.passes_fds and self._topology:
            with contextlib.suppress(OSError):  # no descriptor is left: all calls go by the agent
                client.send(Kind.LINE, slot.line_number, fd=slot.line.fileno())
            slot.line.close()
            slot.line = None

    def _on_hold(self, frame: Frame) -> None:
        """A task on the line concerns the agent from now on: its slot is taken, it may be cancelled, it may be lost."""
        number = int.from_bytes(frame.body, "little")
        slot = next((s for s in self._placing.slots if s.line_number == number), None)
        if slot is not None:
            slot.running[frame.ident] = None
            slot.held = frame.ident
            self._placing.by_task[frame.ident] = slot
            return
        dead, begun, code = self._dead_line
        has_begun = dead != number or begun == frame.ident  # of a slot that is forgotten: it may have
        self._send_lost(frame.ident, self._lost_body(0 if has_begun else None, code))

    def _on_unhold(self, frame: Frame) -> None:
        slot = self._placing.by_task.get(frame.ident)
        if slot is not None:
            self._placing.ended(slot, frame.ident)
            self._placing.dispatch()

    # Ending tasks ---------------------------------------------------------------------------------------------------

    def _on_recall(self, frame: Frame) -> None:
        if self._placing.forget_unbegun(frame.ident):
            self._send(Kind.RECALLED, frame.ident)

    def _on_cancel(self, frame: Frame) -> None:
        """`lane` is the grace in tenths of a second before SIGKILL."""
        if self._placing.forget_unbegun(frame.ident):
            self._send(Kind.RECALLED, frame.ident)
            rank = self._placing.ranks.get(frame.ident)
            if rank is not None:
                rank.cancelled.add(frame.ident)
                self._kill(rank)
            return
        slot = self._placing.by_task.get(frame.ident)
        if slot is None:
            self._failed_ranks.pop(frame.ident, None)
            self._send(Kind.RECALLED, frame.ident)
            if frame.ident in self._placing.ranks:  # its task could not be sent
                self._kill(self._placing.ranks[frame.ident])
            return
        slot.cancelled.add(frame.ident)
        self._interrupt(slot, frame.ident)
        self._loop.call_later(frame.lane / 10, lambda: self._kill_if_running(slot, frame.ident))

    def _interrupt(self, slot: Slot, task: int) -> None:
        self._placing.send_to(slot, Frame(Kind.CLOSE, 0, 0, task, b""))
        if slot.executor == "process":
            slot.mark_cancelled(task)
            if slot.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(slot.pid, signal.SIGINT)

    def _kill_if_running(self, slot: Slot, task: int) -> None:
        # A thread cannot be killed without its neighbours: it runs on, and its result is dropped.
        if task in slot.running and slot.executor == "process":
            self._kill(slot)

    def _kill(self, slot: Slot) -> None:
        if slot.is_dead:
            return
        if slot.pid is None:  # its zygote is busy with an import, which may never end; see "forked"
            self._on_slot_dead(slot, 0, -signal.SIGKILL)
            return
        _kill_process(slot.pid)

    def _on_close(self, frame: Frame) -> None:
        """The consumer of a stream is gone: the generator is closed at its next yield, or interrupted, or killed."""
        slot = self._placing.by_task.get(frame.ident)
        if slot is None:
            self._on_cancel(frame)
            return
        self._placing.send_to(slot, frame)
        grace = self._config.cancel_grace_s

        def insist() -> None:
            if frame.ident in slot.running:
                self._on_cancel(Frame(Kind.CANCEL, 0, int(grace * 10), frame.ident, b""))

        self._loop.call_later(grace, insist)

    # What slots say -------------------------------------------------------------------------------------------------

    def _on_slot_readable(self, slot: Slot) -> None:
        try:
            for frame in slot.channel.receive():
                self._on_slot_frame(slot, frame)
        except BlockingIOError:
            return
        except ConnectionError:
            # Its process is ending; the zygote says how. Until then there is nothing to read.
            self._loop.forget(slot.channel)
        except InternalError as error:
            slot.is_broken = True
            self._loop.forget(slot.channel)
            self._say(f"a slot is killed, for what it sent is no frame: {error}")
            self._kill(slot)

    def _on_slot_frame(self, slot: Slot, frame: Frame) -> None:
        kind = frame.kind
        if kind in _FINAL:
            if not frame.flags & QUIET:
                self._read_output(slot, flush=False)
            self._forward(frame)
            self._placing.ended(slot, frame.ident)
            slot.has_replied = True
            self._early_deaths = 0
            if slot.rank is not None:
                self._loop.call_later(_RANK_ENDS_S, lambda: self._kill(slot))
            if self._placing.queue or self._placing.shelved:
                self._placing.dispatch()
        elif kind == Kind.LOG:
            self._log(frame.ident, frame.lane, frame.body)
        elif kind != Kind.READY:
            if kind == Kind.ITEM:
                self._read_output(slot, flush=False)
            self._forward(frame)

    def _forward(self, frame: Frame) -> None:
        client = self._client
        if client is not None:
            if frame.fd < 0 and not self._spool.has_failed:
                client.send_result(frame)
            else:
                for passed in self._spool.pass_on(frame, client.held_bytes):
                    client.send_result(passed)
        if frame.fd >= 0:
            os.close(frame.fd)

    def _on_call_ended(self, call: int) -> None:
        if self._client is not None:
            self._client.call_ended(call)

    def _read_output(self, slot: Slot, *, flush: bool = True) -> None:
        for task, stream, text in slot.output():
            if self._client is not None:
                self._client.add_log(task, stream, text)
        for reader in slot.outputs:
            if reader.is_closed:
                self._loop.forget(reader.fd)
        if flush and self._client is not None:
            self._client.flush()

    def _log(self, task: int, stream: int, text: bytes) -> None:
        if self._client is not None:
            self._client.add_log(task, stream, text)
            self._client.flush()

    def _tell_notice(self, said: bytes) -> bool:
        self._send(Kind.NOTICE, body=said)
        return self._client is not None

    def _send(self, kind: int, ident: int = 0, body: bytes = b"", *, lane: int = 0) -> None:
        if self._client is not None:
            self._client.send(kind, ident, body, lane=lane)

    # Processes ------------------------------------------------------------------------------------------------------

    def _start_slot(self, number: int) -> None:
        config = self._config
        lanes = config.slots if config.executor == "thread" else 1
        self._lines += 1
        try:
            slot = make_slot(
                number,
                lanes=lanes,
                executor=config.executor,
                workers_per_node=config.slots,
                notice_file=config.notice_file,
                line_number=self._lines if number == 0 and config.executor == "process" else 0,
                agent=self._listener.getsockname(),
            )
        except OSError as error:
            self._say(f"slot {number} waits for room: {error.strerror}")
            self._loop.call_later(_AGAIN_S, lambda: self._start_again(number))
            return
        self._placing.slots.append(slot)
        self._fork(slot, config.preload, b"")
        self._send_line(slot)

    def _on_rank(self, frame: Frame) -> None:
        order: RankOrder = pickle.loads(frame.body)
        env = (*_threads_of(order.rank, self._config), *order.env)
        try:
            slot = make_slot(
                order.rank.local_rank,
                rank=order.rank,
                deliver=bool(frame.lane),
                env=env,
                notice_file=self._config.notice_file,
                agent=self._listener.getsockname(),
            )
        except OSError as error:
            self._failed_ranks[frame.ident] = self._lost_body(None, 1, why=f"{type(error).__name__}: {error}")
            return
        self._placing.ranks[frame.ident] = slot
        self._fork(slot, (*order.preload, _OF_RANKS), order.launch)
        self._watch.watch(frame.ident, slot, order.tell_stopped_after_s)

    def _on_take_stack(self, frame: Frame) -> None:
        task = frame.ident
        slot = self._placing.ranks.get(task) or self._placing.by_task.get(task)

        def tell(said: dict[str, object]) -> None:
            self._send(Kind.STACK, task, json.dumps(said).encode())

        if slot is not None and slot.executor == "process":
            self._watch.take(slot, all_threads=bool(frame.lane), told=tell)
        else:  # it has ended, or is a thread: nobody can tell which of its process's threads it is
            tell({"stack": "", "state": ""})

    def _fork(self, slot: Slot, preload: tuple[str, ...], launch: bytes) -> None:
        slot.preload = preload
        self._loop.watch(slot.channel, lambda: self._on_slot_readable(slot))
        for reader in slot.outputs:
            self._loop.watch(reader.fd, lambda: self._read_output(slot))
        if self._topology:
            slot.channel.queue(Kind.SLOT_CONFIG, body=self._topology)
            self._placing.flush(slot)
        self._orders += 1
        self._forking[self._orders] = slot
        order = ForkOrder(number=self._orders, config=slot.config, launch=launch)
        try:
            self._zygote(preload).fork(order, slot.child_fds)
        except OSError as error:
            self._on_fork_failed(self._orders, f"{type(error).__name__}: {error}")
        slot.close_child_fds()

    def _zygote(self, preload: tuple[str, ...]) -> Zygote:
        zygote = self._zygotes.get(preload)
        if zygote is None:
            is_for_ranks = _OF_RANKS in preload
            zygote = Zygote(self._loop, self._config, preload, self._on_zygote, is_for_ranks=is_for_ranks)
            self._zygotes[preload] = zygote
        return zygote

    def _on_zygote(self, zygote: Zygote, event: tuple[object, ...]) -> None:
        match event:
            case ("forked", int(number), int(pid)):
                slot = self._forking.pop(number)
                if slot.is_dead:  # nobody waited for it any more
                    _kill_process(pid)
                    return
                slot.pid = pid
                self._by_pid[pid] = slot
                for task in slot.cancelled:
                    self._interrupt(slot, task)
            case ("exited", int(pid), int(status)):
                slot_of_pid = self._by_pid.pop(pid, None)
                if slot_of_pid is not None:
                    self._on_slot_dead(slot_of_pid, pid, os.waitstatus_to_exitcode(status))
            case ("failed", int(number), str(text)):
                self._on_fork_failed(number, text)
            case ("gone",):
                self._on_zygote_gone(zygote)

    def _on_fork_failed(self, number: int, text: str) -> None:
        slot = self._forking.pop(number)
        self._say(f"cannot start a process: {text}")
        slot.failure = text
        self._on_slot_dead(slot, 0, 1)

    def _say(self, text: str) -> None:
        sys.stderr.write(f"skyward: node {self._config.node}: {text}\n")
        sys.stderr.flush()

    def _on_zygote_gone(self, zygote: Zygote) -> None:
        """Its children died with it, and nobody is left to say so."""
        del self._zygotes[zygote.preload]
        orphans = [s for s in [*self._placing.slots, *self._placing.ranks.values()] if not s.is_dead]
        for number, slot in list(self._forking.items()):
            if slot.preload == zygote.preload:
                del self._forking[number]
        for slot in orphans:
            if slot.preload == zygote.preload:
                self._by_pid.pop(slot.pid or 0, None)
                self._on_slot_dead(slot, slot.pid or 0, -signal.SIGKILL)

    def _on_slot_dead(self, slot: Slot, pid: int, code: int) -> None:
        """Deliver what it had finished, report what it had begun, and put another in its place."""
        if slot.is_dead:
            return
        if pid:
            kill_session(pid)
        slot.is_dead = True  # it is given nothing more
        for frame in slot.receive():
            self._on_slot_frame(slot, frame)
        self._read_output(slot)
        if slot.line_number:
            self._dead_line = slot.line_number, int(slot.page[CURRENT]), code
        if slot.shelved is not None:
            self._placing.take_back(slot.shelved.frame.ident)
        for task in list(slot.running):
            self._report_lost(slot, task, code)
        self._loop.forget(slot.channel)
        for reader in slot.outputs:
            self._loop.forget(reader.fd)
        slot.close()
        if slot.rank is not None:
            self._on_rank_dead(slot, code)
        else:
            self._replace(slot)

    def _report_lost(self, slot: Slot, task: int, code: int) -> None:
        self._placing.by_task.pop(task, None)
        self._send_lost(task, self._lost(task, slot, code))

    def _lost(self, task: int, slot: Slot | None, code: int) -> bytes:
        """The body of a LOST frame. No slot: there never was one for it."""
        crash = None if slot is None else crash_of(slot)
        if slot is None:
            return self._lost_body(None, code, crash)
        return self._lost_body(slot.begun_index(task), code, crash, why=slot.failure)

    def _lost_body(
        self, index: int | None, code: int, crash: tuple[float, str] | None = None, *, why: str = ""
    ) -> bytes:
        if index is None and self._early_deaths >= _MAX_EARLY_DEATHS:
            index = 0  # it would be given out again for ever: every process dies before it begins anything
        lost: dict[str, object] = {
            "node": self._config.node,
            "signal": -code if code < 0 else None,
            "exit_code": code if code >= 0 else None,
            "started": index is not None,
            "index": index,
            "at": time.time() if crash is None else crash[0],
            "stack": "" if crash is None else crash[1],
            "why": why,
        }
        return json.dumps(lost).encode()

    def _send_lost(self, task: int, body: bytes) -> None:
        self._spool.forget(task)
        if self._client is not None:
            self._client.send_result(Frame(Kind.LOST, 0, 0, task, body))

    def _on_rank_dead(self, slot: Slot, code: int) -> None:
        for task, rank in list(self._placing.ranks.items()):
            if rank is not slot:
                continue
            del self._placing.ranks[task]
            pending = self._placing.pending(task)
            if pending is not None:  # it died before its task reached it
                self._placing.queue.remove(pending)
                self._report_lost(slot, task, code)
            elif not (task in slot.running or task in slot.cancelled or slot.finished_any):  # before its task came
                self._failed_ranks[task] = self._lost(task, slot, code)

    def _replace(self, slot: Slot) -> None:
        self._placing.slots.remove(slot)
        if not slot.finished_any:
            self._early_deaths += 1
        if self._early_deaths < _MAX_EARLY_DEATHS:
            self._start_again(slot.number)
        else:
            # Every slot dies at once: starting more would only burn the machine. Try again, but slowly.
            self._loop.call_later(_AGAIN_S, lambda: self._start_again(slot.number))

    def _start_again(self, number: int) -> None:
        self._start_slot(number)
        self._placing.dispatch()

    # The end --------------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        """Close what the slots wait on, and kill what does not end by itself; the watchdog sees to the rest."""
        self._listener.close()
        for slot in [*self._placing.slots, *self._placing.ranks.values()]:
            if slot.running and slot.pid is not None:
                self._kill(slot)
            slot.close()
        for zygote in self._zygotes.values():
            zygote.close()
        self._usage.close()
        self._notice.close()
        self._ports.release_all()


def _threads_of(rank: Rank, config: NodeConfig) -> tuple[tuple[str, str], ...]:
    """Variables of a rank that has more neighbours than the node has slots, among which the cores were divided."""
    if rank.local_world_size <= config.slots:
        return ()
    return tuple((name, str(max(1, config.cores // rank.local_world_size))) for name in config.thread_variables)


def _kill_process(pid: int) -> None:
    """And its session; a process that was forked just now leads none yet."""
    kill_session(pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
