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
import mmap
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from tempfile import TemporaryFile
from typing import IO, Any, Literal, NamedTuple

import torch

from ...errors import UsageError
from .algorithm import DelayedNesterov, OuterOptimizer, OuterSGD
from .async_rounds import AsyncRounds
from .compression import Compressed, compress_with_feedback, decoded
from .dealing import Deal
from .facts import RoundFacts, ServerFacts, WorkerRound, figures_in, mean_loss
from .frames import BUFFER_PREFIX, ArrayFrame, decode
from .guard import NormGuard, check_shapes, delta_norm
from .refusal import RefusalKind, WorkerRefused
from .rounds import ClosedRound, Rounds, UpdateAnswer, UpdateKey
from .saves import ServerSaves
from .schedule import local_steps, split_parameters
from .summary import CHUNK, DeltaSummary, summarize
from .tensors import FlatTensors, to_tensors

KEPT_BUFFERS = 64
"""Number of asynchronous rounds whose buffers are kept. An update with an older base leaves the buffers alone."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """Place of a worker in the rounds."""

    round: int
    """The open round."""
    is_awaited: bool
    """Whether the worker is a member of it, and has not submitted. Then it trains from the round's parameters."""
    has_model: bool
    """Whether there are global parameters. Without, the first worker offers its own."""
    keeps_delta: bool = False
    """Whether a delta for the base round that the worker named would count."""
    is_async: bool = False
    """Whether no worker waits for another. Then a worker's fragments take turns by the numbers of its updates."""
    local_steps: int | None = None
    """Advised inner steps of the worker's next rounds, if it has asked for advice (DyLU)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GlobalParameters:
    """Parameters from which a worker goes on."""

    round: int
    kind: Literal["parameters", "update"]
    """`parameters`: the values of the round. `update`: what to add to those of the round before, compressed."""
    tensors: Mapping[str, torch.Tensor | Compressed]
    """All tensors, or those of the fragment that the worker has sent."""
    is_counted: bool = True
    """Whether the worker's delta is in the mean."""
    warning: str = ""
    """Sentence for the worker's log."""
    deal: Deal | None = None
    """Rows of the round, by worker; None if they are not dealt."""


class _Examined(NamedTuple):
    """Findings about a delta."""

    refusal: WorkerRefused | None
    """Reason why it must not count."""
    norm: float
    rows: int
    """Rows that its worker reads in the round."""
    weight: int
    """Its weight in the mean."""
    figures: Mapping[str, Any]
    """Figures that its worker has sent with it."""
    staleness: int
    """Rounds that were closed while it was computed."""


class Shaped(NamedTuple):
    """Shape of a tensor that stays where it is."""

    shape: tuple[int, ...]


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
        self._rounds, self._tensors = rounds, None if tensors is None else dict(tensors)
        self._outer: OuterOptimizer = OuterSGD() if outer is None else outer
        self._is_bf16_down, self._saves, self._save_every, self._clock = is_bf16_down, saves, save_every, clock
        self._bits, self._weighting = bits, weighting
        self._residuals: dict[str, torch.Tensor] = {}
        """Rounding errors of the last updates, with `bits`."""
        self._fragments: tuple[tuple[str, ...], ...] = ()
        """Names in each fragment, as the workers have them; empty before the first one."""
        self._open_fragment = 0
        """Fragment of the open round, once it has a delta."""
        self._guards = [NormGuard()]
        """One for each fragment, because their norms differ."""
        self._buffer_rounds: dict[str, int] = {}
        """Round that each asynchronous delta's buffers are relative to."""
        self._deltas: dict[str, IO[bytes]] = {}
        self._findings: dict[str, _Examined] = {}
        """Findings about each delta of the open round, also about refused ones."""
        self._update: dict[str, torch.Tensor | Compressed] | None = None
        """Update that led to the open round."""
        self._watchers: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._buffers: dict[int, dict[str, torch.Tensor]] = {}
        """Buffers of the last rounds, which the deltas of asynchronous updates are relative to."""
        self._remember_buffers()
        self._facts, self._closed_at = ServerFacts(), math.nan
        self._saved_round: int | None = None
        self._save_error = ""
        if saves is not None:
            self._restore(saves)

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
    ) -> Standing:
        """Add a worker, or one that comes back; see `Rounds.join`.

        Args:
            worker: Its id.
            session: Session of its process.
            base_round: Round whose parameters it has.
            layout: Shapes of what it will send, in the order of the model.
            num_fragments: Number of its fragments. All workers that are present have the same ones.

        Raises:
            WorkerRefused: Another process has this id, or the worker has another model or other fragments.
        """
        with self._lock:
            if layout is not None:
                if self._tensors is not None:
                    check_shapes(worker, layout, self._tensors)
                self._agree_on_fragments(worker, layout, num_fragments)
            is_new = worker not in self._rounds.workers
            self._rounds.join(worker, session, now=self._clock(), base_round=base_round)
            if is_new:
                self._facts.keep(self._rounds.workers)
                _log.info("worker %s joined in round %d", worker, self._rounds.round)
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
            if self._tensors is None:
                self._tensors = {name: tensor.clone() for name, tensor in to_tensors(frame).items()}
                self._remember_buffers()
                self._try_to_save()
                self._changed()

    def shapes(self) -> dict[str, tuple[int, ...]] | None:
        """Return the shapes of the global parameters; None if there are none yet."""
        tensors = self._tensors
        return None if tensors is None else {name: tuple(tensor.shape) for name, tensor in tensors.items()}

    def parameters(self) -> GlobalParameters | None:
        """Return the parameters of the open round; None if there are none yet."""
        with self._lock:
            return None if self._tensors is None else self._current()

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
                    self._open_fragment = self._fragment_of(key)
                    self._facts.hear(key.worker, findings.figures)
                    self._findings[key.worker] = findings._replace(staleness=self._rounds.round - key.base_round)
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
                "is_async": isinstance(self._rounds, AsyncRounds),
                "workers": [
                    {
                        **self._facts.of_worker(worker),
                        "worker": worker,
                        "is_awaited": worker in awaited,
                        "silent_s": round(self._rounds.silence(worker, now=now), 3),
                    }
                    for worker in self._rounds.workers
                ],
                "parameters": sum(tensor.numel() for tensor in (self._tensors or {}).values()),
                "num_fragments": len(self._guards),
                "last": self._facts.last(),
                **self._facts.traffic,
                "can_save": self._saves is not None,
                "saved_round": self._saved_round,
                "save_error": self._save_error,
            }

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
            return None if self._saves is None or self._tensors is None else self._write(self._saves)

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
            has_model=self._tensors is not None,
            is_async=isinstance(self._rounds, AsyncRounds),
        )

    def _agree_on_fragments(self, worker: str, layout: Mapping[str, Shaped], num_fragments: int) -> None:
        """Take over the fragments of the first worker, and compare those of later ones."""
        if num_fragments > 1 and self._weighting != "equal":
            raise WorkerRefused(
                RefusalKind.BAD_DELTA,
                f"num_fragments={num_fragments} of worker {worker!r}: weighting={self._weighting!r} of the server "
                "needs whole models; set num_fragments=1, or weighting='equal'",
            )
        sizes = {name: math.prod(shaped.shape) for name, shaped in layout.items()}
        fragments = split_parameters(sizes, num_fragments)
        if list(map(set, fragments)) == list(map(set, self._fragments)):
            return
        if self._fragments and self._rounds.workers:
            raise WorkerRefused(
                RefusalKind.BAD_DELTA,
                f"num_fragments={num_fragments} of worker {worker!r}: the workers that are present have "
                f"{len(self._fragments)} fragments; set num_fragments={len(self._fragments)}",
            )
        if len(fragments) != len(self._guards):
            self._guards = [NormGuard() for _ in fragments]
        self._use_fragments(fragments)

    def _use_fragments(self, fragments: tuple[tuple[str, ...], ...]) -> None:
        self._fragments = fragments
        if isinstance(self._rounds, Rounds):
            self._rounds.keep_answers(max(1, len(fragments)))

    def _fragment_of(self, key: UpdateKey) -> int:
        turn = key.number if isinstance(self._rounds, AsyncRounds) else key.base_round
        return turn % len(self._guards)

    def _sent_by(self, key: UpdateKey) -> dict[str, torch.Tensor]:
        """Return the present values of the parameters that an update changes."""
        assert self._tensors is not None
        if len(self._fragments) <= 1:
            return self._tensors
        return {name: self._tensors[name] for name in self._fragments[self._fragment_of(key)]}

    def _current(self, *, is_counted: bool = True) -> GlobalParameters:
        assert self._tensors is not None
        return GlobalParameters(
            round=self._rounds.round,
            kind="parameters",
            tensors=self._tensors,
            is_counted=is_counted,
            warning=self._save_error,
            deal=self._rounds.deal(self._rounds.round),
        )

    def _answer(self, key: UpdateKey, answer: UpdateAnswer) -> GlobalParameters:
        """Return the parameters after an update. A worker that comes late gets those of the open round.

        The fragment of one of the last N synchronous rounds has not changed since. So a worker that repeats its steps
        gets the same answer again.
        """
        if not answer.is_counted:  # its worker may be broken in all fragments
            return self._current(is_counted=False)
        is_async = isinstance(self._rounds, AsyncRounds)
        rounds_since = self._rounds.round - answer.round
        answered = GlobalParameters(
            round=self._rounds.round if is_async else answer.round,
            kind="parameters",
            tensors=self._sent_by(key),
            warning=self._save_error,
            deal=self._rounds.deal(answer.round),
        )
        if self._update is not None and rounds_since == 0 and answer.round == key.base_round + 1:
            return replace(answered, kind="update", tensors=self._update)
        if is_async or rounds_since < len(self._guards):
            return answered
        return self._current()

    def _examined(self, key: UpdateKey, file: IO[bytes]) -> _Examined:
        """Return the findings about a delta. Called without the lock: it reads it all.

        Raises:
            UsageError: The frame is broken, so the worker sends it again.
        """
        worker = key.worker
        if self._tensors is None:
            raise UsageError(f"worker={worker!r}: sent a delta, and there is no model yet; offer the parameters first")
        frame, norm = _mapped(file), math.nan
        delta, rows = FlatTensors(frame), _count_in(frame, "rows", default=0)
        weight = {"samples": rows, "tokens": _count_in(frame, "tokens", default=0)}.get(self._weighting, 1)
        figures = figures_in(frame.metadata)
        if isinstance(self._rounds, AsyncRounds):
            self._buffer_rounds[worker] = _count_in(frame, "fragment_round", default=key.base_round)
        try:
            check_shapes(worker, {name: Shaped(shape) for name, shape in delta.shapes.items()}, self._sent_by(key))
            _check_weight(worker, self._weighting, weight)
            norm = delta_norm(_parts(delta, are_buffers=False))
            # Buffers are checked for finite values only: running variances grow with the data.
            is_finite = math.isfinite(delta_norm(_parts(delta, are_buffers=True)))
            with self._lock:
                self._guards[self._fragment_of(key)].check(worker, norm if is_finite else math.nan)
        except WorkerRefused as refusal:
            _log.warning("round %d goes on without a delta: %s", self._rounds.round, refusal.message)
            return _Examined(refusal, norm, rows, weight, figures, 0)
        return _Examined(None, norm, rows, weight, figures, 0)

    def _close_complete(self) -> None:
        """Close the round if it is complete: mean, outer step, save. Then let everyone know."""
        if self._rounds.is_complete and self._tensors is not None:
            summary, findings = self._summary(), self._findings
            self._guards[self._open_fragment].record(found.norm for _, found in sorted(findings.items()))
            self._findings = {}
            closed = self._rounds.close()
            self._update = None
            if summary is not None:
                self._step(summary.mean, closed)
            self._note(closed, findings, summary)
            del summary  # its mean is as large as the model
            self._remember_buffers()
            _log.info("round %d closed: %d deltas, %d refused", closed.round, len(closed.counted), len(closed.refused))
            if self._rounds.round % self._save_every == 0:
                self._try_to_save()
        self._changed()

    def _summary(self) -> DeltaSummary | None:
        """Return the mean of the deltas that count, and close their files; None without one."""
        files, self._deltas = self._deltas, {}
        try:
            if not files:
                return None
            return summarize(
                {worker: _mapped(file) for worker, file in files.items()},
                {worker: self._findings[worker].weight for worker in files},
                {worker: self._findings[worker].norm for worker in files},
                direction=self._direction(),
            )
        finally:
            for file in files.values():
                file.close()

    def _direction(self) -> dict[str, torch.Tensor] | None:
        """Return what deltas are compared with; None: their mean.

        An asynchronous round has one delta, so there it is the momentum, the running mean of those before.
        """
        if not isinstance(self._rounds, AsyncRounds):
            return None
        is_known = isinstance(self._outer, OuterSGD | DelayedNesterov)
        return self._outer.state_dict()["momenta"] if is_known else {}

    def _note(self, closed: ClosedRound, findings: Mapping[str, _Examined], summary: DeltaSummary | None) -> None:
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

    def _step(self, mean: Mapping[str, torch.Tensor], closed: ClosedRound) -> None:
        assert self._tensors is not None
        old = self._tensors
        new = {**old, **{name: old[name].clone() for name in mean}}
        self._outer.step(new, _part(mean, is_buffers=False))
        buffers = self._buffers.get(self._buffer_rounds.pop(closed.counted[0], closed.base_round), {})
        # Each of several workers moves the buffers by its share. Whole deltas of an old base could make a variance < 0.
        share = 1 / max(1, len(self._rounds.workers)) if isinstance(self._rounds, AsyncRounds) else 1.0
        for name, delta in _part(mean, is_buffers=True).items():
            if name in buffers:
                new[name].lerp_(buffers[name] - delta, share)
        if self._is_compressed:
            self._update = self._compressed({name: new[name] - old[name] for name in mean})
            for name, update in self._update.items():
                new[name] = old[name] + decoded(update)
        self._tensors = new

    @property
    def _is_compressed(self) -> bool:
        """True if answers are updates. The fragments of an asynchronous worker may be relative to any round."""
        is_of_last_round = isinstance(self._rounds, Rounds) or len(self._guards) == 1
        return is_of_last_round and bool(self._bits or self._is_bf16_down)

    def _compressed(self, update: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor | Compressed]:
        if not self._bits:
            return {name: tensor.bfloat16() for name, tensor in update.items()}
        wire, residuals = compress_with_feedback(update, self._residuals, self._bits)
        self._residuals |= residuals
        return {
            name: tensor.bfloat16() if isinstance(tensor, torch.Tensor) else tensor for name, tensor in wire.items()
        }

    def _remember_buffers(self) -> None:
        if self._tensors is not None:
            self._buffers[self._rounds.round] = _part(self._tensors, is_buffers=True)
            kept = KEPT_BUFFERS if isinstance(self._rounds, AsyncRounds) else 1
            self._buffers.pop(self._rounds.round - kept, None)

    def _changed(self) -> None:
        for changed in self._watchers:
            changed()

    # State ------------------------------------------------------------------------------------------------------------

    def _try_to_save(self) -> None:
        """Save before anyone gets an answer, so that a server that is killed goes on where its workers are.

        A failed save does not end the training of all: only a server that dies before the next save loses rounds.
        Everyone is told: the log, `status`, and each worker with its answer.
        """
        if self._saves is None:
            return
        try:
            self._write(self._saves)
        except Exception as error:
            last = "from its beginning" if self._saved_round is None else f"from round {self._saved_round}"
            self._save_error = (
                f"save_dir={self._saves.folder!r}: the server cannot save round {self._rounds.round}: "
                f"{error.__cause__ or error}; mend that, or if the server dies, training goes on {last}"
            )
            _log.error("%s", self._save_error)

    def _write(self, saves: ServerSaves) -> str:
        rounds = {
            "rounds": self._rounds.state_dict(),
            "fragments": [list(names) for names in self._fragments],
            "guards": [guard.state_dict() for guard in self._guards],
            "residuals": self._residuals if self._bits else {},
            "is_async": isinstance(self._rounds, AsyncRounds),
        }
        assert self._tensors is not None
        path = saves.save(self._rounds.round, self._tensors, self._outer.state_dict(), rounds)
        self._saved_round, self._save_error = self._rounds.round, ""
        return path

    def _restore(self, saves: ServerSaves) -> None:
        state = saves.load()
        if state is None:
            if self._tensors is not None:
                self._write(saves)  # an error ends the start, and not a training
            return
        if self._tensors is not None:
            check_same_model(self._tensors, state.tensors)
        is_async = bool(state.rounds.get("is_async", False))
        if is_async != isinstance(self._rounds, AsyncRounds):
            raise UsageError(f"async_mode={not is_async}: the save is of the other mode; set async_mode={is_async}")
        self._tensors = dict(state.tensors)
        self._outer.load_state_dict(state.outer)
        self._rounds.load_state_dict(state.rounds["rounds"], now=self._clock())
        self._guards = [NormGuard() for _ in state.rounds["guards"]]
        for guard, norms in zip(self._guards, state.rounds["guards"], strict=True):
            guard.load_state_dict(norms)
        self._use_fragments(tuple(map(tuple, state.rounds["fragments"])))
        self._residuals = dict(state.rounds["residuals"]) if self._bits else {}
        self._saved_round = self._rounds.round
        self._remember_buffers()
        _log.info("goes on in round %d, from %s", self._rounds.round, state.path)


def spool(folder: str | None = None) -> IO[bytes]:
    """Return an unnamed file for a delta that arrives. It is gone when it is closed."""
    return TemporaryFile(prefix="skyward-diloco-", dir=folder)


def check_same_model(given: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]) -> None:
    """Raise UsageError if a model differs from a saved one in names or shapes."""
    try:
        check_shapes("server", given, saved)
    except WorkerRefused as refusal:
        raise UsageError(f"model: the save is of another one ({refusal.message}); use another save_dir") from None


def _part(tensors: Mapping[str, torch.Tensor], *, is_buffers: bool) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name.startswith(BUFFER_PREFIX) == is_buffers}


def _parts(delta: FlatTensors, *, are_buffers: bool) -> Iterator[torch.Tensor]:
    """Return all values, a chunk after another: of deltas that arrive at once, none is copied as a whole."""
    for name, shape in delta.shapes.items():
        if name.startswith(BUFFER_PREFIX) == are_buffers:
            for begin in range(0, math.prod(shape), CHUNK):
                yield delta.part(name, slice(begin, begin + CHUNK))


def _check_weight(worker: str, weighting: str, weight: int) -> None:
    """Raise WorkerRefused if a delta has no weight."""
    if weight == 0:
        how = "use a DiLoCoSampler" if weighting == "samples" else "call count_tokens() in each step"
        raise WorkerRefused(
            RefusalKind.BAD_DELTA,
            f"weighting={weighting!r}: worker {worker!r} has counted no {weighting} since its base round; {how}, or "
            "set weighting='equal' on the server",
        )


def _count_in(frame: ArrayFrame, name: str, *, default: int) -> int:
    """Return a number that a worker sends with its delta."""
    text = frame.metadata.get(name, "")
    return int(text) if text.isdecimal() else default


def _mapped(file: IO[bytes]) -> ArrayFrame:
    """Return the frame in a file. Its pages are read as they are needed, and live as long as an array."""
    file.flush()
    try:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except ValueError:
        raise UsageError("frame: is empty; send it again, whole") from None
    return decode(memoryview(memory))
