"""Checkpoints of one process: declarations, names, replacing, sweeping, object stores, safety, and old formats."""

from __future__ import annotations

import logging
import os
import pickle
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

from skyward.errors import CheckpointCorrupt, CheckpointNotFound, UsageError
from skyward.training.checkpoint import (
    CheckpointCoordinator,
    RNGState,
    SharingPattern,
    StateComponent,
    ValidationLevel,
    checkpoints_in,
    components_of,
    latest_checkpoint,
)
from skyward.training.checkpoint.commit import new_token
from tests.training.checkpoint.states import Box, part, same, shard

ASSETS = Path(__file__).parent / "assets"


def test_values_are_lower_case() -> None:
    assert [each.value for each in SharingPattern] == ["global", "per_rank", "replicated", "per_group", "per_node"]
    assert [each.value for each in ValidationLevel] == ["none", "quick", "tensor", "full"]
    assert part("model", Box({}), "per_rank").sharing_pattern is SharingPattern.PER_RANK


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"key": "a/b"}, "cannot be part of file names"),
        ({"sharing_pattern": "sharded"}, "sharing_pattern='sharded': unknown value; use one of 'global'"),
        ({"sharing_pattern": "per_group"}, "no group is named; set process_group_name="),
        ({"process_group_name": "dp"}, "has no effect with"),
        ({"validate_replication": True}, "GLOBAL has no replicas"),
        ({"validation_level": "some"}, "validation_level='some': unknown value; use one of"),
        ({"stateful": 7}, "has no state_dict"),
    ],
)
def test_illegal_declarations_are_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        StateComponent(**{"key": "model", "stateful": Box({}), "sharing_pattern": "global", **arguments})


def test_keys_are_unique_and_groups_known() -> None:
    one = StateComponent("model", Box({}), SharingPattern.GLOBAL)
    with pytest.raises(UsageError, match="several have the key 'model'"):
        CheckpointCoordinator([one, one])
    unwrapped: Any = Box({})
    with pytest.raises(UsageError, match=r"state_components=.*'Box' is not a component; write StateComponent\("):
        CheckpointCoordinator([unwrapped])
    grouped = StateComponent("m", Box({}), SharingPattern.PER_GROUP, "tp")
    with pytest.raises(UsageError, match="process_group_name='tp': .* process_groups: \\['dp'\\]"):
        CheckpointCoordinator([grouped], {"dp": [[0]]})


def of_box(folder: object, box: Box, **options: Any) -> CheckpointCoordinator:
    return CheckpointCoordinator(
        [StateComponent("model", box, SharingPattern.GLOBAL)], output_dir=str(folder), **options
    )


@pytest.fixture(params=["folder", "memory", "file"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return folders and URLs."""
    if request.param == "folder":
        return str(tmp_path / "run")
    return f"memory://{uuid.uuid4().hex}/run" if request.param == "memory" else f"file://{tmp_path}/run"


def test_a_checkpoint_is_named_replaced_and_found_in_any_place(place: str) -> None:
    box = Box(shard(1))
    coordinator = of_box(place, box, metadata={"epoch": 1.5, "name": "first"})
    assert coordinator.save_checkpoint().endswith("/run/checkpoint-0")
    assert coordinator.save_checkpoint(checkpoint_id="100").endswith("/run/checkpoint-100")
    box.state = shard(2)
    assert coordinator.save_checkpoint(checkpoint_id=100).endswith("/run/checkpoint-100")
    assert coordinator.save_checkpoint().endswith("/run/checkpoint-101")
    assert coordinator.save_checkpoint(checkpoint_id=50).endswith("/run/checkpoint-50")
    box.state = None
    report = coordinator.load_checkpoint()
    assert same(box.state, shard(2))
    assert (report.step, report.manifest.epoch, report.manifest.metadata) == (50, 1.5, {"name": "first"})
    assert [each.checkpoint_id for each in checkpoints_in(place)] == ["0", "100", "101", "50"], "as they were written"


def test_a_given_path_is_used_unchanged(tmp_path: Path) -> None:
    box = Box(shard(1))
    path = of_box(tmp_path, box).save_checkpoint(tmp_path / "elsewhere" / "mine")
    assert path == str(tmp_path / "elsewhere" / "mine")
    assert CheckpointCoordinator([StateComponent("model", box, SharingPattern.GLOBAL)]).load_checkpoint(path).loaded


def test_the_second_place_is_read_too(tmp_path: Path) -> None:
    box = Box(shard(1))
    of_box(tmp_path / "checkpoints", box).save_checkpoint(checkpoint_id=7)
    assert latest_checkpoint(tmp_path) == str(tmp_path / "checkpoints" / "checkpoint-7")
    assert of_box(tmp_path, box).load_checkpoint().step == 7


def test_without_a_checkpoint_nothing_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match="no complete checkpoint is there"):
        of_box(tmp_path, Box({})).load_checkpoint()
    with pytest.raises(CheckpointNotFound, match="no checkpoint is there"):
        of_box(tmp_path, Box({})).load_checkpoint(tmp_path)


def test_leftovers_of_interrupted_saves_are_swept_and_files_of_others_are_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    of_box(tmp_path, Box(shard(1))).save_checkpoint(checkpoint_id=1)
    token = new_token()
    random, host, pid, began = token.split(".")
    gone = tmp_path / f".tmp-checkpoint-2-{random}.{host}.{int(pid) + 100_000_000}.{began}"
    mine = tmp_path / f".tmp-checkpoint-3-{token}"
    elsewhere = tmp_path / f".tmp-checkpoint-4-{random}.00000000.1.1"
    for each in (gone, mine, elsewhere):
        each.mkdir()
    os.rename(tmp_path / "checkpoint-1", tmp_path / ".old-checkpoint-1-abc")
    with caplog.at_level(logging.INFO):
        of_box(tmp_path, Box(shard(2))).save_checkpoint(checkpoint_id=9)
    assert sorted(os.listdir(tmp_path)) == sorted([mine.name, elsewhere.name, "checkpoint-1", "checkpoint-9"])
    assert gone.name in caplog.text


class Custom:
    """A class that torch does not load by default."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Custom)

    __hash__ = None  # type: ignore[assignment]


def test_objects_of_any_class_are_loaded_only_if_trusted(tmp_path: Path) -> None:
    path = of_box(tmp_path, Box({"thing": Custom()}), allow_pickle=True).save_checkpoint()
    with pytest.raises(UsageError, match="allow_pickle=True"):
        of_box(tmp_path, Box(None)).load_checkpoint(path)
    box = Box(None)
    of_box(tmp_path, box, allow_pickle=True).load_checkpoint(path)
    assert box.state == {"thing": Custom()}


def test_a_manifest_that_is_no_json_or_of_the_future_is_refused(tmp_path: Path) -> None:
    path = Path(of_box(tmp_path, Box({})).save_checkpoint())
    manifest = path / "checkpoint_manifest.json"
    text = manifest.read_text()
    manifest.write_text(text.replace('"format_version": 2', '"format_version": 3'))
    with pytest.raises(CheckpointCorrupt, match="reads up to 2; install a newer version"):
        of_box(tmp_path, Box({})).load_checkpoint(path)
    manifest.write_text(text[:-20])
    with pytest.raises(CheckpointCorrupt, match="cannot be read"):
        of_box(tmp_path, Box({})).load_checkpoint(path)


def test_tied_weights_in_safetensors_come_back_and_others_read_them(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    weight = torch.randn(4, 3)
    state = {"embed.weight": weight, "head.weight": weight, "norm": torch.ones(3).bfloat16(), "empty": torch.zeros(0)}
    box = Box(state)

    def coordinator() -> CheckpointCoordinator:
        metadata = {"format": "safetensors"}
        return CheckpointCoordinator(
            [StateComponent("model", box, SharingPattern.REPLICATED, metadata=metadata)], output_dir=tmp_path
        )

    path = Path(coordinator().save_checkpoint())
    assert set(load_file(path / "model.safetensors")) == {"embed.weight", "norm", "empty"}
    box.state = None
    coordinator().load_checkpoint()
    assert same(box.state, state)
    assert box.state["embed.weight"].data_ptr() == box.state["head.weight"].data_ptr()


def test_generators_continue_where_they_were(tmp_path: Path) -> None:
    import random

    import numpy as np

    def draw() -> tuple[Any, ...]:
        return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(2).tolist()

    coordinator = CheckpointCoordinator(
        [StateComponent("rng", RNGState(), SharingPattern.PER_RANK)], output_dir=tmp_path
    )
    draw()
    coordinator.save_checkpoint()
    expected = [draw() for _ in range(3)]
    coordinator.load_checkpoint()
    assert [draw() for _ in range(3)] == expected


def test_a_provider_declares_its_components_or_is_one() -> None:
    class Provider(Box):
        def get_state_components(self) -> list[StateComponent]:
            return [StateComponent("model", self, SharingPattern.GLOBAL)]

    assert [each.key for each in components_of(Provider({}))] == ["model"]
    assert [(each.key, each.sharing_pattern) for each in components_of(Box({}))] == [("state", SharingPattern.GLOBAL)]


def test_errors_are_picklable() -> None:
    error = CheckpointCorrupt("x: bad", path="x")
    assert pickle.loads(pickle.dumps(error)).path == "x"
