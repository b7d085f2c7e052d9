"""`HubLogger`: a callback of `skyward.training` that records a training as a run of the hub."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from typing import Any

from ...errors import CheckpointError, UsageError
from ...training.agree import Alone, Ranks
from ...training.callbacks.evaluations import ReportedOnce
from ...training.callbacks.info import arguments_of, facts_of_run, versions_of
from ...training.control.requests import request
from ...training.events import TrainerCallback
from ..model.product import PREFIX
from .active import ActiveRun, RunSpec
from .fluent import active_run, current_address, current_spool, start_run
from .names import check_key
from .orders import RunOrders
from .system import SystemSampler
from .trial import current_trial

_log = logging.getLogger(__name__)

_PARAM_LIMIT = 6000
"""Longest text of a parameter. Source: MLflow's limit, which the hub keeps."""


class HubLogger(TrainerCallback):
    """Record a training as a run: parameters, logs, evaluations, checkpoints, the best model, system metrics, the end.

    It works in our trainers, and in those of Hugging Face, Lightning and Keras by their adapters. If a run of
    `hub.start_run` is open, it logs there and leaves it open. A training that resumes from a checkpoint goes on with
    the run of that checkpoint, and points behind the checkpoint's step are replaced. `save`, `stop` and `abort` on the
    run's page act at the end of a step. In a trial of `hub.sweep`, it reports the sweep's metric, and ends a training
    that the sweep stops.

    Args:
        run_name: name of the run; None: a random one.
        experiment: name of its experiment; None: that of `hub.set_experiment`, or of the environment.
        tags: first tags.
        system_metrics_every_s: seconds between samples of each rank's CPU, memory and GPU. None: no samples.
        takes_commands: whether the hub may save, stop and abort the training.

    Raises:
        UsageError: `system_metrics_every_s` is not above 0.

    Example:
        >>> from skyward.hub import HubLogger
        >>> HubLogger(run_name="tiny", experiment="digits").run_name
        'tiny'
    """

    on_error = "disable"
    collective_events = frozenset({"on_train_begin"})

    def __init__(
        self,
        run_name: str | None = None,
        experiment: str | None = None,
        *,
        tags: Mapping[str, object] | None = None,
        system_metrics_every_s: float | None = 10.0,
        takes_commands: bool = True,
    ) -> None:
        if system_metrics_every_s is not None and not system_metrics_every_s > 0:
            raise UsageError(
                f"system_metrics_every_s={system_metrics_every_s!r}: must be above 0; set seconds, or None",
                field="system_metrics_every_s",
                value=system_metrics_every_s,
            )
        self.run_name, self.experiment, self.tags = run_name, experiment, dict(tags or {})
        self.system_metrics_every_s, self.takes_commands = system_metrics_every_s, takes_commands
        self._run: ActiveRun | None = None
        self._is_owner = self._is_logging = False
        self._loaded: str | None = None
        self._run_id: str | None = None
        self._orders: RunOrders | None = None
        self._sampler: SystemSampler | None = None
        self._reported = ReportedOnce()
        self._best: tuple[Any, Any, Any] | None = None
        self._step = 0
        self._is_trial_over = False
        self._skipped: set[str] = set()

    @property
    def run_id(self) -> str | None:
        """Id of the run on every rank, once training has begun."""
        return self._run_id

    # Life -------------------------------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, ranks: Ranks | None = None, **context: Any) -> None:
        ranks = ranks or Alone(rank=0 if state.is_world_process_zero else 1)
        self._end(None)
        self._reported, self._best, self._step = ReportedOnce(), None, int(state.global_step)
        self._is_trial_over = False
        self._is_logging = ranks.rank == 0
        if self._is_logging:
            self._begin(args, state, ranks, context)
        run = self._run
        run_id, address = ranks.share(("", None) if run is None else (run.id, run.address))
        self._run_id = run_id
        if self.system_metrics_every_s is None:
            return
        if run is None:
            spec, address = RunSpec(id=run_id), current_address() or address
            self._run = run = ActiveRun(spec, spool=current_spool(), address=address, writes_start=False)
            self._is_owner = True
        self._sampler = SystemSampler(ranks.rank, self.system_metrics_every_s, self._sampled)
        if self._is_logging and self._sampler.gpu is not None:
            run.set_tags({f"{PREFIX}.gpu": self._sampler.gpu.name})

    def _begin(self, args: Any, state: Any, ranks: Ranks, context: dict[str, Any]) -> None:
        current = active_run()
        self._is_owner = current is None
        resumed, self._loaded = self._loaded, None
        is_resumed = resumed is not None and (current is None or current.id == resumed)
        run = current or start_run(self.run_name, self.experiment, resumed, tags=self.tags)
        self._run = run
        if is_resumed:
            run.cut(int(state.global_step))
            run.set_tags({f"{PREFIX}.resumed_at_step": int(state.global_step)})
        else:
            facts = facts_of_run(args, state, ranks, **context)
            params = {**arguments_of(args), **{key.replace(" ", "_"): fact for key, fact in facts.items()}}
            self._log_params(run, params)
        run.set_tags(
            {f"{PREFIX}.version.{name}": version for name, version in versions_of().items() if _is_legal(name)}
        )
        if self.takes_commands:
            self._orders = RunOrders(run.id, run.acknowledge)
            run.take_commands(self._orders.take)

    def on_train_end(self, state: Any, **kwargs: Any) -> None:
        if self._is_logging and self._run is not None:
            self._note_best(state)
        was_aborted = self._orders is not None and self._orders.is_aborting
        self._end("cancelled" if was_aborted else "completed")

    def close(self) -> None:
        """End the run, also if the training raised; called by the producer at its end."""
        error = sys.exception()
        if error is None:
            self._end("completed")
        elif isinstance(error, KeyboardInterrupt):
            self._end("cancelled", "KeyboardInterrupt")
        else:
            self._end("failed", f"{type(error).__name__}: {error}")

    def _end(self, state: str | None, error: str | None = None) -> None:
        """Stop logging; the run itself ends where this callback began it. A state of None leaves it open."""
        sampler, self._sampler = self._sampler, None
        orders, self._orders = self._orders, None
        run, self._run = self._run, None
        if sampler is not None and run is not None and run.state == "running":
            sampler.log_last(run.log_metrics, self._step, is_summary=self._is_logging)
        if orders is not None:
            orders.ended()
        if run is None or not self._is_owner:
            return
        if state is None or not self._is_logging:
            run.close()
        else:
            run.end(state, error)

    # Events -----------------------------------------------------------------------------------------------------------

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._step = state.global_step
        self._end_trial(args, control)
        if self._orders is not None:
            self._orders.apply(self._step, args, control)
            self._orders.keep_aborting(control)

    def on_step_begin(self, control: Any, **kwargs: Any) -> None:
        if self._orders is not None:
            self._orders.keep_aborting(control)

    on_epoch_begin = on_epoch_end = on_step_begin

    def on_log(self, state: Any, control: Any, logs: Mapping[str, Any], **kwargs: Any) -> None:
        self._log_numbers(state, self._reported.logged(state.global_step, logs))
        self.on_step_begin(control)

    def on_evaluate(
        self, state: Any, control: Any, metrics: Mapping[str, Any] | None = None, args: Any = None, **kwargs: Any
    ) -> None:
        # The state is that of the step that was scored, which may be older than training's.
        self._log_numbers(state, self._reported.evaluated(state.global_step, metrics or {}))
        self._note_best(state)
        self._end_trial(args, control)
        self.on_step_begin(control)

    def on_save(
        self, state: Any, control: Any, checkpoint: Any = None, saved_step: int | None = None, **kwargs: Any
    ) -> None:
        step = state.global_step if saved_step is None else saved_step
        if self._is_logging and self._run is not None and checkpoint is not None:
            facts = {"path": str(checkpoint), "step": step, **_facts_of_checkpoint(checkpoint)}
            self._run.log_text(f"checkpoints/checkpoint-{step}.json", json.dumps(facts, indent=1))
            self._run.set_tags({f"{PREFIX}.checkpoint": json.dumps(facts)})
            self._note_best(state)
        if self._orders is not None:
            self._orders.saved(step)
        self.on_step_begin(control)

    # State ------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"run_id": self._run_id or ""}

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        self._loaded = state_dict.get("run_id") or None

    # Within -----------------------------------------------------------------------------------------------------------

    def _log_numbers(self, state: Any, values: Mapping[str, Any]) -> None:
        if not self._is_logging or self._run is None:
            return
        numbers: dict[str, float] = {}
        for key, value in values.items():
            if not _is_legal(key):
                self._skip(key)
            elif isinstance(value, list | tuple):  # one number for each rank
                numbers |= {
                    f"{key}{at}": number for at, item in enumerate(value) if (number := _number(item)) is not None
                }
            elif (number := _number(value)) is not None:
                numbers[key] = number
        if numbers:
            self._run.log_metrics(numbers, step=state.global_step)
        trial = current_trial()
        if trial is not None and trial.metric in numbers:
            trial.tell(numbers[trial.metric], int(state.global_step))

    def _end_trial(self, args: Any, control: Any) -> None:
        """Stop the training of a trial that its sweep has given up, once."""
        trial = current_trial()
        if trial is not None and trial.take_save():
            request("save_checkpoint", args, control)
        if trial is not None and trial.should_stop and not self._is_trial_over:
            self._is_trial_over = True
            if trial.saves_when_stopped:
                request("save_and_stop", args, control)
            else:
                control.should_training_stop = True

    def _log_params(self, run: ActiveRun, params: Mapping[str, str]) -> None:
        legal = {key: text[:_PARAM_LIMIT] for key, text in params.items() if _is_legal(key)}
        # The user's own value of a parameter counts.
        run.log_params({key: text for key, text in legal.items() if key not in run.params})

    def _note_best(self, state: Any) -> None:
        best = (
            getattr(state, "best_metric", None),
            getattr(state, "best_global_step", None),
            getattr(state, "best_model_checkpoint", None),
        )
        if self._is_logging and self._run is not None and best[0] is not None and best != self._best:
            self._best = best
            names = ("best.metric", "best.step", "best.checkpoint")
            self._run.set_tags(
                {f"{PREFIX}.{name}": value for name, value in zip(names, best, strict=True) if value is not None}
            )

    def _sampled(self, values: dict[str, float]) -> None:
        run = self._run
        if run is not None and run.state == "running":
            run.log_metrics(values, step=self._step)

    def _skip(self, key: object) -> None:
        name = repr(key)
        if name not in self._skipped:
            self._skipped.add(name)
            _log.warning("HubLogger: metric %s is not logged, because its name is not legal", name)


def _number(value: Any) -> float | None:
    if isinstance(value, str) or value is None:
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # an array, a dict
        return None


def _is_legal(key: object) -> bool:
    try:
        check_key(key)
    except UsageError:
        return False
    return True


def _facts_of_checkpoint(path: Any) -> dict[str, Any]:
    """Return digest, size and ranks from a checkpoint's manifest; empty for a framework's own checkpoint."""
    from ...stores.folders import folder_at
    from ...training.checkpoint.manifest import MANIFEST

    try:
        text = folder_at(path).read([MANIFEST]).get(MANIFEST, b"")
        manifest = json.loads(text) if text else {}
    except (OSError, ValueError, CheckpointError, UsageError) as error:
        _log.debug("%s: no manifest: %s", path, error)
        return {}
    known = ("digest", "commit_id", "commit_number", "world_size", "is_finite")
    facts = {name: manifest[name] for name in known if name in manifest}
    sizes = [file.get("bytes") or 0 for file in manifest.get("files") or ()]
    return {**facts, "bytes": sum(sizes)} if sizes else facts
