"""Limits of projects, as owners set them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..model.access import Actor, Right
from ..model.quotas import Limit, Quota
from ..model.refusal import Reason, Refusal
from ..store import quotas
from . import audit
from .people import authorized

if TYPE_CHECKING:
    from ..store.database import Database
    from ..store.transaction import ReadSnapshot, Transaction


class Quotas:
    """Reads and sets limits of projects."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def limits(self, actor: Actor, project: str) -> list[Limit]:
        """Return each quota of a project with its limit and use. Members may ask."""
        return await self._database.read(_limits, actor, project)

    async def set_limits(self, actor: Actor, project: str, limits: Mapping[Quota, int | None]) -> list[Limit]:
        """Set limits of a project. Only owners may.

        Runs and artifacts stay, also above a new limit. None is added until the use is below.

        Args:
            actor: Who asks.
            project: Name of the project.
            limits: New limits. None removes one. Others stay as they are.
        """
        actor.require(Right.OWN)
        return await self._database.write(_set_limits, actor, project, limits)


def _limits(snapshot: ReadSnapshot, actor: Actor, project: str) -> list[Limit]:
    return quotas.limits_of(snapshot, authorized(snapshot, actor, project, Right.READ))


def _set_limits(tx: Transaction, actor: Actor, project: str, limits: Mapping[Quota, int | None]) -> list[Limit]:
    number = authorized(tx, actor, project, Right.OWN)
    for quota, most in limits.items():
        if most is not None and not 0 <= most < 2**63:
            name = quota.value
            raise Refusal(Reason.INVALID, f"{name}={most}: no limit; use 0 to 9223372036854775807", field=name)
        quotas.set_limit(tx, number, quota, most)
    audit.record(tx, actor, "project.limit", project, {quota.value: most for quota, most in limits.items()})
    return quotas.limits_of(tx, number)
