"""Provider whose machines wait in a queue, for tests of programs that wait for them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ..errors import ProviderError
from ..events import Emit, PhaseStarted
from ..providers.local import Local
from ..values.machine import Machine, Offer, PoolSpec

_LOOK_S = 0.05


@dataclass(frozen=True, kw_only=True)
class QueuedProvider(Local):
    """Nodes on this machine behind a queue, as those of a batch system are.

    `launch` waits as long as the file `queue` exists. The file's text is the reason, which goes to the pool's events.
    All nodes of a launch start together. `spec.stop` ends the wait, as it does for every provider.

    Args:
        queue: path of the file.
        lease_s: seconds after which a node shuts itself down once the client and its keeper are gone; > 0.

    Example:
        >>> QueuedProvider(queue="/tmp/queue").name
        'queued'
    """

    name: ClassVar[str] = "queued"

    queue: str
    """Path of the file that keeps machines in the queue; its text is the reason."""

    def launch(self, spec: PoolSpec, offers: list[Offer], pool: str, nodes: list[int], emit: Emit) -> list[Machine]:
        """Wait for the end of the queue, and start the agents of these nodes.

        Raises:
            ProviderError: The pool was told to end meanwhile, or a node did not come up.
        """
        told = ""
        while (reason := self._reason()) is not None:
            if reason != told:
                told = reason
                emit(PhaseStarted(node=nodes[0], phase="queue", detail=reason))
            if spec.stop.wait(_LOOK_S):
                raise ProviderError(f"queued: the pool ended in the queue ({reason}); start it again")
        return super().launch(spec, offers, pool, nodes, emit)

    def _reason(self) -> str | None:
        try:
            return Path(self.queue).read_text().strip()
        except FileNotFoundError:
            return None
