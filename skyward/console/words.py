"""Formats for people: durations, sums, rates, and texts that fit a number of columns."""

from __future__ import annotations

import unicodedata


def duration(seconds: float) -> str:
    """Return a duration in one or two units.

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
    """Return a sum of money in US dollars.

    >>> [usd(a) for a in (0, 0.0042, 0.41, 12.3, 1234.5)]
    ['$0', '$0.0042', '$0.41', '$12.30', '$1,234.50']
    """
    if not amount:
        return "$0"
    return f"${amount:.4f}" if abs(amount) < 0.01 else f"${amount:,.2f}"


def size_of(count: float) -> str:
    """Return a number of bytes in the unit that fits.

    >>> [size_of(n) for n in (0, 999, 1500, 12_345_678, 4e12)]
    ['0 B', '999 B', '1.5 kB', '12 MB', '4.0 TB']
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.1f} {unit}" if count < 10 and unit != "B" else f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def rate(per_s: float) -> str:
    """Return calls per second, or per minute where they are rare.

    >>> [rate(r) for r in (0.02, 3.14, 42.4, 12345)]
    ['1.2/min', '3.1/s', '42/s', '12,345/s']
    """
    if per_s < 0.5:
        return f"{per_s * 60:.1f}/min"
    return f"{per_s:.1f}/s" if per_s < 9.95 else f"{per_s:,.0f}/s"


def calls_summary(calls: int, failed: int) -> str:
    """Return the calls of a pool that has closed; empty if there were none.

    >>> calls_summary(1204, 4), calls_summary(1, 0), calls_summary(0, 0)
    ('1,204 calls, 4 failed', '1 call', '')
    """
    if not calls:
        return ""
    return f"{calls:,} call{'s' if calls != 1 else ''}" + (f", {failed:,} failed" if failed else "")


def columns(text: str) -> int:
    """Return the number of columns that a text takes in a terminal.

    >>> columns("é"), columns("日本"), columns("e\\u0301")
    (1, 4, 1)
    """
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def fitted(text: str, width: int, ending: str = "…") -> str:
    """Return the text; if it is wider than `width` columns, its beginning and `ending`.

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
