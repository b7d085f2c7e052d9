"""Files of a run, read back: logs, evaluations, norms, facts. Works for a run that was killed, too."""

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
from ..callbacks.run_info import FILE_NAME as RUN_INFO

LOGS = "trainer_logs.json"
NORM_FILES = {"gradient_norms.json": ("grad_norms",), "parameter_norms.json": ("norms", "spectral_norms")}

Points = dict[int, float | None]
"""Values of a metric by step; None where it was not finite, which JSON cannot express."""

NOT_METRICS = frozenset({"timestamp", "global_step", "step", "epoch"})


@dataclass(kw_only=True)
class Norms:
    """Norms of parameters over steps."""

    steps: list[int] = field(default_factory=list)
    rows: dict[str, Points] = field(default_factory=dict)

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        self.steps.append(step)
        for name, value in values.items():
            self.rows.setdefault(str(name), {})[step] = _number(value)


@dataclass(kw_only=True)
class RunRecord:
    """Contents of a run's files. `metrics` and `evaluations` are by name; `per_rank` has one entry per rank."""

    source: Path
    facts: dict[str, Any] = field(default_factory=dict)
    """Values that JsonLogger was given for the run as a whole."""
    info: dict[str, dict[str, str]] = field(default_factory=dict)
    """Arguments, versions and machine of the run, by these headings."""
    metrics: dict[str, Points] = field(default_factory=dict)
    evaluations: dict[str, Points] = field(default_factory=dict)
    per_rank: dict[str, list[Points]] = field(default_factory=dict)
    norms: dict[str, Norms] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    """Values logged at the end; empty if the run has not reached it."""
    problems: list[str] = field(default_factory=list)
    began: float | None = None
    """Time of the first record, seconds since 1970."""
    ended: float | None = None
    """Time of the last record, seconds since 1970."""
    last_step: int = 0
    last_epoch: float | None = None

    def add(self, record: Mapping[str, Any]) -> None:
        """Add one record of the log."""
        step = int(record.get("global_step", record.get("step", 0)) or 0)
        self._add_time(record, step)
        values = {str(name): value for name, value in record.items() if name not in NOT_METRICS}
        if is_summary(values):
            self.summary.update((name, value) for name, value in values.items() if is_known(name, value))
        elif step == 0 and not _is_log(values):  # JsonLogger's keyword arguments
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
    """Read the files of a run.

    The logs are in `run_dir`, its `logs` folder, or the latest below it. Without any, the latest checkpoint of Hugging
    Face's Trainer is read. Damaged files are read as far as possible; `problems` says so.

    Raises:
        UsageError: there are neither logs nor such a checkpoint.
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
    _add_info(run, run.source.with_name(RUN_INFO))
    return run


def _logs_in(run_dir: Path) -> Path | None:
    for place in (run_dir / LOGS, run_dir / "logs" / LOGS):
        if place.is_file():
            return place
    return max(run_dir.rglob(LOGS), key=lambda file: file.stat().st_mtime, default=None)


def _from_huggingface(run_dir: Path) -> RunRecord:
    source = max(run_dir.rglob("trainer_state.json"), key=lambda file: file.stat().st_mtime, default=None)
    if source is None:
        raise UsageError(
            f"run_dir={str(run_dir)!r}: has no {LOGS}, nor any below it; pass the folder of a run with JsonLogger"
        )
    run = RunRecord(source=source)
    try:
        state = json.loads(source.read_text(encoding="utf-8"))
        history = state["log_history"]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"run_dir={str(run_dir)!r}: {source} is not a state of a Trainer ({error!r}); pass the folder of a run"
        ) from error
    run.problems.append(f"There is no {LOGS}; this page shows the history in {source.parent.name}.")
    for record in history:
        run.add(record)
    return run


def _read(file: Path, run: RunRecord) -> Iterable[dict[str, Any]]:
    try:
        return read_records(file)
    except ValueError as error:
        records = salvage(file)
        run.problems.append(f"{file.name} is damaged ({error}); {len(records)} records could be read.")
        return records


def _add_norms(run: RunRecord, records: Iterable[Mapping[str, Any]], kinds: tuple[str, ...]) -> None:
    for record in records:
        for kind in kinds:
            values = record.get(kind)
            if isinstance(values, Mapping):
                run.norms.setdefault(kind, Norms()).add(int(record.get("global_step", 0) or 0), values)


def _add_info(run: RunRecord, file: Path) -> None:
    try:
        info = json.loads(file.read_text(encoding="utf-8"))
        run.info = {str(heading): {str(name): str(value) for name, value in info[heading].items()} for heading in info}
    except FileNotFoundError:  # logs of an earlier version, or of another program
        return
    except (OSError, ValueError, AttributeError, TypeError) as error:
        run.problems.append(f"{file.name} cannot be read ({error}).")


def _is_log(values: Mapping[str, Any]) -> bool:
    return "loss" in values or any(name.startswith("eval_") for name in values)


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if math.isfinite(value) else None
