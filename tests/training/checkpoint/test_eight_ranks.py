"""Hybrid parallelism on 8 real ranks: data x pipeline as 2 x 4, data x tensor as 4 x 2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

from skyward.training import Alone
from skyward.training.checkpoint import CheckpointCoordinator, RNGState
from tests.training.checkpoint.crew import Said, error_of, run_cases
from tests.training.checkpoint.meshes import components, made, trained
from tests.training.checkpoint.states import Box, part, same, shard

WORLD = 8
STAGES = [[0, 4], [1, 5], [2, 6], [3, 7]]
"""2 x 4: ranks that hold the same pipeline stage."""
COPIES = [[0, 1, 2, 3], [4, 5, 6, 7]]
"""2 x 4: the ranks of one copy of the model, which see the same data."""
IMPORTS = ["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"]
PARTS = [[0, 2, 4, 6], [1, 3, 5, 7]]
"""4 x 2: ranks that hold the same tensor-parallel part."""


def index_in(groups: list[list[int]], rank: int) -> int:
    return next(at for at, group in enumerate(groups) if rank in group)


def data_and_pipeline(ranks: Any, folder: Path) -> Any:
    import torch.distributed as dist

    stage, copy = index_in(STAGES, ranks.rank), index_in(COPIES, ranks.rank)
    # Process groups of torch, as a trainer has them.
    replicas = [dist.new_group(each) for each in STAGES][stage]
    readers = [dist.new_group(each) for each in COPIES][copy]
    boxes = {"model": Box(shard(stage)), "optimizer": Box(shard(100 + stage)), "dataset": Box({"position": 7 + copy})}

    def coordinator(boxes: dict[str, Box]) -> CheckpointCoordinator:
        return CheckpointCoordinator(
            [
                part("model", boxes["model"], "per_group", "replicas"),
                part("optimizer", boxes["optimizer"], "per_group", "replicas"),
                part("dataset", boxes["dataset"], "per_group", "readers"),
                part("rng", RNGState(), "per_rank"),
            ],
            {"replicas": replicas, "readers": readers},
            ranks,
            folder,
        )

    torch.manual_seed(ranks.rank)
    path = coordinator(boxes).save_checkpoint(checkpoint_id=10)
    drawn = torch.rand(3)
    torch.manual_seed(99)
    fresh = {key: Box(None) for key in boxes}
    report = coordinator(fresh).load_checkpoint()
    return {
        "path": path,
        "same": all(same(fresh[key].state, boxes[key].state) for key in boxes),
        "rng": torch.equal(torch.rand(3), drawn),
        "loaded": report.loaded,
        "step": report.step,
    }


def data_and_tensor(ranks: Any, folder: Path) -> Any:
    at = index_in(PARTS, ranks.rank)
    box = Box(shard(at))
    groups = {"dp": PARTS}
    CheckpointCoordinator([part("model", box, "per_group", "dp")], groups, ranks, folder).save_checkpoint()
    fresh = Box(None)
    CheckpointCoordinator([part("model", fresh, "per_group", "dp")], groups, ranks, folder).load_checkpoint()
    return same(fresh.state, shard(at))


def a_model_over_its_shards(ranks: Any, folder: Path) -> Any:
    """Declare a group over {0-3} whose members hold different stages, as the reference's own examples do."""
    model = part("model", Box(shard(index_in(STAGES, ranks.rank))), "per_group", "pp")
    coordinator = CheckpointCoordinator([model], {"pp": COPIES}, ranks, folder)
    said = error_of(lambda: coordinator.save_checkpoint(checkpoint_id=1))
    ranks.exchange(None)
    return said, sorted(each.name for each in folder.glob("*"))


def groups_that_contradict(ranks: Any, folder: Path) -> Any:
    groups = {"dp": [0, 1, 2] if ranks.rank == 0 else STAGES}
    component = part("model", Box(shard(0)), "per_group", "dp")
    return error_of(lambda: CheckpointCoordinator([component], groups, ranks, folder).save_checkpoint())


def one_flipped_element(ranks: Any, folder: Path) -> Any:
    """Flip one element of a nested optimizer state on rank 6, far from the tensor's begin."""
    state = shard(0, size=5000)
    if ranks.rank == 6:
        state["state"][0]["exp_avg"][4321] += 1e-6
    component = part("optimizer", Box(state), "replicated", validate_replication=True)
    return error_of(lambda: CheckpointCoordinator([component], None, ranks, folder).save_checkpoint())


def meshes_of_tensors(ranks: Any, folder: Path) -> Any:
    """Save DTensors over 4 x 2, with replicas and with FSDP2. Load them there and over 2 x 4."""
    said = {}
    for name, fsdp in (("replicas", False), ("fsdp", True)):
        model, optimizer = made(1, dp=4, tp=2, fsdp=fsdp)
        before = trained(model, optimizer, 3)
        saves = CheckpointCoordinator(components(model, optimizer, Box({"step": 3})), None, ranks, folder / name)
        saves.save_checkpoint_async(checkpoint_id=3)
        after = trained(model, optimizer, 2)
        saves.close()
        again = []
        for dp, tp in ((4, 2), (2, 4)):
            model, optimizer = made(2, dp=dp, tp=tp, fsdp=fsdp)
            loads = CheckpointCoordinator(components(model, optimizer, Box(None)), None, ranks, folder / name)
            loads.load_checkpoint()
            again.append(trained(model, optimizer, 2))
        said[name] = before, after, again
    return said


CASES = [
    data_and_pipeline,
    data_and_tensor,
    a_model_over_its_shards,
    groups_that_contradict,
    one_flipped_element,
    meshes_of_tensors,
]


# Files of eight ranks on four ranks -----------------------------------------------------------------------------------


def meshes_of_four(ranks: Any, folder: Path) -> Any:
    said = {}
    for name, fsdp in (("replicas", False), ("fsdp", True)):
        model, optimizer = made(2, dp=2, tp=2, fsdp=fsdp)
        parts = components(model, optimizer, Box(None))
        CheckpointCoordinator(parts, None, ranks, folder.parent / "meshes_of_tensors" / name).load_checkpoint()
        said[name] = trained(model, optimizer, 2)
    return said


def stages_of_four(ranks: Any, folder: Path) -> Any:
    """Load four stages on four ranks, where their number fits, and on two ranks with two stages, where it does not."""
    written = folder.parent / "data_and_pipeline"

    def load(groups: list[list[int]], **options: Any) -> Any:
        box = Box(None)
        model = part("model", box, "per_group", "replicas")
        CheckpointCoordinator([model], {"replicas": groups}, ranks, written).load_checkpoint(**options)
        return box.state

    def two_of_four(states: Any, rank: int, world: int) -> Any:
        stage = rank % 2
        return {"first": states[2 * stage], "second": states[2 * stage + 1]}

    own = load([[0], [1], [2], [3]])
    refused = error_of(lambda: load([[0, 2], [1, 3]]))
    pair = load([[0, 2], [1, 3]], resharders={"model": two_of_four})
    stage = ranks.rank % 2
    return (
        same(own, shard(ranks.rank)),
        refused,
        same(pair["first"], shard(2 * stage)) and same(pair["second"], shard(2 * stage + 1)),
    )


def a_whole_model_over_a_mesh(ranks: Any, folder: Path) -> Any:
    """Load a state that one process wrote without DTensors."""
    if ranks.rank == 0:
        model, optimizer = made(1)
        trained(model, optimizer, 3)
        CheckpointCoordinator(
            components(model, optimizer, Box({})), None, Alone(), folder
        ).save_checkpoint(checkpoint_id=3)  # fmt: skip
    ranks.exchange(None)
    model, optimizer = made(2, dp=2, tp=2)
    parts = components(model, optimizer, Box(None))
    return error_of(lambda: CheckpointCoordinator(parts, None, ranks, folder).load_checkpoint())


ON_FOUR = [meshes_of_four, stages_of_four, a_whole_model_over_a_mesh]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("eight")


@pytest.fixture(scope="module")
def said(folder: Path) -> Said:
    return run_cases(CASES, world=WORLD, folder=folder, imports=IMPORTS)


@pytest.fixture(scope="module")
def said_by_four(said: Said, folder: Path) -> Said:
    (folder / "meeting").unlink(missing_ok=True)
    return run_cases(ON_FOUR, world=4, folder=folder, imports=IMPORTS)


def test_data_and_pipeline_parallel_states_come_back_to_their_ranks(said: Said, folder: Path) -> None:
    path = str(folder / "data_and_pipeline" / "checkpoint-10")
    loaded = ("model", "optimizer", "dataset", "rng")
    assert said["data_and_pipeline"] == [{"path": path, "same": True, "rng": True, "loaded": loaded, "step": 10}] * 8


def test_each_state_is_written_once(said: Said, folder: Path) -> None:
    checkpoint = folder / "data_and_pipeline" / "checkpoint-10"
    names = {each.name for each in checkpoint.iterdir()}
    assert names == {
        "checkpoint_manifest.json",
        *(f"{key}_state_group_replicas_grank_0_rank_{rank}.pt" for key in ("model", "optimizer") for rank in range(4)),
        *(f"dataset_state_group_readers_grank_0_rank_{rank}.pt" for rank in (0, 4)),
        *(f"rng_state_rank_{rank}.pt" for rank in range(8)),
    }
    manifest = json.loads((checkpoint / "checkpoint_manifest.json").read_text())
    assert manifest["world_size"] == 8
    assert manifest["components"]["model"]["ranks"] == [0, 1, 2, 3]
    assert manifest["components"]["model"]["sharing_pattern"] == "per_group"
    assert manifest["topology"]["groups"]["replicas"] == STAGES
    assert all(each["bytes"] == (checkpoint / each["path"]).stat().st_size for each in manifest["files"])


def test_data_and_tensor_parallel_states_come_back(said: Said) -> None:
    assert said["data_and_tensor"] == [True] * 8


def test_a_group_whose_members_differ_is_refused_on_all_ranks_with_the_reason(said: Said) -> None:
    texts = {text for text, _ in said["a_model_over_its_shards"]}
    assert len(texts) == 1
    (text,) = texts
    assert text.startswith("ReplicationMismatch: model: sharing_pattern=PER_GROUP over 'pp'")
    assert "[0, 1, 2, 3]" in text
    assert "ranks 1, 2, 3 differ from rank 0 in 'layer.weight'" in text
    assert "name the group of those that hold the same shard" in text
    assert all(names == [] for _, names in said["a_model_over_its_shards"])


def test_contradictory_groups_are_refused(said: Said) -> None:
    texts = set(said["groups_that_contradict"])
    assert len(texts) == 1
    assert "UsageError: process_groups['dp']=[0, 1, 2]: rank 0 reports this" in texts.pop()


def test_one_flipped_element_of_a_nested_state_is_found_on_all_ranks(said: Said) -> None:
    texts = set(said["one_flipped_element"])
    assert len(texts) == 1
    assert "rank 6 differs from rank 0 in 'state.0.exp_avg'" in texts.pop()


def test_tensor_parallel_models_resume_to_the_bit_and_over_another_mesh(said: Said) -> None:
    """With replicas and with FSDP2, they are saved behind training.

    From 4 x 2 to 2 x 4 they agree to float tolerance.
    """
    for ways in said["meshes_of_tensors"]:
        for _, after, (same_mesh, other_mesh) in ways.values():
            assert same_mesh == after
            assert other_mesh == pytest.approx(after, rel=1e-5)


def test_tensor_parallel_models_resume_on_half_the_ranks_and_on_one(
    said: Said, said_by_four: Said, folder: Path
) -> None:
    for name in ("replicas", "fsdp"):
        _, after, _ = said["meshes_of_tensors"][0][name]
        for ways in said_by_four["meshes_of_four"]:
            assert ways[name] == pytest.approx(after, rel=1e-5)
        model, optimizer = made(2)
        box = Box(None)
        CheckpointCoordinator(
            components(model, optimizer, box), output_dir=folder / "meshes_of_tensors" / name
        ).load_checkpoint()
        assert trained(model, optimizer, 2) == pytest.approx(after, rel=1e-5)
        assert box.state == {"step": 3}


def test_each_part_of_a_tensor_is_written_once(said: Said, folder: Path) -> None:
    """Replicas over 4 write one copy: less than twice the model."""
    whole = sum(each.numel() * each.element_size() for each in made(1)[0].parameters())
    for name in ("replicas", "fsdp"):
        checkpoint = folder / "meshes_of_tensors" / name / "checkpoint-3"
        manifest = json.loads((checkpoint / "checkpoint_manifest.json").read_text())
        assert manifest["world_size"] == 8
        saved = FileSystemReader(checkpoint / "model.dcp").read_metadata()
        sizes = [info.length for info in saved.storage_data.values()]
        assert whole <= sum(sizes), name
        assert len({(index.fqn, tuple(index.offset or ())) for index in saved.storage_data}) == len(sizes)


def test_stages_go_to_as_many_groups_and_are_refused_by_fewer_unless_resharded(said_by_four: Said) -> None:
    for is_own, refused, is_pair in said_by_four["stages_of_four"]:
        assert is_own
        assert "model does not fit: it was written as 4 states of 8 ranks, and this run has 2" in refused
        assert "load it on as many ranks, pass resharders={...}, or leave it out with skip=[...]" in refused
        assert is_pair


def test_a_whole_model_of_one_rank_is_not_spread_over_a_mesh(said_by_four: Said) -> None:
    (text,) = set(said_by_four["a_whole_model_over_a_mesh"])
    assert text.startswith("CheckpointMismatch: ")
    assert "model does not fit: it was written as 1 state of 1 rank, and this run has 4" in text
