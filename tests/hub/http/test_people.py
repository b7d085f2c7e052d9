"""Signing in, tokens, roles and projects, over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from skyward.hub.http.table import ROUTES
from skyward.hub.model.access import NEEDED_ROLE, Right, Role
from skyward.testing.hub import HubServer
from tests.hub.http.test_edge import paths


def token_of(owner: httpx.Client, user: str, role: str | None, project: str = "default") -> dict[str, str]:
    """Make a service account with a role in a project, and return its headers."""
    owner.post("/v1/users", json={"name": user, "is_service": True}).raise_for_status()
    if role is not None:
        owner.post(f"/v1/projects/{project}/members", json={"user": user, "role": role}).raise_for_status()
    made = owner.post("/v1/tokens", json={"name": "t", "user": user}).raise_for_status().json()
    return {"Authorization": f"Bearer {made['token']}"}


@contextmanager
def sign_in(server: HubServer, owner: httpx.Client, user: str) -> Iterator[httpx.Client]:
    link = owner.post("/v1/users", json={"name": user, "is_owner": True}).raise_for_status().json()["link"]
    with httpx.Client(base_url=server.url, headers={"Origin": server.url}) as browser:
        answer = browser.post("/v1/session", json={"code": link.partition("#code=")[2]}).raise_for_status()
        assert "HttpOnly" in answer.headers["set-cookie"]
        assert "SameSite=Strict" in answer.headers["set-cookie"]
        yield browser


def test_link_signs_in_once(server: HubServer, owner: httpx.Client, stranger: httpx.Client) -> None:
    link = owner.post("/v1/users", json={"name": "ada"}).raise_for_status().json()["link"]
    code = link.partition("#code=")[2]
    assert link.startswith(f"{server.url}/sign-in#")
    assert stranger.post("/v1/session", json={"code": code}).status_code == 200
    assert stranger.post("/v1/session", json={"code": code}).status_code == 401


def test_cookie_counts_for_the_hubs_own_pages_only(server: HubServer, owner: httpx.Client) -> None:
    with sign_in(server, owner, "grace") as browser:
        assert browser.get("/v1/me").json()["user"] == "grace"
        assert browser.get("/v1/me", headers={"Origin": "http://evil.example"}).status_code == 401
        del browser.headers["Origin"]
        assert browser.get("/v1/me").status_code == 200
        assert browser.get("/v1/me", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 401
        assert browser.post("/v1/experiments", json={"name": "x"}, headers={"Origin": "null"}).status_code == 401
        assert browser.get("/api/2.0/mlflow/experiments/get?experiment_id=0").status_code == 401
        assert browser.get("/ajax-api/2.0/mlflow/experiments/get?experiment_id=0").status_code == 401
        session = browser.cookies["skyward_hub_session"]
        assert browser.get("/v1/me", headers={"Authorization": f"Bearer {session}"}).status_code == 401
        browser.request("DELETE", "/v1/session", headers={"Origin": server.url}).raise_for_status()
        assert browser.get("/v1/me", headers={"Cookie": f"skyward_hub_session={session}"}).status_code == 401


@pytest.mark.parametrize("role", [None, "viewer", "researcher", "admin"])
def test_each_route_demands_its_role(server: HubServer, owner: httpx.Client, role: str | None) -> None:
    headers = token_of(owner, f"service-{role}".lower(), role)
    rank = 0 if role is None else Role[role.upper()]
    with httpx.Client(base_url=server.url, headers=headers) as client:
        for method, path, right in paths():
            if right is Right.NONE or path == "/v1/events":
                continue
            status = client.request(method, path).status_code
            if role is None:
                assert status == 404, (method, path)  # no project is there for it
            else:
                assert (status == 403) == (rank < NEEDED_ROLE[right]), (method, path, status)


def test_things_of_other_projects_are_missing(server: HubServer, owner: httpx.Client) -> None:
    owner.post("/v1/projects", json={"name": "other"}).raise_for_status()
    run = owner.post("/v1/runs", json={}).raise_for_status().json()["id"]
    headers = token_of(owner, "outsider", "admin", "other")
    with httpx.Client(base_url=server.url, headers=headers) as client:
        assert client.get("/v1/me").json()["project"] == "other"
        for method, path in {(route.method, route.path) for route in ROUTES if "{id}" in route.path}:
            if path.startswith("/v1/runs/{id}"):
                own = path.replace("{id}", run).replace("{key:path}", "a")
                body = {"metrics": [], "params": {}, "tags": {}, "client": "c", "first": 2, "records": []}
                content = {**body, "action": "stop", "status": "failed"} if method in {"POST", "PATCH"} else None
                answer = client.request(method, own, params={"key": "a"}, json=content)
                assert answer.status_code == 404 or path.endswith("/batches"), (method, own, answer.text)
        named = client.get("/v1/me", headers={"X-Skyward-Project": "default"})
        assert named.status_code == 404
        workspace = client.get("/v1/me", headers={"X-MLFLOW-WORKSPACE": "default"})
        assert workspace.status_code == 404


def test_revoked_token_ends_at_once(server: HubServer, owner: httpx.Client) -> None:
    made = owner.post("/v1/tokens", json={"name": "short"}).raise_for_status().json()
    headers = {"Authorization": f"Bearer {made['token']}"}
    with httpx.Client(base_url=server.url, headers=headers) as client:
        assert client.get("/v1/me").status_code == 200
        owner.delete(f"/v1/tokens/{made['id']}").raise_for_status()
        assert client.get("/v1/me").status_code == 401


def test_token_makes_none_that_can_do_more(server: HubServer, owner: httpx.Client) -> None:
    made = owner.post("/v1/tokens", json={"name": "narrow", "project": "default", "role": "viewer"}).json()
    headers = {"Authorization": f"Bearer {made['token']}"}
    with httpx.Client(base_url=server.url, headers=headers) as client:
        assert client.get("/v1/me").json()["role"] == "viewer"
        assert client.post("/v1/tokens", json={"name": "wide", "role": "admin"}).status_code == 403
        child = client.post("/v1/tokens", json={"name": "same"}).raise_for_status().json()
        listed = {token["id"]: token for token in owner.get("/v1/tokens").json()["tokens"]}
        assert (listed[child["id"]]["project"], listed[child["id"]]["role"]) == ("default", "viewer")


def test_token_of_a_run_writes_to_it_alone(server: HubServer, owner: httpx.Client) -> None:
    run, other = (owner.post("/v1/runs", json={}).json()["id"] for _ in range(2))
    made = owner.post("/v1/tokens", json={"run": run}).raise_for_status().json()
    headers = {"Authorization": f"Bearer {made['token']}"}
    metrics = {"metrics": [{"key": "loss", "value": 1}]}
    with httpx.Client(base_url=server.url, headers=headers) as client:
        assert client.post(f"/v1/runs/{run}/metrics", json=metrics).status_code == 200
        assert client.post(f"/v1/runs/{other}/metrics", json=metrics).status_code == 404
        assert client.post("/v1/tokens", json={"name": "more"}).status_code == 403


def test_changes_are_in_the_audit_and_its_chain_holds(owner: httpx.Client) -> None:
    owner.post("/v1/experiments", json={"name": "audited"}).raise_for_status()
    page = owner.get("/v1/audit", params={"limit": 5}).raise_for_status().json()
    assert page["audit"][0]["action"] == "experiment.create"
    assert page["audit"][0]["actor"] == "owner"
    older = owner.get("/v1/audit", params={"limit": 5, "page_token": page["next_page_token"]}).json()
    assert older["audit"][0]["id"] < page["audit"][-1]["id"]


def test_last_owner_cannot_be_disabled(owner: httpx.Client) -> None:
    for user in owner.get("/v1/users").json()["users"]:
        if user["is_owner"] and user["name"] != "owner" and user["disabled_at"] is None:
            owner.delete(f"/v1/users/{user['name']}").raise_for_status()
    assert owner.delete("/v1/users/owner").status_code == 409
