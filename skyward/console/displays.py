"""Displays of tasks on this side: rich output of the notebook's cell; elsewhere their plain text, line by line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..core.records import dataclass
from ..values.displays import Display
from ..values.machine import LogLine


@dataclass(frozen=True, kw_only=True)
class DisplayLine(LogLine):
    """A display among the lines of a call. `text` is its plain form, of several lines."""

    display: Display

    def rows(self) -> list[LogLine]:
        """Return the plain form as lines, for readers that show nothing else."""
        fields = {name: getattr(self, name) for name in LogLine.__dataclass_fields__}
        line = LogLine(**fields)
        return [replace(line, text=text) for text in self.text.split("\n")]


def show_in_notebook(line: DisplayLine, label: str, write: Callable[[str], object]) -> None:
    """Publish a display below the cell that runs now, behind a line with its origin.

    Args:
        line: the display.
        label: its origin, such as `[node 0]`.
        write: prints a text on standard output, and flushes.
    """
    from IPython.display import publish_display_data  # only in a notebook

    publish: Any = publish_display_data
    display = line.display
    if not display.is_update:
        write(f"{label}\n")
    # Displays are named by tasks: with their origin, no task can replace an output that is not its own.
    name = f"skyward-{line.call}-{line.node}-{line.rank}-{line.restart_count}-{display.name}"
    publish(
        data=display.data,
        metadata={**display.metadata, "skyward": {"node": line.node, "rank": line.rank, "task": line.task}},
        transient={"display_id": name} if display.name else {},
        update=display.is_update,
    )
