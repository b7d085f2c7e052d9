"""Text of tasks and other machines made safe for the user's terminal.

A terminal obeys what it is sent: it clears the screen, hides the cursor, changes its title, fills the clipboard. None
of that is for a task to decide, and much less for another machine. So every text that was not written by this process
goes through this module before it is shown.
"""

from __future__ import annotations

import re

__all__ = ["coloured", "printable", "printable_lines"]

_COLOUR = r"\x1b\[[0-9;:]*m"
_OTHER = "|".join(
    (
        r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]",  # CSI: cursor, erasing, modes
        r"(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)",  # OSC, DCS and other strings
        r"\x1b[ -/]*[0-~]",  # a single escape; also the beginning of one of those above that does not end
        r"[\x00-\x08\x0b-\x1f\x7f-\x9f]",  # C0 without tab and newline, DEL, C1
        r"[\u2028-\u202e\u2066-\u2069]",  # line separators; what reverses the order of a line
    )
)
"""Source: ECMA-48, and xterm's ctlseqs for what ends a string (BEL too)."""
_SEQUENCE = re.compile(f"(?P<colour>{_COLOUR})|{_OTHER}")
_ANY = re.compile(f"{_COLOUR}|{_OTHER}")
_RESET = "\x1b[0m"


def coloured(line: str) -> str:
    r"""Keep the colours of a line of output, and nothing else that a terminal obeys; colours end with the line.

    >>> coloured("\x1b]0;title\x07\x1b[2J\x1b[31mred\b")
    '\x1b[31mred\x1b[0m'
    """
    if line.isprintable():
        return line
    kept = _SEQUENCE.sub(lambda found: found["colour"] or "", line).replace("\n", " ")
    return kept + _RESET if "\x1b" in kept and not kept.endswith(_RESET) else kept


def printable_lines(text: str) -> str:
    r"""Text of several lines without anything that a terminal obeys.

    >>> printable_lines("one\n\x1b[31mtwo\x1b[0m\r\n")
    'one\ntwo\n'
    """
    return text if text.isprintable() else _ANY.sub("", text)


def printable(text: str) -> str:
    r"""Text on one line, without anything that a terminal obeys.

    >>> printable("a\tb\x1b[2Jc\n")
    'a bc'
    """
    return " ".join(printable_lines(text).split())
