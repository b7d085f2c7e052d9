"""Parts of HTML pages that need no network and no library. Every text is escaped here."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Container, Iterable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any


def document(title: str, body: Iterable[str], *, style: str, script: str, data: Any = None) -> str:
    """Return the whole page from parts in HTML, of which empty ones are left out; the script finds `data` as JSON."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>",
            *(part for part in body if part),
            '</main>\n<div id="tip"></div>',
            *([] if data is None else [f'<script type="application/json" id="data">{text}</script>']),
            f"<script>\n{script}</script>\n</body>\n</html>\n",
        ]
    )


def write_document(path: str | os.PathLike[str], text: str) -> Path:
    """Write the file, complete or not at all, and create the folders above it; raise OSError if that fails."""
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)
    return file


def asset(package: str, name: str) -> str:
    """Return the text of a style sheet or script in a package."""
    return files(package).joinpath(name).read_text(encoding="utf-8")


def tiles(values: Iterable[tuple[str, str]]) -> str:
    """Return the most important values side by side, each with its name."""
    shown = (f'<div class="tile"><span class="soft">{escape(n)}</span><b>{escape(v)}</b></div>' for n, v in values)
    return f'<div class="tiles">{"".join(shown)}</div>'


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, best: Container[tuple[int, int]] = ()) -> str:
    """Return a card with a table. `best` has the (row, column) of cells to emphasize."""
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join(
        "<tr>"
        + "".join(
            f'<td class="best">{escape(cell)}</td>' if (at, column) in best else f"<td>{escape(cell)}</td>"
            for column, cell in enumerate(row)
        )
        + "</tr>\n"
        for at, row in enumerate(rows)
    )
    return f'<div class="card"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def legend(kinds: Iterable[tuple[str, str]]) -> str:
    """Return a legend of (class in the style sheet, name)."""
    shown = (f'<span><i class="{kind}"></i>{escape(name)}</span>' for kind, name in kinds)
    return f'<div class="legend">{"".join(shown)}</div>'


def svg(parts: Iterable[str], size: str, label: str) -> str:
    """Return a picture; `size` holds the attributes for its size."""
    return f'<svg {size} role="img" aria-label="{escape(label, quote=True)}">{"".join(parts)}</svg>'


def round_ticks(low: float, high: float, about: int) -> list[float]:
    """Return about `about` round numbers from low to high."""
    span = high - low
    if not span > 0:
        return [low]
    rough = span / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [at * step for at in range(first, first + about * 3) if at * step <= high + step * 1e-9]
