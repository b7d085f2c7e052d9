"""Values that stay on nodes, as a client has them whose head holds them: references by number, and their bytes."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

from ..calls.futures import Future, may_wait, refuse_to_wait, values_of
from ..errors import InternalError, PoolClosed, SkywardError
from ..values.ref import Elsewhere, Pickled, Ref
from ..wire.blobs import DIGEST_SIZE, Blob
from ..wire.channel import BLOBS
from ..wire.frames import Frame, FrameKind
from ..wire.payloads import Encoded
from .head.plain import load_plain
from .head.requests import Requests
from .head_link import HeadLink, RemoteBlob
from .kept_received import KeptReceived, KeptValue
from .ledger import Ledger
from .link import Readable
from .tasks import Received, cannot_send


class HostedBlob(RemoteBlob, Elsewhere):
    """Blob of a value that stays on nodes. When it is garbage-collected, the head forgets the reference.

    Args:
        digest: Name of the content.
        size: Size in bytes.
        number: The head's number of the reference.
        values: Values that stay, of the same engine.
        own: The program's copy, for another head; None: it has none.
    """

    def __init__(self, digest: bytes, size: int, number: int, values: HostedValues, own: Blob | None = None) -> None:
        super().__init__(digest, size, -1)
        self.own = own
        self.number = number
        self._values = values
        values.alive[number] = self

    def here(self) -> None:
        return None

    def map(self) -> Any:
        return self

    def held(self, pickled: Pickled) -> KeptValue:
        return KeptValue(pickled, self._values)

    def __del__(self) -> None:
        if getattr(self, "number", 0):  # missing if the constructor was interrupted
            self._values.forget_soon(self.number)


class HostedValues:
    """References of a client to values that stay. Thread-safe, except the handlers of frames.

    Args:
        ledger: Shared state of the client's engine.
        requests: Requests to the head.
        next_number: Returns a number that nothing else has.
        keeps_copies: Whether another head may need what the program has put.
    """

    def __init__(
        self, ledger: Ledger, requests: Requests, next_number: Callable[[], int], *, keeps_copies: bool = True
    ) -> None:
        self._ledger = ledger
        self._requests = requests
        self._next_number = next_number
        self._keeps_copies = keeps_copies
        self.link: HeadLink | None = None
        self.alive: WeakValueDictionary[int, HostedBlob] = WeakValueDictionary()
        """Blobs that something here refers to, by the head's number."""
        self.soon: Callable[[Callable[[], object]], object] = lambda action: None
        """Lets the I/O thread do something soon; for finalizers."""
        self._held: dict[int, dict[bytes, HostedBlob]] = {}
        """References that have come for a task's value, which follows."""
        self._fetches: dict[int, dict[bytes, Future[Blob]]] = {}

    def put(self, payload: Encoded, nodes: tuple[int, ...]) -> Ref[Any]:
        """Make a reference of a packed value, and send its blobs to `nodes`.

        Raises:
            PoolClosed: The pool is closed.
            UsageError: This process has no room to send a blob; or the head has none to take it. In a done-callback,
                the first use of the reference raises what the head says.
        """
        if not payload.blobs:
            self._ledger.require_open()
            return KeptReceived(payload.body, (), self).decode()
        own = {blob.digest: blob for blob in payload.blobs if not isinstance(blob, RemoteBlob)}
        sent = tuple(own.values())
        with self._ledger:
            self._ledger.require_open()
            link = self._link()
            try:
                for blob in sent:
                    link.hold_blob(blob)
            except OSError as error:
                raise cannot_send("put()", error) from error
            self._ledger.dirty.add(link)
            places = [(blob.digest, blob.size, self._next_number()) for blob in payload.blobs]
            made = self._requests.begin("put", places, nodes, priority=BLOBS)
        copies: dict[bytes, Blob] = own if self._keeps_copies else {}
        blobs = tuple(HostedBlob(digest, size, number, self, copies.get(digest)) for digest, size, number in places)
        if may_wait():
            try:
                made.result()
            finally:
                self._release(link, sent)
        else:  # in a done-callback: what uses the reference stays behind it, and raises what the head says
            made.add_done_callback(lambda _: self.soon(lambda: self._release(link, sent)))
        return KeptReceived(payload.body, blobs, self).decode()

    def _release(self, link: HeadLink, blobs: tuple[Blob, ...]) -> None:
        with self._ledger:
            link.release_blobs(blobs)

    def _link(self) -> HeadLink:
        if self.link is None:
            raise PoolClosed("pool: not open yet; use it inside its `with` block")
        return self.link

    def put_again(self, digest: bytes) -> bool:
        """Send another head the bytes of a value that was put. Return False if there is no copy here. Blocks."""
        found = [blob for blob in self.alive.values() if blob.digest == digest and blob.own is not None]
        if not found or found[0].own is None:
            return False
        own = found[0].own
        with self._ledger:
            link = self._link()
            link.hold_blob(own)
            self._ledger.dirty.add(link)
            made = self._requests.begin("put", [(digest, own.size, found[0].number)], (), priority=BLOBS)
        try:
            made.result()
        finally:
            self._release(link, (own,))
        return True

    def nodes_of(self, blobs: tuple[Blob, ...]) -> tuple[int, ...]:
        """Return the nodes that have all of these blobs; none if there are no blobs."""
        if not blobs or not self._ledger.is_open:
            return ()
        nodes: tuple[int, ...] = self._requests.ask("nodes_of", tuple(blob.digest for blob in blobs))
        return nodes

    def fetch(self, blobs: tuple[Blob, ...]) -> list[Blob]:
        """Get the bytes of blobs, and wait for them.

        Raises:
            RefLost: No node has one of them.
            PoolClosed: The pool is closed, and its nodes are gone.
        """
        if not blobs:
            return []
        refuse_to_wait("ref.get()")
        wanted: dict[bytes, Future[Blob]] = {blob.digest: Future() for blob in blobs}
        with self._ledger:
            self._ledger.require_open()
            number = self._next_number()
            self._fetches[number] = dict(wanted)
            # With the priority of blobs: this very blob may be on its way to the head.
            self._link().channel.queue(FrameKind.FETCH, number, b"".join(wanted), priority=BLOBS)
            self._ledger.dirty.add(self._link())
        arrived = dict(zip(wanted, values_of(list(wanted.values())), strict=True))
        return [arrived[blob.digest] for blob in blobs]

    def forget_soon(self, number: int) -> None:
        """Tell the head that a reference is gone. Takes no lock, because finalizers call it."""
        self.soon(lambda: self._forget(number))

    def _forget(self, number: int) -> None:
        with self._ledger:
            if self.link is not None and self._ledger.is_open:
                # Behind the calls that took the reference along.
                self.link.channel.queue(FrameKind.UNHELD, number, priority=BLOBS)
                self._ledger.dirty.add(self.link)

    # With the ledger locked -----------------------------------------------------------------------------------------

    def on_held(self, frame: Frame) -> None:
        """Take the references in the value of a task, which follows."""
        blobs = [HostedBlob(digest, size, number, self) for digest, size, number in load_plain(frame.body)]
        self._held.setdefault(frame.ident, {}).update({blob.digest: blob for blob in blobs})

    def named(self, task: int, digest: bytes) -> Blob | None:
        """Return a blob of a value that refers to it by name."""
        return self._held.get(task, {}).get(digest)

    def taken(self, task: int) -> None:
        """Forget the references that came for a value which has been taken."""
        self._held.pop(task, None)

    def received(self, link: HeadLink, frame: Frame) -> Received:
        """Take a value that stays on its node."""
        plain = link.received(frame)
        return KeptReceived(plain.body, plain.blobs, self)

    def on_fetched(self, link: Readable, frame: Frame) -> None:
        assert isinstance(link, HeadLink)
        digest = frame.body[:DIGEST_SIZE]
        waiting = self._fetches.get(frame.ident, {})
        future = waiting.pop(digest, None)
        blob = link.take_blobs(frame.ident).get(digest)
        if not waiting:
            self._fetches.pop(frame.ident, None)
        if future is None:
            return
        if frame.lane:
            error = pickle.loads(frame.body[DIGEST_SIZE:])
            self._ledger.after.append(lambda: future.settle_error(error))
        elif blob is None:
            lost = InternalError("ref: its bytes did not come; report this bug")
            self._ledger.after.append(lambda: future.settle_error(lost))
        else:
            self._ledger.after.append(lambda: future.settle(blob))

    def go_on(self, link: HeadLink) -> None:
        """Tell another head which references there are, and ask it for what an earlier one has not sent."""
        self._held.clear()
        places = [(blob.digest, blob.size, number) for number, blob in sorted(self.alive.items())]
        if places:
            self._requests.tell("refer_again", places)
        for number, waiting in self._fetches.items():
            link.channel.queue(FrameKind.FETCH, number, b"".join(waiting), priority=BLOBS)

    def close(self) -> None:
        """Fail those who wait for a blob."""
        self.soon = lambda action: None
        self.lose(PoolClosed("pool: closed before a kept value had come; read it inside the `with` block"))

    def lose(self, error: SkywardError) -> None:
        """Fail those who wait for a blob, because nobody knows any longer where it is."""
        self._held.clear()
        fetches, self._fetches = list(self._fetches.values()), {}
        for future in [future for waiting in fetches for future in waiting.values()]:
            self._ledger.after.append(lambda future=future: future.settle_error(error))  # type: ignore[misc]
