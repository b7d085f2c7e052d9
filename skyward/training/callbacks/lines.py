"""Single lines on standard output that do not break a progress bar."""

from __future__ import annotations

import sys


def write_line(text: str) -> None:
    """Write `text` and a line feed to standard output, above any bar that tqdm draws there."""
    tqdm = sys.modules.get("tqdm")
    if tqdm is None:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    else:
        tqdm.tqdm.write(text, file=sys.stdout)
