"""Rights: each route of the table by each identity."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from skyward.hub.http.reply import Bytes
from skyward.hub.model.access import NEEDED_ROLE, Right, Role
from skyward.hub.store.transaction import ReadSnapshot
from skyward.testing.hub import HubServer
from tests.hub.http.samples import Sample, Things, make_things, samples

CANARY = "canary7f3a"
"""Text in all that belongs to the project `default`. Nobody from elsewhere ever reads it."""

CREATE = frozenset({"/v1/runs/{id}/batches", "/v1/job-blobs/{sha256}"})
"""Routes on which an unknown thing is no error: the first record makes the run, and the bytes make the blob."""


@dataclass
class World:
    """A hub with a project, its members, and an admin of another project."""

    server: HubServer
    owner: httpx.Client
    secret: Things

    def token(self, user: str, role: Role, project: str) -> str:
        """Make a service account with a role in a project, and return its token."""
        self.owner.post("/v1/users", json={"name": user, "is_service": True}).raise_for_status()
        if role is not Role.OWNER:
            member = {"user": user, "role": role.name.lower()}
            self.owner.post(f"/v1/projects/{project}/members", json=member).raise_for_status()
        made = self.owner.post("/v1/tokens", json={"user": user}).raise_for_status()
        return str(made.json()["token"])

    def client(self, token: str) -> httpx.Client:
        return httpx.Client(base_url=self.server.url, headers={"Authorization": f"Bearer {token}"})

    def shown(self) -> list[Any]:
        """Return all that the owner sees of the secret things."""
        run = self.owner.get(f"/v1/runs/{self.secret.run}").json()
        paths = (
            f"/v1/experiments/{self.secret.experiment}",
            f"/v1/runs/{self.secret.run}/commands",
            f"/v1/runs/{self.secret.run}/points?key={CANARY}",
            f"/v1/projects/{self.secret.project}/members",
            f"/v1/models/{CANARY}/versions",
            f"/api/2.0/mlflow/registered-models/get?name={CANARY}",
            f"/api/2.0/mlflow/logged-models/{self.secret.logged_model}",
            "/v1/projects",
            "/v1/users",
        )
        tokens = self.owner.get("/v1/tokens?everybody=true").json()["tokens"]
        tokens = [token["id"] for token in tokens if token["name"] == CANARY]
        return [run, tokens, *(self.owner.get(path).raise_for_status().json() for path in paths)]


@pytest.fixture(scope="module")
def world(server: HubServer) -> Iterator[World]:
    with httpx.Client(base_url=server.url, headers=server.headers) as owner:
        secret = make_things(owner, owner, CANARY, CANARY)
        owner.post("/v1/projects", json={"name": "other"}).raise_for_status()
        yield World(server, owner, secret)


def closed(things: Things) -> Iterator[Sample]:
    """Yield the requests that need a credential."""
    yield from (sample for sample in samples(things) if sample.route.right is not Right.NONE)


@pytest.mark.parametrize("token", ["", "sky_ffff_" + "f" * 40, "nonsense"])
def test_without_a_valid_token_every_closed_route_is_401(world: World, token: str) -> None:
    before = world.shown()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with httpx.Client(base_url=world.server.url) as client:
        answers = {str(sample): sample.send(client, headers).status_code for sample in closed(world.secret)}
    assert {name: status for name, status in answers.items() if status != 401} == {}
    assert world.shown() == before


@pytest.mark.parametrize("role", list(Role))
def test_each_route_is_open_from_its_role_on(world: World, role: Role) -> None:
    name = f"of-{role.name.lower()}"
    token = world.server.token if role is Role.OWNER else world.token(f"member-{name}", role, "default")
    wrong = {}
    with world.client(token) as client:
        sandbox = make_things(client if role > Role.VIEWER else world.owner, world.owner, name, name)
        for sample in closed(sandbox):
            if sample.path == "/v1/tokens" and sample.body and role is Role.VIEWER:
                sample.body.pop("run")  # the token of a run writes
            is_open = role >= NEEDED_ROLE[sample.route.right]
            answer = sample.send(client)
            if answer.is_server_error or (answer.status_code in {401, 403}) == is_open:
                wrong[str(sample)] = answer.status_code
    assert wrong == {}


def test_admin_of_another_project_finds_nothing_reads_nothing_and_changes_nothing(world: World) -> None:
    token = world.token("outsider", Role.ADMIN, "other")
    before = world.shown()
    wrong = {}
    with world.client(token) as client:
        for sample in closed(world.secret):
            answer = sample.send(client)
            expected = {404} if sample.names_thing and sample.route.path not in CREATE else {200, 201, 400, 404}
            if NEEDED_ROLE[sample.route.right] > Role.ADMIN:
                expected = {403}
            if answer.status_code not in expected or (answer.is_success and CANARY in text_of(answer)):
                wrong[str(sample)] = answer.status_code, text_of(answer)
    assert wrong == {}
    assert world.shown() == before


def test_project_that_is_not_ones_own_is_404_however_it_is_named(world: World) -> None:
    wrong = {}
    with world.client(world.token("stranger", Role.ADMIN, "other")) as client:
        for sample in closed(world.secret):
            for header in ("X-Skyward-Project", "X-MLflow-Workspace"):
                status = sample.send(client, {header: "default"}).status_code
                if status != 404:
                    wrong[str(sample)] = status
    assert wrong == {}


def test_user_of_no_project_finds_none(world: World) -> None:
    world.owner.post("/v1/users", json={"name": "guest", "is_service": True}).raise_for_status()
    token = world.owner.post("/v1/tokens", json={"user": "guest"}).raise_for_status().json()["token"]
    with world.client(token) as client:
        statuses = {str(sample): sample.send(client).status_code for sample in closed(world.secret)}
    assert {name: status for name, status in statuses.items() if status != 404} == {}


def test_token_of_a_run_reaches_no_other_run_and_nothing_of_its_project(world: World) -> None:
    run = world.owner.post("/v1/runs", json={}).raise_for_status().json()["id"]
    token = world.owner.post("/v1/tokens", json={"run": run}).raise_for_status().json()["token"]
    before = world.shown()
    wrong = {}
    with world.client(token) as client:
        for sample in closed(world.secret):
            answer = sample.send(client)
            expected = {403, 404} if sample.names_thing else {200, 400, 403, 404}
            if answer.status_code not in expected or (answer.is_success and CANARY in text_of(answer)):
                wrong[str(sample)] = answer.status_code, text_of(answer)
    assert wrong == {}
    assert world.shown() == before


NO_CHANGE = frozenset(
    {"runs/log-batch", "runs/log-metric", "metrics", "runs/update", "params", "tags", "batches", "poll", "lease"}
)
"""Ends of paths whose samples change nothing, or log points: those are in the audit once for each run."""
TRIALS = frozenset({"/v1/sweeps/{id}/trials", "/v1/trials/{id}", "/v1/trials/{id}/heartbeat"})
"""Routes of trials, which are in the audit once for each sweep."""


def test_each_change_and_each_read_of_a_file_is_in_the_audit(world: World) -> None:
    things = make_things(world.owner, world.owner, "audited", "audited")
    wrong, audited = {}, 0
    asked = [sample for sample in closed(things) if sample.template == sample.route.path]
    for sample in sorted(asked, key=lambda sample: sample.method == "DELETE" or "delete" in sample.path):
        reads_file = sample.method == "GET" and sample.route.answer is Bytes and "artifacts/" in sample.path
        is_change = sample.method != "GET" and not sample.path.endswith(("/search", "/get-latest-versions"))
        before = world.server.hub.database.read_and_wait(last_audit)
        is_success = sample.send(world.owner).is_success
        entries = world.server.hub.database.read_and_wait(last_audit) - before
        is_empty = sample.path.endswith(tuple(NO_CHANGE)) or (sample.method == "PATCH" and not sample.body)
        is_empty |= sample.template in TRIALS
        if entries != (is_success and (reads_file or is_change)) and not is_empty:
            wrong[str(sample)] = entries
        audited += entries
    assert wrong == {}
    assert audited > 30


def last_audit(snapshot: ReadSnapshot) -> int:
    return int(snapshot.execute("SELECT max(id) FROM audit").fetchone()[0])


def text_of(answer: httpx.Response) -> str:
    return answer.text if answer.is_stream_consumed else ""
