"""Entry of requests: identity, host, limits, shapes of errors."""

from __future__ import annotations

import base64
import socket
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from skyward.hub.http.mlflow.runs import BATCH_BYTES
from skyward.hub.http.page_files import FILE_PATH, PAGE_PATHS
from skyward.hub.http.routing import Route, RouteIncomplete, Table
from skyward.hub.http.table import ROUTES
from skyward.hub.model.access import Right
from skyward.testing.hub import HubServer


def test_open_routes_are_few() -> None:
    open_routes = [route for route in ROUTES if route.right is Right.NONE]
    assert {path for route in open_routes for path in (route.path, *route.twins)} == {
        *PAGE_PATHS,
        FILE_PATH,
        "/alive",
        "/api/3.0/mlflow/server-info",
        "/ajax-api/3.0/mlflow/server-info",
        "/health",
        "/ready",
        "/v1/openapi.json",
        "/v1/session",
        "/version",
    }


@pytest.mark.parametrize("authorization", ["Bearer sky_a_b", "Bearer", "Basic !", "Basic YTpi", "Digest x", ""])
def test_wrong_token_is_401(stranger: httpx.Client, authorization: str) -> None:
    answer = stranger.get("/v1/me", headers={"Authorization": authorization})
    assert answer.status_code == 401
    assert "Basic" not in answer.headers["www-authenticate"], "a browser would ask for a password"
    assert answer.json()["error"]["code"] == "unauthenticated"


def test_mlflow_s_clients_are_told_of_basic(stranger: httpx.Client) -> None:
    answer = stranger.get("/api/2.0/mlflow/experiments/get", params={"experiment_id": "0"})
    assert "Basic" in answer.headers["www-authenticate"]


def test_token_is_the_password_of_basic(server: HubServer, stranger: httpx.Client) -> None:
    pair = base64.b64encode(f"anybody:{server.token}".encode()).decode()
    assert stranger.get("/v1/me", headers={"Authorization": f"Basic {pair}"}).json()["user"] == "owner"


def test_paths_that_are_not_there_are_401_for_strangers(stranger: httpx.Client, owner: httpx.Client) -> None:
    assert stranger.get("/v1/nothing").status_code == 401
    assert owner.get("/v1/nothing").status_code == 404
    assert owner.post("/v1/me", json={}).status_code == 405


def test_foreign_host_is_refused(owner: httpx.Client) -> None:
    for host in ("evil.example", "127.0.0.1.evil.example", "evil.example:8057", "localhost@evil", "[::2]", "0", ""):
        assert owner.get("/v1/me", headers={"Host": host}).status_code == 403, host
    for host in ("localhost:1", "LOCALHOST", "[::1]:80"):
        assert owner.get("/v1/me", headers={"Host": host}).status_code == 200, host


def test_body_above_the_limit_is_refused_before_it_is_read(server: HubServer) -> None:
    parts = urlsplit(server.url)
    with socket.create_connection((parts.hostname, parts.port)) as connection:
        head = (
            "POST /api/2.0/mlflow/runs/log-batch HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            f"Authorization: Bearer {server.token}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {2 * 1024**3}\r\n\r\n"
        )
        connection.sendall(head.encode())
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"INVALID_PARAMETER_VALUE" in answer


def test_body_that_grows_above_the_limit_is_refused(owner: httpx.Client) -> None:
    pieces = (b" " * 10_000 for _ in range(BATCH_BYTES // 10_000 + 2))
    answer = owner.post("/api/2.0/mlflow/runs/log-batch", content=pieces, headers={"Content-Type": "application/json"})
    assert answer.status_code == 413


def test_form_of_a_foreign_page_is_refused(owner: httpx.Client) -> None:
    answer = owner.post("/v1/projects", content=b'{"name": "x"}', headers={"Content-Type": "text/plain"})
    assert answer.status_code == 400
    assert answer.json()["error"]["field"] == "content-type"


def test_without_authentication_foreign_pages_are_refused_and_programs_are_not(tmp_path: Path) -> None:
    with HubServer(tmp_path, with_auth=False) as server, httpx.Client(base_url=server.url) as client:
        run = client.post("/v1/runs", json={}).raise_for_status().json()["id"]
        for path in (f"/v1/runs/{run}/restore", f"/v1/runs/{run}/artifacts?key=x"):
            for foreign in ({"Origin": "http://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}):
                assert client.post(path, headers=foreign).status_code == 403, (path, foreign)
                assert client.get("/v1/me", headers=foreign).status_code == 403, foreign
            own = {"Origin": server.url, "Sec-Fetch-Site": "same-origin"}
            assert client.post(path, headers=own).is_success


@pytest.mark.parametrize("body", [b"{", b"[]", b"nul", b"\xff", b'{"name": NaN}', b'"x"', b"[" * 100_000])
def test_body_that_is_no_object_is_400(owner: httpx.Client, body: bytes) -> None:
    answer = owner.post("/v1/projects", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid"


def test_error_says_field_and_fix(owner: httpx.Client) -> None:
    error = owner.post("/v1/projects", json={"name": "Not A Name"}).json()["error"]
    assert error["field"] == "project"
    assert error["message"].startswith("project=Not A Name")
    assert error["fix"].startswith("use 1 to 63")


def test_request_id_is_the_clients_or_a_new_one(stranger: httpx.Client) -> None:
    assert stranger.get("/alive", headers={"X-Request-Id": "abc-1"}).headers["x-request-id"] == "abc-1"
    forged = stranger.get("/alive", headers={"X-Request-Id": "a b"}).headers["x-request-id"]
    assert len(forged) == 16


def test_program_refuses_a_table_with_a_route_that_lacks_something() -> None:
    good = ROUTES[0]
    for part in ("request", "answer", "handler", "summary", "right"):
        values = {name: getattr(good, name) for name in ("method", "path", "request", "answer", "right", "resource")}
        values |= {"handler": good.handler, "summary": good.summary, part: None}
        with pytest.raises(RouteIncomplete, match=part):
            Table([Route(**values)])
    with pytest.raises(RouteIncomplete, match="twice"):
        Table([good, good])
