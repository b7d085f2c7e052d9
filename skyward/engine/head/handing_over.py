"""Hand-over from a head that is well to another one, because the client moves the scheduler.

No call runs then, and the head has no node. It answers once its client has everything that was sent before. So each
call that is still open at the client has not begun, and the next head begins it. Shared state goes along. From then on
this head answers no request of shared state, so that the client asks the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...calls.futures import Future
from ..ledger import Ledger
from ..members import Membership
from ..shared_state import SharedState
from .plain import dump_plain, load_plain

_MOST_SHARED = 64 << 20
"""Most bytes of shared state that go along. They travel in one message."""


class HandOver:
    """Verbs of the client by which one head ends and another goes on.

    Args:
        ledger: Shared state of the engine.
        shared: Shared state of the pool.
        members: Nodes of the engine.
        give_back: Gives a node back. Returns False if it is in use.
        ask: Asks the client, behind everything else, whether it is there.
    """

    def __init__(
        self,
        ledger: Ledger,
        shared: SharedState,
        members: Membership,
        *,
        give_back: Callable[[int], bool],
        ask: Callable[[], Future[Any]],
    ) -> None:
        self._ledger, self._shared, self._members = ledger, shared, members
        self._give_back, self._ask = give_back, ask
        self.is_over = False
        """Whether another head goes on, so that this one must not change anything."""

    def may_go(self, node: int | None) -> bool:
        """Return whether the last node, if there is one, is not in use, and shared state small enough to go along."""
        with self._ledger.lock:
            is_small = self._shared.used_bytes <= _MOST_SHARED
        return is_small and (node is None or self._members.may_go(node))

    def go(self, node: int | None) -> tuple[bool, bytes]:
        """Give back the last node, if there is one, and return whether that was done, and the shared state."""
        if node is not None and not self._give_back(node):
            return False, b""
        self._ask().result()  # in a thread of the request, which ends with this process
        with self._ledger:
            self.is_over = True
            things = self._shared.hand_over()
        return True, b"" if things is None else dump_plain(things)

    def take(self, things: bytes) -> None:
        """Go on with the shared state of an earlier head."""
        with self._ledger:
            self._shared.take_over(load_plain(things))
