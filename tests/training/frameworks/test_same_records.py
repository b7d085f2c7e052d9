"""The same callbacks write the same records under the Trainers of skyward, Hugging Face, Lightning and Keras."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.training.keras_process import found_by

from . import same_records

pytestmark = [
    pytest.mark.filterwarnings("ignore:`isinstance.treespec:FutureWarning"),  # Lightning calls deprecated functions
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
]

Found = dict[str, dict[str, Any]]


def in_this_process(train: Callable[[Path, float], None], folder: Path) -> Found:
    found = {}
    for name, rate in (("tame", 0.1), ("wild", 20.0)):
        at = folder / name
        train(at, rate)
        found[name] = {"records": same_records.records(at), "files": sorted(each.name for each in at.iterdir())}
    return found


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return in_this_process(same_records.with_our_trainer, tmp_path_factory.mktemp("ours"))


PRODUCERS: dict[str, Callable[[Path], Found]] = {
    "hf": lambda folder: in_this_process(same_records.with_hf, folder),
    "lightning": lambda folder: in_this_process(same_records.with_lightning, folder),
    "keras": lambda folder: found_by(same_records.__file__, "torch")[0],
}
KEPT = ("global_step", "epoch", "loss", "learning_rate", "weight_norm", "eval_loss", "train_loss")


def kept(found: Found, name: str) -> list[dict[str, Any]]:
    """Return the record's contents about the training."""
    return [{key: each[key] for key in KEPT if key in each} for each in found[name]["records"]]


def test_our_own_records_are_correct(ours: Found) -> None:
    tame = kept(ours, "tame")
    assert [(each["global_step"], *(set(each) & {"loss", "eval_loss", "train_loss"})) for each in tame] == [
        *((step, "loss") for step in range(1, 6)),
        (5, "eval_loss"),
        *((step, "loss") for step in range(6, 11)),
        (10, "eval_loss"),
        (10, "train_loss"),
    ]
    assert kept(ours, "wild")[-1]["global_step"] < 10


@pytest.mark.parametrize("producer", PRODUCERS)
def test_other_producers_records_equal_ours(producer: str, ours: Found, tmp_path: Path) -> None:
    found = PRODUCERS[producer](tmp_path)
    for name in ("tame", "wild"):
        expected, got = kept(ours, name), kept(found, name)
        if producer != "hf" and name == "wild":  # they evaluate what they have stopped
            got = [each for each in got if "eval_loss" not in each]
            expected = [each for each in expected if "eval_loss" not in each]
        assert [set(each) for each in got] == [set(each) for each in expected], (name, got, expected)
        for mine, theirs in zip(expected, got, strict=True):
            assert theirs == pytest.approx(mine, rel=1e-4)
    assert any(each.startswith("checkpoint-") for each in found["wild"]["files"])  # the stop has saved
