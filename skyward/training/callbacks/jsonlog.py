"""Logs as a JSON array: `trainer_logs.json`, and a building block for files like it.

A record is an object with `timestamp` (seconds since 1970, UTC), `global_step`, `epoch` and what is logged. The file
can be read by `json.load` at every instant; see `jsonarray`.

A run that resumes goes on in its own file, cut at the *checkpoint's* step: what was logged later will be logged again.
The run's file is known by the timestamp of its first record, which the checkpoint keeps. A new run in a folder where
there is a file already takes the name; the old file is renamed to `<name>-1.json` (2, 3, ...), and found there should
its run resume.
"""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..events import TrainerCallback
from .evaluations import ReportedOnce
from .jsonarray import JsonArray, is_being_written, read_records, salvage
from .metrics import is_summary

__all__ = ["JsonLogWriter", "JsonLogger"]

_log = logging.getLogger(__name__)

Record = dict[str, Any]


class JsonLogWriter:
    """A file of records, `filename` in the folder that `open` names. Stateful: give a checkpoint its `state_dict()`,
    and call `load_state_dict` before `open` in the run that resumes. For one thread.

        writer = JsonLogWriter("norms.json")
        writer.open(args.logging_dir, global_step=state.global_step)
        writer.write_record(state.global_step, state.epoch, {"norms": {"a": 1.0}})
        writer.close()
    """

    def __init__(self, filename: str) -> None:
        self.filename = filename
        self.log_path: Path | None = None
        self._array: JsonArray | None = None
        self._loaded: Mapping[str, Any] | None = None
        self._started: float | None = None
        self._last_step = -1
        self._resumed_at = -1
        self._kept_there: set[frozenset[str]] = set()
        self._unwritten: deque[Record] = deque(maxlen=100_000)

    @property
    def is_open(self) -> bool:
        return self._array is not None

    def open(self, logging_dir: str | Path, *, global_step: int = 0) -> None:
        """Opens the file for more; the folder is made.

        global_step: where the run begins, which is the step of the checkpoint that it resumes from. Records of later
            steps are dropped.
        """
        self.close()
        wanted = Path(logging_dir) / self.filename
        kept = self._resume(wanted, global_step)
        path = self.log_path or wanted
        if self.log_path is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path = _free_name(path) if is_being_written(path) else _vacate(path)
        self.log_path = path
        self._started = kept[0].get("timestamp") if kept else None
        self._last_step = int(kept[-1].get("global_step", -1)) if kept else -1
        self._resumed_at = global_step if kept else -1
        self._kept_there = {_shape(each) for each in kept if each.get("global_step") == global_step}
        self._array = JsonArray(path, kept)
        self._loaded = None

    def write_record(self, global_step: int, epoch: float | None, data: Mapping[str, Any]) -> None:
        """Adds a record; it is on the file when this returns. Nothing where the file is not open.

        What cannot be written now, on a full disk for one, is written with the next record; the first failure is
        warned of. A record that stands in the file already, because the run was cut at its step, is left out.
        """
        if self._array is None:
            return
        record = {"timestamp": datetime.now(UTC).timestamp(), "global_step": global_step, "epoch": epoch, **data}
        if global_step == self._resumed_at and _shape(record) in self._kept_there:
            return
        if self._started is None:
            self._started = record["timestamp"]
        self._unwritten.append(record)
        self._last_step = global_step
        self._flush(self._array)

    def close(self) -> None:
        """Idempotent. The file stays as it is."""
        array, self._array = self._array, None
        if array is not None:
            self._flush(array)
            array.close()
        self._unwritten.clear()

    def state_dict(self) -> dict[str, Any]:
        """Also makes what is in the file outlive a loss of power: a checkpoint is about to rely on it."""
        if self._array is not None:
            self._array.sync()
        path = None if self.log_path is None else str(self.log_path.resolve())
        return {"log_path": path, "last_step": self._last_step, "started": self._started}

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        self._loaded = dict(state_dict)

    # Within ----------------------------------------------------------------------------------------------------------

    def _flush(self, array: JsonArray) -> None:
        try:
            while self._unwritten:
                array.append(self._unwritten[0])
                self._unwritten.popleft()
        except OSError as error:
            if len(self._unwritten) == 1:
                _log.warning("%s: cannot be written now (%s); its records are kept in memory", array.path, error)

    def _resume(self, wanted: Path, global_step: int) -> list[Record]:
        """The records that stay, and `log_path` where the run's own file goes on."""
        self.log_path = None
        if self._loaded is None:
            return self._go_on_unknown(wanted, global_step) if global_step > 0 and wanted.is_file() else []
        named = self._loaded.get("log_path")
        if not named or self._loaded.get("started", 0) is None:
            return []  # a checkpoint of before the first record: all is logged again
        path = self._own_file(Path(named), wanted)
        if path is None:
            _log.warning("%s: the log of the run that resumes is not there; a new one begins in %s", named, wanted)
            return []
        if is_being_written(path):
            _log.warning("%s: another process writes it; this run copies it and goes on beside it", path)
            return _until(global_step, self._read(path))
        self.log_path = path
        return _until(global_step, self._read(path))

    def _go_on_unknown(self, wanted: Path, global_step: int) -> list[Record]:
        """For a checkpoint without our state. The file is most likely this run's; where records of it would be
        dropped it is copied instead, so that nothing is lost should it not be.
        """
        found = self._read(wanted)
        kept = _until(global_step, found)
        if len(kept) == len(found) and not is_being_written(wanted):
            self.log_path = wanted
        return kept

    def _own_file(self, named: Path, wanted: Path) -> Path | None:
        """This run's file, brought back to its name where a later run took that."""
        assert self._loaded is not None
        started = self._loaded.get("started")
        if "started" not in self._loaded:
            return named if named.is_file() else None
        for place in dict.fromkeys((named, wanted)):
            for each in (place, *_numbered(place)):
                if each.is_file() and _first_timestamp(each) == started:
                    if each != place and not is_being_written(place):
                        _vacate(place)
                        each.rename(place)
                        return place
                    return each
        return None

    def _read(self, path: Path) -> list[Record]:
        try:
            return read_records(path)
        except ValueError as error:
            backup = path.with_name(f"{path.name}.bak")
            path.rename(backup)
            found = salvage(backup)
            _log.warning("%s: damaged (%s); %d records can be read. It is kept as %s", path, error, len(found), backup)
            return found


class JsonLogger(TrainerCallback):
    """Writes what a run logs and evaluates to `trainer_logs.json` in `args.logging_dir`; nothing without one.

    kwargs: of the run as a whole (its name, its configuration): recorded when it starts, as a record of their own.
    """

    runs_on = "rank_zero"
    on_error = "disable"

    def __init__(self, **kwargs: Any) -> None:
        self.kwargs = kwargs
        self._writer = JsonLogWriter("trainer_logs.json")
        self._reported = ReportedOnce()

    @property
    def log_path(self) -> Path | None:
        """The file, once training has begun."""
        return self._writer.log_path

    def on_train_begin(self, args: Any, state: Any, **kwargs: Any) -> None:
        logging_dir = getattr(args, "logging_dir", None)
        if logging_dir is None or not state.is_world_process_zero:
            return
        self._reported = ReportedOnce()
        self._writer.open(logging_dir, global_step=state.global_step)
        if self.kwargs and state.global_step == 0:
            self._writer.write_record(state.global_step, state.epoch, self.kwargs)

    def on_log(self, state: Any, logs: Mapping[str, Any], **kwargs: Any) -> None:
        self._write(state, self._reported.logged(state.global_step, logs))

    def on_evaluate(self, state: Any, metrics: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self._write(state, self._reported.evaluated(state.global_step, metrics or {}))

    def on_train_end(self, **kwargs: Any) -> None:
        self._writer.close()

    def close(self) -> None:
        """For a run that raises."""
        self._writer.close()

    def state_dict(self) -> dict[str, Any]:
        return self._writer.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        self._writer.load_state_dict(state_dict)

    def _write(self, state: Any, values: Mapping[str, Any]) -> None:
        if values:
            self._writer.write_record(state.global_step, state.epoch, values)


def _shape(record: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(record) - {"timestamp", "global_step", "epoch"}


def _until(global_step: int, records: list[Record]) -> list[Record]:
    """Those of a run that goes on from `global_step`. A summary at its very end is none: it did not end there."""
    return [
        record
        for record in records
        if (step := record.get("global_step", 0)) < global_step or (step == global_step and not is_summary(record))
    ]


def _first_timestamp(path: Path) -> float | None:
    """Of the first record, without reading the others."""
    with path.open(errors="replace") as file:
        head = file.read(4096)
    found = re.search(r'"timestamp": ([0-9.e+]+)', head)
    return float(found[1]) if found else None


def _numbered(path: Path) -> list[Path]:
    """The names that earlier runs' files were given, the latest first."""
    found = {}
    for each in path.parent.glob(f"{path.stem}-*{path.suffix}"):
        number = each.stem.removeprefix(f"{path.stem}-")
        if number.isdecimal():
            found[int(number)] = each
    return [found[number] for number in sorted(found, reverse=True)]


def _free_name(path: Path) -> Path:
    number = 1
    while (free := path.with_name(f"{path.stem}-{number}{path.suffix}")).exists():
        number += 1
    return free


def _vacate(path: Path) -> Path:
    """Renames an earlier run's file, unless it has no record."""
    if path.is_file() and not _is_empty(path):
        path.rename(_free_name(path))
    return path


def _is_empty(path: Path) -> bool:
    with path.open(errors="replace") as file:
        return file.read(4096).strip(" \n[]") == ""
