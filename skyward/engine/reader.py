"""I/O thread: it reads all channels, runs deadlines, and checks that links are alive.

Callers that read their own answer (`leader`) use the same `read`. `Readable.reading` decides between the two: the
thread that gets it reads and handles one batch of frames, so the frames of a channel are handled in order.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ..calls.futures import this_thread
from ..errors import InternalError
from ..wire.channel import ChannelClosed
from ..wire.frames import Frame
from .ledger import Ledger
from .link import NodeLink, Readable
from .liveness import Liveness
from .threads import report

_MOST_FAILURES = 50
"""Number of consecutive failures after which the thread gives up."""
_FAILURE_PAUSE_S = 0.02
_MOST_AT_ONCE = 16
"""Most channels whose frames are handled under one hold of the lock: a fraction of a millisecond of work."""


if TYPE_CHECKING:  # protocols take memory in every client

    class FrameTable(Protocol):
        """Handlers of frames, called with the ledger locked."""

        @property
        def handlers(self) -> dict[int, Callable[[Readable, Frame], Any]]:
            """Handlers by kind of frame. Frames of other kinds are ignored."""
            ...

        def give_up(self, link: Readable, frame: Frame, error: BaseException) -> None:
            """Handle that the handler of a frame raised."""
            ...

    class LinkEnds(Protocol):
        """Receiver of links that have ended. Called without the ledger's lock."""

        def link_gone(self, link: NodeLink, why: str) -> None: ...

    class LineEnds(Protocol):
        """Receiver of the ends of all other channels. Called without the ledger's lock."""

        def gone(self, line: Readable) -> None: ...

    class LinkWidth(Protocol):
        """Measurement of links. Called with the ledger locked."""

        def measured(self, link: Readable) -> None: ...
        def consider(self, link: Readable) -> None: ...


class Reader:
    """Owner of the I/O thread. Call `start` once. The thread ends when it is woken after the ledger was closed.

    Args:
        ledger: Shared state of the engine.
        frame_handlers: Handlers by kind of frame.
        lines: Called when a channel that is no link ends, such as a direct line.
        link_repair: Called when a link ends.
        width: Called with round trips and busy links.
        liveness: Finds silent links.
        recall: Recalls tasks, with the ledger locked. Called when all channels that were ready have been read.
        stop: Stops an abandoned task.
        died: Called when the thread gives up. Nothing is read afterwards.
    """

    def __init__(
        self,
        ledger: Ledger,
        frame_handlers: FrameTable,
        lines: LineEnds,
        link_repair: LinkEnds,
        width: LinkWidth,
        liveness: Liveness,
        *,
        recall: Callable[[], object],
        stop: Callable[[int], object],
        died: Callable[[BaseException], object],
    ) -> None:
        self._ledger = ledger
        self._handlers = frame_handlers
        self._lines = lines
        self._link_repair = link_repair
        self._width = width
        self._liveness = liveness
        self._recall = recall
        self._stop = stop
        self._died = died
        self._soon: deque[Callable[[], object]] = deque()
        self._thread: threading.Thread | None = None

    @property
    def was_started(self) -> bool:
        return self._thread is not None

    def start(self) -> None:
        thread = threading.Thread(target=self._run, name="skyward-io", daemon=True)
        thread.start()
        self._thread = thread

    def join(self) -> None:
        """Wait for the end of the thread, unless this is that thread."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=10)

    def abandon(self, task_id: int) -> None:
        """Let the thread stop a task soon. For finalizers."""
        self.soon(lambda: self._stop(task_id))

    def soon(self, action: Callable[[], object]) -> None:
        """Let the thread do something soon.

        For finalizers. The garbage collector may run one in a thread that holds any lock, so this takes none.
        """
        self._soon.append(action)
        self._ledger.watcher.wake()

    def _run(self) -> None:
        this_thread.brings_values = True
        failures = 0
        while self._ledger.is_open:
            try:
                self._step()
                failures = 0
            except BaseException as error:  # a bug in skyward: it may cost one call, but not all of them
                failures += 1
                report(error)
                if failures == _MOST_FAILURES:  # failing every call is better than leaving callers to wait forever
                    self._died(error)
                    return
                time.sleep(_FAILURE_PAUSE_S)

    def _step(self) -> None:
        ledger = self._ledger
        while self._soon:
            self._soon.popleft()()
        ledger.take_in_left()
        readable: list[Readable] = []
        for link, can_read, can_write in self._wait():
            if can_write:
                with ledger:
                    ledger.dirty.add(link)
            if can_read:
                readable.append(link)
        self._read_round(readable)
        if self._liveness.is_due(time.monotonic()):
            self._check_links()

    def _read_round(self, readable: list[Readable]) -> None:
        """Read all channels that are ready, and recall tasks only then: most that seem to wait have ended already."""
        if len(readable) < 2:
            self._read_each(readable)
            return
        ledger = self._ledger
        ledger.scheduler.recalls_later = True
        try:
            for start in range(0, len(readable), _MOST_AT_ONCE):
                self._read_each(readable[start : start + _MOST_AT_ONCE])
        finally:
            with ledger:
                self._recall()

    def _wait(self) -> list[tuple[Readable, bool, bool]]:
        """Wait for channels, after the deadlines that are due. Record whether this thread is behind."""
        ledger = self._ledger
        timeout_s = self._run_deadlines()
        if ledger.is_behind:
            if ready := ledger.watcher.wait(0.0):
                return ready
            ledger.is_behind = False
            with ledger:  # takes in the tasks that were left to this thread
                pass
        ready = ledger.watcher.wait(timeout_s)
        ledger.is_behind = len(ready) > _MOST_AT_ONCE
        return ready

    def _run_deadlines(self) -> float | None:
        """Run due deadlines. Return the seconds until the next deadline or check; None if there is none."""
        ledger, check_s = self._ledger, self._liveness.interval_s
        if not ledger.has_deadlines:  # a call that adds one wakes this thread
            return check_s
        with ledger:
            wait_s = ledger.run_deadlines()
            return min((s for s in (wait_s, check_s) if s is not None), default=None)

    def _check_links(self) -> None:
        with self._ledger:
            pinged, dead = self._liveness.check(time.monotonic())
            self._ledger.dirty.update(pinged)
        for link in dead:
            if link.reading.acquire(blocking=False):  # otherwise a leading caller is reading it, so it is not silent
                try:
                    self._link_repair.link_gone(link, "it was silent for too long")
                finally:
                    link.reading.release()

    def read(self, link: Readable) -> None:
        """Read a channel and handle its frames, unless another thread is doing so.

        A leading caller has to hold signals while it is here, because frames that were read must be handled.
        """
        self._read_each((link,))

    def _read_each(self, links: Sequence[Readable]) -> None:
        """Read channels like `read`, and handle the frames of all of them under one hold of the ledger's lock.

        With a thousand busy nodes a channel seldom has more than one frame. A hold for each made the threads that
        submit wait for the lock more than twice as often.
        """
        held: list[Readable] = []
        arrived: list[tuple[Readable, list[Frame]]] = []
        failures: list[tuple[Readable, Exception]] = []
        try:
            for link in links:
                if not link.reading.acquire(blocking=False):
                    continue  # another thread reads it, and the watcher signals again if input is left
                held.append(link)
                try:
                    if link.channel.fileno() >= 0:  # otherwise the thread that read it last has closed it
                        arrived.append((link, self._receive(link)))
                except (ChannelClosed, InternalError, OSError) as error:
                    failures.append((link, error))
            self.handle(arrived)
            for link, failure in failures:
                self._failed(link, failure)
        except BaseException as error:  # a bug in skyward: the caller that happens to read here must not get it
            report(error)
        finally:
            for link in held:
                link.reading.release()

    def _receive(self, link: Readable) -> list[Frame]:
        """Return the frames that have arrived. Raises what the channel raises about its state."""
        try:
            return list(link.receive())
        except BlockingIOError:  # another thread has read the input since
            return []
        except (ChannelClosed, InternalError, OSError):
            raise
        except BaseException as error:  # a bug in skyward: the frames of other channels must still be handled
            report(error)
            return []

    def handle(self, arrived: Sequence[tuple[Readable, list[Frame]]]) -> None:
        """Handle the frames of links whose `reading` this thread holds."""
        if not arrived:
            return
        ledger, handlers = self._ledger, self._handlers.handlers
        with ledger:
            for link, frames in arrived:
                for frame in frames:
                    handle = handlers.get(frame.kind)
                    if handle is None:
                        continue
                    try:
                        handle(link, frame)
                    except BaseException as error:  # costs one call; the frames behind this one are still handled
                        self._handlers.give_up(link, frame, error)
                channel = link.channel
                if channel.needs_flush:
                    ledger.dirty.add(link)
                if channel.pongs != link.pongs:
                    self._width.measured(link)
                if link.is_narrow:
                    self._width.consider(link)
        for link, frames in arrived:
            link.handled(frames)

    def _failed(self, link: Readable, error: Exception) -> None:
        if link.broke():
            return
        if not isinstance(link, NodeLink):
            self._lines.gone(link)
        elif isinstance(error, ChannelClosed):
            self._link_repair.link_gone(link, "its link ended")
        else:
            # Not frames: something in between wrote to the stream. A new link repeats everything that is missing.
            self._link_repair.link_gone(link, str(error))
