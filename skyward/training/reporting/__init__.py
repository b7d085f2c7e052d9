"""A finished run, or one that was killed, as one HTML file: curves, memory, norms, tables."""

from __future__ import annotations

import os
from pathlib import Path

from ...errors import UsageError

__all__ = ["report"]


def report(run_dir: str | os.PathLike[str], *, to: str | os.PathLike[str] | None = None) -> Path:
    """Writes the report of the run in `run_dir`, and gives its path.

    It reads what JsonLogger wrote (`trainer_logs.json`, in the folder, its `logs`, or the latest below it) and, beside
    it, what GradNormLogger and ParameterNormLogger did; without such a file, the log history in the latest checkpoint
    of Hugging Face's Trainer. The page needs nothing else: it loads nothing, and its values can be pointed at.

    to: the file; None: `report.html` in `run_dir`. A file that is there is replaced.

    Raises: UsageError where there is no run; OSError where the file cannot be written.

    Example:
        >>> from skyward.training import report
        >>> report("out/my-run").name  # doctest: +SKIP
        'report.html'
    """
    from .document import write_document
    from .page import page_of
    from .records import read_run

    folder = Path(run_dir)
    if not folder.is_dir():
        raise UsageError(f"report: {folder} is no folder; give that of a run, its output_dir or logging_dir")
    file = Path(to) if to is not None else folder / "report.html"
    named = folder.resolve()
    page = page_of(read_run(folder), title=named.parent.name if named.name == "logs" else named.name)
    return write_document(file, page)
