"""The agent: who is connected to it, and which part handles each frame. `node_tasks` handles tasks."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...errors import NodeLost, RendezvousFailed
from ...wire.channel import Channel
from ...wire.ends import CAN_STRIPE
from ...wire.frames import PROTOCOL_VERSION, Frame, FrameKind
from ...wire.tasks import NodeConfig
from ..slot.ports import PortLocks
from .complaints import complain
from .devices import find_devices
from .facts import node_facts
from .first_zygote import FirstZygote
from .held import HeldFrames
from .limit_groups import find_enforcement
from .loop import EventLoop
from .node_tasks import NodeTasks
from .notice import NoticeWatch
from .relays import CallRelay, ChannelRelay, QuestionRelay
from .session import Session
from .usage import UsageMeter
from .watchdog import Lease

if TYPE_CHECKING:
    from .transfers import BlobExchange

_AGAIN_S = 1.0
"""Pause before retrying a step that the machine has no room for now, in seconds."""


class Agent:
    """Event loop of the agent's one thread; `run` returns once the agent was told to end."""

    def __init__(
        self, config: NodeConfig, lease: Lease, listener: socket.socket, first: FirstZygote | None = None
    ) -> None:
        self._config = config
        self._lease = lease
        self._listener = listener
        self._loop = EventLoop()
        self._devices = find_devices(dict(config.env))
        self._enforcement = find_enforcement()
        self._tasks = NodeTasks(self._loop, config, config.socket_path, self._devices, self._enforcement, first)
        self._ports = PortLocks(config.address)
        send = self._tasks.send
        self._questions = QuestionRelay(lambda task, body, lane: send(FrameKind.ANSWER, task, body, lane=lane))
        self._nested = CallRelay(
            self._tasks.placing, self._tasks.forward, self._tasks.spool.failure_of, self._tasks.on_call_ended
        )
        self._channels = ChannelRelay(self._tasks.forward)
        self._usage = UsageMeter(
            self._loop, lambda: self._tasks.placing.blob_bytes, lambda body: send(FrameKind.USAGE, body=body)
        )
        self._transfers: BlobExchange | None = None
        self._notice = NoticeWatch(self._loop, config.notice_file, self._tell_notice)
        self._handlers = self._handlers_of_client()

    @property
    def accelerators(self) -> dict[str, Any]:
        """Name of the first accelerator and their number, as in `node_facts`."""
        return {"accelerator": self._devices.product, "accelerators": len(self._devices)}

    def _handlers_of_client(self) -> dict[int, Callable[[Frame], None]]:
        """Map the client's frames to handlers. `_on_frame` handles those that other peers send too."""
        tasks, placing, nested, channels = self._tasks, self._tasks.placing, self._nested, self._channels
        return {
            FrameKind.TASK: tasks.on_task,
            FrameKind.GRANT: tasks.on_grant,
            FrameKind.FUNCTION: placing.add_function,
            FrameKind.BLOB: lambda frame: (nested.on_blob if frame.ident else placing.add_blob)(frame),
            FrameKind.DROP_BLOB: placing.drop_blob,
            FrameKind.FETCH: tasks.on_fetch,
            FrameKind.OFFER: lambda frame: self._exchange().on_offer(frame),
            FrameKind.PULL: lambda frame: self._exchange().on_pull(frame),
            FrameKind.DROP_FUNCTION: placing.drop_function,
            FrameKind.CANCEL: tasks.on_cancel,
            FrameKind.RECALL: tasks.on_recall,
            FrameKind.RANK: tasks.on_rank,
            FrameKind.START_ACTOR: tasks.on_start_actor,
            FrameKind.END_ACTOR: tasks.on_end_actor,
            FrameKind.TAKE_STACK: tasks.on_take_stack,
            FrameKind.RESERVE_PORT: self._on_reserve_port,
            FrameKind.RELEASE_PORT: lambda frame: self._ports.release(frame.lane),
            FrameKind.USAGE: lambda frame: self._usage.ask(frame.lane / 10),
            FrameKind.HOLD: tasks.on_hold,
            FrameKind.UNHOLD: tasks.on_unhold,
            FrameKind.SLOT_CONFIG: tasks.on_topology,
            FrameKind.SETTLED: tasks.on_settled,
            FrameKind.CREDIT: tasks.on_credit,
            FrameKind.CLOSE: tasks.on_close,
            FrameKind.IN_ITEM: placing.pass_on,
            FrameKind.IN_END: placing.pass_on,
            FrameKind.IN_ERROR: placing.pass_on,
            FrameKind.ASK: self._questions.on_ask,
            FrameKind.OUTCOME: nested.on_outcome,
            FrameKind.MESSAGE: channels.on_client_frame,
            FrameKind.TAKEN: channels.on_client_frame,
            FrameKind.END_CHANNEL: channels.on_client_frame,
        }

    def run(self) -> None:
        self._loop.watch(self._listener, self._accept)
        for fd in self._starter_fds():
            self._loop.watch(fd, self._on_starter_gone)
        self._tasks.start()
        self._loop.run()
        self._end()

    def _starter_fds(self) -> list[int]:
        return [] if self._lease.starter is None else self._lease.starter.fds

    def _on_starter_gone(self) -> None:
        """End, unless a keeper decides about this node."""
        if self._lease.needs_starter:
            self._loop.stop()
        for fd in self._starter_fds():
            self._loop.forget(fd)

    # Connections ------------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:  # out of descriptors, perhaps for a moment: the peer waits in the backlog
            complain(self._config.node, f"agent delays a connection: {error.strerror}")
            self._loop.forget(self._listener)
            self._loop.call_later(_AGAIN_S, lambda: self._loop.watch(self._listener, self._accept))
            return
        Session(self._loop, Channel(sock), self._config.log_limit_bytes, self._on_frame, self._on_session_closed)

    def _on_frame(self, session: Session, frame: Frame) -> None:
        handler = self._handlers.get(frame.kind) if session is self._tasks.client else None
        if handler is not None:
            handler(frame)
        elif frame.kind == FrameKind.LEASE:
            self._lease.contact()
        elif frame.kind == FrameKind.PING:  # a starter still counts: on a busy link PINGs are rare
            self._lease.renew()
        elif frame.kind == FrameKind.HELLO:
            self._on_hello(session, frame)
        elif frame.kind == FrameKind.SHUTDOWN:
            self._loop.stop()
        elif frame.kind == FrameKind.ATTACH:
            session.on_attach(frame)
        elif frame.kind == FrameKind.ANSWER:
            self._questions.on_answer(session, frame)
        elif session.role == "caller":
            self._nested.on_slot_frame(session, frame)
        elif session.role == "channels":
            self._channels.on_slot_frame(session, frame)

    def _on_hello(self, session: Session, frame: Frame) -> None:
        hello = json.loads(frame.body)
        if not PROTOCOL_VERSION - 1 <= hello["version"] <= PROTOCOL_VERSION:
            why = f"protocol {hello['version']} of the client does not fit protocol {PROTOCOL_VERSION} of this agent"
            session.greet(FrameKind.GOODBYE, json.dumps({"reason": why}).encode())
            return
        token = hello.get("token", "")
        if "stripe" in hello:
            self._on_stripe(session, hello)
            return
        facts = node_facts(self._config, self._devices, self._enforcement)
        facts |= {
            "version": PROTOCOL_VERSION,
            "node": self._config.node,
            "pid": os.getpid(),
            "can_stripe": CAN_STRIPE,
            "can_transfer": True,
        }
        if hello.get("is_resumed"):
            if self._tasks.client is None or self._tasks.client.token != token:
                reason = {"reason": "this agent does not know the session", "is_unknown": True}
                session.greet(FrameKind.GOODBYE, json.dumps(reason).encode())
                return
            self._tasks.client.take_over(session, hello["received"])
            session = self._tasks.client
        session.role, session.token, session.link = hello["role"], token, hello.get("link", 0)
        if session.role == "task":
            self._questions.answers(session, hello["task"])
        if session.role == "client" and session is not self._tasks.client:
            self._welcome_client(session, hello, facts)
            return
        session.greet(FrameKind.WELCOME, json.dumps({**facts, "received": session.received}).encode())

    def _welcome_client(self, session: Session, hello: dict[str, Any], facts: dict[str, Any]) -> None:
        """Take another session of a client, or the first one."""
        before = self._tasks.client
        is_other = before is not None and before.token not in ("", session.token)
        if before is not None and (is_other or self._tasks.held is not None):  # a scheduler was killed
            facts |= self._change_client(before, session, keeps_actors=bool(hello.get("keeps_actors")))
        if hello.get("settles") and self._tasks.held is None:
            self._tasks.held = HeldFrames()
        self._tasks.client = session
        self._notice.again()
        if before is not None and before.token:  # only a session with a token could have come back
            before.close()
        session.greet(FrameKind.WELCOME, json.dumps({**facts, "received": session.received}).encode())
        if self._tasks.held is not None:
            self._tasks.held.send_again(session.send_result)

    def _change_client(self, before: Session, session: Session, *, keeps_actors: bool) -> dict[str, Any]:
        """Leave the tasks of a client that is gone to the next one. Return what it is told of them."""
        if self._tasks.held is None:
            self._tasks.forget_client()
            return {}
        before.drain()  # tasks may still be on their way
        gone = NodeLost("pool: its head was killed, and this call with it; make it again", node=self._config.node)
        self._nested.fail_open(gone)
        self._channels.end_open()
        session.take_output(before)
        return self._tasks.hand_over(self._tasks.held, keeps_actors=keeps_actors)

    def _on_stripe(self, session: Session, hello: dict[str, Any]) -> None:
        """Add a channel to the client's link, unless that link is gone."""
        client = self._tasks.client
        current = None if client is None or not client.is_attached else (client.token, client.link)
        if client is None or current != (hello["token"], hello["link"]):
            reason = {"reason": "the link is gone", "is_unknown": True}
            session.greet(FrameKind.GOODBYE, json.dumps(reason).encode())
            return
        session.greet(FrameKind.WELCOME, b"{}")
        client.widen(session, hello["stripe"], hello["stripes"])

    def _on_session_closed(self, session: Session) -> None:
        self._questions.closed(session)
        self._nested.closed(session)
        self._channels.closed(session)
        if session is self._tasks.client:
            self._tasks.on_client_gone()

    # The machine ------------------------------------------------------------------------------------------------------

    def _on_reserve_port(self, frame: Frame) -> None:
        port, why = 0, b""
        try:
            port = self._ports.reserve()
        except RendezvousFailed as error:
            why = str(error).encode()
        self._tasks.send(FrameKind.PORT, frame.ident, why, lane=port)

    def _exchange(self) -> BlobExchange:
        """Return the exchange with other nodes, which most pools never need: it loads OpenSSL."""
        if self._transfers is None:
            from .transfers import BlobExchange

            placing, send = self._tasks.placing, self._tasks.send
            self._transfers = BlobExchange(
                self._loop, self._config.address, blob=placing.blob, add=placing.add_blob, send=send
            )
        return self._transfers

    def _tell_notice(self, notice: bytes) -> bool:
        self._tasks.send(FrameKind.NOTICE, body=notice)
        return self._tasks.client is not None

    def _end(self) -> None:
        self._listener.close()
        self._tasks.close()
        self._usage.close()
        if self._transfers is not None:
            self._transfers.close()
        self._notice.close()
        self._ports.release_all()
