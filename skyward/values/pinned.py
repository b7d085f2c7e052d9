"""Objects of this process that must outlive the calls that carry their pickles."""

from __future__ import annotations

from ..errors import UsageError


class Pinned:
    """Base of objects whose pickle stands for them elsewhere.

    The payload of a call refers to them (`wire.payloads.Encoded.pinned`), so they live until the call has ended.
    """


def refuse_to_keep(pinned: tuple[Pinned, ...]) -> None:
    """Raise UsageError if a value that is to stay on nodes has such objects, which nobody would hold."""
    if pinned:
        raise UsageError("put(): the value holds the handle of an actor; pass the handle itself as an argument")
