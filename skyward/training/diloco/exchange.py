"""Exchange of deltas: the global parameters, the rounds, and the deltas that wait for their round to close.

It knows no network. Any thread may call its methods; none waits for a worker. A transport calls `watch` to hear of
changes, and asks again.

Deltas are added in the order of the workers' ids, so that a repeated run is equal to the bit. One that arrives stays in
its file until the round closes. So the memory does not grow with the number of workers.

The tensors of a round never change. Closing a round makes new ones, and a reader of the old ones is not disturbed.

With streaming, a round has the deltas of one fragment: fragment r % N in synchronous round r. Asynchronous workers take
turns for themselves, by the numbers of their updates.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import IO, Any, Literal

import torch

from ...errors import UsageError
from .algorithm import DelayedNesterov, OuterOptimizer, OuterSGD
from .async_rounds import AsyncRounds
from .checkpointer import Checkpointer
from .compression import Compressed
from .delta_means import DeltaMeans, DeltaSummary
from .examination import Findings, Shaped, examine, mapped
from .facts import RoundFacts, ServerFacts, WorkerRound, mean_loss
from .fragments import AgreedFragments
from .frames import ArrayFrame
from .global_model import GlobalModel
from .guard import check_shapes
from .refusal import RefusalKind, WorkerRefused
from .replies import GlobalParameters, Standing
from .rounds import ClosedRound, Rounds, UpdateAnswer, UpdateKey
from .saves import ServerSaves
from .schedule import local_steps
from .tensors import to_tensors

KEPT_BUFFERS = 64
"""Number of asynchronous rounds whose buffers are kept. An update with an older base leaves the buffers alone."""

_log = logging.getLogger(__name__)


class DeltaExchange:
    """Rounds with their parameters.

    Args:
        rounds: The rounds, at their beginning.
        tensors: Global parameters, and buffers under `BUFFER_PREFIX`, in float32 on the CPU; None: those that the first
            worker offers.
        outer: Outer optimizer of the parameters; None: SGD as in the paper.
        is_bf16_down: Whether answers are updates in bfloat16. The global parameters then move by the rounded update, so
            that they and those of the workers stay equal to the bit.
        bits: 8 or 4: answers are updates with that many bits for a value, the same for all workers. The rounding error
            of an update is added to the next one. 0: they are not.
        weighting: Weight of each delta in the mean: `equal`, or the `samples` or `tokens` that its frame names.
        saves: Where the state is saved; None: nowhere.
        save_every: Rounds between two saves.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        rounds: Rounds | AsyncRounds,
        *,
        tensors: Mapping[str, torch.Tensor] | None = None,
        outer: OuterOptimizer | None = None,
        is_bf16_down: bool = False,
        bits: int = 0,
        weighting: str = "equal",
        saves: ServerSaves | None = None,
        save_every: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rounds, self._is_async = rounds, isinstance(rounds, AsyncRounds)
        self._is_bf16_down, self._bits, self._weighting, self._clock = is_bf16_down, bits, weighting, clock
        self._model = GlobalModel(
            OuterSGD() if outer is None else outer, bits=bits, kept_buffers=KEPT_BUFFERS if self._is_async else 1
        )
        if tensors is not None:
            self._model.take(tensors, rounds.round)
        self._fragments = AgreedFragments(is_async=self._is_async)
        self._open_fragment = 0
        """Fragment of the open round, once it has a delta."""
        self._deltas: dict[str, IO[bytes]] = {}
        self._findings: dict[str, Findings] = {}
        """Findings about each delta of the open round, also about refused ones."""
        self._update: dict[str, torch.Tensor | Compressed] | None = None
        """Update that led to the open round."""
        self._watchers: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._facts, self._closed_at = ServerFacts(), math.nan
        self._checkpointer = Checkpointer(
            saves, every=save_every, rounds=rounds, model=self._model, fragments=self._fragments
        )
        self._checkpointer.restore(now=clock())
        self._keep_answers()
        self._origin = {"id": secrets.token_hex(8), "state": self._checkpointer.state_id, "began_in": rounds.round}

    def watch(self, changed: Callable[[], None]) -> None:
        """Call a function after each change that may answer a question. It is called with a lock held: be brief."""
        self._watchers.append(changed)

    # Presence ---------------------------------------------------------------------------------------------------------

    def join(
        self,
        worker: str,
        session: str,
        *,
        base_round: int | None = None,
        layout: Mapping[str, Shaped] | None = None,
        num_fragments: int = 1,
        host: str = "",
        figures: Mapping[str, Any] | None = None,
    ) -> Standing:
        """Add a worker, or one that comes back; see `Rounds.join`.

        Args:
            worker: Its id.
            session: Session of its process.
            base_round: Round whose parameters it has.
            layout: Shapes of what it will send, in the order of the model.
            num_fragments: Number of its fragments. All workers that are present have the same ones.
            host: Name of its machine, for people.
            figures: Figures for people.

        Raises:
            WorkerRefused: Another process has this id, or the worker has another model or other fragments.
        """
        with self._lock:
            if layout is not None:
                if self._model.tensors is not None:
                    check_shapes(worker, layout, self._model.tensors)
                self._agree_on_fragments(worker, layout, num_fragments)
            is_new = worker not in self._rounds.workers
            self._rounds.join(worker, session, now=self._clock(), base_round=base_round)
            if is_new:
                self._facts.keep(self._rounds.workers)
                _log.info("worker %s joined in round %d", worker, self._rounds.round)
            self._facts.hear(worker, figures or {}, host=host)
            self._changed()
            keeps_delta = base_round is not None and self._rounds.takes_base(worker, base_round)
            return replace(self._standing(worker), keeps_delta=keeps_delta)

    def hear(self, worker: str, session: str, figures: Mapping[str, Any] | None = None) -> Standing:
        """Note a heartbeat, with figures for people. It raises WorkerRefused for a worker that is not present.

        A worker that names its `dylu_sync_every` is told how many steps to take, by the `steps_per_second` of all.
        """
        with self._lock:
            self._rounds.hear(worker, session, now=self._clock())
            self._facts.hear(worker, figures or {})
            most = (figures or {}).get("dylu_sync_every")
            if not isinstance(most, int) or most < 1:
                return self._standing(worker)
            speeds = {name: self._facts.speed(name) for name in self._rounds.workers}
            return replace(self._standing(worker), local_steps=local_steps(speeds, most)[worker])

    def leave(self, worker: str, session: str, *, has_ended: bool = False) -> None:
        """Remove a worker that says so; see `Rounds.leave`. One that is not present changes nothing."""
        with self._lock:
            if worker in self._rounds.workers:
                self._rounds.leave(worker, session, has_ended=has_ended)
                how = "ended its training" if has_ended else "left"
                _log.info("worker %s %s in round %d", worker, how, self._rounds.round)
                self._close_complete()

    def evict(self, worker: str) -> bool:
        """Remove a worker for an operator. Return whether it was present."""
        with self._lock:
            if worker not in self._rounds.workers:
                return False
            self._rounds.evict(worker)
            _log.warning("worker %s was evicted in round %d", worker, self._rounds.round)
            self._close_complete()
            return True

    def evict_silent(self) -> tuple[str, ...]:
        """Remove the workers that were silent for too long, and return their ids."""
        with self._lock:
            evicted = self._rounds.evict_silent(now=self._clock())
            for worker in evicted:
                _log.warning("worker %s was silent for too long, and was evicted; it may join again", worker)
            if evicted:
                self._close_complete()
            return evicted

    # Parameters -------------------------------------------------------------------------------------------------------

    def offer(self, frame: ArrayFrame) -> None:
        """Take a worker's parameters as the global ones, if there are none yet."""
        with self._lock:
            if self._model.tensors is None:
                tensors = {name: tensor.clone() for name, tensor in to_tensors(frame).items()}
                self._model.take(tensors, self._rounds.round)
                self._checkpointer.try_to_save()
                self._changed()

    def shapes(self) -> dict[str, tuple[int, ...]] | None:
        """Return the shapes of the global parameters; None if there are none yet."""
        tensors = self._model.tensors
        return None if tensors is None else {name: tuple(tensor.shape) for name, tensor in tensors.items()}

    def parameters(self) -> GlobalParameters | None:
        """Return the parameters of the open round; None if there are none yet."""
        with self._lock:
            return None if self._model.tensors is None else self._current()

    # Updates ----------------------------------------------------------------------------------------------------------

    def find(self, key: UpdateKey, session: str) -> GlobalParameters | Literal["unknown", "open"]:
        """Return the answer to an update, `open` while its round is, or `unknown` if its delta has to be sent.

        Raises:
            WorkerRefused: As `Rounds.find`, or nobody is left to end the round (OTHERS_ENDED). The delta stays in it.
        """
        with self._lock:
            outcome = self._rounds.find(key, session)
            if outcome is None:
                return "unknown"
            self._rounds.hear(key.worker, session, now=self._clock())
            if outcome.answer is not None:
                return self._answer(key, outcome.answer)
            if self._rounds.is_over:
                raise WorkerRefused(
                    RefusalKind.OTHERS_ENDED,
                    f"round {key.base_round}: the other workers have ended their training, and too few are left to end "
                    "it; start more workers, or set min_workers=1",
                )
            return "open"

    def submit(self, key: UpdateKey, session: str, file: IO[bytes]) -> Literal["accepted", "known"]:
        """Take in a delta that has arrived whole, and close the round if it was the last one.

        Args:
            key: Key of the update.
            session: Session of the worker's process.
            file: A file with the frame. It is closed here, at once or when the round closes.

        Raises:
            UsageError: The frame is broken.
            WorkerRefused: The update cannot count. After BAD_DELTA the round goes on without it.
        """
        try:
            with self._lock:
                known = self._rounds.find(key, session) is not None
            if known:
                file.close()
                return "known"
            findings = self._examined(key, file)
            with self._lock:
                is_refused = findings.refusal is not None
                kind = self._rounds.submit(
                    key, session, now=self._clock(), is_refused=is_refused, rows=findings.rows
                ).kind
                if kind == "accepted":
                    self._open_fragment = self._fragments.of(key)
                    self._facts.hear(key.worker, findings.figures)
                    staleness = self._rounds.round - key.base_round
                    self._findings[key.worker] = replace(findings, staleness=staleness)
                    if not is_refused:
                        self._deltas[key.worker] = file
                    self._close_complete()
        except BaseException:
            file.close()
            raise
        if is_refused or kind != "accepted":
            file.close()
        if findings.refusal is not None:
            raise findings.refusal
        return "accepted" if kind == "accepted" else "known"

    def status(self) -> dict[str, Any]:
        """Return the state of the rounds and of the workers, as values for JSON."""
        with self._lock:
            now, awaited = self._clock(), set(self._rounds.awaited)
            return {
                "round": self._rounds.round,
                "is_async": self._is_async,
                "workers": [
                    {
                        **self._facts.of_worker(worker),
                        "worker": worker,
                        "is_awaited": worker in awaited,
                        "silent_s": round(self._rounds.silence(worker, now=now), 3),
                    }
                    for worker in self._rounds.workers
                ],
                "parameters": sum(tensor.numel() for tensor in (self._model.tensors or {}).values()),
                "num_fragments": len(self._fragments),
                "last": self._facts.last(),
                **self._facts.traffic,
                "can_save": self._checkpointer.can_save,
                "saved_round": self._checkpointer.saved_round,
                "save_error": self._checkpointer.error,
            }

    @property
    def origin(self) -> dict[str, Any]:
        """Origin of the history, as values for JSON.

        The `id` is another one after each start. The `state` is the same if the server goes on with the same training.
        Its rounds count from `began_in`, which may be earlier than the last round that was seen.
        """
        return self._origin

    def history(self, first: int = 0) -> list[dict[str, Any]]:
        """Return the facts about the last rounds from a number on, as values for JSON. It waits for no round."""
        return self._facts.since(first)

    def count_traffic(self, worker: str, *, received: int = 0, sent: int = 0) -> None:
        """Add bytes of parameters that came from a worker, or went to it. It waits for no round."""
        self._facts.count_traffic(worker, received=received, sent=sent)

    def save(self) -> str | None:
        """Save the state now; return the path, or None without a folder to save in.

        Raises:
            CheckpointError: It could not be written.
        """
        with self._lock:
            return self._checkpointer.save()

    def close(self) -> None:
        """Discard the deltas of the open round, whose workers send them again to the next server."""
        with self._lock:
            for file in self._deltas.values():
                file.close()
            self._deltas.clear()

    # Internals, with the lock held ------------------------------------------------------------------------------------

    def _standing(self, worker: str) -> Standing:
        return Standing(
            round=self._rounds.round,
            is_awaited=worker in self._rounds.awaited,
            has_model=self._model.tensors is not None,
            is_async=self._is_async,
        )

    def _agree_on_fragments(self, worker: str, layout: Mapping[str, Shaped], num_fragments: int) -> None:
        if num_fragments > 1 and self._weighting != "equal":
            raise WorkerRefused(
                RefusalKind.BAD_DELTA,
                f"num_fragments={num_fragments} of worker {worker!r}: weighting={self._weighting!r} of the server "
                "needs whole models; set num_fragments=1, or weighting='equal'",
            )
        self._fragments.agree(worker, layout, num_fragments, is_alone=not self._rounds.workers)
        self._keep_answers()

    def _keep_answers(self) -> None:
        if isinstance(self._rounds, Rounds):
            self._rounds.keep_answers(len(self._fragments))

    def _current(self, *, is_counted: bool = True) -> GlobalParameters:
        assert self._model.tensors is not None
        return GlobalParameters(
            round=self._rounds.round,
            kind="parameters",
            tensors=dict(self._model.tensors),
            is_counted=is_counted,
            warning=self._checkpointer.error,
            deal=self._rounds.deal(self._rounds.round),
        )

    def _answer(self, key: UpdateKey, answer: UpdateAnswer) -> GlobalParameters:
        """Return the parameters after an update. A worker that comes late gets those of the open round.

        The fragment of one of the last N synchronous rounds has not changed since. So a worker that repeats its steps
        gets the same answer again.
        """
        if not answer.is_counted:  # its worker may be broken in all fragments
            return self._current(is_counted=False)
        assert self._model.tensors is not None
        rounds_since = self._rounds.round - answer.round
        answered = GlobalParameters(
            round=self._rounds.round if self._is_async else answer.round,
            kind="parameters",
            tensors=self._fragments.part_of(self._model.tensors, key),
            warning=self._checkpointer.error,
            deal=self._rounds.deal(answer.round),
        )
        if self._update is not None and rounds_since == 0 and answer.round == key.base_round + 1:
            return replace(answered, kind="update", tensors=self._update)
        if self._is_async or rounds_since < len(self._fragments):
            return answered
        return self._current()

    def _examined(self, key: UpdateKey, file: IO[bytes]) -> Findings:
        """Return the findings about a delta. Called without the lock: it reads it all. Raises as `examine`."""
        worker, tensors = key.worker, self._model.tensors
        if tensors is None:
            raise UsageError(f"worker={worker!r}: sent a delta, and there is no model yet; offer the parameters first")

        def check_norm(norm: float) -> None:
            with self._lock:
                self._fragments.guards[self._fragments.of(key)].check(worker, norm)

        expected = self._fragments.part_of(tensors, key)
        findings = examine(worker, mapped(file), expected=expected, weighting=self._weighting, check_norm=check_norm)
        if findings.refusal is not None:
            text = "round %d goes on without a delta: %s"
            _log.warning(text, self._rounds.round, findings.refusal.message)
        return findings

    def _close_complete(self) -> None:
        """Close the round if it is complete: mean, outer step, save. Then let everyone know."""
        if self._rounds.is_complete and self._model.tensors is not None:
            findings, files = self._findings, self._deltas
            self._findings, self._deltas, self._update = {}, {}, None
            self._fragments.guards[self._open_fragment].record(found.norm for _, found in sorted(findings.items()))
            closed = self._rounds.close()
            try:
                summary = self._stepped(closed, findings, files)
            finally:
                for file in files.values():
                    file.close()
            self._note(closed, findings, summary)
            self._model.remember_buffers(self._rounds.round)
            _log.info("round %d closed: %d deltas, %d refused", closed.round, len(closed.counted), len(closed.refused))
            self._checkpointer.round_opened()
        self._changed()

    def _stepped(
        self, closed: ClosedRound, findings: Mapping[str, Findings], files: Mapping[str, IO[bytes]]
    ) -> DeltaSummary | None:
        """Take the outer step with the deltas that count, and return figures about them; None without a delta."""
        if not files:
            return None
        means = DeltaMeans(
            {worker: mapped(file) for worker, file in files.items()},
            {worker: findings[worker].weight for worker in files},
            direction=self._direction(),
        )
        received_in = findings[closed.counted[0]].fragment_round if self._is_async else None
        self._update = self._model.step(
            means,
            buffer_round=closed.base_round if received_in is None else received_in,
            # Each of several workers moves the buffers by its share. Whole deltas of an old base could make a
            # variance < 0.
            buffer_share=1 / max(1, len(self._rounds.workers)) if self._is_async else 1.0,
            is_rounded=self._answers_updates,
        )
        return means.summary()

    def _direction(self) -> dict[str, torch.Tensor] | None:
        """Return what deltas are compared with; None: their mean.

        An asynchronous round has one delta, so there it is the momentum, the running mean of those before.
        """
        if not self._is_async:
            return None
        is_known = isinstance(self._model.outer, OuterSGD | DelayedNesterov)
        return self._model.outer.state_dict()["momenta"] if is_known else {}

    @property
    def _answers_updates(self) -> bool:
        """True if answers are updates. The fragments of an asynchronous worker may be relative to any round."""
        is_of_last_round = not self._is_async or len(self._fragments) == 1
        return is_of_last_round and bool(self._bits or self._is_bf16_down)

    def _note(self, closed: ClosedRound, findings: Mapping[str, Findings], summary: DeltaSummary | None) -> None:
        """Keep the facts about a closed round."""
        now, since = self._clock(), self._closed_at
        self._closed_at = now
        losses = {worker: found.figures.get("loss") for worker, found in sorted(findings.items())}
        cosines: Mapping[str, float | None] = {} if summary is None else summary.cosines
        self._facts.close(
            RoundFacts(
                round=closed.round,
                fragment=self._open_fragment,
                seconds=None if math.isnan(since) else now - since,
                loss=mean_loss(losses, {worker: findings[worker].weight for worker in closed.counted}),
                gradient_norm=None if summary is None else summary.norm,
                workers={
                    worker: WorkerRound(
                        loss=loss,
                        norm=findings[worker].norm if math.isfinite(findings[worker].norm) else None,
                        cosine=cosines.get(worker),
                        staleness=findings[worker].staleness,
                        is_counted=worker in closed.counted,
                    )
                    for worker, loss in losses.items()
                },
            )
        )

    def _changed(self) -> None:
        for changed in self._watchers:
            changed()
