"""Client's side of its head: the link, and how it is made again. To its client a head is as an agent."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from ..console.words import duration
from ..errors import InternalError, NodeError
from ..values.machine import Gone
from ..wire.blobs import DIGEST_SIZE, Blob
from ..wire.channel import BLOBS, CONTROL
from ..wire.ends import Ends
from ..wire.frames import PERMITTED, Frame, FrameKind
from ..wire.payloads import Encoded
from .dialler import BeganAgain, Dialler, Forgotten, Taken
from .ledger import Ledger
from .link import NodeLink, Readable
from .link_times import LINK_TIMES
from .liveness import Liveness
from .tasks import WireFunction
from .threads import in_words, start_thread

_log = logging.getLogger(__name__)

_SILENT_S = 30.0
"""Seconds without an answer of the head after which a line says so. A detached pool may wait for hours."""


class RemoteBlob(Blob):
    """Blob whose bytes the head has, or gets from nodes. Only its name travels."""


class HeadLink(NodeLink):
    """Link to the head. Used under the ledger's lock.

    Unlike an agent, a head starts a call as soon as it has the frame. So a call whose blobs are on the way stays behind
    them, and so do all later frames about it.
    """

    def __init__(self, facts: dict[str, Any], dialler: Dialler) -> None:
        super().__init__(0, dialler.channel, facts, dialler=dialler)
        self._of_number: dict[int, dict[bytes, Blob]] = {}
        """Blobs that have arrived, by the number of their call."""
        self._bulky: set[int] = set()
        """Calls and actors whose frames stay behind their blobs."""

    # Going out ------------------------------------------------------------------------------------------------------

    def send_call(
        self,
        number: int,
        body: bytes,
        function: WireFunction,
        payload: Encoded,
        *,
        behind: int = 0,
        is_permitted: bool = False,
    ) -> None:
        """Send a call behind its function and blobs. `behind`: its actor, whose calls stay in order.

        Raises:
            OSError: There is no room to send a blob, and nothing was sent.
        """
        self.send_parts(function, payload)
        if function.payload.blobs or payload.blobs or behind in self._bulky:
            self._bulky.add(number)
            if behind:
                self._bulky.add(behind)
        self.tell_of(number, FrameKind.CALL, body, flags=PERMITTED if is_permitted else 0)

    def tell_of(self, number: int, kind: int, body: bytes = b"", *, lane: int = 0, flags: int = 0) -> None:
        """Send a frame about a call that was sent before."""
        self.channel.queue(kind, number, body, flags=flags, lane=lane, priority=self.priority_of(number))

    def priority_of(self, number: int) -> int:
        """Return the priority of frames about a call or an actor."""
        return BLOBS if number in self._bulky else CONTROL

    def stay_behind(self, number: int) -> None:
        """Send all further frames about an actor behind its blobs."""
        self._bulky.add(number)

    def ended(self, number: int, function: WireFunction, payload: Encoded) -> None:
        """Release the function and blobs of a call that has ended."""
        self._bulky.discard(number)
        self.release_parts(function, payload)

    def _hold_blobs(self, blobs: tuple[Blob, ...], *, is_from_here: bool = False) -> None:
        own = tuple(blob for blob in blobs if not isinstance(blob, RemoteBlob))
        super()._hold_blobs(own, is_from_here=is_from_here)

    def release_blobs(self, blobs: tuple[Blob, ...]) -> None:
        super().release_blobs(tuple(blob for blob in blobs if not isinstance(blob, RemoteBlob)))

    # Coming in ------------------------------------------------------------------------------------------------------

    def receive(self) -> Iterator[Frame]:
        """Read once and yield the frames, except blobs: those are kept for the frame that needs them."""
        for frame in self.channel.receive():
            if frame.kind == FrameKind.BLOB:
                digest = frame.body[:DIGEST_SIZE]
                size = int.from_bytes(frame.body[DIGEST_SIZE : DIGEST_SIZE + 8], "little")
                self._of_number.setdefault(frame.ident, {})[digest] = Blob(digest, size, frame.fd)
            else:
                yield frame

    def _blob_for(self, task: int, digest: bytes) -> Blob | None:
        arrived = self._of_number.get(task, {}).pop(digest, None)
        return arrived or self.named_by(task, digest)

    def take_blobs(self, number: int) -> dict[bytes, Blob]:
        """Hand over the blobs that have arrived under a number."""
        return self._of_number.pop(number, {})


class _Lost(Protocol):
    """Gets the reason why a head is lost.

    `has_ended`: its machine says that the head has ended. `gone`: its machine is gone for certain, and why.
    """

    def __call__(self, why: str, *, has_ended: bool = False, gone: Gone | None = None) -> object: ...


class HeadRepair:
    """Redials the head when its link ends, for as long as its lease may hold. Then it is lost.

    Args:
        ledger: Shared state of the client's engine.
        liveness: Finds a silent link.
        lease_s: Seconds that the head goes on without its client.
        lost: Called when the head is lost.
        taken: Called with the reason when another client has taken the head over.
        why_gone: Returns why the head's machine is gone for certain; None: it may be there.
    """

    def __init__(
        self,
        ledger: Ledger,
        liveness: Liveness,
        lease_s: float,
        lost: _Lost,
        taken: Callable[[str], object],
        *,
        why_gone: Callable[[], Gone | None] = lambda: None,
    ) -> None:
        self._ledger = ledger
        self._liveness = liveness
        self.lease_s = lease_s
        self._lost = lost
        self._taken = taken
        self._why_gone = why_gone
        self.succeed: Callable[[HeadLink, float], object]
        """Function that goes on with the process that has begun for a killed head. It dials until a time (monotonic),
        and raises the errors of `Dialler.dial`. Set by the engine."""

    def watch(self, link: NodeLink) -> None:
        """Read the link from now on, and check that it is alive. Needs the ledger's lock."""
        self._ledger.watcher.add(link)
        self._liveness.watch(link, self.lease_s, time.monotonic())
        self._ledger.dirty.add(link)

    def unwatch(self, link: NodeLink) -> None:
        """Stop reading the link. Needs the ledger's lock."""
        link.is_led = link.is_blocked = False
        self._ledger.watcher.remove(link)
        self._liveness.forget(link)
        self._ledger.dirty.discard(link)

    def link_gone(self, link: NodeLink, why: str) -> None:
        self._let_go(link, self._reconnect)

    def machine_gone(self, link: NodeLink, gone: Gone) -> None:
        """Go on without a head whose machine is gone, or about to end, as somebody else has found. Returns at once."""

        def lose(link: NodeLink, ends: Ends | None) -> None:
            if ends is not None:
                ends.close()
            self._lost(gone.reason, gone=gone)

        self._let_go(link, lose)

    def _let_go(self, link: NodeLink, then: Callable[[NodeLink, Ends | None], object]) -> None:
        """Leave a link, and do something in a thread with what it was; nothing if another thread has left it."""
        with self._ledger:
            if not self._ledger.is_open or not link.channel.is_attached:
                return
            self.unwatch(link)
            ends = link.channel.release()
        start_thread(
            lambda: then(link, ends),
            name="skyward-reconnect",
            failed=lambda error: self._lost(f"its link could not be restored: {in_words(error)}"),
        )

    def leave(self, link: NodeLink) -> bool:
        """Stop reading a link, because another head goes on. Return False if it is broken, or was left before."""
        with self._ledger:
            if not self._ledger.is_open or not link.channel.is_attached:
                return False
            self.unwatch(link)
            ends = link.channel.release()
            if ends is not None:
                self._ledger.after.append(ends.close)
        return True

    def gone(self, line: Readable) -> None:
        """Do nothing: there are no direct lines to a head's slots."""

    def _reconnect(self, link: NodeLink, ends: Ends | None) -> None:
        assert link.dialler is not None
        if ends is not None:
            ends.close()
        began = time.monotonic()
        deadline = began + self.lease_s + LINK_TIMES.margin_s
        was_told = False

        def why_gone() -> Gone | None:
            nonlocal was_told
            if not was_told and time.monotonic() - began >= _SILENT_S:
                was_told, left_s = True, deadline - time.monotonic()
                _log.warning(
                    "head of the pool: does not answer for %s; calls wait for it, for %s at most",
                    duration(time.monotonic() - began),
                    duration(left_s),
                )
            return self._why_gone()

        try:
            try:
                new_ends, facts = link.dialler.dial_until(deadline, LINK_TIMES, why_gone)
            except BeganAgain:
                assert isinstance(link, HeadLink)
                self.succeed(link, deadline)
                return
        except Taken as error:
            self._taken(str(error))
            return
        except Forgotten as error:
            self._lost(str(error), has_ended=error.gone is None, gone=error.gone)
            return
        except (NodeError, InternalError) as error:
            self._lost(str(error))
            return
        with self._ledger:
            if not self._ledger.is_open:
                self._ledger.after.append(new_ends.close)
                return
            link.dialler.channel.attach(new_ends, facts["received"])
            link.follow()
            self.watch(link)
        self._ledger.watcher.wake()
        if was_told:
            _log.warning("head of the pool: answers again, after %s", duration(time.monotonic() - began))


class NoWidth:
    """Width of a link that keeps one channel."""

    def measured(self, link: Readable) -> None:
        link.pongs = link.channel.pongs

    def consider(self, link: Readable) -> None:
        """Do nothing."""
