"""Questions to running calls."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from skyward.engine.questions import NOBODY, OpenQuestions
from skyward.errors import ControlFailed, UsageError
from skyward.wire.frames import Frame, FrameKind
from tests.engine.parts import FarEnd, NotedTask, Parts
from tests.waiting import until


@pytest.fixture
def agent(parts: Parts) -> FarEnd:
    return parts.add_node(slots=2)


@pytest.fixture
def questions(parts: Parts) -> OpenQuestions:
    return OpenQuestions(parts.ledger, parts.dispatcher)


@pytest.fixture
def task(parts: Parts, agent: FarEnd, questions: OpenQuestions) -> NotedTask:
    task = parts.submit()
    agent.received()
    return task


def test_an_answer_reaches_the_caller_who_asked(
    parts: Parts, agent: FarEnd, questions: OpenQuestions, task: NotedTask
) -> None:
    with ThreadPoolExecutor(1) as thread:
        answer: Future[bytes] = thread.submit(questions.ask, task.id, b"how far?", 60.0)
        frame = agent.next(FrameKind.ASK)
        assert (frame.ident, frame.body[8:]) == (task.id, b"how far?")
        with parts.ledger:
            questions.on_answer(Frame(FrameKind.ANSWER, 0, 0, task.id, frame.body[:8] + b"step 7"))
        assert answer.result(60) == b"step 7"


def test_a_question_without_an_answer_reports_the_reason(
    parts: Parts, agent: FarEnd, questions: OpenQuestions, task: NotedTask
) -> None:
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(questions.ask, task.id, b"how far?", 60.0)
        frame = agent.next(FrameKind.ASK)
        with parts.ledger:
            questions.on_answer(Frame(FrameKind.ANSWER, 0, NOBODY, task.id, frame.body[:8]))
        with pytest.raises(ControlFailed, match="TrainerControlCallback"):
            answer.result(60)


def test_a_question_ends_with_its_call(parts: Parts, agent: FarEnd, questions: OpenQuestions, task: NotedTask) -> None:
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(questions.ask, task.id, b"how far?", 60.0)
        agent.next(FrameKind.ASK)
        with parts.ledger:
            parts.dispatcher.finish(task, 0)

        def is_given_up() -> bool:
            with parts.ledger:
                parts.ledger.run_deadlines()
            return answer.done()

        until(is_given_up)
        error = answer.exception()
    assert isinstance(error, ControlFailed)
    assert error.is_gone


def test_calls_are_found_by_name(parts: Parts, questions: OpenQuestions, task: NotedTask) -> None:
    assert questions.call_named("") == questions.call_named("work") == task.id
    with pytest.raises(ControlFailed, match="'other'"):
        questions.call_named("other")
    parts.submit()
    with pytest.raises(UsageError, match="2 calls"):
        questions.call_named("work")
