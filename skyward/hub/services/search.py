"""Searches of experiments and runs."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from ..model.access import Actor, Right
from ..model.pages import Page, decode_token, encode_token
from ..model.refusal import Reason, Refusal
from ..model.runs import Experiment, Lifecycle, Run
from ..model.search import EXPERIMENTS, RUNS, parse_filter, parse_order
from ..store import search
from .calls import Service, experiment_number, require_no_run_token

PAGE = 1_000
LONGEST_PAGE = 50_000
ORDERS = 20


class View(StrEnum):
    """Things that a list shows."""

    ACTIVE = "active"
    DELETED = "deleted"
    ALL = "all"

    @property
    def lifecycle(self) -> Lifecycle | None:
        return None if self is View.ALL else Lifecycle(self.value)


class Searches(Service):
    """Calls that list."""

    async def search_experiments(
        self,
        actor: Actor,
        filter: str | None = None,  # noqa: A002 - the name that MLflow and `/v1` have
        order_by: Sequence[str] = (),
        limit: int = PAGE,
        page_token: str | None = None,
        view: View = View.ACTIVE,
    ) -> Page[Experiment]:
        """Return a page of the project's experiments.

        Args:
            actor: Who asks.
            filter: In the grammar of `model.search`, such as `name LIKE 'vis%' AND tags.team = 'red'`.
            order_by: Keys such as `name ASC`. By default the newest comes first.
            limit: Experiments on a page.
            page_token: Token of a page before.
            view: Whether active or deleted experiments are listed, or both.
        """
        actor.require(Right.READ)
        require_no_run_token(actor)
        comparisons, orders = parse_filter(filter, EXPERIMENTS), parse_order(few_orders(order_by), EXPERIMENTS)
        offset = offset_in(page_token)
        lifecycle = View(view).lifecycle
        found = await self.database.search(
            search.search_experiments, actor.project, comparisons, orders, lifecycle, legal_limit(limit) + 1, offset
        )
        return page_from(found, limit, offset)

    async def search_runs(
        self,
        actor: Actor,
        experiment_ids: Sequence[str] | None,
        filter: str | None = None,  # noqa: A002
        order_by: Sequence[str] = (),
        limit: int = PAGE,
        page_token: str | None = None,
        view: View = View.ACTIVE,
    ) -> Page[Run]:
        """Return a page of runs.

        Args:
            actor: Who asks.
            experiment_ids: Experiments to search. None means all of the project; unknown ones have no runs.
            filter: In the grammar of `model.search`, such as `metrics.loss < 0.1 AND params.lr = '0.1'`.
            order_by: Keys such as `metrics.loss ASC`. By default the run that started last comes first.
            limit: Runs on a page.
            page_token: Token of a page before.
            view: Whether active or deleted runs are listed, or both.
        """
        actor.require(Right.READ)
        require_no_run_token(actor)
        comparisons, orders = parse_filter(filter, RUNS), parse_order(few_orders(order_by), RUNS)
        numbers = None if experiment_ids is None else sorted({experiment_number(number) for number in experiment_ids})
        offset = offset_in(page_token)
        lifecycle = View(view).lifecycle
        found = await self.database.search(
            search.search_runs, actor.project, numbers, comparisons, orders, lifecycle, legal_limit(limit) + 1, offset
        )
        return page_from(found, limit, offset)


def few_orders(order_by: Sequence[str]) -> Sequence[str]:
    if len(order_by) > ORDERS:
        raise Refusal(Reason.INVALID, f"order_by: has {len(order_by)} keys; use at most {ORDERS}", field="order_by")
    return order_by


def legal_limit(limit: int) -> int:
    if not 1 <= limit <= LONGEST_PAGE:
        raise Refusal(
            Reason.INVALID, f"limit={limit}: must be between 1 and {LONGEST_PAGE}; choose one of these", field="limit"
        )
    return limit


def offset_in(page_token: str | None) -> int:
    if not page_token:
        return 0
    (offset,) = decode_token(page_token, (int,))
    if not 0 <= offset < 2**62:
        raise Refusal(Reason.INVALID, "page_token: is not a token of this list; take one it gave", field="page_token")
    return int(offset)


def page_from(found: list[Any], limit: int, offset: int) -> Page[Any]:
    if len(found) <= limit:
        return Page(found)
    return Page(found[:limit], encode_token([offset + limit]))
