"""Collation of rows into a batch, without the columns that the model does not take."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import default_collate

from ...errors import UsageError

LABELS = ("label", "label_ids", "labels")


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Columns that a model's forward takes."""

    names: frozenset[str] | None
    """Columns except labels. None: any."""
    labels: frozenset[str]
    """Columns that may hold labels."""
    who: str
    """Class of the trainer, for messages."""
    model: str
    """Name of the model, for messages."""

    @classmethod
    def of(cls, model: nn.Module, label_names: Sequence[str] | None, *, who: str, called: str = "") -> Inputs:
        """Read the columns from the signature of the model's forward."""
        taken, labels = columns_of(model, label_names), frozenset({*LABELS, *(label_names or ())})
        names = None if taken is None else taken - labels
        name = type(model).__name__
        return cls(names=names, labels=labels, who=who, model=f"{called} ({name})" if called else name)

    def check(self, batch: Mapping[str, Any]) -> None:
        """Check that at least one column of a row or batch reaches the model.

        Raises:
            UsageError: none does.
        """
        columns = set(batch) - self.labels
        if not self.names or not columns or columns & self.names:
            return
        raise UsageError(
            f"{self.who}: columns={[str(name) for name in batch]}: {self.model} takes {sorted(self.names)}, so none of "
            "them would reach it; name the columns in the model's forward, use a data set of tuples, which are passed "
            "by position, or set remove_unused_columns=False and select the columns yourself"
        )


class Collator:
    """Collator that drops the columns that the model does not take, then calls the user's collator or `stack`.

    It can be pickled if `collate` can, because worker processes of data loaders receive it.

    Args:
        collate: the user's collator; None: `stack`.
        columns: columns to keep; None: all.
        inputs: columns of which each row must have at least one.

    Raises:
        UsageError: a row has none of the inputs.
    """

    def __init__(
        self, collate: Callable[[list[Any]], Any] | None, columns: frozenset[str] | None, inputs: Inputs
    ) -> None:
        self._collate = collate or stack
        self._columns, self._inputs = columns, inputs

    def __call__(self, rows: list[Any]) -> Any:
        columns = self._columns
        if columns is not None and rows and isinstance(rows[0], Mapping):
            self._inputs.check(rows[0])
            rows = [{name: value for name, value in row.items() if name in columns} for row in rows]
        return self._collate(rows)


def stack(rows: list[Any]) -> Any:
    """Stack rows as torch's `default_collate` does, with two additions for rows of tokenizers.

    A column of lists of numbers, such as token ids, becomes one tensor. A column `label` or `label_ids` is renamed to
    `labels`, the name that models take.
    """
    if rows and isinstance(rows[0], Mapping):
        rows = [{name: _as_tensor(value) for name, value in row.items()} for row in rows]
    batch = default_collate(rows)
    if isinstance(batch, dict):
        for name in ("label", "label_ids"):
            if name in batch and "labels" not in batch:
                batch["labels"] = batch.pop(name)
    return batch


def _as_tensor(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    try:
        return torch.tensor(value)
    except (TypeError, ValueError):  # text, or rows of different lengths; default_collate handles or refuses them
        return value


def columns_of(model: nn.Module, label_names: Sequence[str] | None) -> frozenset[str] | None:
    """Return the columns that the model's forward takes, and labels; None if it takes any."""
    parameters = inspect.signature(model.forward).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if takes_all and not hasattr(model, "config"):  # Hugging Face's models have **kwargs, but not for columns
        return None
    return frozenset({*parameters, *LABELS, *(label_names or ())})
