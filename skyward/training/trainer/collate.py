"""From rows to a batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import default_collate

from ...errors import UsageError

__all__ = ["Collator", "Inputs", "columns_of"]

LABELS = ("label", "label_ids", "labels")


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a model's forward takes but for labels: `names`, None where it takes anything. who, model: for messages."""

    names: frozenset[str] | None
    labels: frozenset[str]
    who: str
    model: str

    @classmethod
    def of(cls, model: nn.Module, label_names: Sequence[str] | None, *, who: str, called: str = "") -> Inputs:
        taken, labels = columns_of(model, label_names), frozenset({*LABELS, *(label_names or ())})
        names = None if taken is None else taken - labels
        name = type(model).__name__
        return cls(names=names, labels=labels, who=who, model=f"{called} ({name})" if called else name)

    def check(self, batch: Mapping[str, Any]) -> None:
        """Raises: UsageError where nothing of a row or batch would reach the model."""
        given = set(batch) - self.labels
        if not self.names or not given or given & self.names:
            return
        raise UsageError(
            f"{self.who}: columns={[str(name) for name in batch]}: {self.model} takes {sorted(self.names)}, so none of "
            "them would reach it; give a module whose forward names the columns, or a data set of tuples, which go by "
            "position (remove_unused_columns=False leaves the columns to your own code)"
        )


class Collator:
    """Leaves out the columns that the model does not take, then stacks rows, or does what the user's collator does.

    inputs: what rows must have something of. Can be pickled if `collate` can: data loaders' workers have it.

    Raises: UsageError for rows that have none of the inputs.
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
    """As torch does it, but a column of lists of numbers becomes one tensor: token ids, as tokenizers give them. A
    column `label` or `label_ids` becomes `labels`, which models take.
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
    """A list of numbers as a tensor; what is none as it is."""
    if not isinstance(value, list):
        return value
    try:
        return torch.tensor(value)
    except (TypeError, ValueError):  # texts, or rows of different lengths: for the collator of torch
        return value


def columns_of(model: nn.Module, label_names: Sequence[str] | None) -> frozenset[str] | None:
    """What the model's forward takes, and labels; None where it takes anything."""
    parameters = inspect.signature(model.forward).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if takes_all and not hasattr(model, "config"):  # Hugging Face's models take **kwargs, but no further columns
        return None
    return frozenset({*parameters, *LABELS, *(label_names or ())})
