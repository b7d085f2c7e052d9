"""Callers that wait for a short call and read its answer themselves.

While nothing else is open, a call needs neither agent nor thread switch: it goes on the direct line to the first slot
of its node, and the waiting thread reads the line while the I/O thread steps aside.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ..calls.futures import Future, refuse_to_wait, this_thread
from ..core import interrupts
from ..wire import pull
from .ledger import Ledger
from .link import LEAD_S, DirectLine, NodeLink, Readable
from .task_dispatcher import TaskDispatcher
from .tasks import Task

__all__ = ["Leader"]


class Leader:
    """Let waiting callers do the work of the I/O thread.

    Args:
        read: handles the frames that have come by a channel, in the calling thread.
    """

    def __init__(self, ledger: Ledger, dispatcher: TaskDispatcher, read: Callable[[Readable], None]) -> None:
        self._ledger = ledger
        self._dispatcher = dispatcher
        self._read_channel = read
        self.can_pull = pull.is_possible()
        """Whether slots can read this process's memory, as far as known."""
        self._unled = 0
        """Number of the last task on a direct line that nobody has waited for yet."""

    # For callers ----------------------------------------------------------------------------------------------------

    def may_pull(self) -> bool:
        """Whether a call would probably go on a direct line now, to a slot that can read this process's memory."""
        if not self.can_pull or not self.is_idle:
            return False
        return all(link.line is not None for link in tuple(self._ledger.links.values()))

    def stop_pulling(self) -> None:
        """Send all buffers from now on: a slot was not allowed to read this process's memory."""
        self.can_pull = False

    def submit(self, task: Task, future: Future[Any], nodes: tuple[int, ...] | None = None) -> None:
        """Submit a task, and wait for its outcome in this thread for a moment (`LEAD_S`).

        If nothing else is open, the task takes the direct line of its node if it can, and this thread reads the
        answer: a short call then costs no thread switch at all. Afterwards the I/O thread takes over.
        """
        refuse_to_wait("`>> pool`")
        try:
            self._submit_and_lead(task, future, nodes)
        except BaseException:  # Ctrl-C: the caller never gets the future
            with self._ledger:
                self._dispatcher.cancel(task.id)
            raise

    def _submit_and_lead(self, task: Task, future: Future[Any], nodes: tuple[int, ...] | None) -> None:
        led: Readable | None = None
        interrupts.hold()
        try:
            with self._ledger:
                if self.is_idle:
                    led = self._take(task.id, self._submit_alone(task, nodes))
                else:
                    self._dispatcher.submit(task, nodes)
            if led is not None:
                self._read(led, future)
        finally:
            if led is not None and (led.is_led or not future.done()):
                self._give_up(led, future)
            interrupts.let_go()

    def lead(self, task_id: int, future: Future[Any]) -> None:
        """Read the answer of a task of `submit_unled` in this thread, if it is still on its line."""
        if task_id != self._unled:  # told without the lock: most futures are one of many
            return
        led: Readable | None = None
        interrupts.hold()
        try:
            with self._ledger.lock:
                link = self._ledger.links.get(self._ledger.scheduler.node_of(task_id) or 0)
                if link is not None and link.on_line == task_id and link.line is not None and not link.line.is_led:
                    led = self._take(task_id, link)
            if led is not None:
                self._read(led, future)
        finally:
            if led is not None:
                self._give_up(led, future)
            interrupts.let_go()

    # For the engine, with the ledger locked -----------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether nothing is open and callers may read channels."""
        ledger = self._ledger
        return ledger.watcher.can_lead and not ledger.tasks and not ledger.gangs

    def submit_unled(self, task: Task) -> None:
        """Submit the only open task, which nobody waits for yet; see `lead`."""
        link = self._submit_alone(task, None)
        if link is not None and link.line is not None and link.on_line == task.id:
            self._ledger.watcher.add(link.line)  # until somebody waits for the value
            self._unled = task.id

    def _submit_alone(self, task: Task, nodes: tuple[int, ...] | None) -> NodeLink | None:
        """Submit the only open task, by a direct line if possible. Returns the link to its node."""
        self._dispatcher.submit(task, nodes, is_alone=True)
        return self._ledger.links.get(self._ledger.scheduler.node_of(task.id) or 0)

    # Reading --------------------------------------------------------------------------------------------------------

    def _take(self, task_id: int, link: NodeLink | None) -> Readable | None:
        if link is None:
            return None
        if link.on_line == task_id and link.line is not None:
            if link.line.is_watched:  # nobody but callers reads a line, as long as their calls are short
                self._ledger.watcher.remove(link.line)
            link.line.is_led = True
            return link.line
        link.is_led = True
        self._ledger.watcher.update(link)
        return link

    def _give_up(self, led: Readable, future: Future[Any]) -> None:
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
                this_thread.brings_values = True  # done-callbacks of other calls may run in here
                try:
                    self._read_channel(link)
                finally:
                    this_thread.brings_values = False
