"""Tasks on a node, from the frame that brings one to the frame that reports its end, whatever happens to its process.

`placement` decides which slot gets which task, `slot_maker` makes slots, and `processes` starts and kills processes.
`losses` describes what was lost.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pickle
import signal
from dataclasses import replace
from typing import Any

from ...errors import InternalError
from ...values.devices import NO_GRANT, Grant
from ...wire.blobs import pack_places
from ...wire.failures import encode_failure
from ...wire.frames import HAS_FD, KEPT, QUIET, SETTLED_PAIR, Frame, FrameKind
from ...wire.tasks import TASK_KIND_AT, ActorOrder, CallKind, NodeConfig, RankOrder, elapsed_ns, unpack_task
from ..slot.link import blob_body
from .blobs import NodeBlobs
from .complaints import complain
from .devices import NodeDevices
from .first_zygote import FirstZygote
from .granted import GrantedSlots
from .held import HeldFrames
from .limit_groups import Enforcement
from .loop import EventLoop
from .losses import Losses
from .output import DISPLAYS
from .placement import Placement
from .processes import RANK_PRELOAD, Processes
from .session import Session
from .slot_maker import SlotMaker
from .slots import SlotProcess
from .spool import Spool
from .stacks import RankWatch, crash_of
from .watchdog import kill_session

_AGAIN_S = 1.0
"""Pause before retrying a step that the machine has no room for now, in seconds."""
_RANK_ENDS_S = 5.0
"""Time for a rank's process to exit after its last frame, in seconds; a user's thread may keep it alive forever."""
_FINAL = (FrameKind.RESULT, FrameKind.ERROR)
_VALUES = (FrameKind.ITEM, FrameKind.PART, FrameKind.BLOB)


class NodeTasks:
    """Slots and ranks of a node, with their tasks. Only the agent's thread uses it.

    `address` is the path of the agent's socket. Methods named `on_...` handle frames from the client, frames from
    slots, and events of processes.
    """

    def __init__(
        self,
        loop: EventLoop,
        config: NodeConfig,
        address: str,
        devices: NodeDevices,
        enforcement: Enforcement,
        first: FirstZygote | None = None,
    ) -> None:
        self.client: Session | None = None
        """Session that receives results; None while nobody is connected, when only the lease ends the work."""
        self.spool = Spool(config.folder, config.blob_limit_bytes)
        self._maker = SlotMaker(config, address, devices, enforcement)
        self._losses = Losses(config.node)
        self._granted = GrantedSlots(self._maker.resolve, self._renew)
        self.placing = Placement(
            loop,
            NodeBlobs(config.folder, config.blob_limit_bytes),
            on_readable=self.on_slot_readable,
            on_recalled=self._on_recalled,
            granted=self._granted,
        )
        self._loop = loop
        self._config = config
        self._processes = Processes(loop, config, on_forked=self._on_forked, on_dead=self.on_slot_dead, first=first)
        self._watch = RankWatch(loop, lambda task, body: self.send(FrameKind.STACK, task, body, lane=1))
        self._topology = b""
        self.held: HeldFrames | None = None
        """Frames for the next client; None: there is none after this one."""
        self._failed_ranks: dict[int, bytes] = {}
        """Bodies of LOST frames for ranks that died before their task arrived."""

    def start(self) -> None:
        """Start the pool's slots."""
        for number in range(self._maker.count):
            self._start_slot(number)

    def close(self) -> None:
        """Close the slots' sockets, and kill slots with running tasks; the watchdog kills the rest."""
        for slot in self._all_slots():
            if slot.running and slot.pid is not None:
                self._processes.kill(slot)
            slot.close()
        self._processes.close()

    def on_client_gone(self) -> None:
        self.client = None
        self._failed_ranks.clear()

    def forget_client(self) -> None:
        """Drop the tasks of a client that will not come back, and kill the processes that run one."""
        self.on_client_gone()
        self.placing.clear()
        for slot in self._all_slots():
            if slot.running or slot.actor or slot.rank is not None:
                self._processes.kill(slot)

    def hand_over(self, held: HeldFrames, *, keeps_actors: bool) -> dict[str, Any]:
        """Leave the tasks that run here to the next client, and return what it must know.

        Tasks that have not begun are dropped, because that client sends them again, and the processes of such ranks
        end. So do actors if that client does not know them.

        Returns:
            As "held" `HeldFrames.progress` and the devices, by task. As "blobs" what `pack_places` makes. As "actors"
            whether each is made, the tasks that it runs, and its devices, by its number. As "ranks" the notes of those
            that have begun, by task. As "inputs" `SlotProcess.inputs`.
        """
        self.on_client_gone()
        for slot in self._all_slots():
            if (slot.actor and not keeps_actors) or (slot.rank is not None and not (slot.running and slot.note)):
                for task in slot.running:
                    held.forget(task)
                self._processes.kill(slot)
        blobs = self.placing.hand_over(held.kept)
        actors = self.placing.actors if keeps_actors else {}
        slots = (*self.placing.slots, *actors.values())
        running = [task for slot in slots for task in slot.running]
        told = {task: (*held.progress(task), self._granted.devices_of(task)) for task in (*running, *held)}
        alive = {actor: (slot.has_returned, [*slot.running], slot.booked) for actor, slot in actors.items()}
        ranks = {task: slot.note for slot in self.placing.ranks.values() for task in slot.running if slot.note}
        inputs = {task: slot.inputs[task] for slot in slots for task in slot.running if task in slot.inputs}
        facts = {"held": told, "blobs": pack_places(blobs), "actors": alive, "inputs": inputs}
        return {**facts, "ranks": {**held.ranks, **ranks}}

    def on_settled(self, frame: Frame) -> None:
        if self.held is not None:
            for task, count in SETTLED_PAIR.iter_unpack(frame.body):
                self.held.settle(task, count)

    def on_credit(self, frame: Frame) -> None:
        if self.held is not None and frame.ident in self.placing.by_task:
            self.held.grant(frame.ident, int.from_bytes(frame.body, "little"))
        self.placing.pass_on(frame)

    def _all_slots(self) -> list[SlotProcess]:
        return [*self.placing.slots, *self.placing.ranks.values(), *self.placing.actors.values()]

    # Frames of the client ---------------------------------------------------------------------------------------------

    def on_topology(self, frame: Frame) -> None:
        self._topology = frame.body
        for slot in self._all_slots():
            self.placing.send_to(slot, frame)
            self._send_line(slot)

    def on_task(self, frame: Frame) -> None:
        if frame.body[TASK_KIND_AT] == CallKind.GANG and frame.ident not in self.placing.ranks:
            # Its process has died, or never started. A plain slot would run the task without its gang.
            self._send_lost(frame.ident, self._failed_ranks.pop(frame.ident, self._losses.of(frame.ident, None, 1)))
            return
        if frame.body[TASK_KIND_AT] == CallKind.ACTOR:
            self._on_call_of_actor(frame)
            return
        self.placing.add(frame)

    def on_grant(self, frame: Frame) -> None:
        grant = Grant.parse(frame.body)
        if self._config.executor == "thread":  # its calls share one process, which cannot have a limit for each
            grant = replace(grant, cpus=None, memory_gib=None)
        self._granted.add(frame.ident, grant)

    def _on_recalled(self, task: int) -> None:
        self._granted.forget(task)
        self.send(FrameKind.RECALLED, task)

    # The direct line --------------------------------------------------------------------------------------------------

    def _send_line(self, slot: SlotProcess) -> None:
        """Give the client its end of the line, but only after the slot has what a task on the line needs."""
        client = self.client
        if slot.line is not None and client is not None and client.passes_fds and self._topology:
            with contextlib.suppress(OSError):  # out of descriptors: all calls go through the agent
                actor = slot.actor.to_bytes(8, "little") if slot.actor else b""
                client.send(FrameKind.LINE, slot.line_number, actor, fd=slot.line.fileno())
            slot.line.close()
            slot.line = None

    def on_hold(self, frame: Frame) -> None:
        """Adopt a task from the direct line: it occupies its slot, and can be cancelled or lost, as any other."""
        number = int.from_bytes(frame.body, "little")
        slot = next((s for s in self._all_slots() if s.line_number == number), None)
        if slot is not None:
            slot.running[frame.ident] = None
            slot.held = frame.ident
            self.placing.by_task[frame.ident] = slot
            return
        self._send_lost(frame.ident, self._losses.on_line(frame.ident, number))

    def on_unhold(self, frame: Frame) -> None:
        slot = self.placing.by_task.get(frame.ident)
        if slot is not None:
            self.placing.ended(slot, frame.ident)
            self.placing.go_on(slot)

    # Ending tasks -----------------------------------------------------------------------------------------------------

    def on_recall(self, frame: Frame) -> None:
        if self.placing.forget_unbegun(frame.ident):
            self.send(FrameKind.RECALLED, frame.ident)

    def on_cancel(self, frame: Frame) -> None:
        """Cancel a task. `lane`: grace period before SIGKILL, in tenths of a second."""
        if self.placing.forget_unbegun(frame.ident):
            self.send(FrameKind.RECALLED, frame.ident)
            rank = self.placing.ranks.get(frame.ident)
            if rank is not None:
                rank.cancelled.add(frame.ident)
                self._processes.kill(rank)
            return
        slot = self.placing.by_task.get(frame.ident)
        if slot is None:
            self._failed_ranks.pop(frame.ident, None)
            self.send(FrameKind.RECALLED, frame.ident)
            if frame.ident in self.placing.ranks:  # the rank runs, but its task could not be sent to it
                self._processes.kill(self.placing.ranks[frame.ident])
            return
        slot.cancelled.add(frame.ident)
        self._interrupt(slot, frame.ident)
        self._loop.call_later(frame.lane / 10, lambda: self._kill_if_running(slot, frame.ident))

    def _interrupt(self, slot: SlotProcess, task: int) -> None:
        self.placing.send_to(slot, Frame(FrameKind.CLOSE, 0, 0, task, b""))
        if slot.executor == "process":
            slot.mark_cancelled(task)
            if slot.pid is not None:
                with contextlib.suppress(ProcessLookupError):  # already exited; its zygote reports it
                    os.kill(slot.pid, signal.SIGINT)

    def _kill_if_running(self, slot: SlotProcess, task: int) -> None:
        # One thread cannot be killed without its neighbours, so it runs on, and its result is dropped.
        if task in slot.running and slot.executor == "process":
            self._processes.kill(slot)

    def on_close(self, frame: Frame) -> None:
        """Close a stream without a consumer: first at the generator's next yield, then by interrupt, then by kill."""
        slot = self.placing.by_task.get(frame.ident)
        if slot is None:
            self.on_cancel(frame)
            return
        self.placing.send_to(slot, frame)
        grace = self._config.cancel_grace_s

        def insist() -> None:
            if frame.ident in slot.running:
                self.on_cancel(Frame(FrameKind.CANCEL, 0, int(grace * 10), frame.ident, b""))

        self._loop.call_later(grace, insist)

    def _on_forked(self, slot: SlotProcess) -> None:
        for task in slot.cancelled:
            self._interrupt(slot, task)

    # Frames of slots --------------------------------------------------------------------------------------------------

    def on_slot_readable(self, slot: SlotProcess) -> None:
        try:
            for frame in slot.channel.receive():
                if frame.kind == FrameKind.BLOB and slot.group is not None:
                    slot.group.make_room()
                self.on_slot_frame(slot, frame)
        except BlockingIOError:  # no more frames for now
            return
        except ConnectionError:
            # The process is exiting, and its zygote will report how. Until then the socket has nothing to read.
            self._loop.forget(slot.channel)
        except InternalError as error:
            slot.is_broken = True
            self._loop.forget(slot.channel)
            complain(self._config.node, f"agent kills slot {slot.number}: it sent an invalid frame ({error})")
            self._processes.kill(slot)

    def on_slot_frame(self, slot: SlotProcess, frame: Frame) -> None:
        kind = frame.kind
        if kind in _FINAL:
            if not frame.flags & QUIET:
                self._read_output(slot, flush=False)
            if slot.kept:
                frame = self._settle_kept(slot, frame)
            self._deliver(frame)
            if kind == FrameKind.RESULT:
                self.placing.took(elapsed_ns(frame.body))
            self.placing.ended(slot, frame.ident)
            slot.has_replied = True
            slot.has_returned |= kind == FrameKind.RESULT
            self._losses.completed()
            if slot.rank is not None:
                self._loop.call_later(_RANK_ENDS_S, lambda: self._processes.kill(slot))
            self.placing.go_on(slot)
        elif kind == FrameKind.BLOB and frame.flags & KEPT:
            self.placing.keep_blob(slot, frame)
        elif kind in (FrameKind.LOG, FrameKind.DISPLAY):
            self._log(frame.ident, DISPLAYS if kind == FrameKind.DISPLAY else frame.lane, frame.body)
        elif kind == FrameKind.IN_CREDIT:
            slot.count_input(frame)
            self.forward(frame)
        elif kind != FrameKind.READY:
            self._pass_on(slot, frame)

    def _pass_on(self, slot: SlotProcess, frame: Frame) -> None:
        if frame.kind == FrameKind.ITEM:
            self._read_output(slot, flush=False)
        (self._deliver if frame.kind in _VALUES else self.forward)(frame)

    def _settle_kept(self, slot: SlotProcess, frame: Frame) -> Frame:
        """Hand the blobs of a value that stays here over to the client. Without room for one, return an error."""
        blobs = [self.placing.blob(digest) for digest in slot.kept.get(frame.ident, ())]
        if any(blob is None or blob.fd < 0 for blob in blobs):
            why = "the node's agent may open no more files, so it cannot keep the value; drop other references"
            failure = encode_failure(OSError(errno.EMFILE, why))
            frame = Frame(FrameKind.ERROR, frame.flags & ~KEPT, 0, frame.ident, failure)
        if frame.kind == FrameKind.RESULT:
            slot.kept.pop(frame.ident, None)
        else:
            self.placing.drop_kept(slot, frame.ident)
        return frame

    def on_fetch(self, frame: Frame) -> None:
        """Send a blob that the client or another node needs. `lane`: only tell whether it is here."""
        digest = frame.body
        blob = self.placing.blob(digest)
        if frame.lane:
            self.send(FrameKind.FETCHED, frame.ident, digest, lane=int(blob is None or blob.fd < 0))
            return
        if blob is None or blob.fd < 0:
            self.forward(Frame(FrameKind.FETCHED, 0, 1, frame.ident, digest))
            return
        fd = -1
        with contextlib.suppress(OSError):  # no free descriptor: the client looks elsewhere, and keeps the value
            fd = os.dup(blob.fd)
            self.forward(Frame(FrameKind.BLOB, HAS_FD, 0, frame.ident, blob_body(digest, blob.size), fd))
        is_stuck = fd < 0 or self.spool.failure_of(frame.ident) is not None
        self.forward(Frame(FrameKind.FETCHED, 0, 2 * is_stuck, frame.ident, digest))

    def forward(self, frame: Frame) -> None:
        client = self.client
        if client is not None:
            if frame.fd < 0 and not self.spool.has_failed:
                client.send_result(frame)
            else:
                for passed in self.spool.pass_on(frame, client.held_bytes):
                    client.send_result(passed)
        if frame.fd >= 0:
            os.close(frame.fd)

    def _deliver(self, frame: Frame) -> None:
        """Send a frame that brings a value of a task, or its end, and hold it for the next client."""
        held = self.held
        if held is None:
            self.forward(frame)
            return
        held_bytes = 0 if self.client is None else self.client.held_bytes
        rank = self.placing.ranks.get(frame.ident)
        for passed in self.spool.pass_on(frame, held_bytes):
            try:
                held.add(passed, () if rank is None else rank.note)
            except OSError as error:  # no descriptor is left: this client gets it, but no other one could
                complain(self._config.node, f"agent cannot hold a value for another client: {error.strerror}")
            if self.client is not None:
                self.client.send_result(passed)
        if frame.fd >= 0:
            os.close(frame.fd)

    def on_call_ended(self, call: int) -> None:
        if self.client is not None:
            self.client.call_ended(call)

    def _read_output(self, slot: SlotProcess, *, flush: bool = True) -> None:
        for task, stream, text in slot.output():
            if self.client is not None:
                self.client.add_log(task, stream, text)
        for reader in slot.outputs:
            if reader.is_closed:
                self._loop.forget(reader.fd)
        if flush and self.client is not None:
            self.client.flush()

    def _log(self, task: int, stream: int, text: bytes) -> None:
        if self.client is not None:
            self.client.add_log(task, stream, text)
            self.client.flush()

    def send(self, kind: int, ident: int = 0, body: bytes = b"", *, lane: int = 0) -> None:
        """Send a frame to the client, if one is connected."""
        if self.client is not None:
            self.client.send(kind, ident, body, lane=lane)

    # Slots and ranks --------------------------------------------------------------------------------------------------

    def _start_slot(self, number: int, request: Grant = NO_GRANT) -> None:
        try:
            slot = self._maker.make_plain(number, request)
        except OSError as error:
            complain(self._config.node, f"agent delays slot {number}: {error.strerror}")
            self._loop.call_later(_AGAIN_S, lambda: self._start_again(number, request))
            return
        self.placing.slots.append(slot)
        self._granted.started(slot)
        self._fork(slot, self._config.preload, b"")
        self._send_line(slot)

    def on_rank(self, frame: Frame) -> None:
        order: RankOrder = pickle.loads(frame.body)
        try:
            slot = self._maker.make_rank(order, deliver=bool(frame.lane))
        except OSError as error:
            self._failed_ranks[frame.ident] = self._losses.body(None, 1, why=f"{type(error).__name__}: {error}")
            return
        slot.note = order.note
        self.placing.ranks[frame.ident] = slot
        self._fork(slot, (*order.preload, RANK_PRELOAD), order.launch)
        self._watch.watch(frame.ident, slot, order.tell_stopped_after_s)

    # Actors -----------------------------------------------------------------------------------------------------------

    def on_start_actor(self, frame: Frame) -> None:
        order: ActorOrder = pickle.loads(frame.body)
        try:
            slot = self._maker.make_actor(self._config.slots + len(self.placing.actors), order)
        except OSError as error:
            self._tell_actor_gone(frame.ident, self._losses.body(None, 1, why=f"{type(error).__name__}: {error}"))
            return
        if order.grant is not None and order.grant.devices is not None:
            self._granted.end_holders(self._maker.devices_of(order), self.placing.slots)
        slot.actor = frame.ident
        slot.booked = None if order.grant is None else order.grant.devices
        self.placing.actors[frame.ident] = slot
        self._fork(slot, self._config.preload, b"")
        self._send_line(slot)

    def on_end_actor(self, frame: Frame) -> None:
        slot = self.placing.actors.get(frame.ident)
        if slot is not None:
            self._processes.kill(slot)

    def _on_call_of_actor(self, frame: Frame) -> None:
        slot = self.placing.actors.get(unpack_task(frame.body).actor)
        if slot is None:  # its process has died, which the client has been told
            self._send_lost(frame.ident, self._losses.of(frame.ident, None, 1))
        else:
            self.placing.add_to_actor(slot, frame)

    def _on_actor_dead(self, slot: SlotProcess, code: int) -> None:
        del self.placing.actors[slot.actor]
        for pending in slot.waiting:
            self._report_lost(slot, pending.frame.ident, code)
        body = self._losses.body(0, code, crash_of(slot), why=slot.failure, exceeded_gib=slot.exceeded_gib)
        self._tell_actor_gone(slot.actor, body)

    def _tell_actor_gone(self, actor: int, body: bytes) -> None:
        if self.client is not None:
            self.client.send_result(Frame(FrameKind.ACTOR_GONE, 0, 0, actor, body))

    def on_take_stack(self, frame: Frame) -> None:
        task = frame.ident
        slot = self.placing.ranks.get(task) or self.placing.by_task.get(task)

        def tell(report: dict[str, object]) -> None:
            self.send(FrameKind.STACK, task, json.dumps(report).encode())

        if slot is not None and slot.executor == "process":
            self._watch.take(slot, all_threads=bool(frame.lane), on_stack=tell)
        else:  # it has ended, or runs in a thread slot, where the task's thread cannot be told from the others
            tell({"stack": "", "state": ""})

    def _fork(self, slot: SlotProcess, preload: tuple[str, ...], launch: bytes) -> None:
        self._loop.watch(slot.channel, lambda: self.on_slot_readable(slot))
        for reader in slot.outputs:
            self._loop.watch(reader.fd, lambda: self._read_output(slot))
        if self._topology:
            slot.channel.queue(FrameKind.SLOT_CONFIG, body=self._topology)
            self.placing.flush(slot)
        self._processes.fork(slot, preload, launch)

    # Deaths -----------------------------------------------------------------------------------------------------------

    def on_slot_dead(self, slot: SlotProcess, pid: int, code: int) -> None:
        """Deliver the slot's finished results, report its begun tasks as lost, and replace it.

        The order matters. Frames still in its socket come first, because they may end tasks. Then output, which
        belongs ahead of the reports. The shelf is settled before the lost tasks are counted: an unclaimed task goes
        back to the queue and is not lost.
        """
        if slot.is_dead:
            return
        if pid:
            kill_session(pid)
        self._maker.release(slot, code)
        slot.is_dead = True  # set first, so that nothing below gives it another task
        for frame in slot.receive():
            self.on_slot_frame(slot, frame)
        self._read_output(slot)
        self._losses.note_line(slot, code)
        self.placing.give_up(slot)
        for task in list(slot.running):
            self._report_lost(slot, task, code)
        self._loop.forget(slot.channel)
        for reader in slot.outputs:
            self._loop.forget(reader.fd)
        slot.close()
        if slot.actor:
            self._on_actor_dead(slot, code)
        elif slot.rank is not None:
            self._on_rank_dead(slot, code)
        else:
            self._replace(slot)

    def _report_lost(self, slot: SlotProcess, task: int, code: int) -> None:
        self.placing.by_task.pop(task, None)
        self._send_lost(task, self._losses.of(task, slot, code))

    def _send_lost(self, task: int, body: bytes) -> None:
        self.spool.forget(task)
        self._granted.forget(task)
        if self.client is not None:
            self._deliver(Frame(FrameKind.LOST, 0, 0, task, body))

    def _on_rank_dead(self, slot: SlotProcess, code: int) -> None:
        for task, rank in list(self.placing.ranks.items()):
            if rank is not slot:
                continue
            del self.placing.ranks[task]
            pending = self.placing.pending(task)
            if pending is not None:  # the rank died before its task reached it
                self.placing.queue.remove(pending)
                self._report_lost(slot, task, code)
            elif not (task in slot.running or task in slot.cancelled or slot.finished_any):  # its task is yet to come
                self._failed_ranks[task] = self._losses.of(task, slot, code)

    def _replace(self, slot: SlotProcess) -> None:
        self.placing.slots.remove(slot)
        self._granted.ended(slot)
        if slot.renewed_as is not None:
            self._start_again(slot.number, slot.renewed_as)
            return
        self._losses.died(slot)
        if self._losses.are_early:
            # Slots die as soon as they start, so immediate restarts would only burn the machine. Retry slowly.
            self._loop.call_later(_AGAIN_S, lambda: self._start_again(slot.number, slot.request))
        else:
            self._start_again(slot.number, slot.request)

    def _start_again(self, number: int, request: Grant) -> None:
        self._start_slot(number, request)
        self.placing.dispatch()

    def _renew(self, slot: SlotProcess) -> None:
        """End an idle slot's process, behind the frames that are being handled; `_replace` starts the next one."""

        def end() -> None:
            if slot.running:  # a call of the direct line, which the client has just told
                slot.renewed_as = None
            else:
                self._processes.kill(slot)

        self._loop.call_later(0, end)
