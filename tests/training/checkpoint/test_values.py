"""States with values that torch does not load by default are converted, or refused when they are saved."""

from __future__ import annotations

import os
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from enum import Enum, IntEnum, StrEnum
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch

from skyward.errors import CheckpointCorrupt, UsageError
from skyward.stores.folders import folder_at
from skyward.training.agree import Alone
from skyward.training.checkpoint import CheckpointCoordinator, FileCheckpoints, export_checkpoint
from skyward.training.checkpoint.inspection import states_in
from skyward.training.checkpoint.sharded import read_whole, write_whole
from tests.training.checkpoint.states import Box, part
from tests.training.trainer.regression import run, trainer

ASSETS = Path(__file__).parent / "assets"


class Colour(Enum):
    RED = 1


class Level(IntEnum):
    HIGH = 3


class Mode(StrEnum):
    FAST = "fast"


Pair = namedtuple("Pair", "first second")  # noqa: PYI024  # as states of others have them

KEPT: dict[str, Any] = {
    "number": np.float64(0.25),
    "half": np.float16(0.1),
    "flag": np.bool_(True),
    "text": np.str_("text"),
    "array": np.arange(6, dtype=">i2").reshape(2, 3),
    "part": np.arange(10.0)[::3],
    "empty": np.zeros((0, 4), dtype=np.float32),
    "dates": np.array(["2026-11-22"], dtype="datetime64[D]"),
    "path": Path("/data/set"),
    "pure": PurePosixPath("a/b"),
    "lists": defaultdict(list, {"a": [np.int8(3), Path("x")]}),
    "none": defaultdict(None, {1: 2}),
    "frozen": frozenset({1, "a"}),
    "set": {1, 2},
    "counter": Counter("aab"),
    "ordered": OrderedDict(b=np.float32(1.5), a=(1, [np.uint8(2)])),
    "marked": {"__skyward_kind__": "path", "value": "no path"},
    "bytes": b"\x00",
    "complex": 1j,
}


def coordinator(folder: Path, box: Box, **options: Any) -> CheckpointCoordinator:
    return CheckpointCoordinator([part("mine", box, "global")], output_dir=folder, **options)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("name", KEPT)
def test_a_value_comes_back_unchanged(name: str, asynchronous: bool, tmp_path: Path) -> None:
    value = KEPT[name]
    box = Box({"in": [value], "tensor": torch.ones(2)})
    saves = coordinator(tmp_path, box)
    if asynchronous:
        saves.save_checkpoint_async()
    else:
        saves.save_checkpoint()
    saves.wait()
    box.state = None
    saves.load_checkpoint()
    (found,) = box.state["in"]
    assert type(found) is type(value)
    if isinstance(value, np.ndarray):
        assert found.dtype == value.dtype
        np.testing.assert_array_equal(found, value)
        found[...] = found  # it can be written to
    else:
        assert found == value
    if isinstance(value, defaultdict):
        assert found.default_factory is value.default_factory
    if name in ("lists", "ordered"):
        assert repr(found) == repr(value)


def test_a_value_equal_to_a_plain_one_becomes_it(tmp_path: Path) -> None:
    box = Box(
        {"level": Level.HIGH, "mode": Mode.FAST, np.int64(7): 1, "keys": {(np.int8(1), "a"): 2}, "set": {np.int8(4)}}
    )
    saves = coordinator(tmp_path, box)
    saves.save_checkpoint()
    saves.load_checkpoint()
    assert box.state == {"level": 3, "mode": "fast", 7: 1, "keys": {(1, "a"): 2}, "set": {4}}
    assert [type(key) for key in (*box.state, *box.state["set"])] == [str, str, int, str, str, int]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Colour.RED, r"best.0=<Colour.RED: 1>: .* could not be loaded again.* return its .value"),
        (lambda: Pair(1, 2), r"best.0=Pair\(first=1, second=2\): .* could not be loaded again"),
        (lambda: defaultdict(lambda: 3), "best.0=defaultdict"),
        (lambda: np.array([object()]), "best.0=array"),
        (lambda: np.zeros(2, dtype=[("a", "f4")]), "best.0=array"),
        (lambda: {Colour.RED: 1}, "best.0=<Colour.RED: 1>"),
        (lambda: {Path("a"): 1}, "best.0="),
        (object, "best.0=<object object at"),
        (lambda: open, "best.0=<built-in function open>"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_state_that_could_not_be_loaded_is_refused_when_it_is_saved(
    make: Callable[[], Any], said: str, asynchronous: bool, tmp_path: Path
) -> None:
    saves = coordinator(tmp_path, Box({"tensor": torch.ones(1), "best": [make()]}))
    with pytest.raises(UsageError, match=f"StateComponent 'mine': {said}"):
        if asynchronous:
            saves.save_checkpoint_async()
            saves.wait()
        else:
            saves.save_checkpoint()
    assert os.listdir(tmp_path) == []


def test_an_ordinary_state_is_written_unchanged() -> None:
    """Nothing is copied, and shared values stay shared."""
    from skyward.training.checkpoint.plain import from_plain, to_plain

    model = torch.nn.BatchNorm1d(2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    for state in (model.state_dict(), optimizer.state_dict()):
        assert to_plain(state, where="") is state
        assert from_plain(state) is state


def test_a_class_that_was_allowed_is_saved_and_loaded(tmp_path: Path) -> None:
    with torch.serialization.safe_globals([Colour, getattr]):
        box = Box({"tensor": torch.ones(1), "colour": Colour.RED})
        coordinator(tmp_path, box).save_checkpoint()
        box.state = None
        coordinator(tmp_path, box).load_checkpoint()
    assert box.state["colour"] is Colour.RED


class Keeps:
    """A callback with a state of NumPy values, as metrics are."""

    def __init__(self, best: Any) -> None:
        self.best = best

    def on_step_end(self, **kwargs: Any) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = state["best"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_trainer_resumes_with_numpy_in_a_callbacks_state_and_refuses_an_enum_at_its_first_save(
    asynchronous: bool, tmp_path: Path
) -> None:
    run(tmp_path, callbacks=[Keeps(np.float64(0.5))], max_steps=2, save_steps=1, async_save=asynchronous)
    again = Keeps(None)
    run(tmp_path, callbacks=[again], max_steps=3, save_steps=1, resume_from_checkpoint=True)
    assert (again.best, type(again.best)) == (0.5, np.float64)
    with pytest.raises(UsageError, match=r"StateComponent 'callbacks': .*best=<Colour.RED: 1>"):
        run(tmp_path, callbacks=[Keeps(Colour.RED)], max_steps=9, save_steps=1, async_save=asynchronous)


def test_a_trainer_can_be_told_to_trust_its_checkpoints(tmp_path: Path) -> None:
    made = trainer(tmp_path, callbacks=[Keeps(Colour.RED)], max_steps=1, save_steps=1)
    made.checkpoints = FileCheckpoints(str(tmp_path), ranks=Alone(), allow_pickle=True)
    made.train()
    again = Keeps(None)
    made = trainer(tmp_path, callbacks=[again], max_steps=2, save_steps=1)
    made.checkpoints = FileCheckpoints(str(tmp_path), ranks=Alone(), allow_pickle=True)
    made.train(resume_from_checkpoint=True)
    assert again.best is Colour.RED


def test_an_older_checkpoint_with_numpy_is_loaded_if_trusted() -> None:
    (path,) = (ASSETS / "v2-numpy").glob("checkpoint-*")
    box = Box(None)
    component = [part("state", box, "global")]
    with pytest.raises(UsageError, match="allow_pickle=True"):
        CheckpointCoordinator(component).load_checkpoint(path)
    CheckpointCoordinator(component, allow_pickle=True).load_checkpoint(path)
    assert box.state["best"] == 0.5
    assert box.state["array"].tolist() == [0, 1, 2]


def test_foreign_marks_are_a_damaged_file(tmp_path: Path) -> None:
    for mark in (
        {"__skyward_kind__": "soup"},
        {"__skyward_kind__": "numpy.ndarray", "dtype": "O", "value": torch.ones(8)},
    ):
        path = tmp_path / "model_state.pt"
        torch.save({"weight": mark}, path)
        with pytest.raises(CheckpointCorrupt, match=r"model_state.pt: cannot be loaded \("):
            states_in(tmp_path)["model"]()


def test_a_state_of_dcp_keeps_values_and_refuses_values_that_could_not_be_loaded(tmp_path: Path) -> None:
    """One process writes the state as tensor-parallel ranks do."""
    from skyward.training.checkpoint.commit import staging_in
    from skyward.training.checkpoint.sharded import ShardedFiles, write_sharded

    state = {"weight": torch.arange(4.0), "lr": np.float64(0.5), "where": Path("x"), "groups": [{"betas": (0.9, 1)}]}
    staging = staging_in(folder_at(tmp_path), "checkpoint-1", "token")
    entries = write_sharded(Alone(), "saving", staging, "model", state)
    box = Box({"weight": torch.zeros(4), "lr": None, "where": None, "groups": [{"betas": None}]})
    ShardedFiles(Alone(), staging.folder, entries).read_into(part("model", box, "per_rank"))
    assert box.state.pop("weight").tolist() == [0, 1, 2, 3]
    assert box.state == {key: value for key, value in state.items() if key != "weight"}
    with pytest.raises(UsageError, match=r"StateComponent 'model': colour=<Colour.RED: 1>"):
        write_sharded(Alone(), "saving", staging, "model", state | {"colour": Colour.RED})
    assert read_whole(folder_at(f"{staging.folder.path}/model.dcp"))["lr"] == 0.5


def test_other_libraries_dcps_are_read_if_their_values_are_plain(tmp_path: Path) -> None:
    write_whole(folder_at(tmp_path / "plain"), {"a": {"weight": torch.ones(2), "lr": 0.5}})
    assert read_whole(folder_at(tmp_path / "plain"))["a"]["lr"] == 0.5
    write_whole(folder_at(tmp_path / "other"), {"a": {"weight": torch.ones(2), "colour": Colour.RED}})
    with pytest.raises(UsageError, match=r"other: a.colour: .*allow_pickle=True"):
        read_whole(folder_at(tmp_path / "other"))
    assert read_whole(folder_at(tmp_path / "other"), allow_pickle=True)["a"]["colour"] is Colour.RED


def test_an_exported_file_has_the_values_themselves(tmp_path: Path) -> None:
    path = coordinator(tmp_path, Box({"best": np.float64(2.0), "weight": torch.ones(1)})).save_checkpoint()
    export_checkpoint(path, tmp_path / "one.pt", to="torch", components=("mine",))
    assert type(torch.load(tmp_path / "one.pt", weights_only=False)["mine"]["best"]) is np.float64
