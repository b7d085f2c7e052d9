"""What a run has left in its folder, read back: logs, evaluations, norms. Also of a run that was killed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import UsageError
from ..callbacks.jsonarray import read_records, salvage
from ..callbacks.metrics import is_known, is_summary

__all__ = ["Norms", "Points", "RunRecord", "read_run"]

LOGS = "trainer_logs.json"
NORM_FILES = {"gradient_norms.json": ("grad_norms",), "parameter_norms.json": ("norms", "spectral_norms")}

Points = dict[int, float | None]
"""A metric's values by step. None: it was not finite there, which JSON cannot say."""

NOT_METRICS = frozenset({"timestamp", "global_step", "step", "epoch"})


@dataclass(kw_only=True)
class Norms:
    """Of parameters, over steps."""

    steps: list[int] = field(default_factory=list)
    rows: dict[str, Points] = field(default_factory=dict)

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        self.steps.append(step)
        for name, value in values.items():
            self.rows.setdefault(str(name), {})[step] = _number(value)


@dataclass(kw_only=True)
class RunRecord:
    """A run as its files tell it. `metrics` and `evaluations` are by name, `per_rank` has one list for each rank."""

    source: Path
    facts: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Points] = field(default_factory=dict)
    evaluations: dict[str, Points] = field(default_factory=dict)
    per_rank: dict[str, list[Points]] = field(default_factory=dict)
    norms: dict[str, Norms] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    """What was logged at the end; empty where the run has not come to one."""
    problems: list[str] = field(default_factory=list)
    began: float | None = None
    """Of the first and the last record, seconds since 1970."""
    ended: float | None = None
    last_step: int = 0
    last_epoch: float | None = None

    def add(self, record: Mapping[str, Any]) -> None:
        """One record of the log."""
        step = int(record.get("global_step", record.get("step", 0)) or 0)
        self._add_time(record, step)
        values = {str(name): value for name, value in record.items() if name not in NOT_METRICS}
        if is_summary(values):
            self.summary.update((name, value) for name, value in values.items() if is_known(name, value))
        elif step == 0 and not _is_log(values):  # what JsonLogger was given for the run as a whole
            self.facts.update(values)
        else:
            for name, value in values.items():
                self._add_value(name, step, value)

    def _add_value(self, name: str, step: int, value: Any) -> None:
        if isinstance(value, list):
            for rank, item in enumerate(value):
                ranks = self.per_rank.setdefault(name, [])
                if rank == len(ranks):
                    ranks.append({})
                ranks[rank][step] = _number(item)
        elif value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)):
            kind = self.evaluations if name.startswith("eval_") else self.metrics
            kind.setdefault(name, {})[step] = _number(value)

    def _add_time(self, record: Mapping[str, Any], step: int) -> None:
        stamp = _number(record.get("timestamp"))
        if stamp is not None:
            self.began = stamp if self.began is None else self.began
            self.ended = stamp
        self.last_step = max(self.last_step, step)
        epoch = _number(record.get("epoch"))
        self.last_epoch = epoch if epoch is not None else self.last_epoch


def read_run(run_dir: Path) -> RunRecord:
    """Reads the logs in `run_dir`, its `logs` folder, or the latest below it; else what the Trainer of Hugging Face
    has kept in its latest checkpoint. Damaged files are read as far as they go, which `problems` tells.

    Raises: UsageError where there is neither.
    """
    source = _logs_in(run_dir)
    if source is not None:
        run = RunRecord(source=source)
        for record in _read(source, run):
            run.add(record)
    else:
        run = _from_huggingface(run_dir)
    for name, kinds in NORM_FILES.items():
        file = run.source.with_name(name)
        if file.is_file():
            _add_norms(run, _read(file, run), kinds)
    return run


def _logs_in(run_dir: Path) -> Path | None:
    for place in (run_dir / LOGS, run_dir / "logs" / LOGS):
        if place.is_file():
            return place
    return max(run_dir.rglob(LOGS), key=lambda each: each.stat().st_mtime, default=None)


def _from_huggingface(run_dir: Path) -> RunRecord:
    source = max(run_dir.rglob("trainer_state.json"), key=lambda each: each.stat().st_mtime, default=None)
    if source is None:
        raise UsageError(
            f"report: there is no {LOGS} in {run_dir}, nor below it; give the run's folder. JsonLogger writes that file"
        )
    run = RunRecord(source=source)
    try:
        state = json.loads(source.read_text(encoding="utf-8"))
        history = state["log_history"]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"report: {source} is no state of a Trainer: {error!r}") from error
    run.problems.append(f"There is no {LOGS}; this is what {source.parent.name} has kept.")
    for record in history:
        run.add(record)
    return run


def _read(file: Path, run: RunRecord) -> Iterable[dict[str, Any]]:
    try:
        return read_records(file)
    except ValueError as error:
        found = salvage(file)
        run.problems.append(f"{file.name} is damaged ({error}); {len(found)} records could be read.")
        return found


def _add_norms(run: RunRecord, records: Iterable[Mapping[str, Any]], kinds: tuple[str, ...]) -> None:
    for record in records:
        for kind in kinds:
            values = record.get(kind)
            if isinstance(values, Mapping):
                run.norms.setdefault(kind, Norms()).add(int(record.get("global_step", 0) or 0), values)


def _is_log(values: Mapping[str, Any]) -> bool:
    return "loss" in values or any(name.startswith("eval_") for name in values)


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if math.isfinite(value) else None
