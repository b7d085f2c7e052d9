"""Files between this machine and the nodes of a pool, beside the calls that run there."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import skyward as sky
from skyward.errors import PoolClosed, TransferFailed, UsageError
from tests.waiting import open_files, until


@pytest.fixture(scope="module")
def pool(sky_pools: Callable[..., sky.ComputePool]) -> sky.ComputePool:
    return sky_pools(nodes=2, logs=False)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    (folder / "sub" / "empty").mkdir(parents=True)
    (folder / "a.csv").write_text("a")
    (folder / "sub" / "b.csv").write_text("bb")
    (folder / "sub" / "c.txt").write_text("ccc")
    (folder / "a.csv").chmod(0o755)
    return folder


def tree(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}


def test_only_files_that_differ_are_copied(pool: sky.ComputePool, data: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    assert pool.upload(data, there) == sky.Transfer(files=3, copied=3, bytes=6)
    assert tree(there) == tree(data) == {"a.csv": "a", "sub/b.csv": "bb", "sub/c.txt": "ccc"}
    assert (there / "sub" / "empty").is_dir()
    assert (there / "a.csv").stat().st_mode & 0o777 == 0o755
    (data / "sub" / "b.csv").write_text("BB")  # the same length
    (there / "kept").write_text("not ours")
    assert pool.upload(data, there) == sky.Transfer(files=3, copied=1, bytes=2)
    assert tree(there) == {**tree(data), "kept": "not ours"}


def test_a_file_goes_into_a_folder_or_gets_the_name(pool: sky.ComputePool, data: Path, tmp_path: Path) -> None:
    pool.upload(data / "a.csv", f"{tmp_path}/new/")
    pool.upload(data / "a.csv", f"{tmp_path}/new")
    pool.upload(data / "a.csv", tmp_path / "new" / "other.csv")
    assert tree(tmp_path / "new") == {"a.csv": "a", "other.csv": "a"}
    pool.download(data / "a.csv", tmp_path / "back")
    pool.download(data / "a.csv", tmp_path / "new")
    assert (tmp_path / "back").read_text() == "a"


def test_patterns_keep_the_folders_behind_their_first_wildcard(
    pool: sky.ComputePool, data: Path, tmp_path: Path
) -> None:
    assert pool.download(f"{data}/**/*.csv", tmp_path / "csv").files == 2
    assert tree(tmp_path / "csv") == {"a.csv": "a", "sub/b.csv": "bb"}
    assert pool.upload(f"{data}/s*", tmp_path / "s").files == 2
    assert tree(tmp_path / "s") == {"sub/b.csv": "bb", "sub/c.txt": "ccc"}


def test_each_of_several_nodes_has_its_own_folder_here(pool: sky.ComputePool, data: Path, tmp_path: Path) -> None:
    assert pool.download(data, tmp_path / "all", nodes=[0, 1]).copied == 6
    assert sorted(tree(tmp_path / "all")) == [f"node-{n}/{name}" for n in (0, 1) for name in sorted(tree(data))]
    assert pool.download(data, tmp_path / "one", nodes=1).copied == 3
    assert tree(tmp_path / "one") == tree(data)


def test_relative_paths_begin_at_the_working_folder_of_the_tasks(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(data)
    with sky.ComputePool(sky.Local(), logs=False) as here:
        assert here.upload("sub/b.csv") == sky.Transfer(files=1, copied=0, bytes=0)  # tasks see this file itself
        assert here.upload(data / "sub" / "c.txt").copied == 0
        here.upload("sub/b.csv", "deep/er/b.csv")
        assert (data / "deep" / "er" / "b.csv").read_text() == "bb"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("{data}/none",), "path='.*none': does not exist"),
        (("{data}/*.none",), "matches no file"),
        (("{data}", "../x"), "remote='../x': leads out of its folder"),
        (("{data}", ""), "remote='': is not a path"),
        (("/dev/null",), "is not a regular file"),
    ],
)
def test_wrong_arguments_are_named(pool: sky.ComputePool, data: Path, arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        pool.upload(*(argument.format(data=data) for argument in arguments))


def test_a_node_says_why_it_cannot(pool: sky.ComputePool, data: Path, tmp_path: Path) -> None:
    with pytest.raises(TransferFailed, match=r"remote='.*none': node 1: does not exist") as failed:
        pool.download(data / "none", tmp_path / "x", nodes=1)
    assert (failed.value.node, failed.value.retryable) == (1, False)
    with pytest.raises(TransferFailed, match=r"a\.csv: .*; name another path"):
        pool.upload(data, data / "a.csv")
    with pytest.raises(UsageError, match="nodes=2: no such node"):
        pool.upload(data, tmp_path / "x", nodes=[2])


def test_transfers_wait_for_no_slot(pool: sky.ComputePool, data: Path, tmp_path: Path) -> None:
    go = tmp_path / "go"

    @sky.compute
    def work(path: str) -> None:
        while not os.path.exists(path):
            time.sleep(0.01)

    busy = [work(str(go)) > pool for _ in range(4)]
    pool.upload(data, tmp_path / "there")
    go.touch()
    assert [future.result() for future in busy] == [None] * 4


@pytest.mark.parametrize("way", ["upload", "download"])
def test_the_end_of_the_pool_ends_a_transfer(tmp_path: Path, way: str) -> None:
    size = 64 * 2**30  # of holes: reading them takes longer than the test
    for name in ("here", "there"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(size)
    pool = sky.ComputePool(sky.Local(), logs=False).start()
    with ThreadPoolExecutor(1) as threads:
        try:
            transfer = threads.submit(getattr(pool, way), tmp_path / "here", tmp_path / "there")
            until(lambda: readers(tmp_path))
        finally:
            pool.close()
        with pytest.raises(PoolClosed):
            transfer.result(60)
    until(lambda: not readers(tmp_path))
    with pytest.raises(PoolClosed):
        pool.upload(tmp_path / "here", tmp_path / "there")


def readers(folder: Path) -> list[int]:
    """Return the processes, this one or a file server, that read a file in this folder."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended
            command = Path(f"/proc/{name}/cmdline").read_bytes()
            if int(name) == os.getpid() or b"file_server" in command:
                found += [int(name) for path in open_files(int(name)) if path.startswith(f"{folder}/")]
    return found


def test_the_console_shows_a_transfer_in_bytes() -> None:
    from skyward.console.activity import Progress
    from skyward.console.panel import progress_line
    from skyward.console.style import Style

    progress = Progress("upload data", 4_000_000, "bytes")
    progress.add(1_000_000)
    line = progress_line(progress, 100, progress.began + 1.0, Style())
    assert "1.0 MB of 4.0 MB" in line
    assert "25%" in line
    assert "1.0 MB/s" in line
