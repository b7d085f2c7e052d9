"""Registration of models by a run, with a served hub."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from skyward import hub
from skyward.errors import CheckpointNotFound, HubError, UsageError
from skyward.stores.folders import folder_at
from skyward.testing.hub import HubServer
from skyward.training.checkpoint.manifest import MANIFEST
from tests.training.checkpoint.s3_server import s3_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    with HubServer(tmp_path_factory.mktemp("hub")) as served:
        yield served


@pytest.fixture
def owner(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[httpx.Client]:
    monkeypatch.setenv("SKYWARD_HUB_URL", server.url)
    monkeypatch.setenv("SKYWARD_HUB_TOKEN", server.token)
    with httpx.Client(base_url=server.url, headers=server.headers) as client:
        yield client


def test_each_registration_makes_the_next_version(owner: httpx.Client, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "weights.bin").write_bytes(b"weights")
    with hub.start_run(run_name="first") as run:
        run.log_artifact("model", folder)
        assert run.register_model("digits", "model", {"team": "vision", "epoch": 3}) == 1
        run.log_bytes("best.bin", b"better")
        assert run.register_model("digits", "best.bin") == 2
    first = owner.get("/v1/models/digits/versions/1").raise_for_status().json()
    assert (first["source"], first["run_id"]) == (f"runs:/{run.id}/model", run.id)
    assert first["tags"] == {"team": "vision", "epoch": "3"}
    assert owner.get("/v1/models/digits").raise_for_status().json()["latest"][0]["version"] == 2


def test_run_that_has_ended_may_register_too(owner: httpx.Client) -> None:
    with hub.start_run() as run:
        run.log_bytes("model.bin", b"weights")
    assert run.register_model("ended", "model.bin") == 1


def test_token_of_a_run_is_enough_to_register_its_model(owner: httpx.Client, server: HubServer) -> None:
    run_id = owner.post("/v1/runs", json={"id": "f" * 32}).raise_for_status().json()["id"]
    token = owner.post("/v1/tokens", json={"run": run_id}).raise_for_status().json()["token"]
    hub.connect(server.url, token=token)
    with hub.start_run(resume=run_id) as run:
        run.log_bytes("weights/model.bin", b"weights")
        assert [run.register_model("by-token", "weights/model.bin") for _ in range(2)] == [1, 2]
        with pytest.raises(HubError, match="Names cannot contain"):
            run.register_model("by:token", "weights/model.bin")
    assert owner.get("/v1/models/by-token/versions/2").raise_for_status().json()["run_id"] == run_id


def test_checkpoint_of_another_job_that_a_model_names_by_its_url_is_kept_for_it(
    owner: httpx.Client, tmp_path: Path
) -> None:
    for module in ("s3fs", "moto"):
        pytest.importorskip(module)
    with s3_server(tmp_path) as s3, hub.start_run() as run:
        bucket = s3.bucket()
        url = f"{bucket}/other/checkpoint-500"
        with folder_at(url).create(MANIFEST) as file:
            file.write(b"{}")
        assert run.register_model("named by url", url) == 1
        assert "other/checkpoint-500/.kept-for-model-named-by-url" in s3.keys(bucket)
        with pytest.raises(CheckpointNotFound, match="checkpoint-1': no checkpoint is there"):
            run.register_model("nowhere", f"{bucket}/other/checkpoint-1")
    version = owner.get("/v1/models/named by url/versions/1").raise_for_status().json()
    assert (version["source"], version["run_id"]) == (url, run.id)
    assert owner.get("/v1/models/nowhere").status_code == 404


@pytest.mark.parametrize(
    ("name", "path", "message"),
    [
        ("a/b", "model.bin", "Names cannot contain '/' or ':'"),
        ("", "model.bin", "Missing value for required parameter 'name'"),
        ("wrong", "nothing", "artifact_path='nothing': "),
        ("wrong", "model", "artifact_path='model': "),
        ("wrong", "", "artifact_path='': "),
        ("wrong", "../model.bin", "artifact_path='../model.bin': "),
    ],
)
def test_mistakes_are_refused_and_make_no_model(owner: httpx.Client, name: str, path: str, message: str) -> None:
    with hub.start_run() as run:
        run.log_bytes("model.bin", b"weights")
        with pytest.raises((UsageError, HubError), match=re.escape(message)):
            run.register_model(name, path)
    assert owner.get("/v1/models/wrong").status_code == 404
