"""Slots as an agent makes them: with their part of the node's devices, limits, thread counts and direct lines."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any, Literal

from ...values.devices import NO_GRANT, Grant
from ...wire.tasks import ActorOrder, NodeConfig, RankOrder
from .complaints import complain
from .devices import NodeDevices
from .limit_groups import Enforcement, LimitGroup, LimitGroups
from .slots import SlotProcess, make_slot


class SlotMaker:
    """Maker of the slots of one node. Each `make_` method raises OSError if there is no room for a slot.

    Args:
        config: Configuration of the node.
        address: Path of the agent's socket.
        devices: Devices of the node.
        enforcement: Limits that this node can enforce.
    """

    def __init__(self, config: NodeConfig, address: str, devices: NodeDevices, enforcement: Enforcement) -> None:
        self._config = config
        self._address = address
        self._devices = devices
        self._limits = LimitGroups(config.folder, enforcement)
        self._env = dict(config.env)
        self._lines = 0
        self.lanes = config.slots if config.executor == "thread" else 1
        """Calls that a slot takes at once."""
        self.count = config.slots // self.lanes
        """Number of slots for plain calls."""

    def resolve(self, grant: Grant, number: int) -> Grant:
        """Return a grant that names its devices. All lanes of a thread slot have those of the node."""
        return self._devices.of(grant, number, self.count)

    def make_plain(self, number: int, request: Grant) -> SlotProcess:
        """Make a slot for plain calls, with the grant that they ask for."""
        config = self._config
        has_line = number == 0 and config.executor == "process" and request == NO_GRANT
        slot = self._make(
            number,
            self.resolve(request, number),
            lanes=self.lanes,
            executor=config.executor,
            workers_per_node=config.slots,
            volumes=config.placed_volumes,
            line_number=self._next_line() if has_line else 0,
        )
        slot.request = request
        return slot

    def make_rank(self, order: RankOrder, *, deliver: bool) -> SlotProcess:
        """Make a slot for a rank of a gang. `deliver`: whether its value is wanted."""
        rank = order.rank
        return self._make(
            rank.local_rank,
            self._devices.of(order.grant or NO_GRANT, rank.local_rank, rank.local_world_size),
            visible=order.visible,
            shared_as=order.shared_as,
            env=(*_threads_of(order, self._config), *order.env),
            rank=rank,
            deliver=deliver,
            volumes=self._config.placed_volumes,
        )

    def make_actor(self, number: int, order: ActorOrder) -> SlotProcess:
        """Make a slot for an actor."""
        executor: Literal["process", "thread"] = "process" if order.lanes == 1 else "thread"
        return self._make(
            number,
            self._grant_of(order),
            lanes=order.lanes,
            executor=executor,
            workers_per_node=self._config.slots,
            line_number=self._next_line() if executor == "process" else 0,
        )

    def devices_of(self, order: ActorOrder) -> tuple[int, ...]:
        """Return the devices of an actor."""
        return self._grant_of(order).devices or ()

    def _grant_of(self, order: ActorOrder) -> Grant:
        return self._devices.of(order.grant or NO_GRANT, 0, 1)

    def release(self, slot: SlotProcess, code: int) -> None:
        """Leave the group of a slot whose process has ended, and note the memory limit that it may have exceeded."""
        if slot.group is not None:
            slot.exceeded_gib = slot.group.exceeded_gib() if code == -signal.SIGKILL else None
            self._limits.leave(slot.group)

    def _next_line(self) -> int:
        self._lines += 1
        return self._lines

    def _make(
        self,
        number: int,
        grant: Grant,
        *,
        visible: tuple[int, ...] | None = None,
        shared_as: str = "",
        env: tuple[tuple[str, str], ...] = (),
        **options: Any,
    ) -> SlotProcess:
        """Create a slot for a grant that names its devices, with a group that limits it."""
        group = self._group_for(grant, shared_as)
        part = self._devices.part_of(grant, (grant.devices if visible is None else visible) or (), self._env)
        try:
            return make_slot(
                number,
                env=(*_threads_for(grant.cpus, self._config), *env),
                notice_file=self._config.notice_file,
                agent=self._address,
                part=replace(part, group=group),
                **options,
            )
        except OSError:
            if group is not None:
                self._limits.leave(group)
            raise

    def _group_for(self, grant: Grant, shared_as: str) -> LimitGroup | None:
        try:
            return self._limits.join(cpus=grant.cpus, memory_gib=grant.memory_gib, shared_as=shared_as)
        except OSError as error:  # the call runs without it, and can see that in `instance_info().enforced`
            complain(self._config.node, f"agent cannot make a control group: {error}; a call runs without limits")
            return None


def _threads_of(order: RankOrder, config: NodeConfig) -> tuple[tuple[str, str], ...]:
    """Return thread counts for a gang with processors of its own, or with more ranks here than slots."""
    world_size = order.rank.local_world_size
    if order.grant is not None and order.grant.cpus is not None:
        return _threads_for(order.grant.cpus / world_size, config)
    if world_size <= config.slots:
        return ()
    return _threads_for(config.cores / world_size, config)


def _threads_for(cpus: float | None, config: NodeConfig) -> tuple[tuple[str, str], ...]:
    """Return thread counts for a process with this many processors; none if it has those of its slot."""
    return () if cpus is None else tuple((name, str(max(1, int(cpus)))) for name in config.thread_variables)
