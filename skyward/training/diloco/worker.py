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
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

import torch

from ...errors import UsageError
from ..parts import unwrapped
from .client import DiLoCoClient
from .dealing import Deal, Hand
from .flight import Flight
from .frames import ArrayFrame
from .refusal import RefusalKind, WorkerRefused
from .replica import Replica, SentFragment
from .schedule import SyncSchedule
from .seat import PendingUpdate, WorkerSeat
from .settings import ALPHA_WITH_DELAY, SYNC_EVERY, check_options, option
from .tensors import refuse_deepspeed
from .transport import ServerUnreachable
from .worker_metrics import LossMean, WorkerMetrics

FIRST_PAUSE_S = 2.0
"""Pause before the first retry; each further one is twice as long, up to `MOST_PAUSE_S`."""
MOST_PAUSE_S = 60.0
ABANDON_S = 2.0
"""Longest wait of a failed run for a request that it has begun beside training."""
_FINAL = frozenset({RefusalKind.ID_TAKEN, RefusalKind.OTHERS_ENDED})
"""Refusals that do not change when the worker joins again."""

T = TypeVar("T")

_log = logging.getLogger(__name__)


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
        worker_id: Name of the worker, unique among all workers and the same after a restart; None: DILOCO_WORKER_ID, or
            the host's name and random letters, kept in checkpoints.
        bf16_comm: Send deltas in bfloat16, which halves the upload.
        timeout: Longest wait for the other workers, and longest silence of the server, in seconds.
        heartbeat_interval: Seconds between two signs of life; 0: none.
        max_sync_retries: Retries of a synchronisation that failed, after pauses of 2, 4, 8, ... seconds. A start has as
            many. One that carries a transfer further does not count.
        dylu: Take fewer steps than `sync_every` in each round on a slower worker, so that all are ready at the same
            time (Dynamic Local Updates, arXiv 2401.09135). The server advises the number in its answers to heartbeats.
        num_fragments: Parts of the model that are exchanged one after another, the same for all workers.
        fragment_sync_delay: Inner steps between sending a fragment and applying the answer. 0: the step that sends it
            waits for the answer. An answer is applied before the next fragment is sent, however large the delay. Set as
            few steps as the transfer takes, because the loss grows with the delay.
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
        refuse_deepspeed(model, optimizer)
        worker_id = option("worker_id", worker_id)
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
        self._ended = threading.Event()
        self._seat = WorkerSeat(
            self._client,
            self._replica,
            worker_id=worker_id,
            timeout_s=timeout,
            ended=self._ended,
            figures={
                "gpus": torch.cuda.device_count(),
                "sync_every": sync_every,
                "bits": quantization_bits or (16 if bf16_comm else 32),
                "dylu": int(dylu),
            },
        )
        self._wanted_id = worker_id
        self._delay = fragment_sync_delay
        self._sync_every, self._dylu = sync_every, dylu
        self._advised: int | None = None
        """Steps of a round that the server has advised since the last action."""
        self._adopted = sync_every
        self._schedule = self._new_schedule(0)
        self._timeout_s = timeout
        self._heartbeat_s, self._retries = heartbeat_interval, max_sync_retries
        self._tokens = 0
        """Tokens since the base round."""
        self._losses, self._metrics = LossMean(), WorkerMetrics()
        self._pending: PendingUpdate | None = None
        self._flight: Flight | None = None
        """Exchange of the pending update beside training."""
        self._hook: Any = None
        self._has_finished = False
        self._heart: threading.Thread | None = None

    @property
    def worker_id(self) -> str:
        """Name of the worker."""
        return self._seat.worker

    @property
    def sync_metrics(self) -> dict[str, float]:
        """Metrics for a log. Times are in seconds, sizes in 10^6 bytes."""
        return self._metrics.for_log(
            last_send_mb=self._seat.last_send_mb,
            sync_every=self._schedule.sync_every,
            num_fragments=self._replica.num_fragments,
            dylu=self._dylu,
        )

    def get_steps_per_second(self) -> float:
        """Return the inner steps per second of training since the start, without the time of synchronisations."""
        return self._metrics.steps_per_second

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
            raise UsageError(
                f"server_addr={self._client.name!r}: {error}"
            ) from error  # words: ok, the error says what to do
        if self._optimizer is not None:
            self._hook = self._optimizer.register_step_post_hook(lambda *_: self.count_step())
        self._metrics.begin()
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
        self._seat.leave(has_ended=self._has_finished)

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
        self._metrics.count_step()
        schedule = self._schedule
        actions = schedule.advance()
        if actions:
            self._follow_advice()
        for action in actions:
            if action.kind == "send":
                self._depart()
            elif self._pending is not None:
                self.force_sync()
            if self._schedule is not schedule:  # it was replaced, with the parameters
                break

    def _follow_advice(self) -> None:
        """Change the steps of the next cycle to the latest advice.

        It is called where fragments are sent or applied, as each cycle ends there. Between those places, the other
        ranks of a worker could not know of a change.
        """
        advised, self._advised = self._advised, None
        if advised is not None and advised != self._adopted:
            self._adopted = advised
            self._metrics.counts["dylu_adjustments"] += 1
            self._schedule.change_sync_every(advised)

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
            self._metrics.count_sync(is_of_fragment=self._replica.num_fragments > 1)
            return True
        except ServerUnreachable as error:
            _log.warning("worker %s trains on without synchronisation: %s", self.worker_id, error)
        except WorkerRefused as refusal:
            level = logging.WARNING if refusal.kind is RefusalKind.OTHERS_ENDED else logging.ERROR
            _log.log(level, "worker %s trains on without synchronisation: %s", self.worker_id, refusal.message)
        except UsageError as error:  # a training of days does not end because its server changed
            _log.error("worker %s trains on without synchronisation: %s", self.worker_id, error)
        finally:
            if self._pending is not None:
                self._pending.sent.is_late = True
            self._metrics.count_wait(time.perf_counter() - began)
        return False

    def _depart(self) -> None:
        """Copy the next fragment. If it is applied in a later step, exchange it beside training."""
        if self._pending is None:
            self._pending = self._copied()
        if self._schedule.in_flight is not None:
            self._fly(self._pending)

    def _fly(self, pending: PendingUpdate) -> None:
        deadline = time.perf_counter() + self._timeout_s
        self._flight = Flight(lambda: self._with_retries(lambda: self._seat.exchange(pending, deadline), deadline))

    def _land(self, flight: Flight | None, deadline: float) -> None:
        """Apply an answer that was fetched beside training, or fetch it now. Membership is mended here, if needed."""
        if flight is not None:
            try:
                answer = flight.result()
            except WorkerRefused as refusal:
                if refusal.kind in _FINAL:
                    raise
                _log.warning("worker %s: %s", self.worker_id, refusal.message)
            else:
                return self._with_retries(lambda: self._take(answer), deadline)
        return self._with_retries(lambda: self._synchronise(deadline), deadline)

    def _with_retries(self, action: Callable[[], T], deadline: float) -> T:
        """Do something, again after pauses if the server does not answer. The last ServerUnreachable is raised.

        An attempt that carried a transfer further does not count, because the next one goes on there. The deadline
        ends them all.
        """
        pause = FIRST_PAUSE_S
        failures, carried = 0, self._seat.carried
        while True:
            try:
                return action()
            except ServerUnreachable as error:
                before, carried = carried, self._seat.carried
                if carried > before:
                    pause = FIRST_PAUSE_S
                else:
                    failures += 1
                if failures > self._retries or time.perf_counter() >= deadline or self._ended.is_set():
                    raise
                _log.warning("worker %s retries in %g s: %s", self.worker_id, pause, error)
                self._metrics.counts["sync_retries"] += 1
                self._ended.wait(pause)
                pause = min(2 * pause, MOST_PAUSE_S)

    def _synchronise(self, deadline: float) -> None:
        while True:
            try:
                if self._pending is None:
                    self._pending = self._copied()
                return self._take(self._seat.exchange(self._pending, deadline))
            except WorkerRefused as refusal:
                if refusal.kind in _FINAL:
                    raise
                _log.warning("worker %s: %s", self.worker_id, refusal.message)
                if not self._rejoin(deadline):
                    return None

    def _copied(self) -> PendingUpdate:
        """Return the update of the next fragment, by its present values."""
        sent = self._replica.copy(self._seat.fragment)
        sent.rows = self.hand.rows_after(self._delay, self._metrics.counts["local_step"])
        sent.tokens = self._tokens
        sent.figures = self._figures() | self._losses.take()
        return PendingUpdate(self._seat.key, sent, may_have_arrived=False)

    def _figures(self) -> dict[str, float]:
        return {
            "steps_per_second": self.get_steps_per_second(),
            "local_step": self._metrics.counts["local_step"],
            "sync_every": self._schedule.sync_every,
        }

    def _take(self, answer: ArrayFrame) -> None:
        """Go on from an answer."""
        assert self._pending is not None
        if answer.metadata.get("warning"):
            _log.warning("worker %s was told: %s", self.worker_id, answer.metadata["warning"])
        self._metrics.last_recv_mb = sum(array.data.nbytes for array in answer.arrays.values()) / 1e6
        if answer.metadata["kind"] == "update" and not self._replica.has_base:
            answer = (
                self._seat.parameters()
            )  # resumed after its update had arrived: there is nothing to add the answer to
            self._replica.receive_base(self._pending.sent, answer)
        else:
            self._replica.receive(self._pending.sent, answer)
        self._tokens -= self._pending.sent.tokens
        self._begin_round(answer)

    def _begin_round(self, frame: ArrayFrame) -> None:
        self._seat.begin_round(frame)
        self._pending = None
        deal = frame.metadata.get("deal")
        self.hand.take(None if deal is None else Deal.from_json(json.loads(deal)), self._seat.worker)

    def _new_schedule(self, first_fragment: int) -> SyncSchedule:
        return SyncSchedule(
            sync_every=self._adopted,
            num_fragments=self._replica.num_fragments,
            delay=self._delay,
            first_fragment=first_fragment,
        )

    # Membership -------------------------------------------------------------------------------------------------------

    def _join(self) -> None:
        resumed_round = self._seat.base_round
        standing = self._seat.join()
        if resumed_round is not None:
            if self._seat.goes_on(standing):
                return
            _log.warning("worker %s gives up the steps since round %d, which is over", self.worker_id, resumed_round)
        self._seat.await_round(standing, time.perf_counter() + self._timeout_s)
        self._load_current()

    def _rejoin(self, deadline: float) -> bool:
        """Join again. Return whether the delta is still of use; if not, the current parameters are loaded."""
        self._metrics.counts["reconnections"] += 1
        standing = self._seat.join()
        if standing["keeps_delta"] and self._replica.has_base:
            return True
        self._seat.await_round(standing, deadline)
        _log.warning("worker %s gives up the steps since round %s", self.worker_id, self._seat.base_round)
        self._load_current()
        return False

    def _load_current(self) -> None:
        frame = self._seat.parameters()
        self._replica.load(frame)
        self._tokens = 0
        self._begin_round(frame)
        # A late joiner sends the same fragment as the others, about when they do.
        self._schedule = self._new_schedule(0 if self._seat.is_async else self._seat.fragment)

    def _beat(self) -> None:
        while not self._ended.wait(self._heartbeat_s):
            figures = self._figures()
            if self._dylu:
                figures["dylu_sync_every"] = self._sync_every
            try:
                self._advised = self._seat.beat(figures)
            except WorkerRefused as refusal:
                if refusal.kind is RefusalKind.NOT_A_MEMBER:
                    self._join_early()
            except Exception as error:  # the next one may get through
                _log.info("worker %s: a heartbeat failed: %s", self.worker_id, error)

    def _join_early(self) -> None:
        """Join again after an eviction, so that the delta still counts if the round is open."""
        try:
            self._seat.ask_to_join()
        except (WorkerRefused, ServerUnreachable, UsageError) as error:
            _log.warning("worker %s could not join again: %s", self.worker_id, error)

    # State ------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the round and the counters. The parameters are the model's.

        These are values for JSON. There are tensors only of an update that waits for its answer, and with
        `quantization_bits`: the rounding errors, and the parameters that deltas are relative to.
        """
        pending = self._pending
        return {
            **self._metrics.state_dict(),
            "sync_every": self._schedule.sync_every,
            "worker_id": self._seat.worker,
            "session": self._seat.session,
            "base_round": self._seat.base_round,
            "number": self._seat.number,
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
        self._metrics.load_state_dict(state)
        if self._wanted_id not in (None, state["worker_id"]):
            return
        self._seat.worker, self._seat.session = str(state["worker_id"]), str(state["session"])
        if len(state["replica"]["received_in"]) != self._replica.num_fragments:
            return
        self._replica.load_state_dict(state["replica"])
        self._tokens = int(state.get("tokens", 0))
        if "hand" in state:  # older checkpoints have none
            self.hand.load_state_dict(state["hand"])
        self._seat.base_round, self._seat.number = state["base_round"], int(state["number"])
        self._schedule.load_state_dict(state["schedule"])
        if self._dylu:
            self._adopted = int(state["schedule"]["next_sync_every"])
        else:  # it may have changed since, or DyLU had changed it
            self._schedule.change_sync_every(self._sync_every)
        if state["pending"] is not None:
            saved = state["pending"]
            sent = SentFragment(saved["fragment"], dict(saved["local"]), saved["is_late"])
            sent.rows, sent.tokens = saved.get("rows", 0), saved.get("tokens", 0)
            self._pending = PendingUpdate(self._seat.key, sent)


def _saved(sent: SentFragment) -> dict[str, Any]:
    counts = {"rows": sent.rows, "tokens": sent.tokens}
    return {"fragment": sent.fragment, "local": dict(sent.local), "is_late": sent.is_late, **counts}


def innermost(optimizer: torch.optim.Optimizer | None) -> torch.optim.Optimizer | None:
    """Return the optimizer that makes the steps. Accelerate's wrapper, for example, has no hooks."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer
