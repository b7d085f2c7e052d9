"""The shelf: a task that waits in a slot's own socket while another runs, and who has it.

A slot that is busy is sent the task that comes next, so that it goes on without a word in between. Until it has begun
that task the agent may want it back, for a slot that fell idle or for a cancel, and the two must never both have it.
A pipe decides: the agent puts a number there, the same as in the task's frame, and who reads it has the task.
(Numbers on the shared page cannot decide: each side would write one and read the other's, and processors may turn
these two steps around.)
"""

from __future__ import annotations

import os

__all__ = ["Claims", "Shelf"]

_NUMBER = 2
"""Bytes. Reads and writes of a few numbers are never torn apart."""
_ALL = 16 * _NUMBER


class Shelf:
    """The agent's ends. Never waits."""

    def __init__(self) -> None:
        self._reads, self._writes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._last = 0

    def put(self) -> int:
        """The slot may have the task that is sent next: the number to send it with, of 16 bits.

        It is the task's for this once: the same task may come again while a frame that is void is still unread.
        """
        self._last = self._last % 0xFFFF + 1
        os.write(self._writes, self._last.to_bytes(_NUMBER, "little"))
        return self._last

    def take_back(self) -> list[int]:
        """The numbers of all that the slot has not claimed, oldest first: it will never begin them."""
        try:
            numbers = os.read(self._reads, _ALL)
        except BlockingIOError:  # all are claimed
            return []
        return [int.from_bytes(numbers[at : at + _NUMBER], "little") for at in range(0, len(numbers), _NUMBER)]

    def slot_end(self) -> int:
        """A descriptor for `Claims`; the caller owns it."""
        return os.dup(self._reads)

    def close(self) -> None:
        os.close(self._reads)
        os.close(self._writes)


class Claims:
    """The slot's end."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._number = 0
        """That was read, and whose task has not come yet."""

    def claim(self, number: int) -> bool:
        """Whether the slot has the task. False: it was taken back. Asked once for each, in the order they came."""
        if not self._number:
            try:
                self._number = int.from_bytes(os.read(self._fd, _NUMBER), "little")
            except BlockingIOError:  # it was taken back
                return False
        if self._number != number:  # that of a later one: this one was taken back before that was put there
            return False
        self._number = 0
        return True
