"""MLflow's registry and logged models, as its client sends them. The answers are those of MLflow 3.17.2."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.hub.http.test_mlflow_runs import API, make_run


def ask(client: httpx.Client, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
    if method == "GET":
        answer = client.get(f"{API}/{path}", params=body)
    else:
        answer = client.request(method, f"{API}/{path}", json=body)
    return answer.status_code, answer.json()


def good(client: httpx.Client, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    status, answer = ask(client, method, path, body)
    assert status == 200, answer
    return answer


def make_version(client: httpx.Client, name: str) -> tuple[str, str]:
    """Make a version of a run's artifact. Returns its number and the run."""
    run = make_run(client)
    body = {"name": name, "source": f"runs:/{run}/model", "run_id": run}
    return good(client, "POST", "model-versions/create", body)["model_version"]["version"], run


def test_a_version_has_mlflows_fields(owner: httpx.Client) -> None:
    made = good(owner, "POST", "registered-models/create", {"name": "fields"})["registered_model"]
    assert set(made) == {"name", "creation_timestamp", "last_updated_timestamp"}
    run = make_run(owner)
    body = {"name": "fields", "source": f"runs:/{run}/m", "run_id": run, "tags": [{"key": "a", "value": "b"}]}
    version = good(owner, "POST", "model-versions/create", body)["model_version"]
    assert version.pop("creation_timestamp") == version.pop("last_updated_timestamp")
    assert version == {
        "name": "fields",
        "version": "1",
        "current_stage": "None",
        "description": "",
        "source": f"runs:/{run}/m",
        "run_id": run,
        "status": "READY",
        "run_link": "",
        "tags": [{"key": "a", "value": "b"}],
    }
    uri = good(owner, "GET", "model-versions/get-download-uri", {"name": "fields", "version": "1"})
    assert uri == {"artifact_uri": f"runs:/{run}/m"}


def test_stages_archive_and_aliases_follow(owner: httpx.Client) -> None:
    good(owner, "POST", "registered-models/create", {"name": "staged"})
    for _ in range(3):
        make_version(owner, "staged")
    for version in ("1", "2"):
        body = {"name": "staged", "version": version, "stage": "production", "archive_existing_versions": True}
        good(owner, "POST", "model-versions/transition-stage", body)
    good(owner, "POST", "registered-models/alias", {"name": "staged", "alias": "champion", "version": "2"})
    model = good(owner, "GET", "registered-models/get", {"name": "staged"})["registered_model"]
    latest = [(version["version"], version["current_stage"]) for version in model["latest_versions"]]
    assert latest == [("1", "Archived"), ("2", "Production"), ("3", "None")]
    assert model["aliases"] == [{"alias": "champion", "version": "2"}]
    found = good(owner, "GET", "registered-models/alias", {"name": "staged", "alias": "champion"})["model_version"]
    assert (found["version"], found["aliases"]) == ("2", ["champion"])
    wanted = {"name": "staged", "stages": ["Production"]}
    newest = good(owner, "POST", "registered-models/get-latest-versions", wanted)["model_versions"]
    assert [version["version"] for version in newest] == ["2"]
    good(owner, "DELETE", "model-versions/delete", {"name": "staged", "version": "2"})
    assert ask(owner, "GET", "registered-models/alias", {"name": "staged", "alias": "champion"})[0] == 400
    assert make_version(owner, "staged")[0] == "4"


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "message"),
    [
        ("POST", "registered-models/create", {"name": "taken"}, 400, "Registered Model (name=taken) already exists."),
        ("POST", "registered-models/create", {"name": "a/b"}, 400, "Names cannot contain '/' or ':'"),
        ("POST", "registered-models/create", {}, 400, "Missing value for required parameter 'name'."),
        ("GET", "registered-models/get", {"name": "zz"}, 404, "Registered Model with name=zz not found"),
        ("GET", "model-versions/get", {"name": "taken", "version": "x"}, 400, "Parameter 'version' must be an integer"),
        ("GET", "model-versions/get", {"name": "taken", "version": "9"}, 404, "Model Version (name=taken, version=9)"),
        ("POST", "registered-models/alias", {"name": "taken", "alias": "v1", "version": "1"}, 400, "is reserved"),
        ("POST", "registered-models/alias", {"name": "taken", "alias": "Latest", "version": "1"}, 400, "is reserved"),
        ("POST", "registered-models/alias", {"name": "taken", "alias": "a b", "version": "1"}, 400, "Invalid alias"),
        ("GET", "registered-models/alias", {"name": "taken", "alias": "no"}, 400, "Registered model alias no not"),
        ("GET", "registered-models/search", {"max_results": 1001}, 400, "for parameter 'max_results' supplied"),
        ("GET", "registered-models/search", {"filter": "foo = 'x'"}, 400, "Invalid attribute key 'foo'"),
        ("GET", "model-versions/search", {"filter": "name = 'a' OR name = 'b'"}, 400, "Invalid clause(s)"),
        ("GET", "logged-models/m-0", {}, 404, "Logged model with ID 'm-0' not found."),
        ("POST", "logged-models/search", {}, 400, "Missing value for required parameter 'experiment_ids'."),
        ("POST", "logged-models", {"experiment_id": "0", "name": "a.b"}, 400, "Invalid model name"),
    ],
)
def test_mistakes_have_mlflows_words(
    owner: httpx.Client, method: str, path: str, body: dict[str, Any], status: int, message: str
) -> None:
    ask(owner, "POST", "registered-models/create", {"name": "taken"})
    answered, answer = ask(owner, method, path, body)
    assert (answered, message in answer["message"]) == (status, True), answer


@pytest.mark.parametrize(
    "source",
    [
        "file:///etc/passwd",
        "/etc/passwd",
        "etc/passwd",
        "C:\\windows",
        "runs:/nobody/model",
        "runs://host/run/model",
        "models:/m-00000000000000000000000000000000",
        "models://host/sourced/1",
        "mlflow-artifacts:/0/nobody/artifacts/m",
        "s3://bucket/../other",
        "s3://bucket/%2e%2e/other",
        "mlflow-artifacts:/0/x/artifacts/..;/y",
        "dbfs:/x",
        "ftp://host/x",
        "gopher://host",
    ],
)
def test_a_source_that_leads_elsewhere_is_refused(owner: httpx.Client, source: str) -> None:
    ask(owner, "POST", "registered-models/create", {"name": "sourced"})
    for run_id in ("", "nobody"):
        body = {"name": "sourced", "source": source, "run_id": run_id}
        status, answer = ask(owner, "POST", "model-versions/create", body)
        assert (status, answer["error_code"]) == (400, "INVALID_PARAMETER_VALUE"), answer


def test_searches_filter_order_and_page(owner: httpx.Client) -> None:
    run = ""
    for name in ("find-a", "find-b", "find-c"):
        tags = [{"key": "team", "value": name[-1]}]
        good(owner, "POST", "registered-models/create", {"name": name, "tags": tags})
        run = make_version(owner, name)[1]

    def models(**query: Any) -> list[str]:
        found = good(owner, "GET", "registered-models/search", query).get("registered_models", [])
        return [model["name"] for model in found]

    no_prompts = "tag.`mlflow.prompt.is_prompt` != 'true'"
    assert models(filter=f"name LIKE 'find-%' AND {no_prompts}") == ["find-a", "find-b", "find-c"]
    assert models(filter="tags.team != 'a' AND name ILIKE 'FIND%'", order_by=["name DESC"]) == ["find-c", "find-b"]
    assert models(filter="tags.team = 'a'") == ["find-a"]
    assert models(filter="tags.`mlflow.prompt.is_prompt` = 'true'") == []
    first = good(owner, "GET", "registered-models/search", {"filter": "name LIKE 'find-%'", "max_results": 2})
    query = {"filter": "name LIKE 'find-%'", "max_results": 2, "page_token": first["next_page_token"]}
    assert [model["name"] for model in good(owner, "GET", "registered-models/search", query)["registered_models"]] == [
        "find-c"
    ]
    query = {"filter": f"run_id = '{run}' AND {no_prompts}", "max_results": 10_000}
    [version] = good(owner, "GET", "model-versions/search", query)["model_versions"]
    assert (version["name"], version["version"]) == ("find-c", "1")
    query = {"filter": "name = 'find-a' AND version_number > 1"}
    assert good(owner, "GET", "model-versions/search", query) == {}


def test_a_logged_model_is_made_filled_measured_registered_and_found(owner: httpx.Client) -> None:
    run = make_run(owner)
    body = {"experiment_id": "0", "name": "net", "source_run_id": run, "params": [{"key": "depth", "value": "3"}]}
    info = good(owner, "POST", "logged-models", body)["model"]["info"]
    model_id = info["model_id"]
    assert info["status"] == "LOGGED_MODEL_PENDING"
    assert info["artifact_uri"] == f"mlflow-artifacts:/0/models/{model_id}/artifacts"
    path = f"/api/2.0/mlflow-artifacts/artifacts/0/models/{model_id}/artifacts/data/weights"
    owner.put(path, content=b"weights").raise_for_status()
    assert owner.get(path).content == b"weights"
    files = good(owner, "GET", f"logged-models/{model_id}/artifacts/directories", {"artifact_directory_path": "data"})
    assert files["files"] == [{"path": "data/weights", "is_dir": False, "file_size": 7}]
    finished = good(owner, "PATCH", f"logged-models/{model_id}", {"model_id": model_id, "status": 2})["model"]
    assert finished["info"]["status"] == "LOGGED_MODEL_READY"
    point = {"key": "acc", "value": 0.5, "timestamp": 1, "step": 2, "model_id": model_id, "dataset_name": "d"}
    good(owner, "POST", "runs/log-metric", {"run_id": run, **point})
    good(owner, "POST", "runs/log-batch", {"run_id": run, "metrics": [{**point, "step": 3, "value": "NaN"}]})
    good(owner, "PATCH", f"logged-models/{model_id}/tags", {"tags": [{"key": "x", "value": "y"}]})
    query = {"filter": "metrics.acc > 0.1 AND params.depth = '3' AND tags.x LIKE 'y%' AND name = 'net'"}
    order = [{"field_name": "metrics.acc", "ascending": False, "dataset_name": "d"}]
    body = {"experiment_ids": ["0"], "datasets": [{"dataset_name": "d"}], "order_by": order, **query}
    [found] = good(owner, "POST", "logged-models/search", body)["models"]
    assert [(m["step"], m["value"], m["run_id"]) for m in found["data"]["metrics"]] == [(2, 0.5, run), (3, "NaN", run)]
    good(owner, "POST", "registered-models/create", {"name": "from-logged"})
    body = {"name": "from-logged", "source": f"models:/{model_id}", "model_id": model_id}
    version = good(owner, "POST", "model-versions/create", body)["model_version"]
    assert version["run_id"] == run
    uri = good(owner, "GET", "model-versions/get-download-uri", {"name": "from-logged", "version": "1"})
    assert uri == {"artifact_uri": info["artifact_uri"]}
    body = {"name": "from-logged", "source": "models:/from-logged/1"}
    good(owner, "POST", "model-versions/create", body)
    good(owner, "DELETE", f"logged-models/{model_id}/tags/x")
    assert ask(owner, "DELETE", f"logged-models/{model_id}/tags/x")[0] == 404
    good(owner, "DELETE", f"logged-models/{model_id}")
    assert ask(owner, "GET", f"logged-models/{model_id}")[0] == 404
    assert owner.get(path).status_code == 404
