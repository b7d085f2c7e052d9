"""Tasks on a node, from the frame that brings one to the frame that reports its end, whatever happens to its process.

`placement` decides which slot gets which task; `processes` starts and kills processes.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pickle
import signal
import time
from dataclasses import replace
from typing import Any, Literal

from ...errors import InternalError
from ...values.devices import NO_GRANT, Grant
from ...values.topology import Rank
from ...wire.failures import encode_failure
from ...wire.frames import HAS_FD, KEPT, QUIET, Frame, FrameKind
from ...wire.tasks import TASK_KIND_AT, ActorOrder, CallKind, NodeConfig, RankOrder, elapsed_ns, unpack_task
from ..slot.link import blob_body
from ..slot.page import CURRENT
from .blobs import NodeBlobs
from .complaints import complain
from .devices import NodeDevices
from .first_zygote import FirstZygote
from .granted import GrantedSlots
from .limit_groups import Enforcement, LimitGroup, LimitGroups
from .loop import EventLoop
from .output import DISPLAYS
from .placement import Placement
from .processes import RANK_PRELOAD, Processes
from .session import Session
from .slots import SlotProcess, make_slot
from .spool import Spool
from .stacks import RankWatch, crash_of
from .watchdog import kill_session

_MAX_EARLY_DEATHS = 5
_AGAIN_S = 1.0
"""Pause before retrying a step that the machine has no room for now, in seconds."""
_RANK_ENDS_S = 5.0
"""Time for a rank's process to exit after its last frame, in seconds; a user's thread may keep it alive forever."""
_FINAL = (FrameKind.RESULT, FrameKind.ERROR)


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
        self._devices = devices
        self._limits = LimitGroups(config.folder, enforcement)
        self._env = dict(config.env)
        self._granted = GrantedSlots(self._resolve, self._renew)
        self.placing = Placement(
            loop,
            NodeBlobs(config.folder, config.blob_limit_bytes),
            on_readable=self.on_slot_readable,
            on_recalled=self._on_recalled,
            granted=self._granted,
        )
        self._loop = loop
        self._config = config
        self._address = address
        self._processes = Processes(loop, config, on_forked=self._on_forked, on_dead=self.on_slot_dead, first=first)
        self._watch = RankWatch(loop, lambda task, body: self.send(FrameKind.STACK, task, body, lane=1))
        self._topology = b""
        self._failed_ranks: dict[int, bytes] = {}
        """Bodies of LOST frames for ranks that died before their task arrived."""
        self._lines = 0
        self._dead_line: tuple[int, int, int, float | None] = (0, 0, 0, None)
        """Number, current task, exit code and exceeded limit of the latest dead slot that had a direct line."""
        self._early_deaths = 0

    def start(self) -> None:
        """Start the pool's slots."""
        for number in range(self._config.slots // self._lanes):
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

    def _all_slots(self) -> list[SlotProcess]:
        return [*self.placing.slots, *self.placing.ranks.values(), *self.placing.actors.values()]

    @property
    def _lanes(self) -> int:
        return self._config.slots if self._config.executor == "thread" else 1

    # Frames of the client ---------------------------------------------------------------------------------------------

    def on_topology(self, frame: Frame) -> None:
        self._topology = frame.body
        for slot in self._all_slots():
            self.placing.send_to(slot, frame)
            self._send_line(slot)

    def on_task(self, frame: Frame) -> None:
        if frame.body[TASK_KIND_AT] == CallKind.GANG and frame.ident not in self.placing.ranks:
            # Its process has died, or never started. A plain slot would run the task without its gang.
            self._send_lost(frame.ident, self._failed_ranks.pop(frame.ident, self._lost(frame.ident, None, 1)))
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
        dead, current_task, code, exceeded_gib = self._dead_line
        # Only the latest death is remembered. After an older one the task counts as begun, so nobody runs it twice.
        has_begun = dead != number or current_task == frame.ident
        self._send_lost(frame.ident, self._lost_body(0 if has_begun else None, code, exceeded_gib=exceeded_gib))

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
            self.forward(frame)
            if kind == FrameKind.RESULT:
                self.placing.took(elapsed_ns(frame.body))
            self.placing.ended(slot, frame.ident)
            slot.has_replied = True
            self._early_deaths = 0
            if slot.rank is not None:
                self._loop.call_later(_RANK_ENDS_S, lambda: self._processes.kill(slot))
            self.placing.go_on(slot)
        elif kind == FrameKind.BLOB and frame.flags & KEPT:
            self.placing.keep_blob(slot, frame)
        elif kind in (FrameKind.LOG, FrameKind.DISPLAY):
            self._log(frame.ident, DISPLAYS if kind == FrameKind.DISPLAY else frame.lane, frame.body)
        elif kind != FrameKind.READY:
            if kind == FrameKind.ITEM:
                self._read_output(slot, flush=False)
            self.forward(frame)

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

    def _resolve(self, grant: Grant, number: int) -> Grant:
        """Return a grant that names its devices. All lanes of a thread slot have those of the node."""
        return self._devices.of(grant, number, self._config.slots // self._lanes)

    def _start_slot(self, number: int, request: Grant = NO_GRANT) -> None:
        config = self._config
        lanes = config.slots if config.executor == "thread" else 1
        grant = self._resolve(request, number)
        has_line = number == 0 and config.executor == "process" and request == NO_GRANT
        self._lines += 1
        try:
            slot = self._make_slot(
                number,
                grant,
                lanes=lanes,
                executor=config.executor,
                workers_per_node=config.slots,
                volumes=config.placed_volumes,
                line_number=self._lines if has_line else 0,
            )
        except OSError as error:
            complain(self._config.node, f"agent delays slot {number}: {error.strerror}")
            self._loop.call_later(_AGAIN_S, lambda: self._start_again(number, request))
            return
        slot.request = request
        self.placing.slots.append(slot)
        self._granted.started(slot)
        self._fork(slot, config.preload, b"")
        self._send_line(slot)

    def _make_slot(
        self,
        number: int,
        grant: Grant,
        *,
        visible: tuple[int, ...] | None = None,
        shared_as: str = "",
        env: tuple[tuple[str, str], ...] = (),
        **options: Any,
    ) -> SlotProcess:
        """Create a slot for a grant that names its devices, with a group that limits it. Raises OSError."""
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

    def on_rank(self, frame: Frame) -> None:
        order: RankOrder = pickle.loads(frame.body)
        env = (*_threads_of(order.rank, order.grant, self._config), *order.env)
        grant = self._devices.of(order.grant or NO_GRANT, order.rank.local_rank, order.rank.local_world_size)
        try:
            slot = self._make_slot(
                order.rank.local_rank,
                grant,
                visible=order.visible,
                shared_as=order.shared_as,
                env=env,
                rank=order.rank,
                deliver=bool(frame.lane),
                volumes=self._config.placed_volumes,
            )
        except OSError as error:
            self._failed_ranks[frame.ident] = self._lost_body(None, 1, why=f"{type(error).__name__}: {error}")
            return
        self.placing.ranks[frame.ident] = slot
        self._fork(slot, (*order.preload, RANK_PRELOAD), order.launch)
        self._watch.watch(frame.ident, slot, order.tell_stopped_after_s)

    # Actors -----------------------------------------------------------------------------------------------------------

    def on_start_actor(self, frame: Frame) -> None:
        order: ActorOrder = pickle.loads(frame.body)
        executor: Literal["process", "thread"] = "process" if order.lanes == 1 else "thread"
        grant = self._devices.of(order.grant or NO_GRANT, 0, 1)
        self._lines += 1
        try:
            slot = self._make_slot(
                self._config.slots + len(self.placing.actors),
                grant,
                lanes=order.lanes,
                executor=executor,
                workers_per_node=self._config.slots,
                line_number=self._lines if executor == "process" else 0,
            )
        except OSError as error:
            self._tell_actor_gone(frame.ident, self._lost_body(None, 1, why=f"{type(error).__name__}: {error}"))
            return
        if order.grant is not None and order.grant.devices is not None:
            self._granted.end_holders(grant.devices or (), self.placing.slots)
        slot.actor = frame.ident
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
            self._send_lost(frame.ident, self._lost(frame.ident, None, 1))
        else:
            self.placing.add_to_actor(slot, frame)

    def _on_actor_dead(self, slot: SlotProcess, code: int) -> None:
        del self.placing.actors[slot.actor]
        for pending in slot.waiting:
            self._report_lost(slot, pending.frame.ident, code)
        body = self._lost_body(0, code, crash_of(slot), why=slot.failure, exceeded_gib=slot.exceeded_gib)
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
        if slot.group is not None:
            slot.exceeded_gib = slot.group.exceeded_gib() if code == -signal.SIGKILL else None
            self._limits.leave(slot.group)
        slot.is_dead = True  # set first, so that nothing below gives it another task
        for frame in slot.receive():
            self.on_slot_frame(slot, frame)
        self._read_output(slot)
        if slot.line_number:
            self._dead_line = slot.line_number, int(slot.page[CURRENT]), code, slot.exceeded_gib
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
        self._send_lost(task, self._lost(task, slot, code))

    def _lost(self, task: int, slot: SlotProcess | None, code: int) -> bytes:
        """Build the body of a LOST frame. `slot` is None if the task never had a process."""
        crash = None if slot is None else crash_of(slot)
        if slot is None:
            return self._lost_body(None, code, crash)
        index = slot.begun_index(task)
        return self._lost_body(index, code, crash, why=slot.failure, exceeded_gib=slot.exceeded_gib)

    def _lost_body(
        self,
        index: int | None,
        code: int,
        crash: tuple[float, str] | None = None,
        *,
        why: str = "",
        exceeded_gib: float | None = None,
    ) -> bytes:
        if index is None and self._early_deaths >= _MAX_EARLY_DEATHS:
            index = 0  # report it as begun: every process dies before it begins, so retries would never end
        lost: dict[str, object] = {
            "node": self._config.node,
            "signal": -code if code < 0 else None,
            "exit_code": code if code >= 0 else None,
            "started": index is not None,
            "index": index,
            "at": time.time() if crash is None else crash[0],
            "stack": "" if crash is None else crash[1],
            "why": why,
            "memory_gib": exceeded_gib,
        }
        return json.dumps(lost).encode()

    def _send_lost(self, task: int, body: bytes) -> None:
        self.spool.forget(task)
        self._granted.forget(task)
        if self.client is not None:
            self.client.send_result(Frame(FrameKind.LOST, 0, 0, task, body))

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
                self._failed_ranks[task] = self._lost(task, slot, code)

    def _replace(self, slot: SlotProcess) -> None:
        self.placing.slots.remove(slot)
        self._granted.ended(slot)
        if slot.renewed_as is not None:
            self._start_again(slot.number, slot.renewed_as)
            return
        if not slot.finished_any:
            self._early_deaths += 1
        if self._early_deaths < _MAX_EARLY_DEATHS:
            self._start_again(slot.number, slot.request)
        else:
            # Slots die as soon as they start, so immediate restarts would only burn the machine. Retry slowly.
            self._loop.call_later(_AGAIN_S, lambda: self._start_again(slot.number, slot.request))

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


def _threads_of(rank: Rank, grant: Grant | None, config: NodeConfig) -> tuple[tuple[str, str], ...]:
    """Return thread counts for a gang with processors of its own, or with more ranks here than slots."""
    if grant is not None and grant.cpus is not None:
        return _threads_for(grant.cpus / rank.local_world_size, config)
    if rank.local_world_size <= config.slots:
        return ()
    return _threads_for(config.cores / rank.local_world_size, config)


def _threads_for(cpus: float | None, config: NodeConfig) -> tuple[tuple[str, str], ...]:
    """Return thread counts for a process with this many processors; none if it has those of its slot."""
    return () if cpus is None else tuple((name, str(max(1, int(cpus)))) for name in config.thread_variables)
