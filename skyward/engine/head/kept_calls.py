"""Calls of a detached pool, with everything that a client has not taken: another client may take it.

The head keeps each frame that ends a call or brings an item until a client says that it was read. A client that
follows a call gets these frames, and all later ones.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from ...wire.blobs import Blob
from ...wire.frames import FrameKind
from .client_link import ClientLink

CallState = Literal["waiting", "running", "done", "failed"]


class KeptFrame(NamedTuple):
    """Frame about a call, as `ClientLink.tell_of_task` takes it."""

    kind: int
    body: bytes = b""
    blobs: tuple[Blob, ...] = ()
    lane: int = 0
    flags: int = 0
    is_last: bool = False


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


@dataclass(kw_only=True)
class KeptCall:
    """One call and the frames about it that nobody has taken."""

    number: int
    name: str
    form: str
    inputs: int = 0
    """Number of its iterators, which the client feeds."""
    is_on_one: bool = False
    returns: str = ""
    since: float = field(default_factory=time.time)
    state: CallState = "waiting"
    is_followed: bool = True
    """Whether the present client has asked for it, or has made it."""
    frames: deque[KeptFrame] = field(default_factory=deque)


class KeptCalls:
    """The calls of one head. Used under the ledger's lock."""

    def __init__(self) -> None:
        self._calls: dict[int, KeptCall] = {}

    def __iter__(self) -> Iterator[KeptCall]:
        return iter(list(self._calls.values()))

    def get(self, number: int) -> KeptCall | None:
        return self._calls.get(number)

    def add(self, call: KeptCall) -> None:
        self._calls[call.number] = call

    def drop(self, number: int) -> None:
        """Forget a call whose outcome was taken, or that was cancelled."""
        self._calls.pop(number, None)

    def passes(self, number: int, frame: KeptFrame, *, has_failed: bool = False) -> bool:
        """Keep a frame, and return whether the client gets it now."""
        call = self._calls.get(number)
        if call is None:
            return True
        if frame.kind == FrameKind.SENT:
            call.state = "running"
        elif frame.is_last:
            call.state = "failed" if has_failed else "done"
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
            else:
                left.append(frame)
        call.frames = left

    def leave(self) -> None:
        """Let nobody follow a call, because the client is gone."""
        for call in self._calls.values():
            call.is_followed = False

    def follow(self, call: KeptCall, link: ClientLink) -> None:
        """Send the frames of a call to the client, and all later ones."""
        call.is_followed = True
        for frame in call.frames:
            link.tell_of_task(
                frame.kind,
                call.number,
                frame.body,
                frame.blobs,
                lane=frame.lane,
                flags=frame.flags,
                is_last=frame.is_last,
            )


def facts_of(call: KeptCall, node: int | None) -> CallFacts:
    return CallFacts(call.number, call.name, call.state, node, call.since, call.form, call.is_on_one, call.returns)


def as_json(facts: CallFacts) -> dict[str, Any]:
    """Return a call for the greeting of a process that only looks."""
    return facts._asdict()
