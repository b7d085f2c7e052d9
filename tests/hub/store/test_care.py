"""Check, retention, backup and restore of a hub's data, on SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
import io
import tarfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import select

from skyward.errors import UsageError
from skyward.hub.model.access import Actor
from skyward.hub.model.registry import ModelMetric
from skyward.hub.services.hub import Hub
from skyward.hub.store import identities
from skyward.hub.store.backup import BackupContent, backup, restore
from skyward.hub.store.check import check_hub
from skyward.hub.store.database import Database
from skyward.hub.store.folder_blobs import FolderBlobs
from skyward.hub.store.registry_tables import metadata
from skyward.hub.store.retention import Purged, find_garbage, purge
from skyward.hub.store.schema import HEAD
from skyward.hub.store.snapshots import snapshot_of
from skyward.hub.store.transaction import ReadSnapshot, Transaction
from tests.hub.postgres import PostgresServer
from tests.hub.services.hubs import ADMIN, columns
from tests.hub.store.released import unpack_hub

FOREVER = 2**50


async def stream(data: bytes) -> AsyncIterator[bytes]:
    yield data


def fill(url: str, folder: Path) -> None:
    """Make a hub with a user, two runs, points, and an artifact in each run."""
    hub = Hub(Database(url), FolderBlobs(folder))

    async def log() -> None:
        await hub.people.prepare("owner")
        owner = await hub.access.actor_named("owner", None)
        await hub.people.create_token(owner, "laptop")
        for name in ("kept", "gone"):
            await log_run(hub, owner, name)
        await hub.tracking.delete_run(ADMIN, "gone")
        await hub.close()

    asyncio.run(log())


async def log_run(hub: Hub, owner: Actor, name: str) -> None:
    await hub.tracking.create_run(owner, "0", run_id=name)
    points = columns(*(("loss", step, step, 1.0 / (step + 1)) for step in range(500)))
    await hub.tracking.log_points(owner, name, points)
    await hub.tracking.put_artifact(owner, name, "notes.txt", stream(name.encode()))


def figures(url: str) -> tuple[list[str], list[float]]:
    """Return the findings of a check, and the points of the run that is kept."""
    database = Database(url)
    hub = Hub(database, None)
    history = asyncio.run(hub.tracking.history(ADMIN, "kept", "loss"))
    asyncio.run(hub.close())
    return [str(run) for run in history.steps], list(history.values)


def test_whole_hub_has_no_findings_and_each_fault_has_one(database_url: str, tmp_path: Path) -> None:
    blobs = FolderBlobs(tmp_path / "blobs")
    fill(database_url, tmp_path / "blobs")
    with snapshot_of(database_url) as snapshot:
        assert list(check_hub(snapshot, blobs)) == []
        content = snapshot.execute("SELECT sha256 FROM blob ORDER BY sha256").fetchall()
    blobs.path(content[0][0]).write_bytes(b"other")
    blobs.delete(content[1][0])
    database = Database(database_url)
    for fault in (
        "UPDATE audit SET actor = 'eve' WHERE id = 2",
        "UPDATE tail SET points = points + 1",
        "UPDATE chunk SET first_at = first_at - 1",
        "UPDATE artifact SET size = 1 WHERE run = 1",
        "INSERT INTO artifact (run, key, size, sha256, created_at) VALUES (99, 'a', 1, 'b', 1)",
        "INSERT INTO artifact (run, key, size, sha256, created_at) VALUES (-99, 'a', 1, 'b', 1)",
    ):
        database.write_and_wait(Transaction.execute, fault)
    database.close()
    with snapshot_of(database_url) as snapshot:
        findings = list(check_hub(snapshot, blobs))
    kinds = [finding.kind for finding in findings]
    assert kinds[:6] == ["audit", "blob", "blob", "artifact", "run", "logged_model"]
    assert set(kinds[6:]) <= {"tail", "chunk"}
    assert kinds[6:]


def test_runs_deleted_long_ago_are_gone_with_their_bytes(database_url: str, tmp_path: Path) -> None:
    blobs = FolderBlobs(tmp_path / "blobs")
    fill(database_url, tmp_path / "blobs")
    database = Database(database_url)
    nothing = Purged(runs=0, logged_models=0, experiments=0, projects=0, blobs=0, bytes=0)
    assert purge(database, blobs, 1) == nothing
    assert database.read_and_wait(find_garbage, FOREVER).runs == 1
    assert purge(database, blobs, FOREVER) == replace(nothing, runs=1, blobs=1, bytes=4)
    left = database.read_and_wait(lambda snapshot: snapshot.execute("SELECT id FROM run").fetchall())
    database.close()
    assert [row[0] for row in left] == ["kept"]
    with snapshot_of(database_url) as snapshot:
        assert list(check_hub(snapshot, blobs)) == []


def ids_of_logged_models(snapshot: ReadSnapshot) -> list[str]:
    return [row[0] for row in snapshot.execute("SELECT id FROM logged_model")]


def count_rows(snapshot: ReadSnapshot, table: str) -> int:
    return int(snapshot.execute(f"SELECT count(*) FROM {table}").fetchone()[0])


def test_logged_models_go_with_their_run_or_after_their_own_time(database_url: str, tmp_path: Path) -> None:
    blobs = FolderBlobs(tmp_path / "blobs")
    fill(database_url, tmp_path / "blobs")
    database = Database(database_url)
    hub = Hub(database, blobs)

    async def log() -> list[str]:
        await hub.tracking.restore_run(ADMIN, "gone")
        made = []
        for name, run in (("of-run", "gone"), ("kept", "kept"), ("binned", "kept"), ("alone", None)):
            model = await hub.registry.create_logged_model(
                ADMIN, "0", name=name, run_id=run, params={"depth": "1"}, tags={"size": "s"}
            )
            metric = ModelMetric("accuracy", 0.5, 1, 1, "kept", model.id)
            await hub.registry.log_model_metrics(ADMIN, [metric])
            await hub.tracking.put_artifact(ADMIN, f"models/{model.id}", "weights", stream(name.encode()))
            made.append(model.id)
        await hub.registry.delete_logged_model(ADMIN, made[2])
        await hub.tracking.delete_run(ADMIN, "gone")
        return made

    made = asyncio.run(log())
    with snapshot_of(database_url) as snapshot:
        assert list(check_hub(snapshot, blobs)) == []
    assert purge(database, blobs, 1).logged_models == 0
    assert database.read_and_wait(find_garbage, FOREVER).logged_models == 2
    purged = purge(database, blobs, FOREVER)
    assert (purged.runs, purged.logged_models, purged.blobs) == (1, 2, 3)
    left = database.read_and_wait(ids_of_logged_models)
    for table, count in (("logged_model_attribute", 4), ("logged_model_metric", 2), ("artifact", 3)):
        assert database.read_and_wait(count_rows, table) == count
    asyncio.run(hub.close())
    assert sorted(left) == sorted([made[1], made[3]])
    with snapshot_of(database_url) as snapshot:
        assert list(check_hub(snapshot, blobs)) == []


def test_files_that_a_version_of_a_model_names_stay_until_the_version_goes(database_url: str, tmp_path: Path) -> None:
    database, blobs = Database(database_url), FolderBlobs(tmp_path / "blobs")
    hub = Hub(database, blobs)

    async def make() -> list[str]:
        number = (await hub.tracking.create_experiment(ADMIN, "gone")).id
        for run in ("named", "maker", "by-url", "unnamed"):
            await hub.tracking.create_run(ADMIN, number, run_id=run)
            await hub.tracking.put_artifact(ADMIN, run, "model/weights", stream(run.encode()))
        logged = [await hub.registry.create_logged_model(ADMIN, number, run_id=run) for run in ("maker", None, "named")]
        for model in logged:
            await hub.tracking.put_artifact(ADMIN, f"models/{model.id}", "weights", stream(model.id.encode()))
        await hub.registry.create_model(ADMIN, "net")
        await hub.registry.create_version(ADMIN, "net", "runs:/named/model", run_id="named")
        for model in logged[:2]:
            await hub.registry.create_version(ADMIN, "net", f"models:/{model.id}", model_id=model.id)
        await hub.registry.create_version(ADMIN, "net", "https://hub.lab/v1/runs/by-url/artifacts/model")
        await hub.tracking.delete_experiment(ADMIN, number)
        return [model.id for model in logged]

    logged = asyncio.run(make())
    kept = ["named", "maker", "by-url", *(f"models/{model_id}" for model_id in logged[:2])]
    for _ in range(2):
        garbage = database.read_and_wait(find_garbage, FOREVER)
        purged = purge(database, blobs, FOREVER)
        assert (garbage.runs, garbage.logged_models, garbage.experiments) == (purged.runs, purged.logged_models, 0)

        async def look() -> list[bytes]:
            keys = [*["model/weights"] * 3, "weights", "weights"]
            opened = [await hub.tracking.open_artifact(ADMIN, *place) for place in zip(kept, keys, strict=True)]
            return [b"".join(pieces) for _, pieces in opened]

        assert asyncio.run(look()) == [name.removeprefix("models/").encode() for name in kept]
    assert database.read_and_wait(count_rows, "run") == 3
    for version in (1, 2, 3, 4):
        asyncio.run(hub.registry.delete_version(ADMIN, "net", version))
    purged = purge(database, blobs, FOREVER)
    assert (purged.runs, purged.logged_models, purged.experiments, purged.blobs) == (3, 3, 1, 6)
    asyncio.run(hub.close())


def test_models_of_a_purged_experiment_go_with_it(database_url: str, tmp_path: Path) -> None:
    database = Database(database_url)
    hub = Hub(database, None)

    async def log() -> None:
        number = (await hub.tracking.create_experiment(ADMIN, "gone")).id
        await hub.registry.create_logged_model(ADMIN, number)
        await hub.tracking.delete_experiment(ADMIN, number)

    asyncio.run(log())
    expected = Purged(runs=0, logged_models=1, experiments=1, projects=0, blobs=0, bytes=0)
    assert database.read_and_wait(find_garbage, FOREVER) == expected
    assert purge(database, FolderBlobs(tmp_path / "blobs"), FOREVER) == expected
    asyncio.run(hub.close())


@pytest.mark.parametrize("target", ["sqlite", "postgresql"])
def test_project_deleted_long_ago_goes_with_all_that_it_held(
    tmp_path: Path, target: str, request: pytest.FixtureRequest
) -> None:
    data = unpack_hub(HEAD, tmp_path)  # it has rows in each table
    url, blobs = f"sqlite:///{data}/hub.db", FolderBlobs(data / "blobs")
    if target == "postgresql":
        backup(url, blobs, tmp_path / "b")
        postgres: PostgresServer = request.getfixturevalue("postgres")
        url = postgres.new_database()
        restore(url, blobs, tmp_path / "b")
    database = Database(url)
    database.write_and_wait(identities.delete_project, 1)
    assert purge(database, blobs, 1).projects == 0
    held = {table: database.read_and_wait(count_rows, table) for table in ("run", "logged_model", "experiment", "blob")}
    garbage = database.read_and_wait(find_garbage, FOREVER)
    purged = purge(database, blobs, FOREVER)
    database.close()
    assert (purged.runs, purged.logged_models, purged.experiments, purged.blobs) == tuple(held.values())
    assert (garbage.runs, garbage.logged_models, garbage.experiments, garbage.projects) == (*list(held.values())[:3], 1)
    left = {name for name, rows in rows_of(url).items() if rows}
    of_the_hub = {"organization", "account", "audit", "lease", "machine_set"}
    assert left <= {*of_the_hub, "project", "membership", "quota", "token", "event"}
    assert [row[2] for row in rows_of(url)["project"]] == ["vision"]
    assert not [path for path in (data / "blobs").rglob("*") if path.is_file()]
    with snapshot_of(url) as snapshot:
        assert list(check_hub(snapshot, blobs)) == []


def test_retention_beside_an_sqlite_server_is_refused_with_its_pid(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/hub.db"
    server = Database(url)
    with pytest.raises(UsageError, match="stop that process"):
        Database(url)
    server.close()


@pytest.mark.parametrize("target", ["sqlite", "postgresql"])
def test_backup_comes_back_also_in_the_other_database(
    database_url: str, tmp_path: Path, target: str, request: pytest.FixtureRequest
) -> None:
    fill(database_url, tmp_path / "blobs")
    server = Database(database_url)  # as a server would have it open
    made = backup(database_url, FolderBlobs(tmp_path / "blobs"), tmp_path / "b")
    server.close()
    url = f"sqlite:///{tmp_path}/new/hub.db"
    if target == "postgresql":
        postgres: PostgresServer = request.getfixturevalue("postgres")
        url = postgres.new_database()
    blobs = FolderBlobs(tmp_path / "new" / "blobs")
    assert restore(url, blobs, tmp_path / "b") == made
    assert (made.rows["run"], made.blobs) == (2, 2)
    assert figures(url) == figures(database_url)
    with snapshot_of(url) as snapshot:
        assert list(check_hub(snapshot, blobs)) == []
    hub = Hub(Database(url), blobs)
    asyncio.run(hub.tracking.create_run(ADMIN, "0", run_id="later"))  # its number is free
    asyncio.run(hub.close())
    with pytest.raises(UsageError, match="empty hub"):
        restore(url, blobs, tmp_path / "b")


def rows_of(url: str) -> dict[str, list[tuple[object, ...]]]:
    """Return all rows of all tables."""
    with snapshot_of(url) as snapshot:
        return {
            table.name: [tuple(row) for row in snapshot.connection.execute(select(table).order_by(*table.primary_key))]
            for table in metadata.sorted_tables
        }


@pytest.mark.parametrize("target", ["sqlite", "postgresql"])
def test_backup_carries_each_row_of_each_table(tmp_path: Path, target: str, request: pytest.FixtureRequest) -> None:
    data = unpack_hub(HEAD, tmp_path)
    made = backup(f"sqlite:///{data}/hub.db", FolderBlobs(data / "blobs"), tmp_path / "b")
    url = f"sqlite:///{tmp_path}/new/hub.db"
    if target == "postgresql":
        postgres: PostgresServer = request.getfixturevalue("postgres")
        url = postgres.new_database()
    assert restore(url, FolderBlobs(tmp_path / "new" / "blobs"), tmp_path / "b") == made
    before, after = rows_of(f"sqlite:///{data}/hub.db"), rows_of(url)
    assert {name: len(rows) for name, rows in before.items()} == made.rows
    assert all(made.rows.values())
    assert before == after
    old, new = data / "blobs", tmp_path / "new" / "blobs"
    assert {path.relative_to(old): path.read_bytes() for path in old.rglob("*") if path.is_file()} == {
        path.relative_to(new): path.read_bytes() for path in new.rglob("*") if path.is_file()
    }


@pytest.fixture
def backed_up(tmp_path: Path) -> tuple[Path, BackupContent]:
    url = f"sqlite:///{tmp_path}/hub.db"
    fill(url, tmp_path / "blobs")
    return tmp_path / "b", backup(url, FolderBlobs(tmp_path / "blobs"), tmp_path / "b")


def refuse(path: Path, tmp_path: Path, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        restore(f"sqlite:///{tmp_path}/fresh/hub.db", FolderBlobs(tmp_path / "fresh" / "blobs"), path)
    left = [file for file in (tmp_path / "fresh" / "blobs").rglob("*") if file.is_file()]
    assert not left


def test_file_that_was_cut_or_changed_is_refused(backed_up: tuple[Path, BackupContent], tmp_path: Path) -> None:
    data = backed_up[0].read_bytes()
    for size in (0, 10, len(data) // 2, len(data) - 1):
        (tmp_path / "cut").write_bytes(data[:size])
        refuse(tmp_path / "cut", tmp_path, "is cut")
    (tmp_path / "changed").write_bytes(data[:2000] + bytes([data[2000] ^ 1]) + data[2001:])
    refuse(tmp_path / "changed", tmp_path, "differs from its digest")
    refuse(tmp_path / "missing", tmp_path, "cannot be read")


def sealed(path: Path, members: list[tuple[tarfile.TarInfo, bytes]]) -> Path:
    """Write an archive with a right digest, as an attacker can."""
    import hashlib

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for member, data in members:
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    data = buffer.getvalue()
    path.write_bytes(data + f"\nskyward-hub-backup sha256={hashlib.sha256(data).hexdigest()}\n".encode())
    return path


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil", "blobs/../../evil", "tables/nothing.jsonl.zst", "hub.db"])
def test_names_in_an_archive_lead_nowhere(tmp_path: Path, name: str) -> None:
    path = sealed(tmp_path / "evil-archive", [(tarfile.TarInfo(name), b"x")])
    refuse(path, tmp_path, "is damaged")
    assert not (tmp_path / "evil").exists()
    assert not Path("/tmp/evil").exists()


def test_links_and_foreign_bytes_in_an_archive_are_refused(tmp_path: Path) -> None:
    link = tarfile.TarInfo(f"blobs/{'0' * 64}")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    refuse(sealed(tmp_path / "link", [(link, b"")]), tmp_path, "is damaged")
    refuse(sealed(tmp_path / "bytes", [(tarfile.TarInfo(f"blobs/{'0' * 64}"), b"x")]), tmp_path, "is damaged")


def test_bomb_in_an_archive_is_refused_before_it_fills_memory(tmp_path: Path) -> None:
    import resource

    import zstandard

    writer = zstandard.ZstdCompressor().compressobj()
    packed = b"".join(writer.compress(b'["' + b"0" * (1 << 24)) for _ in range(64)) + writer.flush()
    assert len(packed) < 1 << 20  # a gigabyte in less than a megabyte
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refuse(sealed(tmp_path / "bomb", [(tarfile.TarInfo("tables/run.jsonl.zst"), packed)]), tmp_path, "is damaged")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB
