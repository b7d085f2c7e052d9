"""The same call to MLflow's server and to a hub, and one comparison of the two answers."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
from hypothesis import HealthCheck, settings

GENERATED = settings(
    max_examples=60, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck), database=None
)
"""Of generated calls. Strategies take values from lists: Hypothesis also draws numbers that it finds in loaded modules,
so a run of more tests would draw others."""

_TIMES = frozenset({
    "creation_time", "last_update_time", "creation_timestamp", "last_updated_timestamp", "creation_timestamp_ms",
    "last_updated_timestamp_ms",
})  # fmt: skip
_UNORDERED = frozenset({"tags", "params", "metrics"})
"""Lists of a run or an experiment whose order MLflow leaves to its database."""
_KEYS = {"dataset_inputs": "dataset", "model_inputs": "model_id", "model_outputs": "model_id"}
"""Further such lists, and the field to sort them by."""
_OURS = frozenset({"user_id"})
"""Fields that differ on purpose. A run's user is the identity that the token proves; the name that a client gives
becomes the tag `mlflow.user`."""
_WORKSPACE_IN_URI = re.compile(r"(?<=mlflow-artifacts:/)workspaces/[^/]+/")
"""MLflow keeps the files of a workspace in a folder of its own. A hub needs none: it finds files by their run."""
_numbers = itertools.count(1)
_PLACEHOLDER = re.compile(r"<(\w+)>")
_EXPERIMENT_IN_URI = re.compile(r"(?<=mlflow-artifacts:/)\d+(?=/|$)")


def new_name(start: str) -> str:
    """Return a name that no other test has: all of them use the same two servers."""
    return f"{start}-{next(_numbers)}"


@dataclass(frozen=True)
class Answer:
    """Status, error code and JSON tree of an answer, with placeholders in place of ids and times."""

    status: int
    tree: Any


@dataclass
class Side:
    """One of the two servers, and the names that a test gave to ids of this server."""

    client: httpx.Client
    ids: dict[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)

    def send(self, method: str, path: str, body: Any, query: Mapping[str, Any] | None, raw: bytes | None) -> Any:
        headers = dict(self.headers) | ({"Content-Type": "application/json"} if raw is None else {})
        content = raw
        answer = self.client.request(
            method,
            self.fill(path),
            params=self.fill(query),
            headers=headers,
            **({"json": self.fill(body)} if body is not None else {"content": content}),
        )
        is_json = answer.headers.get("content-type", "").startswith("application/json")
        return answer.status_code, answer.json() if is_json and answer.content else answer.text or {}

    def fill(self, value: Any) -> Any:
        """Put this server's ids in place of names in angle brackets."""
        if isinstance(value, str):
            return _PLACEHOLDER.sub(lambda match: self.ids[match[1]], value)
        if isinstance(value, Mapping):
            return {name: self.fill(item) for name, item in value.items()}
        if isinstance(value, list):
            return [self.fill(item) for item in value]
        return value

    def normalise(self, value: Any, name: str = "") -> Any:
        """Put names in place of this server's ids and times.

        An experiment's id is a small number that may also be a step or a size, so only its field and URIs are read.
        """
        if name in _TIMES and isinstance(value, int):
            return "<time>"
        if name in {"next_page_token", "page_token"}:
            return "<token>" if value else value
        if name == "experiment_id":
            return self._names.get(value, value)
        if isinstance(value, str):
            for own, placeholder in self._names.items():
                value = value if own.isdecimal() else value.replace(own, placeholder)
            value = _WORKSPACE_IN_URI.sub("", value)
            return _EXPERIMENT_IN_URI.sub(lambda match: self._names.get(match[0], match[0]), value)
        if isinstance(value, dict):
            return {key: self.normalise(item, key) for key, item in value.items() if key not in _OURS}
        if isinstance(value, list):
            items = [self.normalise(item) for item in value if item != {"key": "mlflow.user", "value": "me"}]
            if name in _KEYS:
                return sorted(items, key=lambda item: str(item[_KEYS[name]]))
            is_keyed = name in _UNORDERED and all(isinstance(item, dict) and "key" in item for item in items)
            is_history = is_keyed and len({item["key"] for item in items}) < len(items)
            return sorted(items, key=lambda item: str(item["key"])) if is_keyed and not is_history else items
        return value

    @property
    def _names(self) -> dict[str, str]:
        return {own: f"<{name}>" for name, own in self.ids.items()}


class Oracle:
    """MLflow's server and a hub. Every call goes to both, and an answer that differs fails the test.

    Where MLflow fails (500), or its database does (BAD_REQUEST), the call was wrong, and the hub must refuse it (4xx).

    Args:
        theirs: Client of MLflow's server.
        ours: Client of the hub.
    """

    def __init__(self, theirs: httpx.Client, ours: httpx.Client) -> None:
        self.theirs, self.ours = Side(theirs), Side(ours)
        self.differences: list[str] = []

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.theirs, self.ours

    def within(self, workspace: str) -> Oracle:
        """Return an oracle whose calls name a workspace. It shares ids and differences with this one."""
        inside = copy(self)
        headers = {"X-MLFLOW-WORKSPACE": workspace}
        inside.theirs, inside.ours = (replace(side, headers=headers) for side in self.sides)
        return inside

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, Any] | None = None,
        raw: bytes | None = None,
        save: Mapping[str, str] | None = None,
        root: str = "api/2.0",
    ) -> Answer:
        """Send a call to both servers and compare.

        Args:
            method: Method of HTTP.
            path: Path below `root`; names in angle brackets stand for ids that were saved.
            save: Name of an id by its place in the answer, such as `{"run1": "run.info.run_id"}`.
            root: First part of the path.
        """
        answers = []
        for side in self.sides:
            status, tree = side.send(method, f"{root}/{path}", body, query, raw)
            for name, place in (save or {}).items():
                found = tree
                for part in place.split("."):
                    found = found.get(part, "") if isinstance(found, dict) else ""
                if found:
                    side.ids[name] = str(found).removeprefix("mlflow-artifacts:/")
            if status >= 400:
                tree = {"error_code": tree.get("error_code") if isinstance(tree, dict) else None}
            answers.append(Answer(status, side.normalise(tree)))
        theirs, ours = answers
        has_failed = theirs.status >= 500 or theirs.tree == {"error_code": "BAD_REQUEST"}
        is_refused = has_failed and 400 <= ours.status < 500
        if theirs != ours and not is_refused:
            where = "\n".join(sorted(set(_paths_that_differ(theirs.tree, ours.tree))))
            asked = str(body or query or raw)[:300]
            self.differences.append(f"{method} {path} {asked}: {theirs.status}, hub {ours.status}\n{where}")
        return theirs

    def post(self, path: str, body: Any, **save: str) -> Answer:
        return self.call("POST", f"mlflow/{path}", body, save=save)

    def get(self, path: str, /, **query: Any) -> Answer:
        return self.call("GET", f"mlflow/{path}", query=query)

    def create_run(self, name: str = "run", experiment: str = "0", **more: Any) -> None:
        """Create a run, whose name is that of its id too. `<NAME_files>` is the path of its artifacts."""
        body = {"experiment_id": experiment, "user_id": "me", "run_name": name, "start_time": 1_700_000_000_000}
        saved = {name: "run.info.run_id", f"{name}_files": "run.info.artifact_uri"}
        self.post("runs/create", body | more, **saved)

    def patch(self, path: str, body: Any) -> Answer:
        return self.call("PATCH", f"mlflow/{path}", body)

    def delete(self, path: str, body: Any) -> Answer:
        return self.call("DELETE", f"mlflow/{path}", body)

    def pages(self, path: str, /, method: str = "GET", **asked: Any) -> None:
        """Follow the tokens of a search to the last page. Tokens differ, so each server gets its own."""
        for _ in range(100):
            given: dict[str, Any] = {"query": asked} if method == "GET" else {"body": asked}
            answer = self.call(method, f"mlflow/{path}", **given, save={"page": "next_page_token"})
            if "next_page_token" not in answer.tree:
                return
            asked["page_token"] = "<page>"
        raise AssertionError("a hundred pages, and no end")

    def check(self) -> None:
        """Fail with every difference since the last check."""
        found, self.differences = self.differences, []
        assert not found, "\n".join([f"{len(found)} answers differ", *found])


def _paths_that_differ(theirs: Any, ours: Any, path: str = "") -> Iterator[str]:
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for name in theirs.keys() | ours.keys():
            yield from _paths_that_differ(theirs.get(name), ours.get(name), f"{path}.{name}")
    elif isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours):
        for number, (one, other) in enumerate(zip(theirs, ours, strict=True)):
            yield from _paths_that_differ(one, other, f"{path}[{number}]")
    elif theirs != ours:
        yield f"    {path}: {theirs!s:.300} | hub {ours!s:.300}"
