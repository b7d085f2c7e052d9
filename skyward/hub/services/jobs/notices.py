"""Notices of jobs: made in the transaction of the news, and delivered at least once by the server that leads."""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from ....errors import UsageError
from ...model.jobs import JobSpec
from ...model.notices import NoticeKind, NoticeRules, NoticeTarget, parse_targets
from ...model.refusal import Reason, Refusal
from ...store import deliveries, identities
from ...store.deliveries import DeliveryRow
from ...store.jobs import JobRow
from ...store.leases import NotHeld
from ...store.schema import ORGANIZATION
from ...store.secret_files import read_secret
from .webhook import NotDelivered, post_signed, run_program

if TYPE_CHECKING:
    from ...store.database import Database
    from ...store.transaction import Transaction
    from ..bell import Bell
    from ..leader import HubLeader

PAUSES_S = (5.0, 30.0, 120.0, 600.0, 1800.0, 7200.0, 21_600.0, 43_200.0)
"""Pauses between two tries of a delivery: eight retries within a day."""
BATCH = 16
"""Deliveries that are tried at once."""
_LOOK_S = 1.0

_log = logging.getLogger(__name__)


def check_notify(spec: JobSpec, rules: NoticeRules) -> None:
    """Check the targets of a job that is submitted.

    Raises:
        Refusal: One is illegal, or the operator does not allow it.
    """
    try:
        for target in parse_targets(list(spec.notify)):
            rules.check(target)
    except UsageError as error:
        raise Refusal(Reason.INVALID, str(error), field=error.field or "notify") from None


def notify(tx: Transaction, job: JobRow, kind: NoticeKind, text: str) -> None:
    """Tell the targets of a job what happened, once the transaction is committed.

    Args:
        tx: Transaction of the change.
        job: The job, as it is now.
        kind: Kind of the news.
        text: The news in words.
    """
    spec = job.decoded_spec()
    if not spec.notify:
        return
    for target in parse_targets(list(spec.notify)):
        if kind in target.on:
            message_id = f"msg_{uuid.uuid4().hex}"
            row = DeliveryRow(
                job=job.pk,
                id=message_id,
                kind=kind,
                target=json.dumps(_fields_of(target)),
                body=json.dumps(_message(tx, job, kind, text)),
                created_at=tx.now,
                next_at=tx.now,
            )
            deliveries.add_delivery(tx, row)


def notify_waiting(tx: Transaction, job: JobRow) -> None:
    """Tell the targets of a job that it still waits: once, until it has run. The caller writes the row."""
    waited_s = (tx.now - job.created_at) / 1000
    notify(tx, job, NoticeKind.WAITING, f"has waited for {waited_s:.0f} s" + (f": {job.why}" if job.why else ""))
    job.tell_at = None


class Courier:
    """Sender of the deliveries, while its server leads.

    A server that dies between sending and noting it sends once more: the id of a message is that of its first try.

    Args:
        database: Where the deliveries are.
        leader: The candidate for the lead.
        bell: Rings when a job has changed.
        rules: Receivers that the operator allows now, whatever was allowed when a job was submitted.
        secrets: Folder with the secrets of each project; None for none.
    """

    def __init__(
        self, database: Database, leader: HubLeader, bell: Bell, rules: NoticeRules, secrets: Path | None
    ) -> None:
        self._database, self._leader, self._bell = database, leader, bell
        self._rules, self._secrets = rules, secrets

    async def run(self) -> None:
        """Deliver what is due, until the hub stops."""
        while not self._bell.is_closed:
            seen = self._bell.count
            try:
                if self._leader.is_leading:
                    await self.deliver_due()
            except NotHeld:
                _log.info("notices: another server leads now")
            except Exception:
                # A database that is away for a while must not end the courier for good.
                _log.exception("notices: a delivery failed; the next look is due in %g s", _LOOK_S)
            await self._bell.wait(seen, _LOOK_S)

    async def deliver_due(self) -> int:
        """Try the deliveries whose time has come, and return their number.

        Raises:
            NotHeld: Another server has taken the lead meanwhile.
        """
        due = await self._database.read(deliveries.due_deliveries, self._database.clock(), BATCH)
        await asyncio.gather(*(self._try(row, project) for row, project in due))
        return len(due)

    async def _try(self, row: DeliveryRow, project: str) -> None:
        row.tries += 1
        try:
            await self._send(row, project)
        except (NotDelivered, UsageError) as error:
            row.error = str(error)[:500]
            is_last = row.tries > len(PAUSES_S) or (isinstance(error, NotDelivered) and error.is_final)
            row.next_at = None if is_last else self._database.clock() + int(PAUSES_S[row.tries - 1] * 1000)
            if is_last:
                _log.warning("notice %s to %s: given up: %s", row.id, project, error)
        else:
            row.error, row.next_at, row.delivered_at = "", None, self._database.clock()
        await self._leader.write(deliveries.note_try, row)

    async def _send(self, row: DeliveryRow, project: str) -> None:
        (target,) = parse_targets([json.loads(row.target)])
        self._rules.check(target)
        if target.command:
            await run_program(target.command, row.id, row.body)
            return
        if self._secrets is None:
            raise UsageError(f"notify.secret={target.secret}: this hub has no secrets; set notify.secrets")
        secret = await asyncio.to_thread(read_secret, self._secrets, project, target.secret)
        await post_signed(target.url, row.id, self._database.clock() // 1000, row.body, secret)


def _fields_of(target: NoticeTarget) -> dict[str, object]:
    return {"url": target.url, "secret": target.secret, "command": list(target.command), "on": list(target.on)}


def _message(tx: Transaction, job: JobRow, kind: NoticeKind, text: str) -> dict[str, object]:
    names = {row[0]: row[1] for row in identities.projects(tx, ORGANIZATION, None)}
    return {
        "type": f"skyward.hub.job.{kind}",
        "timestamp": datetime.fromtimestamp(tx.now / 1000, UTC).isoformat(timespec="milliseconds"),
        "data": {
            "job": job.id,
            "name": job.name,
            "project": names.get(job.project, ""),
            "user": job.owner,
            "status": job.state,
            "attempt": job.attempts,
            "cost_usd": job.cost,
            "text": text,
        },
    }
