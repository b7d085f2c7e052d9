"""Numbered records of the hub's own client: accepted exactly once. Heartbeats, lost runs and commands."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

from ..model.access import Actor, Right, Role
from ..model.batches import Batch, BatchAnswer, Record, RefusedRecord
from ..model.names import (
    NAME_TAG,
    PARAM_LENGTH,
    TAG_LENGTH,
    check_artifact_key,
    check_experiment_name,
    check_key,
    check_run_id,
    check_text,
    cut_values,
)
from ..model.points import PointColumns
from ..model.refusal import Reason, Refusal
from ..model.runs import Artifact, Command, DatasetInput, Lifecycle, Run, RunState, check_dataset
from ..store import artifacts, experiments, points, runs
from ..store.keys import find_key
from ..store.sealing import cut_points
from ..store.transaction import ReadSnapshot, Transaction
from .calls import need_active_run, need_run, no_run
from .metrics import Metrics, check_points
from .runs import choose_name

if TYPE_CHECKING:
    from .leader import Write

ACTIONS = ("save", "stop", "abort")
LOST_AFTER_MS = 60_000
WRONG_FORM = (TypeError, ValueError, AttributeError, IndexError, OverflowError)
"""Exceptions of code that meets a record of another form than the client's."""
PARENT_TAG = "mlflow.parentRunId"
USER_TAG = "mlflow.user"


class Batches(Metrics):
    """Calls of the hub's own client."""

    async def accept_batch(self, actor: Actor, run_id: str, batch: Batch) -> BatchAnswer:
        """Accept records of a run, each exactly once, and its heartbeat.

        Records that were accepted before change nothing. Where numbers are missing before the first one, nothing is
        accepted, and the answer says from where the client must go on. A record that can never be accepted is skipped
        and named in the answer.
        """
        actor.require(Right.WRITE)
        check_run_id(run_id)
        if actor.run not in (None, run_id):
            raise no_run(run_id)
        if not re.fullmatch(r"[\w-]{1,64}", batch.client) or not 0 < batch.first < 2**60:
            raise Refusal(
                Reason.INVALID, "client: must be an id of at most 64 characters, and first at least 1; mend it"
            )
        return await self.database.write_to_run((actor.project, run_id), self._accept, actor, run_id, batch)

    async def send_command(self, actor: Actor, run_id: str, action: str) -> Command:
        """Order a running training to save, stop or abort. Its sender collects the command with its next answer."""
        actor.require(Right.WRITE)
        if action not in ACTIONS:
            raise Refusal(
                Reason.INVALID, f"action={action[:40]!r}: is none; use one of {', '.join(ACTIONS)}", field="action"
            )
        return await self.database.write(self._send_command, actor, run_id, action)

    async def commands(self, actor: Actor, run_id: str) -> list[Command]:
        """Return all commands of a run, in the order in which they were sent."""
        actor.require(Right.READ)
        return await self.database.read(_commands, actor, run_id)

    async def mark_lost(self, now: int, after_ms: int = LOST_AFTER_MS, *, write: Write | None = None) -> list[str]:
        """Mark running runs whose heartbeat is overdue as lost, and return their ids. Call it each few seconds.

        A hub that has just started waits first, because no run could reach it while it was down.

        Args:
            now: Milliseconds since 1970.
            after_ms: Silence after which a run is lost.
            write: By default `Database.write`.
        """
        if now - self.listening_since < after_ms:
            return []
        return await (write or self.database.write)(self._mark_lost, now - after_ms)

    def _mark_lost(self, tx: Transaction, before: int) -> list[str]:
        lost = runs.mark_lost(tx, before)
        for organization, project, run_id in lost:
            hub = Actor(user="hub", organization=organization, project=project, role=Role.OWNER)
            self.on_change(tx, hub, "run.lost", f"run/{run_id}", {"state": RunState.LOST.value})
        return [run_id for _, _, run_id in lost]

    def _send_command(self, tx: Transaction, actor: Actor, run_id: str, action: str) -> Command:
        row = need_active_run(tx, actor, run_id)
        if RunState(row.state).is_final:
            raise Refusal(Reason.CONFLICT, f"run_id={run_id!r}: the run is over; send commands to running ones only")
        command = artifacts.add_command(tx, row.pk, action)
        self.on_change(tx, actor, "run.command", f"run/{run_id}", {"action": action, "number": command.number})
        return command

    def _accept(self, tx: Transaction, actor: Actor, run_id: str, batch: Batch) -> BatchAnswer:
        row = runs.find_run(tx, actor.project, run_id)
        if row is None:
            try:
                row = self._first_row(tx, actor, run_id, batch)
            except WRONG_FORM as error:
                raise Refusal(Reason.INVALID, "record='run': has the wrong form; update the client") from error
            if row is None:
                return BatchAnswer(0, RunState.QUEUED)
        row = need_active_run(tx, actor, run_id)
        last = artifacts.last_accepted(tx, row.pk, batch.client)
        accepted, refused = last, []
        if batch.first <= last + 1:
            new = list(batch.records[last + 1 - batch.first :])
            if new:
                application = _Application(self, tx, actor, row)
                refused = application.apply_all(new, last + 1)
                accepted = last + len(new)
                artifacts.set_last_accepted(tx, row.pk, batch.client, accepted)
        state = self._hear(tx, actor, run_id, was_over=RunState(row.state).is_final)
        return BatchAnswer(accepted, state, artifacts.load_commands(tx, row.pk, only_open=True), refused)

    def _first_row(self, tx: Transaction, actor: Actor, run_id: str, batch: Batch) -> runs.RunRow | None:
        """Make the run that a client's first record describes. None where the client must begin with that record."""
        if batch.first != 1 or not batch.records:
            return None
        if not batch.records[0] or batch.records[0][0] != "run":
            raise no_run(run_id)
        facts = _mapping(batch.records[0][1])
        name = check_experiment_name(facts.get("experiment") or "Default")
        experiment = experiments.find_experiment_named(tx, actor.project, name)
        number = experiment.id if experiment else None
        if number is None:
            number = str(experiments.add_experiment(tx, actor.project, name, actor.user, None, {}))
            self.on_change(tx, actor, "experiment.create", f"experiment/{number}", {"name": name})
        tags = cut_values("tags", _texts(facts.get("tags") or {}), TAG_LENGTH)
        for tag, field in ((PARENT_TAG, "parent"), (USER_TAG, "user")):
            if facts.get(field):
                tags.setdefault(tag, check_text(field, str(facts[field])[:TAG_LENGTH]))
        name = choose_name(facts.get("name") or None, tags)
        run = Run(
            id=run_id,
            experiment_id=number,
            name=name,
            state=RunState.RUNNING,
            lifecycle=Lifecycle.ACTIVE,
            user=actor.user,
            started_at=_int64(facts.get("started_at") or tx.now),
            ended_at=None,
            artifact_uri="",
            heartbeat_at=tx.now,
            tags={**tags, NAME_TAG: name},
        )
        self.add_run(tx, actor, run)
        return runs.find_run(tx, actor.project, run_id)

    def _hear(self, tx: Transaction, actor: Actor, run_id: str, *, was_over: bool) -> RunState:
        """Note a heartbeat, by the hub's own clock. A lost run is running again; one that is over has had its last."""
        row = need_run(tx, actor, run_id)
        state = RunState(row.state)
        if was_over and state.is_final:
            return state
        changes: dict[str, object] = {"heartbeat_at": tx.now}
        if state is RunState.LOST:
            state = RunState.RUNNING
            changes["state"] = state.value
            self.on_change(tx, actor, "run.found", f"run/{run_id}", {"state": state.value})
        runs.change_run(tx, row.pk, **changes)
        return state


class _Application:
    """Application of new records to a run, in order."""

    def __init__(self, service: Batches, tx: Transaction, actor: Actor, row: runs.RunRow) -> None:
        self._service, self._tx, self._actor, self._row = service, tx, actor, row
        self._columns = PointColumns()
        self._kinds: Mapping[str, Callable[..., object]] = {
            "run": lambda *_facts: None,
            "m": self._add_points,
            "p": self._add_params,
            "t": self._set_tags,
            "dt": self._delete_tag,
            "a": self._add_artifact,
            "cut": self._cut,
            "s": self._set_state,
            "h": lambda *_times: None,
            "ack": self._acknowledge,
            "in": self._add_inputs,
        }

    def apply_all(self, records: list[Record], first: int) -> list[RefusedRecord]:
        """Apply records, and return those that cannot be applied."""
        refused: list[RefusedRecord] = []
        number = first
        for is_metrics, group in groupby(records, _is_metrics):
            consecutive = list(group)
            if not (is_metrics and self._add_all_points(consecutive)):
                refused += self._apply_each(consecutive, number)
            number += len(consecutive)
        self._flush()
        return refused

    def _apply_each(self, records: list[Record], first: int) -> Iterator[RefusedRecord]:
        for number, record in enumerate(records, first):
            try:
                self._apply(record)
            except Refusal as refusal:
                yield RefusedRecord(number, refusal.message)

    def _apply(self, record: Record) -> None:
        kind = record[0] if isinstance(record, (list, tuple)) and record else None
        apply = self._kinds.get(kind) if isinstance(kind, str) else None
        if apply is None:
            raise Refusal(Reason.INVALID, f"record={str(kind)[:40]!r}: is of no known kind; update the hub")
        try:
            apply(*record[1:])
        except WRONG_FORM as error:
            raise Refusal(Reason.INVALID, f"record={kind!r}: has the wrong form; update the client") from error

    def _add_all_points(self, records: list[Record]) -> bool:
        """Add the points of records of metrics. If one is wrong, add none and return False.

        A loop over columns takes a quarter of the time of one over records, which counts for a backlog of thousands.
        """
        try:
            points = PointColumns(
                [key for _, _, _, values in records for key in values],
                array("q", [step for _, step, _, values in records for _ in values]),
                array("q", [timestamp for _, _, timestamp, values in records for _ in values]),
                array("d", [float(value) for _, _, _, values in records for value in values.values()]),
            )
            check_points(points)
        except (Refusal, *WRONG_FORM):
            return False
        self._columns.extend(points)
        return True

    def _add_points(self, step: int, timestamp: int, values: Mapping[str, Any]) -> None:
        step, timestamp = _int64(step), _int64(timestamp)
        numbers = {key: float(value) for key, value in values.items()}
        for key in numbers:
            check_key("metrics.key", key)
        for key, value in numbers.items():
            self._columns.append(key, step, timestamp, value)

    def _add_params(self, params: Mapping[str, Any]) -> None:
        self._service.apply_params(self._tx, self._actor, self._row, cut_values("params", _texts(params), PARAM_LENGTH))

    def _set_tags(self, tags: Mapping[str, Any]) -> None:
        self._service.apply_tags(self._tx, self._actor, self._row, cut_values("tags", _texts(tags), TAG_LENGTH))

    def _delete_tag(self, key: str) -> None:
        check_key("tags.key", key)
        runs.change_tags(self._tx, self._actor.project, self._row.pk, {}, [key])

    def _add_artifact(self, key: str, size: int, sha256: str) -> None:
        check_artifact_key(key)
        size, sha256 = _int64(size), _text("sha256", sha256)
        if not artifacts.has_blob(self._tx, self._actor.project, sha256, size):
            raise Refusal(Reason.INVALID, f"sha256={sha256[:80]!r}: its bytes were never uploaded; upload them first")
        artifacts.set_artifact(self._tx, self._row.pk, Artifact(key, size, sha256))
        detail = {"key": key, "sha256": sha256, "size": size}
        self._service.on_change(self._tx, self._actor, "artifact.put", f"run/{self._row.id}", detail)

    def _cut(self, step: int, name: str | None = None) -> None:
        step = _int64(step)
        self._flush()
        points.flush_points(self._tx)
        if name is not None:
            check_key("metrics.key", name)
            key = find_key(self._tx, self._actor.project, name)
            if key is not None:
                cut_points(self._tx, self._row.pk, step, key)
            return
        cut_points(self._tx, self._row.pk, step)
        self._service.on_change(self._tx, self._actor, "run.cut", f"run/{self._row.id}", {"step": step})

    def _set_state(self, state: str, timestamp: int, error: str | None = None) -> None:
        value = RunState(state)
        changes: dict[str, object] = {"state": value.value, "ended_at": _int64(timestamp) if value.is_final else None}
        changes["error"] = None if error is None else check_text("error", str(error)[:TAG_LENGTH])
        runs.change_run(self._tx, self._row.pk, **changes)
        self._service.on_change(self._tx, self._actor, "run.update", f"run/{self._row.id}", changes)
        if value.is_final:
            self._tx.after_commit(partial(self._service.database.sealer.finish, self._row.pk))

    def _acknowledge(self, number: int, result: object = None) -> None:
        text = None if result is None else check_text("result", str(result)[:TAG_LENGTH])
        artifacts.acknowledge_command(self._tx, self._row.pk, _int64(number), text)

    def _add_inputs(self, inputs: list[Mapping[str, Any]]) -> None:
        runs.add_inputs(self._tx, self._row.pk, [_dataset(**item) for item in inputs], [])

    def _flush(self) -> None:
        columns, self._columns = self._columns, PointColumns()
        self._service.apply_points(self._tx, self._actor, self._row, columns)


def _is_metrics(record: Record) -> bool:
    return isinstance(record, (list, tuple)) and len(record) == 4 and record[0] == "m"


def _mapping(value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise Refusal(Reason.INVALID, "record='run': has the wrong form; update the client")
    return value


def _int64(value: Any) -> int:
    """Convert a number to an integer that a database can hold, or raise as `int` does."""
    number = int(value)
    if not -(2**63) <= number < 2**63:
        raise OverflowError("number: exceeds 64 bits; use a smaller one")
    return number


def _text(field: str, value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{field}={value!r}: must be a text; mend the client")
    return check_text(field, value)


def _dataset(
    name: str,
    digest: str,
    source_type: str,
    source: str,
    schema: str | None = None,
    profile: str | None = None,
    tags: Mapping[str, Any] | None = None,
) -> DatasetInput:
    dataset = DatasetInput(
        name=_text("name", name),
        digest=_text("digest", digest),
        source_type=_text("source_type", source_type),
        source=_text("source", source),
        schema=None if schema is None else _text("schema", schema),
        profile=None if profile is None else _text("profile", profile),
        tags=_texts(tags or {}),
    )
    return check_dataset(dataset)


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    return {str(key): str(value) for key, value in values.items()}


def _commands(snapshot: ReadSnapshot, actor: Actor, run_id: str) -> list[Command]:
    return artifacts.load_commands(snapshot, need_run(snapshot, actor, run_id).pk)
