"""Questions that wait at the server: they end with the round, with their time, with the line, and with the server."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from skyward.errors import UsageError
from skyward.training.diloco import DiLoCoServer
from skyward.training.diloco.client import DiLoCoClient
from skyward.training.diloco.transport import ServerUnreachable
from tests.training.diloco.lossy_line import ANSWER, LossyLine
from tests.training.diloco.runs import TOKEN, make_model, serving, together, worker_of
from tests.waiting import until

JOINER = {"worker": "b", "session": "session of b"}


def port_of(server: DiLoCoServer) -> int:
    return int(server.address.rpartition(":")[2])


def test_a_late_joiner_hears_of_its_round_in_one_request() -> None:
    answers: list[dict[str, Any]] = []
    with (
        serving(make_model()) as server,
        worker_of(server, make_model(), None, "a") as first,
        LossyLine(port_of(server), request="POST /heartbeat") as line,
    ):
        client = DiLoCoClient(line.address, token=TOKEN)
        assert not client.ask("/join", JOINER)["is_awaited"]

        def end_round() -> None:
            until(lambda: any(words.startswith("POST /heartbeat") for words in line.begun))
            assert first.force_sync()

        together(lambda: answers.append(client.ask("/heartbeat", {**JOINER, "wait_s": 25})), end_round)
    assert [(answer["round"], answer["is_awaited"]) for answer in answers] == [(1, True)]


def test_a_question_that_waits_is_a_life_sign_of_its_worker() -> None:
    """The worker sends no heartbeats. It is heard again while its one question waits."""
    with serving(make_model(), 2) as server, LossyLine(port_of(server), request="GET /answers") as line:
        other = worker_of(server, make_model(), None, "other")
        waits = worker_of(line.address, make_model(), None, "waits")
        together(other.start, waits.start)
        samples = [(0, 0.0)]

        def is_heard_without_a_new_question() -> bool:
            silence = next(w["silent_s"] for w in server.status()["workers"] if w["worker"] == "waits")
            samples.append((line.begun.count("GET /answers"), silence))
            return samples[-2][0] == samples[-1][0] > 0 and samples[-2][1] > samples[-1][1]

        def end_round() -> None:
            until(is_heard_without_a_new_question)
            assert other.force_sync()

        together(lambda: waits.force_sync() or pytest.fail("no answer"), end_round)
        other.stop()
        waits.stop()


def test_a_question_ends_with_its_time_and_with_the_server() -> None:
    with serving(make_model()) as server, worker_of(server, make_model(), None, "a"):
        client = DiLoCoClient(server.address, token=TOKEN)
        client.ask("/join", JOINER)
        assert not client.ask("/heartbeat", {**JOINER, "wait_s": 0.01})["is_awaited"]
        with LossyLine(port_of(server), request="POST /heartbeat") as line:
            through = DiLoCoClient(line.address, token=TOKEN)

            def stop() -> None:
                until(lambda: any(words.startswith("POST /heartbeat") for words in line.begun))
                server.stop()

            def ask() -> None:
                with contextlib.suppress(ServerUnreachable):  # it came in when the server had closed its connections
                    assert not through.ask("/heartbeat", {**JOINER, "wait_s": 25})["is_awaited"]

            together(ask, stop)


def test_a_worker_that_stops_waits_for_no_round_and_leaves_the_server() -> None:
    with (
        serving(make_model()) as server,
        worker_of(server, make_model(), None, "first"),
        LossyLine(port_of(server), request="POST /heartbeat") as line,
    ):
        late = worker_of(line.address, make_model(), None, "late", timeout=3600)

        def wait_for_a_round() -> None:
            with pytest.raises(UsageError, match="the worker has stopped; start it again"):
                late.start()

        def stop() -> None:
            until(lambda: any(words.startswith("POST /heartbeat") for words in line.begun))
            late.stop()
            assert [worker["worker"] for worker in server.status()["workers"]] == ["first"]

        together(wait_for_a_round, stop)


def test_a_worker_whose_question_loses_its_line_asks_again() -> None:
    with (
        serving(make_model(), 2) as server,
        LossyLine(port_of(server), request="GET /answers", cuts=[ANSWER]) as line,
    ):
        other = worker_of(server, make_model(), None, "other")
        waits = worker_of(line.address, make_model(), None, "waits")
        together(other.start, waits.start)

        def end_round() -> None:
            until(lambda: "GET /answers" in line.begun)
            assert other.force_sync()

        together(lambda: waits.force_sync() or pytest.fail("no answer"), end_round)
        assert waits.sync_metrics["diloco/sync_retries"] == 1
        assert server.status()["round"] == 1
        other.stop()
        waits.stop()
