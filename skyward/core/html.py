"""Small pieces of HTML for notebooks, legible on light and dark pages. All texts are escaped here."""

from __future__ import annotations

from collections.abc import Iterable

_CARD = (
    "display:inline-block;border:1px solid rgba(128,128,128,.35);border-left:3px solid #0087af;border-radius:4px;"
    "padding:.5em 1em;font-size:.95em;line-height:1.5"
)
_FAINT = "opacity:.65"
_CELL = "text-align:left;padding:0 1.2em 0 0;background:none;border:none"
_MONO = "font-family:monospace"
_ESCAPES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#x27;"})


def escape(text: str) -> str:
    """Escape a text for HTML. The module `html` does it too, and takes milliseconds to import."""
    return text.translate(_ESCAPES)


def card(title: str, state: str, facts: Iterable[tuple[str, str]] = (), hint: str = "") -> str:
    """Return a box that describes one object.

    Args:
        title: title of the object, set as code.
        state: its state in a word or two.
        facts: name and value of each.
        hint: advice below the facts; text between backticks is set as code.
    """
    rows = "".join(
        f'<tr style="background:none"><td style="{_CELL};{_FAINT}">{escape(name)}</td>'
        f'<td style="{_CELL};{_MONO}">{escape(value)}</td></tr>'
        for name, value in facts
    )
    table = f'<table style="margin:.2em 0;border:none">{rows}</table>' if rows else ""
    advice = f'<div style="{_FAINT}">{_with_code(hint)}</div>' if hint else ""
    return (
        f'<div style="{_CARD}"><code style="background:none;font-weight:600">{escape(title)}</code> '
        f'<span style="{_FAINT}">{escape(state)}</span>{table}{advice}</div>'
    )


def bar(name: str, part: float | None, text: str) -> str:
    """Return one line: a name, a bar that is filled to `part` in 0..1, and a text. None: no bar."""
    shown = ""
    if part is not None:
        shown = (
            '<span style="display:inline-block;width:14em;height:.55em;border-radius:.3em;vertical-align:middle;'
            'margin:0 .8em;background:rgba(128,128,128,.3);overflow:hidden">'
            f'<span style="display:block;height:100%;width:{100 * min(1.0, max(0.0, part)):.1f}%;background:#0087af">'
            "</span></span>"
        )
    return (
        f'<div style="font-size:.95em"><code style="background:none">{escape(name)}</code>{shown}'
        f'<span style="{_FAINT}">{escape(text)}</span></div>'
    )


def lines(texts: Iterable[str]) -> str:
    """Return lines of output as they are."""
    return f'<pre style="margin:0;background:none">{escape(chr(10).join(texts))}</pre>'


def _with_code(text: str) -> str:
    """Set what stands between backticks as code.

    >>> _with_code("a `b > c`")
    'a <code style="background:none">b &gt; c</code>'
    """
    parts = escape(text).split("`")
    return "".join(
        f'<code style="background:none">{part}</code>' if number % 2 else part for number, part in enumerate(parts)
    )
