"""A provider of the tests whose nodes are on this machine but reached by a command, as if by ssh."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import skyward as sky
from skyward.events import Emit
from skyward.node.agent import attach
from skyward.providers.local import Local
from skyward.values.machine import Machine, Offer, PoolSpec
from tests.engines import engine_of
from tests.waiting import until

__all__ = ["Relayed", "breaking"]

_ROOT = str(Path(sky.__file__).parent.parent)
_ELSEWHERE = "/nonexistent/agent.sock"
"""The path is one on the node: nothing here may use it."""
_RELAY = str(Path(__file__).with_name("relay.py"))


@dataclass(frozen=True, kw_only=True)
class Relayed(Local):
    """Provider whose links of client and keeper to a node are relays (see relay.py), which can be cut and stalled."""

    lease_s: float = 60.0  # a busy machine may take seconds to dial again
    delay_s: float = 0.0
    folder: str = field(default_factory=lambda: tempfile.mkdtemp(prefix="skyward-relays-"))

    def launch(self, spec: PoolSpec, offers: list[Offer], pool: str, nodes: list[int], emit: Emit) -> list[Machine]:
        return [self._relayed(machine) for machine in super().launch(spec, offers, pool, nodes, emit)]

    def _relayed(self, machine: Machine) -> Machine:
        os.makedirs(self._folder_of(machine.node), exist_ok=True)
        relay = (sys.executable, "-I", "-S", _RELAY, self._folder_of(machine.node), str(self.delay_s))
        stub = attach.command(sys.executable, _ROOT, machine.socket_path)
        return replace(machine, channel=(*relay, *stub), socket_path=_ELSEWHERE, pid=0)

    def _folder_of(self, node: int) -> str:
        return os.path.join(self.folder, str(node))

    # Faults ---------------------------------------------------------------------------------------------------------

    def relays(self, node: int = 0) -> list[int]:
        """Return the process ids of the relays of client and keeper to a node."""
        return [int(name) for name in os.listdir(self._folder_of(node)) if name.isdigit() and _is_alive(int(name))]

    def break_links(self, node: int = 0) -> None:
        """Cut the links to a node. New ones can be opened."""
        self._signal(node, signal.SIGKILL)

    def stall(self, node: int = 0) -> None:
        """Let nothing go through the links, without any sign of it."""
        self._signal(node, signal.SIGSTOP)

    def cut(self, node: int = 0) -> None:
        """Cut the links to a node. None can be opened until `mend`."""
        Path(self._folder_of(node), "cut").touch()
        self.break_links(node)

    def close_way(self, node: int = 0) -> None:
        """Prevent further links to a node until `mend`. Existing links stay."""
        Path(self._folder_of(node), "cut").touch()

    def mend(self, node: int = 0) -> None:
        Path(self._folder_of(node), "cut").unlink()

    def hang(self, node: int = 0) -> None:
        """Let nothing go through the links, existing and new."""
        Path(self._folder_of(node), "hang").touch()
        self.stall(node)

    def _signal(self, node: int, number: int) -> None:
        for pid in self.relays(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


@contextlib.contextmanager
def breaking(
    pool: sky.ComputePool,
    provider: Relayed,
    nodes: int = 1,
    *,
    seed: int = 0,
    pause_s: tuple[float, float] = (0.02, 0.3),
) -> Iterator[None]:
    """Break links repeatedly, by default often before any byte has gone through them.

    A busy machine may take longer to dial than any of the pauses. So each third break waits until the links are back,
    and leaves them alone for as long as that took.
    """
    over = threading.Event()
    chance = random.Random(seed + int(os.environ.get("SKYWARD_TEST_SEED", "0")))
    engine = engine_of(pool)

    def are_back() -> bool:
        with engine.ledger.lock:
            return engine.nodes.are_attached or over.is_set()

    def run() -> None:
        for number in itertools.count(1):
            if over.wait(chance.uniform(*pause_s)):
                return
            if number % 3 == 0:
                began = time.monotonic()
                until(are_back)
                over.wait(time.monotonic() - began)
            provider.break_links(chance.randrange(nodes))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _is_alive(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] != "Z"
