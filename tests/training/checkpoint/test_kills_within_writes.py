"""A rank that dies or cannot write in the middle of a file or request, behind training.

The last checkpoint is intact to the bit, nobody waits for the dead rank, and the resumed run removes the unfinished
files.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from skyward.stores.folders import folder_at
from skyward.training.checkpoint import (
    CheckpointCoordinator,
    CheckpointManager,
    RNGState,
    checkpoints_in,
    latest_checkpoint,
    problems,
)
from tests.training.checkpoint.crew import WARM, error_of, run_cases, warm_process
from tests.training.checkpoint.s3_server import S3, When, s3_server
from tests.training.checkpoint.states import Box, part, same, shard

WORLD, STEPS = 2, 6
ELEMENTS = 60_000
"""Of each rank's state: its file has four bytes for each, and some hundred."""


@dataclass(frozen=True, kw_only=True)
class Kill:
    """A kill in the middle of writing the checkpoint of step 4.

    `rank` dies when a file of its has `at` bytes, or at its request `at`. `about` is the number of bytes that the
    manifest has besides. `address` is that of the S3.
    """

    rank: int
    at: int
    when: When = "within"
    is_async: bool = True
    about: int = 0
    address: str = ""

    def arm(self) -> None:
        if self.address:
            S3(self.address).kill(os.getpid(), self.at, self.when)
            return
        # The system ends the process at the write that would exceed the limit. Python would only have it refused.
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.at, self.at))


def _run(rank: int, meeting: str, url: str, kill: Kill | None, answers: Any) -> None:
    """Resume and go on to the last step, with a save at every second one. Report how far it got."""
    import torch.distributed as dist

    from skyward.training import TorchRanks

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=WORLD)
    torch.manual_seed(rank)
    walk = Box({"position": torch.zeros(ELEMENTS) + rank, "step": 0})
    components = [
        part("model", walk, "per_rank"),
        part("shared", Box(shard(0)), "replicated", validate_replication=True),
        part("rng", RNGState(), "per_rank"),
    ]
    about = {"text": "x" * kill.about} if kill is not None else {}
    saves = CheckpointCoordinator(components, None, TorchRanks(timeout_s=30.0), url, metadata=about)
    try:
        with CheckpointManager(saves, save_steps=2, asynchronous=kill is None or kill.is_async) as manager:
            manager.resume()
            for step in range(walk.state["step"] + 1, STEPS + 1):
                walk.state["position"] = walk.state["position"] * 0.9 + torch.randn(ELEMENTS)
                walk.state["step"] = step
                if kill is not None and step == 4:
                    saves.wait()
                    dist.barrier()
                    if kill.rank == rank:
                        kill.arm()
                    dist.barrier()
                manager.step(step)
        answers.put((rank, "done", walk.state["position"].sum().item()))
    except Exception as error:  # of the checkpoint, or of whatever collective of the run met the dead rank first
        answers.put((rank, "failed", f"{type(error).__name__}: {error}"))
    answers.close()
    answers.join_thread()
    os._exit(0)


def _world(base: Path, url: str, kill: Kill | None = None) -> list[Any]:
    """Return the reports of the ranks, with None for a dead one. Raises queue.Empty if one is silent for 60 seconds."""
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    meeting = base / f"meeting-{len(list(base.iterdir()))}"
    ranks = [context.Process(target=_run, args=(rank, str(meeting), url, kill, answers)) for rank in range(WORLD)]
    for process in ranks:
        process.start()
    said: list[Any] = [None] * WORLD
    try:
        for _ in range(WORLD - (kill is not None)):
            rank, *answer = answers.get(timeout=60)
            said[rank] = tuple(answer)
        for process in ranks:
            process.join(60)
            assert process.exitcode is not None
        if kill is not None:
            assert ranks[kill.rank].exitcode in (-signal.SIGKILL, -signal.SIGXFSZ), ranks[kill.rank].exitcode
    finally:
        for process in ranks:
            process.kill()
    return said


def _lead(base: Path, urls: list[str], kills: list[Kill], answers: Any) -> None:
    """Import once and fork the ranks, in a separate process."""
    import torch.distributed

    if kills[0].address:
        import s3fs  # noqa: F401

    torch.set_num_threads(1)
    ends = _world(base, urls[0])
    for url, kill in zip(urls[1:], kills, strict=True):
        killed = _world(base, url, kill)
        found = [problems(each.path) for each in checkpoints_in(url)]
        newest = latest_checkpoint(url)
        resumed = _world(base, url)
        # Files that no manifest names, and staging.
        left = [each for each in folder_at(url).names() if not each.startswith("checkpoint-")]
        left += [text for each in checkpoints_in(url) for text in problems(each.path)]
        answers.put((kill, killed, found, newest, resumed == ends, left))
    answers.put(None)


def _check(base: Path, urls: list[str], kills: list[Kill]) -> None:
    answers = WARM.Queue()
    leader = warm_process(_lead, base, urls, kills, answers)
    leader.start()
    try:
        while (answer := answers.get(timeout=90)) is not None:
            kill, killed, found, newest, is_same, left = answer
            assert killed[kill.rank] is None, kill
            assert killed[1 - kill.rank] is None or killed[1 - kill.rank][0] == "failed", (kill, killed)
            # Once the manifest is there, the checkpoint is complete, whoever dies.
            is_there = kill.when == "after" and len(found) == 2
            assert newest.rpartition("-")[2] == ("4" if is_there else "2"), (kill, newest)
            assert not any(found), (kill, found)
            assert is_same, kill
            assert left == [], kill
    finally:
        leader.kill()
        leader.join()


def test_a_rank_killed_within_a_file_loses_no_checkpoint(tmp_path: Path) -> None:
    chance = random.Random(4)
    size = 4 * ELEMENTS
    kills = [Kill(rank=rank, at=chance.randrange(size)) for rank in range(WORLD)]
    kills += [
        Kill(rank=chance.randrange(WORLD), at=size + 300, is_async=False),  # behind the tensor
        Kill(rank=0, at=size + 50_000, about=size + 100_000),  # in the manifest
    ]
    _check(tmp_path, [str(tmp_path / f"run{at}") for at in range(len(kills) + 1)], kills)


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    with s3_server(tmp_path_factory.mktemp("fsspec")) as server:
        yield server


def test_a_rank_killed_within_a_request_to_a_store_loses_no_checkpoint(s3: S3, tmp_path: Path) -> None:
    """Two ranks send five files, then the manifest."""
    places: list[tuple[int, int, When]] = [
        (1, 2, "within"),
        (0, 4, "before"),
        (0, 5, "within"),
        (0, 5, "after"),
    ]
    kills = [Kill(rank=rank, at=at, when=when, address=s3.address) for rank, at, when in places]
    _check(tmp_path, [f"{s3.bucket()}/run{at}" for at in range(len(kills) + 1)], kills)


# Disks that are full, files that may not grow ------------------------------------------------------------------------


def a_rank_cannot_go_on_writing(ranks: Any, folder: Path) -> Any:
    """Limit a rank's file in the middle, behind training. All ranks hear of it at their next step, and go on."""
    folder.mkdir(exist_ok=True)
    box = Box(shard(ranks.rank, size=50_000))
    saves = CheckpointCoordinator([part("model", box, "per_rank")], None, ranks, folder)
    manager = CheckpointManager(saves, save_steps=1)
    manager.step(1)
    saves.wait()
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    if ranks.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, unlimited[1]))
    box.state = shard(10 + ranks.rank, size=50_000)
    manager.step(2)
    error = error_of(saves.wait)
    ranks.exchange(None)  # rank 0 has cleared up when its error is raised
    after = [each.step for each in checkpoints_in(folder)], sorted(os.listdir(folder))
    ranks.exchange(None)
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    box.state = None
    saves.load_checkpoint()
    is_first = same(box.state, shard(ranks.rank, size=50_000))
    manager.step(3)
    manager.close()
    return error, after, is_first, [each.step for each in checkpoints_in(folder)]


def a_disk_is_full(ranks: Any, folder: Path) -> Any:
    """Fill a disk behind training. The unfinished files are removed, so that a smaller save has room at once."""
    disk = (folder.parent / "disk").read_text()
    if not disk:
        return None
    box = Box(shard(ranks.rank, size=20_000))
    saves = CheckpointCoordinator([part("model", box, "per_rank")], None, ranks, disk)
    manager = CheckpointManager(saves, save_steps=1)
    manager.step(1)
    saves.wait()
    box.state = shard(ranks.rank, size=60_000)
    manager.step(2)
    error = error_of(saves.wait)
    ranks.exchange(None)
    names = sorted(os.listdir(disk))
    ranks.exchange(None)
    box.state = None
    saves.load_checkpoint()
    is_first = same(box.state, shard(ranks.rank, size=20_000))
    manager.step(3)
    manager.close()
    return error, names, is_first, [each.step for each in checkpoints_in(disk)]


def test_a_file_that_cannot_be_completed_is_reported_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "disk").write_text("")
    said = run_cases([a_rank_cannot_go_on_writing], world=2, folder=tmp_path)
    for error, after, is_first, steps in said["a_rank_cannot_go_on_writing"]:
        assert "CheckpointSaveFailed" in error
        assert "failed on rank 1" in error
        assert "File too large" in error
        assert after == ([1], ["checkpoint-1"])
        assert is_first
        assert steps == [1, 3]


@pytest.mark.root
def test_a_full_disk_behind_training_is_reported_on_all_ranks(small_disk: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").write_text(str(small_disk))
    said = run_cases([a_disk_is_full], world=2, folder=tmp_path)
    for error, names, is_first, steps in said["a_disk_is_full"]:
        assert "CheckpointSaveFailed" in error
        assert "No space left on device" in error
        assert names == ["checkpoint-1"]
        assert is_first
        assert steps == [1, 3]
