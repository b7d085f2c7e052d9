"""MLflow's calls for experiments and runs, as its client sends them."""

from __future__ import annotations

import httpx

from skyward.hub.store import runs
from skyward.testing.hub import HubServer

API = "/api/2.0/mlflow"


def make_run(client: httpx.Client) -> str:
    run = client.post(f"{API}/runs/create", json={"experiment_id": "0", "start_time": 1}).raise_for_status().json()
    return str(run["run"]["info"]["run_id"])


def test_experiment_is_found_by_name_and_id(owner: httpx.Client) -> None:
    made = owner.post(f"{API}/experiments/create", json={"name": "vision", "tags": [{"key": "a", "value": "b"}]})
    number = made.raise_for_status().json()["experiment_id"]
    by_name = owner.get(f"{API}/experiments/get-by-name", params={"experiment_name": "vision"}).json()
    assert by_name == owner.get(f"{API}/experiments/get", params={"experiment_id": number}).json()
    assert by_name["experiment"]["tags"] == [{"key": "a", "value": "b"}]
    assert by_name["experiment"]["lifecycle_stage"] == "active"


def test_missing_and_wrong_fields_are_named_in_mlflows_words(owner: httpx.Client) -> None:
    def message(body: object) -> tuple[int, str, str]:
        answer = owner.post(f"{API}/runs/log-batch", json=body)
        return answer.status_code, answer.json()["error_code"], answer.json()["message"]

    missing = (400, "INVALID_PARAMETER_VALUE", "Missing value for required parameter 'run_id'.")
    assert message({}) == missing
    assert message({"run_id": None}) == missing
    assert message({"run_id": ""}) == missing
    metric = {"key": "loss", "timestamp": 1}
    assert message({"run_id": "a", "metrics": [metric]})[2] == (
        "Missing value for required parameter 'metrics[0].value'."
    )
    wrong = message({"run_id": "a", "metrics": [{**metric, "value": 1, "step": "x"}]})
    assert wrong[2].startswith("Invalid value \"x\" for parameter 'metrics[0].step' supplied")
    assert message({"run_id": "a", "params": "5"})[2].startswith("Invalid value \"5\" for parameter 'params' supplied")


def test_numbers_may_be_text_and_nan_is(owner: httpx.Client) -> None:
    run_id = make_run(owner)
    point = {"run_id": run_id, "run_uuid": run_id, "key": "loss", "value": "NaN", "timestamp": "5", "step": "7"}
    owner.post(f"{API}/runs/log-metric", json=point).raise_for_status()
    history = owner.get(f"{API}/metrics/get-history", params={"run_id": run_id, "metric_key": "loss"}).json()
    assert history == {"metrics": [{"key": "loss", "value": "NaN", "timestamp": 5, "step": 7}]}
    too_large = owner.post(f"{API}/runs/log-metric", json={**point, "step": 2**63})
    assert (too_large.status_code, too_large.json()["error_code"]) == (400, "INVALID_PARAMETER_VALUE")


def test_batch_logs_all_or_nothing(owner: httpx.Client) -> None:
    run_id = make_run(owner)
    batch = {
        "run_id": run_id,
        "metrics": [{"key": "loss", "value": 2.5, "timestamp": 1, "step": 3}],
        "params": [{"key": "lr", "value": "0.1"}],
        "tags": [{"key": "team", "value": "a"}],
    }
    assert owner.post(f"{API}/runs/log-batch", json=batch).json() == {}
    data = owner.get(f"{API}/runs/get", params={"run_id": run_id}).json()["run"]["data"]
    assert data["metrics"] == [{"key": "loss", "value": 2.5, "timestamp": 1, "step": 3}]
    assert data["params"] == [{"key": "lr", "value": "0.1"}]
    assert {"key": "team", "value": "a"} in data["tags"]
    changed = {**batch, "params": [{"key": "lr", "value": "0.2"}], "tags": [{"key": "team", "value": "b"}]}
    refused = owner.post(f"{API}/runs/log-batch", json=changed)
    assert (refused.status_code, refused.json()["error_code"]) == (400, "INVALID_PARAMETER_VALUE")
    assert owner.get(f"{API}/runs/get", params={"run_id": run_id}).json()["run"]["data"] == data


def test_batch_has_mlflows_limits(owner: httpx.Client) -> None:
    run_id = make_run(owner)
    params = [{"key": str(n), "value": "1"} for n in range(101)]
    answer = owner.post(f"{API}/runs/log-batch", json={"run_id": run_id, "params": params})
    assert answer.status_code == 400
    assert "at most 100 params. Got 101" in answer.json()["message"]
    twice = [{"key": "a", "value": "1"}, {"key": "a", "value": "2"}]
    answer = owner.post(f"{API}/runs/log-batch", json={"run_id": run_id, "params": twice})
    assert "Duplicate parameter keys" in answer.json()["message"]


def test_run_ends_with_status_and_time(owner: httpx.Client) -> None:
    run_id = make_run(owner)
    body = {"run_id": run_id, "status": "FINISHED", "end_time": 9}
    info = owner.post(f"{API}/runs/update", json=body).raise_for_status().json()["run_info"]
    assert (info["status"], info["end_time"], info["run_uuid"]) == ("FINISHED", 9, run_id)
    wrong = owner.post(f"{API}/runs/update", json={"run_id": run_id, "status": "DONE"})
    assert (wrong.status_code, wrong.json()["error_code"]) == (400, "INVALID_PARAMETER_VALUE")


def test_unknown_run_is_404_in_mlflows_words(owner: httpx.Client) -> None:
    answer = owner.get(f"{API}/runs/get", params={"run_id": "f" * 32})
    assert (answer.status_code, answer.json()["error_code"]) == (404, "RESOURCE_DOES_NOT_EXIST")
    assert f"Run with id={'f' * 32} not found" in answer.json()["message"]


def test_calls_of_mlflows_pages_have_the_same_answer(owner: httpx.Client) -> None:
    path = "mlflow/experiments/get?experiment_id=0"
    assert owner.get(f"/ajax-api/2.0/{path}").json() == owner.get(f"/api/2.0/{path}").json()


def test_calls_that_are_not_the_hubs_are_501_and_others_404(owner: httpx.Client) -> None:
    foreign = owner.get("/api/3.0/mlflow/traces/t-1")
    assert (foreign.status_code, foreign.json()["error_code"]) == (501, "NOT_IMPLEMENTED")
    unknown = owner.get("/api/2.0/mlflow/nothing")
    assert (unknown.status_code, unknown.json()["error_code"]) == (404, "ENDPOINT_NOT_FOUND")


def test_model_is_recorded_whatever_the_tag_of_models_holds(owner: httpx.Client) -> None:
    model = '{"artifact_path": "m", "flavors": {}, "utc_time_created": "now", "run_id": "r"}'
    for junk in ("5", "[", "null", "[" + "1," * 3999):
        run_id = make_run(owner)
        tag = {"run_id": run_id, "key": "mlflow.log-model.history", "value": junk}
        owner.post(f"{API}/runs/set-tag", json=tag).raise_for_status()
        owner.post(f"{API}/runs/log-model", json={"run_id": run_id, "model_json": model}).raise_for_status()


def test_lost_run_is_running_with_a_tag_until_it_is_heard_again(server: HubServer, owner: httpx.Client) -> None:
    run_id = "1" * 32
    beat = {"client": "c", "first": 1, "records": [["run", {"name": "silent", "experiment": "lost"}]]}
    owner.post(f"/v1/runs/{run_id}/batches", json=beat).raise_for_status()
    assert server.hub.database.write_and_wait(runs.mark_lost, 2**60)

    def seen() -> tuple[str, list[str], str]:
        run = owner.get(f"{API}/runs/get", params={"run_id": run_id}).raise_for_status().json()["run"]
        search = {"experiment_ids": [run["info"]["experiment_id"]], "filter": "attributes.status = 'RUNNING'"}
        found = owner.post(f"{API}/runs/search", json=search).json()["runs"]
        assert found == [run]
        states = [tag["value"] for tag in run["data"]["tags"] if tag["key"] == "skyward.state"]
        return run["info"]["status"], states, owner.get(f"/v1/runs/{run_id}").json()["status"]

    assert seen() == ("RUNNING", ["lost"], "lost")
    owner.post(f"/v1/runs/{run_id}/batches", json={**beat, "first": 2, "records": []}).raise_for_status()
    assert seen() == ("RUNNING", [], "running")
