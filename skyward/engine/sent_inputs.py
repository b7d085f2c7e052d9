"""Items of iterators that a client has sent to its running calls and that these have not taken yet.

If the head of a pool is lost, items may be lost on their way to the node. Its agent counts the items of each iterator
that it has passed to a call, and those that the call has taken. The next head tells both numbers. So the client sends
the rest again: each item arrives once. Until then new items wait here. A call takes at most a window of items ahead, so
there are never more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import field
from typing import NamedTuple, Protocol

from ..core.records import dataclass
from ..wire.payloads import Encoded


class InputPosition(NamedTuple):
    """How far an iterator is on the node of its call."""

    items: int = 0
    """Number of its items that have arrived."""
    taken: int = 0
    """Number of items that the call has taken."""
    has_ended: bool = False
    """Whether the end of the iterator has arrived."""


class InputLink(Protocol):
    """Link by which items go."""

    def send_stream_item(self, ident: int, lane: int, item: Encoded) -> None: ...
    def end_stream(self, kind: int, ident: int, lane: int) -> None: ...


@dataclass(slots=True)
class _SentInput:
    """One iterator of one call."""

    items: deque[Encoded] = field(default_factory=deque)
    """Items that were not taken."""
    taken: int = 0
    """Number of items before those."""
    ending: int | None = None
    """Kind of the frame that has ended it."""


class SentInputs:
    """Iterators of the open calls of one client. Used under the ledger's lock."""

    def __init__(self) -> None:
        self._sent: dict[int, dict[int, _SentInput]] = {}
        """By call and argument."""
        self._waiting: set[int] = set()
        """Calls that send nothing, because it is not known how far they are."""

    def add(self, call: int, lane: int, item: Encoded) -> bool:
        """Note an item, and return whether it can be sent now."""
        self._of(call, lane).items.append(item)
        return call not in self._waiting

    def end(self, call: int, lane: int, kind: int) -> bool:
        """Note the end of an iterator, and return whether it can be sent now."""
        self._of(call, lane).ending = kind
        return call not in self._waiting

    def taken(self, call: int, lane: int) -> None:
        """Note that a call has taken an item."""
        sent = self._sent.get(call, {}).get(lane)
        if sent is not None and sent.items:
            sent.items.popleft()
            sent.taken += 1

    def forget(self, call: int) -> None:
        """Forget a call that has ended."""
        self._sent.pop(call, None)
        self._waiting.discard(call)

    def wait(self, call: int) -> None:
        """Let a call wait for `resume`."""
        self._waiting.add(call)

    def waits(self, call: int) -> bool:
        """Return whether a call waits for `resume`."""
        return call in self._waiting

    def resume(self, link: InputLink, call: int, positions: Mapping[int, InputPosition]) -> dict[int, int]:
        """Send again what a call's node does not have, if the call waits.

        Returns:
            Number of items that the call has taken since, by argument.

        Raises:
            OSError: There is no room to send a blob.
        """
        if call not in self._waiting:
            return {}
        self._waiting.discard(call)
        missed: dict[int, int] = {}
        for lane, sent in self._sent.get(call, {}).items():
            position = positions.get(lane, InputPosition())
            missed[lane] = position.taken - sent.taken
            for _ in range(missed[lane]):
                self.taken(call, lane)
            for item in list(sent.items)[position.items - sent.taken :]:
                link.send_stream_item(call, lane, item)
            if sent.ending is not None and not position.has_ended:
                link.end_stream(sent.ending, call, lane)
        return missed

    def _of(self, call: int, lane: int) -> _SentInput:
        return self._sent.setdefault(call, {}).setdefault(lane, _SentInput())
