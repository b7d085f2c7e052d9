"""Fewer modules for nodes: a pool sends all of this repository, most of which the tasks of its tests never import."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

# Folders that no task imports in the tests of hosts, of providers and of the hub's jobs on hosts.
NOT_SENT = (
    *("benchmarks", "docs", "examples", "guides"),
    *(f"tests/{name}" for name in ("acceptance", "engine", "gpu", "integrations", "node", "training", "wire")),
    *(f"tests/hub/{name}" for name in ("client", "mlflow", "model", "search", "services", "store", "ui")),
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
