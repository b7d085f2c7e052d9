"""Actors of one pool: made from pending ones, found by name, and ended by their handles."""

from __future__ import annotations

import concurrent.futures
import threading
from typing import Any

from ..calls.actor import PendingActor
from ..calls.actor_handle import ActorHandle, life_of, remember
from ..calls.futures import Future, value_of
from ..calls.hosted import Construct, EndObject
from ..calls.options import CallOptions
from ..engine.builder import PackedCall
from ..engine.engine import Engine
from ..engine.live_actor import LiveActor
from ..errors import UsageError
from .packer import Packer


class ActorInPool:
    """Actor in an open pool; see `ActorLife`."""

    def __init__(self, engine: Engine, live: LiveActor, pool: str) -> None:
        self._engine = engine
        self._live = live
        self.pool = pool

    @property
    def number(self) -> int:
        return self._live.number

    @property
    def node(self) -> int | None:
        return None if self._live.closed.done() else self._live.node

    @property
    def state(self) -> str:
        if self._live.closed.done():
            return "gone"
        return "alive" if self._live.is_made else "starting"

    def close(self) -> None:
        self._engine.actors.close(self._live.number)
        value_of(self._live.closed)

    def forget(self) -> None:
        self._engine.actors.forget(self._live.number)


class _Settler:
    """Callback that passes a handle on, and then forgets it, because a finished future keeps its callbacks."""

    def __init__(self, future: Future[Any], handle: ActorHandle) -> None:
        self._waiting = [(future, handle)]

    def __call__(self, made: concurrent.futures.Future[Any]) -> None:
        future, handle = self._waiting.pop()
        error = made.exception()
        if error is None:
            future.settle(handle)
        else:
            future.settle_error(error)


class PoolActors:
    """Actors of one pool. Thread-safe."""

    def __init__(self, engine: Engine, packing: Packer, pool: str) -> None:
        self._engine = engine
        self._packing = packing
        self._pool = pool
        engine.actors.find = lambda name: packing.payload(self.named(name))
        self._named: dict[str, ActorHandle] = {}
        self._lock = threading.Lock()

    def make(self, pending: PendingActor[Any], nodes: tuple[int, ...] | None) -> Future[Any]:
        """Make an actor and return a future of its handle.

        Args:
            pending: The actor.
            nodes: Nodes that it may live on; None for any node without a role.

        Raises:
            UsageError: Another actor has its name, its arguments cannot be sent, or no node can hold its resources.
            PoolClosed: The pool is closed.
        """
        engine, packing, cls = self._engine, self._packing, pending.cls
        options = cls.options
        name = options.name or cls.__name__
        call_options = CallOptions(name=name)
        need = options.need
        if need is not None and (why := engine.nodes.refusal(nodes, need, 1)):
            raise UsageError(f"{name!r}: {why}")  # words: ok, schedule/reasons.py says what to do
        number = engine.builder.next_id()

        def cancel(number: int) -> None:
            engine.actors.close(number, cancel=True)

        future: Future[Any] = Future(cancel, call_id=number, why=engine.why_waiting)
        live = LiveActor(
            number=number,
            name=name,
            constructor=PackedCall(
                name,
                packing.function(Construct(cls), name),
                packing.arguments(pending.args, pending.kwargs, name),
                call_options,
            ),
            ending=PackedCall(
                f"{name}.__exit__", packing.function(EndObject(), name), packing.arguments((), {}, name), call_options
            ),
            lanes=options.concurrency,
            nodes=nodes,
            need=need,
            gpus=options.gpus,
            cpus=options.cpus,
            memory_gib=options.memory_gib,
            max_restarts=options.max_restarts,
            restarts_left=options.max_restarts,
            made=Future(),
        )
        handle = ActorHandle(cls, ActorInPool(engine, live, self._pool))
        remember(handle)
        if options.name is not None:
            self._take_name(options.name, handle)

        live.made.add_done_callback(_Settler(future, handle))
        engine.actors.start(live)
        return future

    def _take_name(self, name: str, handle: ActorHandle) -> None:
        with self._lock:
            other = self._named.get(name)
            if other is not None and life_of(other).state != "gone":
                raise UsageError(
                    f"name={name!r}: an actor of this pool has this name; use pool.actor({name!r}), or close it first",
                    field="name",
                    value=name,
                )
            self._named[name] = handle

    def named(self, name: str) -> ActorHandle:
        """Return the actor with that name. Raises UsageError if there is none."""
        with self._lock:
            found = self._named.get(name)
            names = ", ".join(repr(n) for n, handle in self._named.items() if life_of(handle).state != "gone")
        if found is None or life_of(found).state == "gone":
            hint = f"use one of {names}" if names else "make one: Model.with_options(name=...)(...) >> pool"
            raise UsageError(f"name={name!r}: no actor of this pool has this name; {hint}", field="name", value=name)
        return found
