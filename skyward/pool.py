"""The pool: a provider's machines and an engine, for the length of a `with` block.

Long, for its options and what they mean are told here. Its machines are `pool_machines`, its calls `targets`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import logging
import os
import sys
import threading
import time
import uuid
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future as StdFuture
from typing import Any, Literal, Self, TypeVar, Unpack

from . import interrupts
from .accelerators import Accelerator
from .active import pop_active, push_active
from .allocation import AllocationStrategy
from .announcer import Announcer, EventStream
from .calls import PendingCompute
from .cluster.devices import sharing_of_pool
from .cluster.direct import DirectEngine
from .cluster.engine import Engine
from .config import of_file, pool_fields
from .console.console import Console, open_console
from .console.panel import Counts
from .control import Client
from .cost import Forecast, forecast
from .dispatch import Dispatch
from .errors import PoolClosed, SkywardError, UsageError
from .events import Event, Overlooked, PoolReady, PoolStarted
from .events import PoolClosed as ClosedEvent
from .image import DEFAULT_IMAGE, Image
from .live import LivePool
from .logs import Lines, LogFiles
from .machine import LogSink, Offer, PoolSpec
from .options import ALIASES, PoolAliases, check_options, is_pool_name
from .oversights import Oversights
from .packing import packed_initializer
from .pool_machines import PoolMachines
from .presence import Presence
from .providers.base import Provider, least_billed_s
from .providers.ending import shielded
from .remote_control import control_of
from .replacing import make_way, withdraw
from .signatures import checked_options
from .slot.handle import TargetHandle
from .targets import Calls, NodeCount, NodeTarget, checked_nodes, checked_roles
from .user_lines import drop_our_frames, warn_user

__all__ = ["ComputePool"]

_log = logging.getLogger(__name__)

V = TypeVar("V")

_WANT_OF_ROOM = frozenset(
    (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOSPC, errno.EDQUOT, errno.E2BIG, errno.EFBIG)
)

_USAGE_S = 2.0
"""Seconds between two NodeUsage of a node, where somebody listens."""


@checked_options(aliases=ALIASES, check=check_options)
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
            called with each `LogLine`, in order, by a thread of its own. One that blocks loses the oldest lines.
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
        name: what `skyward ls`, `logs`, `ssh` and `down` call it: letters, digits, "-", "_" and ".". A process has one
            open pool of a name; in a notebook the next one closes it, as does a pool assigned to the same variable.

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
        **aliases: Unpack[PoolAliases],
    ) -> None:
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
        self._logs = logs
        self._lines: Lines | None = None
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
        self._telling = threading.RLock()
        """Held until its end is told: the traceback of another thread's call comes after that. Before `_ending`."""
        self._engine: Engine | None = None
        self._dispatch: Dispatch | None = None
        self._machines: PoolMachines | None = None
        """Those of the last start; what they cost is known when they are gone, too."""
        self._owner = os.getpid()
        on_heard = weakref.WeakMethod(self._on_heard)  # a pool that is dropped must not wait for a collection
        self._announcer = Announcer(on_event, lambda is_heard: _call(on_heard(), is_heard))
        weakref.finalize(self, self._announcer.close).atexit = False  # readers of one that was never entered
        self._budget_usd = budget_usd
        self._ended_by: SkywardError | None = None
        self._oversights = Oversights()
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
        fields = pool_fields(name, cls.__init__)
        overrides = {ALIASES.get(key, key): value for key, value in overrides.items()}
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
    def name(self) -> str:
        """The name that its user gave it, or empty."""
        return self._label

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
        minimum_s = least_billed_s(self.provider)
        return forecast(self.offers(), nodes=self._spec.nodes, minimum_s=minimum_s, budget_usd=self._budget_usd)

    @property
    def cost_usd(self) -> float:
        """What its machines have cost until now, by the prices of their offers; 0 where nothing is rented."""
        return 0.0 if self._machines is None else self._machines.cost_usd

    def _end_early(self, error: SkywardError) -> None:
        """Its budget is spent, or another process wants it to end: what is open, and what is still called, says so."""
        self._ended_by = error
        engine = self._engine
        if engine is not None:
            engine.cancel_all(error)
            self.close(cancel=True)
        elif self._machines is not None:  # it still starts
            self._machines.stop_starting()

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
        """Make the machines and connect to them; what fails, or is interrupted, leaves nothing behind.

        In a notebook it first closes the open pool of the same name, and the one in whose variable it will be.

        Raises:
            UsageError: it is open already; elsewhere, another open pool of this process has its name.
        """
        with self._ending, self._lock:
            if self._engine is not None:
                raise UsageError(f"{self!r} is open already")
            self._spec = dataclasses.replace(self._spec, stop=threading.Event())
            self._look_at_image()
            make_way(self, self._label, sys._getframe())
            self._ended_by = None
            presence = self._made_presence()
            machines = self._machines = self._made_machines(presence)
            self._lines = None if self._logs is False else Lines(self._logs, presence.kept_output())
            engine = self._made_engine()
            self._owner = os.getpid()
            self._began_at = time.monotonic()
            try:
                self._start_all(engine, machines, presence)
            except BaseException as error:  # Ctrl-C too
                try:
                    self._tear_down(engine)
                finally:
                    self._flush_lines()
                    self._say_closed(_in_words(self._ended_by or error))
                    self._announcer.close()
                if self._ended_by is not None and error is not self._ended_by:
                    raise self._ended_by from error
                if _is_for_want_of_room(error):
                    raise UsageError(
                        f"{self!r} cannot be started: {error}; this machine, its control group or `ulimit` allows no "
                        "more: free some, or raise the limit"
                    ) from error
                raise
            self._engine = engine
            self._on_heard(self._announcer.is_heard)
            if self._console is not None and self._console.wants_usage:
                engine.nodes.ask_usage(_USAGE_S)
            self._announcer.emit(PoolReady(pool=self._name, seconds=time.monotonic() - self._began_at))
            self._oversights = Oversights()
            self._dispatch = Dispatch(engine, self._oversights.failures)
        if self._ended_by is not None:  # in the last moment
            self.close(cancel=True)
            raise self._ended_by
        push_active(self)
        return self

    def give_way(self, why: str) -> None:
        """Close for another pool: open calls, and later ones, raise PoolClosed. For notebooks, see `replacing`."""
        error = PoolClosed(f"{self._label or self._name}: this pool was closed: {why}")
        _log.warning("%s: closing this pool: %s", self._label or self._name, why)
        if self._engine is not None:
            self._engine.cancel_all(error)
        self.close(cancel=True)
        self._ended_by = error

    def _made_machines(self, presence: Presence) -> PoolMachines:
        end_early = weakref.WeakMethod(self._end_early)
        return PoolMachines(
            self.provider,
            self._spec,
            self._name,
            budget_usd=self._budget_usd,
            emit=self._announcer.emit,
            on_changed=presence.tell_nodes,
            on_overspent=lambda error: _call(end_early(), error),
        )

    def _made_engine(self) -> Engine:
        return DirectEngine(
            self._name,
            cancel_grace_s=self._spec.cancel_grace_s,
            lines=self._lines,
            mask=self._spec.image.masker(),
            initializer=packed_initializer(self._initializer),
            emit=self._announcer.emit,
            kept=self._kept,
            default_timeout_s=self._default_timeout_s,
        )

    def _start_all(self, engine: Engine, machines: PoolMachines, presence: Presence) -> None:
        self._presence = presence
        presence.open()
        self._open_console()
        self._announcer.open()
        self._announcer.emit(PoolStarted(pool=self._name, provider=self.provider.name, nodes=self._spec.nodes))
        engine.start(machines.launch(), machines)
        if self._ended_by is not None:
            raise self._ended_by
        devices = {node: engine.nodes.devices(node) for node in range(self._spec.nodes)}
        if sharing := sharing_of_pool(devices, self.concurrency):
            warn_user(sharing)

    def close(self, *, cancel: bool = False) -> None:
        """Wait for open calls (`cancel`: stop them instead), then end the machines. Idempotent."""
        engine = self._engine  # looked at once: another thread may end the pool meanwhile
        if engine is None:
            if self._owner == os.getpid():
                with self._telling, self._ending:  # another thread may be at it: its budget is spent
                    return
            return
        try:
            if self.is_active:
                if cancel:
                    engine.cancel_all(self._ended_by)
                else:
                    engine.streams.close_all()
                    engine.wait_idle()
                    for text in self._oversights.found(engine):
                        self._announcer.emit(Overlooked(text=text))
                engine.wait_stopped()
        finally:
            pop_active(self)
            with self._telling:
                try:
                    shielded(self._end)
                    self._flush_lines()
                finally:
                    interrupts.restore()  # of this thread, which may be the main one
                    self._say_closed("" if self._ended_by is None else _in_words(self._ended_by))
            self._announcer.close()

    def _flush_lines(self) -> None:
        """Show what the calls printed. Machines are gone by now, so a terminal that stalls costs time only."""
        if self._lines is not None and self._owner == os.getpid():
            self._lines.flush()
        if isinstance(self._logs, LogFiles):
            self._logs.close()

    def _end(self) -> None:
        """Once, whoever calls it: another waits until it is done. A Ctrl-C does not come between its steps."""
        with self._ending:
            with self._lock:
                engine, self._engine = self._engine, None
                dispatch, self._dispatch = self._dispatch, None
            try:
                if engine is not None:
                    self._tear_down(engine)
            finally:
                if dispatch is not None:
                    dispatch.close()

    def _say_closed(self, reason: str = "") -> None:
        seconds = time.monotonic() - self._began_at
        self._announcer.emit(ClosedEvent(pool=self._name, seconds=seconds, reason=reason))
        withdraw(self)
        console, self._console = self._console, None
        presence, self._presence = self._presence, None
        if self._owner == os.getpid():
            if console is not None:
                console.close()
            if presence is not None:
                presence.close()

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
        machines = self._machines
        if self._owner != os.getpid() or machines is None:
            return  # a fork of the client: the machines are the parent's
        try:
            machines.stop()
            engine.close()
            machines.ask_to_end(were_told=engine.was_started)
        finally:
            machines.end()

    def __enter__(self) -> Self:
        try:
            try:
                return self.start()
            except SkywardError as error:
                drop_our_frames(error)
                raise
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

    def _warn_unused(self) -> None:
        unused = self._spec.image.unused_fields(self.provider.acts_on_image)
        if unused:
            warn_user(
                f"Image: {', '.join(unused)} has no effect with {self.provider!r}: its nodes use this environment; "
                "install there what the calls need"
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


def _is_for_want_of_room(error: BaseException) -> bool:
    """Descriptors, threads, processes, memory or disk."""
    if isinstance(error, SkywardError):
        return False
    lacks = isinstance(error, OSError) and error.errno in _WANT_OF_ROOM
    return lacks or isinstance(error, MemoryError) or str(error).startswith("can't start new thread")


def _in_words(error: BaseException) -> str:
    if isinstance(error, PoolClosed):
        return str(error)
    name = type(error).__name__
    return f"{name}: {error}" if str(error) else "interrupted" if isinstance(error, KeyboardInterrupt) else name


def _call(method: Callable[[V], None] | None, value: V) -> None:
    if method is not None:
        method(value)
