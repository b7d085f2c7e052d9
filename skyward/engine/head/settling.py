"""Word to the agents of how many frames of their tasks nobody needs from them again; see `node.agent.held`.

Frames that the head of a detached pool has handled are in its journal. That of any other pool has no journal, so they
must have reached its client. A request behind all of them asks for that: its reply proves that the client has them. One
request at a time speaks for all calls of its time, and a few frames without blobs wait, so it costs next to nothing.

The values of a gang go there at its end. Until then nobody else has those of its ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import starmap
from typing import Any

from ...calls.futures import Future
from ...wire.frames import INLINE_LIMIT, SETTLED_KINDS, SETTLED_PAIR, Frame, FrameKind
from ...wire.tasks import has_references
from ..ledger import Ledger
from ..link import NodeLink

_MOST_FRAMES = 64
"""Frames that wait for the next `settle` at most."""
_PAIRS_SIZE = INLINE_LIMIT // SETTLED_PAIR.size * SETTLED_PAIR.size
"""Most bytes of one frame."""
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
            self._handled.setdefault(link, Counter()).update(counts)
            if self._ask is None:
                self.settle()
                return
            self._frames += sum(counts.values())
            if any(frame.kind in _PAYLOADS and has_references(frame.body) for frame in frames):
                self._frames += _MOST_FRAMES  # the agent holds their files too
            if self._frames >= _MOST_FRAMES:
                self.settle()

    def settle(self) -> None:
        """Settle the frames that were handled, as soon as the client has them."""
        with self._ledger:
            handled = {} if self._is_asking else self._take()
            if self._ask is None:
                self._settle_all(handled)
            elif handled:
                self._is_asking = True
                self._ask().add_done_callback(lambda done: self._answered(handled, done))

    def _take(self) -> dict[NodeLink, Counter[int]]:
        """Take the numbers that were noted, except those of ranks whose gang is open."""
        handled, self._handled, self._frames = self._handled, {}, 0
        ranks = {task.id for gang in self._ledger.gangs.values() for task in gang.tasks.values()} if handled else ()
        if ranks:
            for link, counts in list(handled.items()):
                kept = {task: counts.pop(task) for task in ranks & counts.keys()}
                if kept:
                    self._handled[link] = Counter(kept)
                if not counts:
                    del handled[link]
        return handled

    def _answered(self, handled: dict[NodeLink, Counter[int]], done: Any) -> None:
        if done.exception() is not None:
            return  # the head ends
        with self._ledger:
            self._settle_all(handled)
            self._is_asking = False
            if self._frames >= _MOST_FRAMES:
                self.settle()

    def _settle_all(self, handled: dict[NodeLink, Counter[int]]) -> None:
        for link, counts in handled.items():
            if self._ledger.links.get(link.node) is link:
                pairs = b"".join(starmap(SETTLED_PAIR.pack, counts.items()))
                for at in range(0, len(pairs), _PAIRS_SIZE):
                    link.send(FrameKind.SETTLED, body=pairs[at : at + _PAIRS_SIZE])
                self._ledger.dirty.add(link)
