"""Limits of projects and users, as owners set them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from ...model.access import Actor, Right, Role
from ...model.quotas import HolderKind, JobQuotaRecord, JobQuotaSpec, Limit, Quota
from ...model.refusal import Reason, Refusal
from ...store import attempts, identities, job_quotas, machine_sets, quotas
from .. import audit
from ..access import existing_account
from ..people import authorized
from .life import devices_of

if TYPE_CHECKING:
    from ...store.database import Database
    from ...store.transaction import ReadSnapshot, Transaction
    from ..bell import Bell


class Quotas:
    """Reads and sets limits of projects and users.

    Args:
        database: Where they are.
        bell: Rings when jobs may begin that had to wait.
    """

    def __init__(self, database: Database, bell: Bell) -> None:
        self._database = database
        self._bell = bell

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

    async def job_quotas(self, actor: Actor) -> Sequence[JobQuotaRecord]:
        """Return the quotas of jobs with their use: those of the actor and its project, or all for an owner.

        A project or user without a quota has none here, and no limits.
        """
        actor.require(Right.READ)
        return await self._database.read(self._job_quotas, actor)

    async def set_job_quota(self, actor: Actor, holder: HolderKind, name: str, spec: JobQuotaSpec) -> None:
        """Set what the jobs of a project or user may use; `JobQuotaSpec()` removes the quota. Only owners may.

        Running jobs go on, also above a new limit, except that spent money ends them. None begins until the use is
        below.
        """
        actor.require(Right.OWN)
        _check(holder, spec)
        await self._database.write(self._set_job_quota, actor, holder, name, spec)

    def _job_quotas(self, snapshot: ReadSnapshot, actor: Actor) -> list[JobQuotaRecord]:
        found = job_quotas.job_quotas(snapshot)
        if actor.role is not Role.OWNER:
            own = {("project", identities.name_of_project(snapshot, actor.project)), ("user", actor.user)}
            found = {key: spec for key, spec in found.items() if key in own}
        return list(_with_use(snapshot, found, self._database.clock())) if found else []

    def _set_job_quota(self, tx: Transaction, actor: Actor, holder: HolderKind, name: str, spec: JobQuotaSpec) -> None:
        if holder == "project":
            authorized(tx, actor, name, Right.OWN)
        else:
            existing_account(tx, name)
        job_quotas.set_job_quota(tx, holder, name, spec)
        audit.record(tx, actor, f"{holder}.job_quota", name, asdict(spec))
        tx.after_commit(self._bell.ring)


def _check(holder: HolderKind, spec: JobQuotaSpec) -> None:
    if not (math.isfinite(spec.weight) and spec.weight > 0):
        raise Refusal(Reason.INVALID, f"weight={spec.weight}: is no weight; use a number above 0", field="weight")
    if holder == "user" and (spec.weight != 1.0 or not spec.may_borrow):
        field = "weight" if spec.weight != 1.0 else "may_borrow"
        raise Refusal(Reason.INVALID, f"{field}: users have none; set that of a project", field=field)
    counts = {"nodes": spec.nodes, "jobs": spec.jobs, **{f"devices.{kind}": n for kind, n in spec.devices.items()}}
    money = {"usd_per_day": spec.usd_per_day, "usd_per_month": spec.usd_per_month}
    for field, value in {**counts, **money}.items():
        if value is not None and not 0 <= value < 1e9:
            raise Refusal(Reason.INVALID, f"{field}={value}: is no limit; use 0 to 1e9, or none", field=field)


def _with_use(
    snapshot: ReadSnapshot, found: Mapping[tuple[HolderKind, str], JobQuotaSpec], now: int
) -> Iterator[JobQuotaRecord]:
    numbers = {str(row[1]): int(row[0]) for row in identities.projects(snapshot, 1, None)}
    kinds = {record.spec.name: record.spec for record in machine_sets.machine_sets(snapshot)}
    active = attempts.active_attempts(snapshot)
    spending = job_quotas.JobSpending(snapshot, now)
    for (holder, name), spec in found.items():
        is_project = holder == "project"
        own = [
            (job, attempt)
            for job, attempt in active
            if (job.project == numbers.get(name) if is_project else job.owner == name)
        ]
        devices: Counter[str] = Counter()
        for job, attempt in own:
            if attempt.machines in kinds:
                kind, count = devices_of(kinds[attempt.machines], job, attempt)
                devices[kind] += count
        spent = spending.projects.get(numbers.get(name, 0)) if is_project else spending.users.get(name)
        today, month = spent or (0.0, 0.0)
        yield JobQuotaRecord(
            holder=holder,
            name=name,
            spec=spec,
            devices=devices,
            nodes=sum(len(attempt.node_numbers) for _, attempt in own),
            jobs=sum(bool(attempt.node_numbers) for _, attempt in own),
            today_usd=today,
            month_usd=month,
        )


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
