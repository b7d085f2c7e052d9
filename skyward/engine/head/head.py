"""The head: an engine whose channels to the nodes the client lends, and whose calls are those of the client.

The head of a detached pool goes on without a client, and takes another one after it. Clients take turns: each has a
session of its own, with a channel, and with numbers that no other has used.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import pickle
import resource
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ...calls.futures import Future
from ...core.limits import memory_bytes
from ...errors import PoolClosed, UsageError
from ...events import DetachmentWarning, Event, NodeLost, NodeReplaced
from ...shared.store import Store
from ...values.machine import LogLine, Machine, Machines
from ...values.secret import Secret, masking
from ...wire.channel import BLOBS, CONTROL, RESULTS
from ...wire.frames import PROTOCOL_VERSION, Frame, FrameKind
from ...wire.stream import StreamChannel
from ..direct import DirectEngine
from ..gang import StartedRank
from ..link import Readable
from .client_calls import ClientCalls
from .client_link import ClientLink
from .client_tasks import must_be_known
from .coming_nodes import ComingNodes
from .door import LinkRefused, PassedEnds
from .handing_over import HandOver
from .journal import HeadJournal
from .kept_calls import CallPosition, KeptCall, KeptCalls, KeptOrder
from .kept_nodes import KeptNodes
from .kept_output import KeptOutput
from .kept_state import store_of
from .lending import LentLinks
from .messages import HeadConfig, OpenCall
from .node_ways import NodeWays
from .plain import dump_plain, load_plain
from .references import ClientReferences
from .relays import RelayedChannels, RelayedLines, RelayedMachines
from .requests import Answer, Requests
from .settling import Settling
from .start_gate import GatedLink, StartGate
from .taken_up import HeldProgress, held_by_nodes, take_up, take_up_early
from .taken_up_gangs import held_ranks
from .turns import ClientTurns

_FIND_S = 30.0
"""Longest wait in seconds for the handle of a named actor, which only the client can pack."""
_MOST_SHOWN = 500
"""Most calls that a process sees which does not attach, because they are in one frame."""


class Head:
    """Engine of a head, with its one client."""

    def __init__(self, config: HeadConfig) -> None:
        self._config = config
        self.turns = ClientTurns(config)
        self._token = ""
        self._token_before = ""
        """Token of the last client of an earlier process; empty once another one has come."""
        self._kept = KeptCalls(HeadJournal(config.folder)) if config.detached_for_s else None
        self._unfinished: list[tuple[KeptCall, KeptOrder | None]] = []
        self.was_killed = self._restore()
        """Whether an earlier process of this head was killed."""
        self._output = KeptOutput()
        self.engine = engine = DirectEngine(
            config.pool,
            cancel_grace_s=config.cancel_grace_s,
            lines=RelayedLines(self._tell_line),
            mask=masking(Secret("SECRET", value=value) for value in config.secrets),
            initializer=config.initializer,
            emit=self._emit,
            kept=config.kept,
            default_timeout_s=config.default_timeout_s,
            direct_transfers=config.direct_transfers,
            channels=RelayedChannels,
            make_store=self._make_store,
            numbers=itertools.count(self.turns.first_number - 1, 2),
        )
        self._ledger = engine.ledger
        self._nodes = KeptNodes(engine.ledger, self._kept)
        self._references = ClientReferences(
            engine.builder.next_id, was_killed=self.was_killed or bool(config.heads_before)
        )
        self._lent = LentLinks(engine.builder.next_id, partial(self._tell, priority=RESULTS))
        engine.nodes.opener.hello = {"settles": True, "keeps_actors": bool(config.heads_before)}
        engine.nodes.opener.link_class = GatedLink
        engine.nodes.on_up.append(self._on_up)
        engine.transfers.serve_program(config.transfer_keys)
        engine.actors.find = self._find_actor
        engine.nested_calls.finds_apart = True
        self._relay = engine.channels
        assert isinstance(self._relay, RelayedChannels)
        self._relay.tell = self._tell
        self._shared: dict[int, int] = {}
        """Sessions of the program's requests of shared state, by its own numbers."""
        self._ways = NodeWays(config, engine, self.turns, lent=self._lent, request=self._request, kept=self._kept)
        if not self.was_killed:
            self._ways.are_open.set()
        self._coming = ComingNodes(
            engine.members,
            engine.relief,
            ask=self._ask_if_it_came,
            tell=lambda verb, node: self._requests.begin(verb, node, priority=BLOBS),
            left=self._on_left,
            note=self._nodes.note,
            changed=self._nodes.changed,
            is_first=not config.heads_before,
            has_journal=self._kept is not None,
        )
        self._handover = HandOver(
            self._ledger, engine.shared, engine.members, give_back=self._coming.give_back, ask=self._ask_if_it_came
        )
        self._requests = Requests(
            self._tell,
            self._later_on,
            verbs=self._verbs(),
            slow=self._slow_verbs(),
            later=self._later(),
            # Numbers that no earlier head has used: a client may reply to that one now.
            numbers=itertools.count(self.turns.first_number),
        )
        self._machines: Machines = RelayedMachines(self._requests)
        self._settling = Settling(self._ledger, self._ask_if_it_came if self._kept is None else None)
        self.settle = self._settling.settle
        engine.nodes.liveness.was_heard = self.turns.was_heard
        if self.turns.is_detached:
            engine.link_repair.may_ask = self._may_replace
        self._calls: ClientCalls | None = self._calls_of(self._nobody()) if self.was_killed else None
        self._register()

    # The client ---------------------------------------------------------------------------------------------------

    def welcome(self, hello: dict[str, Any], ends: PassedEnds, send: Callable[[dict[str, Any]], None]) -> None:
        """Take a link: the first one, or one that continues the session of an earlier one."""
        client, left_s = self.turns.client, self.turns.left_s
        # Nobody may be reading the old link when it is left. Locks are taken in this order.
        with contextlib.nullcontext() if client is None else client.reading, self._ledger:
            is_known = bool(self._token) and hello["token"] == self._token
            if "stripe" in hello or (hello.get("is_resumed") and not is_known):
                self._refuse_unknown(hello)
            continues = bool(hello.get("continues"))
            if continues and not is_known and hello["token"] != self._token_before:
                raise self.turns.refusal()
            if self._token and not is_known:
                self.turns.check(hello)
                if client is not None:
                    self._end_session(client)
            facts = {
                "version": PROTOCOL_VERSION,
                "pid": os.getpid(),
                "memory_bytes": memory_bytes(),
                "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
                "first_number": self.turns.first_number,
            }
            if self.turns.client is None:
                if not continues:
                    facts["first_number"] = self._begin_session(hello)
                self._token, self._token_before = hello["token"], ""
                self.turns.replaces = bool(hello.get("replaces"))
                send({**facts, "received": 0})
                channel = StreamChannel(checks_blobs=True)
                channel.attach(ends, hello["received"])
                self._take(channel, continues=continues)
                self._keep_leaving()
                if self.turns.is_ending:
                    self._warn(left_s)
                return
            client = self.turns.client
            before = client.detach()
            if before is not None:
                self._ledger.after.append(before.close)
            send({**facts, "received": client.channel.received})
            client.attach(ends, hello["received"])
            self.tell_kept_output()
            self._tell_losses()
            if self.turns.replaces:
                self.engine.link_repair.replace_lost(self._nodes.lost)  # while its link was broken
        self._ledger.watcher.wake()

    def _refuse_unknown(self, hello: dict[str, Any]) -> None:
        """Refuse a link that continues a session which this process does not know. Raises LinkRefused."""
        began_again = bool(self._token_before) and hello["token"] == self._token_before
        if self.turns.is_detached and self.turns.who and not began_again:
            raise self.turns.refusal()
        why = "this head was killed and began again" if began_again else "this head does not know the session"
        raise LinkRefused(why, is_unknown=True, began_again=began_again)

    def _begin_session(self, hello: dict[str, Any]) -> int:
        """Begin the session of a new client, and return its first number. Raises LinkRefused: there is no room."""
        who = {key: hello.get(key, "") for key in ("host", "pid", "program")} | {"since": time.time()}
        number = self.turns.sessions + 1
        session = {"sessions": number, "session": number, "token": hello["token"], "who": who}
        try:
            self._note(**session, detached_for_s=self.turns.detached_for_s)
        except UsageError as error:
            raise LinkRefused(str(error)) from error
        self.turns.sessions += 1
        self.turns.who = who
        return self.turns.first_number

    def _note(self, **state: Any) -> None:
        """Write state of a detached pool to the journal. Raises UsageError if there is no room for it."""
        if self._kept is not None:
            self._kept.note(**state)

    def _take(self, channel: StreamChannel, *, continues: bool) -> None:
        waits = not self._ways.are_open.is_set()
        client = self.turns.client = ClientLink(self._ledger, channel, self._references, waits=waits)
        if self._calls is None:
            self._calls = self._calls_of(client)
        else:
            if continues:  # the client of an earlier process, which feeds its maps and says which calls it has
                self._calls.link = client
            else:
                self._calls.change_client(client, self.turns.first_number)
            if not waits:  # else nobody knows yet which nodes there are
                self._tell_facts()
            self._ways.tell_of_ray()
        self.tell_kept_output()
        self._tell_losses()
        self._ledger.watcher.add(client)
        self._ledger.watcher.wake()

    def _ask_if_it_came(self) -> Future[Any]:
        """Ask the client, behind everything else, whether it is there."""
        return self._requests.begin("came", priority=BLOBS)

    def _nobody(self) -> ClientLink:
        """Return a link in the place of a client that is not there."""
        return ClientLink(self._ledger, StreamChannel(checks_blobs=True), self._references)

    def _calls_of(self, link: ClientLink) -> ClientCalls:
        return ClientCalls(
            engine=self.engine,
            link=link,
            references=self._references,
            actor_moved=partial(self._requests.tell, "actor_moved"),
            kept=self._kept,
            early={} if self._config.heads_before else None,
            told_of_retry=partial(self._requests.tell, "retried"),
            told_of_inputs=partial(self._requests.tell, "inputs_at"),
            told_to_forbid=partial(self._requests.tell, "forbid"),
            first_fed=self.turns.first_fed,
        )

    def _make_store(self) -> Store:
        if self._kept is not None:
            return store_of(self._kept)
        return Store(
            lost=frozenset(self._config.lost_things),
            noted=lambda thing, is_there: self._requests.tell("thing", *thing, is_there),
        )

    def _restore(self) -> bool:
        """Read the journal. Return whether it is of an earlier process."""
        if self._kept is None:
            return False
        self._unfinished = self._kept.restore()
        before = self._kept.state
        if not before:
            return False
        turns = self.turns
        turns.sessions, turns.detached_for_s = before["sessions"] + 1, before["detached_for_s"]
        turns.goes_alone = before.get("goes_alone", False)
        turns.money_ends_at = before.get("money_ends_at", math.inf)
        self._token_before, turns.who = before["token"], before["who"]
        turns.first_fed = turns.first_number_of(before.get("session", 0))
        with contextlib.suppress(UsageError):  # the disk is full; only one more death would miss this number
            self._note(sessions=turns.sessions)
        turns.renew()
        return True

    def go_on(self) -> None:
        """Go on where an earlier process was killed. Raises NodeError if the node beside it cannot be reached.

        The other nodes are reached by Ray, or over channels that a client lends. Until the calls have their nodes, it
        may do no more than that.
        """
        assert self._kept is not None
        machines, lost_before, resting = self._nodes.machines, frozenset(self._nodes.lost), self._nodes.resting
        wanted = [machine for machine in machines if machine.node not in lost_before]
        until = self._ways.go_on(wanted)
        there = self.engine.nodes.open_again(wanted, self._config.node_folder, until=until)
        self.engine.link_repair.source = self._machines
        with self._ledger:  # so that no frame of a node is handled before its task is known
            self.engine.use_again(machines, there)
            for machine in machines[:1]:  # all nodes have as many slots
                self.engine.members.expect(resting, machine.slots)
            held, ranks = held_by_nodes(self._ledger), held_ranks(self._ledger)
            unfinished = [each for each in self._unfinished if self._kept.get(each[0].number) is not None]
            take_up(self._of_client(), unfinished, held, ranks, frozenset(m.node for m in wanted) - there)
            self._cancel_rest(held, ranks)
            self._unfinished, client = [], self.turns.client
            self._ways.are_open.set()
        if client is not None:
            with client.reading:
                if client is self.turns.client:
                    self.engine.reader.handle([(client, client.go_on())])

    def _cancel_rest(self, held: dict[int, HeldProgress] | None, ranks: dict[int, StartedRank]) -> None:
        """Cancel what nodes have and nobody goes on with: it was cancelled, cannot go on, or another task called it."""
        grace = int(self._config.cancel_grace_s * 10)
        for number, progress in (held or {}).items():
            self._ledger.tell(progress.node, FrameKind.CANCEL, number, lane=grace)
        for number, rank in ranks.items():  # at once: the gang may start again on the same devices
            self._ledger.tell(rank.node, FrameKind.CANCEL, number)

    def _go_on_after(self, machines: list[Machine], told: list[tuple[Any, ...]], lost: list[int]) -> None:
        """Go on with the calls of an earlier head, which the client has sent again.

        Args:
            machines: Machines of the pool.
            told: Fields of the `OpenCall` of each of these calls.
            lost: Nodes that are gone with the earlier head. They are replaced, and so are others that do not answer.
        """
        there = self.engine.nodes.open_again([machine for machine in machines if machine.node not in lost])
        self.engine.link_repair.source = self._machines
        gone = frozenset(machine.node for machine in machines) - there
        reasons = {node: self._machines.why_gone(node) for node in gone}
        with self._ledger:  # so that no frame of a node is handled before its task is known
            self._ledger.taken_back |= {node for node, why in reasons.items() if why is not None and why.is_preempted}
            self.engine.use_again(machines, there)
            self.engine.values.find(self._references.blobs)
            held, ranks = held_by_nodes(self._ledger, are_new_ones_empty=True), held_ranks(self._ledger)
            take_up_early(self._of_client(), [OpenCall(*fields) for fields in told], held, ranks, gone)
            self._cancel_rest(held, ranks)
        self._coming.are_known.set()

    def _on_up(self, node: int) -> None:
        link = self._ledger.links[node]
        link.settle = partial(self._settling.handled, link)
        if self._ways.is_beside(self._ledger.machines[node]):
            self._ledger.scheduler.set_home(node)
            self.engine.transfers.beside = node
            if isinstance(link, GatedLink) and not self.turns.is_detached:
                ask = partial(self._requests.begin, "came")
                link.gate = StartGate(self._ledger, must_be_known, ask, self.engine.delays_starts)
                self._ledger.after.append(link.gate.measure)
        self._tell_facts()

    def _on_left(self, node: int) -> None:
        """Forget a node that was given back."""
        self._ways.lose(node, will_return=False)
        with self._ledger:
            self._tell_facts()
            is_last = len(self._ledger.machines) < 2
        if is_last:  # the one beside this head needs no Ray
            self._ways.go_alone()

    def _register(self) -> None:
        """Handle the frames of whoever is the client."""
        if self._config.heads_before:
            self.engine.values.recover = lambda blob: self._requests.begin("put_again", blob.digest)
        handlers_of_calls = (
            FrameKind.CALL,
            FrameKind.UNCALL,
            FrameKind.CREDIT,
            FrameKind.CLOSE,
            FrameKind.IN_ITEM,
            FrameKind.IN_END,
            FrameKind.IN_ERROR,
            FrameKind.UNHELD,
            FrameKind.FETCH,
        )
        of_client: dict[int, Callable[[Frame], object]] = {
            **dict.fromkeys(handlers_of_calls, lambda frame: self._of_client().handlers[frame.kind](frame)),
            **self._lent.handlers,
            FrameKind.REQUEST: self._requests.on_frame,
            FrameKind.REPLY: self._requests.on_frame,
        }
        assert isinstance(self._relay, RelayedChannels)
        of_client |= dict.fromkeys(
            (FrameKind.MESSAGE, FrameKind.TAKEN, FrameKind.END_CHANNEL), self._relay.on_client_frame
        )
        handlers = self.engine.frame_handlers.handlers
        for kind, handle in of_client.items():
            handlers[kind] = _by_peer(lambda: self.turns.client, handle, handlers.get(kind))

    # Clients of a detached pool ---------------------------------------------------------------------------------------

    def look(self, hello: dict[str, Any]) -> dict[str, Any]:
        """Return what a process sees that is not the client: the calls, and who has the pool. Raises LinkRefused."""
        if not self.turns.is_attaching(hello):
            raise LinkRefused("it has another key than this head")
        calls = [] if self._calls is None else self._calls.listed()
        return {
            "version": PROTOCOL_VERSION,
            "calls": [facts._asdict() for facts in calls[:_MOST_SHOWN]],
            "more_calls": len(calls[_MOST_SHOWN:]),
            "client": self.turns.who if self.turns.is_taken else {},
            "left_s": self.turns.left_s,
            "is_ending": self.turns.is_ending,
            "lost": self._nodes.lost,
        }

    def recall_permits(self) -> None:
        """Let calls that have waited begin only once the client knows of that. A journal would tell it."""
        with self._ledger:
            if self._calls is not None and self._kept is None:
                self._calls.permits.recall()

    def warn_of_end(self) -> None:
        """Warn once if a detached pool will end soon, because no client is there."""
        with self._ledger:
            if self.turns.begins_to_end():
                self._warn(self.turns.left_s)

    def _warn(self, left_s: float) -> None:
        """Send the client, who may be away, an event. `_emit` would drop it while nobody is there."""
        event = DetachmentWarning(
            detached_for_s=self.turns.detached_for_s, seconds_left=left_s, is_budget=self.turns.is_short_of_money
        )
        self._tell_event(event)

    def _end_session(self, client: ClientLink) -> None:
        """Forget a client. Its calls stay. Its requests, channels and shared state of the program end with it."""
        link = client.detach()
        if link is not None:
            self._ledger.after.append(link.close)
        lines = []
        for line in client.channel.unacknowledged(FrameKind.LOG):
            with contextlib.suppress(pickle.UnpicklingError, EOFError, ValueError):  # the last piece of a long line
                load_plain(line[1])
                lines.append(line)
        self._output.put_before(lines)
        self.turns.end(client)
        client.channel.close()
        self._requests.fail_open(PoolClosed("pool: its client is gone; attach to it again"))
        assert isinstance(self._relay, RelayedChannels)
        self._relay.end_all()
        self._lent.end_all()
        for session in self._shared.values():
            self.engine.shared.end(session)
        self._shared.clear()
        self.engine.tell_tasks(False)
        self.engine.nodes.ask_usage(0.0)

    def _keep_leaving(self) -> None:
        """Send calls again to the nodes that were to go: only their client would have given them back."""
        members = self.engine.members
        members.stay(len(members.leaving))

    def tell_kept_output(self) -> None:
        """Send the client the lines that came while it was away, and the number of those that were dropped."""
        with self._ledger:
            if self.turns.is_taken and not self._output.is_empty:
                self._tell_kept_output()

    def _tell_kept_output(self) -> None:
        lines, dropped = self._output.take()
        if dropped:
            text = f"({dropped} lines of output were dropped while no client was there)"
            lines.insert(0, (0, dump_plain((LogLine(text=text, stream="stderr", node=0, rank=None, task=""), "LINE"))))
        for call, message in lines:
            self._tell_in_pieces(FrameKind.LOG, call, message, RESULTS)

    def close(self) -> None:
        """End everything. The agents end when the client tells them, or with their leases."""
        self._requests.close()
        self.engine.close()
        self._ways.close()

    # To the client --------------------------------------------------------------------------------------------------

    def _tell(self, kind: int, number: int, body: bytes = b"", lane: int = 0, priority: int = CONTROL) -> None:
        client = self.turns.client
        if client is not None:
            client.tell(kind, number, body, lane, priority)

    def _request(self, verb: str, *arguments: Any) -> None:
        self._requests.tell(verb, *arguments)

    def _later_on(self, action: Callable[[], object]) -> None:
        """Call a function at the end of this block of the ledger, without the lock."""
        self._ledger.after.append(action)

    def _tell_in_pieces(self, kind: int, number: int, message: bytes, priority: int) -> None:
        client = self.turns.client
        if client is not None:
            client.tell_in_pieces(kind, number, message, priority)

    def _tell_event(self, event: Event) -> None:
        client = self.turns.client
        if client is not None:
            client.tell_event(event)

    def _tell_line(self, call: int, message: bytes) -> None:
        with self._ledger:
            if self.turns.is_detached and not (self.turns.is_taken and self._output.is_empty):
                self._output.put(call, message)
                self.tell_kept_output()
            else:
                self._tell_in_pieces(FrameKind.LOG, call, message, RESULTS)

    def _emit(self, event: Event) -> None:
        is_kept = isinstance(event, NodeLost) and self.turns.is_detached and not self.turns.is_linked
        if not (is_kept or self.turns.is_deserted):
            self._tell_event(event)
        if isinstance(event, NodeLost):
            self._tell_facts()
            self._ledger.after.append(partial(self._ways.lose, event.node, will_return=event.will_be_replaced))
            self._nodes.lose(event, is_told=not is_kept)
        elif isinstance(event, NodeReplaced):
            self._nodes.changed()

    def _may_replace(self, node: int) -> bool:
        """Return whether the client of a detached pool can replace a node now. The one beside the head stays lost."""
        is_beside = self._ways.is_beside(self._ledger.machines[node])
        return self.turns.is_linked and self.turns.replaces and not is_beside

    def _replace_lost(self) -> None:
        """Let the client replace the nodes that are lost, and those that it sees lost."""
        with self._ledger:
            self.turns.replaces = True
            self.engine.link_repair.replace_lost(self._nodes.lost)

    def _tell_losses(self) -> None:
        """Send the client the losses that no client was told of."""
        for event in self._nodes.take_losses():
            self._tell_event(event)

    def _tell_facts(self) -> None:
        machines = self._ledger.machines
        facts = {
            node: {"facts": link.facts, "slots": machines[node].slots} for node, link in self._ledger.links.items()
        }
        self._tell_in_pieces(FrameKind.FACTS, 0, json.dumps(facts).encode(), CONTROL)

    def _find_actor(self, name: str) -> Any:
        body = self._requests.ask("find_actor", name, timeout_s=_FIND_S)
        assert self.turns.client is not None
        return self.turns.client.payload(body)

    # Verbs of the client ----------------------------------------------------------------------------------------------

    def _verbs(self) -> Mapping[str, Callable[..., Any]]:
        engine = self.engine
        return {
            "counts": engine.counts,
            "why_waiting": engine.why_waiting,
            "running": engine.running,
            "tell_tasks": engine.tell_tasks,
            "ask_usage": engine.nodes.ask_usage,
            "call_named": engine.questions.call_named,
            "actor_work": engine.actors.work,
            "close_actor": lambda number, cancel: self._of_client().close_actor(number, cancel=cancel),
            "forget_actor": lambda number: self._of_client().forget_actor(number),
            "put": lambda *put: self._of_client().put(*put),
            "refer_again": lambda places: self._of_client().refer_again(places),
            "calls": lambda: self._of_client().listed(),
            "call": lambda number: self._of_client().facts(number),
            "follow": lambda number: self._of_client().follow(number),
            "resume": lambda positions: self._of_client().resume([CallPosition(*fields) for fields in positions]),
            "extend": self._extend,
            "limit": self._limit,
            "blueprint": lambda: (self._config.blueprint, self._config.secrets),
            "replace_lost": self._replace_lost,
            "leave": self._leave,
            "ray_there": self._ways.ray_there,
            "ray_keys": self._ways.keep_keys,
            "ray_runs": lambda companions: self._note(companions=companions),
            "there": lambda: engine.members.there,
            "is_idle": lambda: engine.members.is_idle,
            "expect": self._coming.expect,
            "may_hand_over": self._handover.may_go,
            "shared_from": self._handover.take,
            "shared_withdraw": self._on_shared(engine.shared.withdraw),
            "shared_forget": self._on_shared(engine.shared.forget),
            "shared_end": lambda number: self._on_shared(engine.shared.end)(number) or self._shared.pop(number, None),
        }

    def _slow_verbs(self) -> Mapping[str, Callable[..., Any]]:
        engine = self.engine
        return {
            "use": self._use,
            "go_on_after": self._go_on_after,
            **self._coming.verbs,
            "hand_over": partial(self._coming.once_known, self._handover.go),
            "ray_stands": self._ways.drive,
            "ray_ends": self._ways.let_go,
            "ask": engine.questions.ask,
            "cancel_all": engine.cancel_all,
            "close_actors": engine.actors.close_all,
            "wait_idle": engine.wait_idle,
            "wait_stopped": engine.wait_stopped,
        }

    def _later(self) -> Mapping[str, Callable[..., Any]]:
        return {
            "start_actor": lambda answer, *fields: self._of_client().start_actor(answer, *fields),
            "nodes_of": lambda answer, digests: self._of_client().nodes_of(answer, digests),
            "actor_closed": lambda answer, number: self._of_client().actor_closed(answer, number),
            "shared": self._share,
            "close": self._end,
        }

    def _of_client(self) -> ClientCalls:
        assert self._calls is not None
        return self._calls

    def _extend(self, seconds: float) -> float:
        """Let the pool go on for so much longer without a client, and return for how long that is in all."""
        self._note(detached_for_s=self.turns.detached_for_s + seconds)
        self.turns.detached_for_s += seconds
        return self.turns.detached_for_s

    def _limit(self, seconds: float) -> None:
        """Let the pool go on without a client for at most this long from now, because its budget lasts no longer."""
        ends_at = time.monotonic() + seconds
        self._note(money_ends_at=ends_at)
        self.turns.money_ends_at = ends_at

    def _leave(self) -> None:
        """Let the client go for good."""
        with self._ledger:
            self.turns.go()
            self._of_client().leave(self.turns.first_number_of(self.turns.sessions + 1))
            self._keep_leaving()

    def _end(self, answer: Answer) -> None:
        answer("ok", None)  # leaves at the end of this block of the ledger, before anything is closed
        self.turns.ended.set()

    def _use(self, machines: list[Machine]) -> None:
        if self._ledger.machines:
            return  # asked again, because an earlier process of this head was killed before it answered
        with self._ledger:
            self._nodes.begin(machines)
        self.engine.use(machines, self._machines)
        if len(machines) < 2:
            self._ways.go_alone()

    # Answers ----------------------------------------------------------------------------------------------------------

    def _share(self, answer: Answer, number: int, fields: tuple[Any, ...]) -> None:
        """Carry out a request of the program. The reply comes with its answer."""
        if self._handover.is_over:
            return  # the next head is asked
        session, future = self.engine.shared.begin_fields(fields)
        self._shared[number] = session
        future.add_done_callback(lambda done: _answer(answer, done))

    def _on_shared(self, act: Callable[[int], object]) -> Callable[[int], object]:
        def on_session(number: int) -> None:
            session = self._shared.get(number)
            if session is not None:
                act(session)

        return on_session


def _answer(answer: Answer, done: Any) -> None:
    error = done.exception()
    if error is None:
        answer("ok", done.result())
    else:
        answer("error", error)


def _by_peer(
    client: Callable[[], ClientLink | None],
    of_client: Callable[[Frame], object],
    of_node: Callable[[Readable, Frame], object] | None,
) -> Callable[[Readable, Frame], object]:
    """Return the handler of a kind of frame that client and nodes send."""

    def handle(link: Readable, frame: Frame) -> None:
        if link is client():
            of_client(frame)
        elif of_node is not None:
            of_node(link, frame)

    return handle
