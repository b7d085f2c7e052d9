"""Turns of a head's clients: who has the head, who may have it next, and when a head that nobody has ends."""

from __future__ import annotations

import hmac
import math
import threading
import time
from typing import Any

from ...console.words import duration
from .client_link import ClientLink
from .door import LinkRefused
from .messages import HeadConfig

_SESSION_BITS = 32
"""Each session has this many bits of numbers. Numbers of actors have 48 bits in all."""
_SILENT_S = 30.0
"""Silence in seconds after which a client no longer keeps others away from a detached pool."""


class ClientTurns:
    """Clients of a head, one after another. Used under the ledger's lock, except the properties."""

    def __init__(self, config: HeadConfig) -> None:
        self._config = config
        self.ended = threading.Event()
        """Set once the client or its keeper has asked the head to end."""
        self.client: ClientLink | None = None
        self.who: dict[str, Any] = {}
        """The present client, in the words of its greeting, with the time at which it came."""
        self.sessions = config.heads_before + 1 if config.heads_before else 0
        self.first_fed = 0
        """First number of the client that an earlier process has had last."""
        self.detached_for_s = config.detached_for_s
        self.is_ending = False
        """Whether a detached pool has warned of its end, which has not been averted."""
        self.money_ends_at = math.inf
        """Time, by the monotonic clock, at which a pool without a client must end so that its budget suffices."""
        self.is_short_of_money = False
        """Whether the budget was the reason of the last warning."""
        self.goes_alone = False
        """Whether a detached pool can go on without a client: its head reaches all nodes by itself."""
        self.replaces = False
        """Whether the present client of a detached pool replaces lost nodes: it must know how they are built."""
        self._is_orphan = False
        self._has_left = False
        """Whether the present client has said that it goes."""
        self._renewed_at = time.monotonic()  # as if a keeper had begun it: the first client comes within the lease

    @property
    def is_detached(self) -> bool:
        """Return whether the pool goes on without a client."""
        return bool(self._config.detached_for_s)

    # Who has it -------------------------------------------------------------------------------------------------------

    def is_attaching(self, hello: dict[str, Any]) -> bool:
        """Return whether a process knows the key of the pool."""
        key = self._config.attach_key
        return bool(key) and hmac.compare_digest(key.encode(), str(hello.get("attach_key", "")).encode())

    def check(self, hello: dict[str, Any]) -> None:
        """Refuse a client while another one has the pool. Raises LinkRefused."""
        if not self.is_attaching(hello):
            raise LinkRefused("another client has this head")
        if self.is_taken and not hello.get("takes_over"):
            raise self.refusal()

    def refusal(self) -> LinkRefused:
        """Return the error of a client that meets another one."""
        who = self.who
        since = time.strftime("%H:%M", time.localtime(who["since"]))
        program, host = who["program"] or "python", who["host"] or "another machine"
        return LinkRefused(f"process {who['pid']} ({program}) on {host} has it since {since}", is_taken=True)

    @property
    def is_linked(self) -> bool:
        """Return whether there is a link to a client that stays."""
        return self.client is not None and self.client.channel.is_attached and not self._has_left

    @property
    def is_taken(self) -> bool:
        client = self.client
        if client is None or self._has_left or not client.channel.is_attached:
            return False
        return time.monotonic() - client.channel.heard_at < _SILENT_S

    @property
    def first_number(self) -> int:
        """First number of the session: above those of earlier ones and earlier heads, which may still be open."""
        return self.first_number_of(self.sessions)

    def first_number_of(self, session: int) -> int:
        """Return the first number of a session."""
        return (max(0, session - 1) + self._config.heads_before << _SESSION_BITS) + 2

    def go(self) -> None:
        """Let any other client take the pool at once: this one goes."""
        self._has_left = True

    def end(self, client: ClientLink) -> None:
        """Note that nobody has the pool now."""
        self._renewed_at = max(self._renewed_at, client.channel.heard_at)
        self.client = None
        self._has_left = False

    # How long it lasts ------------------------------------------------------------------------------------------------

    @property
    def contact_at(self) -> float:
        """Time at which the client or its keeper was heard last, or the head began, by the monotonic clock."""
        client = self.client
        return self._renewed_at if client is None else max(self._renewed_at, client.channel.heard_at)

    def was_heard(self, since: float) -> bool:
        """Return whether client or keeper were heard since a time, or the pool goes on without them."""
        return self.is_detached or self.contact_at >= since

    def renew(self) -> None:
        """Note that a keeper was heard, or that a killed head has begun again."""
        self._renewed_at = time.monotonic()

    @property
    def left_s(self) -> float:
        """Seconds that the pool goes on without a client: as long as it may, and its budget lasts."""
        now = time.monotonic()
        alone_s = 0.0 if self.is_taken else now - self.contact_at
        return max(0.0, min(self.detached_for_s - alone_s, self.money_ends_at - now))

    def begins_to_end(self) -> bool:
        """Return, once, whether a detached pool will end soon because no client is there."""
        was_ending = self.is_ending
        is_alone = self.is_detached and bool(self.sessions) and not self.is_taken  # a client sees to its own budget
        self.is_ending = is_alone and self.left_s <= self._config.warning_s
        if self.is_ending:
            self.is_short_of_money = self.money_ends_at < self.contact_at + self.detached_for_s
        return self.is_ending and not was_ending

    @property
    def is_over(self) -> bool:
        """Return whether client and keeper have been away for longer than the lease, or than a detached pool lasts."""
        client = self.client
        if self.is_detached and self.goes_alone:
            if not self.is_taken and time.monotonic() > self.money_ends_at:
                return bool(self.sessions)
            # A client that is linked may be silent for long: it holds its GIL, or its machine sleeps.
            limit_s = max(self.detached_for_s, self._config.lease_s if self.is_linked else 0.0)
            return bool(self.sessions) and time.monotonic() - self.contact_at > limit_s
        if client is None and not self.is_detached:
            return False  # it renews no lease, so its watchdog sees to it
        limit_s = self._config.lease_s
        if client is not None and client.channel.is_attached:
            if not self.is_detached:
                return False
            # Its machine may sleep, or have lost its power: then nobody ends the link.
            limit_s = max(limit_s, self.detached_for_s)
        return time.monotonic() - self.contact_at > limit_s

    @property
    def is_deserted(self) -> bool:
        """Return whether the client of a detached pool is away for longer than a link takes to come back."""
        client = self.client
        is_away = client is None or not client.channel.is_attached
        return self.is_detached and is_away and time.monotonic() - self.contact_at > self._config.lease_s

    def orphan(self) -> None:
        """End the head, because the keeper says that its client has died."""
        self._is_orphan = True
        self.ended.set()

    @property
    def was_closed(self) -> bool:
        """Return whether a client has asked for the end, and sees to the machines itself."""
        return self.ended.is_set() and not self._is_orphan

    @property
    def last_words(self) -> str:
        """Reason of the end."""
        if self._is_orphan or not (self.goes_alone or self.ended.is_set()):
            return "because its program died before Ray joined its nodes"
        if self.ended.is_set():
            return "because its program closed it"
        if time.monotonic() > self.money_ends_at:
            return "because no client came, and its budget lasts no longer"
        return f"because no client came for {duration(self.detached_for_s)}"
