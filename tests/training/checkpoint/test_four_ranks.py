"""Four real ranks, as two nodes of two: patterns, nodes, refusals, comparisons, and failures."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from skyward.training.checkpoint import CheckpointCoordinator, RNGState, StateComponent
from tests.training.checkpoint.crew import Said, error_of, run_cases
from tests.training.checkpoint.states import Box, Refuses, Unwritable, part, same, shard

WORLD = 4
ASSETS = Path(__file__).parent / "assets"


def coordinator(ranks: Any, folder: Path, *components: StateComponent, **options: Any) -> CheckpointCoordinator:
    return CheckpointCoordinator(components, options.pop("groups", None), ranks, folder, **options)


def every_pattern(ranks: Any, folder: Path) -> Any:
    node = ranks.rank // 2
    states = {
        "global": {"epoch": 3},
        "replicated": shard(0),
        "per_rank": shard(ranks.rank),
        "per_group": shard(10 + ranks.rank % 2),
        "per_node": {"cache": torch.full((4,), node)},
    }

    def components(boxes: dict[str, Box]) -> list[StateComponent]:
        return [
            part(key, box, key, "dp" if key == "per_group" else None, validate_replication=key == "replicated")
            for key, box in boxes.items()
        ]

    groups = {"dp": [[0, 2], [1, 3]]}
    first = {key: Box(state) for key, state in states.items()}
    path = coordinator(ranks, folder, *components(first), groups=groups).save_checkpoint(
        checkpoint_id="a", validate=True
    )
    fresh = {key: Box(None) for key in states}
    coordinator(ranks, folder, *components(fresh), groups=groups).load_checkpoint(path)
    return [key for key in states if not same(fresh[key].state, states[key])], sorted(os.listdir(path))


def a_rank_that_raises(ranks: Any, folder: Path) -> Any:
    good = part("model", Box(shard(1)), "per_rank")
    kept = coordinator(ranks, folder, good).save_checkpoint(checkpoint_id=1)
    box = Refuses(None) if ranks.rank == 2 else Box(shard(2))
    bad = coordinator(ranks, folder, good, part("extra", box, "per_rank"))
    texts = [error_of(lambda: bad.save_checkpoint(checkpoint_id=2))]
    texts.append(error_of(lambda: bad.save_checkpoint(checkpoint_id=1)))
    ranks.exchange(None)
    return texts, sorted(os.listdir(folder)), error_of(lambda: coordinator(ranks, folder, good).load_checkpoint(kept))


def a_rank_that_cannot_write(ranks: Any, folder: Path) -> Any:
    """Save with one rank that cannot write. The replaced checkpoint must stay unchanged, too."""
    good = part("model", Box(shard(1)), "per_rank")
    coordinator(ranks, folder, good).save_checkpoint(checkpoint_id=1)
    before = (folder / "checkpoint-1" / "checkpoint_manifest.json").read_bytes()
    box = Unwritable(None) if ranks.rank == 3 else Box(shard(2))
    text = error_of(lambda: coordinator(ranks, folder, part("model", box, "per_rank")).save_checkpoint(None, 1))
    ranks.exchange(None)
    return text, os.listdir(folder), (folder / "checkpoint-1" / "checkpoint_manifest.json").read_bytes() == before


def replicas_that_differ(ranks: Any, folder: Path) -> Any:
    """Change one element of a nested float, of a bfloat16 and of an integer tensor, by level."""
    said = {}
    for level in ("none", "quick", "tensor", "full"):
        for path, change in (("layer.half", 0.5), ("state.0.exp_avg", 1e-7), ("state.0.step", 1), ("param_groups", 0)):
            state = shard(0, size=40_000)
            if ranks.rank in (1, 3):
                if path == "param_groups":
                    state["param_groups"][0]["lr"] = 0.2
                elif path == "state.0.step":
                    state["state"][0]["step"] += change
                else:
                    (state[path] if path in state else state["state"][0]["exp_avg"])[20_001] += change
            component = part("model", Box(state), "replicated", validate_replication=True, validation_level=level)
            text = error_of(lambda: coordinator(ranks, folder, component).save_checkpoint(checkpoint_id=5))  # noqa: B023
            said[level, path] = text
    return said


def equal_replicas_of_any_kind(ranks: Any, folder: Path) -> Any:
    """Compare NaN, empty, 0-dim, bool, complex, 8-bit float, views, another order of keys: all equal themselves."""
    state = {
        "nan": torch.tensor([float("nan"), 1.0]),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
        "bool": torch.tensor([True, False]),
        "complex": torch.tensor([1 + 2j]).conj(),
        "eight": torch.ones(5).to(torch.float8_e4m3fn),
        "view": torch.arange(12.0).reshape(3, 4).T,
        "none": None,
    }
    if ranks.rank == 1:
        state = dict(reversed(state.items()))
    said = []
    for level in ("quick", "tensor", "full"):
        component = part("m", Box(state), "replicated", validate_replication=True, validation_level=level)
        said.append(error_of(lambda: coordinator(ranks, folder, component).save_checkpoint(checkpoint_id=1)))  # noqa: B023
    return said


def what_is_missing(ranks: Any, folder: Path) -> Any:
    model = part("model", Box(shard(1)), "replicated")
    coordinator(ranks, folder, model).save_checkpoint(checkpoint_id=1)
    more = coordinator(ranks, folder, model, part("optimizer", Box(None), "replicated"))
    report = more.load_checkpoint(strict=False)
    return error_of(more.load_checkpoint), report.loaded, report.skipped


def what_is_corrupt(ranks: Any, folder: Path) -> Any:
    """Damage a checkpoint: a flipped byte, a short file, a missing one.

    All ranks raise, whatever `strict`, and load nothing.
    """
    texts = []
    for at, damage in enumerate(("flip", "cut", "gone")):
        component = part("model", Box(shard(ranks.rank)), "per_rank", required=False)
        path = Path(coordinator(ranks, folder, component).save_checkpoint(checkpoint_id=at))
        file = path / "model_state_rank_2.pt"
        if ranks.rank == 0:
            whole = bytearray(file.read_bytes())
            whole[len(whole) // 2] ^= 1
            file.write_bytes(whole if damage == "flip" else whole[:-1])
            if damage == "gone":
                file.unlink()
        ranks.exchange(None)
        fresh = Box("untouched")
        load = coordinator(ranks, folder, part("model", fresh, "per_rank", required=False))
        texts.append(error_of(lambda: load.load_checkpoint(path, strict=False)))  # noqa: B023
        assert fresh.state == "untouched"
    return texts


def only_a_part(ranks: Any, folder: Path) -> Any:
    boxes = {key: Box(shard(at)) for at, key in enumerate(("model", "optimizer", "rng"))}
    coordinator(ranks, folder, *(part(key, box, "replicated") for key, box in boxes.items())).save_checkpoint()
    said = []
    several: list[dict[str, Any]] = [{"only": ["model"]}, {"skip": ["rng", "model"]}, {"only": ["modell"]}]
    for options in several:
        fresh = {key: Box(None) for key in boxes}
        load = coordinator(ranks, folder, *(part(key, box, "replicated") for key, box in fresh.items()))
        text = error_of(lambda: load.load_checkpoint(**options))  # noqa: B023
        said.append((text, [key for key, box in fresh.items() if box.state is not None]))
    return said


def declared_otherwise_by_a_rank(ranks: Any, folder: Path) -> Any:
    pattern = "global" if ranks.rank == 1 else "replicated"
    return error_of(lambda: coordinator(ranks, folder, part("m", Box({}), pattern)).save_checkpoint())


def uneven_nodes(ranks: Any, folder: Path) -> Any:
    """Run three ranks on one node, one on the other."""
    before = os.environ["LOCAL_RANK"]
    os.environ["LOCAL_RANK"] = str(ranks.rank % 3)
    try:
        node = 0 if ranks.rank < 3 else 1
        fresh = Box(None)
        path = coordinator(ranks, folder, part("c", Box({"node": node}), "per_node")).save_checkpoint()
        coordinator(ranks, folder, part("c", fresh, "per_node")).load_checkpoint()
        return fresh.state["node"] == node, json.loads(Path(path, "checkpoint_manifest.json").read_text())["topology"]
    finally:
        os.environ["LOCAL_RANK"] = before


def disks_of_nodes(ranks: Any, folder: Path) -> Any:
    """Give each node its own disk, with all that it needs. One node committed more than the other."""
    disk = folder / f"node{ranks.rank // 2}"
    boxes = {"model": Box(shard(0)), "own": Box(shard(ranks.rank)), "node": Box(shard(50 + ranks.rank // 2))}

    def components(boxes: dict[str, Box]) -> list[StateComponent]:
        patterns = {"model": "replicated", "own": "per_rank", "node": "per_node"}
        return [part(key, box, patterns[key]) for key, box in boxes.items()]

    for step in (1, 2):
        coordinator(ranks, disk, *components(boxes), on_each_node=True).save_checkpoint(checkpoint_id=step)
    if ranks.rank == 3:
        os.rename(disk / "checkpoint-2", disk / ".tmp-checkpoint-2-killed")
    ranks.exchange(None)
    fresh = {key: Box(None) for key in boxes}
    report = coordinator(ranks, disk, *components(fresh), on_each_node=True).load_checkpoint()
    return report.step, all(same(fresh[key].state, boxes[key].state) for key in boxes), sorted(os.listdir(report.path))


def saved_by_four(ranks: Any, folder: Path) -> Any:
    """Save a checkpoint for a world of another size, in the test below."""
    components = [
        part("model", Box(shard(0)), "replicated"),
        part("shards", Box({"part": torch.full((2,), float(ranks.rank))}), "per_rank"),
        part("rng", RNGState(), "per_rank", required=False),
        part("stage", Box(shard(ranks.rank % 2)), "per_group", "dp"),
    ]
    return coordinator(ranks, folder, *components, groups={"dp": [[0, 2], [1, 3]]}).save_checkpoint(checkpoint_id=4)


def a_checkpoint_of_version_1(ranks: Any, folder: Path) -> Any:
    """Load a checkpoint of version 1: each rank gets the state of its own group, node and rank."""
    boxes = {key: Box(None) for key in ("model", "trainer", "scheduler", "rng", "cache")}
    patterns = dict(zip(boxes, ("per_group", "global", "replicated", "per_rank", "per_node"), strict=True))
    components = [part(key, box, patterns[key], "dp" if key == "model" else None) for key, box in boxes.items()]
    old = coordinator(ranks, ASSETS / "v1", *components, groups={"dp": [[0, 2], [1, 3]]})
    report = old.load_checkpoint()
    generator = torch.Generator().manual_seed(ranks.rank % 2)
    is_mine = torch.equal(boxes["model"].state["weight"], torch.randn(3, 2, generator=generator))
    rest = {key: box.state for key, box in boxes.items() if key != "model"}
    return report.manifest.format_version, is_mine, rest


CASES = [
    a_checkpoint_of_version_1,
    every_pattern,
    a_rank_that_raises,
    a_rank_that_cannot_write,
    replicas_that_differ,
    equal_replicas_of_any_kind,
    what_is_missing,
    what_is_corrupt,
    only_a_part,
    declared_otherwise_by_a_rank,
    uneven_nodes,
    disks_of_nodes,
    saved_by_four,
]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Said:
    def two_nodes_of_two(rank: int) -> dict[str, str]:
        return {"LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2"}

    return run_cases(CASES, world=WORLD, folder=tmp_path_factory.mktemp("four"), environment=two_nodes_of_two)


def of_all(said: Said, case: str) -> Any:
    """Return the common report of all ranks."""
    answers = said[case]
    assert all(answer == answers[0] for answer in answers), answers
    return answers[0]


def test_every_pattern_comes_back_to_its_ranks_and_is_written_by_the_documented_ones(said: Said) -> None:
    wrong, files = of_all(said, "every_pattern")
    assert wrong == []
    assert files == sorted(
        [
            "checkpoint_manifest.json",
            "global_state.pt",
            "replicated_state.pt",
            *(f"per_rank_state_rank_{rank}.pt" for rank in range(4)),
            "per_group_state_group_dp_grank_0_rank_0.pt",
            "per_group_state_group_dp_grank_0_rank_1.pt",
            "per_node_state_node_0_rank_0.pt",
            "per_node_state_node_1_rank_2.pt",
        ]
    )


def test_a_rank_that_raises_fails_the_save_on_all_and_leaves_nothing(said: Said) -> None:
    texts, names, loads = of_all(said, "a_rank_that_raises")
    assert texts == [
        f"CheckpointSaveFailed: saving checkpoint-{at}: failed on rank 2: ValueError: no state today; "
        "read its own error there"
        for at in (2, 1)
    ]
    assert names == ["checkpoint-1"]
    assert loads == "nothing"


def test_a_rank_that_cannot_write_leaves_the_old_checkpoint(said: Said) -> None:
    text, names, is_as_before = of_all(said, "a_rank_that_cannot_write")
    assert text.startswith("CheckpointSaveFailed: saving checkpoint-1: failed on rank 3: OSError")
    assert names == ["checkpoint-1"]
    assert is_as_before


def test_replicas_that_differ_are_found_on_all_ranks_by_name(said: Said) -> None:
    found = of_all(said, "replicas_that_differ")
    assert {text for (level, _), text in found.items() if level == "none"} == {"nothing"}
    for path in ("layer.half", "state.0.exp_avg", "state.0.step", "param_groups.0.lr"):
        key = path.split(".")[0] if path.startswith("param") else path
        assert f"ranks 1, 3 differ from rank 0 in '{path}'" in found["tensor", key]
    assert found["full", "state.0.exp_avg"] == "nothing", "within the tolerance"
    assert "'layer.half'" in found["full", "layer.half"]
    assert "'state.0.step'" in found["full", "state.0.step"]
    assert "'state.0.step'" in found["quick", "state.0.step"]
    assert found["quick", "layer.half"] == "nothing", "between the samples, as its documentation says"


def test_replicas_of_any_kind_equal_themselves(said: Said) -> None:
    assert of_all(said, "equal_replicas_of_any_kind") == ["nothing"] * 3


def test_a_missing_component_is_an_error_or_with_strict_false_a_warning(said: Said) -> None:
    text, loaded, skipped = of_all(said, "what_is_missing")
    assert text.startswith("CheckpointNotFound")
    assert "optimizer is required" in text
    assert loaded == ("model",)
    assert skipped == {"optimizer": "the checkpoint does not contain it"}


def test_corruption_always_raises_on_all_ranks_and_changes_nothing(said: Said) -> None:
    flip, cut, gone = of_all(said, "what_is_corrupt")
    assert {text.split(":")[0] for text in (flip, cut, gone)} == {"CheckpointCorrupt"}
    assert "model_state_rank_2.pt: its digest is" in flip
    assert "bytes, but" in cut
    assert "it is missing" in gone


def test_a_part_can_be_loaded(said: Said) -> None:
    only, skip, unknown = of_all(said, "only_a_part")
    assert only == ("nothing", ["model"])
    assert skip == ("nothing", ["optimizer"])
    assert "key='modell': not a component of this run" in unknown[0]


def test_ranks_that_declare_different_components_are_refused(said: Said) -> None:
    assert "rank 1 declares m global, but rank 0 declares m replicated" in of_all(said, "declared_otherwise_by_a_rank")


def test_nodes_may_have_different_numbers_of_ranks(said: Said) -> None:
    is_right, topology = of_all(said, "uneven_nodes")
    assert is_right
    assert topology["nodes"] == [[0, 1, 2], [3]]


def test_with_a_disk_for_each_node_the_newest_common_checkpoint_is_loaded(said: Said) -> None:
    answers = said["disks_of_nodes"]
    assert [(step, is_same) for step, is_same, _ in answers] == [(1, True)] * 4
    assert answers[3][2] == sorted(
        [
            "checkpoint_manifest.json",
            "model_state.pt",
            "node_state_node_1_rank_2.pt",
            "own_state_rank_2.pt",
            "own_state_rank_3.pt",
        ]
    )


def test_another_world_loads_what_it_can_and_refuses_the_rest(said: Said) -> None:
    path = of_all(said, "saved_by_four")
    boxes = {"model": Box(None), "shards": Box(None)}
    model = part("model", boxes["model"], "replicated")
    CheckpointCoordinator([model]).load_checkpoint(path)
    assert same(boxes["model"].state, shard(0))

    shards = part("shards", boxes["shards"], "per_rank")
    text = error_of(lambda: CheckpointCoordinator([model, shards]).load_checkpoint(path, strict=False))
    assert "CheckpointMismatch" in text
    assert "shards does not fit: it was written as 4 states of 4 ranks, and this run has 1" in text

    CheckpointCoordinator([model, shards]).load_checkpoint(
        path, resharders={"shards": lambda states, rank, world: {"part": torch.cat([each["part"] for each in states])}}
    )
    assert boxes["shards"].state["part"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]

    rng = part("rng", RNGState(), "per_rank", required=False)
    report = CheckpointCoordinator([model, rng]).load_checkpoint(path, strict=False)
    assert list(report.skipped) == ["rng"]


def test_a_checkpoint_of_version_1_is_read_by_each_rank_as_its_own(said: Said) -> None:
    assert said["a_checkpoint_of_version_1"] == [
        (
            1,
            True,
            {"trainer": {"step": 7}, "scheduler": {"lr": 0.5}, "rng": {"seed": rank}, "cache": {"node": rank // 2}},
        )
        for rank in range(4)
    ]
