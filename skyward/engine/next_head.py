"""The way of a client from a head that is gone to the process that goes on for it.

The session goes on, but its link is new: the new process has none of the former's counts, functions or blobs.
So everything that a channel would repeat is either told again here, or is lost with the head, and whoever waits for it
gets an error.

The head of a detached pool that was killed begins again by itself. `other_heads` begins another one for any other pool.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

from ..calls.futures import Future
from ..errors import NodeLost
from ..values.machine import Machine
from ..wire.channel import BLOBS
from ..wire.ends import Ends
from .dialler import Dialler
from .head.requests import Requests
from .head_link import HeadLink, HeadRepair
from .hosted_calls import HeadLoss, HostedCalls
from .hosted_frames import HostedFrames
from .hosted_parts import HostedActors, HostedChannels
from .hosted_values import HostedValues
from .ledger import Ledger
from .link_times import LINK_TIMES

_LOOK_S = 0.05

_log = logging.getLogger(__name__)


class _Linked(Protocol):
    """Part of the engine that sends frames."""

    link: HeadLink | None


class NextHead:
    """Change to the head that goes on for one that is gone.

    Args:
        ledger: Shared state of the client's engine.
        requests: Requests to the head.
        repair: Watches the link.
        calls: Open calls.
        frames: Handlers of the head's frames.
        values: References to values that stay on nodes.
        channels: Channels that tasks have opened.
        actors: Actors of the pool.
        linked: All parts that send frames.
        dialler: Returns a dialler that continues the session.
        told: Tells the head what this client wants to hear.
        lost: Called with the reason if it cannot go on.
    """

    def __init__(
        self,
        ledger: Ledger,
        requests: Requests,
        repair: HeadRepair,
        *,
        calls: HostedCalls,
        frames: HostedFrames,
        values: HostedValues,
        channels: HostedChannels,
        actors: HostedActors,
        linked: Iterable[_Linked],
        dialler: Callable[[], Dialler],
        told: Callable[[], object],
        lost: Callable[[str], object],
    ) -> None:
        self._ledger = ledger
        self._requests = requests
        self._repair = repair
        self._calls = calls
        self._frames = frames
        self._values = values
        self._channels = channels
        self._actors = actors
        self._linked = tuple(linked)
        self._dialler = dialler
        self._told = told
        self._lost = lost

    def go_on(self, before: HeadLink, deadline: float) -> None:
        """Dial the next head until `deadline` (monotonic), and go on there. Raises the errors of `Dialler.dial`."""
        dialler = self._dialler()
        ends, facts = dialler.dial_until(deadline, LINK_TIMES)
        with self._ledger:
            link = self._link(dialler, ends, facts)
            if link is None:
                return
            self._calls.end_again(before, link)
            self._change(link, are_counted=True)
            self._calls.go_on(link, self._failed)
        before.close()
        self._ledger.watcher.wake()
        _log.warning("head of the pool: was killed and has begun again; calls go on")

    def begin(
        self,
        before: HeadLink,
        dialler: Dialler,
        ends: Ends,
        facts: dict[str, Any],
        *,
        loss: HeadLoss,
        machines: Callable[[], list[Machine]],
        lease_s: float,
        things: bytes = b"",
    ) -> Future[Any] | None:
        """Go on with another head, which was dialled. It gets all open calls.

        Return a future of the time when it has reached the nodes, and knows which calls run; None: the pool was closed.

        Args:
            before: Link to the head that is gone.
            dialler: Dialler of the other one.
            ends: Link that it has opened.
            facts: Greeting of that head.
            loss: Loss of the former head.
            machines: Returns the machines as that head gets them.
            lease_s: Seconds that it goes on without its client.
            things: Shared state that the former head has handed over.
        """
        with self._ledger:
            link = self._link(dialler, ends, facts)
            if link is None:
                return None
            self._repair.lease_s = lease_s
            if things:
                self._requests.tell("shared_from", things)  # ahead of all requests that are asked again
            self._change(link, are_counted=False)
            told = self._calls.send_all_again(before, link, loss)
            calls = [tuple(call) for call in told]
            # Behind all calls and their blobs.
            begun = self._requests.begin("go_on_after", machines(), calls, sorted(loss.lost), priority=BLOBS)
            begun.add_done_callback(partial(self._begun, link))
        before.close()
        self._ledger.watcher.wake()
        return begun

    @property
    def present(self) -> HeadLink | None:
        """Link to the present head."""
        return self._calls.link

    def leave(self, before: HeadLink) -> bool:
        """Leave a head that is well. Waits while its link is broken. Return False if that head is lost, or the pool."""
        while not self._repair.leave(before):
            if self.present is not before or not self._ledger.is_open:
                return False
            time.sleep(_LOOK_S)  # the link is made again, or another head begins
        return True

    def _link(self, dialler: Dialler, ends: Ends, facts: dict[str, Any]) -> HeadLink | None:
        """Return the link to the next head; None if the pool was closed meanwhile."""
        if not self._ledger.is_open:
            self._ledger.after.append(ends.close)
            return None
        dialler.channel.attach(ends, facts["received"])
        link = HeadLink(facts, dialler)
        link.named_by = self._values.named
        for part in self._linked:
            part.link = link
        return link

    def _change(self, link: HeadLink, *, are_counted: bool) -> None:
        """Tell the next head everything but the calls, and end what is lost with the former one."""
        error = _lost_with_head()
        self._requests.ask_again(error)
        self._frames.forget_pieces(are_counted=are_counted)
        if are_counted:
            self._values.lose(error)
        else:
            self._values.go_on(link)
            self._actors.go_on()
        self._channels.end_open("the head of the pool is gone")
        self._told()
        self._repair.watch(link)

    def _begun(self, link: HeadLink, done: Any) -> None:
        error = done.exception()
        if error is not None and self._calls.link is link and self._ledger.is_open:  # else one after it is asked
            self._failed(error)

    def _failed(self, error: BaseException) -> None:
        self._lost(f"it cannot go on: {error}")


def _lost_with_head() -> NodeLost:
    return NodeLost(
        "head of the pool: is gone before it has answered, and its channels with it; try again",
        node=0,
    )
