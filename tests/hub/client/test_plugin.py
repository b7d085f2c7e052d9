"""The spool behind MLflow's API, as far as it needs no MLflow."""

from __future__ import annotations

import sys
import tomllib
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace as Entity

from skyward.hub.client.settings import Address
from skyward.hub.plugin import SpooledRuns

from .small_hub import TOKEN, small_hub

RUN = "0af7651916cd43dd8448eb211c80319c"


def test_entities_of_a_batch_arrive_once_and_metrics_of_a_moment_together() -> None:
    with small_hub() as server:
        spooled = SpooledRuns(Address(url=server.url, token=TOKEN))
        metrics = [Entity(key=key, value=0.5, step=step, timestamp=7) for step in (1, 2) for key in ("loss", "acc")]
        again = Entity(key="acc", value=0.75, step=2, timestamp=7)
        params, tags = [Entity(key="lr", value="0.1")], [Entity(key="note", value="first")]
        spooled.log_batch(RUN, [*metrics, again], params, tags)
        spooled.flush(RUN)
        assert server.of(RUN) == [
            ["p", {"lr": "0.1"}],
            ["t", {"note": "first"}],
            ["m", 1, 7, {"loss": 0.5, "acc": 0.5}],
            ["m", 2, 7, {"loss": 0.5, "acc": 0.5}],
            ["m", 2, 7, {"acc": 0.75}],
        ]
        spooled.end(RUN)
        spooled.log_batch(RUN, [again], [], [])  # MLflow lets users log to a run that has ended
        spooled.close()
        assert server.of(RUN)[-1] == ["m", 2, 7, {"acc": 0.75}]
        assert len({client for client, _ in server.records[RUN]}) == 2


def test_every_entry_point_exists_and_needs_no_mlflow_to_be_found() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    groups = {name: rows for name, rows in project["entry-points"].items() if name.startswith("mlflow.")}
    assert len(groups) == 4
    for rows in groups.values():
        for target in rows.values():
            module, _, name = target.partition(":")
            assert callable(getattr(import_module(module), name))
    assert "mlflow" not in sys.modules
