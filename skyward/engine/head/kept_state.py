"""Shared state of a pool with a head. Only its names outlive the head, so that the next one knows what was lost.

A name is there while it stands for anything that a new one does not: a value, a lease, somebody who waits. The names
of a detached pool are in the journal, and those of any other its client has.
"""

from __future__ import annotations

from ...errors import UsageError
from ...shared.store import Store
from ...shared.thing import RequestRefused
from .kept_calls import KeptCalls


def store_of(kept: KeptCalls) -> Store:
    """Return an empty store, which refuses the names of everything that an earlier process of this head has lost."""

    def note(key: tuple[str, str], is_there: bool) -> None:
        try:
            kept.note_thing(key, is_there)
        except UsageError as error:
            raise RequestRefused("UsageError", str(error)) from error

    return Store(lost=kept.lost_things, noted=note)
