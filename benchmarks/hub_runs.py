"""Runs by bulk insert: the same rows in MLflow's tables and in a hub's, copied from one run that the API made.

Run n has metric k with the value ((n * 7919 + k * 104729) % 1000003) / 1000003, whatever the store.
"""

from __future__ import annotations

import sqlite3

from hub_servers import Server

METRICS = 20
VALUE = "((n * 7919 + {number} * 104729) % 1000003) / 1000003.0"
_NUMBERS = "WITH RECURSIVE numbers(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < :runs) "


def make_template(server: Server) -> tuple[str, str]:
    """Make an experiment with one run through the API. Returns the ids of both."""
    with server.client() as client:
        experiment = client.post("/experiments/create", json={"name": "many"}).json()["experiment_id"]
        body = {"experiment_id": experiment, "user_id": "me", "run_name": "first", "start_time": 1}
        run = client.post("/runs/create", json=body).json()["run"]["info"]["run_id"]
        metrics = [{"key": f"m{number}", "value": 0.5, "timestamp": 1, "step": 0} for number in range(METRICS)]
        batch = {"run_id": run, "metrics": metrics, "params": [{"key": "lr", "value": "0.1"}]}
        client.post("/runs/log-batch", json=batch).raise_for_status()
    return experiment, run


def fill(server: Server, template: str, runs: int) -> None:
    """Copy the template's rows. The server must have stopped."""
    with sqlite3.connect(server.database) as connection:
        if server.name == "mlflow":
            _fill_mlflow(connection, template, runs)
        else:
            _fill_hub(connection, template, runs)
        connection.commit()
        connection.execute("ANALYZE")


def _copy(connection: sqlite3.Connection, table: str, where: str, changed: dict[str, str], runs: int, run: str) -> None:
    columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
    chosen = ", ".join(changed.get(name, f'{table}."{name}"') for name in columns)
    quoted = ", ".join(f'"{name}"' for name in columns)
    connection.execute(
        f"{_NUMBERS} INSERT INTO {table} ({quoted}) SELECT {chosen} FROM numbers, {table} WHERE {where}",
        {"runs": runs, "run": run},
    )


def _fill_mlflow(connection: sqlite3.Connection, run: str, runs: int) -> None:
    own = {"run_uuid": "printf('%032x', n)"}
    named = own | {"name": "'run ' || n", "start_time": "n"}
    _copy(connection, "runs", "runs.run_uuid = :run", named, runs, run)
    for table in ("params", "tags"):
        _copy(connection, table, f"{table}.run_uuid = :run", own, runs, run)
    value = VALUE.format(number="CAST(substr(latest_metrics.key, 2) AS INTEGER)")
    _copy(connection, "latest_metrics", "latest_metrics.run_uuid = :run", own | {"value": value}, runs, run)


def _fill_hub(connection: sqlite3.Connection, run: str, runs: int) -> None:
    (first,) = connection.execute("SELECT max(pk) FROM run").fetchone()
    (template,) = connection.execute("SELECT pk FROM run WHERE id = ?", (run,)).fetchone()
    own = {"run": f"{first} + n"}
    named = {"pk": f"{first} + n", "id": "printf('%032x', n)", "name": "'run ' || n", "started_at": "n"}
    _copy(connection, "run", "run.id = :run", named, runs, run)
    _copy(connection, "attribute", f"attribute.run = {template}", own, runs, run)
    number = 'CAST(substr((SELECT name FROM "key" WHERE id = latest."key"), 2) AS INTEGER)'
    _copy(connection, "latest", f"latest.run = {template}", own | {"value": VALUE.format(number=number)}, runs, run)
