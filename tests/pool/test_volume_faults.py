"""Volumes when the disk is full, the node dies while files are copied, or the store is away."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("s3fs")
pytest.importorskip("moto")

from skyward.errors import NodeLost, VolumeFailed
from tests.pool.test_store_volumes import opened, put
from tests.pool.test_volumes import add, contents
from tests.training.checkpoint.s3_server import S3, s3_server
from tests.waiting import until


@pytest.fixture
def s3(tmp_path: Path) -> Iterator[S3]:
    with s3_server(tmp_path) as server:
        yield server


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "data").mkdir()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path / "data"


@pytest.fixture
def url(s3: S3) -> str:
    bucket = s3.bucket()
    put(f"{bucket}/data/a", "1")
    return f"{bucket}/data"


@pytest.fixture
def small_disk(data: Path) -> Iterator[Path]:
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(data)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("no rights to mount a file system here")
    yield data
    subprocess.run(["umount", "-l", str(data)], check=True)


@pytest.mark.root
def test_a_full_disk_is_named_and_the_next_call_continues(s3: S3, url: str, small_disk: Path) -> None:
    put(f"{url}/large", "x" * (3 << 20))
    (small_disk / "ballast").write_bytes(b"x" * (2 << 20))
    with opened(url) as pool:
        with pytest.raises(VolumeFailed, match=r"needs 0.00293 GiB, but .* has 0.00\d* GiB free; free disk space"):
            contents("/data") >> pool
        assert not list(small_disk.rglob("part-*"))
        (small_disk / "ballast").unlink()
        assert sorted(contents("/data") >> pool) == ["a", "large"]


def test_a_node_that_dies_while_it_saves_leaves_whole_files_and_no_copy(s3: S3, url: str, data: Path) -> None:
    with opened(url, read_only=False) as pool:
        assert contents("/data") >> pool == {"a": "1"}
        s3.kill(pool.agent_pids()[0], 0, "within")
        with pytest.raises(NodeLost):
            add("/data", "b", "2") >> pool
        assert s3.keys(url) == ["data/a"]
        assert contents("/data") >> pool == {"a": "1"}, "the node's replacement has a copy of its own"
        add("/data", "b", "3") >> pool
        assert s3.keys(url) == ["data/a", "data/b"]
    until(lambda: os.listdir(data / "skyward" / "volume-copies") == [])


def test_a_store_that_goes_away_is_an_error_and_ends_nothing_else(tmp_path: Path, data: Path) -> None:
    with contextlib.ExitStack() as server:
        bucket = server.enter_context(s3_server(tmp_path)).bucket()
        put(f"{bucket}/data/a", "1")
        with opened(f"{bucket}/data", read_only=False) as pool:
            contents("/data") >> pool
            server.close()
            refused = r"volumes\['/data'\]: s3://bucket.*; check the store's name, its network and the credentials"
            with pytest.raises(VolumeFailed, match=refused) as failed:
                add("/data", "b", "2") >> pool
            assert failed.value.retryable
            (copy,) = (data / "skyward" / "volume-copies").iterdir()
            assert (copy / "files" / "b").read_text() == "2", "a later call would save it"
