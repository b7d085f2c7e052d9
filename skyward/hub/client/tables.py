"""Tables as artifacts, in the form of MLflow's `log_table`: `{"columns": [...], "data": [[...], ...]}`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import UsageError


def table_json(rows: Any) -> bytes:
    """Return a list of dicts, a dict of columns or a pandas DataFrame as JSON.

    Raises:
        UsageError: it is none of these, or its columns differ in length.
    """
    if hasattr(rows, "to_dict") and hasattr(rows, "columns"):
        rows = rows.to_dict("list")
    if isinstance(rows, Mapping):
        columns = {str(name): list(values) for name, values in rows.items()}
        if len({len(values) for values in columns.values()}) > 1:
            lengths = ", ".join(f"{name} {len(values)}" for name, values in columns.items())
            raise UsageError(f"rows=...: columns differ in length ({lengths}); give each the same number of values")
        table = {"columns": list(columns), "data": [list(row) for row in zip(*columns.values(), strict=True)]}
    elif isinstance(rows, Sequence) and all(isinstance(row, Mapping) for row in rows):
        names = list(dict.fromkeys(str(name) for row in rows for name in row))
        table = {"columns": names, "data": [[row.get(name) for name in names] for row in rows]}
    else:
        raise UsageError(f"rows={type(rows).__name__}: is not a table; pass a list of dicts or a dict of columns")
    return json.dumps(table, default=_plain).encode()


def _plain(value: Any) -> Any:
    if callable(getattr(value, "tolist", None)):  # numpy, torch
        return value.tolist()
    return str(value)
