"""Handlers of pools."""

from __future__ import annotations

from ...model.batches import Batch
from ...model.pools import PoolRecord
from ..routing import Call
from . import pool_wire, wire


async def search(call: Call, request: pool_wire.PoolsQuery) -> pool_wire.PoolsOut:
    page = await call.hub.pools.pools(call.actor, request.limit, request.page_token)
    return pool_wire.PoolsOut([_pool(record) for record in page.items], page.next_token)


async def get(call: Call, _request: wire.Nothing) -> pool_wire.PoolHistoryOut:
    history = await call.hub.pools.pool(call.actor, call.path["id"])
    return pool_wire.PoolHistoryOut(
        pool=_pool(history.pool),
        nodes=[
            pool_wire.PoolNodeOut(node.node, node.state, node.address, node.ready_at, node.losses)
            for node in history.nodes
        ],
        machines=[
            pool_wire.PoolMachineOut(
                *(machine.node, machine.instance, machine.instance_type, machine.price_usd_per_hour),
                *(machine.is_spot, machine.launched_at, machine.ended_at),
            )
            for machine in history.machines
        ],
        calls=[
            pool_wire.PoolCallOut(
                *(timed.task, timed.name, timed.node, timed.rank, timed.calls),
                *(timed.started_at, timed.ended_at, timed.ok),
            )
            for timed in history.calls
        ],
        events=[
            pool_wire.PoolEventOut(event.number, event.at, event.kind, event.node, dict(event.detail))
            for event in history.events
        ],
    )


async def accept_batch(call: Call, request: wire.BatchIn) -> wire.BatchOut:
    batch = Batch(request.client, request.first, request.records)
    answer = await call.hub.pools.accept_pool_batch(call.actor, call.path["id"], batch)
    refused = [wire.RefusedRecordOut(record.number, record.message) for record in answer.refused]
    return wire.BatchOut(answer.accepted, answer.state.value, [], refused)


def _pool(record: PoolRecord) -> pool_wire.PoolOut:
    return pool_wire.PoolOut(**{name: getattr(record, name) for name in pool_wire.PoolOut.__struct_fields__})
