"""Lines for whoever watches a run's output, between the rows and bars of its progress."""

from __future__ import annotations

import sys

__all__ = ["write_line"]


def write_line(text: str) -> None:
    """Writes `text` and a line feed to standard output; bars that tqdm draws there move below it."""
    tqdm = sys.modules.get("tqdm")
    if tqdm is None:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    else:
        tqdm.tqdm.write(text, file=sys.stdout)
