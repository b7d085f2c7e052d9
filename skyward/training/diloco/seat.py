"""`WorkerSeat`: a worker's place at its server: it joins, waits for rounds, and exchanges updates."""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ...errors import UsageError
from .client import DiLoCoClient
from .downloads import Download
from .frames import ArrayFrame, encode, size_of
from .refusal import RefusalKind, WorkerRefused
from .replica import Replica, SentFragment
from .rounds import UpdateKey
from .tensors import to_wire
from .transport import ServerUnreachable

LONG_POLL_S = 20.0
"""Time that the server holds one question for an answer."""

_STOPPED = "the worker has stopped; start it again"

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class PendingUpdate:
    """An update without an answer."""

    key: UpdateKey
    sent: SentFragment
    may_have_arrived: bool = True
    """Whether the server may know it. Then it is asked first, because a delta is large."""


class WorkerSeat:
    """Place of a worker: its id, the session of its process, and its round.

    Requests that fail raise ServerUnreachable, and may be repeated.

    Args:
        client: Client of the server.
        replica: The worker's model. Only `exchange` changes it: it may set the base.
        worker_id: Id of the worker; None: the host's name and random letters.
        timeout_s: Longest wait for other workers, in seconds.
        ended: Set when the worker stops. Then waits end.
        figures: Figures for people, which the worker brings when it joins.
    """

    def __init__(
        self,
        client: DiLoCoClient,
        replica: Replica,
        *,
        worker_id: str | None,
        timeout_s: float,
        ended: threading.Event,
        figures: Mapping[str, float],
    ) -> None:
        self._client, self._replica, self._timeout_s, self._ended = client, replica, timeout_s, ended
        self._figures = dict(figures)
        self.worker = worker_id or f"{socket.gethostname()}-{secrets.token_hex(4)}"
        self.session = secrets.token_hex(16)
        self.base_round: int | None = None
        """Round whose parameters the worker has; None before the first one."""
        self.number = 0
        """Number of its next update."""
        self.is_async = False
        """Whether the server applies each update as it comes."""
        self.last_send_mb = 0.0
        self._download = Download()
        """Beginning of a frame that broke off."""
        self._uploaded = 0
        """Bytes that the server has kept of uploads that broke off."""
        self._has_joined = False

    @property
    def key(self) -> UpdateKey:
        """Key of the worker's next update."""
        assert self.base_round is not None
        return UpdateKey(worker=self.worker, base_round=self.base_round, number=self.number)

    @property
    def carried(self) -> int:
        """Bytes that have come through, and need not again. Those of an upload count once it goes on."""
        return self._download.carried + self._uploaded

    @property
    def fragment(self) -> int:
        """Fragment that the next update changes."""
        return (self.number if self.is_async else self.key.base_round) % self._replica.num_fragments

    def begin_round(self, frame: ArrayFrame) -> None:
        """Note the round of parameters from which the worker goes on."""
        self.base_round = int(frame.metadata["round"])
        self.number += 1

    # Presence ---------------------------------------------------------------------------------------------------------

    def ask_to_join(self) -> Mapping[str, Any]:
        """Join, also again, and return the worker's standing."""
        self._has_joined = True  # the server may know it, even if its answer is lost
        standing = self._client.ask(
            "/join",
            {
                "worker": self.worker,
                "session": self.session,
                "base_round": self.base_round,
                "layout": {name: tuple(tensor.shape) for name, tensor in self._replica.tensors.items()},
                "num_fragments": self._replica.num_fragments,
                "host": socket.gethostname(),
                "figures": self._figures,
            },
        )
        self.is_async = standing["is_async"]
        return standing

    def join(self) -> Mapping[str, Any]:
        """Join, and offer the model if the server has none."""
        standing = self.ask_to_join()
        if not standing["has_model"]:
            self._client.offer(encode(to_wire(self._replica.tensors), {}))
        return standing

    def await_round(self, standing: Mapping[str, Any], deadline: float) -> None:
        """Return when this worker is a member of the open round. It raises ServerUnreachable once the worker stops."""
        while not standing["is_awaited"]:
            left = deadline - time.perf_counter()
            if left <= 0:
                raise ServerUnreachable(
                    f"no round began within timeout={self._timeout_s:g} s; start the missing workers, or raise timeout"
                )
            if self._ended.wait(0.1):  # a server that stops answers at once
                raise ServerUnreachable(_STOPPED)
            body = {"worker": self.worker, "session": self.session, "wait_s": min(left, LONG_POLL_S)}
            try:
                standing = self._client.ask("/heartbeat", body)
            except WorkerRefused:
                if self._ended.is_set():  # it has left, so its question was answered at once
                    raise ServerUnreachable(_STOPPED) from None
                raise

    def beat(self, figures: Mapping[str, float]) -> int | None:
        """Give a sign of life, and return the advised steps of a round, if `figures` ask for them."""
        body = {"worker": self.worker, "session": self.session, "figures": dict(figures)}
        advice: int | None = self._client.ask("/heartbeat", body).get("local_steps")
        return advice

    def leave(self, *, has_ended: bool) -> None:
        """Say goodbye, if the worker has joined. A server that does not answer is not told."""
        if not self._has_joined:
            return
        self._has_joined = False
        try:
            self._client.ask("/leave", {"worker": self.worker, "session": self.session, "has_ended": has_ended})
        except (WorkerRefused, ServerUnreachable, UsageError) as error:
            _log.info("worker %s left without a goodbye: %s", self.worker, error)

    # Parameters -------------------------------------------------------------------------------------------------------

    def parameters(self) -> ArrayFrame:
        """Return the parameters of the open round."""
        frame = self._client.parameters(self.worker, download=self._download)
        if frame is None:
            raise ServerUnreachable(f"{self._client.name} has no parameters yet; its first worker brings them")
        return frame

    def goes_on(self, standing: Mapping[str, Any]) -> bool:
        """Return whether the parameters of a checkpoint are still of use, and get the base that they need."""
        if self._replica.has_base and standing["keeps_delta"]:
            return True
        if standing["round"] == self.base_round and standing["is_awaited"]:
            frame = self._client.parameters(self.worker, download=self._download)
            if frame is not None and int(frame.metadata["round"]) == self.base_round:
                self._replica.set_base(frame)
                return True
        if self.is_async and self._replica.num_fragments > 1:
            return False  # each fragment has a base of another round, and nobody keeps those
        try:  # its update may have arrived before it was killed; it will compute the same one again
            return self._client.received(self.key, self.session) is None
        except WorkerRefused as refusal:
            return refusal.kind is RefusalKind.OTHERS_ENDED

    def exchange(self, pending: PendingUpdate, deadline: float) -> ArrayFrame:
        """Return the answer to an update, after sending it if the server does not know it. It changes no parameter."""
        self._replica.ensure_residuals(pending.sent)
        while True:
            left = deadline - time.perf_counter()
            if self._ended.is_set():
                raise ServerUnreachable(_STOPPED)
            if left <= 0:
                raise ServerUnreachable(
                    f"no answer within timeout={self._timeout_s:g} s: a worker is slow or gone; see `skyward diloco "
                    "status`, or raise timeout"
                )
            answer: ArrayFrame | Literal["unknown"] | None = "unknown"
            if pending.may_have_arrived:
                wait_s = min(left, LONG_POLL_S)
                answer = self._client.answer(pending.key, self.session, wait_s=wait_s, download=self._download)
            if isinstance(answer, ArrayFrame):
                return answer
            if answer == "unknown":
                pending.may_have_arrived = True
                try:
                    self._send(pending)
                except WorkerRefused as refusal:
                    # Without a delta that is refused for its values the round goes on, and it has an answer.
                    if refusal.kind is not RefusalKind.BAD_DELTA:
                        raise
                    _log.warning("worker %s: %s", self.worker, refusal.message)

    def _send(self, pending: PendingUpdate) -> None:
        if not self._replica.has_base:  # resumed: the fragments that it has not sent yet are the server's
            frame = self.parameters()
            if int(frame.metadata["round"]) != pending.key.base_round:
                text = f"worker={self.worker!r}: its round {pending.key.base_round} is over; load the parameters"
                raise WorkerRefused(RefusalKind.WRONG_ROUND, text)
            self._replica.set_base(frame)
        pieces = self._replica.prepare(pending.sent)
        self.last_send_mb = size_of(pieces) / 1e6
        offset = 0
        if pending.sent.upload:
            received = self._client.received(pending.key, self.session, upload=pending.sent.upload)
            if received is None:
                return  # it has arrived whole since the server was asked
            offset = received
            self._uploaded += max(0, offset - pending.sent.uploaded)
            pending.sent.uploaded = max(offset, pending.sent.uploaded)
        pending.sent.upload = pending.sent.upload or secrets.token_hex(8)
        self._client.submit(pending.key, self.session, pieces, upload=pending.sent.upload, offset=offset)
