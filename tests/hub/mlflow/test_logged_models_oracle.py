"""Scripted and generated calls of logged models and of inputs of runs, to MLflow's server and to a hub.

Some calls are left out, because the hub differs on purpose. It refuses empty keys, names and ids, datasets without
required fields, a page of -1 models, texts without quotes, and changes of a deleted model. It takes a parameter or an
output that is there already, `param.` for `params.`, and digests of 128 characters. A search by a dataset's name alone
finds every digest, and IS NULL finds missing values. The tag of `log-model` spells its JSON otherwise.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from .oracle import GENERATED, Oracle, new_name

pytestmark = pytest.mark.timeout(300)  # a busy machine needs minutes to start MLflow's server

ABSENT = "m-" + "0" * 32


def make_model(oracle: Oracle, name: str = "model", experiment: str = "0", **more: Any) -> None:
    body = {"experiment_id": experiment, "name": name, **more}
    oracle.post("logged-models", body, **{name: "model.info.model_id"})


def dataset(name: str = "mnist", **more: Any) -> dict[str, Any]:
    return {"name": name, "digest": "d1", "source_type": "local", "source": "{}", **more}


def test_logged_models_answer_alike(oracle: Oracle) -> None:
    oracle.create_run()
    pairs = [{"key": "a", "value": "b"}]
    make_model(oracle, source_run_id="<run>", model_type="agent", params=pairs, tags=pairs)
    oracle.get("logged-models/<model>")
    oracle.get(f"logged-models/{ABSENT}")
    oracle.get("logged-models/junk")
    for wrong in ("a/b", "a:b", "a.b", "a%b", "a'b"):
        oracle.post("logged-models", {"experiment_id": "0", "name": wrong})
    oracle.post("logged-models", {"name": "x"})
    oracle.post("logged-models", {"experiment_id": "987654", "name": "x"})
    for status in ("LOGGED_MODEL_READY", "LOGGED_MODEL_UPLOAD_FAILED", "LOGGED_MODEL_PENDING", 2):
        oracle.patch("logged-models/<model>", {"model_id": "<model>", "status": status})
    oracle.patch("logged-models/<model>", {"model_id": "<model>"})
    oracle.patch(f"logged-models/{ABSENT}", {"model_id": ABSENT, "status": "LOGGED_MODEL_READY"})
    for tags in ([{"key": "k", "value": "v"}], [{"key": "k", "value": "w"}, {"key": "e"}], []):
        oracle.patch("logged-models/<model>/tags", {"model_id": "<model>", "tags": tags})
    oracle.patch(f"logged-models/{ABSENT}/tags", {"tags": pairs})
    oracle.get("logged-models/<model>")
    for key in ("k", "k", "absent"):
        oracle.delete(f"logged-models/<model>/tags/{key}", None)
    oracle.delete(f"logged-models/{ABSENT}/tags/k", None)
    for params in ([{"key": "p", "value": "1"}], [{"key": "q"}], []):
        oracle.post("logged-models/<model>/params", {"model_id": "<model>", "params": params})
    oracle.get("logged-models/<model>")
    oracle.get("logged-models/<model>/artifacts/directories")
    oracle.delete("logged-models/<model>", None)
    oracle.delete("logged-models/<model>", None)
    oracle.get("logged-models/<model>")
    oracle.get("logged-models/<model>", allow_deleted="true")
    oracle.check()


def test_inputs_and_outputs_of_runs_answer_alike(oracle: Oracle) -> None:
    oracle.create_run()
    make_model(oracle, source_run_id="<run>")
    tags = [{"key": "mlflow.data.context", "value": "train"}]
    for datasets in (
        [{"dataset": dataset(), "tags": tags}],
        [{"dataset": dataset()}],
        [{"dataset": dataset("cifar", schema="{}", profile="{}"), "tags": []}],
        [{"dataset": dataset("n" * 501)}],
        [{"dataset": dataset("n" * 500)}],
        [{"dataset": dataset(digest="d" * 129)}],
        [{"dataset": dataset(source="s" * 65_536)}],
        [{"dataset": dataset(schema="s" * 1_048_576)}],
        [{"dataset": dataset("tagged"), "tags": [{"key": "k" * 256, "value": "v"}]}],
        [{"dataset": dataset("tagged"), "tags": [{"key": "k", "value": "v" * 501}]}],
        [],
    ):
        oracle.post("runs/log-inputs", {"run_id": "<run>", "datasets": datasets})
        oracle.get("runs/get", run_id="<run>")
    oracle.post("runs/log-inputs", {"run_id": "<run>", "models": [{"model_id": "<model>"}]})
    oracle.post("runs/log-inputs", {"run_id": "<run>"})
    oracle.post("runs/log-inputs", {"run_id": "0" * 32, "datasets": [{"dataset": dataset()}]})
    oracle.post("runs/log-inputs", {"datasets": [{"dataset": dataset()}]})
    oracle.get("runs/get", run_id="<run>")
    for models in ([{"model_id": "<model>", "step": 3}], []):
        oracle.post("runs/outputs", {"run_id": "<run>", "models": models})
    oracle.post("runs/outputs", {"run_id": "<run>"})
    oracle.post("runs/outputs", {"run_id": "0" * 32, "models": [{"model_id": "<model>", "step": 0}]})
    oracle.get("runs/get", run_id="<run>")
    described = '{"run_id": "x", "artifact_path": "m", "utc_time_created": "2026", "flavors": {"a": {}}}'
    for text in (described, "{", "[]", "{}", ""):
        oracle.post("runs/log-model", {"run_id": "<run>", "model_json": text})
    oracle.post("runs/log-model", {"run_id": "<run>"})
    oracle.check()


def test_twins_of_the_pages_answer_alike(oracle: Oracle) -> None:
    oracle.post("experiments/create", {"name": new_name("twin")}, twin="experiment_id")
    oracle.create_run("run", "<twin>")
    for path, query in (
        ("experiments/get", {"experiment_id": "<twin>"}),
        ("experiments/get", {"experiment_id": "987654"}),
        ("experiments/get-by-name", {"experiment_name": "nowhere"}),
        ("runs/get", {"run_id": "<run>"}),
        ("metrics/get-history", {"run_id": "<run>", "metric_key": "absent"}),
        ("registered-models/get", {"name": "nowhere"}),
        (f"logged-models/{ABSENT}", {}),
    ):
        oracle.call("GET", f"mlflow/{path}", query=query, root="ajax-api/2.0")
    for path, body in (
        ("runs/search", {"experiment_ids": ["<twin>"]}),
        ("experiments/search", {"filter": "name = 'nowhere'", "max_results": 5}),
        ("logged-models/search", {"experiment_ids": ["<twin>"]}),
    ):
        oracle.call("POST", f"mlflow/{path}", body, root="ajax-api/2.0")
    oracle.check()


@pytest.fixture
def logged(oracle: Oracle) -> Oracle:
    """An experiment with logged models that differ in everything that a search can ask."""
    oracle.post("experiments/create", {"name": new_name("logged")}, logged="experiment_id")
    oracle.create_run("run", "<logged>")
    for number in range(4):
        more: dict[str, Any] = {"params": [{"key": "depth", "value": str(number % 2)}]}
        if number:
            more |= {"model_type": "agent", "source_run_id": "<run>", "tags": [{"key": "team", "value": "Vision"}]}
        make_model(oracle, f"m{number}", "<logged>", **more)
        metric = {"run_id": "<run>", "key": "acc", "timestamp": 1, "model_id": f"<m{number}>"}
        if number < 3:
            named = {"dataset_name": "mnist", "dataset_digest": "d1"} if number else {}
            oracle.post("runs/log-metric", {**metric, "value": number / 2, "step": 0, **named})
            oracle.post("runs/log-metric", {**metric, "value": number / 4, "step": 1, **named})
    oracle.patch("logged-models/<m1>", {"model_id": "<m1>", "status": "LOGGED_MODEL_READY"})
    oracle.check()
    return oracle


def search(oracle: Oracle, **asked: Any) -> None:
    orders = [*asked.pop("order_by", ()), {"field_name": "name"}]
    oracle.post("logged-models/search", {"experiment_ids": ["<logged>"], "order_by": orders, **asked})


FIELDS = ("name", "model_type", "status", "source_run_id", "params.depth", "tags.team", "metrics.acc",
          "attributes.name", "creation_timestamp", "nothing", "params.absent")  # fmt: skip
NUMERIC, NUMBERS = ("metrics.acc", "creation_timestamp"), ("0.5", "1")
RIGHT = ("'m1'", "'m%'", "'agent'", "'READY'", "'<run>'", "'0'", "('m1', 'm2')", *NUMBERS, "'Vision'", "")
OPERATORS = ("=", "!=", "<", ">=", "LIKE", "ILIKE", "IN", "NOT IN", "~")
ORDERS = (
    "name",
    "metrics.acc",
    "creation_timestamp",
    "creation_time",
    "last_updated_timestamp",
    "nothing",
    "params.depth",
)


def test_scripted_searches_of_logged_models_answer_alike(logged: Oracle) -> None:
    for text in ("", "name = 'm1'", "metrics.acc > 0.4", "params.depth = '1'", "tags.team LIKE 'Vis%'",
                 "model_type = 'agent' AND metrics.acc <= 0.25", "name = 'm1' OR name = 'm2'"):  # fmt: skip
        search(logged, filter=text)
        search(logged, filter=text, datasets=[{"dataset_name": "mnist", "dataset_digest": "d1"}])
        search(
            logged, filter=text, datasets=[{"dataset_name": name, "dataset_digest": "d1"} for name in ("a", "mnist")]
        )
    for order in ORDERS:
        for ascending in (True, False):
            search(logged, order_by=[{"field_name": order, "ascending": ascending}])
    search(logged, order_by=[{"field_name": "metrics.acc", "dataset_name": "mnist", "dataset_digest": "d1"}])
    search(logged, order_by=[{"field_name": "metrics.acc", "dataset_name": "mnist"}])
    search(logged, page_token="junk")
    for most in (1, 2, 4, 0):
        search(logged, max_results=most)
    logged.post("logged-models/search", {})
    logged.post("logged-models/search", {"experiment_ids": []})
    logged.post("logged-models/search", {"experiment_ids": ["987654"]})
    logged.get("runs/get", run_id="<run>")
    logged.delete("logged-models/<m0>", None)
    search(logged)
    logged.check()


@given(
    clauses=st.lists(
        st.tuples(st.sampled_from(FIELDS), st.sampled_from(OPERATORS), st.sampled_from(RIGHT)).filter(
            lambda clause: clause[0] in NUMERIC or clause[2] not in NUMBERS
        ),
        min_size=1,
        max_size=2,
    ),
    order=st.lists(st.sampled_from(ORDERS), max_size=1),
    ascending=st.booleans(),
)
@GENERATED
def test_generated_searches_of_logged_models_answer_alike(
    logged: Oracle, clauses: list[tuple[str, str, str]], order: list[str], ascending: bool
) -> None:
    orders = [{"field_name": name, "ascending": ascending} for name in order]
    search(logged, filter=" AND ".join(" ".join(clause) for clause in clauses), order_by=orders)
    logged.check()
