"""`skyward integrations`: the frameworks and their decorators."""

from __future__ import annotations

import subprocess
import sys

import pytest

from skyward import integrations
from skyward.cli import main
from skyward.cli.integrations import describe


def test_each_integration_is_listed_with_its_version_and_extra(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["integrations"]) == 0
    out = capsys.readouterr().out
    for name in integrations.REGISTRY:
        assert f"\n{name} " in f"\n{out}"
    assert "torch 2.13" in out
    assert "pip install 'skyward[jax]'" in out


def test_one_integration_is_shown_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["integrations", "torch"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("sky.integrations.torch(")
    assert "backend: str | None = None" in out
    for variable in ("MASTER_ADDR", "LOCAL_RANK", "WORLD_SIZE"):
        assert variable in out


def test_an_unknown_integration_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["integrations", "tensroflow"]) == 1
    said = capsys.readouterr().err
    assert "tensroflow" in said
    assert "tensorflow" in said


def test_every_decorator_says_what_it_needs_and_sets() -> None:
    decorators = [one for one in describe() if one.variables]
    assert {one.name for one in decorators} >= {"torch", "jax", "keras", "tensorflow", "lightning"}
    for one in decorators:
        assert one.packages
        assert "processes_per_node" in one.signature
        assert one.doc.count("Args:") == 1


def test_describing_integrations_imports_no_framework() -> None:
    code = (
        "import sys; from skyward.cli.integrations import describe; describe();"
        "print([m for m in ('torch', 'jax', 'keras', 'tensorflow', 'lightning', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
