"""Old formats, other libraries' layouts, and the command that inspects them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from skyward.cli import main
from skyward.training.checkpoint import (
    CheckpointCoordinator,
    best_of,
    checkpoints_in,
    export_checkpoint,
    migrate_checkpoint,
    problems,
    prune,
)
from skyward.training.checkpoint.inspection import states_in
from tests.training.checkpoint.states import Box, part, same, shard

ASSETS = Path(__file__).parent / "assets"

Say = Callable[..., tuple[int, str]]


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    """Run a command line. Returns its status and output."""

    def run(*argv: object) -> tuple[int, str]:
        status = main(["checkpoint", *map(str, argv)])
        captured = capsys.readouterr()
        return status, captured.out + captured.err

    return run


def model(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {"weight": torch.randn(3, 2, generator=generator), "half": torch.arange(4.0).bfloat16() + seed}


def loaded(path: object, *keys: str) -> dict[str, Any]:
    boxes = {key: Box(None) for key in keys}
    CheckpointCoordinator([part(key, box, "global") for key, box in boxes.items()]).load_checkpoint(str(path))
    return {key: box.state for key, box in boxes.items()}


def test_every_format_is_read() -> None:
    for version in ("v0", "v2"):
        (path,) = (ASSETS / version).glob("checkpoint-*")
        assert same(loaded(path, "model")["model"], model())
    assert [each.step for each in checkpoints_in(ASSETS / "v1")] == [7]
    assert [each.step for each in checkpoints_in(ASSETS / "v2")] == [9]
    assert checkpoints_in(ASSETS / "v0") == [], "nothing says that it is whole"
    (v2,) = (ASSETS / "v2").glob("checkpoint-*")
    assert problems(v2) == []


def test_both_folders_and_the_layout_of_a_store_are_read(tmp_path: Path) -> None:
    """Version 1 is in `checkpoints/` and beside it. Version 2 is in S3 as two ranks wrote it, with a sharded state."""
    shutil.copytree(ASSETS / "v1" / "checkpoints" / "checkpoint-7", tmp_path / "checkpoint-7")
    for place in (ASSETS / "v1", tmp_path):
        (found,) = checkpoints_in(place)
        assert found.manifest.format_version == 1
        assert loaded(found.path, "trainer") == {"trainer": {"step": 7}}
    (found,) = checkpoints_in(ASSETS / "v2-store")
    assert (found.step, found.manifest.epoch, found.manifest.world_size) == (11, 1.5, 2)
    assert problems(found.path) == []
    assert same(loaded(found.path, "model", "optimizer"), {"model": model(), "optimizer": {"momentum": torch.ones(2)}})
    sharded = Box({"weight": torch.zeros(16)})
    CheckpointCoordinator([part("sharded", sharded, "per_rank")]).load_checkpoint(found.path)
    assert sharded.state["weight"].tolist() == list(range(16))
    assert [states_in(found.path)[f"own[{rank}]"]() for rank in range(2)] == [{"rank": 0}, {"rank": 1}]


@pytest.mark.parametrize("version", ["v0/checkpoint-5", "v1/checkpoints/checkpoint-7"])
def test_old_ones_are_migrated_without_loading_them(version: str, tmp_path: Path, say: Say) -> None:
    target = tmp_path / "checkpoint-3"
    assert say("migrate", ASSETS / version, target, "--rename", "model=net") == (0, f"{target}\n")
    assert problems(target) == []
    manifest = json.loads((target / "checkpoint_manifest.json").read_text())
    assert (manifest["format_version"], manifest["step"]) == (2, 3)
    assert manifest["world_size"] == (2 if version.startswith("v0") else 4)
    assert "net" in manifest["components"]
    assert not list(tmp_path.glob(".tmp-*"))


def test_hugging_faces_checkpoints_are_migrated_and_weights_exported(tmp_path: Path) -> None:
    """Export tied weights, and load the result by from_pretrained."""
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=32, n_positions=16)
    gpt = transformers.GPT2LMHeadModel(config)
    source = tmp_path / "hf"
    gpt.save_pretrained(source)
    torch.save({"state": {}, "param_groups": [{"lr": 0.1, "params": [0]}]}, source / "optimizer.pt")
    (source / "trainer_state.json").write_text(json.dumps({"global_step": 12, "epoch": 2.0, "log_history": []}))
    path = migrate_checkpoint(source, tmp_path / "ours")
    states = loaded(path, "model", "optimizer")
    fresh = transformers.GPT2LMHeadModel(config)
    fresh.load_state_dict(states["model"], strict=False)
    fresh.tie_weights()
    assert same(fresh.state_dict(), gpt.state_dict())
    assert states["optimizer"]["param_groups"][0]["lr"] == 0.1

    kept = CheckpointCoordinator([part("model", gpt, "global")], output_dir=tmp_path / "run").save_checkpoint()
    weights = tmp_path / "weights"
    export_checkpoint(kept, weights)
    config.save_pretrained(weights)
    again = transformers.GPT2LMHeadModel.from_pretrained(weights)
    assert same(again.state_dict(), gpt.state_dict())


def test_dcps_are_migrated_and_exported(tmp_path: Path) -> None:
    path = CheckpointCoordinator(
        [part("model", Box(model()), "global"), part("optimizer", Box({"momentum": torch.ones(2)}), "global")],
        output_dir=tmp_path / "run",
    ).save_checkpoint()
    export_checkpoint(path, tmp_path / "dcp", to="dcp", components=("model", "optimizer"))
    assert (tmp_path / "dcp" / ".metadata").is_file()
    again = loaded(migrate_checkpoint(tmp_path / "dcp", tmp_path / "again"), "model", "optimizer")
    assert same(again, {"model": model(), "optimizer": {"momentum": torch.ones(2)}})
    export_checkpoint(path, tmp_path / "one.pt", to="torch")
    assert same(torch.load(tmp_path / "one.pt", weights_only=True), {"model": model()})


def test_the_command_lists_shows_and_verifies(tmp_path: Path, say: Say) -> None:
    assert say("ls", tmp_path)[0] == 1
    box = Box(shard(1))
    run = CheckpointCoordinator(
        [part("model", box, "global")], output_dir=tmp_path, metadata={"metrics": {"loss": 0.5}}
    )
    path = Path(run.save_checkpoint(checkpoint_id=10))
    status, text = say("ls", tmp_path)
    assert status == 0
    assert "checkpoint-10" in text
    assert "loss=0.5" in text
    status, text = say("show", path)
    assert status == 0
    assert "step 10, 1 ranks" in text
    assert "model      global   0           torch" in text
    assert json.loads(say("show", path, "--json")[1])["step"] == 10
    assert say("verify", path) == (0, f"{path}: complete\n")

    file = path / "model_state.pt"
    whole = bytearray(file.read_bytes())
    whole[-100] ^= 1
    file.write_bytes(whole)
    (path / "stray").touch()
    status, text = say("verify", path)
    assert status == 1
    assert "model_state.pt: its digest is" in text
    assert "stray: no manifest names it" in text
    assert say("verify", "--quick", path)[1].count("\n") == 1
    shutil.rmtree(path)
    assert say("verify", path)[0] == 1


def test_the_command_shows_the_differences_of_two(tmp_path: Path, say: Say) -> None:
    state = shard(1)
    box = Box(state)
    run = CheckpointCoordinator([part("model", box, "global")], output_dir=tmp_path)
    first = run.save_checkpoint()
    assert say("diff", first, first) == (0, "")
    state["layer.weight"][3] += 0.5
    state["new"] = 1
    second = run.save_checkpoint()
    status, text = say("diff", first, second)
    assert status == 1
    assert text.splitlines() == [
        "model layer.weight: 1 of 64 elements, at most 0.5 apart",
        "model new: only in the second",
    ]


def test_zero_is_a_metric_and_nan_is_none(tmp_path: Path) -> None:
    for step, value in ((1, 0.3), (2, 0.0), (3, float("nan")), (4, 0.0)):
        CheckpointCoordinator([], output_dir=tmp_path, metadata={"metrics": {"x": value}}).save_checkpoint(
            checkpoint_id=step
        )
    found = checkpoints_in(tmp_path)
    assert [each.step for each in best_of(found, "x", greater_is_better=False)] == [4, 2, 1]
    assert [each.step for each in best_of(found, "x")] == [1, 4, 2]


@pytest.mark.parametrize("store", ["folder", "memory"])
def test_old_checkpoints_are_deleted_from_any_store(store: str, tmp_path: Path) -> None:
    place = str(tmp_path) if store == "folder" else f"memory://{tmp_path.name}-retention"
    for step in range(4):
        CheckpointCoordinator([part("model", Box(shard(step)), "global")], output_dir=place).save_checkpoint()
    oldest = checkpoints_in(place)[0].path
    deleted = prune(place, keep=2, protect=[oldest])
    assert [Path(each).name for each in deleted] == ["checkpoint-1", "checkpoint-2"]
    assert [each.step for each in checkpoints_in(place)] == [0, 3]
    assert [problems(each.path) for each in checkpoints_in(place)] == [[], []]
