"""Searches of runs and experiments: filters and orders in SQL, page by page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..model.runs import MLFLOW_STATUS, Experiment, Lifecycle, Run, RunState
from ..model.search import Comparison, Entity, Order
from . import experiments, runs
from .keys import find_key
from .tables import INDEXED_LENGTH, PARAM, TAG
from .transaction import ReadSnapshot

MOST_LISTED = 5_000
"""Runs with the same value that a search lists, which takes some milliseconds."""

_RUN_COLUMNS = {
    "run_id": "run.id",
    "run_name": "run.name",
    "user_id": "run.owner",
    "status": "run.state",
    "start_time": "run.started_at",
    "end_time": "run.ended_at",
    "artifact_uri": (
        "(SELECT coalesce(artifact_location, 'mlflow-artifacts:/' || id) FROM experiment WHERE id = run.experiment)"
        " || '/' || run.id || '/artifacts'"
    ),
}
_EXPERIMENT_COLUMNS = {
    "name": "experiment.name",
    "experiment_id": "experiment.id",
    "creation_time": "experiment.created_at",
    "last_update_time": "experiment.updated_at",
}


@dataclass
class Query:
    """SQL in the making. Values are parameters; only the names and numbers of this program are in the text."""

    snapshot: ReadSnapshot
    conditions: list[str] = field(default_factory=list)
    parameters: list[object] = field(default_factory=list)
    source: str = "run"
    joins: list[str] = field(default_factory=list)
    orders: list[str] = field(default_factory=list)
    order_parameters: list[object] = field(default_factory=list)

    def where(self, condition: str, *values: object) -> None:
        self.conditions.append(condition)
        self.parameters.extend(values)

    def compare(self, column: str, operator: str, value: object) -> tuple[str, list[object]]:
        """Make the comparison of a column, with its parameters."""
        if operator == "LIKE":
            # SQLite has no escape character in LIKE unless it is given one; PostgreSQL has one unless it is taken away.
            return f"{column} LIKE ?{self._no_escape}", [value]
        if operator == "ILIKE":
            return f"lower({column}) LIKE lower(?){self._no_escape}", [value]
        if isinstance(value, tuple):
            return f"{column} {operator} ({', '.join('?' * len(value))})", list(value)
        return f"{column} {'<>' if operator == '!=' else operator} ?", [value]

    @property
    def _no_escape(self) -> str:
        return " ESCAPE ''" if self.snapshot.is_postgresql else ""

    @property
    def collation(self) -> str:
        """Order of bytes, as in SQLite, whatever language PostgreSQL was set up for."""
        return ' COLLATE "C"' if self.snapshot.is_postgresql else ""

    def select(self, columns: str, limit: int, offset: int) -> tuple[str, list[object]]:
        sql = (
            f"SELECT {columns} FROM {self.source} {' '.join(self.joins)} WHERE {' AND '.join(self.conditions)}"
            f" ORDER BY {', '.join(self.orders)} LIMIT ? OFFSET ?"
        )
        return sql, [*self.parameters, *self.order_parameters, limit, offset]


def search_runs(
    snapshot: ReadSnapshot,
    project: int,
    numbers: Sequence[int] | None,
    comparisons: Sequence[Comparison],
    orders: Sequence[Order],
    lifecycle: Lifecycle | None,
    limit: int,
    offset: int,
) -> list[Run]:
    """Return a page of runs.

    Args:
        snapshot: Where to search.
        project: Project whose runs are meant.
        numbers: Experiments. None means all of the project.
        comparisons: All must hold.
        orders: First key first. Ties go to the run that started last.
        lifecycle: None means active and deleted runs.
        limit: Runs on the page.
        offset: Runs before the page.
    """
    rows = None
    if orders and orders[0].entity is Entity.METRIC:
        # Runs that have a number come first in each direction. Where they fill the page, the index on values gives it.
        query = _runs_query(snapshot, project, numbers, comparisons, lifecycle)
        if _order_runs(query, project, orders, skips_missing=True):
            rows = snapshot.execute(*query.select(runs.COLUMNS, limit, offset)).fetchall()
    if rows is None or len(rows) < limit:
        query = _runs_query(snapshot, project, numbers, comparisons, lifecycle)
        _order_runs(query, project, orders, skips_missing=False)
        rows = snapshot.execute(*query.select(runs.COLUMNS, limit, offset)).fetchall()
    return runs.hydrate(snapshot, rows)


def search_experiments(
    snapshot: ReadSnapshot,
    project: int,
    comparisons: Sequence[Comparison],
    orders: Sequence[Order],
    lifecycle: Lifecycle | None,
    limit: int,
    offset: int,
) -> list[Experiment]:
    """Return a page of experiments. The arguments are those of `search_runs`."""
    query = Query(snapshot, source="experiment")
    query.where("experiment.project = ?", project)
    if lifecycle is not None:
        query.where("experiment.lifecycle = ?", lifecycle.value)
    for comparison in comparisons:
        _filter_experiments(query, comparison)
    for order in orders:
        column = _EXPERIMENT_COLUMNS[order.key]
        text = query.collation if order.key == "name" else ""
        query.orders.append(f"{column}{text} {'DESC' if order.is_descending else 'ASC'}")
    if not orders:
        query.orders.append("experiment.created_at DESC")
    if all(order.key != "experiment_id" for order in orders):
        query.orders.append("experiment.id ASC" if not orders else "experiment.id DESC")
    rows = snapshot.execute(*query.select(experiments.COLUMNS, limit, offset)).fetchall()
    return [experiments.experiment_of(row) for row in rows]


def _runs_query(
    snapshot: ReadSnapshot,
    project: int,
    numbers: Sequence[int] | None,
    comparisons: Sequence[Comparison],
    lifecycle: Lifecycle | None,
) -> Query:
    query = Query(snapshot)
    if numbers is not None and len(numbers) == 1:
        query.where("run.experiment = ?", numbers[0])
    elif numbers is not None:
        query.where(f"run.experiment IN ({', '.join('?' * len(numbers)) or 'NULL'})", *numbers)
    # The sum keeps an index of the whole project away from the few runs of an experiment. It changes no value.
    query.where("run.project = ?" if numbers is None else "run.project + 0 = ?", project)
    if lifecycle is not None:
        query.where("run.lifecycle = ?", lifecycle.value)
    for comparison in comparisons:
        _filter_runs(query, project, comparison)
    return query


def _filter_runs(query: Query, project: int, comparison: Comparison) -> None:
    entity, key, operator, value = comparison.entity, comparison.key, comparison.operator, comparison.value
    if entity is Entity.ATTRIBUTE:
        if key == "status":
            states = [state.value for state in RunState if _has_status(state, operator, value)]
            query.where(f"run.state IN ({', '.join('?' * len(states)) or 'NULL'})", *states)
            return
        condition, values = query.compare(_RUN_COLUMNS[key], operator, value)
        query.where(condition, *values)
    elif entity is Entity.DATASET:
        condition, values = query.compare(f"input.{key}", operator, value)
        query.where(f"EXISTS (SELECT 1 FROM input WHERE input.run = run.pk AND {condition})", *values)
    elif entity is Entity.METRIC:
        number = find_key(query.snapshot, project, key)
        condition, values = query.compare("latest.value", operator, value)
        if operator == "!=":
            condition = f"({condition} OR latest.value IS NULL)"  # NULL stands for NaN, which differs from each number
        query.where(
            f"EXISTS (SELECT 1 FROM latest WHERE latest.run = run.pk AND latest.key = {number or 0} AND {condition})",
            *values,
        )
    else:
        _filter_by_attribute(query, find_key(query.snapshot, project, key), comparison)


def _filter_by_attribute(query: Query, number: int | None, comparison: Comparison) -> None:
    kind = PARAM if comparison.entity is Entity.PARAM else TAG
    rows = f"SELECT 1 FROM attribute WHERE attribute.run = run.pk AND kind = {kind} AND key = {number or 0}"
    if comparison.operator == "IS NULL":
        query.where(f"NOT EXISTS ({rows})")
    elif comparison.operator == "IS NOT NULL":
        query.where(f"EXISTS ({rows})")
    elif comparison.operator == "=" and isinstance(comparison.value, str):
        # The index holds the beginning of a value, and finds the few runs of a rare one among many. A list of the many
        # runs of a common one would take longer than to look at each run until the page is full.
        having = (
            f"SELECT attribute.run FROM attribute WHERE key = {number or 0} AND kind = {kind}"
            f" AND substr(value, 1, {INDEXED_LENGTH}) = ? AND value = ?"
        )
        wanted = comparison.value[:INDEXED_LENGTH], comparison.value
        if query.snapshot.execute(f"{having} LIMIT 1 OFFSET {MOST_LISTED}", wanted).fetchone() is None:
            query.where(f"run.pk IN ({having})", *wanted)
        else:
            query.where(f"EXISTS ({rows} AND value = ?)", comparison.value)
    else:
        condition, values = query.compare("attribute.value", comparison.operator, comparison.value)
        query.where(f"EXISTS ({rows} AND {condition})", *values)


def _order_runs(query: Query, project: int, orders: Sequence[Order], *, skips_missing: bool) -> bool:
    """Add the order. Returns False where a metric to order by is unknown."""
    for position, order in enumerate(orders):
        direction = "DESC" if order.is_descending else "ASC"
        if order.entity is Entity.ATTRIBUTE:
            column = _RUN_COLUMNS[order.key]
            if order.key == "end_time":
                query.orders.append(f"(CASE WHEN {column} IS NULL THEN 1 ELSE 0 END)")
            text = query.collation if order.key in {"run_name", "user_id", "artifact_uri"} else ""
            query.orders.append(f"{column}{text} {direction}")
            continue
        number = find_key(query.snapshot, project, order.key)
        if number is None:
            if skips_missing and position == 0:
                return False
            continue
        alias = f"o{position}"
        if order.entity is Entity.METRIC:
            if skips_missing and position == 0:
                query.source = f"latest {alias} CROSS JOIN run"  # SQLite keeps this order of loops, and so the index's
                query.where(f"{alias}.run = run.pk AND {alias}.key = {number} AND {alias}.value IS NOT NULL")
            else:
                query.joins.append(f"LEFT JOIN latest {alias} ON {alias}.run = run.pk AND {alias}.key = {number}")
                query.orders.append(
                    f"(CASE WHEN {alias}.run IS NULL THEN 2 WHEN {alias}.value IS NULL THEN 1 ELSE 0 END)"
                )
            query.orders.append(f"{alias}.value {direction}")
        else:
            kind = PARAM if order.entity is Entity.PARAM else TAG
            query.joins.append(
                f"LEFT JOIN attribute {alias}"
                f" ON {alias}.run = run.pk AND {alias}.kind = {kind} AND {alias}.key = {number}"
            )
            query.orders.append(f"(CASE WHEN {alias}.value IS NULL THEN 1 ELSE 0 END)")
            query.orders.append(f"{alias}.value{query.collation} {direction}")
    named = {order.key for order in orders if order.entity is Entity.ATTRIBUTE}
    query.orders.extend(["run.started_at DESC"] if "start_time" not in named else [])
    query.orders.extend(["run.id ASC"] if "run_id" not in named else [])
    return True


def _has_status(state: RunState, operator: str, value: object) -> bool:
    """Compare a state under both of its names: the hub's and MLflow's."""
    spellings = (state.value, MLFLOW_STATUS[state])
    if operator in {"LIKE", "ILIKE"}:
        return any(_is_like(spelling, str(value), ignores_case=operator == "ILIKE") for spelling in spellings)
    wanted = value if isinstance(value, tuple) else (value,)
    return any(spelling in wanted for spelling in spellings) == (operator in {"=", "IN"})


def _is_like(text: str, pattern: str, *, ignores_case: bool) -> bool:
    """Match as LIKE does, in time that is the product of both lengths: a regular expression can take minutes."""
    if ignores_case:
        text, pattern = text.lower(), pattern.lower()
    ends = {0}  # of the beginnings of the text that the pattern so far matches
    for sign in pattern:
        if sign == "%":
            ends = set(range(min(ends, default=len(text) + 1), len(text) + 1))
        else:
            ends = {end + 1 for end in ends if end < len(text) and sign in ("_", text[end])}
    return len(text) in ends


def _filter_experiments(query: Query, comparison: Comparison) -> None:
    if comparison.entity is Entity.ATTRIBUTE:
        column = _EXPERIMENT_COLUMNS[comparison.key]
        if comparison.key == "experiment_id":
            column = f"CAST({column} AS TEXT)"
        condition, values = query.compare(column, comparison.operator, comparison.value)
        query.where(condition, *values)
        return
    rows = "SELECT 1 FROM experiment_tag WHERE experiment_tag.experiment = experiment.id AND key = ?"
    if comparison.operator in {"IS NULL", "IS NOT NULL"}:
        negation = "NOT " if comparison.operator == "IS NULL" else ""
        query.where(f"{negation}EXISTS ({rows})", comparison.key)
    else:
        condition, values = query.compare("experiment_tag.value", comparison.operator, comparison.value)
        query.where(f"EXISTS ({rows} AND {condition})", comparison.key, *values)
