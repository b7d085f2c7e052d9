"""The client's records of tasks."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest

from skyward.calls.futures import Future
from skyward.engine.tasks import HeldTask, Loss, PulledTask, Received, TaskFailure
from skyward.errors import PoolClosed, SlotLost
from skyward.wire.failures import EncodedFailure
from tests.engine.parts import Parts, value_body


class Pulled:
    """A call whose buffers stay in memory, and the fallback when a slot cannot read them."""

    def __init__(self, parts: Parts, task_class: type[PulledTask] = PulledTask) -> None:
        self.error: Exception | None = None
        self.made_by: list[threading.Thread] = []
        self.was_stopped = False
        self.future: Future[Any] = Future()
        task = parts.task()
        self.task = task_class(
            id=task.id,
            name=task.name,
            head=task.head,
            function=task.function,
            payload=task.payload,
            options=task.options,
            future=self.future,
            call_again=self.call_again,
            stop_pulling=self.stop_pulling,
        )

    def call_again(self) -> int:
        self.made_by.append(threading.current_thread())
        if self.error is not None:
            raise self.error
        return 42

    def stop_pulling(self) -> None:
        self.was_stopped = True


def failed(type_name: str) -> TaskFailure:
    failure = EncodedFailure(type_name=type_name, message="no", traceback="", pickled=None)
    return TaskFailure(failure, "node 0", 0, "work", "")


def test_the_waiting_thread_repeats_the_call_if_another_task_came_first(parts: Parts) -> None:
    agent = parts.add_node()
    pulled = Pulled(parts)
    with parts.ledger:
        parts.dispatcher.submit(pulled.task, None)
    assert agent.kinds() == []
    assert not parts.ledger.tasks
    assert pulled.made_by == []
    assert pulled.future.result(0) == 42
    assert pulled.made_by == [threading.current_thread()]
    assert not pulled.was_stopped


def test_a_slot_that_must_not_read_our_memory_is_not_tried_again(parts: Parts) -> None:
    pulled = Pulled(parts)
    pulled.task.on_error(failed("skyward.wire.pull.PullRefused"))
    assert pulled.was_stopped
    assert pulled.future.result(0) == 42


def test_an_error_of_the_call_is_raised_unchanged(parts: Parts) -> None:
    pulled = Pulled(parts)
    pulled.task.on_error(failed("builtins.ValueError"))
    assert pulled.future.has_failed
    assert not pulled.was_stopped


def test_the_call_of_a_future_is_sent_again_by_any_thread(parts: Parts) -> None:
    agent = parts.add_node()
    pulled = Pulled(parts, HeldTask)
    with parts.ledger:
        parts.dispatcher.submit(pulled.task, None)
    assert agent.kinds() == []
    assert pulled.made_by == [threading.current_thread()]
    assert not pulled.future.done()


def test_a_future_whose_call_cannot_be_sent_again_fails(parts: Parts) -> None:
    pulled = Pulled(parts, HeldTask)
    pulled.error = PoolClosed("pool: closed")
    pulled.task.on_error(failed("skyward.wire.pull.PullRefused"))
    assert pulled.was_stopped
    with pytest.raises(PoolClosed):
        pulled.future.result(0)


@pytest.mark.parametrize(("started", "again"), [(False, 1), (True, 0)])
def test_a_lost_process_fails_the_call_if_it_had_begun(parts: Parts, started: bool, again: int) -> None:
    pulled = Pulled(parts)
    pulled.task.on_lost(Loss(node=0, signal=9, started=started))
    if started:
        with pytest.raises(SlotLost):
            pulled.future.result(0)
    else:
        assert pulled.future.result(0) == 42
    assert len(pulled.made_by) == again


def test_a_value_that_waits_for_its_reader_is_one_object_for_the_garbage_collector() -> None:
    received = Received(value_body([1, 2]))
    assert not [held for held in gc.get_referents(received) if gc.is_tracked(held) and not isinstance(held, type)]
    assert received.get() == [1, 2]
    assert received.get() is received.get()
    assert not received.body, "decoded values are not kept twice"
