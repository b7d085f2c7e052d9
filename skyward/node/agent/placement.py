"""Placement of tasks on slots, and delivery of the functions and blobs that they need."""

from __future__ import annotations

import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable

from ...wire.blobs import DIGEST_SIZE, Blob
from ...wire.frames import ON_SHELF, Frame, FrameKind, pack
from ...wire.tasks import TASK_HEAD, references
from ..slot.link import read_blob_body
from ..slot.mappings import LEAST_BYTES
from ..slot.shelf import MOST
from .blobs import NodeBlobs
from .granted import GrantedSlots
from .loop import EventLoop
from .slots import PendingSlot, SlotProcess

_INPUTS = frozenset((FrameKind.IN_ITEM, FrameKind.IN_END, FrameKind.IN_ERROR))
_SHELF_NS = 1_000_000
"""Work in nanoseconds that a shelf is for. A slot always has its next task, so only tiny tasks wait several at once."""
_TINY_NS = 50_000
"""Least duration of a task in nanoseconds, with what it costs its slot besides."""
_MEAN_WEIGHT = 0.2
_PAUSE_S = 1e-4
"""Pause of the agent while all shelves hold work for several times as long, in seconds."""
_PAUSE_SHELVED = 6
"""Tasks on each shelf that are as much work."""
_OVERDUE_S = 0.25
"""Time on a shelf, while other slots go on, after which another slot may have the task, in seconds."""


class Placement:
    """Waiting tasks, the slots and ranks that take them, and the functions and blobs that they need.

    Only the agent's thread uses it. It calls `on_readable` when a slot has sent something, and `on_recalled` when a
    cancelled task turns out not to have begun.
    """

    def __init__(
        self,
        loop: EventLoop,
        blobs: NodeBlobs,
        *,
        on_readable: Callable[[SlotProcess], None],
        on_recalled: Callable[[int], None],
        granted: GrantedSlots,
    ) -> None:
        self._loop = loop
        self._blobs = blobs
        blobs.on_closed = self._unmap
        self._on_readable = on_readable
        self._on_recalled = on_recalled
        self._granted = granted
        self._functions: dict[bytes, bytes] = {}
        self._function_blobs: dict[bytes, tuple[tuple[bytes, int], ...]] = {}
        self.slots: list[SlotProcess] = []
        self.ranks: dict[int, SlotProcess] = {}
        """Ranks by task."""
        self.actors: dict[int, SlotProcess] = {}
        """Processes of actors, by the number of the actor."""
        self.queue: deque[PendingSlot] = deque()
        self.by_task: dict[int, SlotProcess] = {}
        """Slots by task, for tasks that were sent to a slot."""
        self.shelved: dict[int, SlotProcess] = {}
        """Slots by task, for tasks on a shelf, oldest first."""
        self._mean_ns = float(_SHELF_NS)
        """Running mean of the duration of tasks."""
        loop.pause_s = self._pause_s

    # Functions and blobs --------------------------------------------------------------------------------------------

    def add_function(self, frame: Frame) -> None:
        self._functions[frame.body[:16]] = frame.body
        self._function_blobs[frame.body[:16]] = references(frame.body, 16)

    def add_blob(self, frame: Frame) -> None:
        self._add(frame)
        self.dispatch()
        for slot in self.actors.values():
            self.feed(slot)

    def _add(self, frame: Frame) -> bytes:
        digest, size, _, _ = read_blob_body(frame.body)
        self._blobs.add(Blob(digest, size, frame.fd))
        for line in self._lines():
            for pending in line:
                pending.missing.discard(digest)
        return digest

    def _lines(self) -> list[deque[PendingSlot]]:
        """Return the queue of the slots, and those of the actors."""
        return [self.queue, *(slot.waiting for slot in self.actors.values())]

    def keep_blob(self, slot: SlotProcess, frame: Frame) -> None:
        """Keep a blob of a value that stays on this node. It is the slot's until the value itself has come."""
        slot.kept.setdefault(frame.ident, []).append(self._add(frame))

    def drop_kept(self, slot: SlotProcess, task: int) -> None:
        """Drop the blobs of a value that will not come."""
        for digest in slot.kept.pop(task, ()):
            self.drop(digest)

    def drop(self, digest: bytes) -> None:
        """Drop a blob that was kept once."""
        self._blobs.drop(digest)

    def blob(self, digest: bytes) -> Blob | None:
        """Return a blob of this node."""
        return self._blobs.get(digest)

    @property
    def blob_bytes(self) -> tuple[int, int]:
        """Bytes of all blobs in memory and on the disk."""
        return self._blobs.sizes

    def drop_function(self, frame: Frame) -> None:
        self._functions.pop(frame.body, None)
        self._function_blobs.pop(frame.body, None)
        for slot in (*self.slots, *self.actors.values()):
            if frame.body in slot.functions:
                slot.functions.discard(frame.body)
                self.send_to(slot, frame)

    def drop_blob(self, frame: Frame) -> None:
        self._blobs.drop(frame.body[:DIGEST_SIZE], int.from_bytes(frame.body[DIGEST_SIZE:], "little") or 1)
        for line in self._lines():
            for pending in line:
                pending.missing = self._missing(pending.frame)

    def _unmap(self, digest: bytes) -> None:
        """Let slots unmap a blob whose file was closed here, because a mapping keeps the file."""
        for slot in self.slots:
            if digest in slot.mapped:
                slot.mapped.discard(digest)
                self.send_to(slot, Frame(FrameKind.DROP_BLOB, 0, 0, 0, digest))

    def _missing(self, frame: Frame) -> set[bytes]:
        """Return the digests of blobs that a task needs and that have not arrived."""
        needed = references(frame.body, TASK_HEAD.size) + self._function_blobs[frame.body[:16]]
        return {digest for digest, _ in needed if digest not in self._blobs}

    # Tasks ----------------------------------------------------------------------------------------------------------

    def add(self, frame: Frame) -> None:
        """Place a new task."""
        function = frame.body[:16]
        needed = references(frame.body, TASK_HEAD.size) + self._function_blobs[function]
        if not needed and not self.queue and not self._granted.is_used:  # the common case, without a queue entry
            slot = self._slot_for(frame.ident)
            if slot is not None and function in slot.functions:
                slot.running[frame.ident] = None
                self.by_task[frame.ident] = slot
                self._send_frame(slot, frame)
                return
        pending = PendingSlot(frame, self._missing(frame) if needed else set())
        self.queue.append(pending)
        self._dispatch_soon()

    def _dispatch_soon(self) -> None:
        """Place waiting tasks, at the end of this turn of the loop if no slot idles meanwhile.

        Tiny tasks come, and end, by the dozen. A look at the queue after each took a third of the agent's time.
        """
        for slot in self.slots:
            if not slot.running:
                self.dispatch()
                return
        self._loop.at_end_of_turn(self.dispatch)

    def add_to_actor(self, slot: SlotProcess, frame: Frame) -> None:
        """Queue a call of an actor. Calls begin in the order in which they arrive."""
        slot.waiting.append(PendingSlot(frame, self._missing(frame)))
        self.feed(slot)

    def feed(self, slot: SlotProcess) -> None:
        """Give an actor its next calls. None overtakes one that waits for blobs."""
        while slot.waiting and not slot.waiting[0].missing and slot.room:
            self._begin(slot, slot.waiting.popleft())
        if slot.waiting and slot.may_shelve and 2 * len(slot.shelved) < MOST:
            self._fill_shelf_of_actor(slot)

    def _fill_shelf_of_actor(self, slot: SlotProcess) -> None:
        """Send an actor its next calls, however long they take: no other process could run them.

        Calls with blobs wait here, because those on the shelf hold descriptors open in the process.
        """
        while slot.waiting and slot.may_shelve and len(slot.shelved) < MOST:
            pending = slot.waiting[0]
            if pending.missing or not pending.may_wait_in_slot or references(pending.frame.body, TASK_HEAD.size):
                break
            self._put_on_shelf(slot, slot.waiting.popleft())
        self.flush(slot)

    def go_on(self, slot: SlotProcess) -> None:
        """Give out tasks after one has ended in this slot."""
        if slot.actor:
            self.feed(slot)
        elif self.queue or self.shelved:
            self._dispatch_soon()

    def _send_frame(self, slot: SlotProcess, frame: Frame) -> None:
        """Send a frame that needs no blobs to a slot."""
        try:
            is_empty = slot.channel.send(pack(frame.kind, frame.ident, frame.body))
        except ConnectionError:  # the slot died; its zygote reports it
            return
        self._set_blocked(slot, not is_empty)

    def dispatch(self) -> None:
        """Place waiting tasks so that no slot idles while a task could run, and busy slots have their next task."""
        self._give_out()
        while self.shelved and any(slot.room for slot in self.slots):
            self.take_back(next(iter(self.shelved.values())))
            self._give_out()
        if self.queue:
            self._fill_shelves()

    def _give_out(self) -> None:
        """Give tasks to slots with room, oldest first. A task that waits for blobs does not block the others."""
        waiting: deque[PendingSlot] = deque()
        self._granted.begin(self.slots)
        room = sum(slot.room for slot in self.slots)
        while self.queue and (room or self.ranks):
            pending = self.queue.popleft()
            slot = None if pending.missing else self._slot_for(pending.frame.ident)
            if slot is None:
                waiting.append(pending)
                continue
            if slot.rank is None:
                room -= 1
            self._begin(slot, pending)
        if waiting:
            waiting.extend(self.queue)
            self.queue = waiting

    def _slot_for(self, task: int) -> SlotProcess | None:
        if task in self.ranks:
            return self.ranks[task]
        if self._granted.is_used:
            return self._granted.slot_for(task, self.slots)
        best: SlotProcess | None = None
        most = 0
        for slot in self.slots:
            room = slot.room
            if room > most:
                best, most = slot, room
        return best

    def _begin(self, slot: SlotProcess, pending: PendingSlot) -> None:
        slot.running[pending.frame.ident] = None
        self._give(slot, pending)
        self.flush(slot)

    def _give(self, slot: SlotProcess, pending: PendingSlot, *, flags: int = 0) -> None:
        frame = pending.frame
        function = frame.body[:16]
        needed = references(frame.body, TASK_HEAD.size)
        self.by_task[frame.ident] = slot
        if function not in slot.functions:
            slot.functions.add(function)
            for digest, _ in self._function_blobs[function]:
                self._send_blob(slot, digest)
            slot.channel.queue(FrameKind.FUNCTION, body=self._functions[function])
        for digest, size in needed:
            self._send_blob(slot, digest)
            if size >= LEAST_BYTES:
                slot.mapped.add(digest)
        slot.channel.queue(frame.kind, frame.ident, frame.body, flags=flags, lane=pending.shelf_number if flags else 0)
        for following in pending.following:
            self._queue_stream_frame(slot, following)

    def _send_blob(self, slot: SlotProcess, digest: bytes) -> None:
        blob = self._blobs.get(digest)
        assert blob is not None  # a task is placed only once its blobs have arrived
        if slot.shelf is not None:
            slot.shelf.offer()  # without a free descriptor, the channel sends the frames that it has
        body = digest + blob.size.to_bytes(8, "little") + bytes(8)
        try:
            slot.channel.queue(FrameKind.BLOB, body=body, fd=blob.fd)
        except OSError:  # out of descriptors: the call that needs the blob fails, with a message about it
            slot.channel.queue(FrameKind.BLOB, body=body)

    def send_to(self, slot: SlotProcess, frame: Frame) -> None:
        slot.channel.queue(frame.kind, frame.ident, frame.body, lane=frame.lane)
        self.flush(slot)

    def flush(self, slot: SlotProcess) -> None:
        if slot.shelf is not None:
            slot.shelf.offer()
        with contextlib.suppress(ConnectionError):  # the slot died; its zygote reports it
            self._set_blocked(slot, not slot.channel.flush())

    def _set_blocked(self, slot: SlotProcess, is_blocked: bool) -> None:
        if is_blocked != slot.is_blocked:
            slot.is_blocked = is_blocked
            write = (lambda: self.flush(slot)) if is_blocked else None
            self._loop.watch(slot.channel, lambda: self._on_readable(slot), write)

    def pass_on(self, frame: Frame) -> None:
        slot = self.by_task.get(frame.ident)
        if slot is not None:
            self._queue_stream_frame(slot, frame)
            self.flush(slot)
            return
        pending = self.pending(frame.ident)
        if pending is not None:
            pending.following.append(frame)

    def _queue_stream_frame(self, slot: SlotProcess, frame: Frame) -> None:
        if frame.kind in _INPUTS:
            slot.count_input(frame)
        if frame.kind == FrameKind.IN_ITEM:
            for digest, _ in references(frame.body):
                if digest in self._blobs:  # a missing one fails the item in its task: blobs come ahead of their item
                    self._send_blob(slot, digest)
        slot.channel.queue(frame.kind, frame.ident, frame.body, lane=frame.lane)

    def pending(self, task: int) -> PendingSlot | None:
        return next((p for line in self._lines() for p in line if p.frame.ident == task), None)

    def forget_unbegun(self, task: int) -> bool:
        """Remove a task that has not begun. Returns False if it may have begun, or was never here."""
        was_shelved = task in self.shelved
        if was_shelved:
            self.take_back(self.shelved[task])
        elif (slot := self.by_task.get(task)) is not None and slot.actor and task not in slot.running:
            self.take_back(slot)
        pending = self.pending(task)
        if pending is None:
            return False
        next(line for line in self._lines() if pending in line).remove(pending)
        self._granted.forget(task)
        if was_shelved and self.queue:
            self.dispatch()
        return True

    # Shelves --------------------------------------------------------------------------------------------------------

    def _fill_shelves(self) -> None:
        """Send busy slots their next task, in the order of the queue.

        A task that waits for blobs does not block the others. But nothing overtakes a task that must wait for a free
        slot: with every shelf full, no slot would ever be free.
        """
        if not self.slots:  # all have died
            return
        most = min(int(_SHELF_NS / max(self._mean_ns, _TINY_NS)), MOST, -(-len(self.queue) // len(self.slots)))
        for slot in self.slots:
            # A shelf is filled up once it is half empty: one write for many tasks.
            if not slot.may_shelve or 2 * len(slot.shelved) >= max(1, most):
                continue
            self._take_back_overdue()
            while slot.may_shelve and len(slot.shelved) < max(1, most):
                pending = self._take_first(slot)
                if pending is None:
                    self.flush(slot)
                    return
                self._put_on_shelf(slot, pending)
            self.flush(slot)

    def clear(self) -> None:
        """Forget all tasks that have not begun, and drop all blobs."""
        self._forget_waiting()
        self._blobs.clear()

    def hand_over(self, coming: Counter[bytes]) -> list[tuple[bytes, int, int]]:
        """Forget all tasks that have not begun, and leave the blobs to the next client; see `NodeBlobs.hand_over`.

        `coming`: how often a value that this client will get has brought a blob.
        """
        self._forget_waiting()
        slots = (*self.slots, *self.ranks.values(), *self.actors.values())
        kept = Counter(digest for slot in slots for digests in slot.kept.values() for digest in digests)
        return self._blobs.hand_over(coming + kept)

    def _forget_waiting(self) -> None:
        for slot in (*self.slots, *self.actors.values()):
            if slot.shelved:
                self.take_back(slot)
        for line in self._lines():
            for pending in line:
                self._granted.forget(pending.frame.ident)
            line.clear()

    def took(self, elapsed_ns: int) -> None:
        """Record how long a task took."""
        self._mean_ns += _MEAN_WEIGHT * (elapsed_ns - self._mean_ns)

    def _pause_s(self) -> float:
        """Return how long the agent may sleep while no slot can run out of tasks.

        Tiny tasks come in great numbers. Each would wake the agent, which would handle one at a time, and take the
        processor from the slots.
        """
        if len(self.shelved) < _PAUSE_SHELVED * len(self.slots):  # also wherever tasks are not tiny
            return 0.0
        return _PAUSE_S if all(len(slot.shelved) >= _PAUSE_SHELVED for slot in self.slots) else 0.0

    def _take_first(self, slot: SlotProcess) -> PendingSlot | None:
        for pending in self.queue:
            if not pending.missing:
                if not (pending.may_wait_in_slot and self._granted.fits(pending.frame.ident, slot)):
                    return None
                self.queue.remove(pending)
                return pending
        return None

    def _put_on_shelf(self, slot: SlotProcess, pending: PendingSlot) -> None:
        assert slot.shelf is not None
        pending.shelf_number, pending.shelved_at = slot.shelf.put(), time.monotonic()
        slot.shelved.append(pending)
        if not slot.actor:  # nobody else may have the calls of an actor
            self.shelved[pending.frame.ident] = slot
        self._give(slot, pending, flags=ON_SHELF)

    def _take_back_overdue(self) -> None:
        """Take back tasks that wait behind a long one while other slots go on."""
        while self.shelved:
            slot = next(iter(self.shelved.values()))
            if time.monotonic() - slot.shelved[0].shelved_at < _OVERDUE_S:
                return
            self.take_back(slot)

    def take_back(self, slot: SlotProcess) -> None:
        """Move the tasks of a shelf to the front of the queue, except those that the slot has begun."""
        assert slot.shelf is not None
        numbers = slot.shelf.take_back()
        for pending in slot.shelved:
            self.shelved.pop(pending.frame.ident, None)
        # The slot read the number of the first ones before, so it has these.
        while slot.shelved and slot.shelved[0].shelf_number not in numbers:
            slot.take_from_shelf()
        slot.is_shelf_spent |= bool(slot.shelved)
        while slot.shelved:
            self._requeue(slot.shelved.pop())
        for running in list(slot.running.values()):
            # This one left the shelf on paper only: the slot has not begun it, and its number was just taken back too.
            if running is not None and running.shelf_number in numbers:
                del slot.running[running.frame.ident]
                self._requeue(running)

    def _requeue(self, pending: PendingSlot) -> None:
        task = pending.frame.ident
        slot = self.by_task.pop(task)
        if task in slot.cancelled:
            slot.cancelled.discard(task)
            self._on_recalled(task)
            return
        pending.missing = self._missing(pending.frame)
        (slot.waiting if slot.actor else self.queue).appendleft(pending)

    def give_up(self, slot: SlotProcess) -> None:
        """Settle the shelf of a dead slot, and drop the blobs of values that will not come."""
        if slot.shelved:
            self.take_back(slot)
        for task in list(slot.kept):
            self.drop_kept(slot, task)

    def ended(self, slot: SlotProcess, task: int) -> None:
        """Forget a task that its slot has finished."""
        self.by_task.pop(task, None)
        self._granted.forget(task)
        slot.ended(task)
        if self.shelved:
            for running in slot.running:
                self.shelved.pop(running, None)
