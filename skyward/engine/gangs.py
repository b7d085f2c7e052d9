"""Life of gangs: they start when their nodes have room, stop as one, restart, and are diagnosed when they hang.

Everything here is called with the ledger locked, except `_rank_ended` and `_read_stack`, which lock it themselves.

Frames and deadlines of a failed start may still arrive after the gang was restarted. A restart makes new rank tasks, so
each handler checks that its task belongs to the current start (`gang.open`, `_of_start`).
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..calls.undecoded import Undecoded
from ..errors import InternalError, NodeLost, RendezvousFailed
from ..schedule.actions import Action, FailGang, StartGang
from ..wire.frames import Frame, FrameKind
from ..wire.tasks import RankOrder
from .devices import sharing_of_gangs
from .gang import BEFORE_THIS_HEAD, Gang, RankTask, StartedRank, make_ranks, parts_of_ranks
from .ledger import Ledger
from .log_router import LogRouter
from .nodes import NodeLinks
from .task_dispatcher import TaskDispatcher

if TYPE_CHECKING:
    from .hangs import RankStack

REPORT_AFTER_S = 300.0
"""Seconds without progress after which a gang's stacks are logged if no `hang_timeout_s` stops it."""
_GRACE_S = 1.0
_STACKS_LIMIT_S = 4.0
"""Seconds to wait for the stacks of ranks. After that the gang is judged without the missing ones."""
_SETTLE_S = 0.2
"""Seconds between the first failure of a rank and the stop of the others.

Failures arrive in any order. The rank that failed first may report after a rank that failed because of it.
"""


class Gangs:
    """Start, stop and diagnose the gangs of a ledger.

    Args:
        ledger: Shared state of the engine.
        dispatcher: Sends the tasks of ranks.
        nodes: Facts about the nodes.
        logs: Takes messages to the user.
        grace_s: Seconds that a cancelled rank has to end by itself before it is killed.
    """

    def __init__(
        self, ledger: Ledger, dispatcher: TaskDispatcher, nodes: NodeLinks, logs: LogRouter, *, grace_s: float
    ) -> None:
        self._ledger = ledger
        self._dispatcher = dispatcher
        self._nodes = nodes
        self._logs = logs
        self._grace_s = grace_s
        dispatcher.handlers |= {StartGang: self._start, FailGang: self._fail}
        self._told_to_share: set[frozenset[str]] = set()

    def submit(self, gang: Gang) -> None:
        self._ledger.gangs[gang.id] = gang
        self._dispatcher.perform(self._submit(gang))

    def _submit(self, gang: Gang) -> list[Action]:
        return self._ledger.scheduler.submit_gang(
            gang.id,
            nodes=gang.nodes,
            some_of=gang.some_of,
            count=gang.count or 1,
            places=gang.ranks_per_node,
            parent=gang.parent,
            need=gang.options.need,
        )

    def drop(self, gang: Gang) -> None:
        """Remove a gang that never started and that the scheduler has forgotten. The caller settles its future."""
        self._ledger.gangs.pop(gang.id, None)
        if not self._ledger.tasks and not self._ledger.gangs:
            self._ledger.idle.notify_all()

    def cancel(self, gang_id: int) -> None:
        gang = self._ledger.gangs.get(gang_id)
        if gang is None or gang.is_cancelled:
            return
        gang.is_cancelled = True
        self._ledger.idle.notify_all()
        if gang.open:
            self._stop_ranks(gang, self._grace_s)
        elif not gang.placed:
            self._end(gang)

    # Starting -------------------------------------------------------------------------------------------------------

    def _start(self, action: StartGang) -> None:
        """Ask the first node for a rendezvous port, now that the nodes have room for the gang."""
        gang = self._ledger.gangs[action.gang]
        gang.placed = action.nodes
        booked = zip(action.nodes, action.devices, strict=False)
        gang.devices = {node: own for node, own in booked if own is not None}
        if gang.is_cancelled:
            self._end(gang)
            return
        self._ledger.tell(action.nodes[0], FrameKind.RESERVE_PORT, gang.id)

    def on_port(self, frame: Frame) -> None:
        """Start the ranks of a gang with the port that its first node has picked, or fail the gang."""
        gang = self._ledger.gangs.get(frame.ident)
        if gang is None:
            return
        gang.port = frame.lane
        if gang.is_cancelled or any(node not in self._ledger.links for node in gang.placed):
            gang.failures += [(0.0, 0, _lost_before(gang, None))]
            self._end(gang)
            return
        if not gang.port:
            why = frame.body.decode(errors="replace")
            problem = f"{gang.name!r}: no rendezvous on node {gang.placed[0]}: {why}"
            error = RendezvousFailed(problem, task=gang.name)  # words: ok, slot/ports.py says what to do
            gang.failures += [(0.0, 0, error)]
            self._end(gang)
            return
        peers = {node: self._ledger.machines[node].peer for node in gang.placed}
        devices = {node: self._ids(gang, node) for node in gang.placed}
        interfaces = {node: self._ledger.machines[node].interface for node in gang.placed}
        for rank in make_ranks(gang, peers, devices, interfaces):
            task = self._add_rank(gang, rank.rank, next(self._ledger.numbers))
            self._ledger.tasks[task.id] = task
            grant, visible = parts_of_ranks(gang, self._booked(gang, rank.node))[rank.local_rank]
            order = RankOrder(
                rank=rank,
                grant=grant,
                shared_as=f"{gang.id}.{rank.restart_count}",
                visible=visible,
                launch=gang.launch_bytes,
                preload=gang.launch.preload,
                tell_stopped_after_s=gang.options.hang_timeout_s or REPORT_AFTER_S,
                note=tuple(StartedRank.of(task)),
            )
            self._ledger.tell(rank.node, FrameKind.RANK, task.id, pickle.dumps(order), lane=int(task.delivers))
            self._dispatcher.send(task, rank.node)
            self._limit_time(task)
        self._tell_of_sharing(gang)
        gang.future.set_running()

    def _add_rank(self, gang: Gang, rank: int, number: int) -> RankTask:
        """Make the task of a rank."""
        task = gang.tasks[rank] = RankTask(
            id=number,
            name=gang.name,
            head=gang.head,
            function=gang.function,
            payload=gang.payload,
            options=gang.options,
            rank=rank,
            gang=gang,
            node=gang.placed[rank // gang.ranks_per_node],
            delivers=gang.delivers(rank),
            ended=self._rank_ended,
            restart_count=len(gang.past),
        )
        gang.open.add(number)
        return task

    def _limit_time(self, task: RankTask) -> None:
        if task.options.timeout_s is not None:
            self._ledger.at(task.options.timeout_s, self._time_out, task.id, 0)

    def take_up(self, gang: Gang, ranks: Mapping[int, StartedRank]) -> None:
        """Go on with a gang whose ranks another engine has started. Its time limit begins again.

        Args:
            gang: The gang.
            ranks: All of its ranks, by the number of their task.
        """
        first = next(iter(ranks.values()))
        self._ledger.gangs[gang.id] = gang
        gang.placed, gang.port, gang.past = first.nodes, first.port, [BEFORE_THIS_HEAD] * first.restart_count
        gang.devices = {started.node: started.devices for started in ranks.values() if started.devices is not None}
        booked = {node: gang.devices.get(node) for node in gang.placed}
        need = gang.options.need
        self._ledger.scheduler.take_up_gang(gang.id, places=gang.ranks_per_node, need=need, devices=booked)
        for number, started in sorted(ranks.items(), key=lambda item: item[1].rank):
            task = self._add_rank(gang, started.rank, number)
            self._dispatcher.adopt(task)
            self._limit_time(task)
        gang.future.set_running()

    def _tell_of_sharing(self, gang: Gang) -> None:
        """Log that a running gang shares devices with this one, once per pair of functions."""
        own = self._devices_of(gang)
        for other in self._ledger.gangs.values():
            names = frozenset((gang.name, other.name))
            shared = own & self._devices_of(other) if other is not gang and other.open else frozenset()
            if shared and names not in self._told_to_share:
                self._told_to_share.add(names)
                nodes = [node for node in gang.placed if shared.intersection(self._ids(gang, node))]
                text = sharing_of_gangs(gang.name, other.name, nodes, len(shared))
                self._logs.say(gang.tasks[0], gang.placed[0], text)

    def _devices_of(self, gang: Gang) -> frozenset[str]:
        return frozenset(device for node in gang.placed for device in self._ids(gang, node))

    def _booked(self, gang: Gang, node: int) -> tuple[int, ...]:
        """Return the indexes of a gang's devices on a node."""
        everything = tuple(range(len(self._nodes.devices(node))))
        return gang.devices.get(node, everything)

    def _ids(self, gang: Gang, node: int) -> tuple[str, ...]:
        devices = self._nodes.devices(node)
        return tuple(devices[index].id for index in self._booked(gang, node) if index < len(devices))

    # Ending ---------------------------------------------------------------------------------------------------------

    def _rank_ended(self, task: RankTask) -> None:
        with self._ledger:
            gang = task.gang
            if task.id not in gang.open:
                return  # a rank of an earlier start, or reported before
            gang.open.discard(task.id)
            if not gang.open:
                self._end(gang)
            elif gang.failures and not gang.is_stopping:
                gang.is_stopping = True
                self._ledger.at(_SETTLE_S, self._stop_failed, gang.id, task.id)

    def _stop_failed(self, gang_id: int, failed: int) -> None:
        gang = self._of_start(gang_id, failed)
        if gang is not None:
            self._stop_ranks(gang, _GRACE_S)

    def _of_start(self, gang_id: int, task_id: int) -> Gang | None:
        """Return the gang if the task is a rank of its current start."""
        gang = self._ledger.gangs.get(gang_id)
        return gang if gang is not None and any(task.id == task_id for task in gang.tasks.values()) else None

    def _stop_ranks(self, gang: Gang, grace_s: float) -> None:
        gang.is_stopping = True
        for task in gang.tasks.values():
            if task.id in gang.open and not task.is_cancelled:
                task.is_cancelled = True
                self._ledger.tell(task.node, FrameKind.CANCEL, task.id, lane=int(grace_s * 10))

    def _end(self, gang: Gang) -> None:
        if gang.port:
            self._ledger.tell(gang.placed[0], FrameKind.RELEASE_PORT, lane=gang.port)
        if gang.id not in self._ledger.gangs:
            return
        del self._ledger.gangs[gang.id]
        actions = self._ledger.scheduler.gang_finished(gang.id)
        pause_s = gang.spend_restart() if gang.failures and not gang.is_cancelled else None
        if pause_s is not None:
            rank = gang.tasks.get(gang.cause()[0])
            gang.reset()
            if rank is not None:
                self._logs.say(rank, rank.node, f"{gang.name!r} is restarted after {gang.past[-1]}")
            self._ledger.gangs[gang.id] = gang
            if pause_s:
                self._ledger.at(pause_s, self._start_again, gang.id, len(gang.past))
            else:
                actions += self._submit(gang)
        else:
            self._ledger.after.append(lambda: _settle(gang))
        self._dispatcher.perform(actions)
        if not self._ledger.tasks and not self._ledger.gangs:
            self._ledger.idle.notify_all()

    def _start_again(self, gang_id: int, restart: int) -> None:
        """Submit a gang for a restart once its pause is over."""
        gang = self._ledger.gangs.get(gang_id)
        if gang is not None and len(gang.past) == restart:
            self._dispatcher.perform(self._submit(gang))

    def _fail(self, action: FailGang) -> None:
        """Fail a gang that can never start because nodes that it needs are gone for good."""
        gang = self._ledger.gangs.get(action.gang)
        if gang is not None:
            gang.is_final = True
            self._lose(gang, action.node)

    def node_lost(self, node: int) -> None:
        for gang in list(self._ledger.gangs.values()):
            # Ranks on the node fail by themselves. Before that, only a gang that waits for its port would wait forever.
            if gang.placed[:1] == (node,) and not gang.port:
                self._lose(gang, node)

    def _lose(self, gang: Gang, node: int | None) -> None:
        gang.failures.append((0.0, 0, _lost_before(gang, node)))
        self._end(gang)

    # Hangs ----------------------------------------------------------------------------------------------------------

    def on_stack(self, task: RankTask, frame: Frame) -> None:
        """Take the stack of a rank, requested by the client or sent because the rank has stopped."""
        self._ledger.after.append(lambda: self._read_stack(task, frame))

    def _read_stack(self, task: RankTask, frame: Frame) -> None:
        assert task.rank is not None
        from .hangs import read_stack  # here and below: pools without gangs have no use for it

        answer = json.loads(frame.body)
        stack = read_stack(task.rank, task.node, answer["stack"], answer["state"])
        # Format the stack once before taking the lock. That reads the user's source files, and linecache keeps them.
        stack.text()
        with self._ledger:
            if task.id in task.gang.open and not task.gang.is_stopping:
                self._on_stack(task, stack, answer.get("stopped_s"))

    def _on_stack(self, task: RankTask, stack: RankStack, stopped_s: float | None) -> None:
        """Handle a stack. `stopped_s` is the time without progress; None: the client requested the stack."""
        gang = task.gang
        if stopped_s is None:
            for questions, judge in ((gang.hang, self._judge_hang), (gang.late, self._judge_late)):
                if questions is not None:
                    questions.add(stack)
                    if not questions.asked:
                        judge(gang.id, task.id)
        elif gang.hang is None and stack.waits_in:
            asked = self._ask(gang, will_end=gang.options.hang_timeout_s is not None)
            ended = tuple(sorted(gang.tasks.keys() - asked))
            from .hangs import Hang

            gang.hang = Hang(first=stack, waited_s=stopped_s, asked=asked, ended=ended)
            self._ledger.at(_STACKS_LIMIT_S, self._judge_hang, gang.id, task.id)

    def _ask(self, gang: Gang, *, will_end: bool) -> set[int]:
        """Request the stacks of the ranks that have not ended, and return their numbers."""
        asked = set()
        for rank, task in gang.tasks.items():
            if task.id in gang.open:
                # Writing the stacks of all threads can harm a healthy process, so only ranks that will be stopped do.
                self._ledger.tell(task.node, FrameKind.TAKE_STACK, task.id, lane=int(will_end))
                asked.add(rank)
        return asked

    def _time_out(self, task_id: int, _: int) -> None:
        """Request the stacks of all ranks. The first timeout of a rank is that of the gang."""
        task = self._ledger.tasks.get(task_id)
        if not isinstance(task, RankTask) or task.is_cancelled:
            return
        gang = task.gang
        if gang.late is None and not gang.is_stopping and task.rank is not None:
            from .hangs import Late

            gang.late = Late(rank=task.rank, asked=self._ask(gang, will_end=True))
            self._ledger.at(_STACKS_LIMIT_S, self._judge_late, gang.id, task.id)

    def _judge_late(self, gang_id: int, task_id: int) -> None:
        gang = self._of_start(gang_id, task_id)
        if gang is None or gang.late is None or gang.is_stopping:
            return
        error = gang.late.error(gang.name, gang.options.timeout_s or 0.0)
        gang.failures.append((0.0, gang.late.rank, error))
        self._stop_ranks(gang, self._grace_s)

    def _judge_hang(self, gang_id: int, task_id: int) -> None:
        """Decide whether the gang hangs, once all stacks have arrived or the time for them is over."""
        gang = self._of_start(gang_id, task_id)
        if gang is None or gang.hang is None or gang.is_stopping or gang.hang.is_judged:
            return
        if gang.tasks[gang.hang.first.rank].id not in gang.open or not gang.hang.is_real():
            gang.hang = None
            return
        gang.hang.is_judged = True
        error = gang.hang.error(gang.name)
        rank = min(error.ranks, default=gang.hang.first.rank)
        if gang.options.hang_timeout_s is None:
            report = [str(error), *error.__notes__, "The call keeps waiting; set hang_timeout_s= to stop such a call."]
            self._logs.say(gang.tasks[rank], gang.tasks[rank].node, "\n".join(report))
            return
        gang.failures.append((0.0, rank, error))
        self._stop_ranks(gang, _GRACE_S)


def _lost_before(gang: Gang, node: int | None) -> NodeLost:
    """Return the error of a gang that lost a node before its function had begun on any."""
    which = "a node" if node is None else f"node {node}"
    return NodeLost(
        f"{gang.name!r}: {which} was lost before it had begun; set max_restarts=1 or more, or send it again",
        node=node,
        started=False,
    )


def _settle(gang: Gang) -> None:
    gang.future.shown = gang.wait_shown
    if gang.failures:
        # The caller unpickles the error, as it does values, because that may import the user's modules.
        gang.future.settle_error(Undecoded(gang.raise_error))
    elif gang.is_cancelled:
        gang.future.settle_error(InternalError(f"{gang.name!r}: cancelled, but its value was read; report this bug"))
    elif not gang.is_complete:
        gang.future.settle_error(
            InternalError(f"{gang.name!r}: ended without the values of all its nodes; report this bug")
        )
    else:
        gang.future.settle(Undecoded(gang.value))
