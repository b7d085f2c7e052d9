"""Best evaluation of a run: its weights on disk, and early stopping."""

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

Save = Callable[[Any, Path], None]
"""(state, path) -> None; writes a state to a path that does not exist yet."""


class BestModel:
    """Keep the weights of the best evaluation on disk.

    The file has the weights that were scored, not those that training has reached by then. It is complete or absent at
    every instant. `<path>.json` beside it is the record, written after it. A metric that is NaN is never the best; the
    first number is better than none.

    Args:
        path: the file. ".safetensors" and ".npz" (of lists of arrays) select these formats, other suffixes torch.save.
        metric: name of the metric in the result of `eval_fn`, with or without a leading "eval_" or "val_".
        greater_is_better: direction of the metric; None means True, unless the name ends in "loss", "perplexity",
            "error", "mse" or "mae".
        save: (state, path) -> None, for another format. It runs in a background thread.

    Example:
        >>> best = BestModel("out/best.safetensors", "accuracy")
        >>> best.greater_is_better, best.record
        (True, None)
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
        """Record of the weights in the file; None before the first."""
        return self._record

    @property
    def value(self) -> float | None:
        """Value of the metric in `record`; None before the first."""
        return self._value

    def offer(self, record: EvaluationRecord, state: Any) -> bool:
        """Write `state` if its record is the best so far.

        Callable from any thread; takes as long as writing.

        Args:
            record: the evaluation of `state`.
            state: the weights that were scored.

        Returns:
            Whether it was the best and the file was written.

        Raises:
            UsageError: the record has no such metric, or it is not a number.
            OSError: the file cannot be written.
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
                        f"metric={self.metric!r}: {name} is {metrics[name]!r} at step {record.step}, not a number; "
                        "use the name of a number"
                    ) from None
        returned = ", ".join(metrics) or "nothing"
        raise UsageError(
            f"metric={self.metric!r}: eval_fn returned no such metric; use one that it returns ({returned})"
        )

    def _write_record(self, record: EvaluationRecord) -> None:
        place = self.path.with_name(f"{self.path.name}.json")
        written = place.with_name(f".{place.name}.new")
        written.write_text(json.dumps(asdict(record), indent=1, default=str))
        os.replace(written, place)


@dataclass(kw_only=True)
class BestValue:
    """Best value of a metric so far; None before the first."""

    metric: str = field(kw_only=False)
    is_greater: bool
    value: float | None = None

    def note(self, metrics: Mapping[str, Any]) -> None:
        """Take the metric's value if it is a number and better."""
        value = metrics.get(self.metric)
        if isinstance(value, int | float) and is_better(value, self.value, is_greater=self.is_greater):
            self.value = value


class EarlyStopping:
    """Tell training to stop when a metric has not improved in `patience` evaluations in a row.

    Late, skipped and failed records are ignored. NaN is never better.

    Args:
        metric: name of the metric, with or without a leading "eval_".
        patience: evaluations without improvement, at least 1.
        threshold: smallest improvement that counts, at least 0.
        greater_is_better: direction of the metric; None means by its name.
    """

    def __init__(
        self, metric: str, *, patience: int, threshold: float = 0.0, greater_is_better: bool | None = None
    ) -> None:
        self._metric, self._patience, self._threshold = metric, patience, threshold
        self._is_greater = is_greater_better(metric) if greater_is_better is None else greater_is_better
        self._best: float | None = None
        self._worse = 0

    def observe(self, record: EvaluationRecord) -> bool:
        """Note a record; return whether training should stop."""
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
    """Return whether `value` is better by more than `by`; a number is better than None, NaN never is."""
    if math.isnan(value) or than is None:
        return not math.isnan(value)
    return (value - than if is_greater else than - value) > by


def is_greater_better(metric: str) -> bool:
    """Return the direction that a metric's name suggests."""
    return not metric.endswith(("loss", "perplexity", "error", "mse", "mae"))


def _save(state: Any, path: Path) -> None:
    if path.suffix == ".safetensors":
        from safetensors.torch import save_file

        seen: set[int] = set()
        tensors = {}
        for name, value in state.items():
            # safetensors cannot store two names of one tensor, so the second name gets a copy.
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
