"""Cron expressions: minute, hour, day of month, month and day of week, in UTC."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from ...errors import UsageError

_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_NAMED = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
}
_FIELDS: Sequence[tuple[str, int, int, Sequence[str]]] = (
    ("minute", 0, 59, ()),
    ("hour", 0, 23, ()),
    ("day", 1, 31, ()),
    ("month", 1, 12, _MONTHS),
    ("weekday", 0, 7, _DAYS),
)
_PART = re.compile(r"(\*|[a-z]+|\d+)(?:-([a-z]+|\d+))?(?:/(\d+))?")
_FARTHEST_DAYS = 8 * 366
"""The 29th of February may be eight years away, around 2100."""


@dataclass(frozen=True, slots=True)
class CronSchedule:
    """Times that a cron expression names.

    Attributes:
        text: The expression.

    Raises:
        UsageError: It is none, or names no time.

    Example:
        >>> moment = datetime(2026, 11, 26, 12, 30, tzinfo=UTC)
        >>> CronSchedule("0 3 * * mon-fri").after(moment).isoformat()
        '2026-11-27T03:00:00+00:00'
    """

    text: str

    def __post_init__(self) -> None:
        self.after(datetime(2026, 1, 1, tzinfo=UTC))

    def after(self, moment: datetime) -> datetime:
        """Return the first time behind a moment, which has a time zone.

        If days of the month and of the week are both restricted, either is enough, as in cron.
        """
        minutes, hours, days, months, weekdays = self._values()
        weekdays = {day % 7 for day in weekdays}
        either = len(days) < 31 and len(weekdays) < 7
        start = moment.astimezone(UTC).replace(second=0, microsecond=0) + timedelta(minutes=1)
        for number in range(_FARTHEST_DAYS):
            day = start.date() + timedelta(days=number)
            fits = (day.day in days, day.isoweekday() % 7 in weekdays)
            if day.month not in months or not (any(fits) if either else all(fits)):
                continue
            for hour in sorted(hours):
                for minute in sorted(minutes):
                    found = datetime(day.year, day.month, day.day, hour, minute, tzinfo=UTC)
                    if found >= start:
                        return found
        raise UsageError(f"cron={self.text!r}: names no time; give days that exist", field="cron")

    def after_ms(self, moment_ms: int) -> int:
        """Return the first time behind another one, both in milliseconds since 1970."""
        return int(self.after(datetime.fromtimestamp(moment_ms / 1000, UTC)).timestamp() * 1000)

    def _values(self) -> list[set[int]]:
        parts = _NAMED.get(self.text.strip().lower(), self.text).lower().split()
        if len(parts) != len(_FIELDS):
            raise _wrong(self.text, f"has {len(parts)} fields")
        return [_field(self.text, part, *field) for part, field in zip(parts, _FIELDS, strict=True)]


def _field(text: str, part: str, name: str, low: int, high: int, words: Sequence[str]) -> set[int]:
    found: set[int] = set()
    for piece in part.split(","):
        match = _PART.fullmatch(piece)
        if match is None:
            raise _wrong(text, f"{name} {piece!r} is illegal")
        first, last, step = match[1], match[2], int(match[3] or 1)
        begin = low if first == "*" else _number(text, first, name, low, words)
        end = high if first == "*" or (match[3] and last is None) else begin
        end = end if last is None else _number(text, last, name, low, words)
        if not (low <= begin <= end <= high and step >= 1 and not (first == "*" and last)):
            raise _wrong(text, f"{name} {piece!r} is not within {low} to {high}")
        found.update(range(begin, end + 1, step))
    return found


def _number(text: str, word: str, name: str, low: int, words: Sequence[str]) -> int:
    if word.isdecimal() and len(word) < 5:
        return int(word)
    if word not in words:
        raise _wrong(text, f"{name} {word!r} is unknown")
    return words.index(word) + (low if low else 0)


def _wrong(text: str, problem: str) -> UsageError:
    return UsageError(
        f"cron={text[:80]!r}: {problem}; write minute, hour, day, month and weekday, such as '0 3 * * mon-fri'",
        field="cron",
    )
