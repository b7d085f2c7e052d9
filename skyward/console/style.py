"""Renditions of text that a terminal shows: colours, bars and marks, with plain ones where it shows less."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ..core.records import dataclass

_NODE_COLOURS = (31, 133, 71, 136, 68, 37, 97, 101)
"""Of xterm's 256 colours: tones that stand out from black and from white alike. Red is left to failures."""
_BASIC_COLOURS = (36, 35, 32, 33, 34)

_MARKS: dict[str, tuple[str, str, tuple[int, ...]]] = {
    "waiting": ("○", "o", (2,)),
    "coming": ("◐", "o", (33,)),
    "ready": ("●", "*", (32,)),
    "idle": ("●", "*", (2,)),
    "cut": ("◌", "?", (33,)),
    "failed": ("✗", "x", (31,)),
    "lost": ("✗", "x", (31,)),
    "gone": ("○", ".", (2,)),
}


def has_many_colours(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the terminal says that it knows 256 colours."""
    return "256color" in environ.get("TERM", "") or environ.get("COLORTERM", "") in ("truecolor", "24bit")


def node_colour(node: int, *, has_many: bool) -> tuple[int, ...]:
    """Return the rendition (ECMA-48) of a node, the same in the panel and in front of its lines.

    >>> node_colour(0, has_many=True), node_colour(6, has_many=False)
    ((38, 5, 31), (35,))
    """
    if has_many:
        return 38, 5, _NODE_COLOURS[node % len(_NODE_COLOURS)]
    return (_BASIC_COLOURS[node % len(_BASIC_COLOURS)],)


@dataclass(frozen=True, kw_only=True)
class Style:
    """Abilities of a terminal."""

    has_colour: bool = True
    has_unicode: bool = True
    has_many_colours: bool = True

    def paint(self, text: str, *codes: int) -> str:
        """Return the text in a rendition of ECMA-48 (1 bold, 2 faint, 31.. colours)."""
        if not self.has_colour or not text:
            return text
        return f"\x1b[{';'.join(map(str, codes))}m{text}\x1b[0m"

    def paint_node(self, text: str, node: int) -> str:
        return self.paint(text, *node_colour(node, has_many=self.has_many_colours))

    @property
    def rule(self) -> str:
        return "─" if self.has_unicode else "-"

    @property
    def dot(self) -> str:
        return " · " if self.has_unicode else " | "

    @property
    def times(self) -> str:
        return "×" if self.has_unicode else "x"

    @property
    def ellipsis(self) -> str:
        return "…" if self.has_unicode else "..."

    def bar(self, part: float, size: int, colour: int = 36) -> str:
        """Return a bar of `size` columns, filled to `part` in 0..1."""
        full = round(min(1.0, max(0.0, part)) * size)
        filled, rest = ("━", "─") if self.has_unicode else ("#", "-")
        return self.paint(filled * full, colour) + self.paint(rest * (size - full), 2)

    def mark(self, state: str) -> str:
        unicode, ascii_, codes = _MARKS[state]
        return self.paint(unicode if self.has_unicode else ascii_, *codes)
