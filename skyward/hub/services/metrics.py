"""Points of metrics: logged and read."""

from __future__ import annotations

from collections.abc import Mapping

from ..model.access import Actor, Right
from ..model.names import PARAM_LENGTH, TAG_LENGTH, check_key, cut_values
from ..model.pages import decode_token, encode_token
from ..model.points import History, PointColumns
from ..model.refusal import Reason, Refusal
from ..store import points
from ..store.history import read_history
from ..store.runs import RunRow
from ..store.transaction import ReadSnapshot, Transaction
from .calls import need_active_run, need_run
from .runs import Runs


class Metrics(Runs):
    """Calls about points."""

    async def log_points(self, actor: Actor, run_id: str, columns: PointColumns) -> None:
        """Log points of any metrics of a run. Equal points count once."""
        actor.require(Right.WRITE)
        check_points(columns)
        await self.database.write_to_run((actor.project, run_id), self._log_points, actor, run_id, columns)

    async def log_batch(
        self, actor: Actor, run_id: str, columns: PointColumns, params: Mapping[str, str], tags: Mapping[str, str]
    ) -> None:
        """Log points, parameters and tags in one transaction: all of them, or none."""
        actor.require(Right.WRITE)
        check_points(columns)
        legal_params = cut_values("params", params, PARAM_LENGTH) if params else {}
        legal_tags = cut_values("tags", tags, TAG_LENGTH) if tags else {}
        run = (actor.project, run_id)
        await self.database.write_to_run(run, self._log_batch, actor, run_id, columns, legal_params, legal_tags)

    async def history(
        self,
        actor: Actor,
        run_id: str,
        key: str,
        *,
        limit: int | None = None,
        page_token: str | None = None,
        start: int | None = None,
        end: int | None = None,
        at_most: int | None = None,
    ) -> History:
        """Read the points of one metric, sorted by (timestamp, step, value), without duplicates.

        Args:
            actor: Who asks.
            run_id: A run, also one in the bin.
            key: Name of the metric. One that the run lacks has no points.
            limit: Points on a page, at least 1. The answer's `next_token` leads to the next page.
            page_token: That token.
            start: Least step, inclusive.
            end: Greatest step, inclusive.
            at_most: Thin the answer to this number of points: the least and greatest of each stretch.
        """
        actor.require(Right.READ)
        for field, number, least in (("limit", limit, 1), ("at_most", at_most, 4)):
            if number is not None and number < least:
                raise Refusal(Reason.INVALID, f"{field}={number}: must be at least {least}; raise it", field=field)
        after = None
        if page_token:
            at, step, value = decode_token(page_token, (int, int, float))
            after = (at, step, value)
        return await self.database.read(_read, actor, run_id, key, limit, after, start, end, at_most)

    def _log_points(self, tx: Transaction, actor: Actor, run_id: str, columns: PointColumns) -> None:
        self.apply_points(tx, actor, need_active_run(tx, actor, run_id), columns)

    def _log_batch(
        self,
        tx: Transaction,
        actor: Actor,
        run_id: str,
        columns: PointColumns,
        params: Mapping[str, str],
        tags: Mapping[str, str],
    ) -> None:
        row = need_active_run(tx, actor, run_id)
        self.apply_params(tx, actor, row, params)
        self.apply_tags(tx, actor, row, tags)
        self.apply_points(tx, actor, row, columns)

    def apply_points(self, tx: Transaction, actor: Actor, row: RunRow, columns: PointColumns) -> None:
        """Log points within a transaction. The first ones of a run are recorded as a change, later ones are not."""
        if not len(columns):
            return
        if not points.has_points(tx, row.pk):
            self.on_change(tx, actor, "run.points", f"run/{row.id}", {})
        points.append(tx, actor.project, row.pk, columns)


def check_points(columns: PointColumns) -> None:
    """Check the names of metrics, and that columns have one length."""
    for key in set(columns.keys):
        check_key("metrics.key", key)
    lengths = {len(columns.keys), len(columns.steps), len(columns.timestamps), len(columns.values)}
    if len(lengths) != 1:
        raise Refusal(Reason.INVALID, "metrics: columns differ in length; give each point all fields", field="metrics")


def _read(
    snapshot: ReadSnapshot,
    actor: Actor,
    run_id: str,
    key: str,
    limit: int | None,
    after: tuple[int, int, float] | None,
    start: int | None,
    end: int | None,
    at_most: int | None,
) -> History:
    row = need_run(snapshot, actor, run_id)
    history, position = read_history(
        snapshot, actor.project, row.pk, key, start=start, end=end, after=after, limit=limit, at_most=at_most
    )
    history.next_token = None if position is None else encode_token(position)
    return history
