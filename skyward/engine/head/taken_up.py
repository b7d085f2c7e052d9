"""Open calls of a head that is gone, as the next one goes on with them; `node.agent.held` has the rules.

A running call goes on, and so does a gang if the nodes have all of its ranks. A call that no node has begins: its
outcome would be in the journal, or its client would have it. If a node is gone too, any call may have run there that no
other node has. Such a call begins only if it has retries, and so does a gang of which some ranks are left. All others
fail.

The next head of a detached pool has the calls from the journal. That of any other pool gets them from its client, whose
books are as good: agents hold what they have sent until the client has it (`settling`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from ...calls.named_options import unpack_options
from ...calls.options import CallOptions
from ...errors import ActorLost, NodeLost, Preempted, SkywardError
from ...wire.payloads import Encoded
from ...wire.tasks import CallKind, TaskHead
from ..actors import ActorEnd
from ..builder import PackedCall
from ..gang import StartedRank
from ..ledger import Ledger
from ..retries import RetriesLeft
from ..tasks import Loss
from .client_calls import ClientCalls
from .kept_calls import CHUNK, KeptCall, KeptOrder
from .messages import CallMessage, OpenCall, unpack_call
from .taken_up_actors import NO_ACTORS, TakenActors, held_actors, take_up_actors
from .taken_up_gangs import is_whole, take_start


class HeldProgress(NamedTuple):
    """Task that a node has, as its agent tells the next head; see `node.agent.held`."""

    node: int
    first: int
    """Number of the task's frames before those that the agent sends again."""
    credit: int
    """Items that it was granted."""
    devices: tuple[int, ...] | None
    inputs: dict[int, tuple[Any, ...]]
    """Fields of the `InputPosition` of its iterators, by argument."""


def held_by_nodes(ledger: Ledger, *, are_new_ones_empty: bool = False) -> dict[int, HeldProgress] | None:
    """Return the tasks that the nodes had from an earlier head, without ranks; None if a node did not say.

    `are_new_ones_empty`: an agent that says nothing has had no head yet.
    """
    held: dict[int, HeldProgress] = {}
    nothing: dict[str, Any] | None = {} if are_new_ones_empty else None
    told = {node: link.facts.pop("held", nothing) for node, link in ledger.links.items()}
    for node, tasks in told.items():
        facts = ledger.links[node].facts
        ranks, positions = facts.get("ranks", {}), facts.pop("inputs", {})
        for number, (first, credit, devices) in (tasks or {}).items():
            if number in ranks:
                continue
            own = None if devices is None else tuple(devices)
            inputs = {int(lane): tuple(position) for lane, position in positions.get(number, {}).items()}
            held[int(number)] = HeldProgress(node, first, credit, own, inputs)
    return None if None in told.values() else held


def take_up_early(
    client: ClientCalls,
    told: Iterable[OpenCall],
    held: dict[int, HeldProgress] | None,
    ranks: dict[int, StartedRank],
    lost: frozenset[int],
) -> None:
    """Go on with the calls that the client has sent again, and begin those that it has sent since.

    Needs the ledger's lock.

    Args:
        client: Calls of the client.
        told: How far the former ones were.
        held: Tasks that the nodes have; None: nobody knows. Tasks that go on are taken out.
        ranks: Ranks that the nodes have. If they go on, they are taken out.
        lost: Nodes that may have had tasks, and are gone.
    """
    early, client.early = client.early or {}, None
    open_calls = [call for call in told if call.number in early]
    running = [call.number for call in open_calls if not call.is_begun and call.number in (held or {})]
    homes = {actor.number: message.node for actor, message in client.early_actors}
    actors = take_up_actors(client, held_actors(client.engine.ledger), lost)
    take_up(client, [early.pop(call.number).kept(call) for call in open_calls], held, ranks, lost, homes, actors)
    for number in actors.running.intersection(held or ()):  # it is of a task: the actor does not end for that
        del (held or {})[number]
    for number in running:
        client.sent(number)
    for number, call in early.items():
        _begin_again(client, number, call.message, call.packed)
    actions, client.waiting = client.waiting, []
    for act in actions:
        act()


def take_up(
    client: ClientCalls,
    calls: Iterable[tuple[KeptCall, KeptOrder | None]],
    held: dict[int, HeldProgress] | None,
    ranks: dict[int, StartedRank],
    lost: frozenset[int] = frozenset(),
    homes: Mapping[int, int | None] = MappingProxyType({}),
    actors: TakenActors = NO_ACTORS,
) -> None:
    """Go on with the open calls of a killed head. Needs the ledger's lock.

    Args:
        client: Calls of the client.
        calls: The open ones, with what they need to begin.
        held: Tasks that the nodes have; None: nobody knows. Tasks that go on are taken out.
        ranks: Ranks that the nodes have. If they go on, they are taken out.
        lost: Nodes that may have had tasks, and are gone.
        homes: Nodes where actors have lived last, as far as the client knows.
        actors: Actors as they go on.
    """
    for call, order in calls:
        if order is None or call.is_torn:
            _fail(client, call)
            continue
        message, body = unpack_call(order.body)
        options: CallOptions = unpack_options(message.options)
        if call.left is not None:
            options, message = call.left.options_of(options), message._replace(after_s=call.left.pause_s)
        starts = 0 if call.left is None else call.left.starts
        started = {} if message.gang is None else take_start(ranks, call.number, starts)
        while starts < max((rank.restart_count for rank in started.values()), default=0):
            starts += 1  # the word of this restart was lost with its head
            spent = _with_a_retry_less(message, options)
            options = options if spent is None else spent.options_of(options)
        packed = PackedCall(message.name, order.function, Encoded(body, order.blobs), options)
        if message.gang is not None and is_whole(started):
            client.engine.take_up_gang(client.gang(call.number, message, message.gang, packed), started)
            continue
        ranks.update(started)
        progress = None if held is None else held.pop(call.number, None)
        may_have_run = bool(started) or held is None or call.is_in_doubt or call.count > 0
        home = homes.get(_actor_of(message))
        nodes = message.may_go_to if home is None else (home,)
        doubtful = lost - call.cleared if nodes is None else (lost - call.cleared).intersection(nodes)
        may_have_run |= bool(doubtful)
        call.is_preempted |= not doubtful.isdisjoint(client.engine.ledger.taken_back)
        if _actor_of(message):
            end = actors.ends.get(_actor_of(message))
            _take_up_of_actor(client, call, message, packed, progress, end, may_have_run=may_have_run)
        elif progress is not None:
            _go_on_with(client, call, message, packed, progress)
        elif call.state == "waiting" or not may_have_run:
            _begin_again(client, call.number, message, packed, starts=starts)
        elif (left := _with_a_retry_less(message, options)) is not None:
            left = left._replace(starts=starts + 1 if message.gang is not None else 0)
            client.retried(call.number, left)
            packed = packed._replace(options=left.options_of(options))
            _begin_again(client, call.number, message, packed, starts=left.starts)
        else:
            _fail(client, call)


def _actor_of(message: CallMessage) -> int:
    """Return the actor of a call; 0 for any other."""
    head = TaskHead(*message.head) if message.gang is None else None
    return head.actor if head is not None and head.kind == CallKind.ACTOR else 0


def _take_up_of_actor(
    client: ClientCalls,
    call: KeptCall,
    message: CallMessage,
    packed: PackedCall,
    progress: HeldProgress | None,
    end: ActorEnd | None,
    *,
    may_have_run: bool,
) -> None:
    """Go on with a call of an actor, which never runs twice, or let it wait for its actor.

    `end`: how the actor has lost its process with the head; None: it has not.
    """
    actor = client.engine.ledger.actors.get(_actor_of(message))
    if progress is not None and actor is not None and actor.is_made and actor.node == progress.node:
        _go_on_with(client, call, message, packed, progress)
    elif progress is None and not may_have_run:
        _begin_again(client, call.number, message, packed)
    elif call.form == CHUNK:
        _fail(client, call)
    elif end is not None:
        client.outcome(call.number, "error", end.error(started=None))
    else:
        text = f"{call.name!r}: may have begun in a process that is gone; call again if it may run twice"
        client.outcome(call.number, "error", ActorLost(text, node=None, started=None))


def _begin_again(
    client: ClientCalls, number: int, message: CallMessage, packed: PackedCall, *, starts: int = 0
) -> None:
    try:
        client.begin(number, message, packed, starts=starts)
    except SkywardError as error:
        client.outcome(number, "error", error)


def _go_on_with(
    client: ClientCalls, call: KeptCall, message: CallMessage, packed: PackedCall, progress: HeldProgress
) -> None:
    """Go on with a call that a node has. Leave out the frames that the journal has."""
    task = client.task(call.number, message, packed)
    task.skip = max(0, call.count - progress.first)
    client.engine.take_up(task, progress.node, message.nodes, progress.devices)
    if call.form == "stream" and call.first > progress.credit:
        client.engine.streams.grant(call.number, call.first - progress.credit)
    client.inputs.take_up(task, progress.inputs)
    if client.kept is None:  # the client has sent the call again, and waits to go on
        client.inputs.go_on(task.id)


def _fail(client: ClientCalls, call: KeptCall) -> None:
    if call.form == CHUNK:  # its map decides which of its calls run again
        loss = Loss(node=0, started=None, is_node=True, is_preempted=call.is_preempted)
        client.outcome(call.number, "lost", loss)
    else:
        client.outcome(call.number, "error", _lost_with_head(call))


def _with_a_retry_less(message: CallMessage, options: CallOptions) -> RetriesLeft | None:
    """Return the retries of a call that was lost with its head, one less than before; None if none is left."""
    if message.handles_loss or not message.may_move:
        return None
    left = RetriesLeft.of(options)
    for name in ("retries_on_loss", "retries", "max_restarts"):
        if (count := getattr(left, name)) > 0:
            return left._replace(**{name: count - 1})
    return None


def _lost_with_head(call: KeptCall) -> NodeLost | Preempted:
    kind, why = (Preempted, ", whose machine its provider took back") if call.is_preempted else (NodeLost, "")
    return kind(
        f"{call.name!r}: the head of the pool is gone{why}, and the call may have begun, so its value is lost; send it "
        "again, or set retries=1 or more if it may run again",
        node=0,
    )
