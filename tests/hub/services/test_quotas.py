"""Limits of a project: what is beyond them is refused in words, and the count holds whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from skyward.hub.model.access import Actor
from skyward.hub.model.quotas import Quota
from skyward.hub.model.refusal import Reason, Refusal
from skyward.hub.services.hub import Hub
from skyward.hub.store import quotas, retention
from skyward.hub.store.database import Database
from skyward.hub.store.folder_blobs import FolderBlobs
from tests.hub.postgres import PostgresServer
from tests.hub.services.test_tracking import refused


@pytest.fixture
def hub(database: Database, tmp_path: Path) -> Hub:
    hub = Hub(database, FolderBlobs(tmp_path / "blobs"))
    asyncio.run(hub.people.prepare("owner"))
    return hub


@pytest.fixture
def owner(hub: Hub) -> Actor:
    return asyncio.run(hub.access.actor_named("owner", None))


async def pieces(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


def used(hub: Hub, owner: Actor) -> dict[str, tuple[int | None, int]]:
    limits = asyncio.run(hub.quotas.limits(owner, "default"))
    return {limit.quota.value: (limit.most, limit.used) for limit in limits}


def test_runs_beyond_a_limit_are_refused_until_it_is_raised_or_runs_are_gone(hub: Hub, owner: Actor) -> None:
    for name in ("a", "b"):
        asyncio.run(hub.tracking.create_run(owner, "0", run_id=name))
    assert used(hub, owner) == {"runs": (None, 2), "artifact_bytes": (None, 0)}
    asyncio.run(hub.quotas.set_limits(owner, "default", {Quota.RUNS: 3}))
    asyncio.run(hub.tracking.create_run(owner, "0", run_id="c"))
    asyncio.run(hub.tracking.create_run(owner, "0", run_id="c"))  # the same one again adds none
    refused(hub.tracking.create_run(owner, "0"), Reason.EXHAUSTED, r"runs=4: above this project's limit of 3; ask an")
    assert used(hub, owner)["runs"] == (3, 3)
    asyncio.run(hub.tracking.delete_run(owner, "a"))
    refused(
        hub.tracking.create_run(owner, "0"), Reason.EXHAUSTED, "runs=4"
    )  # the bin counts, because it can be restored
    blobs = hub.tracking.blobs
    assert blobs is not None
    retention.purge(hub.database, blobs, 2**60)
    assert used(hub, owner)["runs"] == (3, 2)
    asyncio.run(hub.tracking.create_run(owner, "0"))
    asyncio.run(hub.quotas.set_limits(owner, "default", {Quota.RUNS: 1}))  # what is there stays
    refused(hub.tracking.create_run(owner, "0"), Reason.EXHAUSTED, "runs=4: above this project's limit of 1")
    asyncio.run(hub.quotas.set_limits(owner, "default", {Quota.RUNS: None}))
    asyncio.run(hub.tracking.create_run(owner, "0"))
    assert list(hub.database.read_and_wait(quotas.miscounts)) == []
    entries = asyncio.run(hub.audit.page(owner))
    assert [entry.detail for entry in entries if entry.action == "project.limit"] == [
        '{"runs":null}', '{"runs":1}', '{"runs":3}',
    ]  # fmt: skip


def test_artifacts_beyond_a_limit_are_refused_before_they_are_kept(hub: Hub, owner: Actor, tmp_path: Path) -> None:
    asyncio.run(hub.tracking.create_run(owner, "0", run_id="a"))
    asyncio.run(hub.quotas.set_limits(owner, "default", {Quota.ARTIFACT_BYTES: 12}))

    async def put(key: str, *parts: bytes, size: int | None = None) -> None:
        await hub.tracking.put_artifact(owner, "a", key, pieces(*parts), size)

    asyncio.run(put("one", b"123456"))
    asyncio.run(put("copy", b"123456"))  # equal bytes count once
    words = "artifact_bytes=13: above this project's limit of 12"
    refused(put("two", b"abcd", b"efg"), Reason.EXHAUSTED, words)
    refused(put("two", b"abcd", b"efg", size=7), Reason.EXHAUSTED, words)
    refused(put("two", b"abcd", b"efg", b"h" * 100), Reason.EXHAUSTED, words)  # at the first piece that is too much
    kept = [path for path in (tmp_path / "blobs").rglob("*") if path.is_file()]
    assert len(kept) == 1
    assert used(hub, owner)["artifact_bytes"] == (12, 6)
    asyncio.run(put("three", b"abcdef"))
    assert used(hub, owner)["artifact_bytes"] == (12, 12)
    sha256 = asyncio.run(hub.tracking.artifact(owner, "a", "one")).sha256
    assert (
        asyncio.run(hub.tracking.put_blob(owner, "a", sha256, pieces(b"123456"))) == 6
    )  # it is known, so it needs no room
    assert list(hub.database.read_and_wait(quotas.miscounts)) == []


def test_servers_that_add_at_once_never_go_beyond_a_limit_that_is_set_meanwhile(
    postgres: PostgresServer, postgres_template: str
) -> None:
    url = postgres.new_database(postgres_template)
    servers = [Hub(Database(url), None) for _ in range(2)]
    asyncio.run(servers[0].people.prepare("owner"))
    owner = asyncio.run(servers[0].access.actor_named("owner", None))

    def add(hub: Hub) -> int:
        """Add runs until the limit is there."""
        for count in range(500):
            try:
                asyncio.run(hub.tracking.create_run(owner, "0"))
            except Refusal:
                return count
        raise AssertionError("the limit did not hold")

    with ThreadPoolExecutor(4) as pool:
        adding = [pool.submit(add, hub) for hub in servers * 2]
        asyncio.run(servers[1].quotas.set_limits(owner, "default", {Quota.RUNS: 60}))
        counts = [future.result(60) for future in adding]
    try:
        assert sum(counts) == 60
        assert used(servers[0], owner)["runs"] == (60, 60)
        assert list(servers[0].database.read_and_wait(quotas.miscounts)) == []
    finally:
        for server in servers:
            server.database.close()
        postgres.drop_database(url)
