"""Client's side of the channels that it lends to its head: the commands that reach the nodes, and their bytes."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial

from ..core.process import PACKAGE_ROOT
from ..errors import Unreachable
from ..node.agent import attach
from ..values.machine import Machine
from ..wire.frames import Frame, FrameKind
from ..wire.lent import LentStreams
from .dialler import CommandEnds
from .threads import in_words, start_thread

_EXIT_S = 1.0
"""Seconds for a command that has closed its stream to end."""
_FINISH_S = 2.0
"""Seconds for the last bytes of a link that the head has ended."""


def command_to(machine: Machine) -> tuple[str, ...]:
    """Return the command that reaches a machine's agent. On this machine it connects to the agent's socket."""
    return machine.channel or attach.command(sys.executable, PACKAGE_ROOT, machine.socket_path)


class Lender:
    """Channels to nodes that the head uses.

    Args:
        tell: Sends the head a frame: kind, number of the stream and body.
        machine: Returns the machine of a node; None if there is none.
    """

    def __init__(self, tell: Callable[[int, int, bytes], object], machine: Callable[[int], Machine | None]) -> None:
        self._tell = tell
        self._machine = machine
        self._streams = LentStreams(tell, "skyward-lent")
        self._ended_by_head: set[int] = set()
        self._commands: set[CommandEnds] = set()
        """Ends of the commands that run."""
        self.handlers: dict[int, Callable[[Frame], object]] = {
            FrameKind.LEND: self._on_lend,
            FrameKind.LENT_BYTES: lambda frame: self._streams.on_bytes(frame.ident, frame.body),
            FrameKind.LENT_TAKEN: lambda frame: self._streams.on_taken(frame.ident, frame.body),
            FrameKind.END_LENT: self._on_end,
        }
        """Handlers of the head's frames, by kind."""

    def _on_lend(self, frame: Frame) -> None:
        """Open a channel to a node, in a thread: a new process takes milliseconds."""
        number, node = frame.ident, frame.lane
        self._streams.open(number)
        start_thread(
            partial(self._open, number, node),
            name="skyward-lend",
            failed=lambda error: self._not_open(number, error),
        )

    def _open(self, number: int, node: int) -> None:
        machine = self._machine(node)
        if machine is None:
            raise Unreachable(f"node {node}: is being replaced; try again later", node=None)
        ends = CommandEnds(command_to(machine))
        self._commands.add(ends)
        if not self._streams.bind(number, ends.fileno(), partial(self._ended, number, ends)):
            self._ended(number, ends)

    def _not_open(self, number: int, error: BaseException) -> None:
        self._streams.drop(number)
        self._say_end(number, None, in_words(error))

    def _on_end(self, frame: Frame) -> None:
        self._ended_by_head.add(frame.ident)
        self._streams.on_end(frame.ident)

    def _ended(self, number: int, ends: CommandEnds) -> None:
        start_thread(
            partial(self._close, number, ends), name="skyward-lend", failed=partial(self._not_closed, number, ends)
        )

    def _close(self, number: int, ends: CommandEnds) -> None:
        """End the command of a channel, and tell the head how it ended, unless the head has ended it."""
        self._commands.discard(ends)
        if number in self._ended_by_head:
            self._ended_by_head.discard(number)
            ends.finish(time.monotonic() + _FINISH_S)
            ends.close()
            return
        code = ends.exit_code(_EXIT_S)
        ends.close()
        self._say_end(number, code, ends.said())

    def _not_closed(self, number: int, ends: CommandEnds, error: BaseException) -> None:
        ends.close()
        self._say_end(number, None, in_words(error))

    def _say_end(self, number: int, code: int | None, said: str) -> None:
        self._tell(FrameKind.END_LENT, number, json.dumps({"code": code, "said": said}).encode())

    def end_all(self) -> None:
        """End all channels, because the head that had them is gone."""
        for number in self._streams.numbers:
            self._ended_by_head.add(number)
            self._streams.on_end(number)

    def forget_in_child(self) -> None:
        """Close the descriptors in a fork of this process."""
        self._streams.forget_in_child()
        for ends in self._commands:
            ends.close_in_child()
        self._commands.clear()

    def close(self) -> None:
        """End all channels. Idempotent."""
        self._streams.close()
        self._streams.join()
