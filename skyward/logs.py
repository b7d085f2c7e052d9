"""How the output of calls is shown here: one line as it comes, with its origin in front."""

from __future__ import annotations

import sys

from .machine import LogLine, LogSink

__all__ = ["printer"]


def printer() -> LogSink:
    """A sink that writes to this process's sys.stdout and sys.stderr of the moment (a notebook replaces them)."""

    def show(line: LogLine) -> None:
        origin = f"node {line.node}" if line.rank is None else f"node {line.node} rank {line.rank}"
        stream = sys.stdout if line.stream == "stdout" else sys.stderr
        try:
            stream.write(f"[{origin}] {line.text}\n")
            stream.flush()
        except (OSError, ValueError):
            return  # closed by the user; there is nowhere to say so

    return show
