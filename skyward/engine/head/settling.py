"""Word to the agents of how many frames of their tasks nobody needs from them again; see `node.agent.held`.

Frames that the head of a detached pool has handled are in its journal. That of any other pool has no journal, so they
must have reached its client. A request behind all of them asks for that: its reply proves that the client has them. One
request at a time speaks for all calls of its time, and a few frames without blobs wait, so it costs next to nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from ...calls.futures import Future
from ...wire.frames import SETTLED_KINDS, Frame, FrameKind
from ...wire.tasks import has_references
from ..ledger import Ledger
from ..link import NodeLink

_MOST_FRAMES = 64
"""Frames that wait for the next `settle` at most."""
_PAYLOADS = frozenset((FrameKind.PART, FrameKind.ITEM, FrameKind.RESULT))


class Settling:
    """Frames of tasks that their agents hold. Thread-safe.

    Args:
        ledger: Shared state of the head's engine.
        ask: Asks the client, behind everything else, whether it is there; None: the frames are in a journal.
    """

    def __init__(self, ledger: Ledger, ask: Callable[[], Future[Any]] | None) -> None:
        self._ledger = ledger
        self._ask = ask
        self._handled: dict[NodeLink, Counter[int]] = {}
        """Numbers of frames that have been handled since the last request, by link and task."""
        self._frames = 0
        """Number of all of them."""
        self._is_asking = False

    def handled(self, link: NodeLink, frames: Sequence[Frame]) -> None:
        """Note frames of a node that were handled."""
        counts = Counter(frame.ident for frame in frames if frame.kind in SETTLED_KINDS)
        if not counts:
            return
        with self._ledger:
            if self._ask is None:
                self._settle(link, counts)
                return
            self._handled.setdefault(link, Counter()).update(counts)
            self._frames += sum(counts.values())
            if any(frame.kind in _PAYLOADS and has_references(frame.body) for frame in frames):
                self._frames += _MOST_FRAMES  # the agent holds their files too
            if self._frames >= _MOST_FRAMES:
                self.settle()

    def settle(self) -> None:
        """Settle the frames that were handled, as soon as the client has them."""
        with self._ledger:
            if self._is_asking or not self._handled or self._ask is None:
                return
            handled, self._handled, self._frames = self._handled, {}, 0
            self._is_asking = True
            self._ask().add_done_callback(lambda done: self._answered(handled, done))

    def _answered(self, handled: dict[NodeLink, Counter[int]], done: Any) -> None:
        if done.exception() is not None:
            return  # the head ends
        with self._ledger:
            for link, counts in handled.items():
                self._settle(link, counts)
            self._is_asking = False
            if self._frames >= _MOST_FRAMES:
                self.settle()

    def _settle(self, link: NodeLink, counts: Counter[int]) -> None:
        for task, count in counts.items():
            link.send(FrameKind.SETTLED, task, count.to_bytes(4, "little"))
        self._ledger.dirty.add(link)
