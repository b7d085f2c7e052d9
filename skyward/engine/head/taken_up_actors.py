"""Actors of a head that is gone, as the next one goes on with them.

An actor lives in a process of its node, and the agent leaves that to the next head. The client sends all actors again.
One that is made goes on with its calls. One whose process is gone, or is not made yet, restarts or is lost: its
constructor may have begun. All others begin.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, NamedTuple

from ...wire.frames import FrameKind
from ..actors import ActorEnd
from ..ledger import Ledger
from ..live_actor import LiveActor
from ..tasks import Loss
from .messages import ActorMessage

if TYPE_CHECKING:
    from .client_calls import ClientCalls


class HeldActor(NamedTuple):
    """Actor that a node has, as its agent tells the next head."""

    node: int
    is_made: bool
    running: tuple[int, ...]
    """Tasks that it runs."""
    devices: tuple[int, ...] | None


def held_actors(ledger: Ledger) -> dict[int, HeldActor]:
    """Return the actors that the nodes had from an earlier head."""
    held: dict[int, HeldActor] = {}
    for node, link in ledger.links.items():
        for number, (is_made, running, devices) in link.facts.pop("actors", {}).items():
            held[int(number)] = HeldActor(node, is_made, tuple(running), None if devices is None else tuple(devices))
    return held


class TakenActors(NamedTuple):
    """Actors as they go on."""

    running: frozenset[int]
    """Tasks that they run."""
    ends: dict[int, ActorEnd]
    """End of each process that is lost, by the number of its actor."""


NO_ACTORS = TakenActors(frozenset(), {})


def take_up_actors(client: ClientCalls, held: dict[int, HeldActor], lost: frozenset[int]) -> TakenActors:
    """Go on with the actors that the client has sent again. Needs the ledger's lock.

    Args:
        client: Calls of the client.
        held: Actors that the nodes have. All others than those of the client end.
        lost: Nodes that may have had actors, and are gone.
    """
    engine, running, ends = client.engine, set[int](), dict[int, ActorEnd]()
    early, client.early_actors = client.early_actors, []
    for actor, message in early:
        there = held.get(actor.number)
        if there is not None:
            del held[actor.number]
            running.update(there.running)
            engine.actors.take_up(actor, there.node, there.devices, is_made=there.is_made)
        elif _had_process(actor, message, lost):
            is_node = message.node in lost
            actor.node = message.node if is_node else None
            if is_node:
                loss = engine.ledger.node_loss(message.node or 0, started=None)
            else:
                loss = Loss(node=message.node or 0, started=None, signal=signal.SIGKILL)
            ends[actor.number] = engine.actors.lose(actor, loss)
        else:
            engine.actors.start(actor)
    for number, rest in held.items():
        engine.ledger.tell(rest.node, FrameKind.END_ACTOR, number)
    return TakenActors(frozenset(running), ends)


def _had_process(actor: LiveActor, message: ActorMessage, lost: frozenset[int]) -> bool:
    """Return whether an actor that no node has may have had a process, and must not begin as if it had none."""
    if not message.had_head:
        return False
    may_have_begun = bool(lost if actor.nodes is None else lost.intersection(actor.nodes))
    return message.node is not None or (may_have_begun and not actor.restarts_left)
