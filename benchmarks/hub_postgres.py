"""Measure a hub on PostgreSQL: packed points beside one row for each point, and two servers beside one.

    .venv/bin/python benchmarks/hub_postgres.py             # two minutes
    .venv/bin/python benchmarks/hub_postgres.py --rounds 5

Each way of keeping points writes the same batches of 1,000 points of 10 metrics, from 16 writers, into the same
database. Each batch also brings the latest values up to date, and its commit waits for the disk. One row for each point
is the way of MLflow's tables. It is written twice: by `executemany`, as programs do that use an object mapper, and by
arrays that the database unpacks, which is the fastest way of one statement. The time of packed points includes their
sealing. The servers are `skyward hub serve`, and 16 connections log batches over HTTP, each of its own run: all to one
server, or 8 to each of two, one after the other in each round. Needs the extras `hub` and `hub-postgres`, and the
programs of PostgreSQL.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import processes
import psycopg
from hub_load import drive

from skyward.hub.model.access import Actor, Role
from skyward.hub.model.points import PointColumns
from skyward.hub.services.tracking import Tracking
from skyward.hub.store.database import Database
from tests.hub.http.server_processes import ServerProcess, owner_token
from tests.hub.postgres import PostgresServer

WRITERS, BATCHES, STEPS, METRICS = 16, 25, 100, 10
ENCODED = 128
IDLE_S, IDLE_CPU = 0.5, 0.1
POINTS = WRITERS * BATCHES * STEPS * METRICS
ROWS_TARGET, SERVERS_TARGET = 4.0, 1.0
Rates = dict[str, list[float]]
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


class Loads:
    """Loads over HTTP, with the processor time that they take.

    The batches are encoded before. Encoding them in between took as much processor time as the servers, on the same
    cores, so the load was the measure of two servers.
    """

    def __init__(self, postgres: PostgresServer, token: str, runs: list[str]) -> None:
        self._postgres = postgres
        self._headers = {"Authorization": f"Bearer {token}"}
        self._runs = runs
        self._batches = [
            json.dumps(
                [
                    {"key": f"m{metric}", "value": value, "timestamp": step, "step": step}
                    for metric, step, value in values(batch)
                ]
            ).encode()
            for batch in range(ENCODED)
        ]

    def measure(self, servers: list[ServerProcess], seconds: float) -> tuple[float, dict[str, float]]:
        """Return the points per second, and the microseconds of processor time for each point, by process."""
        done: list[float] = []

        def load(number: int) -> None:
            own = self._runs[number :: len(servers)]  # a training logs to one server: its connection stays open
            path, body = "/api/2.0/mlflow/runs/log-batch", partial(self._body, own)
            port = servers[number].port
            answers = drive(port, self._headers, path, body, connections=len(own), seconds=seconds).latencies_s
            done.append(len(answers) * STEPS * METRICS)

        self._wait_until_idle(servers)
        before = self._cpu_s(servers)
        passed = _side_by_side([partial(load, number) for number in range(len(servers))])
        spent = {name: 1e6 * (after - before[name]) / sum(done) for name, after in self._cpu_s(servers).items()}
        return sum(done) / passed, spent

    def _wait_until_idle(self, servers: list[ServerProcess]) -> None:
        """Wait for the sealing of the load before."""
        spent = 1.0
        while spent > IDLE_CPU * IDLE_S:
            before = self._cpu_s(servers)
            time.sleep(IDLE_S)
            spent = sum(self._cpu_s(servers).values()) - sum(before.values())

    def _body(self, runs: list[str], number: int) -> bytes:
        round_, run = divmod(number, len(runs))
        return b'{"run_id": "%s", "metrics": %s}' % (runs[run].encode(), self._batches[round_ % ENCODED])

    def _cpu_s(self, servers: list[ServerProcess]) -> dict[str, float]:
        database = int(Path(self._postgres.data, "postmaster.pid").read_text().split()[0])
        return {
            "servers": processes.cpu_seconds([server.process.pid for server in servers]),
            "PostgreSQL": processes.cpu_seconds([database, *processes.descendants(database)]),
            "load": time.process_time(),
        }


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


def measure_ways(postgres: PostgresServer, rounds: int, rates: Rates) -> dict[str, float]:
    """Write points in each of the ways. Returns the bytes of a point, packed and as rows."""
    url = postgres.new_database()
    for number in range(rounds):
        ways: list[tuple[str, Callable[[str, int], float]]] = [
            ("packed", write_packed),
            ("rows", partial(write_rows, by_arrays=False)),
            ("arrays", partial(write_rows, by_arrays=True)),
        ]
        for way, write in ways if number % 2 else ways[::-1]:
            rates[way].append(write(url, number))
    return {
        "packed": bytes_a_point(url, ("tail", "chunk", "latest"), rounds * POINTS),
        "rows": bytes_a_point(url, ("point", "newest"), 2 * rounds * POINTS),
    }


def measure_servers(postgres: PostgresServer, folder: Path, rounds: int, seconds: float, rates: Rates) -> Rates:
    """Log over HTTP to one server and to two. Returns the processor time of a point, by servers and process."""
    url = postgres.new_database()
    token = owner_token(url)
    database = Database(url)
    runs = [asyncio.run(Tracking(database).create_run(ADA, "0")).id for _ in range(WRITERS)]
    database.close()
    loads = Loads(postgres, token, runs)
    costs: Rates = defaultdict(list)
    off = {"SKYWARD_HUB_METRICS_ENABLED": "false"}
    with ServerProcess(url, folder, **off) as first, ServerProcess(url, folder, **off) as second:
        for number in range(rounds):
            servers = [("one", [first]), ("two", [first, second])]
            for name, chosen in servers if number % 2 else servers[::-1]:
                rate, spent = loads.measure(chosen, seconds)
                rates[name].append(rate)
                for process, cpu_us in spent.items():
                    costs[f"{name}: {process}"].append(cpu_us)
    return costs


def main() -> int:
    """Measure and print. Returns exit code 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="length of each load over HTTP (default: 5)")
    given = parser.parse_args()
    rates: Rates = defaultdict(list)
    began = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="skyward-hub-postgres-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # PostgreSQL's own account enters it
        (folder / "server").mkdir()
        postgres = PostgresServer(folder / "server", is_durable=True)
        try:
            sizes = measure_ways(postgres, given.rounds, rates)
            costs = measure_servers(postgres, folder, given.rounds, given.seconds, rates)
        finally:
            postgres.stop()
    middle = {name: statistics.median(found) for name, found in rates.items()}
    packed, servers = middle["packed"] / middle["rows"], middle["two"] / middle["one"]
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {date.today()},", end=" ")
    print(f"{given.rounds} rounds; load average {began:.1f} before, {os.getloadavg()[0]:.1f} after\n")
    print(f"points per second: packed {middle['packed']:,.0f}, one row each {middle['rows']:,.0f}", end=" ")
    print(f"= {packed:.1f} times (at least {ROWS_TARGET:g}: {_verdict(packed, ROWS_TARGET)});", end=" ")
    print(f"by arrays {middle['arrays']:,.0f} = {middle['packed'] / middle['arrays']:.1f} times")
    print(f"bytes per point: packed {sizes['packed']:.1f}, one row each {sizes['rows']:.1f}", end=" ")
    print(f"= {sizes['rows'] / sizes['packed']:.1f} times")
    print(f"points per second over HTTP: one server {middle['one']:,.0f}, two {middle['two']:,.0f}", end=" ")
    print(f"= {servers:.2f} times (at least {SERVERS_TARGET:g}: {_verdict(servers, SERVERS_TARGET)})")
    print("processor time per point over HTTP, us:", end=" ")
    print(", ".join(f"{process} {statistics.median(found):.2f}" for process, found in costs.items()))
    return int(packed < ROWS_TARGET or servers < SERVERS_TARGET)


def _verdict(ratio: float, target: float) -> str:
    return "reached" if ratio >= target else "MISSED"


if __name__ == "__main__":
    sys.exit(main())
