"""The life of a pool, from its start to its end: its machines, its engine, and what it shows of itself.

`ComputePool` is what users hold; this is what it holds while calls can be sent, and what ends it.
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol, TypeVar

from ..calls.active import PoolLike, pop_active, push_active
from ..console.announcer import Announcer
from ..console.console import Console, open_console
from ..console.logs import LogFiles, LogLines
from ..console.panel import Counts
from ..core import interrupts
from ..core.user_lines import warn_user
from ..engine.devices import sharing_of_pool
from ..engine.direct import DirectEngine
from ..engine.engine import Engine
from ..errors import PoolClosed, SkywardError, UsageError
from ..events import Event, Overlooked, PoolReady, PoolStarted
from ..events import PoolClosed as ClosedEvent
from ..providers.base import Provider
from ..providers.termination import shielded
from ..state.live import LivePool
from ..state.presence import Presence
from ..values.machine import LogSink, PoolSpec
from .dispatch import Dispatch
from .machines import PoolMachines
from .oversights import Oversights
from .packer import packed_initializer
from .replacement import Replaceable, make_way, withdraw

__all__ = ["PoolLife"]

_log = logging.getLogger(__name__)

V = TypeVar("V")

_WANT_OF_ROOM = frozenset(
    (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOSPC, errno.EDQUOT, errno.E2BIG, errno.EFBIG)
)

_USAGE_S = 2.0
"""Seconds between two NodeUsage of a node, where somebody listens."""


class _Pool(Replaceable, PoolLike, Protocol):
    """A pool as others know it: they send calls to it, or take its place."""


class PoolLife:
    """Starts and ends one pool. Thread-safe.

    It keeps no pool alive: a pool that is dropped must not wait for a collection.

    Args:
        spec: what is asked of the provider; the code of the user is added at the start.
        name: unique. `label`: the user's own name for the pool, or empty.
        kept: nodes that are kept for a role.
    """

    def __init__(
        self,
        pool: _Pool,
        provider: Provider,
        spec: PoolSpec,
        *,
        name: str,
        label: str,
        kept: frozenset[int],
        initializer: tuple[Callable[..., object], tuple[Any, ...]] | None,
        default_timeout_s: float | None,
        budget_usd: float | None,
        logs: bool | LogSink,
        console: bool | None,
        on_event: Callable[[Event], object] | None,
    ) -> None:
        self._pool = weakref.ref(pool)
        self.provider = provider
        self.spec = spec
        self.name = name
        self.label = label
        self._kept = kept
        self._initializer = initializer
        self._default_timeout_s = default_timeout_s
        self._budget_usd = budget_usd
        self._logs = logs
        self._lines: LogLines | None = None
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
        on_heard = weakref.WeakMethod(self._on_heard)
        self.announcer = Announcer(on_event, lambda is_heard: _call_if_alive(on_heard(), is_heard))
        weakref.finalize(self, self.announcer.close).atexit = False  # readers of one that was never entered
        self._ended_by: SkywardError | None = None
        self._oversights = Oversights()
        self._began_at = 0.0

    def start(self, pool: _Pool, frame: FrameType) -> None:
        """See `ComputePool.start`; `pool` is the one that this is the life of, `frame` its caller's."""
        with self._ending, self._lock:
            if self._engine is not None:
                raise UsageError(f"{pool!r} is open already")
            self.spec = dataclasses.replace(self.spec, stop=threading.Event())
            self._check_image()
            make_way(pool, self.label, frame)
            self._ended_by = None
            presence = self._make_presence()
            machines = self._machines = self._make_machines(presence)
            self._lines = None if self._logs is False else LogLines(self._logs, presence.kept_output())
            engine = self._make_engine()
            self._owner = os.getpid()
            self._began_at = time.monotonic()
            try:
                self._start_all(engine, machines, presence)
            except BaseException as error:  # Ctrl-C too
                try:
                    self._tear_down(engine)
                finally:
                    self._flush_lines()
                    self._announce_end(_describe(self._ended_by or error))
                    self.announcer.close()
                if self._ended_by is not None and error is not self._ended_by:
                    raise self._ended_by from error
                if _lacks_room(error):
                    raise UsageError(
                        f"{pool!r} cannot be started: {error}; this machine, its control group or `ulimit` allows no "
                        "more: free some, or raise the limit"
                    ) from error
                raise
            self._engine = engine
            self._on_heard(self.announcer.is_heard)
            if self._console is not None and self._console.wants_usage:
                engine.nodes.ask_usage(_USAGE_S)
            self.announcer.emit(PoolReady(pool=self.name, seconds=time.monotonic() - self._began_at))
            self._oversights = Oversights()
            self._dispatch = Dispatch(engine, self._oversights.failures)
        if self._ended_by is not None:  # in the last moment
            self.close(cancel=True)
            raise self._ended_by
        push_active(pool)

    def give_way(self, why: str) -> None:
        """Close for another pool: open calls, and later ones, raise PoolClosed."""
        error = PoolClosed(f"{self.label or self.name}: this pool was closed: {why}")
        _log.warning("%s: closing this pool: %s", self.label or self.name, why)
        if self._engine is not None:
            self._engine.cancel_all(error)
        self.close(cancel=True)
        self._ended_by = error

    def _end_early(self, error: SkywardError) -> None:
        """End because the budget is spent or another process asks for it; open and later calls raise `error`."""
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

    @property
    def cost_usd(self) -> float:
        """What the machines have cost until now, by the prices of their offers; 0 where nothing is rented."""
        return 0.0 if self._machines is None else self._machines.cost_usd

    @property
    def is_active(self) -> bool:
        """Whether calls can be sent now."""
        return self._engine is not None and self._owner == os.getpid()

    def running(self) -> tuple[Engine, Dispatch]:
        """Return what sends calls. Raises PoolClosed, or why the pool ended early."""
        engine, dispatch = self._engine, self._dispatch
        if self._ended_by is not None:
            raise self._ended_by
        if engine is None or dispatch is None or self._owner != os.getpid():
            raise PoolClosed(
                f"{self._pool()!r}: calls go to an open pool; use it inside its `with` block, or call start()"
            )
        return engine, dispatch

    def _make_machines(self, presence: Presence) -> PoolMachines:
        end_early = weakref.WeakMethod(self._end_early)
        return PoolMachines(
            self.provider,
            self.spec,
            self.name,
            budget_usd=self._budget_usd,
            emit=self.announcer.emit,
            on_changed=presence.tell_nodes,
            on_overspent=lambda error: _call_if_alive(end_early(), error),
        )

    def _make_engine(self) -> Engine:
        return DirectEngine(
            self.name,
            cancel_grace_s=self.spec.cancel_grace_s,
            lines=self._lines,
            mask=self.spec.image.masker(),
            initializer=packed_initializer(self._initializer),
            emit=self.announcer.emit,
            kept=self._kept,
            default_timeout_s=self._default_timeout_s,
        )

    def _start_all(self, engine: Engine, machines: PoolMachines, presence: Presence) -> None:
        self._presence = presence
        presence.open()
        self._open_console()
        self.announcer.open()
        self.announcer.emit(PoolStarted(pool=self.name, provider=self.provider.name, nodes=self.spec.nodes))
        engine.start(machines.launch(), machines)
        if self._ended_by is not None:
            raise self._ended_by
        devices = {node: engine.nodes.devices(node) for node in range(self.spec.nodes)}
        if sharing := sharing_of_pool(devices, self.spec.concurrency):
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
                        self.announcer.emit(Overlooked(text=text))
                engine.wait_stopped()
        finally:
            self._withdraw(pop_active)
            with self._telling:
                try:
                    shielded(self._end)
                    self._flush_lines()
                finally:
                    interrupts.restore()  # of this thread, which may be the main one
                    self._announce_end("" if self._ended_by is None else _describe(self._ended_by))
            self.announcer.close()

    def _flush_lines(self) -> None:
        """Show what the calls printed. Machines are gone by now, so a terminal that stalls costs time only."""
        if self._lines is not None and self._owner == os.getpid():
            self._lines.flush()
        if isinstance(self._logs, LogFiles):
            self._logs.close()

    def _end(self) -> None:
        """End once, whoever calls it: others wait until it is done. A Ctrl-C does not come between its steps."""
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

    def _announce_end(self, reason: str = "") -> None:
        seconds = time.monotonic() - self._began_at
        self.announcer.emit(ClosedEvent(pool=self.name, seconds=seconds, reason=reason))
        self._withdraw(withdraw)
        console, self._console = self._console, None
        presence, self._presence = self._presence, None
        if self._owner == os.getpid():
            if console is not None:
                console.close()
            if presence is not None:
                presence.close()

    def _make_presence(self) -> Presence:
        this = weakref.WeakMethod(self._end_early)
        pool = LivePool(
            pool=self.name,
            label=self.label,
            provider=self.provider.name,
            wanted=self.spec.nodes,
            is_rented=self.provider.is_rented,
        )
        return Presence(pool, lambda reason: _call_if_alive(this(), PoolClosed(reason)))

    def _open_console(self) -> None:
        is_quick = self.provider.shares_files and not self.provider.is_rented
        self._console = open_console(
            self._wants_console, name=self.label or self.name, is_quick=is_quick, counts=self._count_calls
        )
        if self._console is not None:
            self.announcer.attach(self._console.emit)

    def _count_calls(self) -> Counts | None:
        engine = self._engine
        if engine is None:
            return None
        now = engine.counts()
        slots = self.spec.nodes * self.spec.concurrency
        return Counts(slots=slots, busy=now.busy, queued=now.queued, ended=now.ended, failed=now.failed)

    def _withdraw(self, forget: Callable[[_Pool], None]) -> None:
        """Take the pool off a list of open ones."""
        pool = self._pool()
        if pool is not None:
            forget(pool)

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

    def _warn_unused(self) -> None:
        unused = self.spec.image.unused_fields(self.provider.acts_on_image)
        if unused:
            warn_user(
                f"Image: {', '.join(unused)} has no effect with {self.provider!r}: its nodes use this environment; "
                "install there what the calls need"
            )

    def _check_image(self) -> None:
        """Before anything is paid: warn of fields without effect and of what will fail, and gather the code."""
        self._warn_unused()
        if self.provider.shares_files or "pip" not in self.provider.acts_on_image:
            return
        from ..bootstrap.code import gather
        from ..bootstrap.preflight import check

        code = gather(self.spec.image)
        check(self.spec.image, code, architecture=self.spec.architecture, resolves=self.provider.is_rented)
        self.spec = dataclasses.replace(self.spec, code=code)


def _lacks_room(error: BaseException) -> bool:
    """Whether descriptors, threads, processes, memory or disk ran out."""
    if isinstance(error, SkywardError):
        return False
    lacks = isinstance(error, OSError) and error.errno in _WANT_OF_ROOM
    return lacks or isinstance(error, MemoryError) or str(error).startswith("can't start new thread")


def _describe(error: BaseException) -> str:
    if isinstance(error, PoolClosed):
        return str(error)
    name = type(error).__name__
    return f"{name}: {error}" if str(error) else "interrupted" if isinstance(error, KeyboardInterrupt) else name


def _call_if_alive(method: Callable[[V], None] | None, value: V) -> None:
    if method is not None:
        method(value)
