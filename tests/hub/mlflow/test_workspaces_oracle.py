"""Workspaces of MLflow's server and projects of a hub: equal status, error code and JSON tree.

Some calls are left out, because the hub differs on purpose. Names may also have one letter, `.`, `_` and `@`. A project
has no description, and the hub's own commands change and delete it.
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
