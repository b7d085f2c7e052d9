"""Fixtures: a node, and an index of packages that it can reach."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bootstrap.packages import Index, make_wheel, serve
from tests.bootstrap.scratch import ScratchNode


@pytest.fixture(scope="session")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Index]:
    folder = tmp_path_factory.mktemp("index")
    make_wheel(folder, "alpha", "1.0", "VALUE = 1")
    make_wheel(folder, "alpha", "2.0", "VALUE = 2")
    make_wheel(folder, "beta", "1.0", "import alpha", ("alpha<2",))
    make_wheel(folder, "wants_ours", "1.0", "", ("skyward>=9",))
    make_wheel(folder, "skyward", "9.0", "raise ImportError('somebody else')")
    with serve(folder) as served:
        yield served


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[ScratchNode]:
    yield from node(tmp_path / "node")


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[ScratchNode]:
    """A node without a uv."""
    yield from node(tmp_path / "node", is_bare=True)


def node(folder: Path, *, is_bare: bool = False) -> Iterator[ScratchNode]:
    yield ScratchNode(folder, is_bare=is_bare)
    shutil.rmtree(f"/tmp/skyward-{os.getuid()}/test-0", ignore_errors=True)
