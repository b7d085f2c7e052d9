"""Runs: made, changed, moved into the bin and out of it; their parameters, tags and inputs."""

from __future__ import annotations

import random
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from ..model.access import Actor, Right
from ..model.names import NAME_TAG, PARAM_LENGTH, TAG_LENGTH, check_run_id, check_text, cut_values
from ..model.refusal import Reason, Refusal
from ..model.runs import DatasetInput, Lifecycle, ModelLink, Run, RunState, check_dataset
from ..store import runs
from ..store.transaction import ReadSnapshot, Transaction
from .calls import Service, need_active_experiment, need_active_run, need_run, no_run, require_delete
from .experiments import no_tag

ADJECTIVES = ("amber", "bold", "brisk", "calm", "clear", "deft", "early", "fair", "grand", "keen", "lively", "mild")
NOUNS = (
    "anchor",
    "breeze",
    "cedar",
    "comet",
    "delta",
    "falcon",
    "harbor",
    "lantern",
    "meadow",
    "otter",
    "ridge",
    "tern",
)


class Runs(Service):
    """Calls about runs."""

    async def create_run(
        self,
        actor: Actor,
        experiment_id: str,
        *,
        run_id: str | None = None,
        name: str | None = None,
        started_at: int | None = None,
        tags: Mapping[str, str] | None = None,
        params: Mapping[str, str] | None = None,
    ) -> Run:
        """Make a run, which is running.

        Args:
            actor: Who asks.
            experiment_id: An experiment that is not in the bin.
            run_id: Id that the client made. The same one again, by the same user, gives the same run.
            name: Name of the run. One is made up where neither it nor the tag `mlflow.runName` is given.
            started_at: Its beginning, in milliseconds since 1970. By default now.
            tags: Its first tags.
            params: Its first parameters.

        Raises:
            Refusal: The experiment is missing or deleted, the id belongs to another run, or an argument is not legal.
        """
        actor.require(Right.WRITE)
        if run_id is not None:
            check_run_id(run_id)
        if actor.run is not None and run_id != actor.run:
            raise no_run(run_id or "")
        legal_tags = cut_values("tags", tags or {}, TAG_LENGTH)
        run = Run(
            id=run_id or uuid.uuid4().hex,
            experiment_id=experiment_id,
            name=choose_name(name, legal_tags),
            state=RunState.RUNNING,
            lifecycle=Lifecycle.ACTIVE,
            user=actor.user,
            started_at=self.clock() if started_at is None else started_at,
            ended_at=None,
            artifact_uri="",
            tags=legal_tags,
            params=cut_values("params", params or {}, PARAM_LENGTH),
        )
        return await self.database.write(self.add_run, actor, replace(run, tags={**legal_tags, NAME_TAG: run.name}))

    async def run(self, actor: Actor, run_id: str) -> Run:
        """Return a run, also one in the bin."""
        actor.require(Right.READ)
        return await self.database.read(_load, actor, run_id)

    async def update_run(
        self,
        actor: Actor,
        run_id: str,
        *,
        state: RunState | None = None,
        ended_at: int | None = None,
        name: str | None = None,
        error: str | None = None,
    ) -> Run:
        """Change a run's state, end, name or error. None leaves a field as it is."""
        actor.require(Right.WRITE)
        if name:
            check_text("name", name)
        return await self.database.write(self._update_run, actor, run_id, state, ended_at, name, error)

    async def delete_run(self, actor: Actor, run_id: str) -> None:
        """Move a run into the bin."""
        await self.database.write(self._set_run_lifecycle, actor, run_id, Lifecycle.DELETED)

    async def restore_run(self, actor: Actor, run_id: str) -> None:
        """Move a run out of the bin."""
        await self.database.write(self._set_run_lifecycle, actor, run_id, Lifecycle.ACTIVE)

    async def log_params(self, actor: Actor, run_id: str, params: Mapping[str, str]) -> None:
        """Add parameters. One that the run has already must have the same value: parameters never change."""
        actor.require(Right.WRITE)
        legal = cut_values("params", params, PARAM_LENGTH)
        await self.database.write(self._log_params, actor, run_id, legal)

    async def set_tags(self, actor: Actor, run_id: str, tags: Mapping[str, str]) -> None:
        """Set tags. The tag `mlflow.runName` renames the run."""
        actor.require(Right.WRITE)
        legal = cut_values("tags", tags, TAG_LENGTH)
        await self.database.write(self._set_tags, actor, run_id, legal)

    async def delete_tag(self, actor: Actor, run_id: str, key: str) -> None:
        """Remove a tag."""
        actor.require(Right.WRITE)
        await self.database.write(self._delete_tag, actor, run_id, key)

    async def log_inputs(
        self, actor: Actor, run_id: str, inputs: Sequence[DatasetInput], models: Sequence[ModelLink]
    ) -> None:
        """Add datasets and models that a run read or made."""
        actor.require(Right.WRITE)
        legal = tuple(check_dataset(dataset) for dataset in inputs)
        await self.database.write(self._log_inputs, actor, run_id, legal, tuple(models))

    def add_run(self, tx: Transaction, actor: Actor, run: Run) -> Run:
        """Add a run within a transaction, or return the one that its client made before."""
        present = runs.find_run(tx, actor.project, run.id)
        if present is None:
            need_active_experiment(tx, actor, run.experiment_id)
            if runs.add_run(tx, actor.project, run) is not None:
                detail = {"experiment_id": run.experiment_id, "name": run.name}
                self.on_change(tx, actor, "run.create", f"run/{run.id}", detail)
        elif present.owner != actor.user or str(present.experiment) != run.experiment_id:
            raise Refusal(
                Reason.EXISTS,
                f"run_id={run.id!r}: a run with this id already exists; use an id of 32 random hexadecimal digits",
                field="run_id",
            )
        return _load(tx, actor, run.id)

    def _update_run(
        self,
        tx: Transaction,
        actor: Actor,
        run_id: str,
        state: RunState | None,
        ended_at: int | None,
        name: str | None,
        error: str | None,
    ) -> Run:
        row = need_active_run(tx, actor, run_id)
        changes: dict[str, object] = {}
        if state is not None:
            changes["state"] = state.value
        if ended_at is not None or (state is not None and state.is_final):
            changes["ended_at"] = tx.now if ended_at is None else ended_at
        if name:
            changes["name"] = name
            runs.change_tags(tx, actor.project, row.pk, {NAME_TAG: name})
        if error is not None:
            changes["error"] = check_text("error", error[:TAG_LENGTH])
        if changes:
            runs.change_run(tx, row.pk, **changes)
            self.on_change(tx, actor, "run.update", f"run/{run_id}", changes)
            if state is not None and state.is_final:
                tx.after_commit(partial(self.database.sealer.finish, row.pk))
        return _load(tx, actor, run_id)

    def _set_run_lifecycle(self, tx: Transaction, actor: Actor, run_id: str, lifecycle: Lifecycle) -> None:
        row = need_run(tx, actor, run_id)
        require_delete(actor, row.owner)
        runs.set_run_lifecycle(tx, row.pk, lifecycle)
        action = "run.delete" if lifecycle is Lifecycle.DELETED else "run.restore"
        self.on_change(tx, actor, action, f"run/{run_id}", {})

    def _log_params(self, tx: Transaction, actor: Actor, run_id: str, params: Mapping[str, str]) -> None:
        self.apply_params(tx, actor, need_active_run(tx, actor, run_id), params)

    def apply_params(self, tx: Transaction, actor: Actor, row: runs.RunRow, params: Mapping[str, str]) -> None:
        """Add parameters within a transaction."""
        if not params:
            return
        different = runs.add_params(tx, actor.project, row.pk, params)
        if different is not None:
            key, before = different
            raise Refusal(
                Reason.INVALID,
                f"params[{key}]={params[key][:80]!r}: Changing param values is not allowed. Param with key='{key}' was "
                f"already logged with value='{before[:80]}' for run ID='{row.id}'; use another key, or a tag",
                field="params",
            )
        self.on_change(tx, actor, "run.params", f"run/{row.id}", {"params": dict(params)})

    def _set_tags(self, tx: Transaction, actor: Actor, run_id: str, tags: Mapping[str, str]) -> None:
        self.apply_tags(tx, actor, need_active_run(tx, actor, run_id), tags)

    def apply_tags(self, tx: Transaction, actor: Actor, row: runs.RunRow, tags: Mapping[str, str]) -> None:
        """Set tags within a transaction."""
        if not tags:
            return
        runs.change_tags(tx, actor.project, row.pk, tags)
        if tags.get(NAME_TAG):
            runs.change_run(tx, row.pk, name=tags[NAME_TAG])
        self.on_change(tx, actor, "run.tags", f"run/{row.id}", {"tags": dict(tags)})

    def _delete_tag(self, tx: Transaction, actor: Actor, run_id: str, key: str) -> None:
        row = need_active_run(tx, actor, run_id)
        if not runs.change_tags(tx, actor.project, row.pk, {}, [key]):
            raise no_tag(key, f"run {run_id}")
        self.on_change(tx, actor, "run.untag", f"run/{run_id}", {"key": key})

    def _log_inputs(
        self,
        tx: Transaction,
        actor: Actor,
        run_id: str,
        inputs: Sequence[DatasetInput],
        models: Sequence[ModelLink],
    ) -> None:
        row = need_active_run(tx, actor, run_id)
        runs.add_inputs(tx, row.pk, inputs, models)
        detail = {"datasets": [item.name for item in inputs], "models": [link.model_id for link in models]}
        self.on_change(tx, actor, "run.inputs", f"run/{run_id}", detail)


def choose_name(name: str | None, tags: Mapping[str, str]) -> str:
    """Return the name of a new run: the one given, that of its tag, or one made up."""
    tagged = tags.get(NAME_TAG)
    if name and tagged and name != tagged:
        raise Refusal(
            Reason.INVALID,
            f"name={name[:80]!r}: Both 'run_name' argument and 'mlflow.runName' tag are specified, but with different "
            "values; give one of them",
            field="name",
        )
    chosen = name or tagged
    if chosen:
        return check_text("name", chosen)
    return f"{random.choice(ADJECTIVES)}-{random.choice(NOUNS)}-{random.randrange(1000)}"


def _load(snapshot: ReadSnapshot, actor: Actor, run_id: str) -> Run:
    need_run(snapshot, actor, run_id)
    run = runs.load_run(snapshot, actor.project, run_id)
    assert run is not None
    return run
