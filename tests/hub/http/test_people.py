"""Signing in, tokens, roles and projects, over HTTP."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from skyward.testing.hub import HubServer


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


def test_token_makes_none_that_lives_longer(server: HubServer, owner: httpx.Client) -> None:
    soon = int(time.time() * 1000) + 60_000
    made = owner.post("/v1/tokens", json={"name": "brief", "expires_at": soon}).raise_for_status().json()
    with httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {made['token']}"}) as client:
        children = [
            client.post("/v1/tokens", json={"expires_at": at}).json()["id"] for at in (None, soon + 1, soon - 1)
        ]
    listed = {token["id"]: token["expires_at"] for token in owner.get("/v1/tokens").json()["tokens"]}
    assert [listed[child] for child in children] == [soon, soon, soon - 1]


def test_token_of_one_project_lists_that_one(server: HubServer, owner: httpx.Client) -> None:
    owner.post("/v1/projects", json={"name": "second"}).raise_for_status()
    made = owner.post("/v1/tokens", json={"project": "second"}).raise_for_status().json()
    with httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {made['token']}"}) as client:
        assert [project["name"] for project in client.get("/v1/projects").json()["projects"]] == ["second"]


def test_token_of_a_run_writes_to_it_alone(server: HubServer, owner: httpx.Client) -> None:
    run, other = (owner.post("/v1/runs", json={}).json()["id"] for _ in range(2))
    made = owner.post("/v1/tokens", json={"run": run}).raise_for_status().json()
    headers = {"Authorization": f"Bearer {made['token']}"}
    metrics = {"metrics": [{"key": "loss", "value": 1}]}
    with httpx.Client(base_url=server.url, headers=headers) as client:
        assert client.post(f"/v1/runs/{run}/metrics", json=metrics).status_code == 200
        assert client.post(f"/v1/runs/{other}/metrics", json=metrics).status_code == 404
        assert client.post("/v1/tokens", json={"name": "more"}).status_code == 403
        assert client.get("/v1/tokens").status_code == 403


def test_changes_are_in_the_audit_and_its_chain_holds(owner: httpx.Client) -> None:
    owner.post("/v1/experiments", json={"name": "audited"}).raise_for_status()
    page = owner.get("/v1/audit", params={"limit": 5}).raise_for_status().json()
    assert page["audit"][0]["action"] == "experiment.create"
    assert page["audit"][0]["actor"] == "owner"
    older = owner.get("/v1/audit", params={"limit": 5, "page_token": page["next_page_token"]}).json()
    assert older["audit"][0]["id"] < page["audit"][-1]["id"]


def test_sign_ins_and_sign_outs_are_audited_and_refused_ones_only_counted(
    server: HubServer, owner: httpx.Client, stranger: httpx.Client
) -> None:
    newest = owner.get("/v1/audit", params={"limit": 1}).json()["audit"][0]["id"]
    for number in range(50):
        assert stranger.post("/v1/session", json={"code": f"sky_{number:012x}_{'0' * 43}"}).status_code == 401
    with sign_in(server, owner, "hopper") as browser:
        browser.request("DELETE", "/v1/session").raise_for_status()
        browser.request("DELETE", "/v1/session").raise_for_status()  # there is none to end now
    entries = [row for row in owner.get("/v1/audit").json()["audit"] if row["id"] > newest]
    sessions = [(row["action"], row["actor"]) for row in entries if row["action"] in ("session.begin", "session.end")]
    assert sessions == [("session.end", "hopper"), ("session.begin", "hopper")]
    assert sum(row["action"] == "session.refuse" for row in entries) <= 1


def test_last_owner_cannot_be_disabled(owner: httpx.Client) -> None:
    for user in owner.get("/v1/users").json()["users"]:
        if user["is_owner"] and user["name"] != "owner" and user["disabled_at"] is None:
            owner.delete(f"/v1/users/{user['name']}").raise_for_status()
    assert owner.delete("/v1/users/owner").status_code == 409
