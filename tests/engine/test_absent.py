"""A module or file that is missing on a node: the error says how to send it there."""

from __future__ import annotations

import importlib
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import skyward as sky
from skyward.engine.absent import advise
from tests.channels import Relayed


@pytest.fixture(scope="module")
def pool() -> Iterator[sky.ComputePool]:
    with sky.ComputePool(Relayed(), nodes=1, logs=False) as pool:
        yield pool


def test_a_module_that_is_missing_on_a_node_is_named_by_its_package(pool: sky.ComputePool) -> None:
    with pytest.raises(ModuleNotFoundError) as caught:
        sky.compute(importlib.import_module)("no_such_module.part") >> pool
    assert caught.value.__notes__[-1].startswith(
        "Node 0 does not share this machine's packages. Add Image(pip=['no_such_module']) to the pool."
    )
    assert "Image(pip=['scikit-learn'])" in advise(ModuleNotFoundError("", name="sklearn.svm"), node=0)


def test_a_file_that_is_missing_on_a_node_can_be_included(pool: sky.ComputePool, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        sky.compute(open)("data/rows.csv") >> pool
    assert "Image(includes=['data/rows.csv'])" in caught.value.__notes__[-1]
    assert "working folder of the node" in caught.value.__notes__[-1]
    here = tmp_path / "rows.csv"
    here.touch()
    assert re.match("Node 3 .* The file exists on this machine", advise(FileNotFoundError(2, "", str(here)), node=3))


def test_other_missing_names_get_no_advice(pool: sky.ComputePool) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        sky.compute(subprocess.check_call)(["no-such-program"]) >> pool
    assert not any("Image(" in note for note in caught.value.__notes__)
    assert not advise(FileNotFoundError(2, "", "/var/on/the/node"), node=0)
    assert not advise(KeyError("x"), node=0)


def test_a_missing_module_on_this_machine_gets_no_advice() -> None:
    with sky.ComputePool(sky.Local(), logs=False) as pool, pytest.raises(ModuleNotFoundError) as caught:
        sky.compute(importlib.import_module)("no_such_module") >> pool
    assert not any("Image(" in note for note in caught.value.__notes__)
