"""Public objects of trainers, callbacks, evaluation, snapshots and reports have examples, and the examples run."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import skyward.training
import skyward.training.trainer
from tests.doctests import run_examples

FOLDER = Path(skyward.training.__file__).parent
MODULES = sorted(
    ".".join(("skyward", "training", *file.relative_to(FOLDER).with_suffix("").parts))
    for pattern in ("*", "trainer/*", "callbacks/**/*", "evaluation/**/*", "snapshot/**/*", "reporting/**/*")
    for file in FOLDER.glob(f"{pattern}.py")
    if ">>> " in file.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
    assert run_examples(importlib.import_module(name.removesuffix(".__init__"))) > 0


PACKAGES = ("callbacks", "checkpoint", "control", "evaluation", "evaluation.dispatchers", "snapshot")


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_has_an_example(package: str) -> None:
    public = importlib.import_module(f"skyward.training.{package}")
    names = [name for name in dir(public) if callable(getattr(public, name))]
    assert names
    assert [name for name in names if "Example:" not in (getattr(public, name).__doc__ or "")] == []


@pytest.mark.parametrize("name", skyward.training.trainer.__all__)
def test_every_trainer_and_its_results_have_an_example(name: str) -> None:
    assert "Example:" in (getattr(skyward.training.trainer, name).__doc__ or "")
