"""Common parts of the frameworks: states as JSON, names of metrics, models under wrappers, and cheap imports."""

from __future__ import annotations

import importlib
import inspect
import json
import pickle
import subprocess
import sys
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from skyward.errors import UsageError
from skyward.training import sakura
from skyward.training.frameworks.foreign import plain
from skyward.training.frameworks.json_state import from_json, to_json
from skyward.training.frameworks.run import CallbackRun, as_eval_metrics
from skyward.training.parts import unwrapped


def through_json(value: Any) -> Any:
    return from_json(json.loads(json.dumps(to_json(value))))


class Colour(IntEnum):
    RED = 1


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        1e300,
        "text",
        [1, [2.5, None]],
        {"a": {"b": []}},
        (1, ("a", 2)),
        {1, 2},
        frozenset({"a"}),
        b"\x00\xff",
        {1: "by step", (2, 3): b"x"},
        {"__skyward__": "a user's own key"},
        float("inf"),
    ],
    ids=repr,
)
def test_states_come_back_from_json_unchanged(value: Any) -> None:
    found = through_json(value)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float16])
def test_tensors_come_back_from_json(dtype: torch.dtype) -> None:
    for tensor in (torch.arange(6).reshape(2, 3).to(dtype), torch.tensor(1).to(dtype), torch.empty(0, 2, dtype=dtype)):
        found = through_json({"t": tensor.t() if tensor.dim() == 2 else tensor})["t"]
        assert found.dtype == dtype
        assert torch.equal(found, tensor.t() if tensor.dim() == 2 else tensor)


def test_arrays_and_their_numbers_come_back_from_json() -> None:
    found = through_json({"a": np.arange(6.0).reshape(2, 3), "n": np.float64(2.5), "i": np.int32(7), "e": Colour.RED})
    assert np.array_equal(found["a"], np.arange(6.0).reshape(2, 3))
    assert found["a"].flags.writeable
    assert (found["n"], found["i"], found["e"]) == (2.5, 7, 1)
    assert type(found["n"]) is float


def test_values_that_json_cannot_keep_are_refused_with_their_place() -> None:
    with pytest.raises(
        UsageError, match=r"^the state\['a'\]\[1\]: a JSON checkpoint cannot keep a value of type object; "
    ):
        to_json({"a": [1, object()]}, where="the state")


def test_metrics_of_evaluations_have_one_name() -> None:
    given = {"val_loss": 1.0, "val/acc": 2.0, "loss_of_some": torch.tensor(3.0), "eval_f1": np.float32(4.0)}
    assert as_eval_metrics(given) == {"eval_loss": 1.0, "eval_acc": 2.0, "eval_loss_of_some": 3.0, "eval_f1": 4.0}
    assert as_eval_metrics({"test_loss": 1.0, "f1": 2.0}, prefix="test_") == {"test_loss": 1.0, "test_f1": 2.0}
    several = torch.arange(2)
    assert plain(several) is several


# Pitfall 8.
def test_models_are_passed_without_their_wrappers() -> None:
    model = torch.nn.Linear(1, 1)
    parallel = torch.nn.DataParallel(model)
    assert unwrapped(torch.compile(parallel, backend="eager")) is model
    assert unwrapped(parallel) is model
    assert unwrapped(model) is model
    assert unwrapped(None) is None
    holder = torch.nn.Module()
    holder.module = model  # a user's own name for a part
    assert unwrapped(holder) is holder


def test_an_illegal_cadence_is_refused() -> None:
    given: dict[str, Any] = {"output_dir": None, "logging_dir": None, "saves_at_stop": True, "ranks": None}
    with pytest.raises(UsageError, match="logging_steps=0: must be a whole number of steps >= 1, or None; "):
        CallbackRun([], logging_steps=0, **given)


def test_importing_training_imports_no_framework() -> None:
    code = (
        "import sys, skyward.training, skyward.training.sakura.lightning, skyward.training.sakura.tensorflow\n"
        "from skyward.training.sakura import AsyncTrainer, SakuraTrainer\n"
        "print(sorted({'torch', 'transformers', 'lightning', 'keras', 'jax', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("skyward.training", "HFCallbacks"),
        ("skyward.training", "LightningCallbacks"),
        ("skyward.training.sakura", "AsyncTrainer"),
        ("skyward.training.sakura", "SakuraHFCallback"),
        ("skyward.training.sakura", "SakuraLightningCallback"),
        ("skyward.training.sakura", "SakuraTrainer"),
    ],
)
def test_classes_report_their_public_module(module: str, name: str) -> None:
    kind = getattr(importlib.import_module(module), name)
    assert kind.__module__ == module
    assert pickle.loads(pickle.dumps(kind)) is kind


def test_options_that_are_passed_on_are_in_the_signature() -> None:
    from skyward.training.evaluation import AsyncEvaluator

    theirs = inspect.signature(AsyncEvaluator).parameters
    for name in ("SakuraHFCallback", "SakuraLightningCallback", "AsyncTrainer"):
        ours = inspect.signature(getattr(sakura, name)).parameters
        for option in ("cache_key", "max_pending", "on_backpressure", "on_error", "gate", "timeout_s", "timeline"):
            assert ours[option] == theirs[option]
    assert "snapshots" not in inspect.signature(sakura.AsyncTrainer).parameters


def test_a_framework_that_is_not_installed_is_named_with_its_extra(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['transformers'] = sys.modules['keras'] = None\n"
        "import skyward.training\n"
        "for name in ('HFCallbacks', 'KerasCallbacks'):\n"
        "    try: getattr(skyward.training, name)\n"
        "    except ImportError as error: print(type(error).__name__, str(error).rpartition('install')[2])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == [
        "MissingDependency  'skyward[transformers]'`",
        "MissingDependency  'skyward[keras]'`",
    ]
