"""Fewer modules for nodes: of this repository, which a pool sends, and of those that frameworks import."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

LEAN = Path(__file__).with_name("lean")
"""Folder of frameworks that import less of what else is installed. It is for the front of a path."""

# Folders that no task imports in the tests of hosts, of providers and of the hub's jobs. A node unpacks all
# files that it gets: with 70 instead of 310, a pool on two SSH hosts takes a quarter of a second less.
NOT_SENT = (
    *("benchmarks", "docs", "examples", "guides"),
    *(f"tests/{name}" for name in ("acceptance", "calls", "cli", "console", "core", "engine", "errors")),
    *(f"tests/{name}" for name in ("gpu", "integrations", "node", "pool", "schedule", "shared", "state", "testing")),
    *(f"tests/{name}" for name in ("training", "typing", "values", "wire")),
    *(f"tests/hub/{name}" for name in ("client", "http", "mlflow", "model", "schedule", "services", "store", "ui")),
)


@contextlib.contextmanager
def few_modules(folder: Path) -> Iterator[None]:
    """Let git's rules of the user leave out the folders above. `folder` is for the file of rules."""
    ignore = folder / "git" / "ignore"
    ignore.parent.mkdir(parents=True)
    ignore.write_text("".join(f"/{name}/\n" for name in NOT_SENT))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(folder))
        yield


@contextlib.contextmanager
def lean_frameworks() -> Iterator[None]:
    """Let nodes and workers that start on this machine find the frameworks of `LEAN`."""
    sys.path.insert(0, str(LEAN))
    yield
    sys.path.remove(str(LEAN))
