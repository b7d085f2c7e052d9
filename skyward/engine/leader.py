"""Callers that wait for a short call and read its answer themselves.

If nothing else is open, a call needs neither agent nor thread switch. It takes the direct line to the first slot of its
node, and the waiting thread leads: it reads the line, or the node's link, while the I/O thread steps aside.

Rules:

- `Readable.is_led`, changed under the ledger's lock, says that a caller reads a channel. The watcher then does not wait
  for its input, so the I/O thread sleeps on.
- The I/O thread may still be inside a read of that channel from before. So every read also takes `Readable.reading`;
  the thread that comes second finds nothing to read, or the lock taken, and returns.
- A caller leads for at most `LEAD_S`. `_give_up` then gives the channel back to the watcher, also on Ctrl-C. Without it
  nobody would read the channel again.
- Signals are held while a caller leads. Frames that were read belong to the whole engine and must all be handled; only
  the wait for input lets handlers run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ..calls.futures import Future, refuse_to_wait, this_thread
from ..core import interrupts
from ..wire import pull
from .ledger import Ledger
from .link import LEAD_S, DirectLine, Readable
from .task_dispatcher import TaskDispatcher
from .tasks import Task


class Leader:
    """Fast path on which waiting callers do the work of the I/O thread.

    Args:
        ledger: Shared state of the engine.
        dispatcher: Sends the tasks.
        read: Reads a channel and handles its frames in the calling thread.
    """

    def __init__(self, ledger: Ledger, dispatcher: TaskDispatcher, read: Callable[[Readable], None]) -> None:
        self._ledger = ledger
        self._dispatcher = dispatcher
        self._read_channel = read
        self.can_pull = pull.is_possible()
        """Whether slots can read this process's memory. True until a slot was refused."""
        self._unled = 0
        """Number of the last task that went on a direct line without a waiting caller."""

    # For callers ----------------------------------------------------------------------------------------------------

    def may_pull(self, _: int = 0) -> bool:
        """Tell whether a call would probably take a direct line now, to a slot that can read this process's memory.

        It is only a guess, because no lock is held. `PulledTask` handles a wrong one.
        """
        if not self.can_pull or not self.is_idle:
            return False
        return all(link.line is not None for link in tuple(self._ledger.links.values()))

    def may_hold(self, size: int) -> bool:
        """Tell whether copies of a call's buffers may stay in this process's memory; see `HeldTask`.

        A file with huge pages is better: a slot maps it faster than it copies.
        """
        if size < pull.LEAST_SIZE:
            return False
        from ..wire.huge import is_possible  # only for large values, as it takes memory

        return not is_possible() and self.may_pull()

    def stop_pulling(self) -> None:
        """Send all buffers from now on, because the kernel refused a slot access to this process's memory."""
        self.can_pull = False

    def submit(self, task: Task, future: Future[Any], nodes: tuple[int, ...] | None = None) -> None:
        """Submit a task, and wait for its outcome in this thread for up to `LEAD_S`.

        If nothing else is open, the task takes the direct line of its node if it can, and this thread reads the answer.
        A short call then costs no thread switch. After that time the I/O thread takes over.
        """
        refuse_to_wait("`>> pool`")
        try:
            self._submit_and_lead(task, future, nodes)
        except BaseException:  # Ctrl-C: the caller never gets the future, so nobody else could cancel the task
            with self._ledger:
                self._dispatcher.cancel(task.id)
            raise

    def _submit_and_lead(self, task: Task, future: Future[Any], nodes: tuple[int, ...] | None) -> None:
        led: Readable | None = None
        interrupts.hold()
        try:
            with self._ledger:
                if self.is_idle:
                    self._dispatcher.submit(task, nodes, is_alone=True)
                    led = self._take(task)
                else:
                    self._dispatcher.submit(task, nodes)
            if led is not None:
                self._read(led, future)
        finally:
            # If `is_led` is clear, a handler has taken the channel away already: the line was dropped, or the answer
            # comes by another channel. Without an answer yet, an open line must still get back to the I/O thread.
            if led is not None and (led.is_led or not future.done()):
                self._give_up(led, future)
            interrupts.let_go()

    def lead(self, task_id: int, future: Future[Any]) -> None:
        """Read the answer of a task of `submit_unled` in this thread, if it is still on its line."""
        if task_id != self._unled:  # a quick check without the lock, because most futures are one of many
            return
        led: Readable | None = None
        interrupts.hold()
        try:
            with self._ledger.lock:
                task = self._ledger.tasks.get(task_id)
                line = None if task is None else self._line_of(task)
                # Several threads may wait for one future. The first leads, the others wait for it as usual.
                if task is not None and line is not None and not line.is_led:
                    led = self._take(task)
            if led is not None:
                self._read(led, future)
        finally:
            if led is not None:
                self._give_up(led, future)
            interrupts.let_go()

    # For the engine, with the ledger locked -----------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Return whether nothing is open and the watcher allows callers to read channels."""
        ledger = self._ledger
        return ledger.watcher.can_lead and not ledger.tasks and not ledger.gangs

    def submit_unled(self, task: Task) -> None:
        """Submit the only open task before anybody waits for it; see `lead`."""
        self._dispatcher.submit(task, None, is_alone=True)
        line = self._line_of(task)
        if line is not None:
            self._ledger.watcher.add(line)  # the I/O thread reads the line until somebody waits for the value
            self._unled = task.id

    def _line_of(self, task: Task) -> DirectLine | None:
        """Return the direct line that carries a task; None if there is none."""
        end = self._ledger.end_of(task)
        return None if end is None or end.on_line != task.id else end.line

    # Reading --------------------------------------------------------------------------------------------------------

    def _take(self, task: Task) -> Readable | None:
        """Take over the channel on which the answer will come. Needs the ledger's lock."""
        line = self._line_of(task)
        if line is not None:
            # A line is watched only between `_give_up` and the end of a long call. Short calls never add it to the
            # watcher, which would cost two system calls each.
            if line.is_watched:
                self._ledger.watcher.remove(line)
            line.is_led = True
            return line
        link = self._ledger.links.get(self._ledger.node_of(task) or 0)
        if link is None:
            return None
        link.is_led = True
        self._ledger.watcher.update(link)
        return link

    def _give_up(self, led: Readable, future: Future[Any]) -> None:
        """Give the channel back to the I/O thread."""
        with self._ledger.lock:
            led.is_led = False
            if isinstance(led, DirectLine) and not future.done() and led.channel.fileno() >= 0:
                self._ledger.watcher.add(led)
            if led.is_watched:
                self._ledger.watcher.update(led)

    def _read(self, link: Readable, future: Future[Any]) -> None:
        deadline = time.monotonic() + LEAD_S
        while not future.done() and link.is_led:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return
            if link.wait_readable(left_s):
                # Done-callbacks of any call may run in here. If one waits for another value, it must fail at once
                # (`refuse_to_wait`): this thread is the one that would have to read it.
                this_thread.brings_values = True
                try:
                    self._read_channel(link)
                finally:
                    this_thread.brings_values = False
