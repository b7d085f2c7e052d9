"""Junk in every field of every route: the answer names the mistake, and never is an error of the server's own."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import httpx
import pytest

from skyward.hub.http.reply import Text
from skyward.hub.http.settings import DatabaseSettings, ServerSettings, Settings, StorageSettings
from skyward.testing.hub import HubServer
from tests.hub.http.samples import Sample, make_things, samples

TEXTS = (
    "",
    "\0",
    "\ud800",
    "x" * 20_000,
    "'; DROP TABLE run; --",
    '"`%_\\',
    "../../../etc/passwd",
    "file:///etc/passwd",
    "\u202e\U0001f4a5",
    "metrics.`a`b` > '1",
    str(2**63),
    "-1",
    "1e400",
    "NaN",
)
VALUES: tuple[Any, ...] = (
    *TEXTS,
    None,
    True,
    -1,
    0,
    1.5,
    2**31,
    2**63,
    -(2**63) - 1,
    10**30,
    [],
    {},
    [None],
    {"\0": "\0"},
    ["x"] * 1500,
)
FOR_DATABASES: tuple[Any, ...] = (
    *("", "\0", "\ud800", "x" * 20_000, "'; DROP TABLE run; --", '"`%_\\', "\u202e\U0001f4a5", str(2**63)),
    *(True, 1.5, 2**31, 2**63, -(2**63) - 1, 10**30, {"\0": "\0"}),
)
"""Junk that databases may take differently: characters, lengths, types and sizes. SQLite alone gets the rest."""
LEAK = re.compile(
    r"SELECT |INSERT |UPDATE .* SET|sqlite|psycopg|sqlalchemy|Traceback|File \"|\.py\b|hub\.db|0x[0-9a-f]{8}"
)


@pytest.fixture
def served(database_url: str, tmp_path: Path) -> Iterator[HubServer]:
    settings = Settings(
        server=ServerSettings(port=0),
        database=DatabaseSettings(url=database_url),
        storage=StorageSettings(folder=str(tmp_path / "blobs")),
    )
    with HubServer(tmp_path, settings=settings) as server:
        yield server


@pytest.fixture
def junk(database_url: str) -> Sequence[Any]:
    return VALUES if database_url.startswith("sqlite") else FOR_DATABASES


def mutations(sample: Sample, junk: Sequence[Any]) -> Iterator[tuple[str, dict[str, Any], Any]]:
    """Yield path, query and body of requests that are legal except for one field."""
    for name in sample.names:
        for text in junk:
            if isinstance(text, str) and text != "\ud800":  # cannot be percent-encoded
                yield sample.path.replace(f"/{name}", f"/{quote(text, safe='')}", 1), dict(sample.query), sample.body
    for name in {*sample.query, *sample.fields}:
        for value in junk:
            if sample.body is None or name in sample.query:
                shown = value if isinstance(value, list) else str(value)
                if value != "\ud800":
                    yield sample.path, {**sample.query, name: shown}, sample.body
            else:
                yield sample.path, dict(sample.query), {**sample.body, name: value}


def refused(
    connection: HTTPConnection, headers: dict[str, str], method: str, address: str, body: Any
) -> tuple[int, str, str] | None:
    """Send a request. Returns status, content type and text of an answer that is an error, else None.

    The standard library's client, because there are thousands of requests, and httpx takes longer for one than the hub.
    """
    content = None if body is None else json.dumps(body).encode()
    more = {} if content is None else {"Content-Type": "application/json"}
    connection.request(method, address, content, headers | more)
    answer = connection.getresponse()
    if answer.status < 400:
        connection.close()  # it may be a stream of events without an end
        return None
    return answer.status, answer.headers["content-type"], answer.read().decode()


def mistakes(
    connection: HTTPConnection, headers: dict[str, str], sample: Sample, junk: Sequence[Any], folder: Path
) -> Iterator[str]:
    """Yield the faults of the answers to junk."""
    for path, query, body in mutations(sample, junk):
        address = f"{path}?{urlencode(query, doseq=True)}" if query else path
        answer = refused(connection, headers, sample.method, address, body)
        if answer is None:
            continue
        status, content_type, text = answer
        asked = f"{sample.method} {path[:200]} {str(query)[:200]} {str(body)[:300]}: {status} {text[:300]}"
        if status >= 500 or content_type != "application/json":
            yield asked
        elif LEAK.search(text.replace(json.dumps(path), "")) or str(folder) in text:
            yield f"tells too much: {asked}"
        elif not has_shape(path, json.loads(text)):
            yield f"has another shape: {asked}"


def has_shape(path: str, fault: Any) -> bool:
    """Tell whether an error has the one shape of its API."""
    if path.startswith(("/api/", "/ajax-api/")):
        return set(fault) == {"error_code", "message"} and bool(fault["message"])
    return set(fault) == {"error"} and bool(fault["error"]["message"]) and bool(fault["error"]["fix"])


def is_destructive(sample: Sample) -> bool:
    return sample.method == "DELETE" or sample.path.endswith("/delete")


def test_junk_is_refused_in_words(
    served: HubServer, junk: Sequence[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "skyward.hub")
    found: list[str] = []
    with httpx.Client(base_url=served.url, headers=served.headers, timeout=60) as client:
        things = make_things(client, client, "thing", "thing")
    wanted = [sample for sample in samples(things) if sample.template == sample.route.path]
    with closing(HTTPConnection(urlsplit(served.url).netloc, timeout=60)) as connection:
        for sample in sorted(wanted, key=is_destructive):
            if (sample.fields or sample.names) and sample.route.answer is not Text:
                found += mistakes(connection, served.headers, sample, junk, tmp_path)
    assert not found, "\n".join(found)
    assert [record.getMessage() for record in caplog.records] == []


RECORDS: dict[str, tuple[Any, ...]] = {
    "m": (1, 1, {"loss": 1.0}),
    "p": ({"lr": 1},),
    "t": ({"a": "b"},),
    "dt": ("a",),
    "a": ("key", 1, "a" * 64),
    "cut": (1,),
    "s": ("running", None, None),
    "h": (1,),
    "ack": (1, "done"),
    "in": ([{"name": "d", "digest": "d", "source_type": "s", "source": "s"}],),
    "unknown": (1,),
}


def wrong_records(junk: Sequence[Any]) -> Iterator[list[Any]]:
    """Yield records that are legal except for one part."""
    for kind, parts in RECORDS.items():
        for number, part in enumerate(parts):
            for value in junk:
                yield [kind, *parts[:number], value, *parts[number + 1 :]]
                if isinstance(part, dict):
                    yield [kind, {**part, "other": value}]
                    yield [kind, *parts[:number], {str(value): 1}, *parts[number + 1 :]]
                if isinstance(part, list):
                    yield [kind, *({**item, name: value} for item in part for name in [*item, "tags", "other"])]
                    yield from ([kind, [{**item, name: value}]] for item in part for name in [*item, "tags", "other"])
        yield [kind]
        yield [kind, *parts, "more"]


def first_records(junk: Sequence[Any]) -> Iterator[list[Any]]:
    yield ["run"]
    for value in junk:
        yield ["run", value]
        for name in ("experiment", "name", "user", "started_at", "tags", "parent"):
            yield ["run", {name: value}]


def test_record_of_junk_holds_nobody_up(
    served: HubServer, junk: Sequence[Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "skyward.hub")
    run = "e" * 32
    wrong: list[str] = []
    with httpx.Client(
        base_url=served.url, headers={**served.headers, "Content-Type": "application/json"}, timeout=60
    ) as client:

        def send(first: int, *records: object) -> httpx.Response:
            batch = {"client": "c", "first": first, "records": records}
            return client.post(f"/v1/runs/{run}/batches", content=json.dumps(batch))

        send(1, ["run", {"experiment": "junk"}]).raise_for_status()
        number = 2
        for record in wrong_records(junk):
            answer = send(number, record, ["m", number, 1, {"number": number}])
            if not answer.is_success and "not JSON" not in answer.text:
                wrong.append(f"{str(record)[:300]}: {answer.status_code} {answer.text[:300]}")
            number += 2 * answer.is_success
        for index, record in enumerate(first_records(junk)):
            batch = {"client": "c", "first": 1, "records": [record]}
            answer = client.post(f"/v1/runs/{index:032x}/batches", content=json.dumps(batch))
            if answer.is_server_error:
                wrong.append(f"{str(record)[:300]}: {answer.status_code} {answer.text[:300]}")
        steps = client.get(f"/v1/runs/{run}/points?key=number").raise_for_status().json()["steps"]
    assert not wrong, "\n".join(wrong)
    assert steps[-1] == number - 2, "the records behind the last junk count"
    assert [record.getMessage() for record in caplog.records] == []
