"""Frames of the live view: a pool as a few lines of a terminal. Pure: a state, a width and a time give a frame."""

from __future__ import annotations

from collections.abc import Mapping

from ..core.printable import printable, printable_lines
from ..events import NodeUsage
from .activity import ActorWork, Counts, NodeWork, Progress
from .state import NodeState, PoolState
from .style import Style
from .words import calls_summary, columns, duration, fitted, rate, size_of, usd

_BAR = 6
_LONG_BAR = 20
_NARROW = 72
"""Columns below which labels and bars are shorter."""
_LABEL, _SHORT_LABEL = 26, 18
"""Columns of what a node does, in front of how busy it is."""
_LEAST_PROGRESS = 34
"""Columns that a progress line gets before the load of its node is shown beside it."""
_MOST_PROGRESS_ROWS = 3
_INDENT = 8
_ALWAYS_SINCE_S = 1.0
"""Seconds that a call takes before its row says how long it has run; calls that are shorter would make it flicker."""

_INTERESTING = ("failed", "lost", "cut", "coming", "waiting", "gone", "ready")
_IDLE = NodeWork(calls=(), since=0.0)


def panel_height(pool: PoolState, counts: Counts | None) -> int:
    """Return how many lines the pool would fill if the terminal had room for all of them."""
    progress, actors = (len(counts.progress), bool(counts.actors)) if counts is not None else (0, False)
    return len(pool.nodes) + 2 + min(progress, _MOST_PROGRESS_ROWS) + actors


def panel_lines(
    pool: PoolState,
    counts: Counts | None,
    *,
    width: int,
    height: int,
    now: float,
    style: Style,
    work: Mapping[int, NodeWork] | None = None,
) -> list[str]:
    """Return exactly `height` lines (3 at least), none wider than `width`.

    Args:
        pool: state of the pool and its nodes.
        counts: calls that wait and run; None if unknown.
        width: columns of the terminal.
        height: rows that the panel fills, >= 3.
        now: seconds since the epoch.
        style: colours, or none.
        work: calls of each busy node, by its number; see `WorkTracker`.
    """
    maps = () if counts is None else counts.progress[-_MOST_PROGRESS_ROWS:]
    maps = maps[: max(0, height - 3 - (len(pool.nodes) > 1))]
    actors = () if counts is None or height < 4 + len(maps) + (len(pool.nodes) > 1) else counts.actors
    room = height - 2 - len(maps) - bool(actors)
    nodes = sorted(pool.nodes.items())
    hidden: list[tuple[int, NodeState]] = []
    if len(nodes) > room:
        by_interest = sorted(nodes, key=lambda item: (_INTERESTING.index(item[1].state), item[0]))
        nodes, hidden = sorted(by_interest[: room - 1]), by_interest[room - 1 :]
    lines = [_title(pool, width, now, style)]
    for number, node in nodes:
        lines.append(_node_line(number, node, (work or {}).get(number, _IDLE), pool, width, now, style))
    if hidden:
        ready = sum(node.state == "ready" for _, node in hidden)
        many = f"and {len(hidden)} more" if nodes else f"{len(hidden)} nodes"
        lines.append(style.paint(fitted(f"    {many}, {ready} of them ready", width), 2))
    if actors:
        lines.append(_actors(actors, width, style))
    lines += [progress_line(progress, width, now, style) for progress in maps]
    lines += [""] * (height - 1 - len(lines))
    return [*lines, _calls(pool, counts, width, style)]


def status_line(pool: PoolState, now: float) -> str:
    """Return the pool in one line, for a notebook."""
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
        if calls := calls_summary(pool.calls, pool.failed):
            parts.append(calls)
    return printable(f"{pool.name}: " + " · ".join(parts))


def progress_line(progress: Progress, width: int, now: float, style: Style, *, indent: int = _INDENT) -> str:
    """Return a map or a group in one line: its name, count, bar, rate and the time left, as far as there is room."""
    is_narrow = width < _NARROW
    name = fitted(printable(progress.name), _SHORT_LABEL if is_narrow else _LABEL, style.ellipsis)
    text = " " * indent + name + " " * (max(0, (_SHORT_LABEL if is_narrow else _LABEL) - columns(name)) + 1)
    done = progress.done
    cells: list[tuple[str, str]] = []
    """(plain, as shown)"""
    cells.append(_same(done_of(progress)))
    if progress.total is not None:
        part = done / progress.total if progress.total else 1.0
        size = _LONG_BAR if not is_narrow else _LONG_BAR // 2
        cells.append(("#" * size + f" {part:4.0%}", f"{style.bar(part, size)} {part:4.0%}"))
    if clock := clock_of(progress, now):
        cells.append(_same(clock))
    if done and progress.seconds(now) > 0:
        cells.append(_same(rate_of(progress, now)))
    used = columns(text)
    for plain, shown in cells:
        if used + columns(plain) > width:
            break
        text, used = f"{text}{shown}  ", used + columns(plain) + 2
    return text.rstrip(" ") if used <= width + 2 else fitted(text, width, style.ellipsis)


def done_of(progress: Progress) -> str:
    """Return how much of a map, a group or a transfer is done."""
    show = size_of if progress.unit == "bytes" else "{:,}".format
    return (
        f"{show(progress.done)} done" if progress.total is None else f"{show(progress.done)} of {show(progress.total)}"
    )


def clock_of(progress: Progress, now: float) -> str:
    """Return the time left, or the time it took; empty while nothing is known."""
    if progress.ended is not None:
        is_whole = progress.total is None or progress.done == progress.total
        return f"{'in' if is_whole else 'stopped after'} {duration(progress.seconds(now))}"
    left_s = progress.left_s(now)
    return "" if left_s is None else f"{duration(left_s)} left"


def rate_of(progress: Progress, now: float) -> str:
    """Return the calls or the bytes per second since the start."""
    per_s = progress.rate(now)
    return f"{size_of(per_s)}/s" if progress.unit == "bytes" else rate(per_s)


def _same(text: str) -> tuple[str, str]:
    return text, text


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
    if used + columns(right) + 3 > width:  # the cost is worth more than the place
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


# Nodes ---------------------------------------------------------------------------------------------------------------


def _node_line(
    number: int, node: NodeState, work: NodeWork, pool: PoolState, width: int, now: float, style: Style
) -> str:
    begin = f"  {style.mark(node.state)} {style.paint_node(f'{number:>2}', number)}  "
    room = width - _INDENT
    if node.state == "ready":
        return begin + _ready(node, work, room, now, style, shows_usage=not pool.is_one_machine)
    text = fitted(printable(_doing(node, now)), room, style.ellipsis)
    left = room - columns(text) - 2
    detail = printable(node.detail) or (_trail(node, left, style) if node.state == "coming" else "")
    if detail and left > 8:
        faint = (31,) if node.state in ("failed", "lost") else (2,)
        return f"{begin}{text}  {style.paint(fitted(detail, left, style.ellipsis), *faint)}"
    return begin + text


def _ready(node: NodeState, work: NodeWork, room: int, now: float, style: Style, *, shows_usage: bool) -> str:
    """Return the row of a node that takes calls: its call, the call's progress line, and how busy the machine is."""
    progress = printable_lines(work.progress).replace("\t", " ").strip()  # the spaces of a bar keep its width
    usage = node.usage if shows_usage else None
    label = _label(node, work, now, style)
    size = room
    if progress or usage is not None:
        size = min(room, _SHORT_LABEL if room < _NARROW - _INDENT else _LABEL)
    label = fitted(label, size, style.ellipsis)
    row = style.paint(label, 2) if not work.calls else label
    left = room - size - 1
    if left <= 8:
        return row
    row += " " * (size - columns(label) + 1)
    if not progress:
        return (row + (_usage(usage, left, style) if usage is not None else "")).rstrip(" ")
    load = _usage(usage, left - _LEAST_PROGRESS - 2, style) if usage is not None else ""
    used = columns(_usage(usage, left - _LEAST_PROGRESS - 2, _PLAIN)) if usage is not None else 0
    if not load:
        return row + fitted(progress, left, style.ellipsis)
    text = fitted(progress, left - used - 2, style.ellipsis)
    return row + text + " " * (left - used - columns(text)) + load


def _label(node: NodeState, work: NodeWork, now: float, style: Style) -> str:
    if node.detail:  # such as a machine that its provider takes back soon
        return printable(node.detail)
    if not work.calls:
        return ", ".join(filter(None, ("idle", printable(node.instance_type), printable(node.devices))))
    names = [f"{name} {style.times}{count}" if count > 1 else name for name, count in work.calls]
    text = printable(", ".join(names[:2]) + (f" +{len(names) - 2}" if len(names) > 2 else ""))
    seconds = now - work.since
    if seconds < _ALWAYS_SINCE_S:
        return text
    since = _whole(seconds)
    return f"{fitted(text, _LABEL - columns(since) - 1, style.ellipsis)} {since}"


def _whole(seconds: float) -> str:
    return duration(float(int(seconds))).replace(".0 s", " s")


def _trail(node: NodeState, room: int, style: Style) -> str:
    """Return the phases that the node is through, as many of the last ones as there is room for."""
    shown = ""
    for phase, seconds in reversed(node.phases):
        longer = f"{printable(phase)} {duration(seconds)}" + (style.dot + shown if shown else "")
        if columns(longer) > room:
            break
        shown = longer
    return shown


def _doing(node: NodeState, now: float) -> str:
    since = _whole(now - node.since)
    match node.state:
        case "waiting":
            return "waiting"
        case "coming":
            return f"{node.phase} {since}"
        case "cut":
            return f"connection cut for {since}"
        case "failed":
            return f"{node.phase} failed after {duration(node.took_s)}"
        case "lost":
            return f"lost, {since} ago"
    return "ended"


_PLAIN = Style(has_colour=False)


def _usage(usage: NodeUsage, room: int, style: Style) -> str:
    """Return as much as there is room for: the processors, the devices, the memory of both."""
    cells: list[tuple[str, float | None]] = [
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
        shown += text + (style.bar(part, _BAR) + " " if part is not None else "")
        room -= size
        shown, room = (shown + " ", room - 1) if room > 0 else (shown, room)
    return shown.rstrip(" ")


def _gib(used: float, total: float) -> str:
    return f"{used:.1f}/{total:.0f} GiB" if total < 100 else f"{used:.0f}/{total:.0f} GiB"


# Calls ---------------------------------------------------------------------------------------------------------------


def _actors(actors: tuple[ActorWork, ...], width: int, style: Style) -> str:
    """Return the actors in one line, those with the most calls first, as many as there is room for."""
    text = " " * _INDENT + (f"{len(actors)} actors: " if len(actors) > 1 else "actor ")
    busiest = sorted(actors, key=lambda actor: -actor.calls)
    return fitted(text + printable(style.dot.join(map(str, busiest))), width, style.ellipsis)


def _calls(pool: PoolState, counts: Counts | None, width: int, style: Style) -> str:
    indent = " " * _INDENT
    if counts is None:
        missing = len(pool.nodes) - pool.ready
        text = f"waiting for {missing} of {len(pool.nodes)} nodes" if pool.ready_s is None else "closing"
        return style.paint(fitted(indent + text, width, style.ellipsis), 2)
    parts = [f"{counts.busy} of {counts.slots} slot{'s' if counts.slots != 1 else ''} busy"]
    if counts.queued:
        parts.append(f"{counts.queued:,} queued" + (f" (the oldest {counts.why})" if counts.why else ""))
    done = counts.ended - counts.failed
    parts.append(f"{done:,} call{'s' if done != 1 else ''} done")
    text = fitted(f"{indent}{style.dot.join(parts)}", width, style.ellipsis)
    used = columns(text)
    failed = f"{style.dot}{counts.failed:,} failed" if counts.failed else ""
    if failed and used + columns(failed) <= width:
        text, used = text + style.paint(failed, 31), used + columns(failed)
    usage = pool.machine_usage
    if usage is None:
        return text
    room = width - used - 3
    load = columns(_usage(usage, room, _PLAIN))
    return text + " " * (width - used - load - 2) + _usage(usage, room, style) if load else text
