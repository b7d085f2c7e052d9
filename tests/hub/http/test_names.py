"""Names and URIs of clients: none becomes a path, none is opened, and nothing is unpickled."""

from __future__ import annotations

import http.client
import json
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest

from tests.hub.http.samples import make_things, samples
from tests.hub.http.watched import WatchedServer

CANARY = "canary-5d1f"
UP = (
    "../",
    "..%2f",
    "%2e%2e/",
    "%2e%2e%2f",
    "%252e%252e%252f",
    "..%252f",
    "..;/",
    "..%5c",
    "..%255c",
    "%c0%ae%c0%ae%c0%af",
    "..%c0%af",
    "..%00/",
    "%u002e%u002e/",
    "x/../",
    ".//..//",
)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchedServer]:
    folder = tmp_path_factory.mktemp("hub")
    (folder / "canary.txt").write_text(CANARY)
    with WatchedServer(folder) as server:
        yield server


def ways_out(canary: Path) -> list[str]:
    """Return names that would lead to the canary, if a name were a path, in each spelling."""
    absolute = str(canary)
    above = [way * depth + "canary.txt" for way in UP for depth in (1, 2, 3, 4, 8)]
    rooted = [way * 12 + quote(absolute.lstrip("/"), safe="/") for way in UP]
    whole = ["/" + absolute, quote(absolute, safe=""), quote(quote(absolute, safe=""), safe=""), f"file:{absolute}"]
    return [*above, *rooted, *whole, quote(f"file://{absolute}", safe=""), quote(f"C:{absolute}", safe="")]


def test_no_spelling_of_a_name_leads_out(watched: WatchedServer) -> None:
    with httpx.Client(base_url=watched.url, headers=watched.headers) as client:
        run = client.post("/v1/runs", json={}).raise_for_status().json()["id"]
    places = (
        f"/api/2.0/mlflow-artifacts/artifacts/0/{run}/artifacts/",
        "/api/2.0/mlflow-artifacts/artifacts/",
        f"/v1/runs/{run}/artifacts/",
        f"/api/2.0/mlflow/artifacts/list?run_id={run}&path=",
        f"/get-artifact?run_id={run}&path=",
        f"/v1/runs/{run}/artifacts?prefix=",
        "/v1/runs/",
        "/ui/",
    )
    before = sorted(path.name for path in watched.folder.iterdir())
    connection = http.client.HTTPConnection(*watched.address)
    for place in places:
        for name in ways_out(watched.folder / "canary.txt"):
            for method in ("GET", "PUT", "DELETE") if "mlflow-artifacts" in place else ("GET",):
                connection.request(method, place + name, b"other" if method == "PUT" else None, watched.headers)
                answer = connection.getresponse()
                body = answer.read().decode(errors="replace")
                assert answer.status < 500, (method, place, name, body)
                assert CANARY not in body, (method, place, name)
    connection.close()
    assert (watched.folder / "canary.txt").read_text() == CANARY
    assert sorted(path.name for path in watched.folder.iterdir()) == before
    assert_quiet(watched)


def test_a_name_is_decoded_once(watched: WatchedServer) -> None:
    with httpx.Client(base_url=watched.url, headers=watched.headers) as client:
        run = client.post("/v1/runs", json={}).raise_for_status().json()["id"]
        client.post(f"/v1/runs/{run}/artifacts", params={"key": "100%25.txt"}, content=b"x").raise_for_status()
        [listed] = client.get(f"/v1/runs/{run}/artifacts").json()["artifacts"]
        assert listed["key"] == "100%25.txt"
        assert client.get(f"/v1/runs/{run}/artifacts/100%2525.txt").status_code == 200
        assert client.get(f"/v1/runs/{run}/artifacts/100%25.txt").status_code == 404


class Poison:
    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.write_text, (Path("canary.txt"), "fired")


def test_uris_are_never_opened_and_files_are_never_loaded(watched: WatchedServer) -> None:
    canary = watched.folder / "canary.txt"
    uris = (
        str(canary),
        f"file://{canary}",
        f"FILE:{canary}",
        f"file:{canary}",
        f"s3://b/{canary}",
        "http://127.0.0.1:9/x",
    )
    poison = {
        "model.pkl": pickle.dumps(Poison()),
        "MLmodel": b"!!python/object/apply:os.system ['touch fired']",
        "x.npy": b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order': False, 'shape': (1,)}\n"
        + pickle.dumps([Poison()]),
    }
    api = "/api/2.0/mlflow"
    with httpx.Client(base_url=watched.url, headers=watched.headers) as client:
        for number, uri in enumerate(uris):
            body = {"name": f"e{number}", "artifact_location": uri}
            status = client.post(f"{api}/experiments/create", json=body).status_code
            assert status == (400 if uri.lower().startswith(("/", "file:")) else 200), uri
        run = client.post("/v1/runs", json={}).raise_for_status().json()["id"]
        for uri in uris:
            dataset = {"name": "d", "digest": uri[-30:], "source_type": "local", "source": uri}
            inputs = {"run_id": run, "datasets": [{"dataset": dataset, "tags": []}]}
            client.post(f"{api}/runs/log-inputs", json=inputs).raise_for_status()
            client.post(f"{api}/runs/set-tag", json={"run_id": run, "key": "u", "value": uri}).raise_for_status()
        for key, content in poison.items():
            client.post(f"/v1/runs/{run}/artifacts", params={"key": key}, content=content).raise_for_status()
            assert client.get(f"/v1/runs/{run}/artifacts/{key}").content == content
        client.get(f"/v1/runs/{run}").raise_for_status()
        client.get("/get-artifact", params={"run_id": run, "path": "MLmodel"}).raise_for_status()
    assert canary.read_text() == CANARY
    assert_quiet(watched)


def assert_quiet(watched: WatchedServer) -> None:
    """Check that a server opened its own files and modules only, and ran nothing."""
    allowed = (str(watched.folder / "data"), sys.prefix, sys.base_prefix, "/proc/", "/usr/lib/python3")
    source = str(Path(__file__).parents[3])
    events = watched.events()
    opened = [path for event, path in events if event == "open"]
    assert opened, "the hook saw nothing"
    assert [path for path in opened if not path.startswith((*allowed, source)) and not path.isdecimal()] == []
    assert [event for event in events if event[0] not in {"open", "exec"}] == []
    assert [event for event in events if "canary" in event[1]] == []


def test_no_secret_is_in_the_log_and_no_text_forges_a_line(watched: WatchedServer) -> None:
    with httpx.Client(base_url=watched.url) as browser:
        signed_in = browser.post("/v1/session", json={"code": watched.code}, headers={"Origin": watched.url})
        session = signed_in.raise_for_status().headers["set-cookie"].partition("=")[2].partition(";")[0]
        browser.get(f"/v1/me?token={watched.token}")
    with httpx.Client(base_url=watched.url, headers=watched.headers) as client:
        made = client.post("/v1/tokens", json={}).raise_for_status().json()["token"]
        things = make_things(client, client, "thing", "thing")
        for sample in samples(things):
            sample.send(client)
            sample.send(client, {"Authorization": f"Basic {watched.token}", "X-Request-Id": watched.token})
            sample.send(client, {"Cookie": f"skyward_hub_session={session}", "Authorization": ""})
        client.get("/v1/runs/%0a%7b%22level%22:%22forged%22%7d%0a")
        client.get(f"/v1/runs/{watched.token}")
    log = watched.log()
    lines = [json.loads(line) for line in log.splitlines()]
    assert len(lines) > 300
    assert {line["level"] for line in lines} <= {"debug", "info", "warning"}
    for secret in (watched.token, watched.code, session, made):
        assert secret.rpartition("_")[2] not in log
