"""Logs as a JSON array: `trainer_logs.json`, and a writer for similar files.

A record is an object with `timestamp` (seconds since 1970, UTC), `global_step`, `epoch` and the logged values. The file
can be read by `json.load` at any time; see `jsonarray`.

A resumed run continues its own file, cut at the *checkpoint's* step, because later steps are logged again. The
checkpoint stores the timestamp of the file's first record, which identifies the file. A new run in a folder with an
existing file takes the name: the old file is renamed to `<name>-1.json` (2, 3, ...) and found there if its run resumes.
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
from .run_info import write_run_info

_log = logging.getLogger(__name__)

Record = dict[str, Any]


class JsonLogWriter:
    """Write records to a JSON array that resumed runs continue.

    The writer is stateful: save its `state_dict()` in checkpoints, and call `load_state_dict` before `open` in a run
    that resumes. Use it from one thread.

    Args:
        filename: name of the file in the folder that `open` gets.

    Example:
        >>> import json, tempfile
        >>> writer = JsonLogWriter("norms.json")
        >>> writer.open(tempfile.mkdtemp(), global_step=0)
        >>> writer.write_record(10, 0.5, {"norm": 1.25})
        >>> json.loads(writer.log_path.read_text())[0]["norm"]
        1.25
        >>> writer.close()
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
        """Return whether a file is open."""
        return self._array is not None

    def open(self, logging_dir: str | Path, *, global_step: int = 0) -> None:
        """Open the file for more records and create its folder.

        Args:
            logging_dir: folder of the file.
            global_step: the run's first step, that is the step of the checkpoint it resumes from. Records of later
                steps are dropped.

        Raises:
            OSError: the file cannot be read or written.
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
        """Add a record; it is in the file when this returns. Does nothing if no file is open.

        A record that cannot be written now (full disk) is written together with the next one; the first failure is
        logged as a warning. A record that the file already has, because the run was cut at its step, is left out.

        Args:
            global_step: the step that the record belongs to.
            epoch: the epoch, or None.
            data: values of the record; tensors and numpy values become numbers.
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
        """Write pending records and close the file. Idempotent."""
        array, self._array = self._array, None
        if array is not None:
            self._flush(array)
            array.close()
        self._unwritten.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the file's identity, after syncing the file: a checkpoint is about to rely on it."""
        if self._array is not None:
            self._array.sync()
        path = None if self.log_path is None else str(self.log_path.resolve())
        return {"log_path": path, "last_step": self._last_step, "started": self._started}

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        self._loaded = dict(state_dict)

    # Internals -------------------------------------------------------------------------------------------------------

    def _flush(self, array: JsonArray) -> None:
        try:
            while self._unwritten:
                array.append(self._unwritten[0])
                self._unwritten.popleft()
        except OSError as error:
            if len(self._unwritten) == 1:
                _log.warning("%s: cannot write now (%s); keeping records in memory", array.path, error)

    def _resume(self, wanted: Path, global_step: int) -> list[Record]:
        """Return the records to keep, and set `log_path` if the run continues its own file."""
        self.log_path = None
        if self._loaded is None:
            return self._continue_unknown(wanted, global_step) if global_step > 0 and wanted.is_file() else []
        named = self._loaded.get("log_path")
        if not named or self._loaded.get("started", 0) is None:
            return []  # the checkpoint is older than the first record, so everything is logged again
        path = self._own_file(Path(named), wanted)
        if path is None:
            _log.warning("%s: the resumed run's log is missing; starting a new one in %s", named, wanted)
            return []
        if is_being_written(path):
            _log.warning("%s: another process is writing it; this run continues in a copy", path)
            return _until(global_step, self._read(path))
        self.log_path = path
        return _until(global_step, self._read(path))

    def _continue_unknown(self, wanted: Path, global_step: int) -> list[Record]:
        """Return the records to keep for a checkpoint that has no state of this writer.

        The file is most likely this run's. If records would be dropped, it is copied instead, so that nothing is lost
        in case it belongs to another run.
        """
        records = self._read(wanted)
        kept = _until(global_step, records)
        if len(kept) == len(records) and not is_being_written(wanted):
            self.log_path = wanted
        return kept

    def _own_file(self, named: Path, wanted: Path) -> Path | None:
        """Find this run's file, and rename it back if a later run took its name."""
        assert self._loaded is not None
        started = self._loaded.get("started")
        if "started" not in self._loaded:
            return named if named.is_file() else None
        for place in dict.fromkeys((named, wanted)):
            for path in (place, *_numbered(place)):
                if path.is_file() and _first_timestamp(path) == started:
                    if path != place and not is_being_written(place):
                        _vacate(place)
                        path.rename(place)
                        return place
                    return path
        return None

    def _read(self, path: Path) -> list[Record]:
        try:
            return read_records(path)
        except ValueError as error:
            backup = path.with_name(f"{path.name}.bak")
            path.rename(backup)
            records = salvage(backup)
            _log.warning("%s: damaged (%s); kept as %s, recovered %d records", path, error, backup, len(records))
            return records


class JsonLogger(TrainerCallback):
    """Write logs and evaluations of a run to `trainer_logs.json` in `args.logging_dir`.

    The file is a JSON array that can be read at any time. `run_info.json` beside it has the run's arguments (secrets
    masked), versions and machine, for the report. Without a logging_dir the callback does nothing.

    Args:
        **kwargs: facts about the whole run (its name, its configuration), written as a record of their own at the
            start.

    Example:
        >>> JsonLogger(name="tiny", learning_rate=3e-4).kwargs["name"]
        'tiny'
    """

    runs_on = "rank_zero"
    on_error = "disable"

    def __init__(self, **kwargs: Any) -> None:
        self.kwargs = kwargs
        self._writer = JsonLogWriter("trainer_logs.json")
        self._reported = ReportedOnce()

    @property
    def log_path(self) -> Path | None:
        """Path of the file, or None before training begins."""
        return self._writer.log_path

    def on_train_begin(self, args: Any, state: Any, **kwargs: Any) -> None:
        logging_dir = getattr(args, "logging_dir", None)
        if logging_dir is None or not state.is_world_process_zero:
            return
        self._reported = ReportedOnce()
        self._writer.open(logging_dir, global_step=state.global_step)
        self._write_run_info(args, kwargs.get("ranks"))
        if self.kwargs and state.global_step == 0:
            self._writer.write_record(state.global_step, state.epoch, self.kwargs)

    def on_log(self, state: Any, logs: Mapping[str, Any], **kwargs: Any) -> None:
        self._write(state, self._reported.logged(state.global_step, logs))

    def on_evaluate(self, state: Any, metrics: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self._write(state, self._reported.evaluated(state.global_step, metrics or {}))

    def on_train_end(self, **kwargs: Any) -> None:
        self._writer.close()

    def close(self) -> None:
        """Close the file; also called when a run raises."""
        self._writer.close()

    def state_dict(self) -> dict[str, Any]:
        return self._writer.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        self._writer.load_state_dict(state_dict)

    def _write_run_info(self, args: Any, ranks: Any) -> None:
        path = self.log_path
        # A run whose log has another name shares the folder with a run that is alive, whose facts stay.
        if path is None or path.name != self._writer.filename:
            return
        try:
            write_run_info(path.parent, args, ranks)
        except OSError as error:  # the logs are worth more than the facts about the run
            _log.warning("%s: cannot write the facts about this run: %s", path.parent, error)

    def _write(self, state: Any, values: Mapping[str, Any]) -> None:
        if values:
            self._writer.write_record(state.global_step, state.epoch, values)


def _shape(record: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(record) - {"timestamp", "global_step", "epoch"}


def _until(global_step: int, records: list[Record]) -> list[Record]:
    """Return the records up to `global_step`, without a summary at that step: the resumed run did not end there."""
    return [
        record
        for record in records
        if (step := record.get("global_step", 0)) < global_step or (step == global_step and not is_summary(record))
    ]


def _first_timestamp(path: Path) -> float | None:
    """Return the first record's timestamp without reading the rest."""
    with path.open(errors="replace") as file:
        head = file.read(4096)
    match = re.search(r'"timestamp": ([0-9.e+]+)', head)
    return float(match[1]) if match else None


def _numbered(path: Path) -> list[Path]:
    """Return the files of earlier runs under this name, newest first."""
    by_number = {}
    for file in path.parent.glob(f"{path.stem}-*{path.suffix}"):
        number = file.stem.removeprefix(f"{path.stem}-")
        if number.isdecimal():
            by_number[int(number)] = file
    return [by_number[number] for number in sorted(by_number, reverse=True)]


def _free_name(path: Path) -> Path:
    number = 1
    while (free := path.with_name(f"{path.stem}-{number}{path.suffix}")).exists():
        number += 1
    return free


def _vacate(path: Path) -> Path:
    """Rename an earlier run's file out of the way, unless it has no record."""
    if path.is_file() and not _is_empty(path):
        path.rename(_free_name(path))
    return path


def _is_empty(path: Path) -> bool:
    with path.open(errors="replace") as file:
        return file.read(4096).strip(" \n[]") == ""
