"""Volumes that nodes mount: Debian's s3fs on moto's server, and programs in the place of an NFS client and others."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("s3fs")
pytest.importorskip("moto")

import skyward as sky
from skyward.core.process import processes_below
from skyward.errors import VolumeFailed
from skyward.state.mounts import is_dead, is_mounted, unmount
from tests.hosts.fixtures import REQUIRE
from tests.pool.test_store_volumes import put
from tests.pool.test_volumes import add
from tests.training.checkpoint.s3_server import S3, s3_server
from tests.waiting import until

if sys.platform != "linux" or os.geteuid() != 0 or not os.access("/dev/fuse", os.R_OK | os.W_OK):
    pytest.skip("only root can mount, and only where /dev/fuse is", allow_module_level=True)
if shutil.which("s3fs") is None and not os.environ.get(REQUIRE):
    pytest.skip("no s3fs here: install Debian's s3fs", allow_module_level=True)


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(autouse=True)
def mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the folder of this test's mounts. Nothing may be left in it."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    folder = tmp_path / "data" / "skyward" / "volume-mounts"
    yield folder
    left = os.listdir(folder) if folder.exists() else []
    for name in left:  # before pytest deletes it with the files behind it
        unmount(str(folder / name / "files"))
    assert left == []


@pytest.fixture
def url(s3: S3) -> str:
    """Return the URL of a new folder with two files."""
    bucket = s3.bucket()
    put(f"{bucket}/data/a", "1")
    put(f"{bucket}/data/sub/b", "2")
    put(f"{bucket}/other", "3")
    return f"{bucket}/data"


def opened(volume: sky.Volume, *, nodes: int = 1, concurrency: int = 1) -> sky.ComputePool:
    return sky.ComputePool(sky.Local(), nodes=nodes, concurrency=concurrency, volumes={"/data": volume}, logs=False)


@sky.compute
def tree(path: str = "/data") -> dict[str, str]:
    root = Path(sky.volume(path))
    return {str(path.relative_to(root)): path.read_text() for path in sorted(root.rglob("*")) if path.is_file()}


def daemon_of(mount: Path) -> int:
    """Return the process that serves a mount."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if words[0] == b"s3fs" and os.fsencode(mount) in words:
            return int(path.parent.name)
    raise AssertionError(f"nothing serves {mount}")


def test_a_read_only_store_is_mounted_until_the_pool_ends(s3: S3, url: str, mounts: Path) -> None:
    with opened(sky.Volume(url), nodes=2, concurrency=2) as pool:
        assert tree() @ pool == [{"a": "1", "sub/b": "2"}] * 2
        assert [len(files) for files in pool.map(tree, ["/data"] * 8)] == [2] * 8
        homes = list(mounts.iterdir())
        assert len(homes) == 2, "each node has a mount of its own"
        assert all(is_mounted(str(home / "files")) for home in homes)
        put(f"{url}/late", "4")
        assert tree() >> pool == {"a": "1", "late": "4", "sub/b": "2"}
        with pytest.raises(OSError, match="Read-only file system"):
            add("/data", "a", "5") >> pool
        os.kill(daemon_of(homes[0] / "files"), signal.SIGKILL)
        until(lambda: is_dead(str(homes[0] / "files")))
        assert [sorted(files) for files in tree() @ pool] == [["a", "late", "sub/b"]] * 2, "it is mounted again"
    assert not any(is_mounted(str(home / "files")) for home in homes)
    assert s3.keys(url) == ["data/a", "data/late", "data/sub/b"]


PROGRAM = """
import sys, time
from tests.pool.test_mounted_volumes import opened, sky, tree
with opened(sky.Volume(sys.argv[1])) as pool:
    tree() >> pool
    print(*(machine.pid for machine in pool._life._machines), flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("victims", ["client", "agent", "all"])
def test_kills_leave_no_mount(url: str, mounts: Path, victims: str) -> None:
    """If all processes are killed at once, the next pool unmounts what they left."""
    program = subprocess.Popen([sys.executable, "-c", PROGRAM, url], stdout=subprocess.PIPE, text=True)
    try:
        assert program.stdout is not None
        watchdog = int(program.stdout.readline())
        (home,) = mounts.iterdir()
        below = processes_below(watchdog)
        doomed = {"client": (program.pid,), "agent": below[:1], "all": (program.pid, watchdog, *below)}[victims]
        for pid in doomed:
            with contextlib.suppress(ProcessLookupError):  # it died with its parent
                os.kill(pid, signal.SIGKILL)
        if victims == "agent":
            program.kill()  # its pool would replace the node
    finally:
        program.kill()
        program.communicate()
    if victims == "all":
        with opened(sky.Volume(url)) as pool:
            assert tree() >> pool == {"a": "1", "sub/b": "2"}
            assert not home.exists()
    until(lambda: not home.exists(), 60)
    assert not is_mounted(str(home / "files"))


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, program: str, script: str) -> None:
    """Put a program ahead of all others on the path of pools that open later."""
    path = folder / "bin" / program
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")


def test_a_store_that_cannot_be_mounted_is_copied_unless_the_volume_must_be_mounted(
    s3: S3, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = r"volumes\['/data'\]: s3://no-such-bucket/data: s3fs cannot mount it on the node: .*; check /dev/fuse"
    with opened(sky.Volume("s3://no-such-bucket/data", mount=True)) as pool, pytest.raises(VolumeFailed, match=refused):
        tree() >> pool
    with opened(sky.Volume("xyz://bucket", mount=True)) as pool, pytest.raises(VolumeFailed, match="no program on the"):
        tree() >> pool
    stand_in(tmp_path, monkeypatch, "s3fs", "echo fuse: device not found >&2; exit 1")
    with opened(sky.Volume(url), concurrency=2) as pool:
        assert [len(files) for files in pool.map(tree, ["/data"] * 4)] == [2] * 4


MOUNTED = {
    "mount -t nfs -o ro,nosuid,nodev,retry=0,soft filer:/export/a {at}": sky.Volume("nfs://filer/export/a"),
    "mount -t nfs -o rw,nosuid,nodev,retry=0 filer:/export {at}": sky.Volume("nfs://filer/export", read_only=False),
    "mount-s3 bucket {at} --read-only --prefix data/ --endpoint-url {s3} --force-path-style": sky.Volume(
        "s3://bucket/data"
    ),
    "gcsfuse --implicit-dirs -o ro --only-dir data bucket {at}": sky.Volume("gs://bucket/data/"),
    "blobfuse2 mount {at} --container-name=bucket --subdirectory=data --read-only --block-cache "
    "--virtual-directory=true": sky.Volume("az://bucket/data"),
}
SERVE = 'echo "${0##*/} $*" >>%(log)s; for at; do [ ! -d "$at" ] || /bin/mount --bind %(export)s "$at"; done'
"""Stands for a program that mounts: it writes its command line down, and binds a folder to the one that it is told."""


def test_other_programs_are_told_what_to_mount_where(
    s3: S3, mounts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, export = tmp_path / "log", tmp_path / "export"
    export.mkdir()
    (export / "a").write_text("1")
    for line in MOUNTED:
        stand_in(tmp_path, monkeypatch, line.split()[0], SERVE % {"log": log, "export": export})
    volumes = {f"/data{number}": volume for number, volume in enumerate(MOUNTED.values())}
    with sky.ComputePool(sky.Local(), volumes=volumes, logs=False) as pool:
        assert list(pool.map(tree, volumes)) == [{"a": "1"}] * len(volumes)
        add("/data1", "b", "2") >> pool
        folders = here() >> pool
    written = log.read_text().splitlines()
    assert written == [line.format(at=at, s3=s3.address) for line, at in zip(MOUNTED, folders, strict=True)]
    assert sorted(os.listdir(export)) == ["a", "b"], "the end of a mount deletes nothing behind it"


@sky.compute
def here() -> list[str]:
    info = sky.instance_info()
    assert info is not None
    return list(info.volumes.values())


def test_a_node_that_cannot_mount_nfs_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stand_in(tmp_path, monkeypatch, "mount", "echo 'mount: bad option; for nfs you need a helper' >&2; exit 32")
    refused = r"volumes\['/data'\]: nfs://filer/x: mount cannot mount it on the node: .* a helper; run as root there"
    with opened(sky.Volume("nfs://filer/x")) as pool, pytest.raises(VolumeFailed, match=refused):
        tree() >> pool
