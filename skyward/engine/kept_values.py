"""Values that stay on nodes: their blobs, the references that hold them, and their way to other nodes.

A value that stays (`f(x).keep()`, `pool.put`) is a payload whose blobs are `KeptBlob`s. All users of the value refer
to these objects: the user's reference, a task's arguments, a graph. When the last of them is garbage-collected, the
nodes drop the bytes. So nothing else counts users, and a reference that is dropped while a call waits does no harm.

A task that needs a blob on another node is sent at once. Its agent lets others overtake it until the blob is there. The
nodes exchange it directly where they reach each other (`transfers`). Otherwise the client fetches it from a node that
has it (FETCH) and passes it on. On one machine only descriptors travel, so no byte is copied.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import field
from functools import partial
from itertools import islice
from typing import Any

from ..calls.futures import Future, refuse_to_wait, values_of
from ..core.records import dataclass
from ..errors import PoolClosed, RefLost, UsageError
from ..values.ref import Elsewhere, Pickled, Ref
from ..wire.blobs import DIGEST_SIZE, Blob, unpack_places
from ..wire.channel import BLOBS
from ..wire.frames import Frame, FrameKind
from ..wire.payloads import Encoded
from ..wire.tasks import references
from .kept_received import KeptReceived, KeptValue
from .ledger import Ledger
from .link import NodeLink, Readable
from .task_dispatcher import TaskDispatcher
from .tasks import cannot_send
from .transfers import Transfers

_PREFERRED = 8
"""Most nodes that a task prefers: the scheduler looks at each, for each task."""


class KeptBlob(Blob, Elsewhere):
    """Blob of a value that stays on nodes. When it is garbage-collected, they drop it.

    Args:
        digest: Name of the content.
        size: Size in bytes.
        source: The client's own copy of the bytes; None: only nodes have them.
        values: Values that stay, of the same engine. Makes the nodes drop the blob.
    """

    def __init__(self, digest: bytes, size: int, source: Blob | None, values: KeptValues) -> None:
        super().__init__(digest, size, -1)
        self.source = source
        self.holders: list[NodeLink] = []
        """Nodes that were told to keep it. They hold it until it is forgotten."""
        self.places: list[NodeLink] = []
        """Nodes that have had it. Some may have dropped it, or may be gone."""
        self._values = values

    def held_by(self, link: NodeLink) -> None:
        """Note that a node was told to keep it."""
        self.holders.append(link)
        link.held.add(self)

    def here(self) -> Blob | None:
        return self.source

    def map(self) -> Any:
        return self

    def held(self, pickled: Pickled) -> KeptValue:
        return KeptValue(pickled, self._values)

    def sent_to(self, link: object) -> None:
        if isinstance(link, NodeLink) and link not in self.places:
            self.places.append(link)

    def __del__(self) -> None:
        if getattr(self, "places", None):  # missing if the constructor was interrupted
            self._values.forget_soon(self.digest, tuple(self.holders))


@dataclass(eq=False)
class _Fetch:
    """Blob on its way from a node through this process."""

    blob: Blob
    source: NodeLink | None = None
    links: list[NodeLink] = field(default_factory=list)
    """Nodes that need it."""
    futures: list[Future[Blob | None]] = field(default_factory=list)
    """Callers that need it."""
    stuck: list[NodeLink] = field(default_factory=list)
    """Nodes that have it and cannot send it now. It is not lost there."""
    is_recovered: bool = False
    """Whether the one who put it was asked for its bytes."""


@dataclass(frozen=True, eq=False)
class _Move:
    """Blob that a node will let go of when another one has it."""

    blob: KeptBlob
    source: NodeLink
    target: NodeLink

    @property
    def nodes(self) -> tuple[int, int]:
        return self.source.node, self.target.node


class KeptValues:
    """Blobs that stay on nodes, and those on their way from one node to another.

    Args:
        ledger: Shared state of the engine.
        dispatcher: Sends the tasks that need blobs, and fails them.
        transfers: Carries blobs from node to node.
    """

    def __init__(self, ledger: Ledger, dispatcher: TaskDispatcher, transfers: Transfers) -> None:
        self._ledger = ledger
        self._dispatcher = dispatcher
        self._transfers = transfers
        transfers.instead = self._get_here
        transfers.arrived = self._arrived
        dispatcher.on_wanted = self._want
        dispatcher.places_of = self._places_of
        self.soon: Callable[[Callable[[], object]], object] = lambda action: None
        """Function that lets the I/O thread do something. It takes no lock, as finalizers require."""
        self._fetches: dict[int, _Fetch] = {}
        """Open fetches, by number."""
        self._coming: dict[tuple[NodeLink, bytes], list[Future[Blob | None]]] = {}
        """Callers whose blob is on its way to their node from another one, by node and name of the blob."""
        self._before: dict[bytes, list[NodeLink]] = {}
        """Nodes that have a blob from an earlier head, by its name, until it is known who refers to it."""
        self.recover: Callable[[KeptBlob], Future[bool]] | None = None
        """Function that asks whoever put a value for its bytes, if no node has them. None: nobody else has any."""
        self._moves: dict[int, _Move] = {}
        """Moves whose target was asked whether it has the blob, by number."""

    def on_up(self, node: int) -> None:
        """Let a node get blobs from others. Needs the ledger's lock."""
        link = self._ledger.links[node]
        link.bring = partial(self._transfers.bring, link)
        for digest, size, added in unpack_places(link.facts.pop("blobs", "")):
            self._before.setdefault(digest, []).append(link)
            if added:
                link.found(digest, size, added)

    def find(self, blobs: Iterable[KeptBlob]) -> None:
        """Hold blobs of an earlier head where they are. Needs the ledger's lock, since the nodes are up."""
        before, self._before = self._before, {}
        for blob in blobs:
            for link in before.get(blob.digest, ()):
                link.found(blob.digest, blob.size, 0)  # a value that has come here before will come again, and drop it
                link.hold_blob(blob)
                blob.held_by(link)

    # For the pool, without the lock ---------------------------------------------------------------------------------

    def put(self, payload: Encoded, nodes: tuple[int, ...]) -> Ref[Any]:
        """Make a reference of a packed value, and send its blobs to `nodes`.

        Raises:
            PoolClosed: The pool is closed.
            UsageError: This process has no room to send a blob.
        """
        blobs = tuple(self._kept(blob) for blob in payload.blobs)
        with self._ledger:
            self._ledger.require_open()
            self.hold(blobs, nodes)
        return KeptReceived(payload.body, blobs, self).decode()

    def _kept(self, blob: Blob) -> KeptBlob:
        return blob if isinstance(blob, KeptBlob) else KeptBlob(blob.digest, blob.size, blob, self)

    def nodes_of(self, blobs: tuple[Blob, ...]) -> tuple[int, ...]:
        """Return the nodes that have all of these blobs; none if there are no blobs."""
        if not blobs or not self._ledger.is_open:
            return ()
        with self._ledger.lock:
            links = self._ledger.links.values()
            return tuple(sorted(link.node for link in links if all(link.has_blob(blob.digest) for blob in blobs)))

    def fetch(self, blobs: tuple[Blob, ...]) -> list[Blob]:
        """Get the bytes of blobs from the nodes, and wait for them.

        Raises:
            RefLost: No node has one of them.
            PoolClosed: The pool is closed, and its nodes are gone.
        """
        if all(blob.here() is not None for blob in blobs):
            return [blob.here() or blob for blob in blobs]
        refuse_to_wait("ref.get()")
        found = values_of(self.begin_fetch(blobs))
        return [blob for blob in found if blob is not None]

    def begin_fetch(self, blobs: tuple[Blob, ...], to: int | None = None) -> list[Future[Blob | None]]:
        """Begin to get the bytes of blobs from the nodes, and return a future for each. Raises PoolClosed.

        Args:
            blobs: The blobs.
            to: Node that needs them. If another node has sent it a blob, or can, the future is None once it is there.
        """
        futures: list[Future[Blob | None]] = [Future() for _ in blobs]
        with self._ledger:
            self._ledger.require_open()
            link = None if to is None else self._ledger.links.get(to)
            for blob, future in zip(blobs, futures, strict=True):
                here = blob.here()
                if here is not None:
                    self._ledger.after.append(lambda future=future, here=here: future.settle(here))  # type: ignore[misc]
                elif link is not None and link.has_blob(blob.digest):  # it has come since the task asked for it
                    self._ledger.after.append(partial(future.settle, None))
                elif link is not None and self._transfers.begin(blob, link):
                    link.hold_blob(blob)  # until it has arrived: the task asks its agent at once
                    self._coming.setdefault((link, blob.digest), []).append(future)
                    self._want(link)
                else:
                    self._fetch_for(blob, future=future)
        return futures

    # Under the lock -------------------------------------------------------------------------------------------------

    def received(self, link: Readable, frame: Frame) -> KeptReceived:
        """Take a result that stays on its node."""
        assert isinstance(link, NodeLink)
        return self.kept_on(link, frame.body)

    def kept_on(self, link: NodeLink, body: bytes) -> KeptReceived:
        """Take a value whose blobs the agent of a node keeps."""
        blobs: list[KeptBlob] = []
        for digest, size in references(body):
            link.keep(digest, size)
            blob = KeptBlob(digest, size, None, self)
            blob.held_by(link)
            blob.places.append(link)
            blobs.append(blob)
        return KeptReceived(body, tuple(blobs), self)

    def hold(self, blobs: Iterable[Blob], nodes: Iterable[int]) -> None:
        """Send blobs to nodes, which hold them until they are forgotten. Raises UsageError if there is no room."""
        for node in nodes:
            link = self._ledger.links.get(node)
            if link is None:  # it is being replaced, and gets the bytes with the first call
                continue
            try:
                for blob in blobs:
                    if isinstance(blob, KeptBlob) and link not in blob.holders:
                        link.hold_blob(blob)
                        blob.held_by(link)
            except OSError as error:
                raise cannot_send("put()", error) from error
            self._ledger.dirty.add(link)
            if link.wanted:
                self._want(link)

    def _places_of(self, blobs: tuple[Blob, ...]) -> tuple[int, ...]:
        """Return a few nodes that have the largest of these blobs, or are about to get it."""
        kept = [blob for blob in blobs if isinstance(blob, KeptBlob)]
        if not kept:
            return ()
        largest = max(kept, key=lambda blob: blob.size)
        links, digest = self._ledger.links, largest.digest
        having = (
            link.node
            for link in largest.places
            if links.get(link.node) is link and (link.has_blob(digest) or link.needs_blob(digest))
        )
        return tuple(islice(having, _PREFERRED))

    def forget_soon(self, digest: bytes, holders: tuple[NodeLink, ...]) -> None:
        """Make the nodes drop a blob. Takes no lock, because finalizers call it."""
        self.soon(lambda: self._forget(digest, holders))

    def _forget(self, digest: bytes, holders: tuple[NodeLink, ...]) -> None:
        with self._ledger:
            for link in self._ledger.links.values():
                link.forget_blob(digest, is_held=link in holders)
                if link.channel.has_output:
                    self._ledger.dirty.add(link)

    # Moves ----------------------------------------------------------------------------------------------------------

    def move(self, node: int, to: Iterable[int]) -> None:
        """Move values that a node holds to other nodes, as far as they are ready. Call it again until it holds none.

        A node lets go of a value when another one has said that it has all its bytes. If that fails, the next call
        tries again. The program's own values are sent again when they are needed.
        """
        source = self._ledger.links[node]
        targets = [link for number in to if (link := self._ledger.links.get(number)) and link.channel.is_attached]
        for blob in list(source.held):
            if not isinstance(blob, KeptBlob):
                continue
            others = [link for link in blob.holders if link is not source and self._ledger.links.get(link.node) is link]
            if blob.source is not None:
                self._let_go(blob, source)
            elif others:
                self._check(blob, source, others[0])
            elif targets:
                target = min(targets, key=lambda link: (not link.has_blob(blob.digest), link.blob_bytes))
                with contextlib.suppress(UsageError):  # no free descriptor here: the next call may find one
                    self.hold((blob,), (target.node,))

    def _check(self, blob: KeptBlob, source: NodeLink, target: NodeLink) -> None:
        """Ask a node whether it has a blob, if it should."""
        is_asked = any(one.blob is blob for one in self._moves.values())
        if target.has_blob(blob.digest) and not is_asked:
            number = next(self._ledger.numbers)
            self._moves[number] = _Move(blob, source, target)
            target.channel.queue(FrameKind.FETCH, number, blob.digest, lane=1, priority=BLOBS)
            self._ledger.dirty.add(target)

    def _moved(self, move: _Move, *, is_there: bool) -> None:
        if is_there:
            self._let_go(move.blob, move.source)
        else:
            move.target.lacks_blob(move.blob.digest)
            self._let_go(move.blob, move.target)

    def _let_go(self, blob: KeptBlob, link: NodeLink) -> None:
        blob.holders.remove(link)
        link.held.discard(blob)
        link.forget_blob(blob.digest, is_held=True)
        self._ledger.dirty.add(link)

    # Fetches --------------------------------------------------------------------------------------------------------

    def _want(self, link: NodeLink) -> None:
        """Get a node the blobs that its calls need and other nodes have."""
        wanted, link.wanted = link.wanted, []
        for blob in wanted:
            if not self._transfers.begin(blob, link):
                self._fetch_for(blob, link=link)

    def _get_here(self, blob: Blob, link: NodeLink) -> None:
        """Get a node a blob through this process, after the direct way has failed."""
        if self._ledger.links.get(link.node) is not link:
            return
        if not link.needs_blob(blob.digest):
            self._arrived(blob, link)
            return
        here = blob.here()
        if here is not None:
            self._pass_on(here, link)
        else:
            self._fetch_for(blob, link=link)

    def _arrived(self, blob: Blob, link: NodeLink, error: Exception | None = None) -> None:
        """Tell the callers on a node that a blob is there, or why it is not."""
        for future in self._coming.pop((link, blob.digest), ()):
            link.release_blobs((blob,))
            settle = partial(future.settle, None) if error is None else partial(future.settle_error, error)
            self._ledger.after.append(settle)

    def _fetch_for(
        self, blob: Blob, *, link: NodeLink | None = None, future: Future[Blob | None] | None = None
    ) -> None:
        fetch = next((fetch for fetch in self._fetches.values() if fetch.blob.digest == blob.digest), None)
        if fetch is None:
            fetch = _Fetch(blob)
            self._add(fetch, link, future)
            self._begin(fetch)
        else:
            self._add(fetch, link, future)

    @staticmethod
    def _add(fetch: _Fetch, link: NodeLink | None, future: Future[Blob | None] | None) -> None:
        if link is not None and link not in fetch.links:
            fetch.links.append(link)
        if future is not None:
            fetch.futures.append(future)

    def _begin(self, fetch: _Fetch) -> None:
        """Ask a node for the blob, one with a working link if there is one. Fail if no node has it or can send it."""
        digest = fetch.blob.digest
        having = [link for link in self._ledger.links.values() if link.has_blob(digest) and link not in fetch.stuck]
        if not having:
            if fetch.stuck or not self._recover(fetch):
                self._fail(fetch, _stuck(fetch) if fetch.stuck else _lost(fetch.blob))
            return
        fetch.source = source = next((link for link in having if link.channel.is_attached), having[0])
        number = next(self._ledger.numbers)
        self._fetches[number] = fetch
        # With the priority of blobs: the node may be about to get this very blob.
        source.channel.queue(FrameKind.FETCH, number, digest, priority=BLOBS)
        self._ledger.dirty.add(source)

    def _recover(self, fetch: _Fetch) -> bool:
        """Ask for the bytes of a blob that no node has. Return False if nobody has them."""
        if self.recover is None or not isinstance(fetch.blob, KeptBlob) or fetch.is_recovered:
            return False
        fetch.is_recovered, fetch.source = True, None
        number = next(self._ledger.numbers)
        self._fetches[number] = fetch
        self.recover(fetch.blob).add_done_callback(lambda _: self._recovered(number))
        return True

    def _recovered(self, number: int) -> None:
        with self._ledger:
            fetch = self._fetches.pop(number, None)
            if fetch is None:
                return
            here = fetch.blob.here()
            if here is None:
                self._begin(fetch)
            else:
                self._take(fetch, here)

    def _take(self, fetch: _Fetch, blob: Blob) -> None:
        """Pass on a blob to everybody who needs it."""
        for needing in fetch.links:
            if self._ledger.links.get(needing.node) is needing:
                self._pass_on(blob, needing)
        for future in fetch.futures:
            self._ledger.after.append(lambda future=future: future.settle(blob))  # type: ignore[misc]

    def on_fetched(self, link: Readable, frame: Frame) -> None:
        """Pass on a blob that has arrived."""
        assert isinstance(link, NodeLink)
        digest = frame.body[:DIGEST_SIZE]
        blob = link.take_arrived(digest)
        move = self._moves.pop(frame.ident, None)
        if move is not None:
            self._moved(move, is_there=not frame.lane)
            return
        fetch = self._fetches.pop(frame.ident, None)
        if fetch is None:
            return
        if blob is None or frame.lane or blob.fd < 0:
            if frame.lane == 1:
                link.lacks_blob(digest)
            else:
                fetch.stuck.append(link)
            self._begin(fetch)
            return
        self._take(fetch, blob)

    def _pass_on(self, blob: Blob, link: NodeLink) -> None:
        try:
            link.send_wanted(blob)
            self._arrived(blob, link)
        except OSError as error:
            failure = cannot_send("a kept value", error)
            self._fail_tasks(link, blob.digest, failure)
            self._arrived(blob, link, failure)
        self._ledger.dirty.add(link)

    def _fail(self, fetch: _Fetch, error: Exception) -> None:
        for link in fetch.links:
            if self._ledger.links.get(link.node) is link:
                self._fail_tasks(link, fetch.blob.digest, error)
                self._arrived(fetch.blob, link, error)
                for blob in [blob for blob in link.held if blob.digest == fetch.blob.digest]:
                    if isinstance(blob, KeptBlob) and not fetch.stuck:
                        self._let_go(blob, link)
        for future in fetch.futures:
            self._ledger.after.append(lambda future=future: future.settle_error(error))  # type: ignore[misc]

    def _fail_tasks(self, link: NodeLink, digest: bytes, error: Exception) -> None:
        """Fail the tasks on a node that wait for a blob."""
        for task in list(self._ledger.tasks.values()):
            needs_it = any(blob.digest == digest for blob in task.payload.blobs)
            if needs_it and self._ledger.node_of(task) == link.node:
                self._dispatcher.fail(task, link.node, error)

    def node_lost(self, node: int) -> None:
        """Fetch from other nodes what was to come from a lost one."""
        self._coming = {key: futures for key, futures in self._coming.items() if key[0].node != node}
        self._transfers.node_lost(node)
        self._moves = {number: one for number, one in self._moves.items() if node not in one.nodes}
        for number, fetch in list(self._fetches.items()):
            if fetch.source is not None and fetch.source.node == node:
                del self._fetches[number]
                self._begin(fetch)

    def close(self) -> None:
        """Fail those who wait for a blob."""
        self.soon = lambda action: None
        fetches, self._fetches = list(self._fetches.values()), {}
        error = PoolClosed("pool: closed before a kept value had come; read it inside the `with` block")
        coming, self._coming = list(self._coming.values()), {}
        for waiting in [*(fetch.futures for fetch in fetches), *coming]:
            for future in waiting:
                self._ledger.after.append(lambda future=future: future.settle_error(error))  # type: ignore[misc]


def _stuck(fetch: _Fetch) -> UsageError:
    nodes = ", ".join(f"node {link.node}" for link in fetch.stuck)
    return UsageError(
        f"ref: {nodes} cannot send its {fetch.blob.size} bytes now, for want of a free descriptor or of room; close "
        "files or free memory, there and in this program, or raise the limit (ulimit -n), and try again"
    )


def _lost(blob: Blob) -> RefLost:
    return RefLost(
        f"ref: the nodes that held its {blob.size} bytes are gone; make the value again, or keep a copy with "
        "pool.put(value), which survives them"
    )
