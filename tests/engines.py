"""The engine of an open pool from inside, for tests of properties that do not show outside."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import skyward as sky
from skyward.engine.dialler import CommandEnds
from skyward.engine.direct import DirectEngine
from skyward.engine.engine import Engine
from skyward.engine.head.messages import HeadConfig
from skyward.engine.head.place import LocalHead, folder_for, head_on
from skyward.engine.hosted import HostedEngine
from skyward.engine.hosted_members import HostedMembers
from skyward.engine.lender import command_to
from skyward.engine.ray.links import RayWays
from skyward.pool.engines import Way
from skyward.values.machine import Machine
from skyward.values.ref import held_by

__all__ = [
    "engine_of",
    "gated_pool",
    "head_place",
    "hosted_pool",
    "is_moving",
    "journaled_pool",
    "leave",
    "machine_of",
    "members_of",
    "next_client",
    "open_calls",
    "permitted_calls",
    "raised_pool",
    "ray_pool",
    "without_ray",
]


def engine_of(pool: sky.ComputePool) -> DirectEngine:
    engine, _ = pool._life.running()  # users never hold the engine, so no public name leads to it
    assert isinstance(engine, DirectEngine)
    return engine


def head_place(pool: sky.ComputePool) -> int | None:
    """Return the node beside the head; None: the head is in the program."""
    engine, _ = pool._life.running()  # no public name tells
    return next(iter(engine.members.last), None)


def machine_of(pool: sky.ComputePool, node: int) -> Machine:
    """Return the machine that a node of a pool runs on now."""
    return pool._life.machine(node)  # users never hold one


def members_of(pool: sky.ComputePool) -> HostedMembers:
    """Return the nodes of a pool with a head, as its program has them in its books."""
    engine, _ = pool._life.running()  # users never hold the engine
    assert isinstance(engine, HostedEngine)
    return engine.members


def open_calls(pool: sky.ComputePool) -> frozenset[int]:
    """Return the numbers of the calls of which the program of a pool with a head has no outcome."""
    engine, _ = pool._life.running()  # users never hold the engine
    assert isinstance(engine, HostedEngine)
    return frozenset(engine.ledger.tasks)


def without_ray(pool: sky.ComputePool) -> sky.ComputePool:
    """Let the scheduler of a pool that is not open run in a head, and never raise Ray. Return the pool."""
    pool._life.way = Way.LENT  # users have no option for it
    return pool


def hosted_pool(provider: Any = None, *, lease_s: float = 60.0, **options: Any) -> sky.ComputePool:
    """Return a pool whose scheduler runs in a head: beside its first node; by default all are on this machine."""
    return without_ray(sky.ComputePool(provider or sky.Local(lease_s=lease_s), **options))


def raised_pool(provider: Any, **options: Any) -> sky.ComputePool:
    """Return a pool with a head which raises Ray on its nodes at once, and goes on if Ray does not come up."""
    pool = sky.ComputePool(provider, engine="auto", **options)
    life = pool._life  # users have no option for the time of Ray
    assert life.way is Way.RAY_OR_LENT
    life.ray_after_s = 0.0
    return pool


def journaled_pool(**options: Any) -> sky.ComputePool:
    """Return a pool with a detached pool's head, which begins again when it is killed. All nodes are on this machine.

    It reaches only the first node by itself: the client lends the channels to the others.
    """
    pool = hosted_pool(**options)
    life = pool._life  # users have no option for it

    def make(initializer: bytes | None, launched: list[Machine]) -> Engine:
        first = launched[0]
        config = HeadConfig(
            pool=life.name,
            folder=folder_for(life.name, first),
            cancel_grace_s=1.0,
            lease_s=60.0,
            initializer=initializer,
            node_folder=first.folder,
            detached_for_s=600.0,
            attach_key="key",
        )
        return HostedEngine(config, LocalHead(), emit=life.announcer.emit)

    life._make_engine = make  # type: ignore[method-assign]
    return pool


def leave(pool: sky.ComputePool) -> None:
    """Leave the head of a `journaled_pool`, as a program does that detaches."""
    engine, _ = pool._life.running()  # users never hold the engine
    assert isinstance(engine, HostedEngine)
    engine.leave()


def next_client(pool: sky.ComputePool) -> HostedEngine:
    """Return an engine that takes the head of a `journaled_pool` over, as another program does by `attach`."""
    engine, _ = pool._life.running()  # users never hold the engine
    assert isinstance(engine, HostedEngine)
    command = engine._command

    class Known(LocalHead):
        def start(self, config: HeadConfig) -> tuple[str, ...]:
            return command()

    return HostedEngine(engine._config, Known(), attaches=True, takes_over=True)


def gated_pool(**options: Any) -> sky.ComputePool:
    """Return a pool on this machine whose head is as one beside node 0: calls begin there once they are known."""
    pool = hosted_pool(**options)
    life = pool._life  # users have no option for it

    def make(initializer: bytes | None, launched: list[Machine]) -> Engine:
        first = launched[0]
        config = HeadConfig(pool=life.name, cancel_grace_s=1.0, initializer=initializer)
        config, place = head_on(first, config)
        return HostedEngine(replace(config, node_folder=first.folder), place, emit=life.announcer.emit)

    life._make_engine = make  # type: ignore[method-assign]
    return pool


def permitted_calls(pool: sky.ComputePool) -> int:
    """Return how many calls may begin beside the head before the program of the pool knows of that."""
    engine, _ = pool._life.running()  # users never hold the engine
    assert isinstance(engine, HostedEngine)
    return engine._calls.permitted  # users have no use for it


def is_moving(pool: sky.ComputePool, ref: sky.Ref[Any]) -> bool:
    """Return whether a second node was told to keep a value."""
    (blob,) = held_by(ref).pickled.buffers
    return sum(blob in link.held for link in engine_of(pool).ledger.links.values()) == 2


def ray_pool(**options: Any) -> tuple[sky.ComputePool, RayWays]:
    """Return a pool on this machine whose links may go by Ray, and the ways that decide it."""
    pool = sky.ComputePool(sky.Local(lease_s=60.0), **options)  # a busy machine may take seconds to dial again

    def move(node: int) -> None:
        engine_of(pool).link_repair.move(node)

    ways = RayWays(lambda machine: partial(CommandEnds, command_to(machine)), move)
    life = pool._life  # users have no option for it yet
    make = life._make_engine

    def make_by_ray(initializer: bytes | None, launched: list[Machine]) -> Engine:
        engine = make(initializer, launched)
        assert isinstance(engine, DirectEngine)
        engine.nodes.opener.way_to = ways.way_to
        return engine

    life._make_engine = make_by_ray  # type: ignore[method-assign]
    return pool, ways
