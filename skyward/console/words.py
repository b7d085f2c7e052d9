"""Times, sums and texts as people read them."""

from __future__ import annotations

import unicodedata

__all__ = ["columns", "duration", "fitted", "usd"]


def duration(seconds: float) -> str:
    """
    >>> [duration(s) for s in (0.04, 3.14, 42, 192, 4000, 200_000)]
    ['0.0 s', '3.1 s', '42 s', '3 m 12 s', '1 h 06 m', '2 d 07 h']
    """
    if seconds < 9.95:
        return f"{max(0.0, seconds):.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} m {rest:02} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes:02} m"
    return f"{hours // 24} d {hours % 24:02} h"


def usd(amount: float) -> str:
    """
    >>> [usd(a) for a in (0, 0.0042, 0.41, 12.3, 1234.5)]
    ['$0', '$0.0042', '$0.41', '$12.30', '$1,234.50']
    """
    if not amount:
        return "$0"
    return f"${amount:.4f}" if abs(amount) < 0.01 else f"${amount:,.2f}"


def columns(text: str) -> int:
    """How many columns of a terminal the text takes.

    >>> columns("é"), columns("日本"), columns("e\\u0301")
    (1, 4, 1)
    """
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def fitted(text: str, width: int, ending: str = "…") -> str:
    """The text, or its beginning and `ending` where it is wider than `width` columns.

    >>> fitted("packages", 6), fitted("日本語", 4)
    ('packa…', '日…')
    """
    if columns(text) <= width:
        return text
    kept = ""
    for character in text:
        if columns(kept + character) > width - columns(ending):
            break
        kept += character
    return kept + ending if width > 0 else ""
