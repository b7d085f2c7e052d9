"""How metrics are shown in text: columns of a row for each log, lines of a summary at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar, cast

from ...errors import UsageError

__all__ = ["FINAL_METRICS", "STEP_COLUMNS", "Column", "FinalMetric", "format_value", "merged"]

Format = str | Callable[[Any], str]
"""A format specification (".4f"; those of integers take floats too), "si" (12.3M), "gib" (of bytes), a function, or ""
for what suits the value's type. Of a list, such as a number for each rank, the greatest is shown."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """One metric of a row. label: as headed, the metric's key without one. width: in characters."""

    label: str = ""
    width: int = 10
    fmt: Format = ""


@dataclass(frozen=True, kw_only=True)
class FinalMetric:
    """One metric of the summary. suffix: behind the value, such as " s"."""

    label: str = ""
    fmt: Format = ""
    suffix: str = ""


STEP_COLUMNS: dict[str, Column] = {
    "epoch": Column(width=7, fmt=".4g"),
    "loss": Column(width=9, fmt=".5f"),
    "grad_norm": Column(label="grad", width=8, fmt=".4f"),
    "learning_rate": Column(label="lr", width=9, fmt=".2e"),
    "tokens": Column(width=10, fmt=",d"),
    "tok_per_sec": Column(label="tok/s", width=10, fmt=",d"),
    "mfu": Column(width=6, fmt=".1%"),
    "peak_mem_allocated": Column(label="peak_mem", width=10, fmt="gib"),
}

FINAL_METRICS: dict[str, FinalMetric] = {
    "train_runtime": FinalMetric(label="Runtime", fmt=".2f", suffix=" s"),
    "train_loss": FinalMetric(label="Mean loss", fmt=".5f"),
    "step": FinalMetric(label="Steps", fmt=",d"),
    "epoch": FinalMetric(label="Epochs", fmt=".6g"),
    "train_samples": FinalMetric(label="Samples", fmt=",d"),
    "train_samples_per_second": FinalMetric(label="Samples/s", fmt=".3f"),
    "train_steps_per_second": FinalMetric(label="Steps/s", fmt=".3f"),
    "num_input_tokens_seen": FinalMetric(label="Tokens", fmt=",d"),
    "train_tokens_per_second": FinalMetric(label="Tokens/s", fmt=",.0f"),
    "total_flos": FinalMetric(label="FLOPs", fmt=".3e"),
}

Spec = TypeVar("Spec")


def merged(what: str, defaults: Mapping[str, Spec], own: Mapping[str, Any] | None, kind: type[Spec]) -> dict[str, Spec]:
    """The defaults, with a user's on top: `{key: {field: value}}` changes or adds one, `{key: None}` takes one away.

    Raises: UsageError for a field that there is not.
    """
    found = dict(defaults)
    known = [field.name for field in fields(cast("Any", kind))]
    for key, value in (own or {}).items():
        if value is None:
            found.pop(key, None)
        elif isinstance(value, kind):
            found[key] = value
        elif isinstance(value, Mapping) and set(value) <= set(known):
            given = {each: getattr(found[key], each) for each in known} if key in found else {}
            found[key] = kind(**{**given, **value})
        else:
            raise UsageError(
                f"{what}[{key!r}] is {value!r}; give a dict with any of {', '.join(known)}, or None to leave it out"
            )
    return found


def format_value(value: Any, fmt: Format = "") -> str:
    """The value as text; one that the format does not fit, as it is."""
    if isinstance(value, list | tuple) and value and all(isinstance(item, int | float) for item in value):
        value = max(value)
    try:
        return _formatted(value, fmt)
    except (TypeError, ValueError, OverflowError):  # a format that does not fit the value: shown as it is
        return str(value)


def _formatted(value: Any, fmt: Format) -> str:
    if callable(fmt):
        return fmt(value)
    if fmt == "si":
        return _si(float(value))
    if fmt == "gib":
        return f"{float(value) / 2**30:.3f} GiB"
    if not fmt:
        fmt = ",d" if isinstance(value, int) else ".4g" if isinstance(value, float) else ""
    return format(int(value) if fmt[-1:] in set("bcdoxX") else value, fmt)


def _si(value: float) -> str:
    for unit in ("", "k", "M", "G", "T", "P"):
        if abs(value) < 1000:
            return f"{value:.4g}{unit}"
        value /= 1000
    return f"{value:.4g}E"
