"""A spool of its own for each test, and no hub unless the test names one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from skyward import hub


@pytest.fixture(autouse=True)
def spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name in ("URL", "TOKEN", "PROJECT", "EXPERIMENT"):
        monkeypatch.delenv(f"SKYWARD_HUB_{name}", raising=False)
    monkeypatch.setenv("SKYWARD_HUB_SPOOL", str(tmp_path / "spool"))
    hub.disconnect()
    yield tmp_path / "spool"
    while (run := hub.active_run()) is not None:
        run.end(timeout_s=1)
    hub.disconnect()
