"""Delivery of events to listeners: iterators that any thread may read, and one function that is called in order."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator

from ..errors import UsageError
from ..events import Emit, Event, EventsDropped

_log = logging.getLogger(__name__)

_LIMIT = 10_000
"""Events that wait for a reader. Beyond that the oldest are dropped."""
_LAST_WORDS_S = 5.0
"""Seconds that closing a pool waits until `on_event=` has taken the last events."""


class EventStream(Iterator[Event]):
    """Iterator over the events of a pool from now on. It ends when the pool is closed.

    Each stream gets all events. Threads that read the same stream share them. At most `limit` events wait in it: a
    slow reader loses the oldest, finds `EventsDropped(count=n)` in their place, and delays nobody.
    """

    def __init__(self, limit: int = _LIMIT) -> None:
        self._limit = limit
        self._events: deque[Event] = deque()
        self._missed = 0
        self._condition = threading.Condition()
        self._is_closed = False
        self.dropped = 0
        """Number of events that this reader has lost so far."""

    def __iter__(self) -> EventStream:
        return self

    def __next__(self) -> Event:
        with self._condition:
            while not self._events and not self._is_closed:
                self._condition.wait()
            return self._take()

    def get(self, timeout_s: float | None = None) -> Event | None:
        """Return the next event; None if none comes within `timeout_s` seconds, or if the stream has ended."""
        with self._condition:
            self._condition.wait_for(lambda: self._events or self._is_closed, timeout_s)
            return self._take() if self._events else None

    @property
    def is_closed(self) -> bool:
        """Return whether no further events will arrive. Waiting events can still be read."""
        return self._is_closed

    def close(self) -> None:
        """Take no further events. Waiting events can still be read. Idempotent."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()

    def _take(self) -> Event:
        if self._missed:
            missed, self._missed = self._missed, 0
            return EventsDropped(at=self._events[0].at, count=missed)
        if not self._events:
            raise StopIteration
        return self._events.popleft()

    def put(self, event: Event) -> None:
        """Add an event; the announcer calls it."""
        with self._condition:
            if self._is_closed:
                return
            if len(self._events) >= self._limit:
                self._events.popleft()
                self._missed += 1
                self.dropped += 1
            self._events.append(event)
            self._condition.notify()


observers: dict[str, Callable[[Callable[[], EventStream]], None]] = {}
"""Functions of this process that are called when a pool starts, by name of their library. Each receives a function that
returns a new reader of the pool's events. It must return at once. The entry points `skyward.observers` of installed
packages name libraries that add to them, each by the variable of the environment that turns it on.
"""


class Announcer:
    """Deliver the events of one pool to all its listeners. Thread-safe.

    Delivery takes microseconds, never blocks and never raises.

    Args:
        on_event: called with each event, in order, in a separate thread. Its first error is logged, and ignored.
        on_heard: called with True when the first listener arrives, and with False when the last one has gone. Any
            thread may call it, so it must return at once.
    """

    def __init__(
        self,
        on_event: Callable[[Event], object] | None = None,
        on_heard: Callable[[bool], object] = lambda _: None,
    ) -> None:
        if on_event is not None and not callable(on_event):
            raise UsageError(
                f"on_event={on_event!r}: must be a function; pass one that takes an event of skyward.events"
            )
        self._function = on_event
        self._on_heard = on_heard
        self._lock = threading.Lock()
        self._streams: tuple[weakref.ref[EventStream], ...] = ()
        self._own: tuple[Emit, ...] = ()
        self._thread: threading.Thread | None = None

    @property
    def is_heard(self) -> bool:
        """Return whether anybody listens. Frequent events are made only in that case."""
        return bool(self._streams)

    def emit(self, event: Event) -> None:
        """Deliver an event; it is an `Emit`."""
        for own in self._own:
            own(event)
        for reference in self._streams:
            stream = reference()
            if stream is None or stream.is_closed:
                self._drop_gone()
            else:
                stream.put(event)

    def attach(self, emit: Emit) -> None:
        """Call this with each event until the pool is closed. For quick listeners that need no single calls."""
        with self._lock:
            self._own = (*self._own, emit)

    def listen(self, limit: int = _LIMIT) -> EventStream:
        """Return a new reader, which gets the events from now on."""
        stream = EventStream(limit)
        with self._lock:
            was_heard = self.is_heard
            self._streams = (*self._streams, weakref.ref(stream))
        if not was_heard:
            self._on_heard(True)
        return stream

    def _drop_gone(self) -> None:
        """Forget readers that were dropped without being closed."""
        with self._lock:
            was_heard = self.is_heard
            streams = [reference() for reference in self._streams]
            self._streams = tuple(weakref.ref(s) for s in streams if s is not None and not s.is_closed)
            has_ended = was_heard and not self.is_heard
        if has_ended:
            self._on_heard(False)

    def open(self) -> None:
        """Begin to call `on_event`: the pool starts."""
        if self._function is not None and self._thread is None:
            stream = self.listen()
            self._thread = threading.Thread(
                target=_call_with_each, args=(self._function, stream), name="skyward-on-event", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        """End every stream, and give `on_event` the events that wait: the pool is closed. Idempotent."""
        with self._lock:
            streams, self._streams, self._own = self._streams, (), ()
            thread, self._thread = self._thread, None
        for reference in streams:
            stream = reference()
            if stream is not None:
                stream.close()
        if streams:
            self._on_heard(False)
        if thread is not None and thread is not threading.current_thread():
            thread.join(_LAST_WORDS_S)


def observe(announcer: Announcer) -> None:
    """Tell the observers of this process that a pool starts. It includes those that its environment asks for."""
    if any(name.startswith("SKYWARD_") and name.endswith("_URL") for name in os.environ):
        _load_observers()
    for observer in observers.values():
        try:
            observer(announcer.listen)
        except Exception:  # an observer must not keep a pool from starting
            _log.exception("observer of pools raised an error; it does not see this pool:")


def _load_observers() -> None:
    """Import the libraries that observe pools if a variable of the environment is set. They add their observers.

    Looking them up takes up to 20 ms, which a program with no such variable does not spend.
    """
    from importlib.metadata import entry_points

    for entry in entry_points(group="skyward.observers"):
        if os.environ.get(entry.name):
            try:
                entry.load()
            except Exception:  # a pool starts, whatever the library lacks
                _log.exception("observer %s of pools cannot be imported; it does not see this pool:", entry.value)


def _call_with_each(function: Callable[[Event], object], stream: EventStream) -> None:
    has_raised = False
    for event in stream:
        try:
            function(event)
        except BaseException:  # SystemExit too: later events are delivered all the same
            if not has_raised:
                has_raised = True
                _log.exception(
                    "on_event= raised an error on a %s; it gets all later events, but further errors are not shown:",
                    type(event).__name__,
                )
