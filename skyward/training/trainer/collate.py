"""From rows to a batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import default_collate

__all__ = ["Collator", "columns_of"]


class Collator:
    """Leaves out the columns that the model does not take, then stacks rows, or does what the user's collator does.

    Can be pickled if that can: data loaders' workers have it.
    """

    def __init__(self, collate: Callable[[list[Any]], Any] | None, columns: frozenset[str] | None) -> None:
        self._collate = collate or stack
        self._columns = columns

    def __call__(self, rows: list[Any]) -> Any:
        columns = self._columns
        if columns is not None and rows and isinstance(rows[0], Mapping):
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
    except (TypeError, ValueError):
        return value


def columns_of(model: nn.Module, label_names: Sequence[str] | None) -> frozenset[str] | None:
    """What the model's forward takes, and labels; None where it takes anything."""
    parameters = inspect.signature(model.forward).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    if takes_all and not hasattr(model, "config"):  # Hugging Face's models take **kwargs, but no further columns
        return None
    return frozenset({*parameters, "label", "label_ids", "labels", *(label_names or ())})
