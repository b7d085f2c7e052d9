"""Calls of a detached pool, with everything that a client has not taken: another client may take it.

The head keeps each frame that ends a call or brings an item until a client says that it was read. A client that
follows a call gets these frames, and all later ones.

All of it is in a journal too. When the head was killed, a new one reads it: outcomes that nobody took are still there,
and calls that no node had got are sent again.

The frames of a call are counted from its beginning, except SENT. This count belongs to the call, not to a link or to a
process: so a client says how many it has, and goes on with the next one over another head. It rests on two rules:

- The head writes a frame to the journal before the client gets it. So the client never has a frame that a next head
  lacks, except of a call whose frames found no room (TORN). That one ends with an error behind all other frames.
- A frame leaves the journal only once the client has read what it brings. So a next head has all that the client lacks.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import field
from typing import Any, Literal, NamedTuple

from ...core.records import dataclass
from ...errors import UsageError
from ...wire.blobs import Blob
from ...wire.frames import FrameKind
from ...wire.payloads import Encoded
from ..retries import RetriesLeft
from ..tasks import WireFunction
from .client_link import ClientLink
from .journal import BEGUN, LIVE, OVER, TORN, BlobName, HeadJournal
from .plain import dump_plain, load_plain

_log = logging.getLogger(__name__)

CallState = Literal["waiting", "running", "done", "failed"]

CHUNK = "chunk"
"""Form of a chunk of a map. It ends with its client, because another one has no map to put it into."""
_BEYOND = 1 << 48
"""Count of a call that nobody can count any longer: more than a client has."""


@dataclass(slots=True)
class KeptFrame:
    """Frame about a call, as `ClientLink.tell_of_task` takes it."""

    kind: int
    body: bytes = b""
    blobs: tuple[Blob, ...] = ()
    lane: int = 0
    flags: int = 0
    is_last: bool = False
    at: int = -1
    """Place of its record in the journal; -1: there is none."""
    index: int = -1
    """Number of the call's frames before this one; -1: it is not counted."""


class CallFacts(NamedTuple):
    """Call as clients list it; see `skyward.Call`. `form` says how it is followed: "value", "stream" or "gang"."""

    number: int
    name: str
    state: CallState
    node: int | None
    since: float
    form: str
    is_on_one: bool
    """Whether a gang has one value instead of a list."""
    returns: str
    """Ranks of a gang whose values it has; empty for other calls."""
    first: int = 0
    """Number of its frames that were taken."""


class CallPosition(NamedTuple):
    """How far a client is with a call."""

    number: int
    received: int
    """Number of the call's frames that it has."""
    taken: int
    """Number of items that its user has read."""
    is_begun: bool
    """Whether it knows that the call was sent to a node."""


class KeptOrder(NamedTuple):
    """Frame of a call, its function, and the blobs of its arguments: enough to begin it."""

    body: bytes
    function: WireFunction
    blobs: tuple[Blob, ...]


@dataclass(kw_only=True)
class KeptCall:
    """One call and the frames about it that nobody has taken."""

    number: int
    name: str
    form: str
    is_on_one: bool = False
    returns: str = ""
    since: float = field(default_factory=time.time)
    state: CallState = "waiting"
    is_followed: bool = True
    """Whether the present client has asked for it, or has made it."""
    frames: deque[KeptFrame] = field(default_factory=deque)
    function: bytes = b""
    """Digest of its function; empty: it cannot begin again."""
    at: int = -1
    """Place of its record in the journal."""
    is_in_doubt: bool = False
    """Whether a node that is gone may have run it."""
    is_preempted: bool = False
    """Whether the provider took back the machine of such a node."""
    cleared: frozenset[int] = frozenset()
    """Nodes that certainly have not run it."""
    is_torn: bool = False
    """Whether the journal lacks one of its frames, and so gets no later ones."""
    count: int = 0
    """Number of its frames so far."""
    count_at: int = -1
    """Place of the record of that number, which a stream has once its first items are gone."""
    taken: int | None = None
    """Number of its frames that were taken; None: those before the ones that are kept."""
    left: RetriesLeft | None = None
    """Retries that are left; None: it has spent none."""
    left_at: int = -1
    """Place of their record."""

    @property
    def is_over(self) -> bool:
        return self.state in ("done", "failed")

    @property
    def first(self) -> int:
        """Number of its frames that were taken."""
        if self.taken is not None:
            return self.taken
        return next((frame.index for frame in self.frames if frame.index >= 0), self.count)


class KeptCalls:
    """The calls of one head. Used under the ledger's lock.

    Args:
        journal: Journal of this head, or of an earlier process of it.
    """

    def __init__(self, journal: HeadJournal) -> None:
        self._calls: dict[int, KeptCall] = {}
        self._journal = journal
        self._functions: dict[bytes, int] = {}
        """Places of the functions in the journal, by digest."""
        self._function_blobs: dict[bytes, tuple[Blob, ...]] = {}
        """Blobs of functions in the journal: as long as they are here, their files stay."""
        self._state_at = -1
        self.state: dict[str, Any] = {}
        """Plain values of the head itself, which `note` changes."""
        self._things: dict[tuple[str, str], int] = {}
        """Places of the things of shared state, by kind and name."""
        self._idle_things: set[tuple[str, str]] = set()
        """Those that are forgotten by now."""
        self.lost_things: set[tuple[str, str]] = set()
        """Those that earlier processes have lost."""

    def __iter__(self) -> Iterator[KeptCall]:
        return iter(list(self._calls.values()))

    def get(self, number: int) -> KeptCall | None:
        return self._calls.get(number)

    def add(self, call: KeptCall, order: KeptOrder | None = None) -> None:
        """Keep a call. `order` is what it needs to begin after the death of this process; None: it cannot.

        Raises:
            UsageError: The journal has no room for it.
        """
        self._shrink()
        try:
            if order is not None:
                call.function = order.function.digest
                self._write_function(order.function)
            fields = (call.number, call.name, call.form, call.is_on_one, call.returns, call.since)
            parts = (b"", ()) if order is None else (order.body, self._names(order.blobs))
            call.at = self._append("call", *fields, call.function, *parts)
        except OSError as error:
            raise _no_room(repr(call.name), error) from error
        self._calls[call.number] = call

    def drop(self, number: int) -> None:
        """Forget a call whose outcome was taken, or that was cancelled."""
        call = self._calls.pop(number, None)
        if call is not None:
            self._mark(call.at, OVER)
            self._shrink()

    def passes(self, number: int, frame: KeptFrame, *, has_failed: bool = False) -> bool:
        """Keep a frame, and return whether the client gets it now."""
        call = self._calls.get(number)
        if call is None:
            return True
        self._shrink()
        if frame.kind == FrameKind.SENT:
            call.state = "running"
            if not call.is_torn:
                self._mark(call.at, BEGUN)
        else:
            frame.index, call.count = call.count, call.count + 1
            if frame.is_last:
                call.state = "failed" if has_failed else "done"
            self._write_frame(call, frame, has_failed=has_failed)
        call.frames.append(frame)
        return call.is_followed

    def taken(self, number: int, count: int) -> None:
        """Forget the first items of a stream, which were taken."""
        call = self._calls.get(number)
        if call is None:
            return
        left: deque[KeptFrame] = deque()
        for frame in call.frames:
            if count and frame.kind == FrameKind.ITEM:
                count -= 1
                self._mark(frame.at, OVER)
            else:
                left.append(frame)
        call.frames = left
        self._shrink()

    def retried(self, number: int, left: RetriesLeft) -> None:
        """Note the retries that are left to a call."""
        call = self._calls.get(number)
        if call is None:
            return
        self._shrink()
        with contextlib.suppress(OSError):  # the disk is full: if this process is killed, one run may be too many
            at = self._append("retries", number, *left)
            self._mark(call.left_at, OVER)
            call.left, call.left_at = left, at

    def leave(self) -> None:
        """Let nobody follow a call, because the client is gone."""
        for call in self._calls.values():
            call.is_followed = False

    def follow(self, call: KeptCall, link: ClientLink, *, received: int = 0, is_begun: bool = False) -> None:
        """Send the frames of a call to the client, and all later ones.

        Args:
            call: The call.
            link: Link to the client.
            received: Number of the call's frames that the client has.
            is_begun: Whether it knows that the call was sent to a node.
        """
        call.is_followed = True
        for frame in call.frames:
            if is_begun if frame.index < 0 else frame.index < received:
                continue
            link.tell_of_task(
                frame.kind,
                call.number,
                frame.body,
                frame.blobs,
                lane=frame.lane,
                flags=frame.flags,
                is_last=frame.is_last,
            )

    # The journal ------------------------------------------------------------------------------------------------------

    def note(self, **changes: Any) -> None:
        """Change values of `state`. Raises UsageError if the journal has no room for them."""
        self._shrink()
        state, before = {**self.state, **changes}, self._state_at
        try:
            at = self._append("state", state)
        except OSError as error:
            raise _no_room("state of the pool", error) from error
        self.state, self._state_at = state, at
        self._mark(before, OVER)

    def note_thing(self, key: tuple[str, str], is_there: bool) -> None:
        """Note that a thing of shared state has come about, or is forgotten. Raises UsageError if there is no room."""
        if key not in self._things:
            self._shrink()
            try:
                self._things[key] = self._append("thing", *key)
            except OSError as error:
                raise _no_room(f"{key[0]}={key[1]!r}", error) from error
        if is_there:
            self._idle_things.discard(key)
        else:
            self._idle_things.add(key)
        self._mark(self._things[key], LIVE if is_there else OVER)

    def restore(self) -> list[tuple[KeptCall, KeptOrder | None]]:
        """Read the calls and the state of an earlier process, if there was one. Return the calls without an outcome.

        They come with everything that they need to begin, if the journal has it. The frames of one that a node had got
        stay only if they are items of a stream, or parts of a chunk: these are final.
        """
        orders: dict[int, tuple[bytes, tuple[BlobName, ...]]] = {}
        functions: dict[bytes, WireFunction] = {}
        restorers: dict[str, Callable[..., None]] = {
            "count": self._restore_count,
            "frame": self._restore_frame,
            "retries": self._restore_retries,
            "thing": self._restore_thing,
        }
        for at, mark, content in self._journal.read():
            kind, *fields = load_plain(content)
            if mark == OVER:
                if kind == "frame" and fields[0] in self._calls:  # it was taken, and counts
                    self._count(self._calls[fields[0]], fields[-1] + 1)
            elif kind == "state":
                (self.state,), self._state_at = fields, at
            elif kind == "function":
                digest, body, names = fields
                with contextlib.suppress(OSError):  # no descriptor is left: its calls cannot begin
                    functions[digest] = self._restore_function(at, digest, body, names)
            elif kind == "call":
                *parts, body, names = fields
                call = self._restore_call(at, mark, parts)
                orders[call.number] = body, names
            else:
                restorers[kind](at, *fields)
        open_calls = [call for call in self if not self._has_outcome(call)]
        found = [(call, self._order_of(call, functions, *orders[call.number])) for call in open_calls]
        self._journal.sweep()
        with contextlib.suppress(OSError):  # the disk is full: it stays as it was
            self._rewrite()
        return found

    def _restore_function(self, at: int, digest: bytes, body: bytes, names: Iterable[BlobName]) -> WireFunction:
        blobs = tuple(self._journal.load(BlobName(*name)) for name in names)
        self._functions[digest], self._function_blobs[digest] = at, blobs
        return WireFunction(digest, Encoded(body, blobs))

    def _restore_call(self, at: int, mark: int, fields: list[Any]) -> KeptCall:
        number, name, form, is_on_one, returns, since, function = fields
        call = self._calls[number] = KeptCall(
            number=number,
            name=name,
            form=form,
            is_on_one=is_on_one,
            returns=returns,
            since=since,
            is_followed=False,
            function=function,
            at=at,
            is_torn=mark == TORN,
            count=_BEYOND if mark == TORN else 0,
        )
        if mark in (BEGUN, TORN):
            call.state = "running"
            call.frames.append(KeptFrame(FrameKind.SENT))
        return call

    def _restore_count(self, at: int, number: int, count: int) -> None:
        call = self._calls.get(number)
        if call is not None:
            call.count_at = at
            self._count(call, count)

    def _restore_retries(self, at: int, number: int, *left: Any) -> None:
        call = self._calls.get(number)
        if call is not None:
            call.left, call.left_at = RetriesLeft(*left), at

    def _restore_thing(self, at: int, kind: str, name: str) -> None:
        self._things[kind, name] = at
        self.lost_things.add((kind, name))

    @staticmethod
    def _count(call: KeptCall, count: int) -> None:
        """Note that a call has at least `count` frames."""
        call.count = max(call.count, count)

    def _restore_frame(
        self,
        at: int,
        number: int,
        kind: int,
        body: bytes,
        names: Iterable[BlobName],
        lane: int,
        flags: int,
        is_last: bool,
        has_failed: bool,
        index: int,
    ) -> None:
        call = self._calls.get(number)
        if call is None:
            return
        try:
            blobs = tuple(self._journal.load(BlobName(*name)) for name in names)
        except OSError:  # no descriptor is left
            self._tear(call)
            call.count = _BEYOND
            return
        call.frames.append(KeptFrame(kind, body, blobs, lane, flags, is_last, at, index))
        self._count(call, index + 1)
        if is_last:
            call.state = "failed" if has_failed else "done"

    def _has_outcome(self, call: KeptCall) -> bool:
        """Return whether a call has ended with a value that is still there. Otherwise drop the parts of one."""
        final = {"stream": FrameKind.ITEM, CHUNK: FrameKind.PART}.get(call.form, FrameKind.SENT)
        if any(frame.kind == FrameKind.HELD for frame in call.frames):
            # Only the killed head knew where its values are. It has run, so it neither begins again nor goes on.
            self._tear(call)
            final = FrameKind.SENT
        elif call.is_over:
            return True
        call.state = "waiting" if not call.frames else "running"
        for frame in call.frames:
            if frame.kind not in (FrameKind.SENT, final):
                self._mark(frame.at, OVER)
        call.frames = deque(frame for frame in call.frames if frame.kind in (FrameKind.SENT, final))
        return False

    def _order_of(
        self, call: KeptCall, functions: dict[bytes, WireFunction], body: bytes, names: Iterable[BlobName]
    ) -> KeptOrder | None:
        function = functions.get(call.function)
        if function is None:
            return None
        try:
            return KeptOrder(body, function, tuple(self._journal.load(BlobName(*name)) for name in names))
        except OSError:  # no descriptor is left
            return None

    def _write_function(self, function: WireFunction) -> None:
        digest, payload = function.digest, function.payload
        if digest not in self._functions:
            names = self._names(payload.blobs)
            self._functions[digest] = self._append("function", digest, payload.body, names)
            self._function_blobs[digest] = payload.blobs

    def _write_frame(self, call: KeptCall, frame: KeptFrame, *, has_failed: bool) -> None:
        """Write a frame to the journal. Without room it is in memory only: it is lost if this process is killed."""
        if call.is_torn:
            return
        try:
            names = self._names(frame.blobs)
            fields = (frame.kind, frame.body, names, frame.lane, frame.flags, frame.is_last, has_failed, frame.index)
            frame.at = self._append("frame", call.number, *fields)
        except OSError as error:
            self._tear(call)
            _log.error("head: the outcome of %r is only in memory: %s", call.name, error)

    def _tear(self, call: KeptCall) -> None:
        """Note that the journal lacks a frame of a call. The mark needs no room."""
        call.is_torn = True
        self._mark(call.at, TORN)

    def _names(self, blobs: Iterable[Blob]) -> tuple[tuple[int, bytes, int], ...]:
        names = [self._journal.keep(blob) for blob in blobs]
        return tuple((name.file, name.digest, name.size) for name in names)

    def _append(self, *fields: Any) -> int:
        return self._journal.append(dump_plain(fields))

    def _mark(self, at: int, mark: int) -> None:
        if at >= 0:
            self._journal.mark(at, mark)

    def _shrink(self) -> None:
        """Rewrite the journal if it has grown. Without room for that it stays as it is."""
        if self._journal.is_due:
            with contextlib.suppress(OSError):
                self._rewrite()

    def _rewrite(self) -> None:
        needed = {call.function for call in self._calls.values() if not call.is_over}
        functions = {digest: at for digest, at in self._functions.items() if digest in needed}
        things = {key: at for key, at in self._things.items() if key not in self._idle_things}
        frames = [frame for call in self._calls.values() for frame in call.frames if frame.at >= 0]
        calls = list(self._calls.values())
        streams = [call for call in calls if call.form == "stream" and not call.is_torn]
        retried = [call for call in calls if call.left_at >= 0]
        for call in streams:  # before the records of its first items go
            call.count_at = self._append("count", call.number, call.count)
        places = [
            self._state_at,
            *functions.values(),
            *things.values(),
            *(call.at for call in calls),
            *(call.count_at for call in streams),
            *(call.left_at for call in retried),
            *(frame.at for frame in frames),
        ]
        moved = self._journal.rewrite(at for at in places if at >= 0)
        self._state_at = moved.get(self._state_at, -1)
        self._functions = {digest: moved[at] for digest, at in functions.items()}
        self._things, self._idle_things = {key: moved[at] for key, at in things.items()}, set()
        self._function_blobs = {digest: self._function_blobs[digest] for digest in functions}
        for call in calls:
            call.at = moved[call.at]
        for call in streams:
            call.count_at = moved[call.count_at]
        for call in retried:
            call.left_at = moved[call.left_at]
        for frame in frames:
            frame.at = moved[frame.at]


def _no_room(what: str, error: OSError) -> UsageError:
    return UsageError(
        f"{what}: the journal of the pool's head cannot be written ({error.strerror}); free disk space on the machine "
        "of the first node, and try again"
    )


def facts_of(call: KeptCall, node: int | None) -> CallFacts:
    """Return what clients see of a call."""
    own = call.number, call.name, call.state, node, call.since, call.form, call.is_on_one, call.returns
    return CallFacts(*own, call.first)
