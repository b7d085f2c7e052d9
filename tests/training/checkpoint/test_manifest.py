"""The manifest: it tells which checkpoint is the newest and whether it is unchanged, and older ones are read too."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from skyward.cli import main
from skyward.errors import CheckpointCorrupt
from skyward.training.checkpoint import (
    CheckpointCoordinator,
    CheckpointManager,
    Manifest,
    checkpoints_in,
    latest_checkpoint,
    migrate_checkpoint,
    problems,
)
from tests.training.checkpoint.states import Box, part

ASSETS = Path(__file__).parent / "assets"


def run_in(folder: Path, **options: Any) -> CheckpointCoordinator:
    return CheckpointCoordinator([part("model", Box({"weight": 1}), "global")], output_dir=folder, **options)


def change(checkpoint: Path | str, **fields: Any) -> None:
    """Write other values into a manifest, as it would have been written with them."""
    file = Path(checkpoint, "checkpoint_manifest.json")
    manifest = Manifest.from_json(file.read_bytes(), where=str(checkpoint))
    file.write_bytes(Manifest(**{**vars(manifest), **fields}).to_json())


def test_the_newest_checkpoint_is_the_last_committed_whatever_the_clocks_say(tmp_path: Path) -> None:
    """A machine whose clock was 90 s ahead wrote checkpoint-10. The next machine continues from there."""
    run = run_in(tmp_path)
    ahead = run.save_checkpoint(checkpoint_id=10)
    change(ahead, timestamp="2999-01-01T00:00:00.000000Z")
    manager = CheckpointManager(run, save_total_limit=2, asynchronous=False)
    for step in (20, 30, 40):
        manager.save(step)
    assert [each.step for each in checkpoints_in(tmp_path)] == [30, 40]
    assert (report := manager.resume()) is not None
    assert report.step == 40


def test_a_checkpoint_that_is_replaced_becomes_the_newest(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    for step in (1, 2, 3, 1):
        run.save_checkpoint(checkpoint_id=step)
    assert [(each.step, each.manifest.commit_number) for each in checkpoints_in(tmp_path)] == [(2, 2), (3, 3), (1, 4)]


def test_checkpoints_without_numbers_come_first(tmp_path: Path) -> None:
    shutil.copytree(ASSETS / "v2-run", tmp_path, dirs_exist_ok=True)
    shutil.copytree(ASSETS / "v1" / "checkpoints" / "checkpoint-7", tmp_path / "checkpoint-7")
    assert [each.step for each in checkpoints_in(tmp_path)] == [7, 2, 4], "by their time"
    path = run_in(tmp_path).save_checkpoint(checkpoint_id=3)
    change(path, timestamp="2001-01-01T00:00:00.000000Z")
    assert latest_checkpoint(tmp_path) == path
    assert [each.manifest.commit_number for each in checkpoints_in(tmp_path)] == [0, 0, 0, 1]


def test_a_migrated_checkpoint_is_counted(tmp_path: Path) -> None:
    run_in(tmp_path).save_checkpoint(checkpoint_id=9)
    path = migrate_checkpoint(ASSETS / "v1" / "checkpoints" / "checkpoint-7", tmp_path / "checkpoint-7")
    assert latest_checkpoint(tmp_path) == path


@pytest.mark.parametrize("checkpoint", [*ASSETS.glob("v2*/checkpoint-*")], ids=lambda path: f"{path.parent.name}")
def test_manifests_without_a_digest_are_read(checkpoint: Path) -> None:
    assert problems(checkpoint) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"step": 100', '"step": 900'),
        ('"world_size": 1,', '"world_size": 2,'),
        ('"name": "first"', '"name": "second"'),
        ('"digest": "xxh3:', '"digest": "xxh4:'),
        ('"digest"', '"dihest"'),
        ('"commit_number": 1', '"commit_number": 7'),
    ],
)
def test_a_changed_manifest_is_neither_verified_nor_loaded(
    old: str, new: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_in(tmp_path, metadata={"name": "first"})
    path = run.save_checkpoint(checkpoint_id=100)
    file = Path(path, "checkpoint_manifest.json")
    text = file.read_text()
    assert old in text
    # The manifest's own digest is the last.
    before, _, after = text.rpartition(old)
    file.write_text(before + new + after)
    with pytest.raises(CheckpointCorrupt, match=r"checkpoint-100/checkpoint_manifest.json: its digest is xxh3:"):
        run.load_checkpoint(path)
    with pytest.raises(CheckpointCorrupt):
        run.load_checkpoint()
    fine = run_in(tmp_path / "other").save_checkpoint()
    assert main(["checkpoint", "verify", path, fine]) == 1
    said = capsys.readouterr().out
    assert "the file has changed" in said
    assert f"{fine}: complete" in said


def test_a_manifest_may_be_written_in_another_form(tmp_path: Path) -> None:
    """The digest covers the values, not the white space."""
    path = run_in(tmp_path, metadata={"metrics": {"loss": float("nan")}, "by": {3: ("a", None)}}).save_checkpoint()
    file = Path(path, "checkpoint_manifest.json")
    file.write_text(json.dumps(json.loads(file.read_text()), sort_keys=True))
    assert problems(path) == []


def test_a_save_works_beside_a_damaged_manifest(tmp_path: Path) -> None:
    """The new number follows the damaged one's, if that can still be read."""
    run = run_in(tmp_path)
    for step in (1, 2, 3):
        run.save_checkpoint(checkpoint_id=step)
    damaged = tmp_path / "checkpoint-3" / "checkpoint_manifest.json"
    damaged.write_text(damaged.read_text().replace('"step": 3', '"step": 4'))
    (tmp_path / "checkpoint-2" / "checkpoint_manifest.json").write_text("[1")
    path = run.save_checkpoint(checkpoint_id=5)
    manifest = Manifest.from_json(Path(path, "checkpoint_manifest.json").read_bytes(), where=path)
    assert manifest.commit_number == 4


def test_an_old_folder_tells_its_step_by_its_name(tmp_path: Path) -> None:
    for version, step in (("v0/checkpoint-5", 5), ("v1/checkpoints/checkpoint-7", 7)):
        report = CheckpointCoordinator([part("model", Box(None), "global", required=False)]).load_checkpoint(
            ASSETS / version, strict=False
        )
        assert report.step == step
