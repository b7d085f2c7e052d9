"""Placement of tasks on nodes.

    submit ──> queued ──Send──> sent ──finished──> gone
                 ^                │
                 └── returned ────┤  recalled, or given back by a slot that died, before it began
                                  └── failed ──> gone  lost; the owner may submit it again

A task may go to any node, or to the nodes that it names. Nodes kept for a role take only tasks that name them.

A node runs one task per slot. While tasks are short, it also gets some in advance, so that a slot never waits for the
network: one per slot, plus as many as its slots finish during a round trip. They are recalled when another node falls
idle.

A gang starts only when all its nodes have room for its ranks at once. Once it is first in the queue, nothing new goes
to those nodes, so it cannot starve. An actor with resources is a gang of one node that takes no slot. A call made by a
task (`parent`) goes before all waiting entries, even gangs, because they may wait for that very task. It is refused if
it could never run; see `families`.

The owner feeds events and carries out the returned actions. It calls every method under its own lock.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from itertools import islice

from .actions import Action, FailTask, Recall, Refuse, Send
from .demand import measure_demand
from .families import Family
from .groups import Entry, GangEntry, Group, NodeEntry, TaskEntry
from .home import Home
from .node_table import NodeTable
from .reasons import why_blocked
from .recalls import Recalls
from .refusals import Refusals
from .resources import PLAIN, Booking, Need, Supply
from .running_gangs import RunningGangs
from .scaling import Demand
from .waiting_lines import FIRST_TURN, WaitingLines
from .waiting_order import WaitingOrder


class Scheduler:
    """State machine of placement; see the module. `kept` nodes take only tasks that name them."""

    def __init__(self, kept: frozenset[int] = frozenset()) -> None:
        self._nodes = NodeTable(kept)
        self._tasks: dict[int, TaskEntry] = {}
        self._waiting = WaitingLines()
        self._order = WaitingOrder(self._nodes, self._waiting)
        self._gangs = RunningGangs(self._nodes, self._order)
        self._family = Family(self._nodes, self._tasks, self._gangs.held)
        self._refusals = Refusals(self._nodes, self._tasks, self._waiting, self._order, self._family)
        self._recalls = Recalls(self._nodes, self._tasks)
        self._filling: NodeEntry | None = None
        """Node that got the last of many tasks."""
        self.recalls_later = False
        """Whether more news of nodes comes, and then `recall`. Until then most tasks that seem to wait have ended."""

    def counts(self) -> tuple[int, int]:
        """Return (busy slots, tasks and gangs that wait for a slot)."""
        busy = sum(min(node.load, node.slots) for node in self._nodes.by_id.values())
        ahead = sum(max(0, node.load - node.slots) for node in self._nodes.by_id.values())
        return busy, ahead + len(self._waiting)

    def running(self) -> dict[int, tuple[int, ...]]:
        """Return the tasks of each node that fill its slots, in the order in which they were sent."""
        return {node.id: tuple(islice(node.sent, node.slots)) for node in self._nodes.by_id.values()}

    def demand(self, resting: Collection[int]) -> Demand:
        """Return the work by node, and the work that waits. `resting`: nodes that are not there, and may come."""
        return measure_demand(self._nodes, self._tasks, self._waiting, resting)

    def is_wanted(self, node: int) -> bool:
        """Return whether a waiting task or gang names the node."""
        return any(node in (line.first.nodes or ()) for line in self._waiting.lines)

    # Events ---------------------------------------------------------------------------------------------------------

    def node_absent(self, node: int, slots: int) -> None:
        """Record a node that is not there, and may come. Tasks that can go to it only wait for it."""
        self._nodes.add(node, slots, is_up=False)

    def node_up(self, node: int, slots: int, supply: Supply | None = None) -> list[Action]:
        """Record that a node is there. `supply`: its resources; None: unknown, without devices."""
        self._order.changed(self._nodes.add(node, slots, supply))
        return self._refusals.drop_unfit() + self._place()

    def set_round_trip(self, node: int, round_trip_ns: float) -> list[Action]:
        """Set the round trip to a node; it is 0 at first, and on this machine."""
        known = self._nodes.by_id.get(node)
        if known is None:
            return []
        self._nodes.set_round_trip(known, round_trip_ns)
        self._order.changed(known)
        return self._place()

    def set_home(self, node: int) -> None:
        """Set the node beside this scheduler, where short tasks go first; see `home`."""
        if self.home != node:
            self._nodes.home = Home(self._nodes.by_id[node], self._waiting)

    def delay_home(self, delay_ns: float) -> None:
        """Set the shortest time until a task can begin on the home node; it is 0 at first."""
        if self._nodes.home is not None:
            self._nodes.home.delay_ns = delay_ns

    @property
    def home(self) -> int | None:
        home = self._nodes.home
        return None if home is None else home.node.id

    @property
    def needs_look(self) -> bool:
        """Return whether `look` is to be called in `LOOK_S` seconds: tasks wait for the home node."""
        home = self._nodes.home
        return home is not None and home.is_watched

    def look(self, unsent: int = 0) -> list[Action]:
        """Find out whether the home node is stuck, and place what waits for it in vain.

        Args:
            unsent: Tasks of that node that its owner has not sent yet.
        """
        if self._nodes.home is None:
            return []
        self._nodes.home.look(unsent)
        return self._place_elsewhere()

    def node_lost(self, node: int, *, will_return: bool) -> list[Action]:
        """Record that a node and its tasks are gone. `will_return`: a replacement takes its number soon."""
        lost = self._nodes.by_id.get(node)
        if lost is None:
            return []
        actions: list[Action] = []
        for task_id in lost.sent:
            self._forget(task_id)
            actions.append(FailTask(task_id, node, None))
        self._nodes.add(node, lost.slots, is_up=False)
        self._order.give_up(lost)
        self._gangs.node_lost(node)
        if not will_return:
            self._nodes.remove(node)
            actions += self._refusals.drop_homeless(node)
            actions += self._refusals.drop_unfit()
            actions += self._refusals.drop_deadlocked()
        return actions + self._place()

    def node_leaving(self, node: int) -> list[Action]:
        """Record that a node will soon be gone. Tasks that have not begun move, unless only this node may run them."""
        leaving = self._nodes.by_id.get(node)
        if leaving is None:
            return []
        leaving.is_leaving = True
        self._nodes.refile(leaving)
        self._order.give_up(leaving)
        actions: list[Action] = []
        for task_id in reversed(leaving.sent):
            task = self._tasks[task_id]
            if (task.nodes is None or len(task.nodes) > 1) and task.in_advance and not task.is_recalled:
                task.is_recalled = True
                actions.append(Recall(task_id, node))
        return actions

    def node_staying(self, node: int) -> list[Action]:
        """Record that a node that was leaving stays after all."""
        known = self._nodes.by_id.get(node)
        if known is not None:
            known.is_leaving = False
            self._order.changed(known)
            self._recalls.node_resumed(known)
        return self._place()

    def is_idle(self, node: int) -> bool:
        """Return whether nothing runs on the node, or is on its way there."""
        known = self._nodes.by_id.get(node)
        return known is None or not known.load

    def node_paused(self, node: int) -> list[Action]:
        """Record that the link to a node is broken. It may come back, and tasks there may still end."""
        known = self._nodes.by_id.get(node)
        if known is not None:
            known.is_reachable = False
            self._nodes.refile(known)
            self._order.give_up(known)
        return []

    def node_resumed(self, node: int) -> list[Action]:
        known = self._nodes.by_id.get(node)
        if known is not None:
            known.is_reachable = True
            self._order.changed(known)
            self._recalls.node_resumed(known)
        return self._place()

    def submit(
        self,
        task: int,
        *,
        nodes: tuple[int, ...] | None = None,
        in_advance: bool = True,
        expected_ns: float | None = None,
        parent: int | None = None,
        is_rerun: bool = False,
        prefer: tuple[int, ...] = (),
        need: Need | None = None,
        in_bulk: bool = True,
        is_of_many: bool = False,
        is_typical: bool = True,
    ) -> list[Action]:
        """Queue a task, and place it if there is room.

        A task waits for one of its nodes to come back, and fails once all are gone for good.

        Args:
            task: Number of the task.
            nodes: Nodes that it may go to; None for any that is not kept.
            in_advance: Whether it may be sent before a slot is free. False: it begins when it is sent.
            expected_ns: Expected duration, if known before any task has ended.
            parent: The running task or gang that calls it, or None.
            is_rerun: Whether it has run before and goes before all tasks that wait.
            prefer: Nodes that it goes to if one of them has a free slot when it is placed.
            need: Its resources, if it has any numbers of its own. Such a task is not sent in advance.
            in_bulk: Whether it may be one of many tiny tasks that are sent in advance. False: there are few of them.
            is_of_many: Whether it comes together with others. Short ones fill the free slots of one node after the
                other, so that one write carries several of them.
            is_typical: Whether it takes as long as others, if `expected_ns` does not say it.
        """
        least_ns = expected_ns or (0.0 if is_typical else math.inf)
        are_shorter = expected_ns is not None and self._nodes.expect(expected_ns)
        is_plain = nodes is None and need is None and parent is None and not (is_rerun or are_shorter)
        if is_plain and (line := self._waiting.line_of(self._nodes.open)) is not None and not line.is_ready:
            # Many calls wait like this one, and whatever keeps them keeps it too.
            self._tasks[task] = made = TaskEntry(task, None, in_advance, in_bulk, least_ns)
            made.prefer = prefer
            self._waiting.append_to(line, made)
            return self._place_elsewhere() if self._nodes.takes_back() else []
        # Nested calls are never sent in advance: behind a task that waits for them they would never start.
        made = TaskEntry(task, nodes, in_advance and parent is None and need is None, parent=parent, need=need)
        made.prefer, made.in_bulk, made.least_ns = prefer, in_bulk, least_ns
        if self._nodes.are_gone(nodes):
            return [FailTask(task, nodes[0] if nodes else None, False)]
        group = self._nodes.group(nodes, need)
        if need is not None and not group.members:
            return [Refuse(task, (), self._refusals.why(nodes, need))]
        self._tasks[task] = made
        if parent is not None:
            return self._queue_nested(made)
        if not self._waiting.count:  # the common case: nothing waits, so no order to respect
            made.turn = FIRST_TURN
            node = self._pick_of_many(made, group) if is_of_many else self._pick(made, group)
            if node is not None:
                if in_bulk and self._nodes.has_many_ahead(node):
                    self._order.wait_for_event(made, group)
                    return []
                return [self._send(made, group, node)]
        if is_rerun:
            self._return(made)
            return self._place()
        line = self._order.wait(made, group)
        if are_shorter:
            self._waiting.make_ready(line)
        return self._place()

    def take_up(
        self,
        task: int,
        node: int,
        *,
        nodes: tuple[int, ...] | None = None,
        need: Need | None = None,
        devices: tuple[int, ...] | None = None,
    ) -> None:
        """Record a task that runs on a node already: the owner has it from another scheduler, which is gone.

        Args:
            task: Number of the task.
            node: The node, which is there.
            nodes: Nodes that it may go to, if it is lost and runs again.
            need: Its resources, if it has any numbers of its own.
            devices: Devices of the node that it has; None: those of its slot.
        """
        made = self._tasks[task] = TaskEntry(task, nodes, False, need=need)
        made.node = self._nodes.by_id[node]
        made.node.sent[task] = None if made.node.stock is None else self._nodes.book(made.node, need, devices)
        self._nodes.refile(made.node)

    def submit_gang(
        self,
        gang: int,
        *,
        nodes: tuple[int, ...] | None,
        places: int,
        some_of: tuple[int, ...] | None = None,
        count: int = 1,
        parent: int | None = None,
        need: Need | None = None,
    ) -> list[Action]:
        """Queue a gang, and start it if there is room.

        Args:
            gang: Number of the gang.
            nodes: Nodes that it needs, all of them; None for any `count` nodes of `some_of`.
            places: Slots that it takes on each node.
            some_of: Nodes to choose from; None for those that are not kept.
            count: Number of nodes to choose.
            parent: The running task or gang that calls it, or None.
            need: Its resources on each node, besides its places.
        """
        need = (need or PLAIN)._replace(slots=places, is_gang=True)
        return self._queue(GangEntry(gang, nodes, some_of, need, count, parent))

    def take_up_gang(
        self, gang: int, *, places: int, need: Need | None, devices: Mapping[int, tuple[int, ...] | None]
    ) -> None:
        """Record a gang whose ranks run already; see `take_up`. `devices`: those that it has booked, by its nodes."""
        self._gangs.take_up(gang, (need or PLAIN)._replace(slots=places, is_gang=True), devices)

    def submit_actor(self, actor: int, *, nodes: tuple[int, ...] | None, need: Need) -> list[Action]:
        """Queue an actor that books resources for its life, and settle it if there is room.

        Args:
            actor: Number of the actor.
            nodes: Nodes that it may live on; None for any that is not kept.
            need: Its resources, which include no slot.
        """
        return self._queue(GangEntry(actor, None, nodes, need._replace(slots=0)))

    def take_up_actor(self, actor: int, node: int, need: Need, devices: tuple[int, ...] | None) -> None:
        """Record an actor that lives on a node already, with these devices of it; see `take_up`."""
        self._gangs.take_up(actor, need._replace(slots=0), {node: devices})
        self._order.give_up_for_actor(self._nodes.by_id[node])

    def actor_gone(self, actor: int) -> list[Action]:
        """Record that the process of an actor is gone, or that the actor waits no longer."""
        return self.gang_finished(actor)

    def _queue(self, gang: GangEntry) -> list[Action]:
        """Queue a gang or actor, and start it if there is room."""
        refusal = self._refusals.of_new(gang)
        if refusal is not None:
            return [refusal]
        if gang.parent is not None:
            return self._queue_nested(gang)
        self._order.wait(gang, self._nodes.group_of(gang))
        return self._place()

    def _queue_nested(self, call: Entry) -> list[Action]:
        """Queue a call of a task before all waiting entries. Refused if it cannot start, now or later."""
        self._family.add(call.parent, call)
        self._order.wait(call, self._nodes.group_of(call), is_urgent=True)
        actions = self._place()
        return actions + self._refusals.drop_deadlocked(call)

    def finished(self, task: int, elapsed_ns: int | None = None) -> list[Action]:
        """Record that a task ended, well or badly, and will not run again."""
        ended = self._tasks.get(task)
        if ended is None:
            return []
        home = self._nodes.home
        if home is not None and ended.node is home.node:
            home.task_ended()
        if (elapsed_ns is not None and self._nodes.took(elapsed_ns)) or self._nodes.takes_back():
            self._waiting.wake(self._nodes.open)
        elif (successor := self._let_next_follow(ended)) is not None:
            return [successor]
        self.drop(task)
        return self._place()

    def _let_next_follow(self, ended: TaskEntry) -> Send | None:
        """Put the next waiting task in the place of one that has ended, if `drop` and `_place` would do the same.

        That is so while many plain calls wait, and nothing else: all nodes are full before and after. No node changes
        its room, so none is filed, and the line is not tried in vain.
        """
        line, node = self._waiting.only_blocked_line, ended.node
        if line is None or line.key is not self._nodes.open or ended.parent is not None or node is None:
            return None
        first, then = line.first, line.second
        if (
            not (isinstance(first, TaskEntry) and isinstance(then, TaskEntry) and first.in_advance and then.in_advance)
            or first.prefer
            or line.wanted
            or first.in_bulk != then.in_bulk
            or not node.takes_more
            or node.id not in line.group.members
            or (node.stock is not None and node.stock.devices)
            or self._nodes.leaves_out(node, first)
            or -node.room != self._nodes.most_ahead(node.kind, in_bulk=first.in_bulk)
            or node.sent.get(ended.id, ended) is not None
        ):
            return None
        del self._tasks[ended.id], node.sent[ended.id]
        self._waiting.remove_first(line)
        line.blocked = then
        first.node, first.is_recalled = node, False
        node.sent[first.id] = None
        if node.room < 0:
            self._recalls.sent_in_advance(first, line.group, node)
        return Send(first.id, node.id)

    def drop(self, task: int) -> None:
        """Forget a task like `finished`, but leave its place empty, because the loss of its node comes next."""
        dropped = self._forget(task)
        if dropped is None:
            return
        if dropped.node is None:
            self._order.stop_waiting(dropped)
        else:
            self._forget_sent(dropped)

    def lost(self, task: int, *, started: bool) -> list[Action]:
        """Record that the slot died under a task (`started`), or that the node returned it unbegun."""
        returned = self._tasks.get(task)
        if returned is None or returned.node is None:
            return []
        node = returned.node.id
        self._forget_sent(returned)
        if not started:
            self._return(returned)
            return self._place()
        self._forget(task)
        return [FailTask(task, node, True), *self._place()]

    def cancel(self, task: int) -> int | None:
        """Forget a queued task and return None, or return the node of a sent task, which stays until `finished`."""
        known = self._tasks.get(task)
        if known is None:
            return None
        if known.node is None:
            self._order.stop_waiting(known)
            self._forget(task)
            return None
        return known.node.id

    def gang_finished(self, gang: int) -> list[Action]:
        """Record that all processes of a gang are gone, or that it never started."""
        self._family.remove(gang)
        for node, booking in self._gangs.end(gang):
            self._release(node, booking)
        waiting = self._waiting.gangs.get(gang)
        if waiting is not None:
            self._order.stop_waiting(waiting)
        return self._place()

    # Questions ------------------------------------------------------------------------------------------------------

    def node_of(self, task: int) -> int | None:
        known = self._tasks.get(task)
        return None if known is None or known.node is None else known.node.id

    @property
    def has_backlog(self) -> bool:
        """Return whether plain calls wait that may go to any node, so that another one would only wait behind them.

        Needs no lock.
        """
        return self._waiting.line_of(self._nodes.open) is not None

    @property
    def queued(self) -> int:
        return len(self._waiting)

    def refusal(self, nodes: tuple[int, ...] | None, need: Need, count: int = 1) -> str:
        """Return why this number of nodes can never hold a need; "" if they can, or if a node is not known yet."""
        return self._refusals.why(nodes, need, count)

    def why_waiting(self, call: int) -> str:
        """Return why a task or gang has not begun, in one sentence; "" if it has, or is not known."""
        entry = self._tasks.get(call) or self._waiting.gangs.get(call)
        if entry is not None and entry.line is not None:
            return why_blocked(entry.line, self._nodes, is_first=entry.line.first is entry)
        node = entry.node if isinstance(entry, TaskEntry) else None
        if node is not None and call in islice(node.sent, node.slots, None):
            return f"waits for a slot of node {node.id}: it was sent there in advance"
        return ""

    def why_oldest(self) -> str:
        """Return what the oldest waiting call lacks; "" if none waits, or only for a slot."""
        oldest = min(self._waiting.lines, key=lambda line: line.first.turn, default=None)
        if oldest is None or oldest.first.need is None:
            return ""
        return why_blocked(oldest, self._nodes, is_first=True)

    # Placing --------------------------------------------------------------------------------------------------------

    def _place(self) -> list[Action]:
        """Place what can be placed, oldest first, in the lines that an event may have helped."""
        actions: list[Action] = []
        changed, to_try = self._order.changed_nodes, self._waiting.ready
        if not (changed or to_try) and (self._waiting.count or not self._recalls):  # the common case
            return actions
        while changed or to_try:
            if changed and (fill := self._order.next_to_fill()) is not None:
                line, task, node = fill
                actions.append(self._send(task, line.group, node))
                self._order.follow(line, task)
                continue
            if (ready := self._waiting.take_ready()) is None:
                continue
            line, entry = ready, ready.first
            if not (isinstance(entry, GangEntry) and entry.nodes is not None):
                self._order.reserve_before(entry.turn)
            action = (
                self._gangs.start(entry, line) if isinstance(entry, GangEntry) else self._place_task(entry, line.group)
            )
            if action is None:
                self._order.block(line, entry)
            else:
                actions.append(action)
                self._order.stop_waiting(entry)
        if not self._waiting.count and not self.recalls_later:
            # Tasks that wait on one node, while slots of another are idle. The answer is `lost(started=False)`.
            for sent in self._recalls.take():
                assert sent.node is not None
                sent.is_recalled = True
                actions.append(Recall(sent.id, sent.node.id))
        return actions

    def _place_elsewhere(self) -> list[Action]:
        """Place tasks that have waited for the home node on others."""
        self._waiting.wake(self._nodes.open)
        return self._place()

    def recall(self) -> list[Action]:
        """Recall tasks that wait on a node while slots of another are idle. End the time of `recalls_later`."""
        self.recalls_later = False
        return self._place()

    def _place_task(self, task: TaskEntry, group: Group) -> Send | None:
        node = self._pick(task, group)
        return None if node is None else self._send(task, group, node)

    def _pick(self, task: TaskEntry, group: Group) -> NodeEntry | None:
        """Return the node for a task; None if none has room for it."""
        node = self._nodes.preferred(task.prefer, group, task.turn) if task.prefer else None
        return node or self._nodes.pick(
            group, task.turn, ahead=task.in_advance, in_bulk=task.in_bulk, least_ns=task.least_ns
        )

    def _pick_of_many(self, task: TaskEntry, group: Group) -> NodeEntry | None:
        """Return the node that got the last of many tasks, if it may take one more; otherwise that of `_pick`."""
        node = self._filling
        if node is None or task.prefer or not self._nodes.may_fill(node, group) or self._nodes.leaves_out(node, task):
            node = self._filling = self._pick(task, group)
        return node

    def _send(self, task: TaskEntry, group: Group, node: NodeEntry) -> Send:
        task.node = node
        task.is_recalled = False
        booking = None if node.stock is None else self._nodes.book(node, task.need)
        node.sent[task.id] = booking
        self._nodes.refile(node)
        if node.room < 0:
            self._recalls.sent_in_advance(task, group, node)
        return Send(task.id, node.id, None if booking is None else booking.devices)

    def _release(self, node: NodeEntry, booking: Booking | None) -> None:
        if booking is not None:
            self._nodes.release(node, booking)
            if booking.is_for_life:
                self._order.actor_left(node)
                return
        self._order.changed(node)

    # Bookkeeping ----------------------------------------------------------------------------------------------------

    def _forget_sent(self, task: TaskEntry) -> None:
        node, task.node = task.node, None
        if node is not None:
            self._release(node, node.sent.pop(task.id, None))

    def _forget(self, task: int) -> TaskEntry | None:
        """Remove a task from the ledger, whatever its outcome."""
        known = self._tasks.pop(task, None)
        if known is not None and known.parent is not None:
            self._family.remove(task)
        return known

    def _return(self, task: TaskEntry) -> None:
        task.node = None
        self._order.wait(task, self._nodes.group(task.nodes, task.need), is_first=True)
