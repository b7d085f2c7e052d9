"""Life of a pool from start to end: its machines, its engine, and its display.

Users hold a `ComputePool`; it holds a `PoolLife`, which starts, serves and ends it.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import math
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Collection
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from ..calls.active import PoolLike, pop_active, push_active
from ..console.activity import ActorWork, Counts
from ..console.announcer import Announcer, observe
from ..console.logs import LogFiles, LogLines
from ..console.words import duration
from ..core import interrupts
from ..core.limits import raise_file_limit
from ..core.user_lines import warn_user
from ..errors import NodeLost, PoolClosed, SkywardError, Unreachable, UsageError
from ..events import Event, Overlooked, PoolReady, PoolStarted
from ..events import PoolClosed as ClosedEvent
from ..providers.base import Provider, least_billed_s
from ..schedule.scaling import Bounds
from ..state.live import LivePool
from ..state.presence import Presence
from ..values.machine import LogSink, Machine, PoolSpec
from .detaching import Detachment, has_ended, reach_all
from .engine_maker import EngineMaker, import_engine
from .engines import Way
from .failed_starts import lacks_room, lease_ended
from .guests import Guests
from .image_checks import checked_spec
from .machines import PoolMachines
from .oversights import Oversights
from .replacement import Replaceable, make_way, withdraw
from .scaler import PoolScaler, Sizing

if TYPE_CHECKING:  # `import_engine` imports them while the machines start
    from ..console.console import Console
    from ..engine.engine import Engine
    from ..engine.hosted import HostedEngine
    from ..engine.task_events import TaskCounts
    from ..state.detached import DetachedPool
    from .dispatch import Dispatch

_log = logging.getLogger(__name__)

V = TypeVar("V")

_START_S = 60.0
"""Seconds that a rented machine is assumed to take until its first call, before one was started."""
_DETACH_S = 300.0
"""Longest wait in seconds of `detach` for Ray."""
_END_S = 120.0
"""Longest wait in seconds of `detach` for the end of machines that were given back."""
_USAGE_S = 2.0
"""Seconds between two NodeUsage events of a node, while somebody listens."""


class _Pool(Replaceable, PoolLike, Protocol):
    """Pool as others see it: they send calls to it, or take its place."""


class PoolLife:
    """Starts and ends one pool. Thread-safe.

    It keeps only a weak reference to its pool, so a dropped pool ends at once instead of at the next garbage
    collection.

    Args:
        pool: The pool.
        provider: Source of its machines.
        spec: Request to the provider. The user's code is added at the start.
        sizing: Number of nodes, when it changes, and the nodes reserved for a role.
        name: Unique name.
        label: Name that the user gave the pool, or empty.
        initializer: Function and arguments that each process runs first, or None.
        default_timeout_s: Time limit of calls without their own; None for no limit.
        budget_usd: Highest cost; None for no limit.
        logs: Destination of the calls' output.
        console: Display; see `ComputePool`.
        on_event: Receiver of the pool's events, or None.
    """

    _last_counts: TaskCounts | None = None

    def __init__(
        self,
        pool: _Pool,
        provider: Provider,
        spec: PoolSpec,
        *,
        sizing: Sizing,
        name: str,
        label: str,
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
        self.sizing = sizing
        self.name = name
        self.label = label
        self._initializer = initializer
        self._default_timeout_s = default_timeout_s
        self._budget_usd = budget_usd
        self.detachment: Detachment | None = None
        """State of a detached pool; None: this pool ends with this process. Set before the start."""
        self.way = Way.DIRECT
        """Place of the scheduler, and what its links go by. A detached pool always has a head. Set before the start."""
        self.ray_after_s = 0.0
        """Seconds from the start until Ray is raised. Set before the start."""
        self._logs = logs
        self._lines: LogLines | None = None
        self._wants_console = console
        self._console: Console | None = None
        self._presence: Presence | None = None
        self._lock = threading.Lock()
        self._ending = threading.Lock()
        """Held while the pool starts and while it ends."""
        self._telling = threading.RLock()
        """Held until the end is announced, so that tracebacks of other threads follow it. Taken before `_ending`."""
        self._engine: Engine | None = None
        self._dispatch: Dispatch | None = None
        self._machines: PoolMachines | None = None
        """Machines of the last start. They outlive its end, because users read the cost afterwards."""
        self._scaler: PoolScaler | None = None
        self._owner = os.getpid()
        on_heard = weakref.WeakMethod(self._on_heard)
        self.announcer = Announcer(on_event, lambda is_heard: _call_if_alive(on_heard(), is_heard))
        weakref.finalize(self, self.announcer.close).atexit = False  # frees readers of a pool that was never entered
        self._ended_by: SkywardError | None = None
        self._oversights = Oversights()
        self._began_at = 0.0
        self._is_starting = False
        self._guests = Guests()

    def start(self, pool: _Pool, frame: FrameType) -> None:
        """Start the pool; see `ComputePool.start`. `pool` is the owner of this life, `frame` its caller's frame."""
        with self._ending, self._lock:
            if self._engine is not None:
                raise UsageError(f"{pool!r}: is open already; close it first, or make another pool")
            self.spec = dataclasses.replace(
                self.spec, stop=threading.Event(), meanwhile=partial(import_engine, self.way)
            )
            if self.detachment is not None:
                self.detachment.begin(self.label)
            if self._known is None:
                self.spec = checked_spec(self.provider, self.spec)
            make_way(pool, self.label, frame)
            self._ended_by = None
            presence = self._make_presence()
            machines = self._machines = self._make_machines(presence)
            self._lines = None if self._logs is False else LogLines(self._logs, presence.kept_output())
            self._owner = os.getpid()
            self._began_at = time.monotonic()
            initializer = self._pack_initializer()  # before anything costs money, because it may fail
            self._is_starting = True
            try:
                engine = self._engine = self._started(pool, machines, presence, initializer)
            finally:
                self._is_starting = False
            self._on_heard(self.announcer.is_heard)
            if self._console is not None and self._console.wants_usage:
                engine.nodes.ask_usage(_USAGE_S)
            self.announcer.emit(PoolReady(pool=self.name, seconds=time.monotonic() - self._began_at))
            self._oversights = Oversights()
            self._dispatch = self._make_dispatch(engine)
        # The budget's thread, or a request to end, may have come between the check in `_connect` and here.
        if self._ended_by is not None:
            self.close(cancel=True)
            raise self._ended_by
        push_active(pool)
        atexit.register(self._tell_unclosed)

    def _tell_unclosed(self) -> None:
        """Warn at the exit of the program that its pool is open. Python shows it on request, as for open files."""
        if self._owner == os.getpid() and self.is_active and self.detachment is None:
            text = (
                f"{self.label or self.name}: was never closed, and ends with the program; use `with`, or call close()"
            )
            warnings.warn(text, ResourceWarning, stacklevel=2)

    def _started(self, pool: _Pool, machines: PoolMachines, presence: Presence, initializer: bytes | None) -> Engine:
        """Launch the machines and connect to them, or leave nothing behind."""
        engine: Engine | None = None
        raise_file_limit()  # first: a launch needs several files for each node, and the keeper inherits the limit
        try:
            launched = self._launch(machines, presence)
            engine = self._make_engine(initializer, launched)
            self._connect(engine, launched, machines)
        except BaseException as error:  # Ctrl-C too
            self._undo_start(engine, error)
            if self._ended_by is not None and error is not self._ended_by:
                raise self._ended_by from error
            if lacks_room(error):
                raise UsageError(
                    f"{pool!r}: cannot be started: {error}. This machine, its control group or `ulimit` has no "
                    "room; free some, or raise the limit"
                ) from error
            raise
        return engine

    def _undo_start(self, engine: Engine | None, error: BaseException) -> None:
        try:
            self._tear_down(engine)
        finally:
            self._flush_lines()
            self._announce_end(_describe(self._ended_by or error))
            self.announcer.close()

    # Detached pools --------------------------------------------------------------------------------------------------

    @property
    def _known(self) -> DetachedPool | None:
        return None if self.detachment is None else self.detachment.known

    @property
    def _leaves(self) -> bool:
        """Return whether the end of this life leaves a detached pool, with its machines, to another client."""
        return self.detachment is not None and self.detachment.leaves

    @property
    def is_attached(self) -> bool:
        """Return whether `attach` has opened the pool already."""
        return self.is_active and self.detachment is not None and self.detachment.was_known

    def detached(self) -> tuple[Detachment, HostedEngine]:
        """Return the state and the engine of a detached pool that is open. Raises UsageError; PoolClosed."""
        if self.detachment is None:
            raise UsageError(
                f"pool={self.label or self.name!r}: is not detached, so it ends with this program; open it with "
                "detached_for_s= and name="
            )
        engine, _ = self.running()
        return self.detachment, cast("HostedEngine", engine)

    def detach(self, *, limit_s: float = _DETACH_S) -> None:
        """Leave a detached pool once it can go on alone; see `ComputePool.detach`."""
        detachment, engine = self.detached()
        machines, scaler = self._machines, self._scaler
        assert machines is not None
        if scaler is None:
            machines.stop_replacing()
        held = contextlib.nullcontext() if scaler is None else scaler.held(limit_s, let_go=machines.stop_replacing)
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(held)
                why = engine.why_needed(limit_s)
            except TimeoutError:
                why = "its head does not answer"
            if not why:
                try:
                    engine.await_arrival(limit_s)
                except TimeoutError:
                    why = f"its head does not have all calls after {duration(limit_s)}"
            if why:
                self.detached()  # raises if it ended meanwhile
                may_be_one = scaler is not None and self.sizing.nodes.min == 1
                fewer = "bring it to one node by scale(1), " if may_be_one else ""
                raise UsageError(
                    f"detach(): the pool cannot go on without this program, because {why}; call it again later, "
                    f"{fewer}or close the pool"
                )
            machines.wait_ended(_END_S)  # otherwise the record would have them, and their cost
            lasts_s = machines.lasts_alone_s
            if lasts_s is not None and lasts_s <= 0:
                raise UsageError(
                    f"budget_usd={self._budget_usd!r}: its rest is spent when the machines have ended, so the pool "
                    "cannot go on without this program; stay, or close the pool",
                    field="budget_usd",
                    value=self._budget_usd,
                )
            detachment.go_alone(needs_record=True)
            detachment.leaves = True
            if scaler is not None:
                scaler.stop()
        self._finish()

    @property
    def has_work(self) -> bool:
        """Return whether calls, actors, kept values or connections are open. Cancelled calls do not count."""
        engine = self._engine
        if engine is None:
            return False
        try:
            if self._guests.are_there or not engine.wait_idle(0) or engine.actors.work():
                return True
            return any(map(engine.members.keeps, engine.members.there))
        except (SkywardError, TimeoutError):  # the head is gone, and its work with it
            return False

    def give_way(self, why: str) -> None:
        """Close in favour of another pool: open and later calls raise PoolClosed."""
        error = PoolClosed(f"{self.label or self.name}: this pool was closed, because {why}; use the new one")
        _log.warning("%s: closing this pool, because %s", self.label or self.name, why)
        if self._engine is not None:
            self._engine.cancel_all(error)
        self.close(cancel=True)
        self._ended_by = error

    def _end_early(self, error: SkywardError) -> None:
        """End because the budget is spent, or another process asked for it. Open and later calls raise `error`."""
        self._ended_by = error
        engine = self._engine
        if engine is not None:
            engine.cancel_all(error)
            self.close(cancel=True)
        elif self._machines is not None:  # still starting: there is no engine to cancel, only a launch
            self._machines.stop_starting()

    def _on_heard(self, is_heard: bool) -> None:
        engine = self._engine
        if engine is not None:
            engine.tell_tasks(is_heard)
            if is_heard:
                engine.nodes.ask_usage(_USAGE_S)

    @property
    def guests(self) -> Guests:
        """Transfers and ports that end with the pool."""
        self.running()
        return self._guests

    def machine(self, node: int) -> Machine:
        """Return the machine that a node runs on now. Raises PoolClosed; NodeLost while it is being replaced."""
        self.running()
        machine = next((machine for machine in self._machines or () if machine.node == node), None)
        if machine is None:
            raise NodeLost(f"node {node}: is lost, and its replacement is not ready; try again later", node=node)
        return machine

    @property
    def cost_usd(self) -> float:
        """Cost of the machines so far, by the prices of their offers; 0 if nothing is rented."""
        return 0.0 if self._machines is None else self._machines.cost_usd

    @property
    def is_active(self) -> bool:
        """Return whether calls can be sent now."""
        return self._engine is not None and self._owner == os.getpid()

    def running(self) -> tuple[Engine, Dispatch]:
        """Return the engine and the dispatch. Raises PoolClosed, or the reason why the pool ended early."""
        engine, dispatch = self._engine, self._dispatch
        if self._ended_by is not None or engine is None or dispatch is None or self._owner != os.getpid():
            raise self._why_closed()
        return engine, dispatch

    def _why_closed(self) -> SkywardError:
        text = f"{self._pool()!r}: is not open; use it inside its `with` block, or call start()"
        return self._ended_by or PoolClosed(text)

    def sending(self) -> tuple[Engine, Dispatch]:
        """Return what `running` returns, for a call that is about to be sent: the pool is in use."""
        open_pool = self.running()  # first: in a forked child, which has no such thread, it raises
        if self._scaler is not None:
            self._scaler.touch()
        return open_pool

    def nodes(self) -> tuple[int, ...]:
        """Return the nodes that are there; for a pool of a fixed size, or a closed one, those of its start."""
        engine = self._engine
        if engine is None or self.sizing.nodes.is_fixed:
            return tuple(range(self.sizing.nodes.start))
        return engine.members.there

    def ordinary(self) -> tuple[int, ...]:
        """Return the nodes without a role that `@` uses; for a pool without any, the first."""
        return tuple(node for node in self.nodes() if node not in self.sizing.kept) or (0,)

    def wake(self, nodes: int = 0) -> None:
        """Wait until a node is there, before a call is sent to this number of nodes at once."""
        if self._scaler is not None:
            self._scaler.touch(nodes)
            self._scaler.wake()

    def scale(self, nodes: int | None) -> None:
        """Set the number of nodes; see `ComputePool.scale`."""
        self.running()
        if self._scaler is not None:
            self._scaler.scale(nodes)
        elif self.detachment is not None and self.detachment.cannot_scale:
            text = f"nodes={nodes}: cannot be launched by this program; {self.detachment.cannot_scale}"
            raise UsageError(text, field="nodes", value=nodes)

    def _start_scaler(self, engine: Engine, machines: PoolMachines) -> None:
        end_early, detachment = weakref.WeakMethod(self._end_early), self.detachment
        if not self.sizing.changes or (detachment is not None and detachment.cannot_scale):
            return
        guests, limit = self._guests, self.spec.max_hourly_cost
        started_s = time.monotonic() - self._began_at
        was_launched = bool(self.sizing.nodes.start) and not (detachment is not None and detachment.was_known)
        self._scaler = PoolScaler(
            self.name,
            engine,
            machines,
            self.sizing,
            Bounds(
                least=self.sizing.nodes.min,
                most=self.sizing.nodes.max,
                at_rest=self.sizing.at_rest,
                start=self.sizing.nodes.start,
                slots=self.spec.concurrency,
                start_s=started_s if was_launched or not self.provider.is_rented else _START_S,
                minimum_billed_s=least_billed_s(self.provider),
                most_usd_per_hour=math.inf if limit is None else limit,
            ),
            given_back=_ignore if detachment is None else detachment.given_back,
            is_visited=lambda: guests.are_there,
            emit=self.announcer.emit,
            on_idle=lambda error: _call_if_alive(end_early(), error),
        )
        self._scaler.start()

    def _make_machines(self, presence: Presence) -> PoolMachines:
        end_early = weakref.WeakMethod(self._end_early)
        return PoolMachines(
            self.provider,
            self.spec,
            self.name,
            budget_usd=self._budget_usd,
            emit=self.announcer.emit,
            on_changed=partial(_tell_changed, presence, self.detachment),
            on_overspent=lambda error: _call_if_alive(end_early(), error),
        )

    def _pack_initializer(self) -> bytes | None:
        if self._initializer is None:
            return None
        from .packer import packed_initializer

        return packed_initializer(self._initializer)

    def _make_engine(self, initializer: bytes | None, launched: list[Machine]) -> Engine:
        end_early = weakref.WeakMethod(self._end_early)
        maker = EngineMaker(
            pool=self.name,
            label=self.label,
            provider=self.provider,
            spec=self.spec,
            kept=self.sizing.kept,
            default_timeout_s=self._default_timeout_s,
            initializer=initializer,
            way=self.way,
            ray_after_s=self.ray_after_s,
            detachment=self.detachment,
            lines=self._lines,
            emit=self.announcer.emit,
            failed=lambda error: _call_if_alive(end_early(), error),
        )
        return maker.make(launched)

    def _make_dispatch(self, engine: Engine) -> Dispatch:
        from .dispatch import Dispatch

        dispatch = Dispatch(engine, self.name, self._oversights.failures)
        if self._console is not None:
            dispatch.board.on_end = self._console.settle
        return dispatch

    def _launch(self, machines: PoolMachines, presence: Presence) -> list[Machine]:
        self._presence = presence
        presence.open()
        self._open_console()
        self.announcer.open()
        observe(self.announcer)
        self.announcer.emit(PoolStarted(pool=self.name, provider=self.provider.name, nodes=self.spec.nodes))
        if self._known is not None:
            reach = partial(reach_all, self._known, self.provider)
            machines.adopt(reach, self._known.spending, self._known.instances)
            return list(machines)
        return machines.launch()

    def _connect(self, engine: Engine, launched: list[Machine], machines: PoolMachines) -> None:
        from ..engine.devices import sharing_of_pool

        try:
            engine.start(launched, machines)
        except PoolClosed as error:
            if self._known is not None and self._ended_by is None:
                raise has_ended(self._known, launched[0]) from error
            raise
        except (Unreachable, NodeLost) as error:
            if (why := lease_ended(launched, error)) is not None:
                raise why from error
            raise
        if self._ended_by is not None:
            raise self._ended_by
        if self.detachment is not None:
            hosted = cast("HostedEngine", engine)
            if self._known is not None:
                self.detachment.take_up(self.provider, machines, hosted)
            else:
                if (lasts_s := machines.lasts_alone_s) is not None:
                    hosted.limit(lasts_s).result()
                self.detachment.go_on(self.label, self.name, self.provider, machines, self.spec, self._options())
        devices = {node: [device.id for device in engine.nodes.devices(node)] for node in range(self.spec.nodes)}
        if sharing := sharing_of_pool(devices, self.spec.concurrency, are_threads=self.spec.executor == "thread"):
            warn_user(sharing)
        self._start_scaler(engine, machines)

    def _options(self) -> dict[str, Any]:
        """Return the options that later clients of a detached pool need."""
        spec = self.spec
        nodes = self.sizing.nodes
        several = {"nodes": spec.nodes, "engine": "ray"} if spec.most_nodes > 1 else {}
        elastic: dict[str, Any] = {}
        if not nodes.is_fixed:
            elastic = {"nodes": (nodes.min, nodes.max), "max_hourly_cost": spec.max_hourly_cost}
        if self.sizing.idle_timeout_s is not None:
            elastic["idle_timeout_s"] = self.sizing.idle_timeout_s
        if self.sizing.roles:
            elastic["roles"] = {role: list(kept) for role, kept in self.sizing.roles.items()}
        return {
            **several,
            **elastic,
            "concurrency": spec.concurrency,
            "executor": spec.executor,
            "cancel_grace_s": spec.cancel_grace_s,
            "direct_transfers": spec.direct_transfers,
            "default_timeout_s": self._default_timeout_s,
            "budget_usd": self._budget_usd,
        }

    def close(self, *, cancel: bool = False) -> None:
        """Wait for open calls (`cancel`: cancel them and a start instead), then end the machines. Idempotent."""
        engine = self._engine  # read once, because another thread may end the pool meanwhile
        if engine is None:
            if self._owner == os.getpid():
                if cancel and self._is_starting:
                    self._end_early(PoolClosed(f"{self.label or self.name}: closed in its start; start it again"))
                with self._telling, self._ending:  # wait: another thread may be ending it
                    return
            return
        try:
            if self.is_active:
                if cancel:
                    engine.cancel_all(self._ended_by)
                else:
                    engine.streams.close_all()
                    if self._dispatch is not None:
                        self._dispatch.graphs.wait_idle()
                    engine.wait_idle()
                    engine.actors.close_all()
                    engine.wait_idle()
                    for text in self._oversights.found(engine):
                        self.announcer.emit(Overlooked(text=text))
                engine.wait_stopped()
        finally:
            self._finish()

    def _finish(self) -> None:
        """End, and tell everybody."""
        self._withdraw(pop_active)
        atexit.unregister(self._tell_unclosed)
        with self._telling:
            try:
                interrupts.shielded(self._end)
                self._flush_lines()
            finally:
                interrupts.restore()  # no effect unless this is the main thread
                self._announce_end("" if self._ended_by is None else _describe(self._ended_by))
        self.announcer.close()

    def _flush_lines(self) -> None:
        """Show the remaining output of the calls. The machines are gone, so a stalled terminal costs only time."""
        if self._lines is not None and self._owner == os.getpid():
            self._lines.flush()
        if isinstance(self._logs, LogFiles):
            self._logs.close()

    def _end(self) -> None:
        """End exactly once; concurrent callers wait until it is done. Ctrl-C cannot interrupt between its steps."""
        with self._ending:
            with self._lock:
                engine, self._engine = self._engine, None
                dispatch, self._dispatch = self._dispatch, None
            try:
                if engine is not None:
                    self._tear_down(engine)
                    self._last_counts = engine.counts()
            finally:
                if dispatch is not None:
                    dispatch.close()

    def _announce_end(self, reason: str = "") -> None:
        seconds = time.monotonic() - self._began_at
        counts, self._last_counts = self._last_counts, None
        calls, failed = (counts.ended, counts.failed) if counts is not None else (0, 0)
        self.announcer.emit(ClosedEvent(pool=self.name, seconds=seconds, reason=reason, calls=calls, failed=failed))
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
            wanted=self.sizing.nodes.max,
            least=self.sizing.nodes.min,
            is_rented=self.provider.is_rented,
        )
        look = weakref.WeakMethod(self._look)
        return Presence(pool, lambda reason: _call_if_alive(this(), PoolClosed(reason)), lambda: _run_if_alive(look()))

    def _look(self) -> None:
        dispatch = self._dispatch
        if dispatch is not None and (text := dispatch.idle_streams.hint()):
            self.announcer.emit(Overlooked(text=text))

    def _open_console(self) -> None:
        from ..console.console import open_console

        is_quick = self.provider.shares_files and not self.provider.is_rented
        self._console = open_console(
            self._wants_console, name=self.label or self.name, is_quick=is_quick, counts=self._count_calls
        )
        if self._console is not None:
            self.announcer.attach(self._console.emit)
            if self._lines is not None:
                self._lines.shows_progress = self._console.shows_progress
                self._lines.before_printing = self._console.settle

    @property
    def actors(self) -> tuple[ActorWork, ...]:
        """Actors of the open pool; none of a closed one."""
        engine = self._engine
        return () if engine is None else engine.actors.work()

    def _count_calls(self) -> Counts | None:
        engine, dispatch = self._engine, self._dispatch
        if engine is None or dispatch is None:
            return None
        now = engine.counts()
        return Counts(
            slots=len(self.nodes()) * self.spec.concurrency,
            busy=now.busy,
            queued=now.queued,
            ended=now.ended,
            failed=now.failed,
            why=now.why,
            running=engine.running(),
            actors=engine.actors.work(),
            progress=dispatch.board.entries(),
        )

    def _withdraw(self, forget: Callable[[_Pool], None]) -> None:
        """Remove the pool from a list of open pools."""
        pool = self._pool()
        if pool is not None:
            forget(pool)

    def _tear_down(self, engine: Engine | None) -> None:
        machines = self._machines
        if self._owner != os.getpid() or machines is None:
            return  # a fork of the client: the machines belong to the parent
        scaler, self._scaler = self._scaler, None
        try:
            if scaler is not None:
                scaler.stop()
            self._guests.end_all(self._why_closed())
            if self._leaves:
                if engine is not None:
                    cast("HostedEngine", engine).leave()
                machines.leave()
                return
            machines.stop()
            if engine is not None:
                engine.close()
            machines.ask_to_end(were_told=engine is not None and engine.was_started)
        finally:
            if not self._leaves:
                machines.end()
                if self.detachment is not None:
                    self.detachment.ended("because its program closed it")
            if scaler is not None:
                scaler.join()


def _tell_changed(presence: Presence, detachment: Detachment | None, machines: Collection[Machine]) -> None:
    presence.tell_nodes(machines)
    if detachment is not None:
        detachment.changed()


def _ignore(_: object) -> None: ...


def _describe(error: BaseException) -> str:
    if isinstance(error, PoolClosed):
        return str(error)
    name = type(error).__name__
    return f"{name}: {error}" if str(error) else "interrupted" if isinstance(error, KeyboardInterrupt) else name


def _run_if_alive(method: Callable[[], None] | None) -> None:
    if method is not None:
        method()


def _call_if_alive(method: Callable[[V], None] | None, value: V) -> None:
    if method is not None:
        method(value)
