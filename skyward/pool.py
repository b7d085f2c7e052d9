"""The pool: a provider's machines and an engine, for the length of a `with` block.

Long, and one thing: its start, its calls, its lost nodes and its end share a few fields under the same locks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import os
import sys
import threading
import time
import uuid
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future as StdFuture
from typing import Any, Literal, Self, TypeVar, cast

import cloudpickle

from .accelerators import Accelerator
from .allocation import AllocationStrategy
from .announcer import Announcer, EventStream
from .calls import ComputeFunction, PendingCompute, pop_active, push_active
from .cluster import interrupts
from .cluster.direct import DirectEngine
from .cluster.engine import Engine
from .cluster.keeper import Keeper
from .cluster.opening import ask_to_end
from .config import of_file, pool_fields
from .console.console import Console, open_console
from .console.panel import Counts
from .control import Client
from .cost import Forecast, Spending, affordable
from .dispatch import Dispatch
from .errors import (
    ArgumentNotPicklable,
    BudgetExceeded,
    NoCapacity,
    PoolClosed,
    QuotaExceeded,
    SkywardError,
    UsageError,
)
from .events import Event, PoolReady, PoolStarted
from .events import PoolClosed as ClosedEvent
from .image import DEFAULT_IMAGE, Image
from .journal import state_folder
from .live import LivePool
from .logs import LogFiles, printer
from .machine import LogSink, Machine, Offer, PoolSpec
from .options import check_options, is_pool_name, translated
from .presence import Presence
from .providers.base import Provider, RentedProvider
from .providers.ending import shielded
from .remote_control import control_of
from .slot.handle import TargetHandle
from .targets import Calls, NodeCount, NodeTarget, checked_nodes, checked_roles
from .wire.frames import INLINE_LIMIT

__all__ = ["ComputePool"]

V = TypeVar("V")

_MAX_REPLACEMENTS = 16
_USAGE_S = 2.0
"""Seconds between two NodeUsage of a node, where somebody listens."""
_ASK_S = 5.0
"""Seconds to reach a node that is to end, and that perhaps nobody has told so."""
_LAUNCH_PAUSES_S = 1.0, 20.0
"""Before the second try to launch a machine in the place of another, and at most between two."""
_STOP_LAUNCHING_S = 60.0
"""Seconds that a launch gets to end when its pool is closed."""


class ComputePool(Calls):
    """Machines to send calls to, made when the block is entered and gone when it is left.

    Leaving the block waits for calls that are still open, and closes streams that were not read to their end; leaving
    it by an exception (Ctrl-C too) cancels them. If this process dies, however it dies, its nodes end within `lease_s`.
    Thread-safe; several pools may be open at once. Instead of `with`, `start()` and `close()` may be used (a notebook:
    open in one cell, use in others).

    Args:
        provider: where machines come from: `sky.Local()`, `sky.SSH(hosts=[...])`, `sky.AWS(...)`.
        nodes: number of nodes, >= 1.
        roles: nodes that are kept for something: `roles={"evaluation": [2]}`. They take only the calls that are sent
            to `pool.role("evaluation")`, or to such a node by its number; `>> pool`, `@ pool`, map and the rest use
            the other nodes, of which there must be one.
        concurrency: slots on each node, >= 1: so many plain calls run there at once.
        accelerator: of each node: a name ("A100") or a value of `sky.accelerators`; None: none is asked for. A name is
            one device, with the largest memory that it is sold with; on rented machines both must be just these.
        vcpus, memory_gib, architecture: of each node, at least; None: whatever there is.
        allocation: "spot", "on-demand", "spot-if-available" or "cheapest".
        image: what is installed and set on the nodes.
        executor: "process": a process for each slot. "thread": the slots of a node are threads of one process; they
            share its memory and its GIL, a running call cannot be killed, and C-level output is tagged by node only.
        logs: True prints the calls' output here as it comes, each line with its node; False drops it; a function is
            called with each `LogLine` (by a thread of ours: it must not call the pool).
            `sky.LogFiles(folder)` keeps a file for each rank.
        preload: modules that each node imports once, before its slots are forked, which then share them: with many
            slots the first calls come sooner, and memory is saved. One that starts a thread, or fails to be imported,
            makes nothing faster and breaks nothing.
        initializer, initargs: run once in each process before its first call.
        default_timeout_s: for calls that set no `timeout_s`; None: no limit.
        max_inflight: calls of a map on their way at once; None: two for each slot.
        max_hourly_cost: USD per hour for the whole pool at most; None: no limit.
        budget_usd: for the whole pool, from its first machine to the end of its last; None: no limit. Nothing is
            launched that would cost more even if it were given back at once. At 80 % there is a `BudgetWarning`;
            before the rest is spent the pool is closed, and open calls raise BudgetExceeded.
        cancel_grace_s: seconds between the SIGINT and the SIGKILL of a call that is cancelled, >= 0.
        provision_timeout_s: seconds that machines may take to come up, > 0.
        on_event: called with each event of the pool (see `skyward.events`), in order, by a thread of ours. What it
            raises is reported once and harms nothing.
        console: what is shown on standard error. None: on a terminal a few lines at its bottom that follow the nodes,
            plain lines elsewhere, a line in a notebook; of `sky.Local()`, which starts in a moment, only what goes
            wrong, and on a terminal the lines after two seconds. True: all of it, always. False: nothing.
        name: what `skyward ls`, `logs`, `ssh` and `down` call it: letters, digits, "-", "_" and ".".

    Raises:
        UsageError: a field is out of its range; the message names it.
        ProviderError: on entering, when the machines cannot be had.

    Example:
        >>> import skyward as sky
        >>> @sky.compute
        ... def double(x: int) -> int:
        ...     return 2 * x
        >>> with sky.ComputePool(provider=sky.Local(), nodes=2) as pool:
        ...     double(21) >> pool
        42
    """

    def __init__(  # noqa: PLR0913  # keyword-only options
        self,
        provider: Provider,
        *,
        nodes: int = 1,
        roles: Mapping[str, Sequence[int]] | None = None,
        concurrency: int = 1,
        accelerator: str | Accelerator | None = None,
        vcpus: int | None = None,
        memory_gib: float | None = None,
        architecture: Literal["x86_64", "arm64"] | None = None,
        allocation: AllocationStrategy = "spot-if-available",
        image: Image | None = None,
        executor: Literal["process", "thread"] = "process",
        logs: bool | LogSink = True,
        preload: Sequence[str] = (),
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
        default_timeout_s: float | None = None,
        max_inflight: int | None = None,
        max_hourly_cost: float | None = None,
        budget_usd: float | None = None,
        cancel_grace_s: float = 3.0,
        provision_timeout_s: float = 300.0,
        on_event: Callable[[Event], object] | None = None,
        console: bool | None = None,
        name: str | None = None,
        **aliases: Any,
    ) -> None:
        if aliases:
            given = {k: v for k, v in locals().items() if k not in ("self", "provider", "aliases", "__class__")}
            defaults = inspect.signature(ComputePool).parameters
            self.__init__(provider, **{**given, **translated(aliases, given, defaults)})  # type: ignore[misc]
            return
        check_options({name: value for name, value in locals().items() if name not in ("self", "aliases", "__class__")})
        self.provider = provider
        self._roles = checked_roles(roles, nodes)
        self.concurrency = concurrency
        self._inflight = max_inflight
        self._default_timeout_s = default_timeout_s
        self._spec = PoolSpec(
            nodes=nodes,
            concurrency=concurrency,
            executor=executor,
            accelerator=Accelerator.from_name(accelerator) if isinstance(accelerator, str) else accelerator,
            vcpus=vcpus,
            memory_gib=memory_gib,
            architecture=architecture,
            allocation=allocation,
            image=image or DEFAULT_IMAGE,
            preload=tuple(preload),
            max_hourly_cost=max_hourly_cost,
            cancel_grace_s=cancel_grace_s,
            provision_timeout_s=provision_timeout_s,
        )
        self._sink: LogSink | None = printer() if logs is True else logs if callable(logs) else None
        self._initializer = None if initializer is None else (initializer, tuple(initargs))
        self._label = name or ""
        # Part of the path of sockets, which is short.
        self._name = f"{(name or 'pool')[:15]}-{uuid.uuid4().hex[:8]}"
        self._wants_console = console
        self._console: Console | None = None
        self._presence: Presence | None = None
        self._lock = threading.Lock()
        self._ending = threading.Lock()
        """Held while it starts and while it ends."""
        self._launched = threading.Condition()
        self._launching: Counter[int] = Counter()
        """By node: how many threads launch, or wait to launch, a machine in the place of another."""
        self._launch_locks: dict[int, threading.Lock] = {}
        self._spares: dict[int, Machine] = {}
        """Machines that stand ready for nodes whose machines will be taken."""
        self._engine: Engine | None = None
        self._dispatch: Dispatch | None = None
        self._offers: list[Offer] = []
        self._machines: dict[int, Machine] = {}
        self._replacements = 0
        self._owner = os.getpid()
        on_heard = weakref.WeakMethod(self._on_heard)  # a pool that is dropped must not wait for a collection
        self._announcer = Announcer(on_event, lambda is_heard: _call(on_heard(), is_heard))
        weakref.finalize(self, self._announcer.close).atexit = False  # readers of one that was never entered
        self._budget_usd = budget_usd
        self._spending: Spending | None = None
        self._ended_by: SkywardError | None = None
        self._began_at = 0.0

    @classmethod
    def named(cls, name: str, **overrides: Any) -> ComputePool:
        """The pool that `skyward.toml`, or a file of the user's own, calls so; see `skyward.config`.

        Args:
            overrides: arguments of ComputePool that win over those of the files.

        Raises:
            UsageError: there is no such pool, or something in the files is wrong: where, and what may stand there.
            MissingDependency: its provider needs an extra that is not installed.
        """
        fields = pool_fields(name)
        if "name" not in overrides and is_pool_name(name):
            fields["name"] = name
        try:
            return cls(**{**fields, **overrides})
        except UsageError as error:
            raise (error if overrides or type(error) is not UsageError else of_file(name, error)) from error

    Named = named

    # Life -----------------------------------------------------------------------------------------------------------

    @property
    def is_active(self) -> bool:
        """Whether calls can be sent now."""
        return self._engine is not None and self._owner == os.getpid()

    @property
    def nodes(self) -> NodeCount:
        """The number of nodes. Called, it gives some of them as a target of calls: `pool.nodes([0, 2])`."""
        return NodeCount(self._spec.nodes, self)

    def node(self, number: int) -> NodeTarget:
        """One node, as a target of calls: `f(x) >> pool.node(1)`; `number` in [0, nodes). Raises UsageError."""
        (chosen,) = checked_nodes("node", (number,), self._spec.nodes)
        return NodeTarget(self, (chosen,), f"node {chosen}")

    def role(self, name: str) -> NodeTarget:
        """The nodes that are kept for a role, as a target of calls. Raises UsageError: there is no such role."""
        if name not in self._roles:
            there = ", ".join(map(repr, self._roles)) or "none; give ComputePool(roles={...})"
            raise UsageError(f"role: {name!r} is no role of this pool; there are: {there}", field="role")
        return NodeTarget(self, self._roles[name], f"role {name!r}")

    @property
    def roles(self) -> dict[str, tuple[int, ...]]:
        """By name: the nodes that are kept for it."""
        return dict(self._roles)

    @property
    def _kept(self) -> frozenset[int]:
        return frozenset(itertools.chain.from_iterable(self._roles.values()))

    @property
    def node_numbers(self) -> tuple[int, ...]:
        """The nodes that ordinary calls go to: those that are kept for no role."""
        return tuple(node for node in range(self._spec.nodes) if node not in self._kept)

    @property
    def _goes_to(self) -> None:
        return None

    @property
    def _max_inflight(self) -> int | None:
        return self._inflight

    @property
    def total_slots(self) -> int:
        """Ordinary calls that run at once: the nodes that are kept for no role x concurrency.

        `pool.role(name).total_slots` is how many run in a role.
        """
        return (self._spec.nodes - len(self._kept)) * self.concurrency

    @property
    def job_id(self) -> str:
        """The name of this pool and no other, which `sky.instance_info().job_id` is in its calls."""
        return self._name

    def __reduce__(self) -> tuple[Any, ...]:
        """In a call's arguments it becomes a handle, which is a target of calls there; see `TargetHandle`."""
        return TargetHandle, (self._name, self.node_numbers, True, "the whole", self.total_slots)

    @property
    def spec(self) -> PoolSpec:
        """What the pool asks of its provider."""
        return self._spec

    def events(self) -> EventStream:
        """What happens to the pool from now on, as it comes: an iterator of `skyward.events`.

        Any thread may read it, and there may be several. It ends when the pool is closed. At most 10,000 events wait in
        it; then the oldest are dropped, and `EventsDropped` says how many. To see the pool start, ask before
        it is entered.
        """
        return self._announcer.listen()

    def offers(self) -> list[Offer]:
        """What the provider has for this pool now, in the order in which it would be tried. Rents nothing."""
        return self.provider.offers(self._spec)

    def plan(self) -> list[Any]:
        """Exactly what would be asked of the provider for the first offer. Sends nothing that changes anything."""
        return self.provider.plan(self._spec, self.offers()[0], self._name)

    def forecast(self) -> Forecast:
        """What the pool would cost by its first offer. Rents nothing; raises BudgetExceeded if it may not start."""
        offers = affordable(
            self.offers(), nodes=self._spec.nodes, minimum_s=self._least_billed_s, budget_usd=self._budget_usd
        )
        price = offers[0].price_usd_per_hour * self._spec.nodes
        return Forecast(
            offer=offers[0],
            nodes=self._spec.nodes,
            price_usd_per_hour=price,
            minimum_usd=price * self._least_billed_s / 3600,
            lasts_s=None if self._budget_usd is None or not price else self._budget_usd / price * 3600,
        )

    @property
    def cost_usd(self) -> float:
        """What its machines have cost until now, by the prices of their offers; 0 where nothing is rented."""
        return 0.0 if self._spending is None else self._spending.spent_usd

    @property
    def _rented(self) -> RentedProvider | None:
        return cast(RentedProvider, self.provider) if self.provider.is_rented else None

    @property
    def _least_billed_s(self) -> float:
        """What each machine is paid for even if it is given back at once, in seconds."""
        return max(self._rented.minimum_billed_s, self._rented.ending_s) if self._rented else 0.0

    def _emit(self, event: Event) -> None:
        if self._spending is not None:
            self._spending.take(event)
        self._announcer.emit(event)

    def _account(self) -> None:
        """Count from now on what the machines cost, and close the pool before that is more than its budget."""
        if self._rented is not None:
            stop = weakref.WeakMethod(self._end_early)
            self._spending = Spending(
                minimum_s=self._rented.minimum_billed_s,
                ending_s=self._rented.ending_s + self._spec.cancel_grace_s,
                budget_usd=self._budget_usd,
                tell=self._announcer.emit,
                stop=lambda error: _call(stop(), error),
            )

    def _end_early(self, error: SkywardError) -> None:
        """Its budget is spent, or another process wants it to end: what is open, and what is still called, says so."""
        self._ended_by = error
        engine = self._engine
        if engine is not None:
            engine.cancel_all(error)
            self.close(cancel=True)
        else:  # it still starts; what it waits for ends under it
            self._spec.stop.set()
            if self._rented is not None:
                self._rented.settle(self._name)

    def _on_heard(self, is_heard: bool) -> None:
        engine = self._engine
        if engine is not None:
            engine.tell_tasks(is_heard)
            if is_heard:
                engine.nodes.ask_usage(_USAGE_S)

    def agent_pids(self) -> dict[int, int]:
        """By node: the process id of its agent, on that node's machine. A node that is being replaced is not in it.

        For tests and tools (see `skyward.testing.Faults`); calls need none of it.
        """
        engine, _ = self._running()
        return engine.nodes.agent_pids()

    def start(self) -> Self:
        """Make the machines and connect to them; what fails, or is interrupted, leaves nothing behind."""
        with self._ending, self._lock:
            if self._engine is not None:
                raise UsageError(f"{self!r} is open already")
            self._spec = dataclasses.replace(self._spec, stop=threading.Event())
            self._look_at_image()
            self._ended_by = None
            presence = self._made_presence()
            self._account()
            engine = DirectEngine(
                self._name,
                cancel_grace_s=self._spec.cancel_grace_s,
                logs=None if self._sink is None else presence.keeping(self._sink),
                mask=self._spec.image.masker(),
                initializer=_pickled_initializer(self._initializer),
                emit=self._emit,
                kept=self._kept,
                default_timeout_s=self._default_timeout_s,
            )
            self._owner = os.getpid()
            self._began_at = time.monotonic()
            try:
                self._start_all(engine, presence)
            except BaseException as error:  # Ctrl-C too
                try:
                    self._tear_down(engine)
                finally:
                    self._say_closed(_in_words(self._ended_by or error))
                if self._ended_by is not None and error is not self._ended_by:
                    raise self._ended_by from error
                raise
            self._engine = engine
            self._on_heard(self._announcer.is_heard)
            if self._console is not None and self._console.wants_usage:
                engine.nodes.ask_usage(_USAGE_S)
            self._emit(PoolReady(pool=self._name, seconds=time.monotonic() - self._began_at))
            self._dispatch = Dispatch(engine, self._default_timeout_s)
        if self._ended_by is not None:  # in the last moment
            self.close(cancel=True)
            raise self._ended_by
        push_active(self)
        return self

    def _start_all(self, engine: Engine, presence: Presence) -> None:
        self._presence = presence
        presence.open()
        self._open_console()
        self._announcer.open()
        self._emit(PoolStarted(pool=self._name, provider=self.provider.name, nodes=self._spec.nodes))
        self._offers = affordable(
            self.offers(), nodes=self._spec.nodes, minimum_s=self._least_billed_s, budget_usd=self._budget_usd
        )
        if self._rented is not None:  # before anything is rented
            reaper, log_path = self._rented.reaper(self._name), os.path.join(state_folder(), "keeper.log")
            Keeper.of_this_process().guard(self._name, reaper, log_path=log_path)
        machines = self._launch(list(range(self._spec.nodes)))
        self._machines = {machine.node: machine for machine in machines}
        presence.tell_nodes(machines)
        for machine in machines:
            Keeper.of_this_process().watch(machine)
        engine.start(machines, self)
        if self._ended_by is not None:
            raise self._ended_by

    def close(self, *, cancel: bool = False) -> None:
        """Wait for open calls (`cancel`: stop them instead), then end the machines. Idempotent."""
        if self._engine is None:
            if self._owner == os.getpid():
                with self._ending:  # another thread may be at it: its budget is spent
                    return
            return
        try:
            if self.is_active:
                if cancel:
                    self._engine.cancel_all(self._ended_by)
                else:
                    self._engine.streams.close_all()
                    self._engine.wait_idle()
                self._engine.wait_stopped()
        finally:
            pop_active(self)
            try:
                shielded(self._end)
                if isinstance(self._sink, LogFiles):
                    self._sink.close()
            finally:
                interrupts.restore()  # of this thread, which may be the main one
                self._say_closed("" if self._ended_by is None else _in_words(self._ended_by))

    def _end(self) -> None:
        """Once, whoever calls it: another waits until it is done. A Ctrl-C does not come between its steps."""
        with self._ending:
            with self._lock:
                engine, self._engine = self._engine, None
                dispatch, self._dispatch = self._dispatch, None
            self._spec.stop.set()
            with self._launched:  # a machine that is being launched is ended by who does so
                self._launched.wait_for(lambda: not self._launching.total(), _STOP_LAUNCHING_S)
            try:
                if engine is not None:
                    self._tear_down(engine)
            finally:
                if dispatch is not None:
                    dispatch.close()

    def _say_closed(self, reason: str = "") -> None:
        seconds = time.monotonic() - self._began_at
        self._emit(ClosedEvent(pool=self._name, seconds=seconds, reason=reason))
        console, self._console = self._console, None
        presence, self._presence = self._presence, None
        if self._owner == os.getpid():
            if console is not None:
                console.close()
            if presence is not None:
                presence.close()
        self._announcer.close()

    def _made_presence(self) -> Presence:
        this = weakref.WeakMethod(self._end_early)
        pool = LivePool.of_this_process(
            pool=self._name,
            label=self._label,
            provider=self.provider.name,
            wanted=self._spec.nodes,
            is_rented=self.provider.is_rented,
        )
        return Presence(pool, lambda reason: _call(this(), PoolClosed(reason)))

    def _open_console(self) -> None:
        is_quick = self.provider.shares_files and not self.provider.is_rented
        this = weakref.ref(self)
        self._console = open_console(
            self._wants_console, name=self._label or self._name, is_quick=is_quick, counts=lambda: _counts(this())
        )
        if self._console is not None:
            self._announcer.attach(self._console.emit)

    def _tear_down(self, engine: Engine) -> None:
        if self._owner != os.getpid():
            return  # a fork of the client: the machines are the parent's
        machines = [*self._machines.values(), *self._spares.values()]
        self._machines.clear()
        self._spares.clear()
        try:
            engine.close()
            if not engine.was_started or self._replacements:  # a replacement may not have been reached yet
                ask_to_end(machines, _ASK_S)
        finally:
            try:
                self.provider.terminate(machines)
                if self._rented is not None and self._rented.settle(self._name):
                    Keeper.of_this_process().release(self._name)  # not before: what is left is the keeper's then
            finally:
                for machine in machines:
                    Keeper.of_this_process().forget(machine)

    def __enter__(self) -> Self:
        try:
            return self.start()
        except KeyboardInterrupt:  # it may come when all is done, and then nobody calls __exit__
            self.close(cancel=True)
            raise

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(cancel=kind is not None)

    def __del__(self) -> None:
        if getattr(self, "_engine", None) is not None and self._owner == os.getpid() and not sys.is_finalizing():
            warnings.warn(f"{self!r} was never closed; use `with`, or call close()", ResourceWarning, stacklevel=2)
            with contextlib.suppress(Exception):
                self.close(cancel=True)

    def __repr__(self) -> str:
        state = "open" if self.is_active else "closed"
        count = self._spec.nodes
        return f"<ComputePool {self._name} {self.provider!r} nodes={count} concurrency={self.concurrency} {state}>"

    def _launch(self, nodes: list[int]) -> list[Machine]:
        offers = self._offers
        if self._spending is not None:
            offers = affordable(
                offers, nodes=len(nodes), minimum_s=self._least_billed_s, budget_usd=self._spending.left_usd
            )
        return self.provider.launch(self._spec, offers, self._name, nodes, self._emit)

    def replace(self, node: int) -> Machine | None:
        """For the engine: another machine in the place of one that was lost."""
        with self._launching_one(node):
            return self._replaced(node)

    def prepare_replacement(self, node: int) -> bool:
        """For the engine: launch now the machine that `replace` will give."""
        with self._launching_one(node):
            if node in self._spares or self._engine is None or self._replacements >= _MAX_REPLACEMENTS:
                return node in self._spares
            try:
                (machine,) = self._launch([node])
            except (
                NoCapacity,
                QuotaExceeded,
                BudgetExceeded,
            ):  # beside the old one; perhaps there is room when that is gone
                return False
            Keeper.of_this_process().watch(machine)
            self._spares[node] = machine
            return True

    @contextlib.contextmanager
    def _launching_one(self, node: int) -> Iterator[None]:
        """One launch at a time for each node; the pool's end waits for them."""
        with self._launched:
            self._launching[node] += 1
            lock = self._launch_locks.setdefault(node, threading.Lock())
        try:
            with lock:
                yield
        finally:
            with self._launched:
                self._launching[node] -= 1
                self._launched.notify_all()

    def give_up(self, node: int) -> None:
        """For the engine: end the machine of a node that will not come back. One that is gone is no error."""
        old = self._machines.get(node)
        if old is None:
            return
        try:
            self.provider.terminate([old])
        finally:  # or its lease would be renewed for ever
            Keeper.of_this_process().forget(old)
        self._machines.pop(node, None)

    def _replaced(self, node: int) -> Machine | None:
        machine = self._spares.pop(node, None)
        if machine is None:
            self.give_up(node)
        elif (old := self._machines.get(node)) is not None:  # its end may take a minute, and nobody need wait for it
            threading.Thread(target=self._end_old, args=(old,), name="skyward-ending", daemon=True).start()
        self._replacements += 1
        if machine is None:
            if self._engine is None or self._replacements > _MAX_REPLACEMENTS:
                return None
            machine = self._launched_patiently(node)
            Keeper.of_this_process().watch(machine)
        with self._lock:
            if self._engine is not None:
                self._machines[node] = machine
                if self._presence is not None:
                    self._presence.tell_nodes(self._machines.values())
                return machine
        ask_to_end([machine], _ASK_S)  # the pool was closed meanwhile
        try:
            self.provider.terminate([machine])
        finally:
            Keeper.of_this_process().forget(machine)
        return None

    def _end_old(self, machine: Machine) -> None:
        """In a thread of its own: end one that another stands in for. What is left is ended with the pool."""
        try:
            self.provider.terminate([machine])
        except SkywardError as error:
            sys.stderr.write(f"skyward: node {machine.node}: its old machine: {type(error).__name__}: {error}\n")
        finally:
            Keeper.of_this_process().forget(machine)

    def _launched_patiently(self, node: int) -> Machine:
        """Another machine; where what prevents it may pass, again and again, for as long as machines may take."""
        deadline = time.monotonic() + self._spec.provision_timeout_s
        pause_s, most_s = _LAUNCH_PAUSES_S
        while True:
            try:
                (machine,) = self._launch([node])
                return machine
            except SkywardError as error:
                is_over = time.monotonic() + pause_s > deadline
                if is_over or not self._may_pass(error) or self._spec.stop.wait(pause_s):
                    raise
            pause_s = min(2 * pause_s, most_s)

    def _may_pass(self, error: SkywardError) -> bool:
        """Hosts of the user's own do not grow in number or size; a cloud may have more machines in a while."""
        is_lasting = isinstance(error, NoCapacity) and self._rented is None
        is_passing = error.retryable or isinstance(error, QuotaExceeded)  # it was enough for the one that was lost
        return is_passing and not is_lasting and not getattr(error, "is_final", False)

    def why_gone(self, node: int) -> str | None:
        """For the engine: whether the machine of a node that does not answer is certainly gone."""
        machine = self._machines.get(node)
        return None if self._rented is None or machine is None else self._rented.why_gone(machine)

    def _warn_unused(self) -> None:
        unused = self._spec.image.unused_fields(self.provider.acts_on_image)
        if unused:
            warnings.warn(
                f"Image: {', '.join(unused)} has no effect with {self.provider!r}: its nodes use this environment; "
                "install there what the calls need",
                stacklevel=5,
            )

    def _look_at_image(self) -> None:
        """What of it has no effect, what will fail on the nodes, and the code that travels: before anything is paid."""
        self._warn_unused()
        if self.provider.shares_files or "pip" not in self.provider.acts_on_image:
            return
        from .bootstrap.code import gather
        from .bootstrap.preflight import check

        code = gather(self._spec.image)
        check(self._spec.image, code, architecture=self._spec.architecture, resolves=self.provider.is_rented)
        self._spec = dataclasses.replace(self._spec, code=code)

    def _running(self) -> tuple[Engine, Dispatch]:
        engine, dispatch = self._engine, self._dispatch
        if self._ended_by is not None:
            raise self._ended_by
        if engine is None or dispatch is None or not self.is_active:
            raise PoolClosed(f"{self!r}: calls go to an open pool; use it inside its `with` block, or call start()")
        return engine, dispatch

    def control(
        self,
        task: StdFuture[Any] | PendingCompute[Any] | str | None = None,
        *,
        job_id: str | None = None,
        start_s: float = 60.0,
    ) -> Client:
        """Control of a training run in a call that is open here: its status, and to save, stop or abort it.

        It reaches the run's `skyward.training.TrainerControlCallback` by the channel that the pool has to the node
        anyway, on any provider; no port is opened. In a gang rank 0 answers.

        Args:
            task: the call: its future, the pending call that was sent, or its name. None: the only one that is open.
            job_id: of the run; None: the only one in that call.
            start_s: how long to wait until the run has begun, when it is asked for the first time.

        Raises:
            UsageError: `task` is not one call. Everything else is raised when the run is asked, as ControlFailed.
        """
        self._running()
        return control_of(lambda: self._running()[0], task, job_id, start_s)


def _counts(pool: ComputePool | None) -> Counts | None:
    engine = None if pool is None else pool._engine
    if pool is None or engine is None:
        return None
    now = engine.counts()
    return Counts(
        slots=pool.nodes * pool.concurrency, busy=now.busy, queued=now.queued, ended=now.ended, failed=now.failed
    )


def _in_words(error: BaseException) -> str:
    if isinstance(error, PoolClosed):
        return str(error)
    name = type(error).__name__
    return f"{name}: {error}" if str(error) else "interrupted" if isinstance(error, KeyboardInterrupt) else name


def _call(method: Callable[[V], None] | None, value: V) -> None:
    if method is not None:
        method(value)


def _pickled_initializer(initializer: tuple[Callable[..., object], tuple[Any, ...]] | None) -> bytes | None:
    if initializer is None:
        return None
    function, args = initializer
    if isinstance(function, ComputeFunction):
        function = function.fn
    try:
        data: bytes = cloudpickle.dumps((function, args))
    except Exception as error:
        raise ArgumentNotPicklable(
            f"initializer: it or its initargs cannot be sent: {type(error).__name__}: {error}", argument="initializer"
        ) from error
    if len(data) > INLINE_LIMIT:
        raise UsageError(
            f"initializer: it and its initargs are {len(data)} bytes; the limit is {INLINE_LIMIT}. "
            "Load large things inside it, or with sky.once in the calls"
        )
    return data
