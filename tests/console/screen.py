"""A small terminal: the text that a person would see from the bytes of a program.

It knows what our console uses and what ordinary programs do: printing, CR, LF, cursor movements, erasing, colours
(ignored), the scrolling region, saving and restoring the cursor. Anything else fails the test that wrote it.
"""

from __future__ import annotations

import re

__all__ = ["Screen"]

_TOKEN = re.compile(
    r"\x1b\[(?P<private>\??)(?P<numbers>[\d;]*)(?P<final>[A-Za-z])|\x1b(?P<single>[78DM])|(?P<control>[\r\n\b\x07])|(?P<text>[^\x00-\x1f\x7f]+)"
)


class Screen:
    """A terminal screen. `lines` is the screen, `history` the lines that scrolled off its top."""

    def __init__(self, rows: int = 24, columns: int = 80) -> None:
        self.rows, self.columns = rows, columns
        self._cells = [[" "] * columns for _ in range(rows)]
        self.row = self.column = 0
        self._top, self._bottom = 0, rows - 1
        self._saved = (0, 0, False)
        self._wraps = False
        self.history: list[str] = []
        self._rest = ""

    @property
    def lines(self) -> list[str]:
        return ["".join(row).rstrip() for row in self._cells]

    @property
    def all_lines(self) -> list[str]:
        return [*self.history, *self.lines]

    @property
    def region(self) -> tuple[int, int]:
        """Return the first and last row that scroll, counted from 1."""
        return self._top + 1, self._bottom + 1

    def feed(self, data: bytes) -> None:
        text = self._rest + data.decode(errors="replace")
        at = 0
        while at < len(text):
            match = _TOKEN.match(text, at)
            if match is None:
                if text[at] == "\x1b" and len(text) - at < 12:
                    break
                raise AssertionError(f"not known to this terminal: {text[at : at + 20]!r}")
            at = match.end()
            self._obey(match)
        self._rest = text[at:]

    def resize(self, rows: int, columns: int) -> None:
        """Resize as xterm does. The top stays, or scrolls off where the cursor would be lost. Margins are reset."""
        while self.row >= rows:
            self.history.append("".join(self._cells.pop(0)).rstrip())
            self.row -= 1
        self._cells = [(row + [" "] * columns)[:columns] for row in self._cells[:rows]]
        self._cells += [[" "] * columns for _ in range(rows - len(self._cells))]
        self.rows, self.columns = rows, columns
        self._top, self._bottom = 0, rows - 1
        self.column = min(self.column, columns - 1)

    def _obey(self, match: re.Match[str]) -> None:
        if match["text"] is not None:
            for character in match["text"]:
                self._print(character)
        elif match["control"] is not None:
            self._control(match["control"])
        elif match["single"] is not None:
            self._single(match["single"])
        else:
            numbers = [int(n) if n else 0 for n in match["numbers"].split(";")]
            self._sequence(match["private"] + match["final"], numbers)

    def _print(self, character: str) -> None:
        if self._wraps:
            self.column, self._wraps = 0, False
            self._down()
        self._cells[self.row][self.column] = character
        if self.column == self.columns - 1:
            self._wraps = True
        else:
            self.column += 1

    def _control(self, character: str) -> None:
        self._wraps = False
        if character == "\r":
            self.column = 0
        elif character == "\n":
            self._down()
        elif character == "\b":
            self.column = max(0, self.column - 1)

    def _down(self) -> None:
        if self.row == self._bottom:
            gone = self._cells.pop(self._top)
            if self._top == 0:
                self.history.append("".join(gone).rstrip())
            self._cells.insert(self._bottom, [" "] * self.columns)
        elif self.row < self.rows - 1:
            self.row += 1

    def _single(self, character: str) -> None:
        if character == "7":
            self._saved = (self.row, self.column, self._wraps)
        elif character == "8":
            self.row, self.column, self._wraps = self._saved
        elif character == "D":
            self._down()
        else:
            self.row = max(self._top, self.row - 1)

    def _sequence(self, final: str, numbers: list[int]) -> None:
        first = numbers[0]
        if final in ("m", "?h", "?l"):
            return
        self._wraps = False
        if final == "H":
            self.row = min(self.rows, max(1, first)) - 1
            self.column = min(self.columns, max(1, numbers[1] if len(numbers) > 1 else 1)) - 1
        elif final == "A":
            floor = self._top if self.row >= self._top else 0
            self.row = max(floor, self.row - max(1, first))
        elif final == "r":
            self._top = max(1, first) - 1
            self._bottom = (numbers[1] if len(numbers) > 1 and numbers[1] else self.rows) - 1
            self.row = self.column = 0
        elif final == "K" and first == 0:
            self._cells[self.row][self.column :] = [" "] * (self.columns - self.column)
        elif final == "J" and first == 0:
            self._cells[self.row][self.column :] = [" "] * (self.columns - self.column)
            for row in range(self.row + 1, self.rows):
                self._cells[row] = [" "] * self.columns
        else:
            raise AssertionError(f"not known to this terminal: {final!r} {numbers}")
