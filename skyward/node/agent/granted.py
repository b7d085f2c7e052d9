"""Slots for calls with a grant: a call runs only in a process that was started with the call's own devices.

CUDA reads its variable once in the life of a process. So a slot whose process has other devices than the next call is
*renewed*: its process ends, and another one takes its number. The number of processes stays that of the slots.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from ...values.devices import NO_GRANT, Grant
from .slots import SlotProcess


class GrantedSlots:
    """Grants of the tasks on this node, and the slots that are started for them. Only the agent's thread uses it.

    Args:
        resolve: Returns a grant that names its devices, for the slot of this number.
        renew: Ends an idle slot's process soon, and starts one for the grant `renewed_as`.
    """

    def __init__(self, resolve: Callable[[Grant, int], Grant], renew: Callable[[SlotProcess], None]) -> None:
        self._resolve = resolve
        self._renew = renew
        self._grants: dict[int, Grant] = {}
        """Grants by task."""
        self._special: set[SlotProcess] = set()
        """Slots whose process was started for a grant."""
        self._coming: Counter[Grant] = Counter()
        """Slots that start for a grant, and that no waiting task counts on yet."""
        self._reserved: set[SlotProcess] = set()
        """Slots of older waiting tasks, which wait for the end of a process that may hold memory of their devices.

        Without them, younger tasks would take these slots for themselves, and all would be renewed without end.
        """

    @property
    def is_used(self) -> bool:
        """Return whether slots differ, or tasks do. Pools whose calls ask for nothing pay nothing for this."""
        return bool(self._grants or self._special)

    def add(self, task: int, grant: Grant) -> None:
        """Note the grant of a task that is about to come."""
        self._grants[task] = grant

    def devices_of(self, task: int) -> tuple[int, ...] | None:
        """Return the devices that a task was granted; None: those of its slot."""
        grant = self._grants.get(task)
        return None if grant is None else grant.devices

    def forget(self, task: int) -> None:
        if self._grants:
            self._grants.pop(task, None)

    def started(self, slot: SlotProcess) -> None:
        if slot.request != NO_GRANT:
            self._special.add(slot)

    def ended(self, slot: SlotProcess) -> None:
        self._special.discard(slot)

    def fits(self, task: int, slot: SlotProcess) -> bool:
        """Return whether the task may run in this slot's process."""
        if not self.is_used:
            return True
        grant = self._grants.get(task, NO_GRANT)
        return slot.request == grant or slot.config.grant == self._resolve(grant, slot.number)

    def begin(self, slots: Sequence[SlotProcess]) -> None:
        """Begin another look at all waiting tasks."""
        if self.is_used:
            self._reserved.clear()
            self._coming = Counter(slot.renewed_as for slot in slots if slot.renewed_as is not None)

    def slot_for(self, task: int, slots: Sequence[SlotProcess]) -> SlotProcess | None:
        """Return a slot for a waiting task. If it is None, a slot is being renewed, or all slots are busy.

        Call `begin` first, and then this once for each waiting task in turn.
        """
        free = [slot for slot in slots if slot.room and slot not in self._reserved]
        slot = max((slot for slot in free if self.fits(task, slot)), key=_room, default=None)
        if slot is not None:
            if self._has_cleared(slot, slots):
                return slot
            self._reserved.add(slot)
            return None
        grant = self._grants.get(task, NO_GRANT)
        if self._coming[grant]:
            self._coming[grant] -= 1
            return None
        idle = [slot for slot in free if not slot.running and slot.executor == "process"]
        if idle:
            self._end(min(idle, key=self._worth), grant)
        return None

    def _worth(self, slot: SlotProcess) -> tuple[bool, bool, bool]:
        """Rank a slot by what is lost with its process: what it has loaded, and the direct line."""
        return slot.finished_any, bool(slot.line_number), slot not in self._special

    def _has_cleared(self, slot: SlotProcess, slots: Sequence[SlotProcess]) -> bool:
        """End idle processes that may hold memory of the slot's devices. Return whether all have ended."""
        holders = list(self._holders(slot, slots))
        for holder in holders:
            if holder.renewed_as is None and holder not in self._reserved:
                self._end(holder, NO_GRANT)
        return not holders

    def end_holders(self, devices: tuple[int, ...], slots: Sequence[SlotProcess]) -> None:
        """End idle processes that may hold memory of devices which a process outside the slots gets."""
        for slot in slots:
            is_idle = slot.finished_any and not slot.running and slot.renewed_as is None
            if is_idle and slot not in self._reserved and set(devices).intersection(slot.config.grant.devices or ()):
                self._end(slot, NO_GRANT)

    def _holders(self, slot: SlotProcess, slots: Sequence[SlotProcess]) -> Iterator[SlotProcess]:
        own = slot.config.grant
        for other in slots:
            grant = other.config.grant
            are_shared = own.gpu_share < 1 and grant.gpu_share < 1
            is_used = other.finished_any and not other.running and other is not slot
            if not is_used or are_shared or (slot not in self._special and other not in self._special):
                continue
            if set(own.devices or ()).intersection(grant.devices or ()):
                yield other

    def _end(self, slot: SlotProcess, successor: Grant) -> None:
        slot.renewed_as = successor
        self._renew(slot)


def _room(slot: SlotProcess) -> int:
    return slot.room
