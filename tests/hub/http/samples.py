"""Requests made from the table of routes, so that a new route is tested without a new line here."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec
from msgspec import inspect

from skyward.hub.http.reply import Bytes
from skyward.hub.http.routing import Route
from skyward.hub.http.table import ROUTES
from skyward.hub.model.jobs import PROTOCOL

_NAME = re.compile(r"([\w-]+)/\{(\w+)(?::path)?\}")
_FILTERS = frozenset({"experiment_ids"})
_NO_THINGS = frozenset({"key", "metric_key", "model_json", "protocol"})
"""Lists that choose among things: unknown ones choose nothing."""


@dataclass(frozen=True, kw_only=True)
class Things:
    """One instance of each kind of thing that a route may name."""

    experiment: str
    run: str
    artifact: str
    metric: str
    token: str
    project: str
    user: str
    pool: str
    job: str
    machines: str
    model: str
    logged_model: str
    sweep: str
    trial: str
    sha256: str = "a" * 64

    def in_path(self, before: str, name: str) -> str:
        """Return the value of a name in a path. `before` is the part of the path in front of it."""
        values = {
            "experiments": self.experiment,
            "runs": self.run,
            "artifacts": self.artifact if name == "key" else f"{self.experiment}/{self.run}/artifacts/{self.artifact}",
            "blobs": self.sha256,
            "projects": self.project,
            "pools": self.pool,
            "sweeps": self.sweep,
            "hpo": self.sweep,
            "trials": self.trial,
            "jobs": self.job,
            "job-blobs": hashlib.sha256(b"bytes").hexdigest(),
            "attempts": "1",
            "results": "value",
            "launchers": "made-up",
            "capacity": self.machines,
            "workspaces": self.project,
            "members": self.user,
            "users": self.user,
            "tokens": self.token,
            "models": self.model,
            "versions": "1",
            "logged-models": self.logged_model,
            "tags": self.metric,
            "ui": "app.js",
        }
        assert before in values, f"{before}/{{{name}}}: a new kind of thing; add an instance of it to `Things`"
        return values[before]

    def in_field(self, name: str, route: Route) -> object | None:
        """Return the value of a field that names a thing. None: the field names none."""
        fields = getattr(route.request, "__struct_fields__", ())
        if name == "path" and "artifacts" in route.path:
            of_run = "run_id" in fields
            return self.artifact if of_run else f"{self.experiment}/{self.run}/artifacts"
        if name == "start" and route.path.endswith(("/output", "/items")):
            return "0"
        if name == "experiment" and "name" in fields:
            return None
        if ("registered-models/" in route.path and not route.path.endswith("/create")) or "versions/" in route.path:
            of_model = {"name": self.model, "version": "1", "stage": "Staging", "source": f"runs:/{self.run}/model"}
            if name in of_model:
                return of_model[name]
        return {
            "run": self.run,
            "run_id": self.run,
            "run_ids": self.run,
            "run_uuid": self.run,
            "experiment": self.experiment,
            "experiment_id": self.experiment,
            "experiment_ids": self.experiment,
            "key": self.artifact if "artifact" in route.path else self.metric,
            "metric_key": self.metric,
            "protocol": PROTOCOL,
            "model_json": '{"artifact_path": "a", "flavors": {}, "utc_time_created": "now", "run_id": "r"}',
        }.get(name)


def make_things(client: httpx.Client, owner: httpx.Client, name: str, user: str) -> Things:
    """Make one thing of each kind, as `client`."""
    tags = {"tags": {name: name}}
    experiment = client.post("/v1/experiments", json={"name": name, **tags}).raise_for_status().json()["id"]
    body = {"experiment_id": experiment, "name": name, "params": {name: name}, **tags}
    run = client.post("/v1/runs", json=body).raise_for_status().json()["id"]
    point = {"metrics": [{"key": name, "value": 1, "timestamp": 1}]}
    client.post(f"/v1/runs/{run}/metrics", json=point).raise_for_status()
    client.post(f"/v1/runs/{run}/artifacts", params={"key": name}, content=name.encode()).raise_for_status()
    api = "/api/2.0/mlflow"
    client.post(f"{api}/registered-models/create", json={"name": name}).raise_for_status()
    version = {"name": name, "source": f"runs:/{run}/model", "run_id": run}
    client.post(f"{api}/model-versions/create", json=version).raise_for_status()
    body = {"experiment_id": experiment, "name": name, "tags": [{"key": name, "value": name}]}
    logged = client.post(f"{api}/logged-models", json=body).raise_for_status().json()["model"]["info"]["model_id"]
    owner.post("/v1/users", json={"name": user, "is_service": True}).raise_for_status()
    owner.post("/v1/projects", json={"name": user}).raise_for_status()
    token = owner.post("/v1/tokens", json={"user": user, "name": name}).raise_for_status().json()["id"]
    pool = os.urandom(16).hex()
    batch = {"client": "c", "first": 1, "records": [["pool", {"name": name}]]}
    client.post(f"/v1/pools/{pool}/batches", json=batch).raise_for_status()
    sweep_body = {"name": name, "key": name, "config": {"search_space": {name: [1, 2]}}}
    sweep = client.post("/v1/hpo", json=sweep_body).raise_for_status().json()["id"]
    trial = client.post(f"/v1/sweeps/{sweep}/trials", json={"key": name}).raise_for_status().json()["id"]
    job = client.post("/v1/jobs", json={"name": name, "spec": {}}).raise_for_status().json()["id"]
    machines = f"set-{os.urandom(4).hex()}"  # those belong to no project, so everybody may read their names
    owner.post("/v1/capacity", json={"name": machines, "provider": {"type": "local"}}).raise_for_status()
    return Things(
        experiment=experiment,
        run=run,
        artifact=name,
        metric=name,
        token=token,
        project=user,
        user=user,
        model=name,
        logged_model=logged,
        pool=pool,
        sweep=str(sweep),
        trial=str(trial),
        job=job,
        machines=machines,
    )


@dataclass(frozen=True)
class Sample:
    """One legal request."""

    route: Route
    method: str
    path: str
    query: Mapping[str, Any] = field(default_factory=dict)
    body: Any = None
    names_thing: bool = False
    template: str = ""

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of all fields that the request may have."""
        return () if self.route.request is Bytes else getattr(self.route.request, "__struct_encode_fields__", ())

    @property
    def names(self) -> tuple[str, ...]:
        """Values in the path that name things."""
        parts = zip(self.template.split("/"), self.path.split("/"), strict=False)
        return tuple(value for part, value in parts if part.startswith("{"))

    def send(self, client: httpx.Client, headers: Mapping[str, str] | None = None) -> httpx.Response:
        """Send it. Of a stream of events, only the head is read."""
        content = None if self.body is None else msgspec.json.encode(self.body)
        kind = {"Content-Type": "application/json"} if content is not None else {}
        if self.route.request is Bytes and self.method in {"PUT", "POST"}:
            content = b"bytes"
        request = client.build_request(
            self.method, self.path, params=self.query, content=content, headers={**(headers or {}), **kind}
        )
        answer = client.send(request, stream=True)
        if answer.headers["content-type"].startswith("text/event-stream"):
            answer.close()
        else:
            answer.read()
        return answer

    def __str__(self) -> str:
        return f"{self.method} {self.path} {dict(self.query)} {self.body}"


def samples(things: Things) -> Iterator[Sample]:
    """Yield a legal request about `things` for each route and each of its twins."""
    for route in ROUTES:
        for template in (route.path, *route.twins):
            path = _NAME.sub(lambda name: f"{name[1]}/{things.in_path(name[1], name[2])}", template)
            query: dict[str, Any] = {name: things.in_field(name, route) for name in route.query}
            fields: dict[str, Any] = {}
            names_thing = "{" in template or bool(query)
            if route.request is not Bytes:
                fields, has_references = _fields(route, things)
                names_thing = names_thing or has_references
            if route.method in {"GET", "DELETE"}:
                yield Sample(route, route.method, path, {**query, **fields}, None, names_thing, template)
            else:
                body = None if route.request is Bytes else fields
                yield Sample(route, route.method, path, query, body, names_thing, template)


def _fields(route: Route, things: Things) -> tuple[dict[str, Any], bool]:
    """Return the required fields of a request and those that name things, and whether there are such."""
    info = inspect.type_info(route.request)
    assert isinstance(info, inspect.StructType)
    fields: dict[str, Any] = {}
    names_thing = False
    for entry in info.fields:
        value = things.in_field(entry.name, route)
        is_list = any(isinstance(kind, inspect.ListType) for kind in _kinds(entry.type))
        if value is not None:
            fields[entry.encode_name] = [value] if is_list else value
            is_filter = entry.name in _FILTERS or (is_list and entry.name == "experiment_id")
            names_thing = names_thing or not (is_filter or entry.name in _NO_THINGS)
        elif entry.required:
            fields[entry.encode_name] = _value(entry.type)
    return fields, names_thing


def _kinds(kind: inspect.Type) -> tuple[inspect.Type, ...]:
    return kind.types if isinstance(kind, inspect.UnionType) else (kind,)


def _value(kind: inspect.Type) -> Any:
    """Return a small legal value of a type."""
    match _kinds(kind)[0]:
        case inspect.StrType():
            return "made-up"
        case inspect.IntType(ge=least) | inspect.FloatType(ge=least):
            return least or 1
        case inspect.BoolType():
            return False
        case inspect.ListType():
            return []
        case inspect.DictType():
            return {}
        case inspect.LiteralType(values=values):
            return values[0]
        case inspect.StructType(fields=fields):
            return {entry.encode_name: _value(entry.type) for entry in fields if entry.required}
    raise AssertionError(f"{kind}: no sample for this type; add one")
