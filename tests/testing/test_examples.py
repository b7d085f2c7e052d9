"""Public names of testing and integrations have examples, and those of the fakes run."""

from __future__ import annotations

from types import ModuleType

import pytest

import skyward.integrations
import skyward.testing
from skyward.testing import fake_cloud, virtual_clock
from tests.doctests import run_examples


@pytest.mark.parametrize("module", [fake_cloud, virtual_clock], ids=lambda module: module.__name__)
def test_examples_run(module: ModuleType) -> None:
    run_examples(module)


@pytest.mark.parametrize("package", [skyward.testing, skyward.integrations], ids=lambda package: package.__name__)
def test_every_public_name_has_an_example(package: ModuleType) -> None:
    names = [name for name in dir(package) if callable(getattr(package, name))]
    assert names
    assert [name for name in names if "Example:" not in (getattr(package, name).__doc__ or "")] == []
