"""A trial of a sweep on its node: its parameters, its reports, its run, and whether it should stop."""

from __future__ import annotations

import json
import logging
import math
import os
import queue
import re
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ...calls.pending import ComputeFunction
from ...errors import HubError, SkywardError, UsageError
from ...node.slot.runtime import current_call, current_rank
from ..model.product import PREFIX
from .active import ActiveRun, RunSpec, error_text, user_name
from .connection import path_of
from .fluent import current_address, current_spool, open_run

if TYPE_CHECKING:
    from ...stores.folders import Folder
    from ...wire.task_channel import TaskChannel

_log = logging.getLogger(__name__)

STOP_ATTRIBUTE = "skyward:stop"
"""Attribute of a trial that runs in a job of its own: the reason to stop it, as JSON."""
CHANNEL = "skyward.sweep"
"""Name of the channel of a trial, behind whose slash its token stands."""
PREEMPTED = "preempted"
"""Reason to stop a trial whose machines are needed: it goes on later, and its sweep has learned nothing yet."""
SAVE = "save"
"""Order of a driver to save and to go on."""
_JOB = re.compile(r"[0-9a-f]{32}")
_UNSENT = 1000
"""Most reports that wait for a hub that is away."""
_TRAINING_S = 0.2
"""Seconds after which a training is asked for again that has not begun yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialTask:
    """Order to run a trial, from the driver of its sweep.

    Attributes:
        token: Name of the trial's channel to the driver; empty without one.
        sweep: Name of the sweep.
        trial: Number of the trial in the hub.
        number: Number of the trial.
        attempt: From 1. A trial whose node or driver was lost begins once more.
        params: Parameters, with those that all trials share.
        metrics: Name of each objective.
        run: Id of its run.
        parent_run: Id of the sweep's run.
        experiment: Experiment of the runs.
        folder: Its folder for checkpoints; None without one.
        load_from: Folder to load from; None to start fresh.
        steps: First step of this call and the one behind the last; None: the objective decides.
        obsolete: Folders of other trials that are to be removed.
        save_stopped: Whether a training that is stopped saves a checkpoint.
        reports_to_hub: Whether its driver is not the program of its pool, and reads the reports in the hub.
    """

    token: str = ""
    sweep: str
    trial: int = 0
    number: int
    attempt: int = 1
    params: Mapping[str, Any]
    metrics: Sequence[str] = ("objective",)
    run: str | None = None
    parent_run: str | None = None
    experiment: str | None = None
    folder: str | None = None
    load_from: str | None = None
    steps: tuple[int, int] | None = None
    obsolete: Sequence[str] = ()
    save_stopped: bool = False
    reports_to_hub: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialReturn:
    """End of a trial's call.

    Attributes:
        values: Value of each objective; None if the objective returned none.
        reports: Values that it reported, by step.
        stopped_by: Reason for which it was told to stop; empty if it was not.
    """

    values: Sequence[float] | None
    reports: Mapping[int, float] = field(default_factory=dict)
    stopped_by: str = ""


class TrialReporter(Protocol):
    """Way of a report to the driver. Its answer is the reason to stop, or empty."""

    def __call__(self, step: int, value: float, /) -> str: ...


class Trial:
    """A trial of a sweep, as its objective sees it. `hub.sweep` makes it.

    Attributes:
        number: Number of the trial in its sweep, from 0.
        params: Parameters: those that are searched, and those of `base_config`. `trial["lr"]` is one of them.
        attempt: From 1; above, if an earlier attempt was lost. Its folder is the same.
        metric: Name of the objective.
        load_from: Folder of a checkpoint to load from, for population based training; None to start fresh.
        steps: First step and the one behind the last of this call, for population based training.

    Example:
        def objective(trial: hub.Trial) -> float:
            loss = 1.0
            for epoch in range(10):
                loss *= 1 - trial["lr"]
                trial.report(loss, epoch)
                if trial.should_stop:
                    break
            return loss
    """

    def __init__(self, task: TrialTask, reporter: TrialReporter | None, run: ActiveRun | None) -> None:
        self.number, self.attempt = task.number, task.attempt
        self.params: Mapping[str, Any] = dict(task.params)
        self.metric = task.metrics[0]
        self.load_from, self.steps = task.load_from, task.steps
        self.reports: dict[int, float] = {}
        self._task, self._reporter, self._run = task, reporter, run
        self._stopped_by = ""
        self._must_save = self._gives_way = False
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<Trial {self.number} of {self._task.sweep!r} {dict(self.params)}>"

    def __getitem__(self, name: str) -> Any:
        try:
            return self.params[name]
        except KeyError:
            raise UsageError(
                f"trial[{name!r}]: is no parameter; use one of {', '.join(self.params)}", field=name
            ) from None

    @property
    def folder(self) -> str:
        """Folder of the trial for checkpoints, the same for each of its attempts. A local one is made.

        Raises:
            UsageError: The sweep has no folder for checkpoints.
        """
        folder = self._task.folder
        if folder is None and self._task.reports_to_hub:
            folder = os.environ.get("SKYWARD_CHECKPOINT_DIR")  # that of its own job
        if folder is None:
            raise UsageError("checkpoint_dir=None: the sweep has none; pass checkpoint_dir= to hub.sweep")
        if "://" not in folder:
            os.makedirs(folder, exist_ok=True)
        return folder

    @property
    def checkpoint(self) -> str | None:
        """Newest checkpoint to go on from: of an earlier attempt, otherwise of `load_from`. None to start fresh.

        It finds checkpoints of `skyward.training`.
        """
        from ...training.checkpoint import latest_checkpoint

        own = latest_checkpoint(self.folder)
        return own if own is not None or self.load_from is None else latest_checkpoint(self.load_from)

    @property
    def should_stop(self) -> bool:
        """Return whether the trial should end: it was pruned, no longer improves, or the sweep was stopped.

        Also if its machines are needed. It then should save to its folder, and begins again later with its parameters.
        """
        self._gives_way = self._gives_way or self._stopped_by == PREEMPTED
        return bool(self._stopped_by)

    @property
    def stopped_by(self) -> str:
        """Reason to stop: "pruned", "patience", "stopped", "preempted" or "lost"; empty if it should go on."""
        return self._stopped_by if self.should_stop else ""

    @property
    def end(self) -> str:
        """Reason by which it ended. One that never looked whether it should make way has ended by itself."""
        return "" if self._stopped_by == PREEMPTED and not self._gives_way else self._stopped_by

    def report(self, value: float, step: int) -> None:
        """Report a value of the objective, and learn whether to go on: look at `should_stop` afterwards.

        It waits for the driver of the sweep, so the same seed gives the same trials. `HubLogger` reports by itself.

        Args:
            value: Value of the objective.
            step: Number of the report, such as the epoch; from 0.

        Raises:
            UsageError: The step or the value is no number.
        """
        number = _number(value)
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise UsageError(f"step={step!r}: is no whole number from 0; pass such as the epoch", field="step")
        if self._run is not None and self._run.state == "running":
            self._run.log_metrics({self.metric: number}, step)
        self.tell(number, step)

    def tell(self, value: float, step: int) -> None:
        """Tell the driver a value that is logged already."""
        with self._lock:
            self.reports[step] = value
            if self._reporter is None or len(self._task.metrics) != 1:
                return
            if self._stopped_by in ("", PREEMPTED):  # the latter counts only if it stops
                self._stopped_by = self._reporter(step, value) or self._stopped_by

    @property
    def saves_when_stopped(self) -> bool:
        """Return whether a training that is stopped shall save a checkpoint."""
        return self._task.save_stopped or self._stopped_by == PREEMPTED

    def obey(self, order: str) -> bool:
        """Take an order of the driver, which may come at any time. Return whether a training has taken it."""
        if order == SAVE:
            self._must_save = True
            return _command_training("save_checkpoint")
        self._stopped_by = self._stopped_by or order
        if order != PREEMPTED or not _command_training("save_and_stop"):
            return False
        self._gives_way = True
        return True

    def take_save(self) -> bool:
        """Return whether the training shall save, once for each order."""
        must_save, self._must_save = self._must_save, False
        return must_save


def _command_training(command: str) -> bool:
    """Send a command to the training of this process. Return False if there is none with `TrainerControlCallback`."""
    control = sys.modules.get("skyward.training.control.channel")
    return control is not None and bool(control.command_here(command))


_current: Trial | None = None


def current_trial() -> Trial | None:
    """Return the trial that this process runs; None outside a sweep."""
    return _current


def run_trial(function: Callable[[Trial], Any], task: TrialTask) -> TrialReturn | None:
    """Run a trial in this process. Of a gang, rank 0 reports, and the others return None."""
    function = function.fn if isinstance(function, ComputeFunction) else function
    rank = current_rank()
    if rank is not None and rank.rank != 0:
        with _as_current(Trial(task, None, None)) as trial:
            function(trial)
        return None
    _remove(task.obsolete)
    with _run_of(task) as run, _reporter_of(task) as (reporter, obey), _as_current(Trial(task, reporter, run)) as trial:
        obey(trial)
        value = function(trial)
        if trial.end == PREEMPTED:
            if run is not None:
                run.end("cancelled", "its machines are needed; it goes on later")
            return TrialReturn(values=None, stopped_by=PREEMPTED)
        values = _values(value, task, trial.reports)
        if run is not None:
            if values is not None:
                run.set_tags(
                    {f"{PREFIX}.trial.{name}": value for name, value in zip(task.metrics, values, strict=True)}
                )
            if trial.end:
                run.set_tags({f"{PREFIX}.trial.stopped_by": trial.end})
        return TrialReturn(values=values, reports=dict(trial.reports), stopped_by=trial.end)


@contextmanager
def _as_current(trial: Trial) -> Iterator[Trial]:
    global _current
    before, _current = _current, trial
    try:
        yield trial
    finally:
        _current = before


@contextmanager
def _run_of(task: TrialTask) -> Iterator[ActiveRun | None]:
    """Open the run of a trial as the current one, and end it as the trial ends."""
    address = current_address()
    if task.run is None or address is None:
        yield None
        return
    is_resumed = task.attempt > 1 or task.reports_to_hub  # its job may have made way
    spec = RunSpec(
        id=task.run,
        experiment=task.experiment,
        name=f"{task.sweep}-{task.number}",
        user=user_name(),
        tags={f"{PREFIX}.sweep": task.sweep, f"{PREFIX}.trial": str(task.number)},
        parent=task.parent_run,
        is_resumed=is_resumed,
        begins_again=is_resumed,
    )
    run = open_run(spec, spool=current_spool(), address=address)
    try:
        run.log_params(task.params)
        yield run
    except BaseException as error:
        run.end("cancelled" if isinstance(error, KeyboardInterrupt) else "failed", error_text(error))
        raise
    run.end()


@contextmanager
def _reporter_of(task: TrialTask) -> Iterator[tuple[TrialReporter | None, Callable[[Trial], None]]]:
    """Open the channel to the driver of the sweep. The second item makes a trial obey the driver's orders."""
    call = current_call()
    if call is None or not task.token:
        yield None, _without_orders
        return
    if task.reports_to_hub:
        yield hub_reporter(task), _without_orders
        return
    from ...node.slot.channels import channel_of

    link = _DriverLink(channel_of(call, f"{CHANNEL}/{task.token}"))
    try:
        yield link.report, link.obey
    finally:
        link.close()


def _without_orders(trial: Trial) -> None:
    """Leave a trial alone: no driver reaches it."""


class _DriverLink:
    """Channel to the driver of a sweep. A thread reads it: orders come at any time, and answers after reports."""

    def __init__(self, channel: TaskChannel) -> None:
        self._channel = channel
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader: threading.Thread | None = None

    def obey(self, trial: Trial) -> None:
        self._reader = threading.Thread(target=self._read, args=(trial,), name="skyward-trial-orders", daemon=True)
        self._reader.start()

    def report(self, step: int, value: float) -> str:
        try:
            self._channel.send(json.dumps({"step": step, "value": value}).encode())
        except BrokenPipeError:  # the driver is gone, and another one will run this trial again
            return "lost"
        answer = self._answers.get()
        if answer == "lost":
            self._answers.put(answer)
        return answer

    def close(self) -> None:
        self._channel.close()
        if self._reader is not None:
            self._reader.join()

    def _read(self, trial: Trial) -> None:
        try:
            self._obey_all(trial)
        finally:
            self._answers.put("lost")  # no report waits for an answer that nobody reads

    def _obey_all(self, trial: Trial) -> None:
        """Take orders and answers until the driver is gone."""
        waiting = ""
        while True:
            try:
                told = json.loads(self._channel.receive(_TRAINING_S if waiting else None))
            except EOFError:
                return
            except TimeoutError:
                told = {"order": waiting}  # the training may have begun meanwhile
            if "stop" in told:
                self._answers.put(str(told["stop"]))
            elif trial.obey(str(told["order"])):
                waiting = ""
            elif told["order"] == PREEMPTED:
                waiting = PREEMPTED


def _remove(folders: Sequence[str]) -> None:
    """Remove folders of checkpoints. One that cannot be removed costs disk, and no trial."""
    if not folders:
        return
    from ...stores.folders import folder_at

    for path in folders:
        try:
            if not _is_needed(folder_at(path)):
                folder_at(path).remove()
        except (OSError, SkywardError) as error:
            _log.warning("folder %s of an old trial is not removed: %s", path, error)


def _is_needed(folder: Folder) -> bool:
    """Return whether a model, or a user, marked a checkpoint of a trial. Marks of jobs are those of other trials."""
    from ...training.checkpoint.retention import keepers_of

    checkpoints = [folder.child(name) for name in folder.names() if name.startswith("checkpoint-")]
    return any(not _JOB.fullmatch(keeper) for checkpoint in checkpoints for keeper in keepers_of(checkpoint))


def hub_reporter(task: TrialTask) -> TrialReporter:
    """Return a reporter that writes to the hub, and reads there the answer to earlier reports.

    A hub that is away does not end the trial: its reports wait for the next one, and the first of them for a minute.
    """
    from .reading import needed_address
    from .repeated import RETRY_S, RepeatedRequests

    requests = RepeatedRequests(needed_address("sweeps"))
    path = path_of("v1", "trials", str(task.trial))
    unsent: list[list[Any]] = []

    def report(step: int, value: float) -> str:
        number = value if math.isfinite(value) else str(value).replace("inf", "Infinity").replace("nan", "NaN")
        retry_s = 0.0 if unsent else RETRY_S
        unsent.append([step, number])
        del unsent[:-_UNSENT]
        try:
            requests.send("PATCH", path, {"key": uuid.uuid4().hex, "steps": unsent}, retry_s=retry_s)
            row = requests.send("GET", path, retry_s=retry_s)["trial"]
        except HubError as error:
            if not error.retryable:
                raise
            _log.warning("trial %d: its report waits for the hub: %s", task.number, error)
            return ""
        unsent.clear()
        return str(json.loads(row["system_attrs"].get(STOP_ATTRIBUTE, '""')))

    return report


def _values(value: Any, task: TrialTask, reports: Mapping[int, float]) -> Sequence[float] | None:
    """Return the values of the objectives: those that the objective returned, or its last report."""
    if value is None:
        return [reports[max(reports)]] if reports and len(task.metrics) == 1 else None
    if isinstance(value, Mapping):
        missing = [name for name in task.metrics if name not in value]
        if missing:
            raise UsageError(f"objective: returned no {missing[0]!r}; return each of {', '.join(task.metrics)}")
        value = [value[name] for name in task.metrics]
    items = list(value) if isinstance(value, list | tuple) else [value]
    if len(items) != len(task.metrics):
        raise UsageError(
            f"objective: returned {len(items)} values for {len(task.metrics)} objectives; return one for each"
        )
    return [_number(item) for item in items]


def _number(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise UsageError(f"value={value!r:.80}: is no number ({error}); return or report numbers") from None
    return math.nan if math.isnan(number) else number
