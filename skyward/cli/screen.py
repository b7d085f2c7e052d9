"""Tables, JSON and questions, as the subcommands show them."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ..console.words import columns
from ..core.printable import printable


def table(
    header: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[int] = (), width: int | None = None
) -> list[str]:
    """Lines, each column as wide as its widest cell; the columns in `right` stand to the right.

    A table that is wider than `width`, by default the terminal, has a few lines for each row instead.

    >>> table(("name", "usd"), [("a", "1"), ("bcd", "20")], right=[1])
    ['NAME  USD', 'a       1', 'bcd    20']
    >>> table(("name", "usd", "age"), [("a", "1", "-"), ("bcd", "20", "3 s")], width=12)
    ['a', '  usd 1', 'bcd', '  usd 20,', '  age 3 s']
    """
    cells = [[title.upper() for title in header], *([printable(str(cell)) for cell in row] for row in rows)]
    widths = [max(columns(row[n]) for row in cells) for n in range(len(header))]
    if width is None and sys.stdout.isatty():
        width = os.get_terminal_size(sys.stdout.fileno()).columns
    if width and sum(widths) + 2 * (len(widths) - 1) > width:
        return [line for row in cells[1:] for line in _record(header, row, width)]
    lines = []
    for row in cells:
        padded = []
        for n, cell in enumerate(row):
            space = " " * (widths[n] - columns(cell))
            padded.append(space + cell if n in right else cell + space)
        lines.append("  ".join(padded).rstrip())
    return lines


def _record(header: Sequence[str], row: Sequence[str], width: int) -> Iterator[str]:
    """Yield a row of a table as lines: its first cell, then the others with their titles, except the empty ones."""
    yield row[0]
    line = " "
    for title, cell in zip(header[1:], row[1:], strict=True):
        if cell in ("", "-"):
            continue
        fact = f" {title} {cell}"
        if line.strip() and columns(line) + columns(fact) + 1 > width:
            yield line
            line = " "
        line += fact + ","
    if line.strip():
        yield line.removesuffix(",")


def as_json(value: Any) -> str:
    """Format a value as JSON. Dataclasses become objects.

    >>> as_json(b"ssh-ed25519 AAAA")
    '"ssh-ed25519 AAAA"'
    """
    return json.dumps(value, default=_plain, indent=2)


def complain(error: object, *, of: str = "") -> None:
    """Write an error as every command does: its message, and the name of its page where it has one.

    of: what the error belongs to, if a command does several things.
    """
    subject = f"{of}: " if of else ""
    page = getattr(error, "page", "")
    print(f"skyward: {subject}{error}{f' [{page}]' if page else ''}", file=sys.stderr)


def is_sure(action: str, question: str) -> bool:
    """Ask whether to go on with what cannot be undone. Without a terminal the answer is no, and says so.

    action: what would be done, such as "end train".
    """
    if not sys.stdin.isatty():
        print(f"skyward: this would {action}; give --yes where nobody can be asked", file=sys.stderr)
        return False
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:  # the end of the input is no consent
        return False


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, dict | set | frozenset | tuple) or hasattr(value, "keys"):
        return dict(value) if hasattr(value, "keys") else list(value)
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
