"""Resources of nodes: what a call needs of a node, what a node supplies, and what is left of it.

Processors and devices are counted in thousandths, and memory in MiB, so that shares add up exactly.

A call without a number of devices uses those of its slot, which the scheduler does not know: the agent chooses it. So
the devices of a node are either used by slots, or booked one by one. A node changes from one to the other when nothing
uses its devices the first way, and back when no booking is left. While devices are booked, a call without a number
books the share of a slot, too.

Actors book for life, so calls do not wait for their devices: the share of a slot is one of the devices that no actor
has. If actors have all of them, it is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple, Protocol

from ..core.records import dataclass

UNIT = 1000
"""Thousandths of a processor or of a device."""
_MOST_FITS = 1_000_000
_MOST_LACK = 64
"""Most steps by which nodes without room are told apart."""


class Kind(Protocol):
    """Kind of devices that a call asks for. Hashable; `str` is its name."""

    def is_met_by(self, kind: str, count: int) -> bool: ...


class Need(NamedTuple):
    """Resources that a call takes of each of its nodes, or an actor of its one."""

    slots: int = 1
    """Slots; 0 for an actor, which has a process of its own."""
    cpus: int = 0
    """Thousandths of a processor."""
    memory_mib: int = 0
    devices: int | None = None
    """Thousandths of a device: below 1,000 a share of one, else whole devices. None for the share of its slots."""
    accelerator: Kind | None = None
    """Kind of the devices; None for any."""
    is_gang: bool = False
    """Whether new processes use the resources, which cannot use the devices of slots."""

    @property
    def has_numbers(self) -> bool:
        """Return whether it needs more than slots and their share."""
        return self[1:5] != PLAIN[1:5]

    @property
    def each(self) -> str:
        """Describe the resources in words, such as "2 GPUs and 4 CPUs"."""
        parts = []
        if self.devices:
            parts.append(gpus(self.devices, self.accelerator))
        if self.cpus:
            parts.append(f"{number(self.cpus)} CPU{'s' if self.cpus != UNIT else ''}")
        if self.memory_mib:
            parts.append(f"{gib(self.memory_mib)} GiB of memory")
        return " and ".join(parts) or ("a slot" if self.slots == 1 else f"{self.slots} slots")


PLAIN = Need()


def number(thousandths: int) -> str:
    return f"{thousandths / UNIT:g}"


def gib(mib: float) -> str:
    """Describe MiB in GiB with three digits, never as a power of ten."""
    return f"{float(f'{mib / 1024:.3g}'):g}"


def gpus(thousandths: int, accelerator: Kind | None = None) -> str:
    """Describe devices, such as "2 GPUs" or "0.25 of a GPU"."""
    kind = f"{accelerator} GPU" if accelerator else "GPU"
    if 0 < thousandths < UNIT:
        return f"{number(thousandths)} of a {kind}"
    return f"{thousandths // UNIT} {kind}{'s' if thousandths != UNIT else ''}"


@dataclass(frozen=True, kw_only=True)
class Supply:
    """Resources of a node. `devices` has the name of each."""

    cpus: float
    memory_gib: float
    devices: tuple[str, ...] = ()

    def __str__(self) -> str:
        kinds = dict.fromkeys(self.devices)
        devices = [f"{self.devices.count(kind)} {kind}" for kind in kinds] or ["no GPU"]
        return f"{', '.join(devices)}, {self.cpus:g} CPU{'s' if self.cpus != 1 else ''}, {self.memory_gib:.1f} GiB"


class Booking(NamedTuple):
    """Resources that a call has on one node. `devices` is None for those of its slot."""

    cpus: int
    memory_mib: int
    devices: tuple[int, ...] | None
    amount: int
    """Thousandths of each device."""
    is_for_life: bool = False
    """Whether an actor has them."""


_booking = lru_cache(maxsize=4096)(Booking)
"""Equal bookings are one object. That takes less time, and it is still in the processor's cache when a call ends."""


class Stock:
    """Resources of one node, and those that are left."""

    __slots__ = ("bookings", "cpus", "devices", "is_booked", "lasting", "memory_mib", "slots", "supply", "users")

    def __init__(self, supply: Supply, slots: int) -> None:
        self.supply = supply
        self.slots = slots
        self.cpus = self.cpus_of_node
        self.memory_mib = self.mib_of_node
        self.devices = [UNIT] * len(supply.devices)
        self.bookings = 0
        """Bookings of devices."""
        self.users = 0
        """Calls that use the devices of their slots."""
        self.lasting: list[Booking] = []
        """Bookings of actors."""
        self.is_booked = False
        """Whether calls without a number of devices book theirs one by one."""

    @property
    def _shared_count(self) -> int:
        """Number of devices that slots share: those of which no actor has a part."""
        if not self.lasting:
            return len(self.devices)
        return len(self.devices) - len({index for booking in self.lasting for index in booking.devices or ()})

    @property
    def cpus_of_node(self) -> int:
        return int(self.supply.cpus * UNIT)

    @property
    def mib_of_node(self) -> int:
        return int(self.supply.memory_gib * 1024)

    @property
    def booked_slots(self) -> int:
        """Booked part of the scarcest resource, as slots of the node, rounded up."""
        amounts = (
            (self.cpus, self.cpus_of_node),
            (self.memory_mib, self.mib_of_node),
            (sum(self.devices), len(self.devices) * UNIT),
        )
        return max(-((free - whole) * self.slots // whole) if whole else 0 for free, whole in amounts)

    def amount(self, need: Need) -> int:
        """Return the thousandths of devices that a need takes."""
        count, amount = self._demand(need)
        return count * amount

    def can_hold(self, need: Need) -> bool:
        """Return whether the node has room for the need while nothing else runs there."""
        return Stock(self.supply, self.slots).fits(need) > 0

    def can_clear(self, need: Need) -> bool:
        """Return whether the node has room for the need beside its actors while no call runs there."""
        if not self.lasting:
            return True
        rest = Stock(self.supply, self.slots)
        for booking in self.lasting:
            rest._change(booking, -1)
        return rest.fits(need) > 0

    def fits(self, need: Need) -> int:
        """Return how often the need fits beside the bookings; below 0: about how many units are lacking."""
        # This runs for each change of a node and each need, so it avoids calls.
        _, cpus, memory_mib, devices, accelerator, _ = need
        fits, lack = _MOST_FITS, 0
        if cpus:
            fits = self.cpus // cpus
            if not fits:
                lack = (cpus - self.cpus) // UNIT
        if memory_mib:
            part = self.memory_mib // memory_mib
            if not part:
                lack += (memory_mib - self.memory_mib) // 1024
            fits = min(fits, part)
        if devices or accelerator or (devices is None and self._must_book(need)):
            count, amount = (devices // UNIT, UNIT) if devices and devices >= UNIT else self._demand(need)
            free = self.devices if not accelerator else self._free(accelerator)
            if self.users and amount:
                part, lack = 0, lack + self.users
            elif amount == UNIT:
                whole = free.count(UNIT)
                part = whole // count
                if not part:
                    lack += count - whole
            else:
                part = sum([own // amount for own in free]) if amount else _MOST_FITS
            fits = min(fits, part)
        return fits or -min(lack, _MOST_LACK)

    def has_room(self, need: Need) -> bool:
        """Return whether `fits` is above 0, in less time."""
        _, cpus, memory_mib, devices, accelerator, _ = need
        if (cpus and cpus > self.cpus) or (memory_mib and memory_mib > self.memory_mib):
            return False
        if accelerator or devices is None or self.users:
            return self.fits(need) > 0
        if devices >= UNIT:
            return self.devices.count(UNIT) >= devices // UNIT
        return not devices or max(self.devices, default=0) >= devices

    def _must_book(self, need: Need) -> bool:
        """Return whether a need without a number of devices books some. An actor without one sees all of them."""
        return bool(self.devices and need.slots) and (self.bookings > 0 or need.is_gang)

    def _demand(self, need: Need) -> tuple[int, int]:
        """Return the number of devices, and the thousandths of each."""
        if need.devices is not None:
            return (need.devices // UNIT, UNIT) if need.devices >= UNIT else (int(need.devices > 0), need.devices)
        count, slots = self._shared_count, min(need.slots, self.slots)
        if not count:
            return 0, 0
        if slots == self.slots:
            return count, UNIT
        if count * slots >= self.slots:
            return count * slots // self.slots, UNIT
        return 1, UNIT // -(-self.slots // (count * slots))

    def _free(self, accelerator: Any) -> list[int]:
        if not accelerator:
            return self.devices
        pairs = zip(self.devices, self.supply.devices, strict=True)
        return [own if _is_called(kind, accelerator) else 0 for own, kind in pairs]

    def book(self, need: Need, devices: tuple[int, ...] | None = None) -> Booking:
        """Take the need, which fits. `devices`: those that it has already; None: choose them."""
        chosen: tuple[int, ...] | None = None
        amount = 0
        if need.devices == 0:
            chosen = () if self.devices else None
        elif devices:
            chosen, (_, amount) = devices, self._demand(need)
        elif need.devices or self._must_book(need):
            count, amount = self._demand(need)
            free = self._free(need.accelerator) if need.accelerator else self.devices
            chosen = self._choose(free, count, amount) if amount else ()
        booking = _booking(need.cpus, need.memory_mib, chosen, amount, not need.slots)
        self._change(booking, -1)
        return booking

    def release(self, booking: Booking) -> None:
        self._change(booking, 1)

    def _change(self, booking: Booking, sign: int) -> None:
        """Take the resources of a booking (`sign` is -1), or give them back (1)."""
        cpus, memory_mib, devices, amount, is_for_life = booking
        if cpus:
            self.cpus += sign * cpus
        if memory_mib:
            self.memory_mib += sign * memory_mib
        if amount:
            for index in devices or ():
                self.devices[index] += sign * amount
            self.bookings -= sign
        elif devices is None and self.devices and not is_for_life:
            self.users -= sign
        if is_for_life:
            if sign < 0:
                self.lasting.append(booking)
            else:
                self.lasting.remove(booking)
        if is_for_life or self.bookings < 2:  # it may be the first booking, or was the last
            self.is_booked = self.bookings > 0 and self._shared_count > 0

    def _choose(self, free: Sequence[int], count: int, amount: int) -> tuple[int, ...]:
        """Choose the fullest devices that fit, so that shares lie on few of them; whole ones in a row if possible."""
        if amount < UNIT:
            return (free.index(min([own for own in free if own >= amount])),)
        if count == 1:
            return (free.index(UNIT),)
        # Slots own rows of devices that begin at multiples of their length. A process that owns them may be there.
        row = [UNIT] * count
        for first in range(0, len(free) - count + 1, count):
            if free[first : first + count] == row:
                return tuple(range(first, first + count))
        return tuple(index for index, own in enumerate(free) if own == UNIT)[:count]

    def free_devices(self, accelerator: Kind | None) -> int:
        """Return how many whole devices are free."""
        return sum(own == UNIT for own in self._free(accelerator))


@cache
def _is_called(kind: str, accelerator: Any) -> bool:
    return bool(accelerator.is_met_by(kind, 1))
