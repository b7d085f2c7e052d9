"""Storage for Optuna that keeps studies in a hub: `optuna.create_study(storage=hub.optuna_storage())`.

A study is a sweep of the hub. Each process keeps the trials that it has seen, and asks for those that changed since. So
a worker reads each finished trial once, however many trials a study has.
"""

from __future__ import annotations

import copy
import json
import math
import threading
import time
import uuid
from collections.abc import Callable, Container, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

from optuna.distributions import (
    BaseDistribution,
    check_distribution_compatibility,
    distribution_to_json,
    json_to_distribution,
)
from optuna.exceptions import DuplicatedStudyError, UpdateFinishedTrialError
from optuna.storages import BaseStorage
from optuna.storages._base import DEFAULT_STUDY_NAME_PREFIX
from optuna.storages._heartbeat import BaseHeartbeat  # the documented way to support heartbeats has no public name
from optuna.study import Study, StudyDirection
from optuna.study._frozen import FrozenStudy
from optuna.trial import FrozenTrial, TrialState

from ...errors import HubError, UsageError
from .connection import path_of
from .fluent import current_address
from .repeated import RepeatedRequests
from .settings import URL, Address, address_of

T = TypeVar("T")
StaleCallback = Callable[[Study, FrozenTrial], None]

_PAGE = 1000
_CONFLICT, _MISSING, _EXISTS = "conflict", "missing", "exists"
_STATES = {
    TrialState.WAITING: "waiting",
    TrialState.RUNNING: "running",
    TrialState.COMPLETE: "completed",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}
_STATE_OF = {name: state for state, name in _STATES.items()}


def optuna_storage(
    url: str | None = None,
    token: str | None = None,
    project: str | None = None,
    *,
    heartbeat_interval_s: int | None = None,
    grace_period_s: int | None = None,
    on_stale_trial: StaleCallback | None = None,
) -> OptunaStorage:
    """Make a storage for Optuna that keeps its studies in a hub.

    Any number of processes on any machines may work on one study. The samplers and pruners are Optuna's. Needs the
    extra `hpo`.

    Args:
        url: Address of the hub; None: that of `connect`, or of the environment.
        token: Token; None: `SKYWARD_HUB_TOKEN`.
        project: Project; None: `SKYWARD_HUB_PROJECT`, or the token's.
        heartbeat_interval_s: Seconds between two heartbeats of a trial that `study.optimize` runs, from 1. None: no
            heartbeats, and a trial whose worker was killed stays running. With them, Optuna warns at `study.ask`.
        grace_period_s: Seconds of silence after which a trial has failed. None: three intervals.
        on_stale_trial: Called with the study and such a trial, such as Optuna's `RetryHeartbeatStaleTrialCallback`.

    Raises:
        UsageError: No hub is named, or a number is out of its range.

    Example:
        import optuna
        from skyward import hub

        study = optuna.create_study(storage=hub.optuna_storage(), study_name="digits", load_if_exists=True)
        study.optimize(lambda trial: trial.suggest_float("x", -1, 1) ** 2, n_trials=20)
    """
    address = address_of(url, token, project) if url else current_address()
    if address is None:
        raise UsageError(f"url=None: no hub is named; pass url=, call hub.connect, or set {URL}", field="url")
    if heartbeat_interval_s is None:
        return OptunaStorage(address, on_stale_trial=on_stale_trial)
    grace_s = 3 * heartbeat_interval_s if grace_period_s is None else grace_period_s
    for field, value, least in (
        ("heartbeat_interval_s", heartbeat_interval_s, 1),
        ("grace_period_s", grace_s, heartbeat_interval_s + 1),
    ):
        if not isinstance(value, int) or value < least:
            raise UsageError(
                f"{field}={value!r}: is out of range; give an integer from {least}", field=field, value=value
            )
    return OptunaStorage(address, heartbeat_interval_s, grace_s, on_stale_trial)


class OptunaStorage(BaseStorage, BaseHeartbeat):
    """Storage for Optuna in a hub. `optuna_storage` makes it.

    It may be used by any thread, forked, and pickled: each thread has a connection of its own. A request that fails
    because the hub is away is repeated for a minute, and then raises `HubError`.

    Example:
        import optuna
        from skyward import hub

        storage: hub.OptunaStorage = hub.optuna_storage()
        print([study.study_name for study in storage.get_all_studies()])
    """

    def __init__(
        self,
        address: Address,
        heartbeat_interval_s: int | None = None,
        grace_s: int = 0,
        on_stale_trial: StaleCallback | None = None,
        *,
        fence: int | None = None,
    ) -> None:
        # With a fence, the hub refuses new trials of a driver whose lease another one has taken.
        self._fence = fence
        self._requests = _StudyRequests(address)
        self._heartbeat_interval_s = heartbeat_interval_s
        self._grace_s = grace_s
        self._on_stale_trial = on_stale_trial
        self._studies: dict[int, _Study] = {}
        self._study_of: dict[int, int] = {}
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        return f"OptunaStorage({self._requests.address!r})"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_lock": None, "_studies": {}, "_study_of": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.RLock()

    def remove_session(self) -> None:
        """Close this thread's connection. The next call opens it again."""
        self._requests.close()

    # Studies ----------------------------------------------------------------------------------------------------------

    def create_new_study(self, directions: Sequence[StudyDirection], study_name: str | None = None) -> int:
        """Make a study and return its id."""
        name = f"{DEFAULT_STUDY_NAME_PREFIX}{uuid.uuid4()}" if study_name is None else study_name
        body = {"name": name, "key": _key(), "directions": [direction.name.lower() for direction in directions]}
        try:
            made = self._requests.send("POST", "/v1/sweeps", body)
        except HubError as error:
            if error.code == _EXISTS:
                raise DuplicatedStudyError(str(error)) from error
            raise
        return int(made["id"])

    def delete_study(self, study_id: int) -> None:
        """Delete a study with its trials for good."""
        self._requests.send("DELETE", _sweep_path(study_id))
        with self._lock:
            self._studies.pop(study_id, None)

    def set_study_user_attr(self, study_id: int, key: str, value: Any) -> None:
        """Set an attribute of the user."""
        self._requests.send("PATCH", _sweep_path(study_id), {"user_attrs": {key: json.dumps(value)}})

    def set_study_system_attr(self, study_id: int, key: str, value: Any) -> None:
        """Set an attribute of Optuna."""
        self._requests.send("PATCH", _sweep_path(study_id), {"system_attrs": {key: json.dumps(value)}})

    def get_study_id_from_name(self, study_name: str) -> int:
        """Return the id of a study."""
        rows = self._requests.send("GET", "/v1/sweeps", query={"name": study_name})["sweeps"]
        if not rows:
            raise KeyError(f"study_name={study_name!r}: no such study in this project of the hub; create it")
        return int(rows[0]["id"])

    def get_study_name_from_id(self, study_id: int) -> str:
        """Return the name of a study."""
        return self._known(study_id).name

    def get_study_directions(self, study_id: int) -> list[StudyDirection]:
        """Return a direction for each objective."""
        return list(self._known(study_id).directions)

    def get_study_user_attrs(self, study_id: int) -> dict[str, Any]:
        """Return the attributes of the user."""
        return _values(self._requests.send("GET", _sweep_path(study_id))["user_attrs"])

    def get_study_system_attrs(self, study_id: int) -> dict[str, Any]:
        """Return the attributes of Optuna."""
        return _values(self._requests.send("GET", _sweep_path(study_id))["system_attrs"])

    def get_all_studies(self) -> list[FrozenStudy]:
        """Return all studies of the project."""
        studies: list[FrozenStudy] = []
        after = 0
        while rows := self._requests.send("GET", "/v1/sweeps", query={"after": after, "limit": _PAGE})["sweeps"]:
            studies += [_frozen_study(row) for row in rows]
            after = rows[-1]["id"]
            if len(rows) < _PAGE:
                break
        return studies

    # Changes of trials ------------------------------------------------------------------------------------------------

    def create_new_trial(self, study_id: int, template_trial: FrozenTrial | None = None) -> int:
        """Make a trial and return its id."""
        body: dict[str, Any] = (
            {"key": _key(), "started_us": _now()} if template_trial is None else _template(template_trial)
        )
        if self._fence is not None:
            body["fence"] = self._fence
        row = self._requests.send("POST", f"{_sweep_path(study_id)}/trials", body)
        with self._lock:
            self._study_of[row["id"]] = study_id
        return int(row["id"])

    def set_trial_param(
        self, trial_id: int, param_name: str, param_value_internal: float, distribution: BaseDistribution
    ) -> None:
        """Set a parameter. Its distribution must be that of the other trials of the study."""
        with self._lock:
            study = self._studies.get(self._study_of.get(trial_id, -1)) or self._read(self._owner(trial_id))
        others = study.distributions.get(param_name)
        if others is not None:
            try:
                check_distribution_compatibility(others, distribution)
            except ValueError:
                self.check_trial_is_updatable(trial_id, self.get_trial(trial_id).state)  # which comes first
                raise
        parameter = {"value": _number(param_value_internal), "distribution": distribution_to_json(distribution)}
        self._change(trial_id, params={param_name: parameter})
        with self._lock:
            study.distributions.setdefault(param_name, distribution)

    def set_trial_state_values(self, trial_id: int, state: TrialState, values: Sequence[float] | None = None) -> bool:
        """Set the state, and values of the objectives. Return False where another worker took the trial before."""
        given = None if values is None else [_number(value) for value in values]
        # The times are this machine's, as everywhere in Optuna, so that they fit those that the user takes.
        at = {"ended_us": _now()} if state.is_finished() else {"started_us": _now()}
        return self._change(trial_id, state=_STATES[state], values=given, **at)

    def set_trial_intermediate_value(self, trial_id: int, step: int, intermediate_value: float) -> None:
        """Report a value of a step."""
        self._change(trial_id, steps=[[step, _number(intermediate_value)]])

    def set_trial_user_attr(self, trial_id: int, key: str, value: Any) -> None:
        """Set an attribute of the user."""
        self._change(trial_id, user_attrs={key: json.dumps(value)})

    def set_trial_system_attr(self, trial_id: int, key: str, value: Any) -> None:
        """Set an attribute of Optuna."""
        self._change(trial_id, system_attrs={key: json.dumps(value)})

    def _change(self, trial_id: int, **changes: object) -> bool:
        try:
            answer = self._requests.send("PATCH", path_of("v1", "trials", str(trial_id)), {"key": _key(), **changes})
        except HubError as error:
            if error.code == _CONFLICT:
                raise UpdateFinishedTrialError(str(error)) from error
            raise
        return bool(answer["is_changed"])

    # Trials -----------------------------------------------------------------------------------------------------------

    def get_trial(self, trial_id: int) -> FrozenTrial:
        """Return a trial. A finished one that was read before is not read again."""
        with self._lock:
            study = self._studies.get(self._study_of.get(trial_id, -1))
            known = None if study is None else study.trials.get(trial_id)
            if known is not None and known.state.is_finished():
                return known
            return self._read(self._owner(trial_id)).trials[trial_id]

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        """Return the trials of a study in their order."""
        with self._lock:
            trials = sorted(self._read(study_id).trials.values(), key=lambda trial: trial.number)
        chosen = [trial for trial in trials if states is None or trial.state in states]
        return copy.deepcopy(chosen) if deepcopy else chosen

    # Heartbeats -------------------------------------------------------------------------------------------------------

    def record_heartbeat(self, trial_id: int) -> None:
        """Tell the hub that the worker of a trial is alive."""
        self._requests.send("POST", f"{path_of('v1', 'trials', str(trial_id))}/heartbeat", {})

    def get_heartbeat_interval(self) -> int | None:
        """Return the seconds between two heartbeats."""
        return self._heartbeat_interval_s

    def get_heartbeat_stale_trial_callback(self) -> StaleCallback | None:
        """Return the function that is called with a trial that fell silent."""
        return self._on_stale_trial

    def _get_stale_trial_ids(self, study_id: int) -> list[int]:
        query = {"silent_s": self._grace_s}
        return list(self._requests.send("GET", f"{_sweep_path(study_id)}/silent", query=query)["trials"])

    # Within -----------------------------------------------------------------------------------------------------------

    def _known(self, study_id: int) -> _Study:
        """Return what never changes of a study."""
        with self._lock:
            if study_id not in self._studies:
                row = self._requests.send("GET", _sweep_path(study_id))
                self._studies[study_id] = _Study(row["name"], _directions(row))
            return self._studies[study_id]

    def _owner(self, trial_id: int) -> int:
        """Return the study of a trial."""
        if trial_id not in self._study_of:
            row = self._requests.send("GET", path_of("v1", "trials", str(trial_id)))["trial"]
            self._study_of[trial_id] = row["sweep"]
        return self._study_of[trial_id]

    def _read(self, study_id: int) -> _Study:
        """Bring the trials of a study up to date. Call it with the lock."""
        study = self._known(study_id)
        is_complete = False
        while not is_complete:
            query = {"since": study.version}
            answer = self._requests.send("GET", f"{_sweep_path(study_id)}/trials", query=query)
            study.take(answer)
            for row in answer["trials"]:
                self._study_of[row["id"]] = study_id
            is_complete = answer["is_complete"]
        return study


class _Study:
    """Study as far as this process has read it. A trial that changes is replaced, because readers keep the old one."""

    def __init__(self, name: str, directions: Sequence[StudyDirection]) -> None:
        self.name = name
        self.directions = directions
        self.version = 0
        self.trials: dict[int, FrozenTrial] = {}
        self.distributions: dict[str, BaseDistribution] = {}

    def take(self, answer: Mapping[str, Any]) -> None:
        """Take the changes that the hub sent."""
        for row in answer["trials"]:
            before = self.trials.get(row["id"])
            trial = _frozen_trial(row, {} if before is None else before.intermediate_values)
            self.trials[row["id"]] = trial
            for name, distribution in trial.distributions.items():
                self.distributions.setdefault(name, distribution)
        reported: dict[int, dict[int, float]] = {}
        for step in answer["steps"]:
            reported.setdefault(step["trial"], {})[step["step"]] = float(step["value"])
        for trial_id, values in reported.items():
            trial = copy.copy(self.trials[trial_id])
            trial.intermediate_values = dict(sorted({**trial.intermediate_values, **values}.items()))
            self.trials[trial_id] = trial
        self.version = answer["version"]


class _StudyRequests(RepeatedRequests):
    """Requests about studies, with Optuna's error where there is no such study or trial."""

    def send(self, *arguments: Any, **options: Any) -> Any:
        """Send a request as `RepeatedRequests` does.

        Raises:
            KeyError: There is no such study or trial.
            HubError: The hub refuses it, or is away for too long.
        """
        try:
            return super().send(*arguments, **options)
        except HubError as error:
            if error.code == _MISSING:
                raise KeyError(str(error)) from error
            raise


def _key() -> str:
    return uuid.uuid4().hex


def _sweep_path(study_id: int) -> str:
    return path_of("v1", "sweeps", str(study_id))


def _values(texts: Mapping[str, str]) -> dict[str, Any]:
    return {key: json.loads(text) for key, text in texts.items()}


def _number(value: float) -> float | str:
    """Spell a number. JSON has none that are not finite."""
    if math.isfinite(value):
        return float(value)
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    return {key: json.dumps(value) for key, value in values.items()}


def _directions(row: Mapping[str, Any]) -> list[StudyDirection]:
    return [StudyDirection[direction.upper()] for direction in row["directions"]]


def _frozen_study(row: Mapping[str, Any]) -> FrozenStudy:
    return FrozenStudy(
        study_name=row["name"],
        direction=None,
        directions=_directions(row),
        user_attrs=_values(row["user_attrs"]),
        system_attrs=_values(row["system_attrs"]),
        study_id=row["id"],
    )


def _frozen_trial(row: Mapping[str, Any], intermediate_values: dict[int, float]) -> FrozenTrial:
    distributions = {name: json_to_distribution(item["distribution"]) for name, item in row["params"].items()}
    return FrozenTrial(
        number=row["number"],
        trial_id=row["id"],
        state=_STATE_OF[row["state"]],
        value=None,
        values=None if row["values"] is None else [float(value) for value in row["values"]],
        datetime_start=_time(row["started_us"]),
        datetime_complete=_time(row["ended_us"]),
        params={
            name: distributions[name].to_external_repr(float(item["value"])) for name, item in row["params"].items()
        },
        distributions=distributions,
        user_attrs=_values(row["user_attrs"]),
        system_attrs=_values(row["system_attrs"]),
        intermediate_values=intermediate_values,
    )


def _template(trial: FrozenTrial) -> dict[str, Any]:
    return {
        "key": _key(),
        "state": _STATES[trial.state],
        "values": None if trial.values is None else [_number(value) for value in trial.values],
        "params": {
            name: {
                "value": _number(distribution.to_internal_repr(trial.params[name])),
                "distribution": distribution_to_json(distribution),
            }
            for name, distribution in trial.distributions.items()
        },
        "user_attrs": _texts(trial.user_attrs),
        "system_attrs": _texts(trial.system_attrs),
        "steps": [[step, _number(value)] for step, value in trial.intermediate_values.items()],
        "started_us": _microseconds(trial.datetime_start),
        "ended_us": _microseconds(trial.datetime_complete),
    }


def _time(microseconds: int | None) -> datetime | None:
    """Return a local time without a zone, as Optuna has them."""
    if microseconds is None:
        return None
    seconds, rest = divmod(microseconds, 10**6)
    return datetime.fromtimestamp(seconds).replace(microsecond=rest)


def _now() -> int:
    return time.time_ns() // 1000


def _microseconds(moment: datetime | None) -> int | None:
    if moment is None:
        return None
    return int(moment.replace(microsecond=0).timestamp()) * 10**6 + moment.microsecond
