"""Checkpoints on s3:// URLs, in a real server over loopback."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from skyward.cli import main
from skyward.errors import CheckpointCorrupt, CheckpointNotFound, CheckpointSaveFailed, UsageError
from skyward.stores.folders import folder_at
from skyward.training.checkpoint import (
    CheckpointCoordinator,
    CheckpointManager,
    checkpoints_in,
    latest_checkpoint,
    migrate_checkpoint,
    problems,
    prune,
)
from skyward.training.checkpoint.commit import new_token
from tests.training.checkpoint.crew import error_of, run_cases
from tests.training.checkpoint.s3_server import S3, s3_server
from tests.training.checkpoint.states import Box, Unwritable, part, same, shard


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    with s3_server(tmp_path_factory.mktemp("fsspec")) as server:
        yield server


@pytest.fixture
def run(s3: S3) -> Iterator[str]:
    """Return the URL of a run in a new bucket."""
    yield f"{s3.bucket()}/team/run"
    s3.forget()


def of_box(url: str, box: Box, **options: Any) -> CheckpointCoordinator:
    return CheckpointCoordinator([part("model", box, "global")], output_dir=url, **options)


def large(seed: int = 0) -> dict[str, Any]:
    """Return three parts of an upload, with small tensors in front of them."""
    generator = torch.Generator().manual_seed(seed)
    return {f"norm.{at}": torch.randn(8, generator=generator) for at in range(50)} | {
        "weight": torch.randn(3_500_000, generator=generator)
    }


@pytest.mark.parametrize("kind", ["torch", "safetensors"])
def test_a_saved_state_comes_back_to_the_bit(run: str, s3: S3, kind: str) -> None:
    box = Box(large())
    saves = CheckpointCoordinator([part("model", box, "global", metadata={"format": kind})], output_dir=run)
    s3.forget()
    path = saves.save_checkpoint(checkpoint_id=7)
    assert path == f"{run}/checkpoint-7"
    sent = [each for each in s3.log() if each.startswith("PUT") and "/data-" in each]
    assert len(sent) in (2, 3), "a large file goes in parts"
    assert s3.count() == len(sent) + 3, "which are begun and ended; then the manifest"
    box.state = None
    s3.forget()
    assert saves.load_checkpoint().step == 7
    assert same(box.state, large())
    fetched = [each for each in s3.log() if each.startswith("GET") and "/data-" in each]
    assert len(fetched) == 3, "each part crosses the network once"
    assert problems(path) == []
    assert s3.uploads(run) == []


def test_small_files_are_one_request_each(run: str, s3: S3) -> None:
    parts = [part(f"state{at}", Box(shard(at)), "global") for at in range(5)]
    s3.forget()
    CheckpointCoordinator(parts, output_dir=run).save_checkpoint(checkpoint_id=1)
    assert s3.count() == 6
    assert len(s3.log()) < 15


def test_another_process_sees_the_replaced_checkpoint(run: str, s3: S3) -> None:
    """No client answers from memory: this process also sees the other one's changes."""
    code = """
import sys, torch
from skyward.training.checkpoint import CheckpointCoordinator
from tests.training.checkpoint.states import Box, part, shard
box = Box(None)
run = CheckpointCoordinator([part("model", box, "global")], output_dir=sys.argv[1])
for line in sys.stdin:
    if line.startswith("save"):
        box.state = shard(int(line.split()[1]))
        run.save_checkpoint(checkpoint_id=1)
    else:
        run.load_checkpoint()
    print(float(box.state["layer.weight"][0]), flush=True)
"""
    other = subprocess.Popen(
        [sys.executable, "-c", code, run], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdin is not None
    assert other.stdout is not None

    def ask(line: str) -> float:
        assert other.stdin is not None
        assert other.stdout is not None
        other.stdin.write(line + "\n")
        other.stdin.flush()
        return float(other.stdout.readline())

    with other:
        box = Box(shard(1))
        mine = of_box(run, box)
        mine.save_checkpoint(checkpoint_id=1)
        assert ask("load") == shard(1)["layer.weight"][0].item()
        for seed in (2, 3):
            assert ask(f"save {seed}") == shard(seed)["layer.weight"][0].item()
            mine.load_checkpoint()
            assert same(box.state, shard(seed))
            box.state = shard(10 * seed)
            mine.save_checkpoint(checkpoint_id=1)
            assert ask("load") == shard(10 * seed)["layer.weight"][0].item()
        other.stdin.close()
    assert len(s3.keys(run)) == 2, "a manifest and one file: what was replaced is gone"


def test_the_newest_and_the_best_stay(run: str) -> None:
    box = Box(shard(0))
    losses = [0.5, 0.1, 0.4, 0.3]
    with CheckpointManager(of_box(run, box), save_steps=1, save_total_limit=2, metric="loss") as manager:
        for step, loss in enumerate(losses):
            box.state = shard(step)
            assert manager.step(step, metrics={"loss": loss})
    assert [each.step for each in checkpoints_in(run)] == [1, 3]
    assert latest_checkpoint(run) == f"{run}/checkpoint-3"
    assert manager.best() == f"{run}/checkpoint-1"
    assert manager.resume(1)
    assert same(box.state, shard(1))


def test_training_goes_on_while_a_save_is_sent(run: str) -> None:
    weight = torch.zeros(1000)
    box = Box({"weight": weight})
    saves = of_box(run, box)
    assert saves.save_checkpoint_async(checkpoint_id=1)
    weight += 1
    assert saves.wait() == f"{run}/checkpoint-1"
    saves.load_checkpoint()
    assert box.state["weight"].sum() == 0


def test_a_save_that_fails_leaves_nothing_and_the_last_checkpoint_stays(run: str, s3: S3) -> None:
    box = Box(shard(1))
    of_box(run, box).save_checkpoint(checkpoint_id=1)
    before = s3.keys(run)
    for unwritable in (Unwritable(None), _LateUnwritable(None)):
        with pytest.raises(CheckpointSaveFailed, match="No space left on device"):
            of_box(run, unwritable).save_checkpoint(checkpoint_id=1)
        assert s3.keys(run) == before
        assert s3.uploads(run) == []
    of_box(run, box).load_checkpoint()
    assert same(box.state, shard(1))


class _LateUnwritable(Unwritable):
    """Component that fails when parts of it have been sent."""

    def state_dict(self) -> Any:
        return large()

    def __init__(self, state: Any) -> None:
        super().__init__(state)
        self.state_dict = lambda: {"weight": torch.zeros(3_000_000), "text": "x" * (6 << 20), "thing": self.Thing()}  # type: ignore[method-assign]


def test_a_stored_manifest_is_the_commit_whatever_the_answer(
    run: str, s3: S3, caplog: pytest.LogCaptureFixture
) -> None:
    box = Box(shard(1))
    saves = of_box(run, box)
    saves.save_checkpoint(checkpoint_id=1)
    last = 1
    # First the file, then the manifest, then the deletion of the replaced files.
    for seed, (at, is_carried_out, is_committed) in enumerate(
        [(2, False, True), (1, True, True), (1, False, False), (0, False, False), (0, True, False)], start=2
    ):
        box.state = shard(seed)
        last = seed if is_committed else last
        s3.refuse(at, is_carried_out=is_carried_out)
        if is_committed:
            saves.save_checkpoint(checkpoint_id=1)
        else:
            with pytest.raises(CheckpointSaveFailed, match="the store refuses access"):
                saves.save_checkpoint(checkpoint_id=1)
        s3.forget()
        assert saves.load_checkpoint().step == 1
        assert same(box.state, shard(last)), (at, is_carried_out)
    assert "could not remove a replaced checkpoint's files" in caplog.text
    saves.save_checkpoint(checkpoint_id=1)
    assert len(s3.keys(run)) == 2, "it is removed later"


def test_corruption_is_found(run: str, s3: S3) -> None:
    import boto3

    box = Box(shard(1))
    path = of_box(run, box).save_checkpoint(checkpoint_id=1)
    bucket = run.removeprefix("s3://").partition("/")[0]
    (key,) = (each for each in s3.keys(run) if each.endswith(".pt"))
    client = boto3.client("s3")
    whole = client.get_object(Bucket=bucket, Key=key)["Body"].read()
    for damaged, said in (
        (whole[:-1], "but .* were written"),
        (whole[:900] + bytes([whole[900] ^ 1]) + whole[901:], "digest"),
    ):
        client.put_object(Bucket=bucket, Key=key, Body=damaged)
        with pytest.raises(CheckpointCorrupt, match=said):
            of_box(run, box).load_checkpoint()
        assert len(problems(path)) == 1
    client.delete_object(Bucket=bucket, Key=key)
    with pytest.raises(CheckpointCorrupt, match="it is missing"):
        of_box(run, box).load_checkpoint()
    assert "it is missing" in problems(path)[0]


def test_leftovers_of_interrupted_saves_are_swept_and_uploads_of_others_are_not(run: str, s3: S3) -> None:
    import boto3

    of_box(run, Box(shard(1))).save_checkpoint(checkpoint_id=1)
    token = new_token()
    random, host, pid, began = token.split(".")
    gone, elsewhere = f"{random}.{host}.{int(pid) + 100_000_000}.{began}", f"{random}.00000000.1.1"
    bucket, _, prefix = run.removeprefix("s3://").partition("/")
    client = boto3.client("s3")
    for each in (token, gone, elsewhere):
        for name in ("checkpoint-1", "checkpoint-2"):
            key = f"{prefix}/{name}/data-{each}/model_state.pt"
            client.put_object(Bucket=bucket, Key=key, Body=b"a part of it")
            client.create_multipart_upload(Bucket=bucket, Key=key)
    client.put_object(Bucket=bucket, Key=f"{prefix}/notes/data-{gone}/mine", Body=b"of somebody else")
    of_box(run, Box(shard(2))).save_checkpoint(checkpoint_id=3)
    left = [key for key in s3.keys(run) if gone in key]
    assert left == [f"{prefix}/notes/data-{gone}/mine"]
    assert len([key for key in s3.keys(run) if token in key or elsewhere in key]) == 4
    # To this server all uploads began years ago.
    assert s3.uploads(run) == [f"{prefix}/checkpoint-{at}/data-{token}/model_state.pt" for at in (1, 2)]
    assert [each.step for each in checkpoints_in(run)] == [1, 3]


def test_a_missing_bucket_is_named_and_not_made(s3: S3) -> None:
    url = "s3://no-such-bucket/run"
    with pytest.raises(CheckpointSaveFailed, match="s3://no-such-bucket/run.*no such bucket"):
        of_box(url, Box(shard(1))).save_checkpoint(checkpoint_id=1)
    with pytest.raises(OSError, match="no such bucket"):
        checkpoints_in(url)
    with pytest.raises(UsageError, match="not a folder in a bucket"):
        of_box(url, Box(shard(1))).save_checkpoint("s3://no-such-bucket")
    import boto3

    assert "no-such-bucket" not in [each["Name"] for each in boto3.client("s3").list_buckets()["Buckets"]]
    with pytest.raises(CheckpointNotFound, match="no complete checkpoint is there"):
        of_box(f"{s3.bucket()}/run", Box({})).load_checkpoint()


Say = Callable[..., tuple[int, str]]


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    """Run a command line. Returns its status and output."""

    def run(*argv: object) -> tuple[int, str]:
        status = main(["checkpoint", *map(str, argv)])
        captured = capsys.readouterr()
        return status, captured.out + captured.err

    return run


def test_a_client_without_permission_gets_a_clear_error(
    run: str, s3: S3, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_box(run, Box(shard(1))).save_checkpoint(checkpoint_id=1)
    s3.refuse_strangers(True)
    try:
        with pytest.raises(CheckpointSaveFailed, match="the store refuses access.*check the credentials"):
            of_box(run, Box(shard(1))).save_checkpoint(checkpoint_id=1)
        status, text = say("ls", run)
        assert status == 1
        assert "check the credentials" in text
        assert "test" not in text, "no secret is shown"
    finally:
        s3.refuse_strangers(False)
    assert say("ls", run)[0] == 0


def test_the_command_works_on_urls(run: str, say: Say, tmp_path: Path) -> None:
    box = Box({"weight": torch.ones(3)})
    saves = of_box(run, box, metadata={"metrics": {"loss": 0.5}})
    path = saves.save_checkpoint(checkpoint_id=10)
    status, text = say("ls", run)
    assert status == 0
    assert f"{run}/checkpoint-10" in text
    assert "loss=0.5" in text
    assert "step 10, 1 ranks" in say("show", path)[1]
    assert json.loads(say("show", path, "--json")[1])["step"] == 10
    assert say("verify", path) == (0, f"{path}: complete\n")
    assert say("verify", path, "--quick")[0] == 0
    box.state["weight"][1] = 2
    other = saves.save_checkpoint(checkpoint_id=20)
    assert "1 of 3 elements" in say("diff", path, other)[1]
    assert say("verify", f"{run}/checkpoint-11")[0] == 1


@pytest.mark.parametrize("kind", ["safetensors", "torch", "dcp"])
def test_the_command_exports_from_and_to_urls(run: str, say: Say, tmp_path: Path, kind: str) -> None:
    state = {"weight": torch.arange(3.0), "bias": torch.ones(2).bfloat16()}
    path = of_box(run, Box(state)).save_checkpoint(checkpoint_id=10)
    for target in (str(tmp_path / "out"), f"{run}/out"):
        assert say("export", path, target, "--format", kind) == (0, f"{target}\n")
    if kind == "torch":
        assert folder_at(run).read(["out"])["out"] == (tmp_path / "out").read_bytes()
        assert same(torch.load(tmp_path / "out", weights_only=True), {"model": state})
        return
    files = {name: folder_at(f"{run}/out").read([name])[name] for name in folder_at(f"{run}/out").walk()}
    assert sorted(files) == sorted(each.name for each in (tmp_path / "out").iterdir())
    if kind == "dcp":
        again = Box(None)
        migrated = migrate_checkpoint(f"{run}/out", f"{run}/checkpoint-30")
        assert of_box(run, again).load_checkpoint(migrated).step == 30
        assert same(again.state, state)
    else:
        assert files["model.safetensors"] == (tmp_path / "out" / "model.safetensors").read_bytes()


def test_a_checkpoint_moves_to_a_store_and_back(run: str, tmp_path: Path) -> None:
    box = Box(shard(1))
    here = of_box(str(tmp_path), box).save_checkpoint(checkpoint_id=1)
    there = migrate_checkpoint(here, f"{run}/checkpoint-1")
    back = migrate_checkpoint(there, tmp_path / "checkpoint-2")
    for path in (there, back):
        box.state = None
        of_box(run, box).load_checkpoint(path)
        assert same(box.state, shard(1))
        assert problems(path) == []
    assert prune(run, keep=1, protect=[]) == []


# Ranks ---------------------------------------------------------------------------------------------------------------


def saved_and_loaded(ranks: Any, folder: Path) -> Any:
    url = Path(folder.parent, "url").read_text()
    mine = Box(shard(ranks.rank))
    parts = [part("own", mine, "per_rank"), part("shared", Box(shard(9)), "replicated", validate_replication=True)]
    saves = CheckpointCoordinator(parts, None, ranks, f"{url}/run")
    saves.save_checkpoint(checkpoint_id=1)
    begun = saves.save_checkpoint_async(checkpoint_id=2)
    mine.state = None
    path = saves.wait()
    saves.load_checkpoint()
    return begun, path == f"{url}/run/checkpoint-2", same(mine.state, shard(ranks.rank)), saves.latest() == path


def one_rank_cannot_write(ranks: Any, folder: Path) -> Any:
    url = Path(folder.parent, "url").read_text()
    good = CheckpointCoordinator([part("own", Box(shard(ranks.rank)), "per_rank")], None, ranks, f"{url}/bad")
    good.save_checkpoint(checkpoint_id=1)
    box = Unwritable(None) if ranks.rank == 1 else Box(shard(5))
    bad = CheckpointCoordinator([part("own", box, "per_rank")], None, ranks, f"{url}/bad")
    bad.save_checkpoint_async(checkpoint_id=1)
    return error_of(bad.wait), problems(f"{url}/bad/checkpoint-1")


def sharded_tensors(ranks: Any, folder: Path) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    url = Path(folder.parent, "url").read_text()
    mesh = init_device_mesh("cpu", (2,))
    state = {"weight": distribute_tensor(torch.arange(64.0), mesh, [Shard(0)])}
    box = Box(dict(state))
    saves = CheckpointCoordinator([part("model", box, "per_rank")], None, ranks, f"{url}/sharded")
    path = saves.save_checkpoint(checkpoint_id=1)
    box.state = {"weight": distribute_tensor(torch.zeros(64), mesh, [Shard(0)])}
    saves.load_checkpoint()
    return problems(path), box.state["weight"].to_local().tolist()


def test_two_ranks_save_and_load_in_a_store(s3: S3, tmp_path: Path) -> None:
    url = s3.bucket()
    (tmp_path / "url").write_text(url)
    said = run_cases([saved_and_loaded, one_rank_cannot_write, sharded_tensors], world=2, folder=tmp_path)
    assert said["saved_and_loaded"] == [(True, True, True, True)] * 2
    for error, found in said["one_rank_cannot_write"]:
        assert "CheckpointSaveFailed" in error
        assert "failed on rank 1" in error
        assert found == []
    assert said["sharded_tensors"] == [([], [float(each) for each in range(32 * at, 32 * at + 32)]) for at in range(2)]
    from skyward.training.checkpoint.inspection import states_in

    whole = states_in(f"{url}/sharded/checkpoint-1")["model"]()
    assert whole["weight"].tolist() == list(range(64))
    assert s3.uploads(url) == []


def test_without_its_client_the_error_says_what_to_install() -> None:
    code = """
import sys
sys.modules["s3fs"] = None
from skyward.cli import main
sys.exit(main(["checkpoint", "ls", "s3://bucket/run"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "; run `pip install 'skyward[s3]'`" in done.stderr
    assert "Traceback" not in done.stderr
