"""Names that users of Sakura know, and the cost of importing them."""

from __future__ import annotations

import importlib
import subprocess
import sys
from typing import Any

import pytest

from skyward.errors import UsageError
from skyward.training import sakura
from skyward.training.evaluation import AdaptiveCompute, AsyncEvaluation, AsyncEvaluator


def fresh(code: str) -> str:
    """Return the output of the code in a new interpreter."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("lightning", "SakuraTrainer"),
        ("lightning", "SakuraLightningCallback"),
        ("huggingface", "SakuraHFCallback"),
        ("hf", "SakuraHFCallback"),
        ("tensorflow", "SakuraKerasCallback"),
        ("keras", "SakuraKerasCallback"),
        ("ml.async_trainer", "AsyncTrainer"),
    ],
)
def test_modules_have_the_paths_of_sakura(module: str, name: str) -> None:
    if name == "SakuraKerasCallback":
        pytest.importorskip("keras")
    found = importlib.import_module(f"skyward.training.sakura.{module}")
    assert getattr(found, name) is getattr(sakura, name)
    assert name in found.__all__
    assert sakura.AdaptiveCompute is AdaptiveCompute


def test_a_module_imports_no_framework_before_its_name_is_used() -> None:
    code = "import sys\n" + "\n".join(
        f"import skyward.training.sakura.{name}"
        for name in ("lightning", "huggingface", "hf", "tensorflow", "keras", "ml.async_trainer")
    )
    loaded = {name.partition(".")[0] for name in fresh(f"{code}\nprint(*sys.modules)").split()}
    assert not loaded & {"torch", "lightning", "transformers", "keras", "tensorflow", "jax"}


def test_a_name_without_its_package_says_what_to_install() -> None:
    code = """
import sys
sys.modules["torch"] = None  # as if it were not installed
try:
    from skyward.training import DDPTrainer
except ImportError as error:
    print(error)
"""
    told = "DDPTrainer: requires torch, which is not installed here; pip install 'skyward[training]'"
    assert fresh(code).strip() == told


def test_a_star_import_of_training_loads_no_other_framework() -> None:
    loaded = fresh(
        "from skyward.training import *\nimport sys\nTrainer, JsonLogger, report\nprint(*sys.modules)"
    ).split()
    assert not {"tensorflow", "keras", "transformers", "lightning", "jax"} & set(loaded)


def test_a_misspelt_option_is_refused_with_the_nearest() -> None:
    parts: dict[str, Any] = {"model_factory": dict, "eval_fn": len}
    kinds: tuple[tuple[Any, dict[str, Any]], ...] = (
        (sakura.SakuraHFCallback, {**parts, "eval_payload": None}),
        (AsyncEvaluator, parts),
        (AsyncEvaluation, parts),
    )
    for kind, arguments in kinds:
        with pytest.raises(UsageError, match=f"^cache_keys: not an option of {kind.__name__}; did you mean cache_key="):
            kind(**arguments, cache_keys="k")
    with pytest.raises(UsageError, match="^worker: not an option of AdaptiveCompute; did you mean workers="):
        AdaptiveCompute(worker=[None])  # type: ignore[call-arg]
