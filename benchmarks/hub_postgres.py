"""Measure a hub on PostgreSQL: packed points beside one row for each point, and two servers beside one.

    .venv/bin/python benchmarks/hub_postgres.py             # a minute
    .venv/bin/python benchmarks/hub_postgres.py --rounds 5

Each way of keeping points writes the same batches of 1,000 points of 10 metrics, from 16 writers, into the same
database. Each batch also brings the latest values up to date, and its commit waits for the disk. One row for each point
is the way of MLflow's tables. It is written twice: by `executemany`, as programs do that use an object mapper, and by
arrays that the database unpacks, which is the fastest way of one statement. The time of packed points includes their
sealing. The servers are `skyward hub serve`, and 16 connections log batches over HTTP, each of its own run: all to one
server, or 8 to each of two. Needs the extras `hub` and `hub-postgres`, and the programs of PostgreSQL.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import psycopg
from hub_load import drive

from skyward.hub.model.access import Actor, Role
from skyward.hub.model.points import PointColumns
from skyward.hub.services.tracking import Tracking
from skyward.hub.store.database import Database
from tests.hub.http.server_processes import ServerProcess, owner_token
from tests.hub.postgres import PostgresServer

WRITERS, BATCHES, STEPS, METRICS = 16, 25, 100, 10
POINTS = WRITERS * BATCHES * STEPS * METRICS
ROWS_TARGET, SERVERS_TARGET = 4.0, 1.0
ADA = Actor(user="ada", organization=1, project=1, role=Role.RESEARCHER)
ROWS = """
CREATE TABLE IF NOT EXISTS point (
    run bigint, key int, at bigint, step bigint, value double precision, PRIMARY KEY (run, key, at, step, value));
CREATE TABLE IF NOT EXISTS newest (
    run bigint, key int, at bigint, step bigint, value double precision, PRIMARY KEY (run, key));
"""
ROW = "INSERT INTO point VALUES (%s, %s, %s, %s, %s) ON CONFLICT DO NOTHING"
ARRAYS = """
INSERT INTO point SELECT * FROM unnest(%s::bigint[], %s::int[], %s::bigint[], %s::bigint[], %s::float8[])
ON CONFLICT DO NOTHING
"""
NEWEST = """
INSERT INTO newest SELECT * FROM unnest(%s::bigint[], %s::int[], %s::bigint[], %s::bigint[], %s::float8[])
ON CONFLICT (run, key) DO UPDATE SET at = excluded.at, step = excluded.step, value = excluded.value
WHERE (excluded.step, excluded.at, excluded.value) >= (newest.step, newest.at, newest.value)
"""


def values(batch: int) -> list[tuple[int, int, float]]:
    """Return the metric, the step and the value of each point of a batch."""
    steps = range(batch * STEPS, (batch + 1) * STEPS)
    return [
        (metric, step, ((step * 7919 + metric) % 1_000_003) / 1_000_003) for step in steps for metric in range(METRICS)
    ]


def write_packed(url: str, number: int) -> float:
    database = Database(url)
    tracking = Tracking(database)
    runs = [f"{number:08x}{writer:024x}" for writer in range(WRITERS)]
    batches = [PointColumns() for _ in range(BATCHES)]
    for batch, columns in enumerate(batches):
        for metric, step, value in values(batch):
            columns.append(f"m{metric}", step, step, value)

    async def write(run: str) -> None:
        for columns in batches:
            await tracking.log_points(ADA, run, columns)

    async def write_all() -> float:
        for run in runs:
            await tracking.create_run(ADA, "0", run_id=run)
        began = time.perf_counter()
        await asyncio.gather(*map(write, runs))
        return began

    began = asyncio.run(write_all())
    with psycopg.connect(url) as connection:
        rows = connection.execute("SELECT pk FROM run WHERE id = ANY(%s)", (runs,)).fetchall()
    for (pk,) in rows:
        while not database.sealer.seal(pk, merges=True):  # the hub's own sealer was first
            pass
    seconds = time.perf_counter() - began
    database.close()
    return POINTS / seconds


def write_rows(url: str, number: int, *, by_arrays: bool) -> float:
    connections = [psycopg.connect(url) for _ in range(WRITERS)]
    connections[0].execute(ROWS)
    connections[0].commit()

    batches = [[list(column) for column in zip(*values(batch), strict=True)] for batch in range(BATCHES)]

    def write(writer: int) -> None:
        connection, run = connections[writer], 2 * number * WRITERS + 2 * writer + by_arrays
        for metrics, steps, numbers in batches:
            columns: list[list[Any]] = [[run] * len(metrics), metrics, steps, steps, numbers]
            if by_arrays:
                connection.execute(ARRAYS, columns)
            else:
                connection.cursor().executemany(ROW, list(zip(*columns, strict=True)))
            connection.execute(NEWEST, [column[-METRICS:] for column in columns])
            connection.commit()

    seconds = _side_by_side([partial(write, writer) for writer in range(WRITERS)])
    for connection in connections:
        connection.close()
    return POINTS / seconds


def write_over_http(servers: list[ServerProcess], token: str, runs: list[str], seconds: float) -> float:
    def body(own: list[str], batch: int) -> dict[str, Any]:
        metrics = [
            {"key": f"m{metric}", "value": value, "timestamp": step, "step": step}
            for metric, step, value in values(batch)
        ]
        return {"run_id": own[batch % len(own)], "metrics": metrics}

    done: list[float] = []

    def load(number: int) -> None:
        path, headers = "/api/2.0/mlflow/runs/log-batch", {"Authorization": f"Bearer {token}"}
        own = runs[number :: len(servers)]  # a training logs to one server, because its connection stays open
        port = servers[number].port
        done.append(drive(port, headers, path, partial(body, own), connections=len(own), seconds=seconds).per_s)

    _side_by_side([partial(load, number) for number in range(len(servers))])
    return sum(done) * STEPS * METRICS


def bytes_a_point(url: str, tables: tuple[str, ...], points: int) -> float:
    with psycopg.connect(url, autocommit=True) as connection:
        total = 0
        for table in tables:
            connection.execute(f"VACUUM FULL {table}")
            (size,) = connection.execute("SELECT pg_total_relation_size(%s::regclass)", (table,)).fetchall()
            total += int(size[0])
    return total / points


def _side_by_side(works: list[Callable[[], None]]) -> float:
    threads = [threading.Thread(target=work) for work in works]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


def main() -> int:
    """Measure and print. Returns exit code 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="length of each load over HTTP (default: 5)")
    given = parser.parse_args()
    rates: dict[str, list[float]] = {"packed": [], "rows": [], "arrays": [], "one": [], "two": []}
    began = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="skyward-hub-postgres-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # PostgreSQL's own account enters it
        (folder / "server").mkdir()
        postgres = PostgresServer(folder / "server", is_durable=True)
        try:
            url = postgres.new_database()
            for number in range(given.rounds):
                ways: list[tuple[str, Callable[[str, int], float]]] = [
                    ("packed", write_packed),
                    ("rows", partial(write_rows, by_arrays=False)),
                    ("arrays", partial(write_rows, by_arrays=True)),
                ]
                for way, write in ways if number % 2 else ways[::-1]:
                    rates[way].append(write(url, number))
            sizes = {
                "packed": bytes_a_point(url, ("tail", "chunk", "latest"), given.rounds * POINTS),
                "rows": bytes_a_point(url, ("point", "newest"), 2 * given.rounds * POINTS),
            }
            url = postgres.new_database()
            token = owner_token(url)
            database = Database(url)
            runs = [asyncio.run(Tracking(database).create_run(ADA, "0")).id for _ in range(WRITERS)]
            database.close()
            off = {"SKYWARD_HUB_METRICS_ENABLED": "false"}
            with ServerProcess(url, folder, **off) as first, ServerProcess(url, folder, **off) as second:
                for number in range(given.rounds):
                    servers = [("one", [first]), ("two", [first, second])]
                    for name_, chosen in servers if number % 2 else servers[::-1]:
                        rates[name_].append(write_over_http(chosen, token, runs, given.seconds))
        finally:
            postgres.stop()
    middle = {name: statistics.median(found) for name, found in rates.items()}
    packed, servers_ratio = middle["packed"] / middle["rows"], middle["two"] / middle["one"]
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {date.today()},", end=" ")
    print(f"{given.rounds} rounds; load average {began:.1f} before, {os.getloadavg()[0]:.1f} after\n")
    print(f"points per second: packed {middle['packed']:,.0f}, one row each {middle['rows']:,.0f}", end=" ")
    print(f"= {packed:.1f} times (at least {ROWS_TARGET:g}: {_verdict(packed, ROWS_TARGET)});", end=" ")
    print(f"by arrays {middle['arrays']:,.0f} = {middle['packed'] / middle['arrays']:.1f} times")
    print(f"bytes per point: packed {sizes['packed']:.1f}, one row each {sizes['rows']:.1f}", end=" ")
    print(f"= {sizes['rows'] / sizes['packed']:.1f} times")
    print(f"points per second over HTTP: one server {middle['one']:,.0f}, two {middle['two']:,.0f}", end=" ")
    print(f"= {servers_ratio:.2f} times (at least {SERVERS_TARGET:g}: {_verdict(servers_ratio, SERVERS_TARGET)})")
    return int(packed < ROWS_TARGET or servers_ratio < SERVERS_TARGET)


def _verdict(ratio: float, target: float) -> str:
    return "reached" if ratio >= target else "MISSED"


if __name__ == "__main__":
    sys.exit(main())
