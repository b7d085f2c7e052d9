"""Experiments: made, renamed, tagged, moved into the bin and out of it."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

from ..model.access import Actor, Right
from ..model.names import EXPERIMENT_TAG_LENGTH, check_experiment_name, cut_values
from ..model.refusal import Reason, Refusal
from ..model.runs import Experiment, Lifecycle
from ..store import experiments
from ..store.transaction import ReadSnapshot, Transaction
from .calls import (
    Service,
    experiment_number,
    need_active_experiment,
    need_experiment,
    need_run,
    no_experiment,
    require_delete,
    require_no_run_token,
)


class Experiments(Service):
    """Calls about experiments."""

    async def create_experiment(
        self, actor: Actor, name: str, tags: Mapping[str, str] | None = None, artifact_location: str | None = None
    ) -> Experiment:
        """Make an experiment.

        Args:
            actor: Who asks.
            name: Unique in the project, among deleted experiments too.
            tags: Its tags.
            artifact_location: URI that is handed to MLflow's clients instead of the hub's own. The hub never opens it.

        Raises:
            Refusal: The name is taken, or an argument is not legal.
        """
        actor.require(Right.WRITE)
        require_no_run_token(actor)
        check_experiment_name(name)
        legal = cut_values("tags", tags or {}, EXPERIMENT_TAG_LENGTH)
        return await self.database.write(self._create, actor, name, legal, _check_location(artifact_location))

    async def experiment(self, actor: Actor, experiment_id: str) -> Experiment:
        """Return an experiment, also one in the bin."""
        actor.require(Right.READ)
        return await self.database.read(_readable, actor, experiment_id)

    async def experiment_named(self, actor: Actor, name: str) -> Experiment:
        """Return the experiment of this name, also one in the bin."""
        actor.require(Right.READ)
        return await self.database.read(_named, actor, name)

    async def update_experiment(self, actor: Actor, experiment_id: str, name: str) -> Experiment:
        """Rename an experiment."""
        actor.require(Right.WRITE)
        require_no_run_token(actor)
        check_experiment_name(name)
        return await self.database.write(self._rename, actor, experiment_id, name)

    async def delete_experiment(self, actor: Actor, experiment_id: str) -> None:
        """Move an experiment and its runs into the bin."""
        require_no_run_token(actor)
        await self.database.write(self._set_experiment_lifecycle, actor, experiment_id, Lifecycle.DELETED)

    async def restore_experiment(self, actor: Actor, experiment_id: str) -> None:
        """Move an experiment and its runs out of the bin."""
        require_no_run_token(actor)
        await self.database.write(self._set_experiment_lifecycle, actor, experiment_id, Lifecycle.ACTIVE)

    async def set_experiment_tag(self, actor: Actor, experiment_id: str, key: str, value: str) -> None:
        """Set a tag of an experiment."""
        actor.require(Right.WRITE)
        require_no_run_token(actor)
        legal = cut_values("tags", {key: value}, EXPERIMENT_TAG_LENGTH)
        await self.database.write(self._set_experiment_tags, actor, experiment_id, legal)

    async def delete_experiment_tag(self, actor: Actor, experiment_id: str, key: str) -> None:
        """Remove a tag of an experiment."""
        actor.require(Right.WRITE)
        require_no_run_token(actor)
        await self.database.write(self._delete_experiment_tag, actor, experiment_id, key)

    def _create(
        self, tx: Transaction, actor: Actor, name: str, tags: Mapping[str, str], location: str | None
    ) -> Experiment:
        number = experiments.add_experiment(tx, actor.project, name, actor.user, location, tags)
        if number is None:
            raise _name_is_taken(tx, actor, name)
        self.on_change(tx, actor, "experiment.create", f"experiment/{number}", {"name": name})
        return need_experiment(tx, actor, str(number))

    def _rename(self, tx: Transaction, actor: Actor, experiment_id: str, name: str) -> Experiment:
        experiment = need_active_experiment(tx, actor, experiment_id)
        other = experiments.find_experiment_named(tx, actor.project, name)
        if other is not None and other.id != experiment.id:
            raise _name_is_taken(tx, actor, name)
        experiments.rename_experiment(tx, experiment_number(experiment_id), name)
        detail = {"name": name, "name_before": experiment.name}
        self.on_change(tx, actor, "experiment.rename", f"experiment/{experiment.id}", detail)
        return need_experiment(tx, actor, experiment_id)

    def _set_experiment_lifecycle(
        self, tx: Transaction, actor: Actor, experiment_id: str, lifecycle: Lifecycle
    ) -> None:
        experiment = need_experiment(tx, actor, experiment_id)
        require_delete(actor, experiment.owner)
        if experiment.lifecycle is lifecycle:
            raise Refusal(
                Reason.MISSING,
                f"experiment_id={experiment.id!r}: Experiment with id={experiment.id} is {lifecycle.value} already; "
                "look at its lifecycle first",
                field="experiment_id",
            )
        experiments.set_experiment_lifecycle(tx, experiment_number(experiment_id), lifecycle)
        action = "experiment.delete" if lifecycle is Lifecycle.DELETED else "experiment.restore"
        self.on_change(tx, actor, action, f"experiment/{experiment.id}", {"name": experiment.name})

    def _set_experiment_tags(self, tx: Transaction, actor: Actor, experiment_id: str, tags: Mapping[str, str]) -> None:
        experiment = need_active_experiment(tx, actor, experiment_id)
        experiments.change_experiment_tags(tx, experiment_number(experiment_id), tags)
        self.on_change(tx, actor, "experiment.tag", f"experiment/{experiment.id}", {"tags": dict(tags)})

    def _delete_experiment_tag(self, tx: Transaction, actor: Actor, experiment_id: str, key: str) -> None:
        experiment = need_active_experiment(tx, actor, experiment_id)
        if not experiments.change_experiment_tags(tx, experiment_number(experiment_id), {}, [key]):
            raise no_tag(key, f"experiment {experiment.id}")
        self.on_change(tx, actor, "experiment.untag", f"experiment/{experiment.id}", {"key": key})


def no_tag(key: str, place: str) -> Refusal:
    return Refusal(
        Reason.MISSING, f"key={key[:80]!r}: No tag with name: {key[:80]} in {place}; list its tags first", field="key"
    )


def _named(snapshot: ReadSnapshot, actor: Actor, name: str) -> Experiment:
    experiment = experiments.find_experiment_named(snapshot, actor.project, name)
    if experiment is None:
        raise Refusal(
            Reason.MISSING,
            f"name={name[:80]!r}: Could not find experiment with name '{name[:80]}'; list the project's experiments",
            field="name",
        )
    return _readable(snapshot, actor, experiment.id)


def _readable(snapshot: ReadSnapshot, actor: Actor, experiment_id: str) -> Experiment:
    """Find an experiment of the actor's project. The token of a run reads only that run's."""
    experiment = need_experiment(snapshot, actor, experiment_id)
    if actor.run is not None and need_run(snapshot, actor, actor.run).experiment != int(experiment.id):
        raise no_experiment(experiment_id)
    return experiment


def _name_is_taken(snapshot: ReadSnapshot, actor: Actor, name: str) -> Refusal:
    other = experiments.find_experiment_named(snapshot, actor.project, name)
    is_deleted = other is not None and other.lifecycle is Lifecycle.DELETED
    advice = "restore that one, or choose another name" if is_deleted else "choose another name"
    state = "deleted" if is_deleted else "active"
    return Refusal(
        Reason.EXISTS, f"name={name[:80]!r}: Experiment '{name[:80]}' already exists and is {state}; {advice}",
        field="name",
    )  # fmt: skip


def _check_location(location: str | None) -> str | None:
    """Check a URI that clients of MLflow will use. The hub hands it out and never opens it."""
    if not location:
        return None
    parts = urlsplit(location)
    is_local = parts.scheme == "file" or location.startswith(("/", "\\")) or (len(parts.scheme) == 1)
    if is_local or "#" in location or "?" in location or ".." in location or "\0" in location:
        raise Refusal(
            Reason.INVALID,
            f"artifact_location={location[:80]!r}: must be a URI of an object store, without query, fragment and `..`; "
            "leave it out to keep artifacts in the hub",
            field="artifact_location",
        )
    return None if parts.scheme == "mlflow-artifacts" else location
