"""Objects of this process that must outlive the calls that carry their pickles."""

from __future__ import annotations


class Pinned:
    """Base of objects whose pickle stands for them elsewhere.

    The payload of a call refers to them (`wire.payloads.Encoded.pinned`), so they live until the call has ended.
    """
