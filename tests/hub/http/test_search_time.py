"""Searches that would take minutes: they end in time, in words, and delay nobody else."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from skyward.hub.http.settings import DatabaseSettings, ServerSettings, Settings, StorageSettings
from skyward.hub.store.database import SEARCHERS, Database
from skyward.hub.store.tables import TAG
from skyward.hub.store.transaction import Transaction
from skyward.testing.hub import HubServer

RUNS = 20_000
LIMIT_S = 1.0
SEARCH = "/api/2.0/mlflow/runs/search"
LETTERS = "abcdefghijklmn"
PATTERN = f"%{'%'.join(LETTERS)}%"
HARD = " AND ".join([*[f"tags.note ILIKE '{PATTERN}'"] * 98, f"tags.note ILIKE '{PATTERN}z'"])
"""It finds nothing, and knows that of a run only behind its last pattern."""
NUMBERS = "WITH RECURSIVE numbers(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < ?)"


def fill(tx: Transaction) -> None:
    """Add runs, each with a tag of a thousand characters in which each pattern looks for its letters."""
    tx.execute(
        f"{NUMBERS} INSERT INTO run (project, id, experiment, name, state, lifecycle, owner, started_at, params, tags)"
        " SELECT 1, 'r' || n, 0, 'run', 'completed', 'active', '', n, '{}', '{}' FROM numbers",
        (RUNS,),
    )
    number = tx.execute("INSERT INTO key (project, name) VALUES (1, 'note') RETURNING id").fetchone()[0]
    note = "".join(letter * 70 for letter in LETTERS)
    tx.execute(f"INSERT INTO attribute (run, kind, key, value) SELECT pk, {TAG}, {number}, ? FROM run", (note,))


@pytest.fixture
def server(database_url: str, tmp_path: Path) -> Iterator[HubServer]:
    database = Database(database_url)
    database.write_and_wait(fill)
    database.close()
    settings = Settings(
        server=ServerSettings(port=0),
        database=DatabaseSettings(url=database_url, search_s=LIMIT_S),
        storage=StorageSettings(folder=str(tmp_path / "blobs")),
    )
    with HubServer(tmp_path, settings=settings) as made:
        yield made


def test_long_searches_end_in_words_and_delay_no_other_request(server: HubServer) -> None:
    body = {"experiment_ids": ["0"], "filter": HARD}
    with httpx.Client(base_url=server.url, headers=server.headers, timeout=60) as client:
        began = time.monotonic()
        answer = client.post(SEARCH, json=body)
        lasted_s = time.monotonic() - began
        assert (answer.status_code, answer.json()["error_code"]) == (400, "INVALID_PARAMETER_VALUE")
        assert answer.json()["message"].startswith("filter: the search took longer than 1 s; ")
        assert LIMIT_S <= lasted_s < 60

        answer = client.get("/v1/runs", params={"filter": HARD.replace("ILIKE", "LIKE")})
        assert (answer.status_code, answer.json()["error"]["field"]) == (400, "filter")

        with ThreadPoolExecutor(2 * SEARCHERS) as others:
            reads: list[int] = []
            while len(reads) < 5 and max(reads, default=0) <= 2:  # a busy machine reads slowly too
                long = [others.submit(client.post, SEARCH, json=body) for _ in range(2 * SEARCHERS)]
                reads.append(0)
                while not all(search.done() for search in long):
                    assert client.get("/v1/runs/r7").raise_for_status().json()["id"] == "r7"
                    reads[-1] += 1
                assert {search.result().status_code for search in long} == {400}
        assert max(reads) > 2
