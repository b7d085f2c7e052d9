"""Doubts of a client: which calls a node may have run that was lost before the head was."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from skyward.calls.options import CallOptions
from skyward.engine.dialler import DialledEnds, Dialler
from skyward.engine.head.messages import OpenCall
from skyward.engine.head.requests import Requests
from skyward.engine.head_link import HeadLink
from skyward.engine.head_machines import HeadMachines
from skyward.engine.hosted_calls import HeadLoss, HostedCalls
from skyward.engine.ledger import Ledger
from skyward.errors import Unreachable
from skyward.schedule.scheduler import Scheduler
from skyward.values.machine import Gone, Machine
from skyward.wire.ends import Ends
from skyward.wire.payloads import Encoded
from skyward.wire.stream import StreamChannel
from skyward.wire.tasks import Mode, TaskHead
from tests.engine.parts import NotedTask, function, machine


class Client:
    """Calls of a client, and its source of machines. Its head is never reached."""

    def __init__(self) -> None:
        self.ledger = Ledger(Scheduler())
        self.ledger.is_open = True
        self.calls = HostedCalls(self.ledger, Requests(lambda *frame: None, lambda action: None), is_detached=False)
        self.machines = HeadMachines(self.ledger, self.calls.doubt)
        self.machines.source = self
        self._links: list[HeadLink] = []
        self.told: list[OpenCall] = []
        """Calls as the next head gets them that begins during a launch."""
        self.next_machines: list[Machine] = []
        self.during_launch: Callable[[], object] = lambda: None
        self.calls.link = self._link()

    def close(self) -> None:
        with self.ledger:
            for task in list(self.ledger.tasks.values()):
                self.calls.forget(task)
        for link in self._links:
            link.channel.close()
        self.ledger.watcher.close()

    def _link(self) -> HeadLink:
        dialler = Dialler(refuse, role="client", pool="pool", node=0)
        fd = os.open(os.devnull, os.O_RDWR)  # takes all frames
        dialler.channel.attach(Ends(fd, fd), 0)
        link = HeadLink({}, dialler)
        self._links.append(link)
        return link

    def submit(self, nodes: tuple[int, ...] | None, *, is_begun: bool = True) -> int:
        task = NotedTask(
            id=next(self.ledger.numbers),
            name="work",
            head=TaskHead(function().digest, Mode.CALL, 0, 0, 0),
            function=function(),
            payload=Encoded(b"arguments"),
            options=CallOptions(),
        )
        self.calls.submit(task, nodes, 0.0)
        task.attempt = int(is_begun)
        return task.id

    def change_head(self, *, lost: frozenset[int] = frozenset(), beside: frozenset[int] = frozenset()) -> None:
        """Change to another head, which has to know how far each call is."""
        before = self.calls.link
        assert before is not None
        assert isinstance(before.channel, StreamChannel)
        assert before.channel.flush(), "what no link has carried needs no doubt"
        link = self.calls.link = self._link()
        with self.ledger:
            self.told = self.calls.send_all_again(before, link, HeadLoss(lost=lost, beside=beside))

    def doubtful(self) -> set[int]:
        return {call.number for call in self.told if call.is_in_doubt}

    # The source of machines

    def replace(self, node: int) -> Machine | None:
        self.change_head()
        self.during_launch()
        return self.next_machines.pop(0) if self.next_machines else None

    def prepare_replacement(self, node: int) -> bool:
        return False

    def give_up(self, node: int) -> None: ...

    def why_gone(self, node: int) -> Gone | None:
        return None


def refuse() -> DialledEnds:
    raise Unreachable("nobody is there", node=0)


@pytest.fixture
def client() -> Iterator[Client]:
    client = Client()
    yield client
    client.close()


def test_calls_of_a_lost_node_are_in_doubt_before_another_machine_is_launched(client: Client) -> None:
    """A head that begins during the launch finds a new machine at the node, which holds none of them."""
    anywhere, on_it, waits = client.submit(None), client.submit((0, 1)), client.submit((0,), is_begun=False)
    client.submit((1,))
    client.ledger.machines[0] = machine(0)
    assert client.machines.replace(0) is None
    assert len(client.told) == 4
    assert client.doubtful() == {anywhere, on_it}, f"{waits} was not sent to a node"


def test_a_call_knows_whether_the_provider_took_the_machine_that_may_have_run_it(client: Client) -> None:
    taken, ended, both = client.submit((0,)), client.submit((1,)), client.submit((0, 1))
    client.ledger.machines.update({node: machine(node) for node in range(2)})
    client.machines.prepare_replacement(0)
    for node in (0, 1):
        client.machines.replace(node)
    assert client.doubtful() == {taken, ended, both}
    assert {call.number for call in client.told if call.is_preempted} == {taken, both}


def test_a_node_that_comes_again_is_not_taken_for_the_one_that_the_provider_took_back(client: Client) -> None:
    client.ledger.machines[0] = machine(0)
    client.machines.prepare_replacement(0)
    client.ledger.machines[0] = machine(0)  # it was given back, and came again
    number = client.submit((0,))
    client.machines.replace(0)
    assert [(call.number, call.is_in_doubt, call.is_preempted) for call in client.told] == [(number, True, False)]


def test_a_machine_that_one_head_has_asked_for_goes_to_the_next_one_too(client: Client) -> None:
    client.ledger.machines[0] = machine(0)
    client.next_machines = [machine(0, pid=1), machine(0, pid=2)]
    client.machines.told()
    asked_twice = []
    client.during_launch = lambda: asked_twice.append(client.machines.told())
    first = client.machines.replace(0)
    assert client.machines.replace(0) == first, "the next head knew the lost one only"
    assert client.machines.replace(0) == machine(0, pid=2), "it has not reached that one either"
    assert len(asked_twice) == 2


def test_a_call_that_an_earlier_head_had_is_in_doubt_unless_it_cannot_have_run_there(client: Client) -> None:
    number = client.submit((0,), is_begun=False)
    client.change_head()
    assert not client.doubtful()
    client.calls.doubt(1)
    client.change_head()
    assert not client.doubtful()
    client.calls.doubt(0)
    client.change_head()
    assert client.doubtful() == {number}


def test_a_call_that_waits_in_the_head_is_in_no_doubt_once_it_may_not_begin_unknown(client: Client) -> None:
    permitted, waiting = (client.submit(None, is_begun=False) for _ in range(2))
    assert client.calls.permitted == 2
    client.calls.forbid([waiting, waiting, 99])
    assert client.calls.permitted == 1
    client.change_head(lost=frozenset({0}), beside=frozenset({0}))
    assert client.doubtful() == {permitted}


def test_a_doubt_is_kept_for_all_heads_to_come(client: Client) -> None:
    number = client.submit(None)
    client.calls.doubt(0)
    later = client.submit(None)
    for _ in range(3):
        client.change_head()
        assert client.doubtful() == {number}
    assert later in {call.number for call in client.told}
