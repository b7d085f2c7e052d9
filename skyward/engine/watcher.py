"""Readiness of the engine's channels: epoll for the I/O thread, which can step aside for a leading caller."""

from __future__ import annotations

import contextlib
import select
import socket
from typing import Any

from .link import Readable

_READ, _WRITE = select.POLLIN, select.POLLOUT  # the same numbers as EPOLLIN and EPOLLOUT


class Watcher:
    """Set of channels to wait for. One thread waits; others change the set with the ledger locked.

    epoll allows changes while a thread waits. Without epoll (macOS), each wait builds a poll object, every change wakes
    the waiting thread, and callers do not lead.
    """

    def __init__(self) -> None:
        self.can_lead = hasattr(select, "epoll")
        self._epoll: Any = select.epoll() if self.can_lead else None
        self._links: dict[int, Readable] = {}
        self._blocked: dict[int, Readable] = {}
        """Blocked channels by the separate descriptor that signals room for output; see `Readable.waits_apart`."""
        self._events: dict[int, int] = {}
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._set(self._wake_read.fileno(), _READ)

    def add(self, link: Readable) -> None:
        link.is_watched = True
        self._links[link.channel.fileno()] = link
        self._set(link.channel.fileno(), _READ)

    def remove(self, link: Readable) -> None:
        """Stop waiting for a channel. Call it before the channel is closed, while its descriptor is known."""
        link.is_watched = False
        fd = link.channel.fileno()
        if self._links.pop(fd, None) is not None:
            self._drop(fd)
        if link.waits_apart:
            self._update_blocked(link.channel.write_fileno(), None)

    def _drop(self, fd: int) -> None:
        self._events.pop(fd, None)
        if self._epoll is not None:
            with contextlib.suppress(OSError):  # closing a descriptor removes it from the epoll
                self._epoll.unregister(fd)

    def _update_blocked(self, fd: int, link: Readable | None) -> None:
        if link is None and self._blocked.pop(fd, None) is not None:
            self._drop(fd)
        elif link is not None and fd not in self._blocked:
            self._blocked[fd] = link
            # An epoll of several channels becomes readable when one of them takes more, and a pipe writable.
            self._set(fd, _READ | _WRITE)

    def update(self, link: Readable) -> None:
        """Adapt the awaited events to the link's state: no input while a caller leads, output while it is blocked."""
        fd = link.channel.fileno()
        if link.waits_apart:
            if fd in self._links:
                self._update_blocked(link.channel.write_fileno(), link if link.is_blocked else None)
                if self._events.get(fd) != (events := 0 if link.is_led else _READ):
                    self._set(fd, events)
            return
        events = (0 if link.is_led else _READ) | (_WRITE if link.is_blocked else 0)
        if fd in self._links and self._events.get(fd) != events:
            self._set(fd, events)

    def _set(self, fd: int, events: int) -> None:
        is_new = fd not in self._events
        self._events[fd] = events
        if self._epoll is not None:
            (self._epoll.register if is_new else self._epoll.modify)(fd, events)
        else:
            self.wake()

    def wake(self) -> None:
        """Wake the waiting thread. Any thread may call it, without a lock."""
        with contextlib.suppress(OSError):  # a full socket wakes the thread as well; a closed one has no waiter
            self._wake_write.send(b"\0")

    def wait(self, timeout_s: float | None) -> list[tuple[Readable, bool, bool]]:
        """Wait, and return (link, can be read, can be written) of each ready channel. The list may be empty."""
        ready = []
        for fd, events in self._poll(timeout_s):
            link = self._links.get(fd)
            if link is not None:
                ready.append((link, bool(events & ~_WRITE), bool(events & _WRITE)))
            elif fd in self._blocked:
                ready.append((self._blocked[fd], False, True))
            elif fd == self._wake_read.fileno():
                with contextlib.suppress(BlockingIOError):  # already read
                    self._wake_read.recv(4096)
            # Any other descriptor was removed after the wait began.
        return ready

    def _poll(self, timeout_s: float | None) -> list[tuple[int, int]]:
        if self._epoll is not None:
            ready: list[tuple[int, int]] = self._epoll.poll(timeout_s)
            return ready
        poll = select.poll()
        for fd, events in list(self._events.items()):
            poll.register(fd, events)
        return poll.poll(None if timeout_s is None else timeout_s * 1000)

    def close(self) -> None:
        if self._epoll is not None:
            self._epoll.close()
        self._wake_read.close()
        self._wake_write.close()

    def close_in_child(self) -> None:
        """Close this process's copies after a fork. That does not change the parent's epoll."""
        self.close()
