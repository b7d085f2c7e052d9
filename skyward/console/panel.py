"""A pool as a few lines of a terminal: pure, from its state, a width and a time."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.printable import printable
from ..events import NodeUsage
from .state import NodeState, PoolState
from .words import columns, duration, fitted, usd

__all__ = ["Counts", "Style", "panel_lines", "status_line"]

_BAR = 6
_LABEL = 24
"""Columns of what a node does, in front of how busy it is."""


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Of calls: `busy` of all slots have one; `queued` wait; `ended` and `failed` so far."""

    slots: int
    busy: int
    queued: int
    ended: int
    failed: int


@dataclass(frozen=True, kw_only=True)
class Style:
    """What the terminal can show."""

    has_colour: bool = True
    has_unicode: bool = True

    def paint(self, text: str, *codes: int) -> str:
        """The text in a rendition of ECMA-48 (1 bold, 2 faint, 31.. colours)."""
        if not self.has_colour or not text:
            return text
        return f"\x1b[{';'.join(map(str, codes))}m{text}\x1b[0m"

    @property
    def rule(self) -> str:
        return "─" if self.has_unicode else "-"

    @property
    def dot(self) -> str:
        return " · " if self.has_unicode else " | "

    @property
    def ellipsis(self) -> str:
        return "…" if self.has_unicode else "..."

    def bar(self, part: float) -> str:
        full = round(min(1.0, max(0.0, part)) * _BAR)
        filled, rest = ("━", "─") if self.has_unicode else ("#", "-")
        return self.paint(filled * full, 36) + self.paint(rest * (_BAR - full), 2)

    def mark(self, state: str) -> str:
        unicode, ascii_, *codes = _MARKS[state]
        return self.paint(str(unicode if self.has_unicode else ascii_), *(int(code) for code in codes))


_MARKS: dict[str, tuple[str | int, ...]] = {
    "waiting": ("○", "o", 2),
    "coming": ("◐", "o", 33),
    "ready": ("●", "*", 32),
    "cut": ("◌", "?", 33),
    "failed": ("✗", "x", 31),
    "lost": ("✗", "x", 31),
    "gone": ("○", ".", 2),
}
_INTERESTING = ("failed", "lost", "cut", "coming", "waiting", "gone", "ready")


def panel_lines(
    pool: PoolState, counts: Counts | None, *, width: int, height: int, now: float, style: Style
) -> list[str]:
    """Exactly `height` lines (3 at least), none wider than `width`."""
    room = height - 2
    nodes = sorted(pool.nodes.items())
    hidden: list[tuple[int, NodeState]] = []
    if len(nodes) > room:
        by_interest = sorted(nodes, key=lambda item: (_INTERESTING.index(item[1].state), item[0]))
        nodes, hidden = sorted(by_interest[: room - 1]), by_interest[room - 1 :]
    lines = [_title(pool, width, now, style)]
    lines += [_node_line(number, node, width, now, style) for number, node in nodes]
    if hidden:
        ready = sum(node.state == "ready" for _, node in hidden)
        many = f"and {len(hidden)} more" if nodes else f"{len(hidden)} nodes"
        lines.append(style.paint(fitted(f"    {many}, {ready} of them ready", width), 2))
    lines += [""] * (height - 1 - len(lines))
    return [*lines, _calls(pool, counts, width, style)]


def status_line(pool: PoolState, now: float) -> str:
    """The pool in one line, for a notebook."""
    parts = [f"{pool.provider}, {len(pool.nodes)} node{'s' if len(pool.nodes) != 1 else ''}"]
    if pool.ready_s is None:
        phases = sorted({node.phase for node in pool.nodes.values() if node.phase and node.state == "coming"})
        parts.append(f"{pool.ready} ready" + (f", {', '.join(phases)}" if phases else ""))
        parts.append(duration(now - pool.began))
    else:
        parts.append(f"ready after {duration(pool.ready_s)}")
    failed = [number for number, node in pool.nodes.items() if node.state in ("failed", "lost", "cut")]
    if failed and not pool.is_closed:
        parts.append(", ".join(f"node {number} {pool.nodes[number].state}" for number in sorted(failed)))
    if pool.price_usd_per_hour:
        parts.append(f"{usd(pool.price_usd_per_hour)}/h")
    if spent := pool.spent_usd(now):
        parts.append(f"{usd(spent)} so far" if not pool.is_closed else f"cost {usd(spent)}")
    if pool.is_closed:
        parts.append("closed")
    return printable(f"{pool.name}: " + " · ".join(parts))


def _title(pool: PoolState, width: int, now: float, style: Style) -> str:
    about = f"{printable(pool.provider)}{style.dot}{pool.ready} of {len(pool.nodes)} ready"
    facts = [_clock(now - pool.began)]
    if pool.price_usd_per_hour:
        facts.insert(0, f"{usd(pool.price_usd_per_hour)}/h")
    if spent := pool.spent_usd(now):
        facts.insert(1, f"{usd(spent)} so far")
    right = style.dot.join(facts)
    rule = style.rule
    name = fitted(printable(pool.name), max(4, width - 12), style.ellipsis)
    used = columns(name) + 8 + 3
    if used + columns(right) + 3 > width:  # what it costs is worth more than where it is
        right = facts[0]
    if used + columns(about) + 3 + columns(right) > width:
        about = ""
    fill = width - used - columns(right) - (columns(about) + 1 if about else 0)
    if fill < 0:
        return style.paint(rule * 2, 2) + f" {style.paint(name, 1)}"
    middle = f"{about} " if about else ""
    return (
        style.paint(rule * 2, 2)
        + f" {style.paint(name, 1)} {style.paint(rule * 2, 2)} {middle}"
        + style.paint(rule * fill, 2)
        + f" {right} "
        + style.paint(rule * 2, 2)
    )


def _clock(seconds: float) -> str:
    minutes, rest = divmod(max(0, int(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _node_line(number: int, node: NodeState, width: int, now: float, style: Style) -> str:
    begin = f"  {style.mark(node.state)} {number:>2}  "
    room = width - 8
    doing = printable(_doing(node, now))
    if node.state == "ready" and node.usage is not None:
        room = min(room, _LABEL)
        doing = fitted(doing, room, style.ellipsis)
        usage = _usage(node.usage, width - 8 - _LABEL - 1, style)
        return begin + style.paint(doing, 2) + " " * (_LABEL - columns(doing) + 1) + usage
    if node.state == "ready":
        return begin + style.paint(fitted(doing, room, style.ellipsis), 2)
    text = fitted(doing, room, style.ellipsis)
    left = room - columns(text) - 2
    detail = printable(node.detail) or (_trail(node, left, style) if node.state == "coming" else "")
    if detail and left > 8:
        faint = (31,) if node.state in ("failed", "lost") else (2,)
        return f"{begin}{text}  {style.paint(fitted(detail, left, style.ellipsis), *faint)}"
    return begin + text


def _trail(node: NodeState, room: int, style: Style) -> str:
    """The phases that it is through, as many of the last ones as there is room for."""
    shown = ""
    for phase, seconds in reversed(node.phases):
        longer = f"{printable(phase)} {duration(seconds)}" + (style.dot + shown if shown else "")
        if columns(longer) > room:
            break
        shown = longer
    return shown


def _doing(node: NodeState, now: float) -> str:
    since = duration(float(int(now - node.since))).replace(".0 s", " s")
    match node.state:
        case "waiting":
            return "waiting"
        case "coming":
            return f"{node.phase} {since}"
        case "ready":
            return f"{node.instance_type or 'ready'}, {duration(node.took_s)}"
        case "cut":
            return f"connection cut for {since}"
        case "failed":
            return f"{node.phase} failed after {duration(node.took_s)}"
        case "lost":
            return f"lost, {since} ago"
    return "ended"


def _usage(usage: NodeUsage, room: int, style: Style) -> str:
    """As much as there is room for: the processors, the memory, the devices."""
    cells = [
        (f"cpu {usage.cpu:4.0%} ", usage.cpu),
        (f"mem {_gib(usage.memory_used_gib, usage.memory_gib)} ", None),
    ]
    if usage.devices:
        busy = sum(device.busy for device in usage.devices) / len(usage.devices)
        used = sum(device.memory_used_gib for device in usage.devices)
        total = sum(device.memory_gib for device in usage.devices)
        many = f"{len(usage.devices)} gpus" if len(usage.devices) > 1 else "gpu"
        cells.insert(1, (f"{many} {busy:4.0%} ", busy))
        cells.append((f"{many} mem {_gib(used, total)} ", None))
    shown = ""
    for text, part in cells:
        size = columns(text) + (_BAR + 1 if part is not None else 0)
        if size > room:
            break
        shown += text + (style.bar(part) + " " if part is not None else "")
        room -= size
        shown, room = (shown + " ", room - 1) if room > 0 else (shown, room)
    return shown.rstrip(" ")


def _gib(used: float, total: float) -> str:
    return f"{used:.1f}/{total:.0f} GiB" if total < 100 else f"{used:.0f}/{total:.0f} GiB"


def _calls(pool: PoolState, counts: Counts | None, width: int, style: Style) -> str:
    if counts is None:
        missing = len(pool.nodes) - pool.ready
        text = f"waiting for {missing} of {len(pool.nodes)} nodes" if pool.ready_s is None else "closing"
        return style.paint(fitted(f"       {text}", width, style.ellipsis), 2)
    parts = [f"{counts.busy} of {counts.slots} slot{'s' if counts.slots != 1 else ''} busy"]
    if counts.queued:
        parts.append(f"{counts.queued:,} queued")
    parts.append(f"{counts.ended - counts.failed:,} call{'s' if counts.ended - counts.failed != 1 else ''} done")
    text = fitted(f"       {style.dot.join(parts)}", width, style.ellipsis)
    failed = f"{style.dot}{counts.failed:,} failed" if counts.failed else ""
    if failed and columns(text) + columns(failed) <= width:
        return text + style.paint(failed, 31)
    return text
