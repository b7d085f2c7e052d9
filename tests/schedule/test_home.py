"""Short tasks that wait for the node beside the scheduler, and those that rather go to others."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from skyward.schedule.actions import Action, Recall, Send
from skyward.schedule.scheduler import Scheduler
from tests.schedule import test_scheduler

ROUND_TRIP_NS = 4_000_000
TINY_NS = 20_000
SHORT_NS = 1_000_000


class Pool:
    """Scheduler with node 0 beside it, other nodes, and what they were sent."""

    def __init__(self, *, mean_ns: int, slots: int = 2, nodes: int = 3, home: int | None = 0) -> None:
        self.scheduler = Scheduler()
        self.numbers = itertools.count(1)
        self.sent: list[dict[int, None]] = [{} for _ in range(nodes)]
        self.recalled: list[int] = []
        for node in range(nodes):
            self.perform(self.scheduler.node_up(node, slots))
            self.perform(self.scheduler.set_round_trip(node, ROUND_TRIP_NS if node else 0.0))
        for _ in range(100):  # the mean is that of the last tasks
            task = next(self.numbers)
            self.perform(self.scheduler.submit(task, nodes=(0,)))
            self.end(0, task, mean_ns)
        if home is not None:
            self.scheduler.set_home(home)

    def perform(self, actions: list[Send] | list[Recall] | list) -> None:  # type: ignore[type-arg]
        for action in actions:
            if isinstance(action, Send):
                self.sent[action.node][action.task] = None
            else:
                assert isinstance(action, Recall)
                self.recalled.append(action.task)

    def submit(self, count: int) -> list[int]:
        tasks = list(itertools.islice(self.numbers, count))
        for task in tasks:
            self.perform(self.scheduler.submit(task))
        return tasks

    def end(self, node: int, task: int, elapsed_ns: int) -> None:
        del self.sent[node][task]
        self.perform(self.scheduler.finished(task, elapsed_ns))

    def end_oldest(self, node: int, elapsed_ns: int) -> None:
        self.end(node, next(iter(self.sent[node])), elapsed_ns)

    def bring_back(self) -> None:
        """Let nodes return what was recalled."""
        recalled, self.recalled = self.recalled, []
        for task in recalled:
            for sent in self.sent:
                sent.pop(task, None)
            self.perform(self.scheduler.lost(task, started=False))

    @property
    def loads(self) -> list[int]:
        return [len(sent) for sent in self.sent]


def test_tiny_tasks_wait_for_the_node_beside_the_scheduler_although_others_are_idle() -> None:
    pool = Pool(mean_ns=TINY_NS)
    tasks = pool.submit(1000)
    ended = 0
    while pool.loads[0]:
        assert pool.loads[1:] == [0, 0]
        pool.end_oldest(0, TINY_NS)
        ended += 1
    assert ended == len(tasks)
    assert not pool.recalled, "they would have come back to where they were"


def test_without_such_a_node_all_nodes_get_tiny_tasks() -> None:
    pool = Pool(mean_ns=TINY_NS, home=None)
    pool.submit(1000)
    assert all(pool.loads)
    assert not pool.scheduler.needs_look


def test_a_lone_short_task_goes_to_the_node_beside_the_scheduler_whatever_was_measured_last() -> None:
    pool = Pool(mean_ns=SHORT_NS)
    for home_ns in (0.0, ROUND_TRIP_NS, 100 * ROUND_TRIP_NS):  # the time of a busy way
        pool.perform(pool.scheduler.set_round_trip(0, home_ns))
        for _ in range(5):
            pool.submit(1)
            assert pool.loads == [1, 0, 0]
            pool.end_oldest(0, SHORT_NS)
    assert not pool.scheduler.needs_look, "nobody waits"


def test_short_tasks_go_to_other_nodes_once_they_would_wait_longer_than_a_round_trip() -> None:
    pool = Pool(mean_ns=SHORT_NS)
    pool.submit(4)
    assert pool.loads == [4, 0, 0]
    pool.submit(60)
    assert min(pool.loads[1:]) > 4, "two slots take 32 ms for 64 tasks, and a round trip 4 ms"


@pytest.mark.parametrize("mean_ns", [10 * ROUND_TRIP_NS, 500_000_000])
def test_tasks_that_are_long_for_a_round_trip_are_spread(mean_ns: int) -> None:
    pool = Pool(mean_ns=mean_ns)
    pool.submit(3)
    assert pool.loads == [1, 1, 1]


def test_a_task_that_tells_its_duration_or_may_take_any_is_spread_among_tiny_ones() -> None:
    pool = Pool(mean_ns=TINY_NS)
    for number in range(3):
        pool.perform(pool.scheduler.submit(1000 + number, expected_ns=50_000_000))
    assert pool.loads == [1, 1, 1]
    for number in range(3):
        pool.perform(pool.scheduler.submit(2000 + number, is_typical=False))
    assert pool.loads == [2, 2, 2]


@pytest.mark.parametrize("elapsed_ns", [5_000_000, 1_000_000_000])
def test_calls_that_turn_out_long_go_to_other_nodes_when_two_of_them_have_ended(elapsed_ns: int) -> None:
    pool = Pool(mean_ns=TINY_NS)
    pool.submit(500)
    pool.end_oldest(0, elapsed_ns)
    assert pool.loads[1:] == [0, 0], "a busy machine may stop a tiny one for as long"
    pool.end_oldest(0, elapsed_ns)
    assert min(pool.loads[1:]) >= 2


def test_calls_that_do_not_end_go_to_other_nodes_after_two_looks() -> None:
    pool = Pool(mean_ns=TINY_NS)
    tasks = pool.submit(12)
    assert pool.loads == [12, 0, 0]
    assert pool.scheduler.needs_look
    pool.perform(pool.scheduler.look())
    assert not pool.recalled, "they have waited for no time yet"
    pool.perform(pool.scheduler.look())
    assert pool.recalled == tasks[:-5:-1], "as many as the others have slots"
    for _ in range(3):
        pool.bring_back()
    assert not pool.recalled, "they do not come and go"
    assert min(pool.loads[1:]) >= 2
    assert not pool.scheduler.needs_look, "nothing is kept there any longer"
    pool.end(0, tasks[0], TINY_NS)  # it goes on
    while pool.loads[0]:
        pool.end_oldest(0, TINY_NS)
    before = pool.loads
    pool.submit(2)
    assert pool.loads == [2, *before[1:]]


def test_tasks_that_wait_for_something_else_than_a_slot_do_not_make_a_node_stuck() -> None:
    pool = Pool(mean_ns=TINY_NS)
    pool.submit(12)
    for _ in range(5):
        pool.perform(pool.scheduler.look(unsent=11))
    assert pool.loads == [12, 0, 0]
    assert not pool.recalled


def test_waiting_tasks_go_to_other_nodes_when_the_one_beside_the_scheduler_is_lost() -> None:
    pool = Pool(mean_ns=TINY_NS)
    pool.submit(1000)
    waiting = pool.scheduler.queued
    assert waiting
    lost, pool.sent[0] = pool.sent[0], {}
    actions = pool.scheduler.node_lost(0, will_return=False)
    pool.perform([action for action in actions if isinstance(action, Send)])
    assert len(actions) >= len(lost)
    pool.perform(pool.scheduler.look())
    assert min(pool.loads[1:]) > 0


def test_a_gang_on_all_its_slots_leaves_tiny_tasks_to_the_others() -> None:
    pool = Pool(mean_ns=TINY_NS)
    pool.scheduler.submit_gang(9_999_999, nodes=(0,), places=2)
    pool.submit(4)
    assert pool.loads == [0, 2, 2]


def test_a_node_that_begins_late_is_no_better_than_others() -> None:
    pool = Pool(mean_ns=TINY_NS)
    pool.scheduler.delay_home(2 * ROUND_TRIP_NS)  # its tasks wait for a distant client
    pool.submit(300)
    assert all(pool.loads)


class HomeMachine(test_scheduler.SchedulerMachine):
    """The same with node 0 beside the scheduler, tiny tasks, and an owner who looks from time to time."""

    is_over = False

    @initialize(slots=st.lists(st.integers(1, 3), min_size=2, max_size=3), delay_ns=st.sampled_from([0.0, 2e6]))
    def start(self, slots: list[int], delay_ns: float) -> None:
        super().start(slots, ())
        self.scheduler.set_home(0)
        self.scheduler.delay_home(delay_ns)
        for node in self.nodes:
            self.perform(self.scheduler.set_round_trip(node, ROUND_TRIP_NS if node else 0.0))
        for _ in range(50):
            self.submit_any(1)
            self.finish_tiny()

    def on_send(self, action: Send) -> None:
        self.nodes[action.node].is_far = True  # tiny tasks fill any node
        super().on_send(action)

    @rule(count=st.integers(1, 40))
    def submit_any(self, count: int) -> None:
        for _ in range(count):
            number = self.next()
            self.tasks[number] = test_scheduler.Known(None, 0, number)
            self.perform(self.scheduler.submit(number))

    @rule()
    def finish_tiny(self) -> None:
        for number in self.sent():
            if self.tasks[number].parent is None and not any(task.parent == number for task in self.tasks.values()):
                self.forget_sent(number)
                del self.tasks[number]
                self.perform(self.scheduler.finished(number, TINY_NS))

    @rule(unsent=st.integers(0, 2))
    def look(self, unsent: int) -> None:
        if self.scheduler.needs_look:
            self.perform(self.scheduler.look(unsent))

    @invariant()
    def no_slot_idles_while_a_task_waits(self) -> None:
        """Nothing idles unless a look comes."""
        if not self.scheduler.needs_look:
            super().no_slot_idles_while_a_task_waits()

    def perform(self, actions: list[Action]) -> None:
        super().perform(actions)
        if self.is_over and self.scheduler.needs_look:
            super().perform(self.scheduler.look())

    def teardown(self) -> None:
        self.is_over = True
        self.perform([])  # a look comes, also if nothing else happens
        super().teardown()


TestHomeInAnyOrder = HomeMachine.TestCase
TestHomeInAnyOrder.settings = settings(test_scheduler.TestAnyOrder.settings, max_examples=40)
