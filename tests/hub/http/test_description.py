"""Answers of `/v1` against its own description, by generated requests."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings, strategies
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.core.result import Ok

from skyward.hub.http.openapi import describe
from skyward.hub.http.table import ROUTES
from skyward.testing.hub import HubServer
from tests.hub.http.samples import Things, make_things

load_all_checks()
EXCEPT: Any = CHECKS.get_by_names(
    [
        "positive_data_acceptance",  # rules between fields, and things that must be there, are not in the description
        "negative_data_rejection",  # numbers may be texts, and unknown fields are ignored, as in MLflow
    ]
)
LIMITS = settings(
    max_examples=12, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
)
API = schemathesis.openapi.from_dict(describe(ROUTES)).include(path_regex="^/v1/").exclude(path="/v1/events")
OPERATIONS = [found.ok() for found in API.get_all_operations() if isinstance(found, Ok)]


NAME = re.compile(r"([\w-]+)/\{(\w+)\}")


@pytest.fixture(scope="module")
def things(server: HubServer) -> Things:
    with httpx.Client(base_url=server.url, headers=server.headers) as owner:
        return make_things(owner, owner, "thing", "thing")


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.label)
def test_answers_are_as_described(
    operation: schemathesis.APIOperation[Any, Any, Any, Any], server: HubServer, things: Things
) -> None:
    legal = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
    wrong = operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)

    @LIMITS
    @given(legal | wrong, strategies.booleans())
    def check(case: schemathesis.Case[Any], is_about_things: bool) -> None:
        if is_about_things and operation.method != "delete":
            names = {name: things.in_path(before, name) for before, name in NAME.findall(operation.path)}
            case.path_parameters = {**(case.path_parameters or {}), **names}
        if isinstance(case.body, dict) and "wait_s" in case.body:
            case.body["wait_s"] = 0  # answers are meant, not waits for them
        if operation.label in ("GET /v1/jobs/{id}/logs", "GET /v1/jobs/{id}/items"):
            case.query = {"follow": "false", **(case.query or {})}  # by default it waits for more bytes
        case.call_and_validate(base_url=server.url, headers=server.headers, excluded_checks=EXCEPT)

    check()
