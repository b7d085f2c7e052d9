"""Deadlock detection for calls of actors that wait for each other; each circle is found when its last call is made.

A call ends only after the calls that it has made. A call of an actor begins only when the actor has room for it. So
when all room of an actor is held by calls that wait for others, the next call needs one of those to end.

Slots count as free here. `schedule/families.py` refuses circles over slots, but neither finds those that need both,
unless they lie in one chain of calls.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping

from ..errors import UsageError
from .ledger import Ledger
from .tasks import Task

_Numbers = Callable[[int], Iterable[int] | None]


def refuse_circle(ledger: Ledger, task: Task, made_by: _Numbers) -> None:
    """Raise UsageError if a new call of an actor could never end. Needs the ledger's lock.

    Args:
        ledger: Open tasks and actors.
        task: New call, which a task makes.
        made_by: Returns the open calls that a task or gang has made, this new one included.
    """
    actor = ledger.actors.get(task.actor)
    tasks = ChainMap({task.id: task}, ledger.tasks)

    def blockers(call: int) -> list[int]:
        return _blockers(ledger, tasks, made_by, call)

    if actor is None or not blockers(task.id):
        return  # as nearly always
    circle = find_circle(task.id, made_by, blockers)
    visited = [tasks[call].actor for call in circle if call in tasks]
    others = list(dict.fromkeys(number for number in visited if number not in (0, task.actor)))
    if others:
        names = [ledger.actors[number].name for number in (*others, task.actor)]
        raise UsageError(
            f"{task.name!r}: could never run, because {actor.name!r} waits for "
            f"{', which waits for '.join(map(repr, names))}; let one of them answer without the other, or set "
            f"concurrency={actor.lanes + 1} or more"
        )
    if circle:
        raise UsageError(
            f"{task.name!r}: could never run, because a call of {actor.name!r} waits for it and the actor runs "
            f"{actor.lanes} at once; call the method on self, or set concurrency={actor.lanes + 1} or more"
        )


def _blockers(ledger: Ledger, tasks: Mapping[int, Task], made_by: _Numbers, call: int) -> list[int]:
    """Return the calls that fill an actor while they wait for others, if a call must wait until one of them ends."""
    actor = ledger.actors.get(tasks[call].actor) if call in tasks else None
    if actor is None:
        return []
    waiting = [number for number in actor.sent if any(True for _ in made_by(number) or ())]
    is_full = len(waiting) >= actor.lanes or not actor.is_made
    return waiting if is_full and call not in waiting else []


def find_circle(call: int, made_by: _Numbers, blockers: _Numbers) -> list[int]:
    """Find out whether a call could never end, because it waits for itself.

    Calls that wait for nothing are assumed to end. The result is exact for these rules.

    Args:
        call: Number of the call.
        made_by: Returns the open calls that a call has made. All of them end before it.
        blockers: Returns the calls of which one must end before this call can begin; nothing if it has begun or may.

    Returns:
        Calls of which each waits for the next one, beginning with `call`; the last one waits for one of them. Empty if
        the call can end.

    Example:
        >>> find_circle(3, made_by={1: [3], 2: [4]}.get, blockers={3: [2], 4: [1]}.get)
        [3, 2, 4, 1]
        >>> find_circle(3, made_by={1: [3], 2: []}.get, blockers={3: [1, 2]}.get)
        []
    """
    found: dict[int, tuple[frozenset[int], frozenset[int]]] = {}
    to_visit = [call]
    while to_visit:
        number = to_visit.pop()
        if number not in found:
            found[number] = frozenset(made_by(number) or ()), frozenset(blockers(number) or ())
            to_visit += found[number][0] | found[number][1]
    stuck = set(found)
    while ending := {n for n in stuck if stuck.isdisjoint(found[n][0]) and not _all_within(found[n][1], stuck)}:
        stuck -= ending
    path: list[int] = []
    while call in stuck and call not in path:
        path.append(call)
        made, blocking = found[call]
        call = min((made & stuck) or blocking)
    return path


def _all_within(numbers: frozenset[int], stuck: set[int]) -> bool:
    return bool(numbers) and numbers <= stuck
