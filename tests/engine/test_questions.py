"""Questions to running calls."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from skyward.engine.questions import NOBODY, Asking
from skyward.errors import ControlFailed, UsageError
from skyward.wire.frames import Frame, Kind
from tests.engine.parts import FarEnd, NotedTask, Parts
from tests.waiting import until


@pytest.fixture
def agent(parts: Parts) -> FarEnd:
    return parts.add_node(slots=2)


@pytest.fixture
def asking(parts: Parts) -> Asking:
    return Asking(parts.books, parts.sending)


@pytest.fixture
def task(parts: Parts, agent: FarEnd, asking: Asking) -> NotedTask:
    task = parts.submit()
    agent.received()
    return task


def test_an_answer_reaches_the_one_who_asked(parts: Parts, agent: FarEnd, asking: Asking, task: NotedTask) -> None:
    with ThreadPoolExecutor(1) as thread:
        answer: Future[bytes] = thread.submit(asking.ask, task.id, b"how far?", 10.0)
        frame = agent.next(Kind.ASK)
        assert (frame.ident, frame.body[8:]) == (task.id, b"how far?")
        with parts.books:
            asking.on_answer(Frame(Kind.ANSWER, 0, 0, task.id, frame.body[:8] + b"step 7"))
        assert answer.result(10) == b"step 7"


def test_a_call_that_nobody_answers_for_says_why(parts: Parts, agent: FarEnd, asking: Asking, task: NotedTask) -> None:
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(asking.ask, task.id, b"how far?", 10.0)
        frame = agent.next(Kind.ASK)
        with parts.books:
            asking.on_answer(Frame(Kind.ANSWER, 0, NOBODY, task.id, frame.body[:8]))
        with pytest.raises(ControlFailed, match="TrainerControlCallback"):
            answer.result(10)


def test_a_question_is_given_up_when_its_call_ends(
    parts: Parts, agent: FarEnd, asking: Asking, task: NotedTask
) -> None:
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(asking.ask, task.id, b"how far?", 10.0)
        agent.next(Kind.ASK)
        with parts.books:
            parts.sending.finish(task, 0)

        def is_given_up() -> bool:
            with parts.books:
                parts.books.run_deadlines()
            return answer.done()

        until(is_given_up)
        error = answer.exception()
    assert isinstance(error, ControlFailed)
    assert error.is_gone


def test_calls_are_found_by_name(parts: Parts, asking: Asking, task: NotedTask) -> None:
    assert asking.call_named("") == asking.call_named("work") == task.id
    with pytest.raises(ControlFailed, match="'other'"):
        asking.call_named("other")
    parts.submit()
    with pytest.raises(UsageError, match="2 calls"):
        asking.call_named("work")
