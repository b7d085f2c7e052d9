"""Volumes in an object store, from moto's server on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("s3fs")
pytest.importorskip("moto")

import skyward as sky
from skyward.bootstrap.volumes import list_volumes, remove_volume
from skyward.errors import UsageError, VolumeFailed
from tests.pool.test_volumes import add, contents, here
from tests.training.checkpoint.s3_server import S3, s3_server
from tests.waiting import until


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path / "data" / "skyward"


@pytest.fixture
def url(s3: S3) -> str:
    """Return the URL of a new folder with a file."""
    bucket = s3.bucket()
    put(f"{bucket}/data/a", "1")
    return f"{bucket}/data"


def put(url: str, text: str) -> None:
    import boto3

    bucket, _, key = url.removeprefix("s3://").partition("/")
    boto3.client("s3").put_object(Bucket=bucket, Key=key, Body=text.encode())


def get(url: str) -> str:
    import boto3

    bucket, _, key = url.removeprefix("s3://").partition("/")
    body: bytes = boto3.client("s3").get_object(Bucket=bucket, Key=key)["Body"].read()
    return body.decode()


def opened(url: str, *, read_only: bool | None = None, nodes: int = 1, concurrency: int = 1) -> sky.ComputePool:
    volumes = {"/data": sky.Volume(url, read_only=read_only, mount=False)}
    return sky.ComputePool(sky.Local(), nodes=nodes, concurrency=concurrency, volumes=volumes, logs=False)


@sky.compute
def refresh() -> None:
    sky.volume("/data").refresh()


@sky.compute
def add_and_fail(name: str) -> None:
    (sky.volume("/data") / name).write_text("2")
    raise ValueError("my own")


@sky.compute
def commit(*, overwrite: bool = False) -> None:
    sky.volume("/data").commit(overwrite=overwrite)


def test_tasks_find_the_files_of_a_store_and_fetch_them_once(s3: S3, url: str, data: Path) -> None:
    with opened(url, nodes=2, concurrency=2) as pool:
        s3.forget()
        assert contents("/data") @ pool == [{"a": "1"}] * 2
        assert [len(found) for found in pool.map(contents, ["/data"] * 20)] == [1] * 20
        fetched = [line for line in s3.log() if line.startswith("GET") and line.endswith("/data/a")]
        assert len(fetched) == 1  # two nodes of one machine share the cache
        put(f"{url}/b", "2")
        refresh() >> pool.node(0)
        assert contents("/data") >> pool.node(0) == {"a": "1", "b": "2"}
        with pytest.raises(UsageError, match="is read-only; write sky.Volume"):
            commit() >> pool
    assert s3.keys(url) == ["data/a", "data/b"]
    s3.forget()
    with opened(url) as pool:
        assert contents("/data") >> pool == {"a": "1", "b": "2"}
        assert not [line for line in s3.log() if line.endswith("/data/a") and line.startswith("GET")]
        with pytest.raises(UsageError, match="a pool uses it"):
            remove_volume(here, url)
    (cache,) = (data / "volume-caches").iterdir()
    assert (cache / "files").stat().st_mode & 0o777 == 0o700
    assert [(volume.name, volume.is_in_use) for volume in list_volumes(here)] == [(url, False)]
    remove_volume(here, url)
    assert list_volumes(here) == []
    assert not cache.exists()
    assert s3.keys(url) == ["data/a", "data/b"]


def test_a_writable_volume_is_saved_when_a_call_returns(s3: S3, url: str, data: Path) -> None:
    with opened(url, read_only=False, nodes=2) as pool:
        add("/data", "sub", "2") >> pool.node(0)
        assert get(f"{url}/sub") == "2"
        assert contents("/data") >> pool.node(1) == {"a": "1", "sub": "2"}  # its first call
        with pytest.raises(ValueError, match="my own"):
            add_and_fail("late") >> pool.node(0)
        assert s3.keys(url) == ["data/a", "data/sub"]
        contents("/data") >> pool.node(0)
        assert get(f"{url}/late") == "2"
        put(f"{url}/sub", "by another")
        with pytest.raises(VolumeFailed, match=r"volumes\['/data'\]: .*: sub: changed here and in the store") as failed:
            add("/data", "sub", "mine") >> pool.node(0)
        assert failed.value.files == ("sub",)
        assert failed.value.path == "/data"
        assert get(f"{url}/sub") == "by another"
        commit(overwrite=True) >> pool.node(0)
        assert get(f"{url}/sub") == "mine"
    until(lambda: not list((data / "volume-copies").iterdir()))
    assert s3.keys(url) == ["data/a", "data/late", "data/sub"]


def test_a_store_that_is_not_there_is_named(s3: S3, url: str) -> None:
    with opened("s3://no-such-bucket/data") as pool, pytest.raises(VolumeFailed, match="no such bucket"):
        contents("/data") >> pool
    with opened(url, read_only=False) as pool:
        contents("/data") >> pool
        s3.forget()
        s3.refuse(0)
        with pytest.raises(VolumeFailed, match=r"refuses access .*; check the credentials"):
            add("/data", "b", "2") >> pool
        s3.forget()
        contents("/data") >> pool
        assert get(f"{url}/b") == "2"


PROGRAM = """
import sys, time
from tests.pool.test_store_volumes import add, opened
with opened(sys.argv[1], read_only=False) as pool:
    add("/data", "b", "2") >> pool
    print("there", flush=True)
    time.sleep(600)
"""


def test_a_killed_program_leaves_no_copy(url: str, data: Path) -> None:
    program = subprocess.Popen([sys.executable, "-c", PROGRAM, url], stdout=subprocess.PIPE, text=True)
    try:
        assert program.stdout is not None
        assert program.stdout.readline() == "there\n"
        assert len(os.listdir(data / "volume-copies")) == 1
        os.kill(program.pid, signal.SIGKILL)
        until(lambda: not os.listdir(data / "volume-copies"), 60)
    finally:
        program.kill()
        program.communicate()
    assert get(f"{url}/b") == "2"
