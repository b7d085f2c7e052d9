"""Ray of a pool whose scheduler runs in a head: raised once there are several nodes, and again after each rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from .ledger import Ledger
from .threads import report, start_thread

if TYPE_CHECKING:
    from .ray.raiser import RayRaiser


class HostedRay:
    """The raisers of a pool's Ray, one after another. Thread-safe.

    Args:
        raiser: The first one; None: the pool has no Ray, and the client's channels carry the links.
        ledger: Shared state of the client's engine.
        attaches: Whether an earlier client has raised one.
    """

    def __init__(self, raiser: RayRaiser | None, ledger: Ledger, *, attaches: bool) -> None:
        self._raiser = raiser
        self._ledger = ledger
        self._attaches = attaches
        verbs, slow_verbs = ((), ()) if raiser is None else (raiser.verbs, raiser.slow_verbs)
        self.verbs: Mapping[str, Callable[..., Any]] = {verb: partial(self._on_told, verb) for verb in verbs}
        """Verbs of the head."""
        self.slow_verbs: Mapping[str, Callable[..., Any]] = {verb: partial(self._on_told, verb) for verb in slow_verbs}
        """Verbs of the head that take time."""

    def _on_told(self, verb: str, *arguments: Any) -> None:
        raiser = self._raiser
        assert raiser is not None
        {**raiser.verbs, **raiser.slow_verbs}[verb](*arguments)

    @property
    def is_up(self) -> bool:
        """Return whether Ray carries the links to all nodes but the head's."""
        return self._raiser is not None and self._raiser.is_up

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys that the head of a detached pool keeps; see `RayRaiser.keys`."""
        return () if self._raiser is None else self._raiser.keys

    def raise_on(self, head: int | None, ask: Callable[..., Any]) -> None:
        """Raise Ray, unless it is, once there are several nodes and the head is beside one. `ask`: asks the head."""
        raiser, machines = self._raiser, self._ledger.machines
        if raiser is not None and not raiser.has_begun and head is not None and len(machines) > 1:
            raiser.begin(machines, head, ask, attaches=self._attaches)

    def forget(self, node: int) -> None:
        """Forget the Ray of a node that was given back. It ends with the node."""
        if self._raiser is not None:
            self._raiser.forget(node)

    def move(self, head: int) -> None:
        """Raise another Ray, because the pool has another head, beside this node."""
        if self._raiser is not None:
            self._raiser.move(head)

    def rest(self) -> None:
        """End Ray, because the pool has no nodes. When it has some again, Ray is raised as for a new pool."""
        before = self._raiser
        if before is not None and before.has_begun:
            self._raiser = before.fresh()
            before.stop()
            start_thread(before.close, name="skyward-ray-end", failed=report)

    def give_up(self, why: str) -> None:
        """End Ray until the pool has rested, because nothing is left to raise it on."""
        if self._raiser is not None:
            self._raiser.give_up(why)

    def why_needed(self, limit_s: float) -> str:
        """Return why the head still needs the client's channels; see `RayRaiser.why_needed`. One node needs none."""
        is_alone = len(self._ledger.machines) < 2
        return "" if self._raiser is None or is_alone else self._raiser.why_needed(limit_s)

    def stop(self) -> None:
        """Raise Ray no more. Returns at once."""
        if self._raiser is not None:
            self._raiser.stop()

    def close(self, *, leaves: bool) -> None:
        """End Ray on all nodes, or leave it to the next client."""
        if self._raiser is not None:
            self._raiser.leave() if leaves else self._raiser.close()
