"""Workspaces of MLflow's server and projects of a hub: equal status, error code and JSON tree.

Some calls are left out, because the hub differs on purpose. Names may also have one letter, `.`, `_` and `@`. The hub
chooses where artifacts are, and moves nothing between projects (SET_DEFAULT).
"""

from __future__ import annotations

import pytest

from .oracle import Oracle, new_name

pytestmark = pytest.mark.timeout(300)  # a busy machine needs minutes to start MLflow's server


def create(oracle: Oracle, workspace: object) -> None:
    oracle.call("POST", "mlflow/workspaces", workspace, root="api/3.0")


def test_workspaces_are_made_and_found_alike(oracle: Oracle) -> None:
    name = new_name("team")
    for _ in range(2):
        create(oracle, {"name": name})
    for wrong in ("", "default", "Upper", "a/b", "-a", "n" * 64, 7, None):
        create(oracle, {"name": wrong})
    create(oracle, {})
    for asked in (name, "nowhere", "Upper"):
        oracle.call("GET", f"mlflow/workspaces/{asked}", root="api/3.0")
    oracle.check()
    listed = [side.send("GET", "api/3.0/mlflow/workspaces", None, None, None)[1] for side in oracle.sides]
    for tree in listed:  # MLflow's server has one more, for the test of imports
        assert {"default", name} <= {workspace["name"] for workspace in tree["workspaces"]}


def test_workspaces_are_described_and_deleted_alike(oracle: Oracle) -> None:
    def ask(method: str, name: str, body: object = None, **query: str) -> None:
        oracle.call(method, f"mlflow/workspaces/{name}", body, query=query, root="api/3.0")

    name, other = new_name("team"), new_name("team")
    create(oracle, {"name": name, "description": "Sees."})
    create(oracle, {"name": other, "description": 7})
    create(oracle, {"name": other, "description": ""})
    for asked in (name, other):
        ask("GET", asked)
    for body in ({"description": "Hears."}, {}, {"unknown": 1}, {"description": 7}, {"default_artifact_root": ""}):
        for asked in (name, "nowhere", "Upper"):
            ask("PATCH", asked, body)
        ask("GET", name)
    ask("PATCH", other, {"description": ""})
    ask("GET", other)
    inside = oracle.within(name)
    inside.post("experiments/create", {"name": "apart"}, apart="experiment_id")
    for mode in ("CASCADE", "junk"):
        for asked in ("default", "nowhere", "Upper"):
            ask("DELETE", asked, mode=mode)
    ask("DELETE", "default")
    ask("DELETE", name)
    ask("DELETE", name, mode="RESTRICT")
    ask("GET", name)
    ask("DELETE", name, mode="CASCADE")
    ask("DELETE", other)
    for asked in (name, other):
        ask("GET", asked)
        ask("DELETE", asked)
    oracle.get("experiments/get", experiment_id="<apart>")
    create(oracle, {"name": name})
    ask("GET", name)
    oracle.within(name).get("experiments/get-by-name", experiment_name="apart")
    oracle.check()


def test_requests_see_only_the_workspace_that_their_header_names(oracle: Oracle) -> None:
    name = new_name("team")
    create(oracle, {"name": name})
    inside = oracle.within(name)
    inside.post("experiments/create", {"name": "apart"}, apart="experiment_id")
    inside.post("experiments/create", {"name": "apart"})
    inside.create_run("inner", "<apart>")
    inside.post("runs/log-metric", {"run_id": "<inner>", "key": "m", "value": 1, "timestamp": 1})
    inside.post("registered-models/create", {"name": "apart"})
    for asker in (inside, oracle):
        asker.get("experiments/get", experiment_id="<apart>")
        asker.get("experiments/get-by-name", experiment_name="apart")
        asker.get("experiments/get-by-name", experiment_name="Default")
        asker.post("experiments/search", {"max_results": 10, "filter": "name = 'apart'"})
        asker.post("runs/search", {"experiment_ids": ["<apart>"]})
        asker.get("runs/get", run_id="<inner>")
        asker.get("metrics/get-history", run_id="<inner>", metric_key="m")
        asker.post("runs/set-tag", {"run_id": "<inner>", "key": "k", "value": "v"})
        asker.get("registered-models/get", name="apart")
        asker.get("registered-models/search", filter="name = 'apart'")
    oracle.check()


@pytest.mark.parametrize("absent", ["nowhere", "Upper", "a/b"])
def test_workspaces_that_do_not_exist_are_refused_alike(oracle: Oracle, absent: str) -> None:
    outside = oracle.within(absent)
    outside.post("experiments/search", {"max_results": 10})
    outside.get("registered-models/search")
    outside.call("GET", "mlflow/workspaces/default", root="api/3.0")
    oracle.check()
