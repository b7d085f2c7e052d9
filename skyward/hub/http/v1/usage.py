"""Usage in `/v1`: device-hours and USD of each project and month, as JSON and as CSV."""

from __future__ import annotations

import csv
import io
from dataclasses import asdict
from typing import Annotated

from msgspec import Meta, Struct

from ...services.jobs.usage import months_of
from ..reply import HttpReply
from ..routing import Call

COLUMNS = ("project", "month", "kind", "device_hours", "cost_usd", "attempts")


class UsageQuery(Struct):
    """Use by jobs. Owners see all projects, everybody else the one that the request names."""

    days: Annotated[int, Meta(ge=1, le=4_000)] = 366
    project: str | None = None


class DayOfUseOut(Struct):
    """Use on a day. `day` counts days since 1970 in UTC; attempts count on the day of their end."""

    project: str
    day: int
    kind: str
    device_hours: float
    cost_usd: float
    attempts: int


class MonthOfUseOut(Struct):
    """Use in a month, such as "2026-11"."""

    project: str
    month: str
    kind: str
    device_hours: float
    cost_usd: float
    attempts: int


class UsageOut(Struct):
    days: list[DayOfUseOut]
    months: list[MonthOfUseOut]


async def get(call: Call, request: UsageQuery) -> UsageOut | HttpReply:
    days = await call.hub.usage.days(call.actor, request.days)
    months = [MonthOfUseOut(**asdict(use)) for use in months_of(days)]
    if "text/csv" in call.header(b"accept"):
        return HttpReply(_csv(months).encode(), content_type=b"text/csv; charset=utf-8")
    listed = [
        DayOfUseOut(use.project, use.day, use.kind, use.seconds / 3600, use.cost_usd, use.attempts) for use in days
    ]
    return UsageOut(listed, months)


def _csv(months: list[MonthOfUseOut]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for use in months:
        hours, usd = round(use.device_hours, 6), round(use.cost_usd, 6)
        writer.writerow((_plain(use.project), use.month, _plain(use.kind), hours, usd, use.attempts))
    return text.getvalue()


def _plain(text: str) -> str:
    """Keep spreadsheets from reading a name as a formula."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t") else text
