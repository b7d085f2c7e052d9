"""Metrics as text: the columns of a log row and the lines of the final summary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar, cast

from ...errors import UsageError

Format = str | Callable[[Any], str]
"""Rule that turns a value into text.

A format specification (".4f"; integer types such as ",d" accept floats), "si" (12.3M), "gib" (bytes as GiB), a function
of the value, or "" for a default by type. A list, such as one number per rank, is shown as its maximum.
"""


@dataclass(frozen=True, kw_only=True)
class Column:
    """One metric of a log row.

    Args:
        label: the heading; empty means the metric's key.
        width: characters.
        fmt: how the value is shown.
    """

    label: str = ""
    width: int = 10
    fmt: Format = ""


@dataclass(frozen=True, kw_only=True)
class FinalMetric:
    """One metric of the final summary.

    Args:
        label: the line's name; empty means the metric's key.
        fmt: how the value is shown.
        suffix: text after the value, such as " s".
    """

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


def merged(
    argument: str, defaults: Mapping[str, Spec], overrides: Mapping[str, Any] | None, kind: type[Spec]
) -> dict[str, Spec]:
    """Merge a user's overrides into the default specs.

    `{key: {field: value}}` changes or adds a spec, `{key: None}` removes one.

    Args:
        argument: the argument that `overrides` came from, for the error.
        defaults: the specs to begin with; not modified.
        overrides: the user's changes, or None for none.
        kind: the dataclass of a spec.

    Raises:
        UsageError: an override is neither a spec, a dict of its fields, nor None.
    """
    specs = dict(defaults)
    legal = [field.name for field in fields(cast("Any", kind))]
    for key, value in (overrides or {}).items():
        if value is None:
            specs.pop(key, None)
        elif isinstance(value, kind):
            specs[key] = value
        elif isinstance(value, Mapping) and set(value) <= set(legal):
            current = {name: getattr(specs[key], name) for name in legal} if key in specs else {}
            specs[key] = kind(**{**current, **value})
        else:
            raise UsageError(
                f"{argument}[{key!r}]={value!r}: must be a dict with any of {', '.join(legal)}; "
                f"pass such a dict, or None to remove {key!r}"
            )
    return specs


def format_value(value: Any, fmt: Format = "") -> str:
    """Return the value as text; fall back to `str(value)` where the format does not fit it."""
    if isinstance(value, list | tuple) and value and all(isinstance(item, int | float) for item in value):
        value = max(value)
    try:
        return _formatted(value, fmt)
    except (TypeError, ValueError, OverflowError):  # a user's format must not end a run
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
