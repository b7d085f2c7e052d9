"""Scripted and generated calls to MLflow's server and to a hub: equal status, error code and JSON tree.

Some calls are left out, because the hub is stricter on purpose. It refuses a status that does not exist, a value that
is `true`, a step of 1.5, an empty body and the history of an absent run. A taken name is RESOURCE_ALREADY_EXISTS
on an update too. It also takes a list of states, `status IN (...)`.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from .oracle import GENERATED, Oracle, new_name

pytestmark = pytest.mark.timeout(300)  # a busy machine needs minutes to start MLflow's server


def point(key: str, value: Any, step: int = 0, timestamp: int = 1) -> dict[str, Any]:
    return {"key": key, "value": value, "step": step, "timestamp": timestamp}


def test_experiments_answer_alike(oracle: Oracle) -> None:
    name = new_name("vision")
    tags = [{"key": "team", "value": "vision"}]
    oracle.post("experiments/create", {"name": name, "tags": tags}, vision="experiment_id")
    oracle.post("experiments/create", {"name": name})
    oracle.post("experiments/create", {"name": ""})
    oracle.post("experiments/create", {})
    oracle.post("experiments/create", {"name": "n" * 501})
    oracle.get("experiments/get", experiment_id="<vision>")
    for absent in ("987654", "-1", "abc"):
        oracle.get("experiments/get", experiment_id=absent)
    oracle.get("experiments/get")
    oracle.get("experiments/get-by-name", experiment_name=name)
    oracle.get("experiments/get-by-name", experiment_name="nowhere")
    oracle.get("experiments/get-by-name")
    oracle.post("experiments/set-experiment-tag", {"experiment_id": "<vision>", "key": "k", "value": "v"})
    oracle.post("experiments/set-experiment-tag", {"experiment_id": "<vision>", "key": "k" * 251, "value": "v"})
    oracle.post("experiments/set-experiment-tag", {"experiment_id": "<vision>", "value": "v"})
    oracle.post("experiments/delete-experiment-tag", {"experiment_id": "<vision>", "key": "k"})
    oracle.post("experiments/delete-experiment-tag", {"experiment_id": "<vision>", "key": "k"})
    oracle.post("experiments/update", {"experiment_id": "<vision>", "new_name": f"{name} seen"})
    oracle.post("experiments/update", {"experiment_id": "<vision>"})
    oracle.post("experiments/delete", {"experiment_id": "<vision>"})
    oracle.post("experiments/delete", {"experiment_id": "<vision>"})
    oracle.post("experiments/create", {"name": f"{name} seen"})
    oracle.post("runs/create", {"experiment_id": "<vision>"})
    oracle.get("experiments/get", experiment_id="<vision>")
    oracle.post("experiments/restore", {"experiment_id": "<vision>"})
    oracle.post("experiments/restore", {"experiment_id": "<vision>"})
    oracle.check()


def test_runs_params_and_tags_answer_alike(oracle: Oracle) -> None:
    oracle.create_run("first", tags=[{"key": "a", "value": "b"}])
    oracle.get("runs/get", run_id="<first>")
    oracle.get("runs/get", run_uuid="<first>")
    oracle.get("runs/get", run_id="0" * 32)
    oracle.get("runs/get")
    param: dict[str, Any] = {"run_id": "<first>", "key": "lr", "value": "0.1"}
    for change in ({}, {}, {"value": "0.2"}, {"key": "/bad"}, {"key": "a/../b"}, {"key": ""}, {"key": "x" * 251}):
        oracle.post("runs/log-parameter", param | change)
    oracle.post("runs/log-parameter", param | {"key": "long", "value": "v" * 6001})
    oracle.post("runs/log-parameter", {"run_id": "<first>", "value": "1"})
    oracle.post("runs/log-parameter", {"key": "lr", "value": "1"})
    for change in ({}, {"value": "0.2"}, {"key": ".."}, {"value": "v" * 8001, "key": "long"}, {"value": "7"}):
        oracle.post("runs/set-tag", param | change)
    oracle.post("runs/delete-tag", {"run_id": "<first>", "key": "lr"})
    oracle.post("runs/delete-tag", {"run_id": "<first>", "key": "lr"})
    oracle.post("runs/update", {"run_id": "<first>", "status": "FINISHED", "end_time": 1_700_000_000_500})
    oracle.post("runs/update", {"run_id": "<first>", "run_name": "renamed"})
    oracle.get("runs/get", run_id="<first>")
    oracle.post("runs/delete", {"run_id": "<first>"})
    oracle.post("runs/log-parameter", param | {"key": "late"})
    oracle.get("runs/get", run_id="<first>")
    oracle.post("runs/restore", {"run_id": "<first>"})
    oracle.post("runs/delete", {"run_id": "0" * 32})
    oracle.post("runs/create", {"experiment_id": "987654"})
    oracle.check()


def test_metrics_and_batches_answer_alike(oracle: Oracle) -> None:
    oracle.create_run()
    for value in (1, 0.5, "Infinity", "-Infinity", "much", None, 1e400):
        oracle.post("runs/log-metric", {"run_id": "<run>", **point("m", value if value != 1e400 else 1e308)})
    oracle.post("runs/log-metric", {"run_id": "<run>", **point("odd", "NaN")})
    oracle.get("metrics/get-history", run_id="<run>", metric_key="odd")
    oracle.post("runs/log-metric", {"run_id": "<run>", "key": "m", "value": 1})
    oracle.post("runs/log-metric", {"run_id": "<run>", **point("../m", 1)})
    oracle.post("runs/log-metric", {"run_id": "<run>", **point("m", 1), "step": "2"})
    oracle.post("runs/log-metric", {"run_id": "<run>", **point("m", 1), "timestamp": "soon"})
    oracle.post("runs/log-batch", {"run_id": "<run>", "metrics": [point("b", n, n, n) for n in range(20)]})
    oracle.post("runs/log-batch", {"run_id": "<run>", "metrics": [point("b", n) for n in range(1001)]})
    oracle.post("runs/log-batch", {"run_id": "<run>", "params": [{"key": f"p{n}", "value": "1"} for n in range(101)]})
    oracle.post("runs/log-batch", {"run_id": "<run>", "tags": [{"key": f"t{n}", "value": "1"} for n in range(101)]})
    oracle.post("runs/log-batch", {"run_id": "<run>", "params": [{"key": "p", "value": str(n)} for n in range(2)]})
    oracle.post("runs/log-batch", {"run_id": "<run>", "metrics": {"key": "m"}})
    oracle.post("runs/log-batch", {"run_id": "<run>"})
    oracle.post("runs/log-batch", {})
    oracle.get("metrics/get-history", run_id="<run>", metric_key="b")
    oracle.get("metrics/get-history", run_id="<run>", metric_key="b", max_results=7)
    oracle.get("metrics/get-history", run_id="<run>", metric_key="m")
    oracle.get("metrics/get-history", run_id="<run>", metric_key="absent")
    oracle.get("metrics/get-history", run_id="<run>")
    oracle.get("runs/get", run_id="<run>")
    oracle.check()


def test_artifacts_answer_alike(oracle: Oracle) -> None:
    oracle.create_run()
    files = "mlflow-artifacts/artifacts/<run_files>"
    oracle.call("PUT", f"{files}/notes/a.txt", raw=b"hello")
    oracle.call("PUT", f"{files}/b.bin", raw=b"\0" * 10)
    oracle.get("artifacts/list", run_id="<run>")
    oracle.get("artifacts/list", run_id="<run>", path="notes")
    oracle.get("artifacts/list", run_id="<run>", path="absent")
    oracle.get("artifacts/list", run_id="<run>", path="../x")
    oracle.call("GET", f"{files}/notes/a.txt")
    oracle.call("GET", f"{files}/absent.txt")
    oracle.call("GET", "mlflow-artifacts/artifacts", query={"path": "<run_files>"})
    oracle.call("GET", "mlflow-artifacts/artifacts", query={"path": "<run_files>/notes"})
    oracle.call("DELETE", f"{files}/b.bin")
    oracle.get("artifacts/list", run_id="<run>")
    oracle.check()


OPERATORS = ("=", "!=", "<", "<=", ">", ">=", "LIKE", "ILIKE", "IN", "NOT IN", "IS NULL", "IS NOT NULL", "~")
LEFT = (
    "metrics.loss", "metric.acc", "params.lr", "param.`model name`", "tags.team", "tag.absent", "attributes.run_name",
    "status", "attributes.start_time", "end_time", "run_id", "user_id", "attributes.nothing", "thing.loss", "loss",
)  # fmt: skip
RIGHT = ("0.5", "1", "'0.1'", "'0.%'", '"vision"', "'VIS%'", "'RUNNING'", "('r1', 'r2')", "('x')", "'r1'", "", "NaN")
ORDERS = ("metrics.loss", "metrics.loss DESC", "params.lr ASC", "tags.team DESC", "start_time", "attributes.run_name",
          "start_time DESC", "end_time", "metrics.loss UP", "nothing", "metrics.acc DESC")  # fmt: skip


@pytest.fixture
def runs(oracle: Oracle) -> Oracle:
    """An experiment with runs that differ in everything that a search can ask."""
    name = new_name("searched")
    oracle.post("experiments/create", {"name": name}, searched="experiment_id")
    values: list[Any] = [0.5, 0.25, 2, 1, None, "NaN"]
    for number, value in enumerate(values):
        oracle.create_run(f"r{number}", "<searched>", start_time=1_700_000_000_000 + number)
        body: dict[str, Any] = {"run_id": f"<r{number}>", "params": [{"key": "lr", "value": f"0.{number % 3}"}]}
        if value is not None:
            body["metrics"] = [point("loss", value), point("acc", number % 2, 1)]
        if number % 2:
            body["tags"] = [{"key": "team", "value": "vision" if number > 1 else "Vision"}]
            body["params"] += [{"key": "model name", "value": "small"}]
        oracle.post("runs/log-batch", body)
    oracle.post("runs/update", {"run_id": "<r3>", "status": "FINISHED", "end_time": 1_700_000_001_000})
    oracle.check()
    return oracle


def search(oracle: Oracle, **asked: Any) -> None:
    oracle.post("runs/search", {"experiment_ids": ["<searched>"], **asked})


def test_scripted_searches_of_runs_answer_alike(runs: Oracle) -> None:
    for left, right in (
        ("metrics.loss", ">= 0.5"),
        ("metrics.loss", "!= 0.5"),
        ("params.lr", "= '0.1'"),
        ("params.lr", "!= '0.1'"),
        ("params.lr", "LIKE '0.%'"),
        ("tags.team", "ILIKE 'vis%'"),
        ("tags.team", "LIKE 'vis%'"),
        ("tags.team", "IS NULL"),
        ("params.`model name`", "IS NOT NULL"),
        ('params."model name"', "= 'small'"),
        ("attributes.status", "= 'FINISHED'"),
        ("attributes.run_name", "IN ('r1', 'r2')"),
        ("run_name", "= 'r1' AND metrics.acc = 1"),
        ("run_name", "= 'r1' OR metrics.acc = 1"),
    ):
        search(runs, filter=f"{left} {right}")
    search(runs, max_results=0)
    search(runs, max_results=50_001)
    search(runs, max_results=2)
    search(runs, page_token="junk")
    search(runs, run_view_type="DELETED_ONLY")
    for order in ORDERS:
        search(runs, order_by=[order])
    runs.post("runs/search", {})
    runs.post("runs/search", {"experiment_ids": ["987654"]})
    runs.check()


def test_searches_of_several_experiments_are_sorted_and_paged_across_them(oracle: Oracle) -> None:
    for name in ("first", "second", "third"):
        oracle.post("experiments/create", {"name": new_name(name)}, **{name: "experiment_id"})
    for number in range(9):
        # Runs that share a start, a value or a parameter with runs of other experiments.
        run, started = f"several{number}", 1_700_000_000_000 + number
        oracle.create_run(run, f"<{('first', 'second', 'third')[number % 3]}>", start_time=started)
        body: dict[str, Any] = {"run_id": f"<{run}>", "params": [{"key": "lr", "value": f"0.{number % 2}"}]}
        if number != 4:
            body["metrics"] = [point("loss", "NaN" if number == 7 else number * 5 % 9)]
        oracle.post("runs/log-batch", body)
    for order in (
        [], ["metrics.loss"], ["metrics.loss DESC"], ["params.lr DESC", "metrics.loss ASC"], ["start_time"],
        ["attributes.run_name DESC"], ["metrics.absent", "params.lr", "attributes.start_time DESC"],
    ):  # fmt: skip
        for experiments in (["<first>", "<second>", "<third>"], ["<third>", "<first>"], ["<second>", "<second>"]):
            oracle.pages("runs/search", "POST", experiment_ids=experiments, order_by=order, max_results=2)
    oracle.pages(
        "runs/search", "POST", experiment_ids=["<first>", "<third>", "987654"], filter="params.lr = '0.0'",
        order_by=["metrics.loss DESC"], max_results=1,
    )  # fmt: skip
    oracle.post("experiments/delete", {"experiment_id": "<third>"})
    for view in ("ACTIVE_ONLY", "DELETED_ONLY", "ALL"):
        experiments = ["<first>", "<third>"]
        oracle.pages("runs/search", "POST", experiment_ids=experiments, run_view_type=view, max_results=2)
    oracle.check()


@given(
    clauses=st.lists(
        st.tuples(st.sampled_from(LEFT), st.sampled_from(OPERATORS), st.sampled_from(RIGHT)).filter(
            lambda clause: clause[0] != "status" or clause[1] not in {"IN", "NOT IN"}
        ),
        min_size=1,
        max_size=2,
    ),
    order=st.lists(st.sampled_from(ORDERS), max_size=2),
)
@GENERATED
def test_generated_searches_of_runs_answer_alike(
    runs: Oracle, clauses: list[tuple[str, str, str]], order: list[str]
) -> None:
    search(runs, filter=" AND ".join(" ".join(clause) for clause in clauses), order_by=order)
    runs.check()


# Few values, steps and times, so that points share them.
VALUES = ("NaN", "Infinity", "-Infinity", 1e308, -1e308, 5e-324, 3.4028234663852886e38, 0.0, -0.0, 0.1, 1, -2.5)


@given(
    points=st.lists(
        st.tuples(
            st.sampled_from(["a", "b/c", "d e"]),
            st.sampled_from(VALUES),
            st.sampled_from([-3, 0, 1, 9]),
            st.sampled_from([0, 1, 4]),
        ),
        max_size=12,
    )
)
@GENERATED
def test_generated_points_come_back_alike(oracle: Oracle, points: list[tuple[str, Any, int, int]]) -> None:
    oracle.create_run()
    metrics = [point(key, value, step, timestamp) for key, value, step, timestamp in points]
    oracle.post("runs/log-batch", {"run_id": "<run>", "metrics": metrics})
    oracle.get("runs/get", run_id="<run>")
    for key in {key for key, *_ in points}:
        oracle.get("metrics/get-history", run_id="<run>", metric_key=key)
    oracle.check()


def test_searches_of_experiments_answer_alike(oracle: Oracle) -> None:
    listed, kind = f"{new_name('listed')}-", new_name("kind")
    for number in range(4):
        tags = [{"key": kind, "value": "odd" if number % 2 else "even"}]
        experiment = {"name": f"{listed}{number}", "tags": tags}
        oracle.post("experiments/create", experiment, **{f"x{number}": "experiment_id"})
    filters = (
        f"name LIKE '{listed}%'",
        f"tags.`{kind}` = 'odd'",
        f"name ILIKE '{listed.upper()}%'",
        "kind = 'x'",
        f"name LIKE '{listed}%' AND tags.`{kind}` != 'odd'",
        "name > 'a'",
        f"creation_time > 0 AND name = '{listed}2'",
    )
    for text in filters:
        oracle.post("experiments/search", {"max_results": 10, "filter": text, "order_by": ["name"]})
    oracle.post("experiments/search", {"max_results": 2, "filter": f"name LIKE '{listed}%'", "order_by": ["name DESC"]})
    oracle.post("experiments/search", {"max_results": 0})
    oracle.post("experiments/search", {"max_results": 2, "order_by": ["nothing"]})
    oracle.check()


@pytest.mark.parametrize("raw", [b"{", b"[]", b"null", b"7", b'{"experiment_ids": "0"}', b"\xff"])
def test_bodies_that_are_no_objects_answer_alike(oracle: Oracle, raw: bytes) -> None:
    for path in ("runs/create", "runs/search", "experiments/create", "runs/log-metric"):
        oracle.call("POST", f"mlflow/{path}", raw=raw)
    oracle.check()
