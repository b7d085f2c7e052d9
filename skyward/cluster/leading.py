"""Callers that wait for a short call and read its answer themselves, and the direct lines such a call goes on.

While nothing else is open a call needs no agent and no change of thread: it goes on the line to the first slot of its
node, and the thread that waits for it reads the line while the I/O thread steps aside.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from .. import interrupts
from ..futures import Future, refuse_to_wait, this_thread
from ..wire import pull
from .books import Books
from .link import LEAD_S, Line, NodeLink, Readable
from .sending import Sending
from .tasks import Task

__all__ = ["Leading"]

Nodes = tuple[int, ...] | None


class Leading:
    """Let callers do the work of the I/O thread.

    Args:
        read: handle what has come by a channel, in the thread that calls it.
    """

    def __init__(self, books: Books, sending: Sending, read: Callable[[Readable], None]) -> None:
        self._books = books
        self._sending = sending
        self._read_channel = read
        self.can_pull = pull.is_possible()
        """Whether slots can read this process's memory, as far as is known."""
        self._unled = 0
        """The last task that was put on a direct line and that nobody has waited for yet."""

    # For callers ----------------------------------------------------------------------------------------------------

    def may_pull(self) -> bool:
        """Whether a call that its caller waits for will probably go on a line whose slot can read our memory."""
        if not self.can_pull or not self.is_idle:
            return False
        return all(link.line is not None for link in tuple(self._books.links.values()))

    def stop_pulling(self) -> None:
        """Let buffers travel from now on: a slot was refused to read this process's memory."""
        self.can_pull = False

    def submit(self, task: Task, future: Future[Any], nodes: Nodes = None) -> None:
        """The engine's `submit`, and wait a moment for the outcome in this thread.

        If nothing else is open, the call goes on the node's direct line if it can, and the caller reads the answer
        itself while the I/O thread steps aside: a short call then costs no change of thread at all. After `LEAD_S`
        the I/O thread takes over.
        """
        refuse_to_wait("`>> pool`")
        try:
            self._submit_and_lead(task, future, nodes)
        except BaseException:  # Ctrl-C: the caller never gets the future
            with self._books:
                self._sending.cancel(task.id)
            raise

    def _submit_and_lead(self, task: Task, future: Future[Any], nodes: Nodes) -> None:
        led: Readable | None = None
        interrupts.hold()
        try:
            with self._books:
                if self.is_idle:
                    led = self._take(task.id, self._submit_alone(task, nodes))
                else:
                    self._sending.submit(task, nodes)
            if led is not None:
                self._read(led, future)
        finally:
            if led is not None and (led.is_led or not future.done()):
                self._give_up(led, future)
            interrupts.let_go()

    def lead(self, task_id: int, future: Future[Any]) -> None:
        """The caller waits for a task of `submit_unled`: if it is on its line, read the answer in this thread."""
        if task_id != self._unled:  # told without the lock: most futures are one of many
            return
        led: Readable | None = None
        interrupts.hold()
        try:
            with self._books.lock:
                link = self._books.links.get(self._books.scheduler.node_of(task_id) or 0)
                if link is not None and link.on_line == task_id and link.line is not None and not link.line.is_led:
                    led = self._take(task_id, link)
            if led is not None:
                self._read(led, future)
        finally:
            if led is not None:
                self._give_up(led, future)
            interrupts.let_go()

    # For the engine, while the books are open -----------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether nothing is open, and callers may read."""
        books = self._books
        return books.watcher.can_lead and not books.tasks and not books.gangs

    def submit_unled(self, task: Task) -> None:
        """Nothing else is open, and nobody waits for the task yet: see `lead`."""
        link = self._submit_alone(task, None)
        if link is not None and link.line is not None and link.on_line == task.id:
            self._books.watcher.add(link.line)  # until somebody waits for the value
            self._unled = task.id

    def _submit_alone(self, task: Task, nodes: Nodes) -> NodeLink | None:
        """Nothing else is open: the task goes on a direct line if it can. Where it went."""
        self._sending.submit(task, nodes, is_alone=True)
        return self._books.links.get(self._books.scheduler.node_of(task.id) or 0)

    # Reading --------------------------------------------------------------------------------------------------------

    def _take(self, task_id: int, link: NodeLink | None) -> Readable | None:
        if link is None:
            return None
        led: Readable = link
        if link.on_line == task_id and link.line is not None:
            led = link.line
            self._books.watcher.remove(led)  # nobody but callers reads a line, as long as their calls are short
        led.is_led = True
        self._books.watcher.update(led)
        return led

    def _give_up(self, led: Readable, future: Future[Any]) -> None:
        with self._books.lock:
            led.is_led = False
            if isinstance(led, Line) and not future.done() and led.channel.fileno() >= 0:
                self._books.watcher.add(led)
            self._books.watcher.update(led)

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
