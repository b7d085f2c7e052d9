"""Shelf: tasks that wait in a busy slot's socket, and the decision who has them.

A busy slot is sent its next task early, so that it continues without a round trip; and several, if tasks are tiny.
Until the slot begins a task, the agent may want it back, for an idle slot or for a cancel. The two must never both have
it.

A pipe decides. The agent writes a number to it, the same as in the task's frame, and whoever reads the number has the
task. Numbers on the shared page cannot decide: each side would write one and then read the other's, and processors may
reorder these two steps.
"""

from __future__ import annotations

import os

_NUMBER = 2
"""Length of a number in bytes. Reads and writes of a few numbers are atomic."""
MOST = 15
"""Most tasks that wait on a shelf."""
_ALL = 2 * (MOST + 1) * _NUMBER
"""More than the pipe ever holds: a full shelf, and the task that runs next."""


class Shelf:
    """Agent's ends of the pipe. Never waits."""

    def __init__(self) -> None:
        self._reads, self._writes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._last = 0
        self._put = b""
        """Numbers that are not in the pipe yet."""

    def put(self) -> int:
        """Return the 16-bit number of the next task, to send with it. Call `offer` before it is sent.

        The number is new each time: a task that was taken back may be sent again while its void frame is unread.
        """
        self._last = self._last % 0xFFFF + 1
        self._put += self._last.to_bytes(_NUMBER, "little")
        return self._last

    def offer(self) -> None:
        """Offer the tasks to the slot that have a number, in one write."""
        if self._put:
            os.write(self._writes, self._put)
            self._put = b""

    def take_back(self) -> list[int]:
        """Take back every unclaimed task. Returns their numbers, oldest first; the slot will never begin them."""
        self.offer()
        try:
            numbers = os.read(self._reads, _ALL)
        except BlockingIOError:  # the slot has claimed all of them
            return []
        return [int.from_bytes(numbers[at : at + _NUMBER], "little") for at in range(0, len(numbers), _NUMBER)]

    def slot_end(self) -> int:
        """Return a descriptor for `Claims`; the caller owns it."""
        return os.dup(self._reads)

    def close(self) -> None:
        os.close(self._reads)
        os.close(self._writes)


class Claims:
    """Slot's end of the pipe."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._number = 0
        """Number that was read before its task arrived; 0 for none."""

    def claim(self, number: int) -> bool:
        """Return whether the slot has the task, and not whoever takes it back. Call it once per task, in order."""
        if not self._number:
            try:
                self._number = int.from_bytes(os.read(self._fd, _NUMBER), "little")
            except BlockingIOError:  # the agent has read the number: taken back
                return False
        if self._number != number:  # the number of a later task, so this one was taken back before that was offered
            return False
        self._number = 0
        return True
