"""Reports of runs as one HTML file: curves, memory, norms, tables. A run that was killed has one, too."""

from __future__ import annotations

import os
from pathlib import Path

from ...errors import UsageError

__all__ = ["report"]


def report(
    run_dir: str | os.PathLike[str], *others: str | os.PathLike[str], to: str | os.PathLike[str] | None = None
) -> Path:
    """Write the report of a run, or of several runs laid over each other, as one HTML file.

    The report reads the files of JsonLogger (`trainer_logs.json` in the folder, its `logs`, or the latest below it, and
    `run_info.json`), GradNormLogger and ParameterNormLogger. Without logs it reads the latest checkpoint of Hugging
    Face's Trainer. The page loads nothing from elsewhere; point at a chart for its values.

    Args:
        run_dir: folder of the run, its output_dir or logging_dir.
        *others: folders of further runs to compare with it, 7 at most.
        to: the file, which is replaced; None means `report.html` in `run_dir`, or `comparison.html` for several runs.

    Returns:
        The path of the page.

    Raises:
        UsageError: a folder does not exist or has no run.
        OSError: the file cannot be written.

    Example:
        >>> from skyward.training import report
        >>> report("out/my-run").name  # doctest: +SKIP
        'report.html'
        >>> report("out/a", "out/b").name  # doctest: +SKIP
        'comparison.html'
    """
    from .charts import COLOURS
    from .comparison import comparison_of, labels_of
    from .document import write_document
    from .page import page_of
    from .records import read_run

    folders = [Path(folder) for folder in (run_dir, *others)]
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(
                f"run_dir={str(folder)!r}: is not a folder; pass the folder of a run, its output_dir or logging_dir"
            )
    if len(folders) > COLOURS:
        raise UsageError(f"others: {len(folders)} runs are too many for one page; pass at most {COLOURS} in all")
    if not others:
        named = folders[0].resolve()
        page = page_of(read_run(folders[0]), title=named.parent.name if named.name == "logs" else named.name)
        return write_document(to if to is not None else folders[0] / "report.html", page)
    page = comparison_of([(label, read_run(folder)) for label, folder in zip(labels_of(folders), folders, strict=True)])
    return write_document(to if to is not None else folders[0] / "comparison.html", page)
