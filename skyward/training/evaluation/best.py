"""The best score of a run: the weights that have it, and whether training should stop because none is better."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ...errors import UsageError
from .records import EvaluationRecord

__all__ = ["BestModel", "BestValue", "EarlyStopping", "is_better", "is_greater_better"]

Save = Callable[[Any, Path], None]
"""(state, path) -> None: writes a state to a path that does not exist yet."""


class BestModel:
    """Writes the weights of an evaluation whose metric is better than all before: those that were scored, not those
    that training has when the score comes.

    The file is whole or not there, at every instant; `<path>.json` beside it is the record, written after it. A metric
    that is no number, or NaN, is never the best; the first one counts as better than none.

    Args:
        path: ".safetensors" and ".npz" (of lists of arrays) are written as such, everything else by torch.save.
        metric: its name in what `eval_fn` returns, with or without a leading "eval_" or "val_".
        greater_is_better: None: yes, unless the name ends in "loss", "perplexity" or "error".
        save: (state, path) -> None, for formats of your own. It runs in the background.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        metric: str,
        *,
        greater_is_better: bool | None = None,
        save: Save | None = None,
    ) -> None:
        self.path, self.metric = Path(path), metric
        self.greater_is_better = is_greater_better(metric) if greater_is_better is None else greater_is_better
        self._save = save or _save
        self._record: EvaluationRecord | None = None
        self._value: float | None = None
        self._lock = threading.Lock()

    @property
    def record(self) -> EvaluationRecord | None:
        """Of the weights in the file; None before the first."""
        return self._record

    @property
    def value(self) -> float | None:
        """Of the metric in `record`."""
        return self._value

    def offer(self, record: EvaluationRecord, state: Any) -> bool:
        """Writes `state` if its record is the best so far. Any thread; takes as long as writing does.

        Raises: UsageError, when the record has no such metric; OSError.
        """
        value = self._metric_of(record)
        with self._lock:
            if not is_better(value, self._value, is_greater=self.greater_is_better):
                return False
            self.path.parent.mkdir(parents=True, exist_ok=True)
            written = self.path.with_name(f".{self.path.stem}.{os.getpid()}.new{self.path.suffix}")
            try:
                self._save(state, written)
                _sync(written)
                os.replace(written, self.path)
            finally:
                written.unlink(missing_ok=True)
            self._record, self._value = record, value
            self._write_record(record)
            _sync(self.path.parent)
        return True

    def _metric_of(self, record: EvaluationRecord) -> float:
        metrics = record.metrics
        bare = self.metric.removeprefix("eval_").removeprefix("val_")
        for name in (self.metric, f"eval_{bare}", f"val_{bare}", bare):
            if name in metrics:
                try:
                    return float(metrics[name])
                except (TypeError, ValueError):
                    raise UsageError(
                        f"metric: {name} is {metrics[name]!r} at step {record.step}; give the name of a number"
                    ) from None
        raise UsageError(f"metric: eval_fn returned no {self.metric!r}; it returned {', '.join(metrics) or 'nothing'}")

    def _write_record(self, record: EvaluationRecord) -> None:
        place = self.path.with_name(f"{self.path.name}.json")
        written = place.with_name(f".{place.name}.new")
        written.write_text(json.dumps(asdict(record), indent=1, default=str))
        os.replace(written, place)


@dataclass(kw_only=True)
class BestValue:
    """The best value of a metric so far; None before the first."""

    metric: str = field(kw_only=False)
    is_greater: bool
    value: float | None = None

    def note(self, metrics: Mapping[str, Any]) -> None:
        """Take the metric's value where it is a number and better."""
        value = metrics.get(self.metric)
        if isinstance(value, int | float) and is_better(value, self.value, is_greater=self.is_greater):
            self.value = value


class EarlyStopping:
    """Says to stop when a metric has not become better in `patience` evaluations in a row.

    Records that are late, skipped or failed count for nothing. NaN is never better.

    Args:
        patience: >= 1.
        threshold: how much better is better, >= 0.
    """

    def __init__(
        self, metric: str, *, patience: int, threshold: float = 0.0, greater_is_better: bool | None = None
    ) -> None:
        self._metric, self._patience, self._threshold = metric, patience, threshold
        self._is_greater = is_greater_better(metric) if greater_is_better is None else greater_is_better
        self._best: float | None = None
        self._worse = 0

    def observe(self, record: EvaluationRecord) -> bool:
        """True: stop."""
        value = record.metrics.get(self._metric, record.metrics.get(self._metric.removeprefix("eval_")))
        if record.status != "ok" or value is None:
            return False
        value = float(value)
        if is_better(value, self._best, is_greater=self._is_greater, by=self._threshold):
            self._best, self._worse = value, 0
        else:
            self._worse += 1
        return self._worse >= self._patience

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best, "worse": self._worse}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self._best, self._worse = state_dict["best"], state_dict["worse"]


def is_better(value: float, than: float | None, *, is_greater: bool, by: float = 0.0) -> bool:
    """Whether a value is better than another by more than a threshold. A number is better than None; NaN never is."""
    if math.isnan(value) or than is None:
        return not math.isnan(value)
    return (value - than if is_greater else than - value) > by


def is_greater_better(metric: str) -> bool:
    """What a metric's name says."""
    return not metric.endswith(("loss", "perplexity", "error", "mse", "mae"))


def _save(state: Any, path: Path) -> None:
    if path.suffix == ".safetensors":
        from safetensors.torch import save_file

        seen: set[int] = set()
        tensors = {}
        for name, value in state.items():
            # Two names of one tensor: the format has no way to say that.
            is_again = value.data_ptr() in seen and value.numel() > 0
            tensors[name] = value.clone() if is_again else value.contiguous()
            seen.add(value.data_ptr())
        save_file(tensors, path)
    elif path.suffix == ".npz":
        import numpy as np

        np.savez(path, **({str(at): item for at, item in enumerate(state)} if isinstance(state, list) else state))
    else:
        import torch

        torch.save(state, path)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
