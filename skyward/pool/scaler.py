"""Size of an open pool: one thread looks at its work, decides by `schedule.scaling`, and gets nodes or gives them back.

Only pools whose size can change have one: elastic pools, and pools with an idle timeout.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Literal

from ..core import interrupts
from ..core.records import dataclass
from ..errors import BudgetExceeded, InternalError, NoCapacity, NodeError, PoolClosed, QuotaExceeded, SkywardError
from ..events import Emit, PoolScaled, ScalingFailed
from ..schedule.scaling import REFUSAL_S, Bounds, Demand, Situation, decide
from ..values.nodes import Nodes
from .machines import PoolMachines

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..values.machine import Machine

_log = logging.getLogger(__name__)

ELASTIC_IDLE_S = 300.0
"""Idle timeout of elastic pools, in seconds, unless their user sets one."""
_LOOK_S = 0.1
"""Seconds between two looks at a pool that was used a moment ago."""
_SLOW_LOOK_S = 1.0
_RECENT_S = 2.0
_JOIN_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Sizing:
    """Size of a pool as its user wants it.

    Args:
        nodes: Bounds.
        idle_timeout_s: Seconds without use after which the pool rests or closes; None: its default.
        on_idle: Behaviour of an idle pool.
        roles: Nodes reserved for each role, which are never given back alone.
    """

    nodes: Nodes
    roles: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    idle_timeout_s: float | None = None
    on_idle: Literal["rest", "close"] = "rest"

    @property
    def kept(self) -> frozenset[int]:
        """Nodes reserved for a role."""
        return frozenset(node for nodes in self.roles.values() for node in nodes)

    @property
    def changes(self) -> bool:
        """Return whether the number of nodes can ever change."""
        return not self.nodes.is_fixed or self.idle_timeout_s is not None

    @property
    def idle_s(self) -> float:
        if self.idle_timeout_s is not None:
            return self.idle_timeout_s
        return math.inf if self.nodes.is_fixed else ELASTIC_IDLE_S

    @property
    def at_rest(self) -> int:
        """Nodes of an idle pool."""
        return 0 if self.nodes.is_fixed else self.nodes.min


class PoolScaler:
    """Keeper of a pool's size. Thread-safe. Call `start` once, and `stop` before the machines are ended.

    Args:
        pool: Unique name of the pool.
        engine: Engine of the pool.
        machines: Machines of the pool.
        sizing: Size that the user wants.
        bounds: Cost and start time of a node; the scaler sets the fields about size.
        given_back: Called with each machine that has ended, because its node was given back.
        is_visited: Tells whether something beside the calls uses the machines now, such as a transfer of files.
        emit: Takes events.
        on_idle: Called once, in the scaler's thread, when an idle pool must close.
        clock: Monotonic time in seconds.
    """

    def __init__(
        self,
        pool: str,
        engine: Engine,
        machines: PoolMachines,
        sizing: Sizing,
        bounds: Bounds,
        *,
        given_back: Callable[[Machine], object],
        is_visited: Callable[[], bool],
        emit: Emit,
        on_idle: Callable[[PoolClosed], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._engine = engine
        self._machines = machines
        self._sizing = sizing
        self._bounds = bounds
        self._given_back = given_back
        self._is_visited = is_visited
        self._emit = emit
        self._on_idle = on_idle
        self._clock = clock
        self._changed = threading.Condition()
        """Notified when a look is wanted now, and when a request of a user was carried out."""
        self._looking = threading.Lock()
        """Held while the thread looks, and changes the size."""
        self._is_stopped = self._is_held = False
        self._thread: threading.Thread | None = None
        self._used_at = clock()
        self._used_nodes = 0
        self._joined_at = clock()
        self._pin: int | None = None
        self._asked = self._answered = 0
        """Number of the last request to wake or scale, and of the last that was carried out."""
        self._error: SkywardError | None = None
        """Why the last request could not be carried out."""
        self._refused_at = -math.inf
        self._pressed_at: float | None = None
        self._quiet_at = clock()
        self._ended = 0
        self._peaks: deque[tuple[float, int]] = deque()
        """Nodes that were needed at once, with times: only those that no later one exceeds."""

    # For calls ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        members = self._engine.members
        members.expect(set(range(self._sizing.nodes.max)).difference(members.there), self._bounds.slots)
        self._thread = threading.Thread(target=self._run, name="skyward-scaler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Get no more nodes. A launch in progress ends with the machines; `join` waits for it. Idempotent."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def join(self) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    @contextlib.contextmanager
    def held(self, limit_s: float, *, let_go: Callable[[], object]) -> Iterator[None]:
        """Keep the size as it is within the block. Calls that wait for a node wait on.

        Args:
            limit_s: Longest wait for the end of a look.
            let_go: Ends the launch that a look waits for, if any.

        Raises:
            TimeoutError: The look did not end, because the head does not answer.
        """
        self._is_held = True  # first, so that a launch that ends is no refusal
        try:
            deadline = time.monotonic() + limit_s
            let_go()
            while not self._looking.acquire(timeout=_LOOK_S):
                if time.monotonic() > deadline:
                    raise TimeoutError
                let_go()
            try:
                yield
            finally:
                self._looking.release()
        finally:
            self._is_held = False

    def touch(self, nodes: int = 0) -> None:
        """Record that a call is about to be sent, to this number of nodes at once."""
        is_recent = self._clock() - self._used_at < _RECENT_S / 2
        self._used_at = self._clock()
        self._used_nodes = max(self._used_nodes, nodes)
        if not is_recent:
            with self._changed:
                self._changed.notify_all()

    def wake(self) -> None:
        """Wait until a node is there. Raises the provider's error, or PoolClosed."""
        self.touch()
        if not self._engine.members.there:
            self._request(self._pin)

    def scale(self, nodes: int | None) -> None:
        """Set the number of nodes; None: let the pool decide again. Waits for nodes that come, not for those that go.

        Raises:
            ProviderError: There are no more nodes.
            PoolClosed: The pool was closed meanwhile.
        """
        self.touch()
        self._request(nodes)

    def _request(self, nodes: int | None) -> None:
        with self._changed:
            self._pin = nodes
            self._asked += 1
            mine = self._asked
            self._changed.notify_all()
        with self._changed:
            interrupts.wait_for(
                lambda slice_s: self._changed.wait_for(lambda: self._answered >= mine or self._is_stopped, slice_s)
            )
            if self._answered < mine or (self._error is not None and self._is_stopped):
                raise PoolClosed("pool: closed while nodes were added; open a new one")
            if self._error is not None:
                raise self._error

    # The thread -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_stopped:
            with self._changed:
                asked = self._asked
            error: SkywardError | None = None
            try:
                with self._looking:
                    if self._is_stopped:
                        return
                    error = self._look(is_asked=asked > self._answered)
            except (NodeError, PoolClosed) as lost:  # the head is lost, and another one may follow
                error = lost
            except Exception as failure:
                self._used_at = self._clock() - _RECENT_S  # look less often
                error = self._unforeseen(failure)
            with self._changed:
                if asked > self._answered:
                    self._answered, self._error = asked, error
                    self._used_at = self._clock()  # new nodes may have come later than an idle timeout allows
                    self._changed.notify_all()
                if self._asked == self._answered and not self._is_stopped:
                    self._changed.wait(self._pause_s())

    def _unforeseen(self, failure: Exception) -> InternalError:
        """Return the error that tells of an exception which nobody foresaw, and log it."""
        if not self._is_stopped:  # otherwise the engine was closed under it
            text = "pool %s: error while its size was checked; please report this bug"
            _log.error(text, self._pool, exc_info=failure)
        why = f"{type(failure).__name__}: {failure}"
        return InternalError(f"pool {self._pool}: its size cannot be changed ({why}); report this bug")

    def _pause_s(self) -> float:
        if self._clock() - self._used_at < _RECENT_S:
            return _LOOK_S
        return min(_SLOW_LOOK_S, max(_LOOK_S, self._sizing.idle_s / 4))

    def _look(self, *, is_asked: bool) -> SkywardError | None:
        """Check the size once, and change it if needed. Returns why a change failed."""
        members = self._engine.members
        demand, there = members.demand(), members.there
        now = self._observe(demand, len(there))
        if now.idle_s >= self._sizing.idle_s and not is_asked:
            self._pin = None
            if self._sizing.on_idle == "close":
                self._close()
                return None
        if self._pin == 0 and not there and not is_asked:
            self._pin = None  # otherwise the next call would wait for ever
        self._forget_lost(demand)
        size = decide(now, self._limits())
        wanted = size.nodes
        if is_asked:
            wanted = self._pin if self._pin is not None else len(there) or max(1, self._sizing.nodes.start)
        elif self._pin is not None and now.refused_s >= REFUSAL_S:  # a node may have been lost for good
            wanted = max(wanted, self._pin)
        is_part = bool(there) and now.idle_s < self._sizing.idle_s and now.refused_s >= REFUSAL_S
        if self._sizing.nodes.is_fixed and is_part:  # a call came while the pool went to rest
            wanted = self._sizing.nodes.max
        if size.is_bound:
            self._fail(len(there), len(there) + 1, "the budget or max_hourly_cost allows no more nodes")
        nodes = len(there) + members.stay(wanted - len(there))
        resting = sorted(demand.known - demand.loads.keys())
        new = self._chosen(demand, resting, wanted - nodes)
        if new:
            is_pinned = is_asked or wanted == self._pin
            why = "asked for" if is_pinned else size.why or "a call names a node that was given back"
            return self._grow(new, nodes, why, is_asked=is_asked)
        if self._is_visited():
            return None
        # The program may not know yet of a node that the head has lost.
        present = min(nodes, len(demand.loads.keys() - members.leaving))
        self._shrink(demand, present - wanted, nodes, "asked for" if is_asked else size.why)
        return None

    def _chosen(self, demand: Demand, resting: Sequence[int], count: int) -> list[int]:
        """Choose the nodes that come: those that calls name, and the first others. A fixed pool comes as a whole."""
        if self._sizing.nodes.is_fixed and (demand.named or count > 0):
            return list(resting)
        others = [node for node in resting if node not in demand.named]
        return sorted([*demand.named, *others[: max(0, count - len(demand.named))]])

    def _forget_lost(self, demand: Demand) -> None:
        """Let nodes of an elastic pool that were lost for good come again when they are wanted."""
        lost = set(range(self._sizing.nodes.max)) - demand.known
        if lost and not self._sizing.nodes.is_fixed:
            self._engine.members.expect(lost, self._bounds.slots)

    def _close(self) -> None:
        seconds = self._sizing.idle_s
        self._is_stopped = True
        self._on_idle(
            PoolClosed(
                f"pool {self._pool}: closed, because it was idle for idle_timeout_s={seconds:g}; open a new one, or "
                'set on_idle="rest"'
            )
        )

    # Observation ----------------------------------------------------------------------------------------------------

    def _observe(self, demand: Demand, nodes: int) -> Situation:
        now = self._clock()
        if self._is_visited() or not self._engine.members.is_idle:
            self._used_at = now
        waiting = demand.waiting
        ended = self._engine.counts().ended
        if ended != self._ended or not waiting:
            self._ended, self._quiet_at = ended, now
        self._pressed_at = (self._pressed_at or now) if waiting else None
        used, self._used_nodes = self._used_nodes, 0
        self._note_peak(now, max(demand.needed(self._bounds.slots), used))
        left_usd = self._machines.left_usd
        return Situation(
            nodes=nodes,
            waiting=waiting,
            mean_s=demand.mean_s,
            peak=self._peaks[0][1],
            quiet_s=now - self._quiet_at,
            pressed_s=0.0 if self._pressed_at is None else now - self._pressed_at,
            idle_s=now - self._used_at,
            youngest_s=now - self._joined_at,
            refused_s=now - self._refused_at,
            left_usd=math.inf if left_usd is None else left_usd,
        )

    def _note_peak(self, now: float, needed: int) -> None:
        while self._peaks and self._peaks[-1][1] <= needed:
            self._peaks.pop()
        self._peaks.append((now, needed))
        while self._peaks[0][0] < now - self._sizing.idle_s:
            self._peaks.popleft()

    def _limits(self) -> Bounds:
        nodes, pin = self._sizing.nodes, self._pin
        return dataclasses.replace(
            self._bounds,
            least=nodes.min if pin is None else pin,
            most=nodes.max if pin is None else pin,
            at_rest=self._sizing.at_rest,
            start=nodes.start,
            idle_s=self._sizing.idle_s,
            node_usd_per_hour=self._machines.price_usd_per_hour,
        )

    # Changes --------------------------------------------------------------------------------------------------------

    def _grow(self, new: list[int], before: int, why: str, *, is_asked: bool) -> SkywardError | None:
        """Get nodes: all of them, or as many as there are. Returns the error if there is none."""
        wanted, began = before + len(new), self._clock()
        self._emit(PoolScaled(pool=self._pool, before=before, nodes=wanted, reason=why))
        error: SkywardError | None = None
        while new:
            try:
                self._add(new, is_patient=not before)
            except Exception as failure:  # whatever it is, it counts as refused: else machines are rented without end
                error = failure if isinstance(failure, SkywardError) else self._unforeseen(failure)
                is_scarce = isinstance(failure, NoCapacity | QuotaExceeded | BudgetExceeded)
                new = new[: len(new) // 2] if is_scarce and before else []
            else:
                self._used_at = self._joined_at = self._clock()  # a launch may take longer than an idle timeout
                self._bounds = dataclasses.replace(self._bounds, start_s=self._joined_at - began)
                break
        if error is not None and not (self._is_stopped or self._is_held):
            if is_asked:  # otherwise a node was lost that its user had, and it is tried again
                self._pin = None
            self._fail(before + len(new), wanted, str(error).partition("\n")[0].rstrip(":"))
            if not before:
                self._engine.fail_waiting(error)
            else:
                self._engine.members.refuse_resting(self._bounds.slots)
        return error

    def _add(self, nodes: list[int], *, is_patient: bool) -> None:
        machines = self._machines.add(nodes, is_patient=is_patient)
        try:
            self._engine.members.join(machines)
        except BaseException:
            self._machines.give_back(nodes, ended=self._given_back)
            raise

    def _fail(self, nodes: int, wanted: int, reason: str) -> None:
        self._refused_at = self._clock()
        self._emit(ScalingFailed(pool=self._pool, nodes=nodes, wanted=wanted, reason=reason))

    def _shrink(self, demand: Demand, surplus: int, before: int, why: str) -> None:
        """Give back idle nodes, those with the highest numbers first, and those that were leaving.

        Values that stay are moved away from nodes that would be surplus without them.
        """
        members, gone = self._engine.members, list[int]()
        leaving = members.leaving
        is_whole = self._sizing.at_rest == 0 and surplus == before
        busy, last = [], members.last
        for node in sorted(demand.loads, key=lambda node: (node in last, -node)):
            is_needed = node in last and len(gone) + 1 < len(demand.loads)
            may_go = not is_needed and (is_whole or node not in self._sizing.kept)
            is_surplus = surplus > 0 and may_go
            if node not in leaving and not is_surplus:
                continue
            if not demand.loads[node] and members.give_back(node):
                # At once: the head may be lost before the next one.
                self._machines.give_back([node], ended=self._given_back)
                gone.append(node)
                surplus -= node not in leaving
            else:
                busy.append(node)
        self._empty(demand, busy, leaving, max(0, surplus))
        if gone:
            nodes = len(members.there)
            self._emit(
                PoolScaled(pool=self._pool, before=len(demand.loads), nodes=nodes, reason=why, removed=tuple(gone))
            )

    def _empty(self, demand: Demand, busy: Sequence[int], leaving: frozenset[int], surplus: int) -> None:
        """Prepare nodes to go that are in use: move the values of idle ones, and send no more calls to others."""
        members = self._engine.members
        staying = [node for node in busy if node not in leaving]
        for node in {*leaving.intersection(busy), *staying[:surplus]}:
            if not demand.loads[node]:
                members.move_values(node)
        if self._pin is not None:
            for node in sorted(staying, key=lambda node: (demand.loads[node], -node))[:surplus]:
                members.leave(node)
