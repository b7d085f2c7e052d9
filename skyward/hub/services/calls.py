"""Base of the services: the database, the clock, and the checks that each call begins with."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..model.access import Actor, Right
from ..model.refusal import Reason, Refusal
from ..model.registry import LoggedModel
from ..model.runs import Experiment, Lifecycle
from ..store.blobs import Blobs
from ..store.database import Database
from ..store.experiments import find_experiment
from ..store.logged_models import find_logged_model
from ..store.runs import RunRow, find_run
from ..store.transaction import ReadSnapshot, Transaction

OnChange = Callable[[Transaction, Actor, str, str, Mapping[str, object]], None]
"""`on_change(tx, actor, action, resource, detail)`: called in the transaction of each change, for the audit and the
outbox. `action` is such as "run.create", `resource` such as "run/<id>"."""


def ignore_change(_tx: Transaction, _actor: Actor, _action: str, _resource: str, _detail: Mapping[str, object]) -> None:
    """Record nothing."""


class Service:
    """Base of the services that keep runs.

    Args:
        database: Where rows are.
        blobs: Where the bytes of artifacts are. None where a hub keeps none.
        clock: Wall clock in milliseconds. By default the database's.
        on_change: Called in the transaction of each change.
    """

    def __init__(
        self,
        database: Database,
        blobs: Blobs | None = None,
        clock: Callable[[], int] | None = None,
        on_change: OnChange = ignore_change,
    ) -> None:
        self.database = database
        self.blobs = blobs
        self.clock = clock or database.clock
        self.on_change = on_change
        self.listening_since = self.clock()

    def excuse_silence(self, now: int) -> None:
        """Give everybody time to be heard again, as after a start: the clock has jumped to `now`."""
        self.listening_since = now


def experiment_number(experiment_id: str) -> int:
    """Convert the id of an experiment to its number.

    Raises:
        Refusal: No experiment can have this id.
    """
    digits = experiment_id.removeprefix("-")
    if not (digits.isascii() and digits.isdigit()):
        raise Refusal(
            Reason.INVALID,
            f"experiment_id={experiment_id[:80]!r}: Experiment ID must be a valid integer; pass an id from the list of "
            "experiments",
            field="experiment_id",
        )
    if len(digits) > 18:
        raise no_experiment(experiment_id)
    return int(experiment_id)


def no_experiment(experiment_id: str) -> Refusal:
    return Refusal(
        Reason.MISSING,
        f"experiment_id={experiment_id[:80]!r}: No Experiment with id={experiment_id[:80]} exists; "
        "list the experiments of this project",
        field="experiment_id",
    )


def no_run(run_id: str) -> Refusal:
    return Refusal(
        Reason.MISSING, f"run_id={run_id[:80]!r}: Run with id={run_id[:80]} not found; search the runs of this project",
        field="run_id",
    )  # fmt: skip


def need_experiment(snapshot: ReadSnapshot, actor: Actor, experiment_id: str) -> Experiment:
    """Find an experiment of the actor's project."""
    experiment = find_experiment(snapshot, actor.project, experiment_number(experiment_id))
    if experiment is None:
        raise no_experiment(experiment_id)
    return experiment


def need_active_experiment(snapshot: ReadSnapshot, actor: Actor, experiment_id: str) -> Experiment:
    """Find an experiment that is not in the bin."""
    experiment = need_experiment(snapshot, actor, experiment_id)
    if experiment.lifecycle is not Lifecycle.ACTIVE:
        raise Refusal(
            Reason.INVALID,
            f"experiment_id={experiment_id!r}: The experiment {experiment_id} must be in the 'active' state. "
            "Current state is deleted; restore it first",
            field="experiment_id",
        )
    return experiment


def need_run(snapshot: ReadSnapshot, actor: Actor, run_id: str) -> RunRow:
    """Find a run of the actor's project, and for a run's token only that run."""
    row = None if actor.run not in (None, run_id) else find_run(snapshot, actor.project, run_id)
    if row is None:
        raise no_run(run_id)
    return row


def need_active_run(snapshot: ReadSnapshot, actor: Actor, run_id: str) -> RunRow:
    """Find a run that is not in the bin."""
    row = need_run(snapshot, actor, run_id)
    if row.lifecycle != Lifecycle.ACTIVE.value:
        raise Refusal(
            Reason.INVALID,
            f"run_id={run_id!r}: The run {run_id} must be in the 'active' state. "
            "Current state is deleted; restore it first",
            field="run_id",
        )
    return row


def need_logged_model(
    snapshot: ReadSnapshot, actor: Actor, model_id: str, *, allow_deleted: bool = False
) -> LoggedModel:
    """Find a logged model of the actor's project, and for a run's token only one that this run made."""
    model = find_logged_model(snapshot, actor.project, model_id)
    is_hidden = model is None or actor.run not in (None, model.run_id)
    if model is None or is_hidden or (model.lifecycle is Lifecycle.DELETED and not allow_deleted):
        raise Refusal(
            Reason.MISSING,
            f"model_id: Logged model with ID '{model_id[:80]}' not found. Deleted ones are hidden; search for it",
            field="model_id",
        )
    return model


def require_delete(actor: Actor, owner: str) -> None:
    """Check that the actor may delete or restore something of `owner`."""
    actor.require(Right.WRITE if owner and owner == actor.user else Right.DELETE)


def require_no_run_token(actor: Actor) -> None:
    """Refuse the token of a run where a call concerns more than that run."""
    if actor.run is not None:
        raise Refusal(
            Reason.FORBIDDEN, "token: is of one run and may not do this; use a token of a person", field="token"
        )
