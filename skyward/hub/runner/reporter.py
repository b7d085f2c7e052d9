"""Messages of a runner to its hub. They wait on disk and are sent again until the hub has them."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import HubError, HubUnreachable
from ..client.connection import HubConnection, path_of
from ..client.settings import Address
from ..model.jobs import PROTOCOL, Feed

BEAT_S = 1.0
"""Seconds between two signs of life."""
FENCE_S = 1200.0
"""Seconds without an answer after which a runner ends: the hub gives its job to another one a little later."""
MOST_SAVES = 100
"""Notes of saves that wait for a hub that is away. Older ones are dropped."""
_PIECE = 1 << 20
_SLICE_S = 0.25
_RETRY_S = 1.0
_PACE_S = 0.2
"""Seconds between two pieces of a feed."""
_NOTE = 200
"""Most characters of a note."""
_STALE = frozenset({"unauthenticated", "forbidden", "missing", "conflict"})
"""Codes by which the hub says that the attempt is over, or its token is gone. A status alone may be a proxy's."""
_TOO_LARGE = 413
"""Status by which a proxy refuses a body for good."""

_log = logging.getLogger(__name__)


class Stale(Exception):
    """The hub has given the attempt up. The runner must end its machines and itself."""


class Unheard(Stale):
    """The hub was silent for too long, or the runner must end before it answers."""


class HubLink:
    """Requests about one attempt. Use it from one thread.

    Args:
        address: The hub, with the attempt's token.
        job: Id of the job.
        attempt: Number of the attempt.
    """

    def __init__(self, address: Address, job: str, attempt: int) -> None:
        self._connection = HubConnection(address)
        self._job, self._attempt = job, attempt

    def close(self) -> None:
        self._connection.close()

    def path(self, *parts: str) -> str:
        return path_of("v1", "jobs", self._job, "attempts", str(self._attempt), *parts)

    def beat(
        self,
        *,
        is_running: bool,
        cost_usd: float,
        saved_at: int | None = None,
        note: str = "",
        saves: Sequence[Mapping[str, Any]] = (),
        gpus: Sequence[Mapping[str, Any]] = (),
    ) -> dict[str, Any]:
        """Send a sign of life with news of saves and GPUs, and return the hub's order.

        Raises:
            Stale: The attempt is over.
            HubUnreachable: There was no answer.
        """
        state = {"is_running": is_running, "cost_usd": cost_usd, "saved_at": saved_at, "note": note[:_NOTE]}
        body = {**state, "saves": list(saves), "gpus": list(gpus), "protocol": PROTOCOL}
        order: dict[str, Any] = self._ask(lambda: self._connection.json("POST", self.path("beat"), body))
        return order

    def end(self, end: str, error: str, **facts: Any) -> None:
        """Tell how the attempt ended.

        Args:
            end: Name of its end.
            error: Why, in words.
            facts: Further fields of the message, such as `cost_usd`.
        """
        body = {"end": end, "error": error[:4000], **facts}
        self._ask(lambda: self._connection.json("POST", self.path("end"), body))

    def next_attempt(self, idle_cost_usd: float, wait_s: float) -> dict[str, Any]:
        """Ask for the next attempt, as the runner that was started for this one."""
        body = {"idle_cost_usd": idle_cost_usd, "wait_s": wait_s}
        order: dict[str, Any] = self._ask(lambda: self._connection.json("POST", self.path("next"), body))
        return order

    def give_back(self, idle_cost_usd: float) -> None:
        """Tell that the machines that waited are gone."""
        body = {"idle_cost_usd": idle_cost_usd}
        self._ask(lambda: self._connection.json("POST", self.path("give-back"), body))

    def send_piece(self, feed: Feed, file: Path, start: int) -> int:
        """Send a piece of a feed from an offset on, and return the offset behind what the hub has."""
        with file.open("rb") as source:
            source.seek(start)
            piece = source.read(_PIECE)
        if not piece:
            return start
        answer = self._ask(lambda: self._connection.send("PUT", self.path(feed), piece, query={"start": start}))
        return int(answer["size"])

    def send_result(self, name: str, file: Path) -> None:
        """Send the packed value or exception."""
        with file.open("rb") as source:
            self._ask(lambda: self._connection.upload("PUT", self.path("results", name), source))

    def download(self, name: str, to: Path) -> None:
        """Write a blob of the job to a file."""
        with to.open("wb") as file:
            self._ask(lambda: self._connection.download(path_of("v1", "jobs", self._job, "results", name), file))

    def _ask(self, request: Callable[[], Any]) -> Any:
        try:
            return request()
        except HubUnreachable:
            raise
        except HubError as error:
            if error.code in _STALE:
                raise Stale(str(error)) from error
            # A hub of another version may be mended while the job goes on.
            if error.retryable or error.field == "protocol":
                raise HubUnreachable(str(error), url=error.url, retryable=True) from error
            # A proxy whose hub restarts answers for it, such as with 404 and a page.
            if not error.code and error.status != _TOO_LARGE:
                raise HubUnreachable(str(error), url=error.url, status=error.status, retryable=True) from error
            raise


class Reporter:
    """Two threads that speak to the hub: one sends signs of life and collects commands, the other sends feeds.

    Args:
        make_link: Makes the link of a thread.
        folder: Folder with a file for each feed.
        feeds: Feeds of the attempt, output first.
        on_order: Called with each new command, its number and its grace in seconds.
        on_stale: Called once, when the attempt is given up or the hub was silent for `FENCE_S`.
        cost_usd: Returns the cost so far.
        gpus: Returns a sample of the load of its GPUs; empty if none is due. One that does not arrive is lost.
    """

    def __init__(
        self,
        make_link: Callable[[], HubLink],
        folder: Path,
        feeds: Sequence[Feed],
        *,
        on_order: Callable[[str, float], None],
        on_stale: Callable[[], None],
        cost_usd: Callable[[], float],
        gpus: Callable[[], Sequence[Mapping[str, Any]]],
    ) -> None:
        self._make_link, self._folder = make_link, folder
        self._on_order, self._on_stale, self._cost_usd = on_order, on_stale, cost_usd
        self._gpus = gpus
        self.is_running = False
        self.note = ""
        """State of its machines in words, until they are ready."""
        self.saved_at: int | None = None
        """Time of the last checkpoint that was asked for and is durable, see `hub_time`."""
        self._sent = dict.fromkeys(feeds, 0)
        self._seen = 0
        self._ahead_ms = 0
        self.save_count = 0
        """Saves that the training has noted."""
        self._saves: deque[tuple[float, dict[str, Any]]] = deque(maxlen=MOST_SAVES)
        self._has_save = threading.Condition()
        self._answered_at = time.monotonic()
        self._has_ended, self._is_stale, self._has_bytes = threading.Event(), threading.Event(), threading.Event()
        self._wake = threading.Event()
        self._threads = [
            threading.Thread(target=self._guarded, args=(self._beat_always,), name="skyward-job-beat", daemon=True),
            threading.Thread(target=self._guarded, args=(self._send_always,), name="skyward-job-output", daemon=True),
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def hub_time(self) -> int:
        """Return the time by the hub's clock, in milliseconds since 1970: this machine's may be wrong by hours."""
        return int(time.time() * 1000) - self._ahead_ms

    def beat_now(self) -> None:
        """Send the next sign of life at once, because something has changed."""
        self._wake.set()

    def send_feeds(self) -> None:
        """Send output or items that were written: at once, or a little after the last."""
        self._has_bytes.set()

    def add_save(self, note: Mapping[str, Any]) -> None:
        """Send a note of a save with the next sign of life. The hub counts each number once."""
        with self._has_save:
            self.save_count += 1
            self._saves.append((time.monotonic(), {**note, "number": self.save_count}))
            self._has_save.notify_all()
        self.beat_now()

    def has_saved_since(self, count: int, limit_s: float) -> bool:
        """Wait until more than `count` saves were noted. Return False after `limit_s`."""
        with self._has_save:
            return self._has_save.wait_for(lambda: self.save_count > count, limit_s)

    def send_saves(self, link: HubLink) -> dict[str, Any]:
        """Send a sign of life with the saves that the hub lacks, and return its order. See `HubLink.beat`."""
        with self._has_save:
            now, noted = time.monotonic(), list(self._saves)
        # Ages and not times: the clock of this machine may be off.
        saves = [{**note, "age_s": now - at} for at, note in noted]
        order = link.beat(
            is_running=self.is_running,
            cost_usd=self._cost_usd(),
            saved_at=self.saved_at,
            note="" if self.is_running else self.note,
            saves=saves,
            gpus=self._gpus() if self.is_running else (),
        )
        with self._has_save:
            while self._saves and noted and self._saves[0][1]["number"] <= noted[-1][1]["number"]:
                self._saves.popleft()
        return order

    def stop(self, limit_s: float = FENCE_S, must_end: threading.Event | None = None) -> None:
        """End both threads. Feeds that were written before have been sent, unless the attempt is stale.

        Args:
            limit_s: Seconds for which each of them may still speak to the hub.
            must_end: Ends the wait, too. A signal may set it.
        """
        self._has_ended.set()
        self._has_bytes.set()
        self._wake.set()
        for thread in self._threads:
            deadline = time.monotonic() + limit_s
            # In slices: a signal may reach another thread, and its handler runs when this one wakes.
            while thread.is_alive() and time.monotonic() < deadline and not (must_end and must_end.is_set()):
                thread.join(_SLICE_S)

    def _guarded(self, work: Callable[[], None]) -> None:
        """Do the work of a thread. A mistake in it gives the attempt up, because nobody would renew its lease."""
        try:
            work()
        except Exception:
            _log.exception("a thread of the runner failed")
            self._give_up()

    def _beat_always(self) -> None:
        link = self._make_link()
        while not (self._has_ended.is_set() or self._is_stale.is_set()):
            self._wake.clear()
            try:
                order = self.send_saves(link)
                self._answered_at = time.monotonic()
                self._ahead_ms = int(time.time() * 1000) - order["now"]
                if order["number"] > self._seen:
                    self._seen = order["number"]
                    self._on_order(str(order["command"]), float(order["grace_s"]))
            except HubUnreachable as error:
                _log.warning("the hub does not answer: %s", error)
                if time.monotonic() - self._answered_at > FENCE_S:
                    self._give_up()
            except Stale as error:
                _log.warning("this attempt is over: %s", error)
                self._give_up()
            self._wake.wait(BEAT_S)
        link.close()

    def _send_always(self) -> None:
        link = self._make_link()
        while not self._is_stale.is_set():
            self._has_bytes.clear()
            is_last = self._has_ended.is_set()  # asked first: the last bytes come before the end
            try:
                size = max([self._send_piece(link, feed) for feed in self._sent])
                if not size:
                    if is_last:
                        break
                    self._has_bytes.wait()
                elif size < _PIECE:
                    self._has_ended.wait(_PACE_S)  # further lines go together
            except HubUnreachable:
                self._is_stale.wait(_RETRY_S)
            except Stale:
                self._give_up()
        link.close()

    def _send_piece(self, link: HubLink, feed: Feed) -> int:
        """Send the next piece of a feed, and return its size: 0 if the hub has all of it."""
        before = self._sent[feed]
        if (file := self._folder / feed).exists():
            self._sent[feed] = link.send_piece(feed, file, before)
        return self._sent[feed] - before

    def _give_up(self) -> None:
        if not self._is_stale.is_set():
            self._is_stale.set()
            self._has_bytes.set()
            self._on_stale()


def until_heard(
    action: Callable[[], object],
    *,
    limit_s: float = FENCE_S,
    folder: Path | None = None,
    must_end: threading.Event | None = None,
) -> None:
    """Repeat an action until the hub answers.

    Args:
        action: The action.
        limit_s: Seconds for which it is repeated.
        folder: Folder of the runner. Somebody who removes it has given the runner up.
        must_end: Ends the wait, too. A signal may set it.

    Raises:
        Unheard: The hub was silent for `limit_s`, or `must_end` is set.
        Stale: The attempt is over, or the folder is gone.
    """
    deadline = time.monotonic() + limit_s
    while True:
        try:
            action()
            return
        except HubUnreachable as error:
            if time.monotonic() > deadline:
                raise Unheard(f"the hub did not answer for {limit_s:g} s") from error
            if must_end is not None and must_end.is_set():
                raise Unheard("the hub did not answer before this runner had to end") from error
            if folder is not None and not folder.exists():
                raise Stale("its folder was removed") from error
            # It does not wait for the event: a signal that sets it meanwhile could lock it against itself.
            time.sleep(_RETRY_S)
