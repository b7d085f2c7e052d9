"""The rate of requests of each token has a limit, and a worker over it tries again later."""

from __future__ import annotations

import doctest

import pytest

from skyward.errors import UsageError
from skyward.training.diloco import http_app, request_rate
from skyward.training.diloco.client import DiLoCoClient
from skyward.training.diloco.request_rate import MOST_DELAY_S, RequestRate
from skyward.training.diloco.transport import ServerUnreachable
from tests.training.diloco.runs import TOKEN, make_model, serving


def test_examples_run() -> None:
    assert doctest.testmod(request_rate).failed == 0


def test_an_even_rate_is_never_delayed_and_a_burst_is_earned_again() -> None:
    rate = RequestRate(requests_per_s=10, burst=3)
    assert [rate.delay("a", now=number / 10) for number in range(100)] == [0.0] * 100
    assert [rate.delay("a", now=20.0) for _ in range(4)] == [0.0, 0.0, 0.0, 0.1]


def test_requests_that_would_wait_too_long_are_refused_and_cost_nothing() -> None:
    rate = RequestRate(requests_per_s=10, burst=1)
    delays = [rate.delay("a", now=0.0) for _ in range(1000)]
    allowed = [delay for delay in delays if delay is not None]
    assert max(allowed) <= MOST_DELAY_S
    assert delays[len(allowed) :] == [None] * (1000 - len(allowed))
    assert rate.delay("a", now=2 * MOST_DELAY_S) == 0.0


def test_a_token_over_the_limit_is_told_to_come_later_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_app, "RequestRate", lambda: RequestRate(requests_per_s=0.01, burst=2))
    with serving(make_model()) as server:
        berlin, operator, stranger = (
            DiLoCoClient(server.address, token=token) for token in (server.add_token("berlin"), TOKEN, "of nobody")
        )
        for _ in range(2):
            berlin.ask("/status")
            with pytest.raises(UsageError, match="token: is missing or wrong"):
                stranger.ask("/status")
        for client in (berlin, stranger):
            with pytest.raises(ServerUnreachable, match="HTTP status 429: requests: over 1000 in a second"):
                client.ask("/status")
        assert operator.ask("/status")["round"] == 0
