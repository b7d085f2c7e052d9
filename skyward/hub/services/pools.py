"""Pools that record themselves: their machines, their bill, and their calls as a timeline."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..model.access import Actor, Right
from ..model.batches import Batch, BatchAnswer, Record, RefusedRecord
from ..model.pages import Page, decode_token, encode_token
from ..model.pools import PoolCall, PoolEvent, PoolHistory, PoolMachine, PoolNode, PoolRecord
from ..model.refusal import Reason, Refusal
from ..model.runs import RunState
from ..store import pools
from ..store.pools import PoolRow
from ..store.transaction import ReadSnapshot, Transaction
from .calls import Service, require_no_run_token

LOST_AFTER_MS = 60_000
MOST_EVENTS, MOST_CALLS = 5_000, 5_000
"""Events and calls that one answer has: the first events, and the last calls."""
_TEXT = 1_000
_MOST = 1e12


class Pools(Service):
    """Calls about pools."""

    async def accept_pool_batch(self, actor: Actor, pool_id: str, batch: Batch) -> BatchAnswer:
        """Accept records of a pool, each exactly once, and its heartbeat.

        The first record makes the pool: `["pool", {"name", "provider", "nodes", "started_at"}]`. The others are its
        events: `["e", milliseconds, kind, node or null, {...}]`.
        """
        actor.require(Right.WRITE)
        require_no_run_token(actor)
        if not re.fullmatch(r"[0-9a-f]{32}", pool_id):
            raise _no_pool(pool_id)
        if not re.fullmatch(r"[\w-]{1,64}", batch.client) or not 0 < batch.first < 2**60:
            raise Refusal(
                Reason.INVALID, "client: must be an id of at most 64 characters, and first at least 1; mend it"
            )
        return await self.database.write(self._accept, actor, pool_id, batch)

    async def pools(self, actor: Actor, limit: int, page_token: str | None) -> Page[PoolRecord]:
        """Return pools of the project, the newest first."""
        actor.require(Right.READ)
        require_no_run_token(actor)
        before = None if page_token is None else decode_token(page_token, (int, int))
        behind = None if before is None else (before[0], before[1])
        rows = await self.database.read(pools.pools_before, actor.project, limit + 1, behind)
        shown = rows[:limit]
        token = encode_token([shown[-1].started_at, shown[-1].pk]) if len(rows) > limit else None
        return Page([_record(row, self.clock()) for row in shown], token)

    async def pool(self, actor: Actor, pool_id: str) -> PoolHistory:
        """Return a pool with its nodes, machines, calls and events."""
        actor.require(Right.READ)
        require_no_run_token(actor)
        return await self.database.read(_history, actor, pool_id, self.clock())

    def _accept(self, tx: Transaction, actor: Actor, pool_id: str, batch: Batch) -> BatchAnswer:
        row = pools.find_pool(tx, actor.project, pool_id)
        if row is None:
            row = self._first_row(tx, actor, pool_id, batch)
        if row.client != batch.client:
            raise Refusal(
                Reason.CONFLICT, f"client={batch.client}: another process records this pool; begin one with a new id"
            )
        events, refused = [], []
        new = [] if batch.first > row.last + 1 else list(batch.records[row.last + 1 - batch.first :])
        for number, record in enumerate(new, row.last + 1):
            try:
                event = _event(number, record)
                if event is not None:
                    _apply(row, event[1], event[2], event[4], tx.now)
                    events.append(event)
            except (ValueError, TypeError, KeyError, IndexError, OverflowError, AttributeError) as error:
                refused.append(RefusedRecord(number, f"records[{number}]: not a record of a pool ({error}); mend it"))
        pools.add_events(tx, row.pk, events)
        row.last += len(new)
        row.heard_at = tx.now
        pools.update_pool(tx, row)
        return BatchAnswer(row.last, RunState.RUNNING, (), refused)

    def _first_row(self, tx: Transaction, actor: Actor, pool_id: str, batch: Batch) -> PoolRow:
        facts = batch.records[0][1] if batch.first == 1 and batch.records and len(batch.records[0]) > 1 else None
        if not isinstance(facts, Mapping) or batch.records[0][0] != "pool":
            raise _no_pool(pool_id)
        started_at = _integer(facts.get("started_at"), tx.now)
        row = PoolRow(
            id=pool_id,
            name=str(facts.get("name") or pool_id)[:_TEXT],
            provider=str(facts.get("provider") or "")[:_TEXT],
            user=actor.user,
            nodes=_integer(facts.get("nodes"), 0),
            started_at=started_at,
            heard_at=tx.now,
            cost_at=tx.now,
            client=batch.client,
        )
        if not pools.add_pool(tx, actor.project, row):  # of another project
            raise _no_pool(pool_id)
        self.on_change(tx, actor, "pool.create", f"pool/{pool_id}", {"name": row.name})
        return row


def _no_pool(pool_id: str) -> Refusal:
    return Refusal(
        Reason.MISSING, f"pool={pool_id[:80]!r}: no such pool in this project; see the list of pools", field="pool"
    )


def _event(number: int, record: Record) -> tuple[int, int, str, int | None, Mapping[str, Any]] | None:
    kind = record[0]
    if kind in ("pool", "h"):
        return None
    if kind != "e":
        raise ValueError(f"kind={str(kind)[:40]!r}: is unknown; send pool, e or h")
    _, at, name, node, body = record
    if not isinstance(name, str) or not isinstance(body, Mapping) or not 0 < len(name) <= 64 or "\0" in str(body):
        raise ValueError(f"kind={str(name)[:40]!r}: is no text with an object of fields; send both")
    return number, _integer(at), name, None if node is None else _integer(node), body


def _integer(value: Any, default: int | None = None) -> int:
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**62) < value < 2**62:
        raise Refusal(Reason.INVALID, f"records: {value!r:.40} is not a whole number of 64 bits; send one")
    return value


def _number(value: Any) -> float:
    number = float(value)
    if not abs(number) < _MOST:
        raise ValueError(f"usd={value!r:.40}: is not an amount; send a number")
    return number


# Effects of events on the pool's row ----------------------------------------------------------------------------------


def _apply(row: PoolRow, at: int, kind: str, body: Mapping[str, Any], now: int) -> None:
    if kind == "pool.closed":
        row.spent = _spent(row, now)
    effect = _EFFECTS.get(kind)
    if effect is not None:
        effect(row, at, body)
    if kind in {"cost", "pool.closed"}:
        row.cost_at = now  # The hub counts on by its own clock: one that differs by an hour must not be billed.


def _ready(row: PoolRow, at: int, _: Mapping[str, Any]) -> None:
    row.state, row.ready_at = "open", at


def _closed(row: PoolRow, at: int, body: Mapping[str, Any]) -> None:
    row.state, row.ended_at, row.reason = "closed", at, str(body.get("reason") or "")[:_TEXT]
    row.price = 0.0
    row.calls, row.failed = _integer(body.get("calls"), row.calls), _integer(body.get("failed"), row.failed)


def _cost(row: PoolRow, _at: int, body: Mapping[str, Any]) -> None:
    row.price, row.spent = _number(body["price_usd_per_hour"]), _number(body["spent_usd"])


def _lost(row: PoolRow, _at: int, _body: Mapping[str, Any]) -> None:
    row.lost += 1


def _replaced(row: PoolRow, _at: int, _body: Mapping[str, Any]) -> None:
    row.replaced += 1


def _called(row: PoolRow, _at: int, body: Mapping[str, Any]) -> None:
    count = _integer(body.get("calls"), 1)
    row.calls += count
    row.failed += 0 if body.get("ok") else count


_EFFECTS: Mapping[str, Callable[[PoolRow, int, Mapping[str, Any]], None]] = {
    "pool.ready": _ready,
    "pool.closed": _closed,
    "cost": _cost,
    "node.lost": _lost,
    "node.replaced": _replaced,
    pools.CALL: _called,
}


# Reading --------------------------------------------------------------------------------------------------------------


def _spent(row: PoolRow, now: int) -> float:
    return row.spent + row.price * max(0, now - row.cost_at) / 3_600_000


def _record(row: PoolRow, now: int) -> PoolRecord:
    is_lost = row.ended_at is None and now - row.heard_at > LOST_AFTER_MS
    return PoolRecord(
        id=row.id,
        name=row.name,
        provider=row.provider,
        user=row.user,
        state="lost" if is_lost else row.state,
        nodes=row.nodes,
        started_at=row.started_at,
        ready_at=row.ready_at,
        ended_at=row.ended_at,
        heard_at=row.heard_at,
        reason=row.reason,
        price_usd_per_hour=row.price,
        spent_usd=_spent(row, row.heard_at if is_lost else now),
        calls=row.calls,
        failed=row.failed,
        lost_nodes=row.lost,
        replaced_nodes=row.replaced,
    )


def _history(snapshot: ReadSnapshot, actor: Actor, pool_id: str, now: int) -> PoolHistory:
    row = pools.find_pool(snapshot, actor.project, pool_id)
    if row is None:
        raise _no_pool(pool_id)
    events = pools.events_of(snapshot, row.pk, MOST_EVENTS)
    return PoolHistory(
        pool=_record(row, now),
        nodes=_nodes(row, events),
        machines=_machines(events),
        calls=_calls(pools.calls_of(snapshot, row.pk, MOST_CALLS)),
        events=events,
    )


def _nodes(row: PoolRow, events: Sequence[PoolEvent]) -> list[PoolNode]:
    nodes = {number: PoolNode(node=number) for number in range(min(row.nodes, MOST_EVENTS))}
    for event in events:
        if event.node is None:
            continue
        node = nodes.setdefault(event.node, PoolNode(node=event.node))
        if event.kind == "node.ready":
            node.state, node.ready_at, node.address = "ready", event.at, str(event.detail.get("address") or "")
        elif event.kind == "node.lost":
            node.state, node.losses = "lost", node.losses + 1
        elif event.kind == "node.replaced":
            node.state, node.ready_at = "ready", event.at
    if row.ended_at is not None:
        for node in nodes.values():
            node.state = "ended"
    return [nodes[number] for number in sorted(nodes)]


def _machines(events: Sequence[PoolEvent]) -> list[PoolMachine]:
    machines: dict[str, PoolMachine] = {}
    for event in events:
        detail = event.detail
        if event.kind == "machine.launched":
            machines[str(detail.get("instance"))] = PoolMachine(
                node=event.node or 0,
                instance=str(detail.get("instance")),
                instance_type=str(detail.get("instance_type") or ""),
                price_usd_per_hour=_amount(detail.get("price_usd_per_hour")),
                is_spot=bool(detail.get("is_spot")),
                launched_at=event.at,
            )
        elif event.kind == "machine.terminated" and (machine := machines.get(str(detail.get("instance")))):
            machine.ended_at = event.at
    return list(machines.values())


def _calls(events: Sequence[PoolEvent]) -> list[PoolCall]:
    calls: list[PoolCall] = []
    running: dict[tuple[int | None, int], PoolCall] = {}
    for event in events:
        detail = event.detail
        key = (event.node, _count(detail.get("task")))
        call = running.pop(key, None)
        if call is None:
            lasted_ms = int(_amount(detail.get("seconds")) * 1000)
            call = PoolCall(
                task=_count(detail.get("task")),
                name=str(detail.get("name") or ""),
                node=event.node or 0,
                rank=None if detail.get("rank") is None else _count(detail["rank"]),
                calls=_count(detail.get("calls")) or 1,
                started_at=event.at - lasted_ms,
            )
            calls.append(call)
        if event.kind == pools.CALL:
            call.ended_at, call.ok = event.at, bool(detail.get("ok"))
        else:
            running[key] = call
    return calls


def _count(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _amount(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) and abs(value) < _MOST else 0.0
