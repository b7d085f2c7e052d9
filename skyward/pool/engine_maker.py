"""The engine of a pool: direct, or one whose scheduler is in a head, with what raises its Ray."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..core.records import dataclass
from ..errors import SkywardError
from ..events import Emit, EngineLost, EngineUp, Event
from ..providers.base import Provider, may_have_head
from ..providers.user_data import LEASE_FILE
from ..values.machine import Machine, PoolSpec
from .detaching import Detachment
from .engines import Way, did_not_come_up

if TYPE_CHECKING:  # `import_engine` imports them while the machines start
    from ..engine.engine import Engine
    from ..engine.log_router import LineSink
    from ..engine.ray.raiser import RayRaiser


def import_engine(way: Way) -> None:
    """Import the larger half of the client, which takes as long as an agent needs to start."""
    from ..console import console
    from . import dispatch

    if way is Way.DIRECT:
        from ..engine import direct

        del direct
    else:
        from ..engine import hosted
        from ..engine.head import place

        del hosted, place
    del console, dispatch


@dataclass(frozen=True, kw_only=True)
class EngineMaker:
    """Maker of the engine for one start of a pool.

    Args:
        pool: Unique name of the pool.
        label: Name that the user gave it, or empty.
        provider: Source of the machines.
        spec: Request of the pool.
        kept: Nodes that are reserved for a role.
        default_timeout_s: Time limit of calls without their own; None for no limit.
        initializer: Packed function that each process runs first, or None.
        way: Place of the scheduler, and what its links go by.
        ray_after_s: Seconds from the start until Ray is raised.
        detachment: State of a detached pool; None: the pool ends with this process.
        lines: Destination of the calls' output.
        emit: Takes events.
        failed: Ends the pool with an error, because it needs Ray, which does not come up.
    """

    pool: str
    label: str
    provider: Provider
    spec: PoolSpec
    kept: frozenset[int]
    default_timeout_s: float | None
    initializer: bytes | None
    way: Way
    ray_after_s: float
    detachment: Detachment | None
    lines: LineSink | None
    emit: Emit
    failed: Callable[[SkywardError], object]

    def make(self, machines: list[Machine]) -> Engine:
        """Make the engine. `machines`: those of the start, which may be none."""
        if self.way is not Way.DIRECT or self.detachment is not None:
            return self._hosted(machines)
        from ..engine.direct import DirectEngine

        return DirectEngine(
            self.pool,
            cancel_grace_s=self.spec.cancel_grace_s,
            lines=self.lines,
            mask=self.spec.image.masker(),
            initializer=self.initializer,
            emit=self.emit,
            kept=self.kept,
            default_timeout_s=self.default_timeout_s,
            direct_transfers=self.spec.direct_transfers,
        )

    def _hosted(self, machines: list[Machine]) -> Engine:
        """Make an engine whose scheduler is in a head: beside the first node, or here if there is none to log in to."""
        from ..engine.head.messages import HeadConfig
        from ..engine.head.place import head_here, head_on
        from ..engine.hosted import HostedEngine
        from ..engine.transfers import make_keys

        detachment, are_apart = self.detachment, may_have_head(self.provider)
        config = HeadConfig(
            pool=self.pool,
            cancel_grace_s=self.spec.cancel_grace_s,
            secrets=self.spec.image.secret_values(),
            initializer=self.initializer,
            kept=self.kept,
            default_timeout_s=self.default_timeout_s,
            direct_transfers=self.spec.direct_transfers,
            transfer_keys=make_keys() if self.spec.direct_transfers and are_apart else None,
            detached_for_s=0.0 if detachment is None else detachment.for_s,
            warning_s=0.0 if detachment is None else detachment.warning_s,
            attach_key="" if detachment is None else detachment.key,
            lease_file=LEASE_FILE if self.provider.is_rented and detachment is not None else "",
            blueprint=b"" if detachment is None or detachment.was_known else detachment.blueprint(self.spec),
        )
        if self._needs_ray:
            _require_reach(machines, self.spec.stop, is_detached=detachment is not None)
        config, place = head_on(machines[0], config) if machines else head_here(config)
        raiser = self._raiser() if self.way in (Way.RAY, Way.RAY_OR_LENT) and are_apart else None
        if detachment is not None:
            return detachment.engine(config, machines[0], self.lines, self.emit, raiser)
        return HostedEngine(config, place, lines=self.lines, emit=self.emit, raiser=raiser, are_apart=are_apart)

    @property
    def _needs_ray(self) -> bool:
        """Return whether the pool ends if Ray does not come up."""
        # A pool that another client left goes on without, and so does an elastic one whose first node goes on alone.
        goes_on = self.detachment is not None and (self.detachment.known is not None or self.spec.nodes == 1)
        return self.way is Way.RAY and not goes_on

    def _raiser(self) -> RayRaiser:
        from ..engine.ray.raiser import RayRaiser
        from ..state.ray_losses import forget_loss, note_loss

        name, is_detached = self.label or self.pool, self.detachment is not None

        def failed(reason: str, is_cut: bool) -> None:
            note_loss(name, reason)
            self.failed(did_not_come_up(reason, is_cut=is_cut, is_detached=is_detached))

        def emit(event: Event) -> None:
            match event:
                case EngineLost(reason=reason):
                    note_loss(name, reason)
                case EngineUp():
                    forget_loss()
            self.emit(event)

        return RayRaiser(
            self.spec.image,
            emit=emit,
            failed=failed if self._needs_ray else None,
            on_up=_nothing if self.detachment is None else self.detachment.go_alone,
            after_s=self.ray_after_s,
            is_detached=is_detached,
        )


def _require_reach(machines: list[Machine], stop: threading.Event, *, is_detached: bool) -> None:
    """Raise UsageError if nodes cannot connect to each other, before anything starts on them."""
    from ..engine.ray.reach import why_cut

    if why := why_cut(machines, stop):
        raise did_not_come_up(why, is_cut=True, is_detached=is_detached)


def _nothing() -> None:
    """Do nothing."""
