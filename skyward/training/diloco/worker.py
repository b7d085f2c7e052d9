"""`DiLoCoWorker`: counts inner steps, sends the worker's delta every H steps, and goes on from the answer.

A delta that was sent is never computed again: a worker that got no answer asks for that one first. Meanwhile it trains
on, and its progress since then is added to the parameters of the answer.

With streaming, one fragment of the model is sent after another. `SyncSchedule` says after which steps, and the number
of the round says which fragment: fragment r % N in round r. An asynchronous worker takes turns by the numbers of its
updates. With a delay, a `Flight` exchanges the fragment while training goes on.
"""

from __future__ import annotations

import json
import logging
import math
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import torch

from ...errors import UsageError
from ..parts import unwrapped
from .client import DiLoCoClient
from .dealing import Deal, Hand
from .flight import Flight
from .frames import ArrayFrame, encode, size_of
from .refusal import RefusalKind, WorkerRefused
from .replica import Replica, SentFragment
from .rounds import UpdateKey
from .schedule import SyncSchedule
from .settings import ALPHA_WITH_DELAY, SYNC_EVERY, check_options
from .tensors import to_wire
from .transport import ServerUnreachable

FIRST_PAUSE_S = 2.0
"""Pause before the first retry; each further one is twice as long, up to `MOST_PAUSE_S`."""
MOST_PAUSE_S = 60.0
LONG_POLL_S = 20.0
"""Time that the server holds one question for an answer."""
ABANDON_S = 2.0
"""Longest wait of a failed run for a request that it has begun beside training."""
_FINAL = frozenset({RefusalKind.ID_TAKEN, RefusalKind.OTHERS_ENDED})
"""Refusals that do not change when the worker joins again."""

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Pending:
    """An update without an answer."""

    key: UpdateKey
    sent: SentFragment
    may_have_arrived: bool = True
    """Whether the server may know it. Then it is asked first, because a delta is large."""


class DiLoCoWorker:
    """Worker of loosely joined training, for a loop of one's own.

    In the block, each step of the optimizer counts as an inner step. Gradient accumulation counts once, and a step that
    a gradient scaler skips does not count. After every `sync_every` steps the call of `optimizer.step()` also
    exchanges the worker's progress for that of all workers, which takes until the slowest one is there.

    If the server does not answer, the worker trains on, and tries again after the next `sync_every` steps.

    With `num_fragments` above 1, a fragment of the model is exchanged every `sync_every / num_fragments` steps
    (Streaming DiLoCo, arXiv 2501.18512). With `fragment_sync_delay`, training goes on while it travels. The end of the
    block waits for a fragment on its way, unless an exception ends it.

    Args:
        model: Model that is trained. Its parameters and its buffers of floating point are exchanged.
        optimizer: Its `torch.optim.Optimizer`; None: the loop calls `count_step` after each step.
        server_addr: Address of the server, `host:port` or a URL.
        sync_every: Inner steps between two synchronisations.
        worker_id: Name of the worker, unique among all workers and the same after a restart; None: the host's name and
            random letters, kept in checkpoints.
        bf16_comm: Send deltas in bfloat16, which halves the upload.
        timeout: Longest wait for the other workers, and longest silence of the server, in seconds.
        heartbeat_interval: Seconds between two signs of life; 0: none.
        max_sync_retries: Retries of a synchronisation that failed, after pauses of 2, 4, 8, ... seconds. A start has as
            many.
        dylu: Take fewer steps than `sync_every` in each round on a slower worker, so that all are ready at the same
            time (Dynamic Local Updates, arXiv 2401.09135). The server advises the number in its answers to heartbeats.
        num_fragments: Parts of the model that are exchanged one after another, the same for all workers.
        fragment_sync_delay: Inner steps between sending a fragment and applying the answer. 0: the step that sends it
            waits for the answer. An answer is applied before the next fragment is sent, however large the delay.
        fragment_update_alpha: Weight of the worker's own values when an answer is applied, between 0 and 1. None: 0.5
            with a delay, and 0 without, which takes the others' values alone.
        quantization_bits: Bits of each value that is sent, 8 or 4, with error feedback; 0: as `bf16_comm` says.
        token: The server's token; None: from DILOCO_TOKEN, or the file that DILOCO_TOKEN_FILE names.

    Raises:
        UsageError: An argument is not legal.

    Example:
        with DiLoCoWorker(model, optimizer, "127.0.0.1:8512", sync_every=100):
            for batch in data:
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                optimizer.step()
    """

    def __init__(  # noqa: PLR0913  # keyword-only options
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        server_addr: str,
        *,
        sync_every: int = SYNC_EVERY,
        worker_id: str | None = None,
        bf16_comm: bool = True,
        timeout: float = 600.0,
        heartbeat_interval: float = 30.0,
        max_sync_retries: int = 3,
        dylu: bool = False,
        num_fragments: int = 1,
        fragment_sync_delay: int = 0,
        fragment_update_alpha: float | None = None,
        quantization_bits: int = 0,
        token: str | None = None,
    ) -> None:
        check_options(
            sync_every=sync_every,
            timeout=timeout,
            heartbeat_interval=heartbeat_interval,
            max_sync_retries=max_sync_retries,
            dylu=dylu,
            num_fragments=num_fragments,
            fragment_sync_delay=fragment_sync_delay,
            fragment_update_alpha=fragment_update_alpha,
            quantization_bits=quantization_bits,
        )
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            kind = type(optimizer).__name__
            raise UsageError(f"optimizer={kind}: is none of torch; pass None, and call count_step() after each step")
        usual_alpha = ALPHA_WITH_DELAY if fragment_sync_delay else 0.0
        self._replica = Replica(
            unwrapped(model),
            num_fragments=num_fragments,
            alpha=usual_alpha if fragment_update_alpha is None else fragment_update_alpha,
            is_bf16=bf16_comm,
            bits=quantization_bits,
        )
        self._optimizer = innermost(optimizer)
        self.hand = Hand()
        """Rows of this worker, for a `DiLoCoSampler`."""
        self._client = DiLoCoClient(server_addr, token=token, timeout_s=timeout)
        self._delay = fragment_sync_delay
        self._is_async = False
        self._sync_every, self._dylu = sync_every, dylu
        self._advised: int | None = None
        """Steps of a round that the server has advised since the last step."""
        self._adopted = sync_every
        self._schedule = self._new_schedule(0)
        self._wanted_id = worker_id
        self._worker = worker_id or f"{socket.gethostname()}-{secrets.token_hex(4)}"
        self._session = secrets.token_hex(16)
        self._timeout_s = timeout
        self._heartbeat_s, self._retries = heartbeat_interval, max_sync_retries
        self._base_round: int | None = None
        self._number = 0
        self._tokens = 0
        """Tokens since the base round."""
        self._losses = LossMean()
        self._pending: _Pending | None = None
        self._flight: Flight | None = None
        """Exchange of the pending update beside training."""
        self._hook: Any = None
        self._ended = threading.Event()
        self._has_finished = False
        self._heart: threading.Thread | None = None
        self._steps, self._began_at, self._waited_s = 0, 0.0, 0.0
        self._counts = {"sync_count": 0, "local_step": 0, "sync_retries": 0, "reconnections": 0, "dylu_adjustments": 0}
        self._total_sync_time = 0.0
        self._last = {"last_sync_time": 0.0, "last_send_mb": 0.0, "last_recv_mb": 0.0}

    @property
    def worker_id(self) -> str:
        """Name of the worker."""
        return self._worker

    @property
    def sync_metrics(self) -> dict[str, float]:
        """Metrics for a log. Times are in seconds, sizes in 10^6 bytes."""
        values = {
            "sync_count": self._counts["sync_count"],
            "local_step": self._counts["local_step"],
            "total_sync_time": self._total_sync_time,
            **self._last,
            "steps_per_second": self.get_steps_per_second(),
            "sync_every": self._schedule.sync_every,
        }
        if self._dylu:
            values["dylu_adjustments"] = self._counts["dylu_adjustments"]
        if self._replica.num_fragments > 1:
            values["num_fragments"] = self._replica.num_fragments
            values["fragment_syncs"] = self._counts["sync_count"]
        values.update((name, count) for name, count in self._counts.items() if count and name not in values)
        return {f"diloco/{name}": value for name, value in values.items()}

    def get_steps_per_second(self) -> float:
        """Return the inner steps per second of training since the start, without the time of synchronisations."""
        seconds = time.perf_counter() - self._began_at - self._waited_s
        return self._steps / seconds if self._steps and seconds > 0 else 0.0

    # Life -------------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Join, load the global parameters, and count steps from now on.

        After `load_state_dict`, the model keeps its own parameters if its round is still open.

        Raises:
            UsageError: The server does not answer, or refuses this worker, for example because another process has its
                id.
        """
        self._ended.clear()
        self._has_finished = False
        try:
            self._with_retries(self._join, time.perf_counter() + self._timeout_s)
        except WorkerRefused as refusal:
            raise UsageError(refusal.message) from None
        except ServerUnreachable as error:
            raise UsageError(f"server_addr={self._client.name!r}: {error}; start `skyward diloco serve`") from error
        if self._optimizer is not None:
            self._hook = self._optimizer.register_step_post_hook(lambda *_: self.count_step())
        self._began_at, self._steps, self._waited_s = time.perf_counter(), 0, 0.0
        if self._heartbeat_s:
            self._heart = threading.Thread(target=self._beat, name="skyward-diloco-heartbeat", daemon=True)
            self._heart.start()
        if self._pending is not None and self._schedule.in_flight is not None:
            self._fly(self._pending)

    def finish(self) -> None:
        """Wait for a fragment on its way, and apply it. Call it when training has ended, before `stop`.

        So `stop` tells the server that nobody need wait for the worker's return.
        """
        if self._flight is not None:
            self.force_sync()
        self._has_finished = True

    def stop(self) -> None:
        """Leave the server, and count no more steps. The model keeps its parameters. Idempotent.

        A fragment on its way may be lost; see `finish`.
        """
        self._ended.set()
        flight, self._flight = self._flight, None
        if flight is not None:
            flight.abandon(ABANDON_S)
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if self._heart is not None:
            self._heart.join()
            self._heart = None
        if self._base_round is not None:
            try:
                body = {"worker": self._worker, "session": self._session, "has_ended": self._has_finished}
                self._client.ask("/leave", body)
            except (WorkerRefused, ServerUnreachable, UsageError) as error:
                _log.info("worker %s left without a goodbye: %s", self._worker, error)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()
        self.stop()

    # Steps ------------------------------------------------------------------------------------------------------------

    def count_step(self) -> None:
        """Count an inner step, and do what the schedule says: send a fragment, or apply one, or both."""
        self._steps += 1
        self._counts["local_step"] += 1
        advised, self._advised = self._advised, None
        if advised is not None and advised != self._adopted:
            self._adopted = advised
            self._counts["dylu_adjustments"] += 1
            self._schedule.change_sync_every(advised)
        schedule = self._schedule
        for action in schedule.advance():
            if action.kind == "send":
                self._depart()
            elif self._pending is not None:
                self.force_sync()
            if self._schedule is not schedule:  # it was replaced, with the parameters
                break

    def count_tokens(self, tokens: int) -> None:
        """Count tokens of the step that comes next, for a server with `weighting="tokens"`.

        Call it before the step of the optimizer. Any unit does that is the same for all workers.

        Args:
            tokens: Tokens of this worker's batch, >= 0.
        """
        self._tokens += tokens

    def count_loss(self, loss: float | torch.Tensor) -> None:
        """Count the loss of a step, or a mean of some. The server shows the mean of each round.

        Args:
            loss: A number, or a tensor with one value. The device computes on: it is read when the delta is sent.
        """
        self._losses.add(loss)

    def force_sync(self) -> bool:
        """Synchronise now: the fragment that is on its way, or else the next one.

        Returns:
            Whether it succeeded. If not, the log says why, and the worker trains on.
        """
        began = time.perf_counter()
        flight, self._flight = self._flight, None
        try:
            self._land(flight, began + self._timeout_s)
            self._counts["sync_count"] += 1
            return True
        except ServerUnreachable as error:
            _log.warning("worker %s trains on without synchronisation: %s", self._worker, error)
        except WorkerRefused as refusal:
            level = logging.WARNING if refusal.kind is RefusalKind.OTHERS_ENDED else logging.ERROR
            _log.log(level, "worker %s trains on without synchronisation: %s", self._worker, refusal.message)
        except UsageError as error:  # a training of days does not end because its server changed
            _log.error("worker %s trains on without synchronisation: %s", self._worker, error)
        finally:
            if self._pending is not None:
                self._pending.sent.is_late = True
            seconds = time.perf_counter() - began
            self._waited_s += seconds
            self._total_sync_time += seconds
            self._last["last_sync_time"] = seconds
        return False

    def _depart(self) -> None:
        """Copy the next fragment. If it is applied in a later step, exchange it beside training."""
        if self._pending is None:
            self._pending = self._copied()
        if self._schedule.in_flight is not None:
            self._fly(self._pending)

    def _fly(self, pending: _Pending) -> None:
        deadline = time.perf_counter() + self._timeout_s
        self._flight = Flight(lambda: self._with_retries(lambda: self._exchanged(pending, deadline), deadline))

    def _land(self, flight: Flight | None, deadline: float) -> None:
        """Apply an answer that was fetched beside training, or fetch it now. Membership is mended here, if needed."""
        if flight is not None:
            try:
                answer = flight.result()
            except WorkerRefused as refusal:
                if refusal.kind in _FINAL:
                    raise
                _log.warning("worker %s: %s", self._worker, refusal.message)
            else:
                return self._with_retries(lambda: self._take(answer), deadline)
        return self._with_retries(lambda: self._synchronise(deadline), deadline)

    def _with_retries(self, action: Callable[[], T], deadline: float) -> T:
        """Do something, again after pauses if the server does not answer. The last ServerUnreachable is raised."""
        pause = FIRST_PAUSE_S
        attempt = 0
        while True:
            try:
                return action()
            except ServerUnreachable as error:
                if attempt == self._retries or time.perf_counter() >= deadline or self._ended.is_set():
                    raise
                _log.warning("worker %s retries in %g s: %s", self._worker, pause, error)
                self._counts["sync_retries"] += 1
                self._ended.wait(pause)
                pause = min(2 * pause, MOST_PAUSE_S)
                attempt += 1

    def _synchronise(self, deadline: float) -> None:
        while True:
            try:
                if self._pending is None:
                    self._pending = self._copied()
                return self._take(self._exchanged(self._pending, deadline))
            except WorkerRefused as refusal:
                if refusal.kind in _FINAL:
                    raise
                _log.warning("worker %s: %s", self._worker, refusal.message)
                if not self._rejoin(deadline):
                    return None

    def _copied(self) -> _Pending:
        """Return the update of the next fragment, by its present values."""
        key = self._key()
        sent = self._replica.copy(self._fragment_of(key))
        sent.rows = self.hand.rows_after(self._delay, self._counts["local_step"])
        sent.tokens = self._tokens
        sent.figures = self._figures() | self._losses.take()
        return _Pending(key, sent, may_have_arrived=False)

    def _figures(self) -> dict[str, float]:
        return {
            "steps_per_second": self.get_steps_per_second(),
            "local_step": self._counts["local_step"],
            "sync_every": self._schedule.sync_every,
        }

    def _fragment_of(self, key: UpdateKey) -> int:
        return (key.number if self._is_async else key.base_round) % self._replica.num_fragments

    def _exchanged(self, pending: _Pending, deadline: float) -> ArrayFrame:
        """Return the answer to an update, after sending it if the server does not know it. It changes no parameter."""
        self._replica.ensure_residuals(pending.sent)
        while True:
            left = deadline - time.perf_counter()
            if self._ended.is_set():
                raise ServerUnreachable("the worker has stopped")
            if left <= 0:
                raise ServerUnreachable(f"no answer within timeout={self._timeout_s:g} s: a worker is slow or gone")
            answer: ArrayFrame | Literal["unknown"] | None = "unknown"
            if pending.may_have_arrived:
                answer = self._client.answer(pending.key, self._session, wait_s=min(left, LONG_POLL_S))
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
                    _log.warning("worker %s: %s", self._worker, refusal.message)

    def _send(self, pending: _Pending) -> None:
        if not self._replica.has_base:  # resumed: the fragments that it has not sent yet are the server's
            frame = self._fetched()
            if int(frame.metadata["round"]) != pending.key.base_round:
                text = f"worker={self._worker!r}: its round {pending.key.base_round} is over; load the parameters"
                raise WorkerRefused(RefusalKind.WRONG_ROUND, text)
            self._replica.set_base(frame)
        pieces = self._replica.prepare(pending.sent)
        self._last["last_send_mb"] = size_of(pieces) / 1e6
        self._client.submit(pending.key, self._session, pieces)

    def _take(self, answer: ArrayFrame) -> None:
        """Go on from an answer."""
        assert self._pending is not None
        if answer.metadata.get("warning"):
            _log.warning("worker %s was told: %s", self._worker, answer.metadata["warning"])
        self._last["last_recv_mb"] = sum(array.data.nbytes for array in answer.arrays.values()) / 1e6
        if answer.metadata["kind"] == "update" and not self._replica.has_base:
            answer = self._fetched()  # resumed after its update had arrived: there is nothing to add the answer to
            self._replica.receive_base(self._pending.sent, answer)
        else:
            self._replica.receive(self._pending.sent, answer)
        self._tokens -= self._pending.sent.tokens
        self._begin_round(answer)

    def _begin_round(self, frame: ArrayFrame) -> None:
        self._base_round, self._pending = int(frame.metadata["round"]), None
        self._number += 1
        deal = frame.metadata.get("deal")
        self.hand.take(None if deal is None else Deal.from_json(json.loads(deal)), self._worker)

    def _new_schedule(self, first_fragment: int) -> SyncSchedule:
        return SyncSchedule(
            sync_every=self._adopted,
            num_fragments=self._replica.num_fragments,
            delay=self._delay,
            first_fragment=first_fragment,
        )

    # Membership -------------------------------------------------------------------------------------------------------

    def _key(self) -> UpdateKey:
        assert self._base_round is not None
        return UpdateKey(worker=self._worker, base_round=self._base_round, number=self._number)

    def _ask_to_join(self) -> dict[str, Any]:
        body = {
            "worker": self._worker,
            "session": self._session,
            "base_round": self._base_round,
            "layout": {name: tuple(tensor.shape) for name, tensor in self._replica.tensors.items()},
            "num_fragments": self._replica.num_fragments,
        }
        standing = self._client.ask("/join", body)
        self._is_async = standing["is_async"]
        return standing

    def _join(self) -> None:
        resumed_round = self._base_round
        standing = self._ask_to_join()
        if not standing["has_model"]:
            self._client.offer(encode(to_wire(self._replica.tensors), {}))
        if resumed_round is not None:
            if self._goes_on(resumed_round, standing):
                return
            _log.warning("worker %s gives up the steps since round %d, which is over", self._worker, resumed_round)
        self._await_round(standing, time.perf_counter() + self._timeout_s)
        self._load_current()

    def _goes_on(self, resumed_round: int, standing: Mapping[str, Any]) -> bool:
        """Return whether the parameters of the checkpoint are still of use, and get the base that they need."""
        if self._replica.has_base and standing["keeps_delta"]:
            return True
        if standing["round"] == resumed_round and standing["is_awaited"]:
            frame = self._client.parameters(self._worker)
            if frame is not None and int(frame.metadata["round"]) == resumed_round:
                self._replica.set_base(frame)
                return True
        if self._is_async and self._replica.num_fragments > 1:
            return False  # each fragment has a base of another round, and nobody keeps those
        try:  # its update may have arrived before it was killed; it will compute the same one again
            return self._client.answer(self._key(), self._session, wait_s=0) != "unknown"
        except WorkerRefused as refusal:
            return refusal.kind is RefusalKind.OTHERS_ENDED

    def _rejoin(self, deadline: float) -> bool:
        """Join again. Return whether the delta is still of use; if not, the current parameters are loaded."""
        base_round = self._base_round
        self._counts["reconnections"] += 1
        standing = self._ask_to_join()
        if not standing["has_model"]:
            self._client.offer(encode(to_wire(self._replica.tensors), {}))
        if standing["keeps_delta"] and self._replica.has_base:
            return True
        self._await_round(standing, deadline)
        _log.warning("worker %s gives up the steps since round %s", self._worker, base_round)
        self._load_current()
        return False

    def _await_round(self, standing: Mapping[str, Any], deadline: float) -> None:
        """Return when this worker is a member of the open round."""
        while not standing["is_awaited"]:
            left = deadline - time.perf_counter()
            if left <= 0:
                raise ServerUnreachable(f"no round began within timeout={self._timeout_s:g} s")
            self._ended.wait(0.1)  # a server that stops answers at once
            body = {"worker": self._worker, "session": self._session, "wait_s": min(left, LONG_POLL_S)}
            standing = self._client.ask("/heartbeat", body)

    def _load_current(self) -> None:
        frame = self._fetched()
        self._replica.load(frame)
        self._tokens = 0
        self._begin_round(frame)
        # A late joiner sends the same fragment as the others, about when they do.
        self._schedule = self._new_schedule(0 if self._is_async else self._fragment_of(self._key()))

    def _fetched(self) -> ArrayFrame:
        frame = self._client.parameters(self._worker)
        if frame is None:
            raise ServerUnreachable(f"{self._client.name} has no parameters yet")
        return frame

    def _beat(self) -> None:
        while not self._ended.wait(self._heartbeat_s):
            figures = self._figures()
            if self._dylu:
                figures["dylu_sync_every"] = self._sync_every
            body = {"worker": self._worker, "session": self._session, "figures": figures}
            try:
                self._advised = self._client.ask("/heartbeat", body).get("local_steps")
            except WorkerRefused as refusal:
                if refusal.kind is RefusalKind.NOT_A_MEMBER:
                    self._join_early()
            except Exception as error:  # the next one may get through
                _log.info("worker %s: a heartbeat failed: %s", self._worker, error)

    def _join_early(self) -> None:
        """Join again after an eviction, so that the delta still counts if the round is open."""
        try:
            self._ask_to_join()
        except (WorkerRefused, ServerUnreachable, UsageError) as error:
            _log.warning("worker %s could not join again: %s", self._worker, error)

    # State ------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the round and the counters. The parameters are the model's.

        These are values for JSON. There are tensors only of an update that waits for its answer, and with
        `quantization_bits`: the rounding errors, and the parameters that deltas are relative to.
        """
        pending = self._pending
        return {
            **self._counts,
            "total_sync_time": self._total_sync_time,
            "sync_every": self._schedule.sync_every,
            "worker_id": self._worker,
            "session": self._session,
            "base_round": self._base_round,
            "number": self._number,
            "replica": self._replica.state_dict(),
            "hand": self.hand.state_dict(),
            "tokens": self._tokens,
            "schedule": self._schedule.state_dict(),
            "pending": None if pending is None else _saved(pending.sent),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a state that `state_dict` returned. Call it before `start`, with the model's parameters loaded.

        A worker with another `worker_id` than the saved one, or another number of fragments, takes over the counters
        only.
        """
        if not state:
            return
        for name in self._counts:
            self._counts[name] = int(state.get(name, 0))
        self._total_sync_time = float(state["total_sync_time"])
        if self._wanted_id not in (None, state["worker_id"]):
            return
        self._worker, self._session = str(state["worker_id"]), str(state["session"])
        if len(state["replica"]["received_in"]) != self._replica.num_fragments:
            return
        self._replica.load_state_dict(state["replica"])
        self._tokens = int(state.get("tokens", 0))
        if "hand" in state:  # older checkpoints have none
            self.hand.load_state_dict(state["hand"])
        self._base_round, self._number = state["base_round"], int(state["number"])
        self._schedule.load_state_dict(state["schedule"])
        if self._dylu:
            self._adopted = int(state["schedule"]["next_sync_every"])
        else:  # it may have changed since, or DyLU had changed it
            self._schedule.change_sync_every(self._sync_every)
        if state["pending"] is not None:
            key, saved = self._key(), state["pending"]
            self._pending = _Pending(key, SentFragment(saved["fragment"], dict(saved["local"]), saved["is_late"]))
            self._pending.sent.rows, self._pending.sent.tokens = saved.get("rows", 0), saved.get("tokens", 0)


class LossMean:
    """Mean of losses. Those of a GPU stay there until it is taken."""

    def __init__(self) -> None:
        self._sum: float | torch.Tensor = 0.0
        self._count = 0

    def add(self, loss: float | torch.Tensor) -> None:
        """Add a loss."""
        self._sum = self._sum + (loss.detach() if isinstance(loss, torch.Tensor) else loss)
        self._count += 1

    def take(self) -> dict[str, float]:
        """Return the mean as a figure, and begin again; nothing if there is none, or it is not finite."""
        mean = float(self._sum) / self._count if self._count else math.nan
        self._sum, self._count = 0.0, 0
        return {"loss": mean} if math.isfinite(mean) else {}


def _saved(sent: SentFragment) -> dict[str, Any]:
    counts = {"rows": sent.rows, "tokens": sent.tokens}
    return {"fragment": sent.fragment, "local": dict(sent.local), "is_late": sent.is_late, **counts}


def innermost(optimizer: torch.optim.Optimizer | None) -> torch.optim.Optimizer | None:
    """Return the optimizer that makes the steps. Accelerate's wrapper, for example, has no hooks."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer
