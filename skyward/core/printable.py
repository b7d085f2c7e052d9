"""Sanitizing of text from tasks and other machines before it reaches the user's terminal.

Escape sequences can clear the screen, hide the cursor, change the title or fill the clipboard. Neither a task nor
another machine may do that. So every text that this process did not write passes through this module first.
"""

from __future__ import annotations

import re

_COLOUR = r"\x1b\[[0-9;:]*m"
_OTHER = "|".join(
    (
        r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]",  # CSI: cursor, erasing, modes
        r"(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)",  # OSC, DCS and other strings
        r"\x1b[ -/]*[0-~]",  # a single escape; also the start of a sequence above that never ends
        r"[\x00-\x08\x0b-\x1f\x7f-\x9f]",  # C0 without tab and newline, DEL, C1
        r"[\u2028-\u202e\u2066-\u2069]",  # line separators and bidirectional overrides
    )
)
"""Source: ECMA-48; xterm's ctlseqs for string terminators (BEL is one too)."""
_SEQUENCE = re.compile(f"(?P<colour>{_COLOUR})|{_OTHER}")
_ANY = re.compile(f"{_COLOUR}|{_OTHER}")
_RESET = "\x1b[0m"


def coloured(line: str) -> str:
    r"""Strip all escape sequences but colours from a line, and reset the colours at its end.

    >>> coloured("\x1b]0;title\x07\x1b[2J\x1b[31mred\b")
    '\x1b[31mred\x1b[0m'
    """
    if line.isprintable():
        return line
    kept = _SEQUENCE.sub(lambda match: match["colour"] or "", line).replace("\n", " ")
    return kept + _RESET if "\x1b" in kept and not kept.endswith(_RESET) else kept


def printable_lines(text: str) -> str:
    r"""Strip all escape sequences and control characters from a text, and keep its lines.

    >>> printable_lines("one\n\x1b[31mtwo\x1b[0m\r\n")
    'one\ntwo\n'
    """
    return text if text.isprintable() else _ANY.sub("", text)


def printable(text: str) -> str:
    r"""Strip all escape sequences and control characters from a text, and join it to one line.

    >>> printable("a\tb\x1b[2Jc\n")
    'a bc'
    """
    return " ".join(printable_lines(text).split())
