"""The scheduler against a model of what a pool may see, under events in any order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from skyward.schedule.actions import Action, FailGang, FailTask, Recall, Refuse, Send, StartGang
from skyward.schedule.node_table import SHORT_TASK_NS
from skyward.schedule.resources import Need, Supply
from skyward.schedule.scheduler import Scheduler

AHEAD = 2
"""Tasks that a node may be sent beyond its slots while tasks are short."""
FAR_AHEAD = 1024
"""Over any round trip."""


def up(*slots: int, kept: tuple[int, ...] = ()) -> Scheduler:
    scheduler = Scheduler(frozenset(kept))
    for node, count in enumerate(slots):
        scheduler.node_up(node, count)
    return scheduler


def make_short(scheduler: Scheduler) -> None:
    """Make the scheduler believe that tasks are short, so that it sends in advance."""
    scheduler.submit(-1)
    scheduler.finished(-1, 2_000_000)


def make_very_short(scheduler: Scheduler) -> None:
    scheduler.submit(-1, expected_ns=2_000_000)
    scheduler.finished(-1, 2_000_000)


def submit(scheduler: Scheduler, count: int, **options: Any) -> list[Action]:
    return [action for task in range(count) for action in scheduler.submit(task, **options)]


def nodes_of(actions: list[Action]) -> list[int]:
    return [action.node for action in actions if isinstance(action, Send)]


# Single facts -------------------------------------------------------------------------------------------------------


def test_tasks_go_to_the_node_with_most_room() -> None:
    assert submit(up(1, 3), 3) == [Send(0, 1), Send(1, 1), Send(2, 0)]


def test_a_task_that_runs_already_has_its_slot_and_its_devices() -> None:
    scheduler = Scheduler()
    scheduler.node_up(0, 2, Supply(cpus=2, memory_gib=1.0, devices=("A100", "A100")))
    one = Need(devices=1000)
    scheduler.take_up(7, 0, need=one, devices=(0,))
    assert scheduler.submit(8, need=one) == [Send(8, 0, (1,))]
    assert scheduler.submit(9, need=one) == []
    assert scheduler.finished(7) == [Send(9, 0, (0,))]
    assert scheduler.node_of(7) is None


def test_a_gang_that_runs_already_has_its_places_and_its_devices() -> None:
    scheduler, one = Scheduler(), Need(devices=1000)
    for node in (0, 1):
        scheduler.node_up(node, 2, Supply(cpus=2, memory_gib=1.0, devices=("A100", "A100")))
    scheduler.take_up_gang(7, places=1, need=one, devices={0: (0,), 1: (1,)})
    assert scheduler.submit_gang(8, nodes=(0, 1), places=1, need=one) == [StartGang(8, (0, 1), ((1,), (0,)))]
    assert scheduler.submit_gang(9, nodes=(0, 1), places=2) == []
    assert scheduler.gang_finished(7) == []
    assert [type(action) for action in scheduler.gang_finished(8)] == [StartGang]


def test_a_task_waits_for_a_slot_and_gets_the_first_that_is_free() -> None:
    scheduler = up(1, 1)
    submit(scheduler, 3)
    assert scheduler.node_of(2) is None
    assert scheduler.finished(1) == [Send(2, 1)]


def test_short_tasks_are_sent_in_advance_and_long_ones_are_not() -> None:
    short, long = up(1), up(1)
    make_short(short)
    long.submit(-1)
    long.finished(-1, 100 * SHORT_TASK_NS)
    assert len(submit(short, 9)) == 1 + AHEAD
    assert len(submit(long, 9)) == 1


def test_many_tiny_tasks_wait_for_an_event_and_then_go_together() -> None:
    scheduler = up(1)
    scheduler.submit(-1, expected_ns=1000)
    scheduler.finished(-1, 1000)
    at_once = submit(scheduler, 300)
    assert at_once == [Send(task, 0) for task in range(9)]
    assert scheduler.has_backlog
    assert scheduler.finished(0, 1000) == [Send(task, 0) for task in range(9, 258)]
    assert scheduler.finished(1, 1000) == [Send(258, 0)]


def test_many_short_tasks_that_come_together_fill_one_node_after_the_other() -> None:
    short = up(3, 3, 3)
    make_very_short(short)
    assert nodes_of(submit(short, 9, is_of_many=True)) == [1, 1, 1, 2, 2, 2, 0, 0, 0]


def test_many_tasks_spread_over_the_nodes_if_they_are_long_or_of_unknown_length() -> None:
    unknown, long = up(3, 3), up(3, 3)
    long.submit(-1)
    long.finished(-1, 500_000_000)
    for scheduler in (unknown, long):
        assert sorted(nodes_of(submit(scheduler, 4, is_of_many=True))) == [0, 0, 1, 1]


def test_many_tasks_fill_no_node_that_takes_no_more() -> None:
    scheduler = up(4, 4)
    make_very_short(scheduler)
    (first,) = nodes_of(scheduler.submit(0, is_of_many=True))
    scheduler.node_paused(first)
    (second,) = nodes_of(scheduler.submit(1, is_of_many=True))
    assert second != first


def test_nothing_is_sent_in_advance_before_the_length_of_a_task_is_known() -> None:
    near, far = up(1), up(1)
    far.set_round_trip(0, 100e6)
    assert len(submit(near, 9)) == 1
    assert len(submit(far, 9)) > 1  # a round trip is long compared with the assumed time of a task


def test_a_node_is_sent_one_short_task_in_advance_for_each_slot() -> None:
    scheduler = up(5)
    make_short(scheduler)
    assert len(submit(scheduler, 20)) == 5 + 5


def test_a_distant_node_is_sent_the_tasks_that_its_slots_end_in_a_round_trip() -> None:
    scheduler = up(2)
    for task in range(100):
        scheduler.submit(-1 - task)
        scheduler.finished(-1 - task, 1_000_000)  # 1 ms each
    scheduler.set_round_trip(0, 50e6)
    assert 2 + 2 * 50 <= len(submit(scheduler, 500)) <= 2 + 2 * 50 + 10


def test_a_distant_node_is_sent_no_more_than_a_limit() -> None:
    scheduler = up(2)
    make_short(scheduler)
    for _ in range(100):
        scheduler.submit(-1)
        scheduler.finished(-1, 1)
    scheduler.set_round_trip(0, 10e9)
    assert len(submit(scheduler, 5000)) == 2 + FAR_AHEAD


def test_tasks_of_two_seconds_are_sent_in_advance_if_the_round_trip_is_a_notable_part() -> None:
    near, far = up(1), up(1)
    for scheduler in (near, far):
        for _ in range(100):
            scheduler.submit(-1)
            scheduler.finished(-1, 2_000_000_000)
    far.set_round_trip(0, 100e6)
    assert len(submit(near, 9)) == 1
    assert len(submit(far, 9)) > 1


def test_tasks_that_wait_for_a_measured_round_trip_go_when_it_is_known() -> None:
    scheduler = up(1)
    make_short(scheduler)
    sent = submit(scheduler, 50)
    assert len(sent) + len(scheduler.set_round_trip(0, 10e9)) == 50


def test_nothing_goes_over_a_broken_link_and_sent_tasks_stay() -> None:
    scheduler = up(1, 1)
    assert submit(scheduler, 1) == [Send(0, 0)]
    scheduler.node_paused(0)
    assert scheduler.submit(1) == [Send(1, 1)]
    assert scheduler.submit(2, nodes=(0,)) == []
    assert scheduler.finished(0) == []
    assert scheduler.node_resumed(0) == [Send(2, 0)]


def test_a_leaving_node_gets_nothing_new_and_gives_back_tasks_that_have_not_begun() -> None:
    scheduler = up(1, 1)
    make_short(scheduler)
    submit(scheduler, 4)
    on_first = [task for task in range(4) if scheduler.node_of(task) == 0]
    assert scheduler.node_leaving(0) == [Recall(task, 0) for task in reversed(on_first)]
    assert scheduler.lost(on_first[1], started=False) == [Send(on_first[1], 1)]
    assert scheduler.submit(10, nodes=(0,)) == []
    assert not scheduler.is_idle(0)
    scheduler.finished(on_first[0])  # it had begun, so it went on
    assert scheduler.is_idle(0)
    assert all(isinstance(action, Send) and action.node == 1 for action in submit(scheduler, 3))
    scheduler.node_lost(0, will_return=True)
    assert Send(10, 0) in scheduler.node_up(0, 1)


def test_a_task_that_must_begin_when_it_is_sent_waits_for_a_free_slot() -> None:
    scheduler = up(1)
    make_short(scheduler)
    assert submit(scheduler, 2, in_advance=False) == [Send(0, 0)]
    assert scheduler.finished(0) == [Send(1, 0)]


def test_waiting_tasks_of_a_busy_node_are_recalled_for_an_idle_one() -> None:
    scheduler = up(1, 1)
    make_short(scheduler)
    sent = submit(scheduler, 6)
    assert len(sent) == 6
    on_first = [a.task for a in sent if isinstance(a, Send) and a.node == 0]
    recalled: list[Action] = []
    for task in on_first:
        recalled += scheduler.finished(task)
    (recall,) = [a for a in recalled if isinstance(a, Recall)][:1]
    assert recall.node == 1
    assert scheduler.lost(recall.task, started=False) == [Send(recall.task, 0)]


def test_recalls_wait_while_more_news_of_nodes_is_at_hand() -> None:
    scheduler = up(1, 1)
    make_short(scheduler)
    sent = submit(scheduler, 6)
    scheduler.recalls_later = True
    by_node = [[a.task for a in sent if isinstance(a, Send) and a.node == node] for node in (0, 1)]
    assert [action for task in by_node[0] for action in scheduler.finished(task)] == []
    ended, *waiting = by_node[1]
    assert scheduler.finished(ended) == []
    (recall,) = scheduler.recall()
    assert recall == Recall(waiting[-1], 1)


def test_a_pinned_task_waits_for_its_node_and_no_other() -> None:
    scheduler = up(1, 1)
    submit(scheduler, 1, nodes=(1,))
    assert scheduler.submit(5, nodes=(1,)) == []
    assert scheduler.node_lost(1, will_return=True) == [FailTask(0, 1, None)]
    assert scheduler.node_up(1, 1) == [Send(5, 1)]
    assert scheduler.node_lost(1, will_return=False) == [FailTask(5, 1, None)]
    assert scheduler.submit(6, nodes=(1,)) == [FailTask(6, 1, False)]


def test_a_task_that_had_begun_fails_and_goes_first_if_it_is_submitted_again() -> None:
    scheduler = up(1)
    submit(scheduler, 3)
    assert scheduler.lost(0, started=False) == [Send(0, 0)]
    assert scheduler.lost(0, started=True) == [FailTask(0, 0, True), Send(1, 0)]
    assert scheduler.lost(0, started=True) == []
    assert scheduler.submit(0, is_rerun=True) == []
    assert scheduler.finished(1) == [Send(0, 0)]


def test_a_task_dropped_before_its_node_is_lost_frees_no_place() -> None:
    scheduler = up(1)
    submit(scheduler, 2)
    scheduler.drop(0)
    assert scheduler.node_lost(0, will_return=True) == []
    assert scheduler.node_up(0, 1) == [Send(1, 0)], "it was never sent, so it moves freely"


def test_a_gang_starts_when_all_its_nodes_have_room_at_once() -> None:
    scheduler = up(1, 1)
    submit(scheduler, 2)
    assert scheduler.submit_gang(100, nodes=(0, 1), places=1) == []
    assert scheduler.finished(0) == []
    assert scheduler.submit(7) == [], "nothing overtakes it"
    assert scheduler.finished(1) == [StartGang(100, (0, 1))]
    assert scheduler.gang_finished(100) == [Send(7, 0)] or scheduler.node_of(7) is not None


def test_a_gang_larger_than_its_node_takes_it_whole() -> None:
    scheduler = up(2)
    assert scheduler.submit_gang(1, nodes=(0,), places=8) == [StartGang(1, (0,))]
    assert scheduler.submit(2) == []
    assert scheduler.gang_finished(1) == [Send(2, 0)]


def test_a_gang_that_finishes_after_its_node_came_back_frees_no_place_of_another() -> None:
    scheduler = up(1, 1)
    assert scheduler.submit_gang(1, nodes=(0, 1), places=1) == [StartGang(1, (0, 1))]
    scheduler.node_lost(0, will_return=True)
    scheduler.node_up(0, 1)
    assert scheduler.submit_gang(2, nodes=(0,), places=1) == [StartGang(2, (0,))]
    scheduler.gang_finished(1)
    assert scheduler.submit(5, nodes=(0,)) == [], "the second gang is still there"


def test_a_gang_whose_node_is_gone_for_good_fails() -> None:
    scheduler = up(1, 1)
    submit(scheduler, 2)
    scheduler.submit_gang(1, nodes=(0, 1), places=1)
    assert FailGang(1, 1) in scheduler.node_lost(1, will_return=False)
    assert scheduler.submit_gang(2, nodes=(0, 1), places=1) == [FailGang(2, 1)]


def test_a_task_for_some_nodes_goes_to_one_of_those_and_fails_when_all_are_gone() -> None:
    scheduler = up(1, 1, 1)
    assert submit(scheduler, 2, nodes=(0, 2)) == [Send(0, 0), Send(1, 2)]
    assert scheduler.submit(5, nodes=(0, 2)) == [], "node 1 is idle, and not for it"
    assert scheduler.node_lost(0, will_return=False) == [FailTask(0, 0, None)]
    assert scheduler.finished(1) == [Send(5, 2)]
    assert scheduler.node_lost(2, will_return=False) == [FailTask(5, 2, None)]
    assert scheduler.submit(6, nodes=(0, 2)) == [FailTask(6, 0, False)]


def test_a_kept_node_takes_only_tasks_that_name_it() -> None:
    scheduler = up(1, 1, kept=(1,))
    assert submit(scheduler, 3) == [Send(0, 0)]
    assert scheduler.submit_gang(10, nodes=None, places=1) == [], "any node: of those that are not kept"
    assert scheduler.submit(11, nodes=(1,)) == [Send(11, 1)], "what waits for other nodes is not in its way"
    assert scheduler.finished(0) == [Send(1, 0)]


def test_calls_for_any_node_fail_when_only_kept_ones_are_left() -> None:
    scheduler = up(1, 1, kept=(1,))
    submit(scheduler, 2)
    assert scheduler.node_lost(0, will_return=False) == [FailTask(0, 0, None), FailTask(1, 0, False)]
    assert scheduler.submit(5) == [FailTask(5, None, False)]
    assert scheduler.submit(6, nodes=(1,)) == [Send(6, 1)]


def test_waiting_tasks_of_a_busy_node_are_recalled_only_for_a_node_they_may_use() -> None:
    scheduler = up(1, 1, 1)
    make_short(scheduler)
    sent = submit(scheduler, 6, nodes=(0, 1))
    on_first = [a.task for a in sent if isinstance(a, Send) and a.node == 0]
    assert len(on_first) == 3, "node 2 is idle, and nothing is recalled for it"
    recalled = [action for task in on_first for action in scheduler.finished(task)]
    assert [type(action) for action in recalled] == [Recall]


def test_a_gang_of_one_node_starts_on_a_node_it_may_use() -> None:
    scheduler = up(1, 1, 1, kept=(2,))
    assert scheduler.submit_gang(1, nodes=None, some_of=(1, 2), places=1) == [StartGang(1, (1,))]
    assert scheduler.submit_gang(2, nodes=None, some_of=(1, 2), places=1) == [StartGang(2, (2,))]
    assert scheduler.submit_gang(3, nodes=None, some_of=(1, 2), places=1) == []
    assert scheduler.submit(4) == [Send(4, 0)]
    assert scheduler.gang_finished(2) == [StartGang(3, (2,))]


def test_a_gang_of_any_node_does_not_overtake_an_older_task_that_waits_for_the_node() -> None:
    scheduler = up(1, 1, 1)
    scheduler.node_paused(0)
    scheduler.submit_gang(1, nodes=None, places=1)
    scheduler.submit(2)
    assert scheduler.submit(3, nodes=(0,)) == []
    assert scheduler.submit_gang(4, nodes=None, places=1) == []
    assert scheduler.submit(5, nodes=(1, 2), in_advance=False) == []
    assert scheduler.cancel(5) is None  # now the gang is to be tried again
    assert scheduler.node_resumed(0) == [Send(3, 0)]


# Calls of tasks -----------------------------------------------------------------------------------------------------


def test_calls_of_a_task_go_before_all_waiting_ones_in_their_order() -> None:
    scheduler = up(1, 1)
    assert submit(scheduler, 2) == [Send(0, 0), Send(1, 1)]
    scheduler.submit_gang(10, nodes=(0, 1), places=1)
    scheduler.submit(11, nodes=(1,))
    assert scheduler.submit(20, nodes=(1,), parent=0) == []
    assert scheduler.submit(21, nodes=(1,), parent=0) == []
    assert scheduler.finished(1) == [Send(20, 1)], "the gang waits for its parent"
    assert scheduler.finished(20) == [Send(21, 1)]
    assert scheduler.finished(21) == []
    assert scheduler.finished(0) == [StartGang(10, (0, 1))]


def test_a_call_of_a_task_is_sent_only_to_a_free_slot() -> None:
    scheduler = up(1, 1)
    make_short(scheduler)
    scheduler.submit(0, nodes=(0,))
    scheduler.submit(1, nodes=(1,))
    assert scheduler.submit(2, nodes=(1,), parent=0) == []
    assert scheduler.submit(3) == [Send(3, 0)], "what is sent in advance does not go where it waits"
    assert scheduler.finished(1) == [Send(2, 1)]


def test_a_task_that_calls_for_its_own_slot_is_refused() -> None:
    scheduler = up(1, 2)
    scheduler.submit(0, nodes=(0,))
    assert scheduler.submit(1, nodes=(0,), parent=0) == [Refuse(1, (0,))]
    assert scheduler.submit(2, nodes=(0, 1), parent=0) == [Send(2, 1)]
    scheduler.submit(3, nodes=(1,))
    assert scheduler.submit(4, nodes=(1,), parent=3) == [], "the other slot there ends"
    assert scheduler.finished(2) == [Send(4, 1)]
    assert scheduler.queued == 0


def test_a_cycle_of_calls_is_refused_where_it_closes() -> None:
    scheduler = up(1, 1, 1)
    for task in range(3):
        scheduler.submit(task, nodes=(task,))
    assert scheduler.submit(10, nodes=(1,), parent=0) == []
    assert scheduler.submit(11, nodes=(2,), parent=1) == []
    assert scheduler.submit(12, nodes=(0, 1), parent=2) == [Refuse(12, (0, 1))]
    assert scheduler.finished(2) == [Send(11, 2)]
    assert scheduler.submit(13, nodes=(0, 1, 2), parent=11) == [Refuse(13, (0, 1, 2))]
    scheduler.finished(11)
    assert scheduler.finished(1) == [Send(10, 1)]


def test_a_call_waits_for_a_task_that_waits_for_a_running_one() -> None:
    scheduler = up(1, 1, 1)
    scheduler.submit(0, nodes=(0,))
    scheduler.submit(1, nodes=(1,))
    assert scheduler.submit(10, nodes=(2,), parent=1) == [Send(10, 2)]
    assert scheduler.submit(11, nodes=(1,), parent=0) == [], "1 ends when 10 has"


def test_a_gang_that_calls_for_its_own_places_is_refused() -> None:
    scheduler = up(2, 1, 1)
    scheduler.submit_gang(1, nodes=(0, 1), places=1)
    assert scheduler.submit_gang(2, nodes=(1, 2), places=1, parent=1) == [Refuse(2, (1, 2))]
    assert scheduler.submit_gang(3, nodes=None, some_of=(1, 2), places=1, parent=1) == [StartGang(3, (2,))]
    assert scheduler.submit_gang(4, nodes=(0, 2), places=1, parent=1) == [], "3 ends"
    assert scheduler.submit_gang(5, nodes=None, some_of=(0,), places=2, parent=1) == [Refuse(5, (0,))]
    assert scheduler.gang_finished(3) == [StartGang(4, (0, 2))]


def test_a_call_that_can_no_longer_start_when_a_node_is_gone_is_refused() -> None:
    scheduler = up(1, 1)
    scheduler.submit(0, nodes=(0,))
    scheduler.submit(1, nodes=(1,))
    assert scheduler.submit(2, nodes=(0, 1), parent=0) == []
    assert scheduler.node_lost(1, will_return=True) == [FailTask(1, 1, None)]
    assert scheduler.node_lost(1, will_return=False) == [Refuse(2, (0,))]


# Any order of events ------------------------------------------------------------------------------------------------


@dataclass
class Known:
    """The model's record of a task."""

    nodes: tuple[int, ...] | None
    retries: int
    submitted: int
    node: int | None = None
    runs: int = 0
    """Sends after which it may have begun."""
    is_recalled: bool = False
    is_cancelled: bool = False
    was_returned: bool = False
    parent: int | None = None


@dataclass
class KnownGang:
    nodes: tuple[int, ...] | None
    one_of: tuple[int, ...] | None
    places: int
    submitted: int
    on: tuple[int, ...] = ()


@dataclass
class KnownNode:
    slots: int
    is_up: bool = True
    is_paused: bool = False
    is_far: bool = False
    tasks: set[int] = field(default_factory=set)


def some_nodes() -> st.SearchStrategy[tuple[int, ...] | None]:
    return st.sampled_from([None, None, (0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)])


class SchedulerMachine(RuleBasedStateMachine):
    """Machine that carries out actions as a pool would, and refuses the ones that a pool must not get."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler()
        self.nodes: dict[int, KnownNode] = {}
        self.tasks: dict[int, Known] = {}
        self.gangs: dict[int, KnownGang] = {}
        self.failed: set[int] = set()
        self.numbers = 0
        self.kept: frozenset[int] = frozenset()

    @initialize(
        slots=st.lists(st.integers(1, 3), min_size=1, max_size=3),
        kept=st.sampled_from([(), (), (1,), (2,), (0, 2)]),
    )
    def start(self, slots: list[int], kept: tuple[int, ...]) -> None:
        self.kept = frozenset(kept)
        self.scheduler = Scheduler(self.kept)
        for node, count in enumerate(slots):
            self.nodes[node] = KnownNode(count)
            self.perform(self.scheduler.node_up(node, count))

    def next(self) -> int:
        self.numbers += 1
        return self.numbers

    def gang_places(self, node: int) -> int:
        return sum(min(g.places, self.nodes[node].slots) for g in self.gangs.values() if node in g.on)

    def load(self, node: int) -> int:
        return len(self.nodes[node].tasks) + self.gang_places(node)

    def eligible(self, nodes: tuple[int, ...] | None) -> list[int]:
        """Return the nodes that are not gone for good and that a task, or a gang of one node, may use."""
        if nodes is None:
            return [n for n in self.nodes if n not in self.kept]
        return [n for n in nodes if n in self.nodes]

    def perform(self, actions: list[Action]) -> None:
        for action in actions:  # the list grows meanwhile: lost tasks are submitted again
            if isinstance(action, Send):
                self.on_send(action)
            elif isinstance(action, Recall):
                task = self.tasks[action.task]
                assert task.node == action.node
                assert task.nodes is None or len(task.nodes) > 1, "there is no other node for it"
                assert not task.is_recalled, "recalled twice"
                task.is_recalled = True
            elif isinstance(action, FailTask):
                actions += self.on_fail(action)
            elif isinstance(action, StartGang):
                self.on_start(action)
            elif isinstance(action, Refuse):
                self.on_refuse(action)
            else:
                assert isinstance(action, FailGang)
                assert not self.gangs[action.gang].on, "it had started"
                del self.gangs[action.gang]

    def on_send(self, action: Send) -> None:
        task, node = self.tasks[action.task], self.nodes[action.node]
        assert task.node is None, "sent twice"
        assert node.is_up, "sent to a dead node"
        assert not node.is_paused, "sent over a broken link"
        assert action.node in self.eligible(task.nodes), "not one of its nodes"
        assert not task.is_cancelled
        assert task.runs <= task.retries, "sent again without a request"
        assert self.load(action.node) < node.slots + (FAR_AHEAD if node.is_far else max(AHEAD, node.slots))
        for gang in self.gangs.values():
            if not gang.on and gang.submitted < task.submitted and not (task.was_returned or task.parent):
                needed = self.eligible(gang.one_of) if gang.nodes is None else gang.nodes
                assert action.node not in needed, "overtook a gang"
        task.node, task.is_recalled = action.node, False
        node.tasks.add(action.task)

    def on_fail(self, action: FailTask) -> list[Action]:
        task = self.tasks.pop(action.task)
        if action.started is False:
            assert task.node is None, "it was sent"
            assert not self.eligible(task.nodes)
        elif task.runs <= task.retries:  # its owner lets it run again
            assert task.node is None
            self.tasks[action.task] = task
            return self.scheduler.submit(action.task, nodes=task.nodes, parent=task.parent, is_rerun=True)
        self.failed.add(action.task)
        return []

    def on_refuse(self, action: Refuse) -> None:
        task = self.tasks.pop(action.call)
        assert task.parent is not None
        assert task.node is None
        assert set(action.nodes) == set(self.eligible(task.nodes))
        calling = {t.parent for t in self.tasks.values()} | {task.parent}
        for node in action.nodes:
            held = sum(number in calling for number in self.nodes[node].tasks)
            assert held >= self.nodes[node].slots, "a slot is free, or held by what ends"

    def on_start(self, action: StartGang) -> None:
        gang = self.gangs[action.gang]
        assert not gang.on, "started twice"
        if gang.nodes is None:
            assert len(action.nodes) == 1
            assert action.nodes[0] in self.eligible(gang.one_of)
        else:
            assert action.nodes == gang.nodes
        for number in action.nodes:
            node = self.nodes[number]
            assert node.is_up
            assert not node.is_paused
            assert self.load(number) + min(gang.places, node.slots) <= node.slots, "no room for it"
        gang.on = action.nodes

    def forget_sent(self, task: int) -> None:
        known = self.tasks[task]
        assert known.node is not None
        if known.node in self.nodes:
            self.nodes[known.node].tasks.discard(task)
        known.node = None

    def sent(self) -> list[int]:
        return [number for number, task in self.tasks.items() if task.node is not None]

    def end_calls_of(self, parent: int) -> None:
        """End the calls of a dead process, newest first, as an agent takes them back."""
        for number in sorted((n for n, task in self.tasks.items() if task.parent == parent), reverse=True):
            self.end_calls_of(number)
            call = self.tasks[number]
            if call.is_cancelled:
                continue
            assert self.scheduler.cancel(number) == call.node
            if call.node is None:
                del self.tasks[number]
            else:
                call.is_cancelled = True

    # Possible events ------------------------------------------------------------------------------------------------

    @rule(data=st.data(), retries=st.integers(0, 2), in_advance=st.booleans())
    def submit(self, data: st.DataObject, retries: int, in_advance: bool) -> None:
        nodes = data.draw(some_nodes())
        number = self.next()
        self.tasks[number] = Known(nodes, retries, number)
        self.perform(self.scheduler.submit(number, nodes=nodes, in_advance=in_advance))

    @precondition(lambda self: self.sent())
    @rule(data=st.data())
    def call_from_a_task(self, data: st.DataObject) -> None:
        nodes = data.draw(some_nodes())
        parent = data.draw(st.sampled_from(self.sent()))
        number = self.next()
        self.tasks[number] = Known(nodes, 0, number, parent=parent)
        self.perform(self.scheduler.submit(number, nodes=nodes, parent=parent))

    @rule(data=st.data(), places=st.integers(1, 4))
    def submit_gang(self, data: st.DataObject, places: int) -> None:
        is_on_one = data.draw(st.booleans())
        nodes = data.draw(some_nodes())
        one_of = nodes if is_on_one else None
        nodes = None if is_on_one else nodes
        number = self.next()
        self.gangs[number] = KnownGang(nodes, one_of, places, number)
        self.perform(self.scheduler.submit_gang(number, nodes=nodes, some_of=one_of, places=places))

    @precondition(lambda self: self.sent())
    @rule(data=st.data(), elapsed_ns=st.sampled_from([None, 2_000_000, 10 * SHORT_TASK_NS]))
    def finish(self, data: st.DataObject, elapsed_ns: int | None) -> None:
        number = data.draw(st.sampled_from(self.sent()))
        self.forget_sent(number)
        del self.tasks[number]
        self.perform(self.scheduler.finished(number, elapsed_ns))

    @precondition(lambda self: self.sent())
    @rule(data=st.data(), calls_first=st.booleans())
    def lose_slot(self, data: st.DataObject, calls_first: bool) -> None:
        """Lose the process of a running task. A cancelled task is finished then.

        Chance decides whether the end of its calls is reported first.
        """
        number = data.draw(st.sampled_from(self.sent()))
        task = self.tasks[number]
        if task.is_cancelled:
            self.forget_sent(number)
            del self.tasks[number]
            self.perform(self.scheduler.finished(number))
            return
        self.forget_sent(number)
        task.runs += 1
        task.was_returned = True
        if calls_first:
            self.end_calls_of(number)
        self.perform(self.scheduler.lost(number, started=True))
        self.end_calls_of(number)

    @precondition(lambda self: any(t.is_recalled for t in self.tasks.values()))
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        """Answer a recall by giving the task back, unless it had begun."""
        number = data.draw(st.sampled_from([n for n, t in self.tasks.items() if t.is_recalled]))
        task = self.tasks[number]
        self.forget_sent(number)
        task.is_recalled = False
        task.was_returned = True
        if task.is_cancelled:
            del self.tasks[number]
            self.perform(self.scheduler.finished(number))
        else:
            self.perform(self.scheduler.lost(number, started=False))

    @precondition(lambda self: any(not t.is_cancelled for t in self.tasks.values()))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from([n for n, t in self.tasks.items() if not t.is_cancelled]))
        task = self.tasks[number]
        assert self.scheduler.cancel(number) == task.node
        if task.node is None:
            del self.tasks[number]
        else:
            task.is_cancelled = True

    @precondition(lambda self: self.gangs)
    @rule(data=st.data())
    def finish_gang(self, data: st.DataObject) -> None:
        """Finish a gang, or a waiting one that was cancelled."""
        number = data.draw(st.sampled_from(sorted(self.gangs)))
        del self.gangs[number]
        self.perform(self.scheduler.gang_finished(number))

    @precondition(lambda self: any(n.is_up for n in self.nodes.values()))
    @rule(data=st.data(), will_return=st.sampled_from([True, True, True, False]))
    def lose_node(self, data: st.DataObject, will_return: bool) -> None:
        number = data.draw(st.sampled_from([n for n, node in self.nodes.items() if node.is_up]))
        node = self.nodes[number]
        lost = sorted(node.tasks)
        for task in lost:
            known = self.tasks[task]
            self.forget_sent(task)
            if known.is_cancelled:
                del self.tasks[task]
                self.scheduler.drop(task)
            else:
                known.runs += 1
                known.was_returned = True
                known.is_recalled = False
        node.is_up = False
        for gang in self.gangs.values():
            gang.on = tuple(n for n in gang.on if n != number) or ((-1,) if gang.on else ())
        if not will_return:
            del self.nodes[number]
        self.perform(self.scheduler.node_lost(number, will_return=will_return))
        for task in lost:
            self.end_calls_of(task)

    @precondition(lambda self: any(not n.is_up for n in self.nodes.values()))
    @rule(data=st.data(), slots=st.integers(1, 3))
    def replace_node(self, data: st.DataObject, slots: int) -> None:
        number = data.draw(st.sampled_from([n for n, node in self.nodes.items() if not node.is_up]))
        self.nodes[number] = KnownNode(slots)
        self.perform(self.scheduler.node_up(number, slots))

    @precondition(lambda self: any(n.is_up for n in self.nodes.values()))
    @rule(data=st.data(), paused=st.booleans())
    def break_or_mend_a_link(self, data: st.DataObject, paused: bool) -> None:
        number = data.draw(st.sampled_from([n for n, node in self.nodes.items() if node.is_up]))
        self.nodes[number].is_paused = paused
        event = self.scheduler.node_paused if paused else self.scheduler.node_resumed
        self.perform(event(number))

    @precondition(lambda self: any(n.is_up for n in self.nodes.values()))
    @rule(data=st.data(), round_trip_ns=st.sampled_from([1e6, 50e6]))
    def measure(self, data: st.DataObject, round_trip_ns: float) -> None:
        number = data.draw(st.sampled_from([n for n, node in self.nodes.items() if node.is_up]))
        self.nodes[number].is_far = True
        self.perform(self.scheduler.set_round_trip(number, round_trip_ns))

    # Invariants -----------------------------------------------------------------------------------------------------

    @invariant()
    def both_agree_where_tasks_are(self) -> None:
        for number, task in self.tasks.items():
            assert self.scheduler.node_of(number) == task.node
        waiting = sum(t.node is None for t in self.tasks.values()) + sum(not g.on for g in self.gangs.values())
        assert self.scheduler.queued == waiting

    @invariant()
    def no_slot_idles_while_a_task_waits(self) -> None:
        if any(not g.on for g in self.gangs.values()):
            return  # its nodes are kept free for it
        up = [n for n, node in self.nodes.items() if node.is_up and not node.is_paused]
        idle = [n for n in up if self.load(n) < self.nodes[n].slots]
        for task in self.tasks.values():
            if task.node is None:
                assert not set(self.eligible(task.nodes)) & set(idle)

    @invariant()
    def what_tasks_have_called_can_start(self) -> None:
        """Let everything end that can, and check that no call of a task still waits."""
        left = dict(self.tasks)
        while True:
            calling = {task.parent for task in left.values()}
            on = [task.node for task in left.values()]
            over = [n for n, t in left.items() if t.node is not None and n not in calling]
            over += [
                number
                for number, task in left.items()
                if task.parent and task.node is None
                if any(on.count(node) < self.nodes[node].slots for node in self.eligible(task.nodes))
            ]
            if not over:
                break
            for number in over:
                del left[number]
        assert not [number for number, task in left.items() if task.parent]

    def teardown(self) -> None:
        """End everything, and check that nothing was lost and nothing starves."""
        for number, node in list(self.nodes.items()):
            if not node.is_up:
                self.nodes[number] = KnownNode(node.slots)
                self.perform(self.scheduler.node_up(number, node.slots))
            elif node.is_paused:
                node.is_paused = False
                self.perform(self.scheduler.node_resumed(number))
        for _ in range(10 * (len(self.tasks) + len(self.gangs)) + 10):
            if not self.tasks and not self.gangs:
                break
            for number in self.sent():
                if number in self.tasks and self.tasks[number].node is not None:
                    self.forget_sent(number)
                    del self.tasks[number]
                    self.perform(self.scheduler.finished(number, 2_000_000))
            for number in [n for n, g in self.gangs.items() if g.on]:
                del self.gangs[number]
                self.perform(self.scheduler.gang_finished(number))
        assert not self.tasks
        assert not self.gangs
        assert self.scheduler.queued == 0


TestAnyOrder = SchedulerMachine.TestCase
TestAnyOrder.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # making a failure smaller takes minutes
    suppress_health_check=[HealthCheck.too_slow],
)
