"""Commits that many share, and failures of one among them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from array import array
from pathlib import Path

import pytest

from skyward.errors import UsageError
from skyward.hub.model.points import PointColumns
from skyward.hub.model.refusal import Reason, Refusal
from skyward.hub.store import points
from skyward.hub.store.database import Database
from skyward.hub.store.transaction import ReadSnapshot, Transaction
from tests.hub.postgres import PostgresServer


def add(tx: Transaction, name: str, fails: bool = False) -> str:
    tx.execute("INSERT INTO project (organization, name, created_at) VALUES (1, ?, ?)", (name, tx.now))
    if fails:
        raise Refusal(Reason.INVALID, "name: refused; choose another")
    return name


def names(snapshot: ReadSnapshot) -> list[str]:
    return [row[0] for row in snapshot.execute("SELECT name FROM project ORDER BY name")]


def test_operations_that_wait_together_are_all_committed(database: Database) -> None:
    async def run() -> list[str]:
        await asyncio.gather(*(database.write(add, f"p{number:02}") for number in range(40)))
        return await database.read(names)

    assert asyncio.run(run()) == ["default", *(f"p{number:02}" for number in range(40))]


def test_an_operation_that_raises_is_undone_alone(database: Database) -> None:
    async def run() -> list[str]:
        writes = (database.write(add, f"p{number}", fails=number % 2 == 0) for number in range(6))
        answers = await asyncio.gather(*writes, return_exceptions=True)
        assert [isinstance(answer, Refusal) for answer in answers] == [True, False] * 3
        return await database.read(names)

    assert asyncio.run(run()) == ["default", "p1", "p3", "p5"]


def test_a_violated_constraint_fails_its_operation_alone(database: Database) -> None:
    async def run() -> list[str]:
        answers = await asyncio.gather(*(database.write(add, name) for name in ("a", "a", "b")), return_exceptions=True)
        assert [isinstance(answer, Exception) for answer in answers] == [False, True, False]
        return await database.read(names)

    assert asyncio.run(run()) == ["a", "b", "default"]


def test_a_wrong_statement_fails_its_operation_alone(database: Database) -> None:
    def wrong(tx: Transaction) -> None:
        tx.execute("INSERT INTO no_such_table VALUES (1)")

    async def run() -> list[str]:
        answers = await asyncio.gather(
            database.write(add, "a"), database.write(wrong), database.write(add, "b"), return_exceptions=True
        )
        assert [isinstance(answer, Exception) for answer in answers] == [False, True, False]
        return await database.read(names)

    assert asyncio.run(run()) == ["a", "b", "default"]


def test_a_value_that_a_look_cannot_take_fails_its_operation_alone(database: Database) -> None:
    def look(tx: Transaction) -> None:
        if tx.execute("SELECT CAST(? AS integer)", ("no number",)).fetchone() == (0,):  # SQLite takes it
            raise Refusal(Reason.INVALID, "value: refused; choose another")

    async def run() -> list[str]:
        writes = [database.write(add, "a"), database.write(look), database.write(add, "b")]
        answers = await asyncio.gather(*writes, return_exceptions=True)
        assert [isinstance(answer, Refusal) for answer in answers] == [False, True, False]
        return await database.read(names)

    assert asyncio.run(run()) == ["a", "b", "default"]


def test_an_operation_that_wrote_the_points_of_others_is_undone_alone(database: Database) -> None:
    def log(tx: Transaction, run: int) -> None:
        points.append(tx, 1, run, PointColumns(["loss"], array("q", [0]), array("q", [0]), array("d", [0.5])))

    def write_and_fail(tx: Transaction) -> None:
        points.flush_points(tx)
        raise Refusal(Reason.INVALID, "name: refused; choose another")

    async def run() -> list[int]:
        writes = [database.write(log, 1), database.write(write_and_fail), database.write(log, 2)]
        await asyncio.gather(*writes, return_exceptions=True)
        return await database.read(lambda snapshot: [row[0] for row in snapshot.execute("SELECT run FROM tail")])

    assert sorted(asyncio.run(run())) == [1, 2]


def test_callbacks_run_only_for_operations_that_were_committed(database: Database) -> None:
    called: list[str] = []

    def note(tx: Transaction, name: str, fails: bool) -> None:
        tx.after_commit(lambda: called.append(name))
        add(tx, name, fails)

    async def run() -> None:
        await asyncio.gather(database.write(note, "a", False), database.write(note, "b", True), return_exceptions=True)

    asyncio.run(run())
    assert called == ["a"]


def test_a_callback_that_raises_neither_fails_nor_repeats_its_operation(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    def add_and_call(tx: Transaction, name: str) -> str:
        tx.after_commit(lambda: 1 / 0)
        return add(tx, name)

    async def run() -> list[str]:
        answers = await asyncio.gather(*(database.write(add_and_call, name) for name in ("a", "b")))
        assert answers == ["a", "b"]
        return await database.read(names)

    assert asyncio.run(run()) == ["a", "b", "default"]
    assert "ZeroDivisionError" in caplog.text


def test_the_writer_survives_an_operation_that_would_end_its_thread(database: Database) -> None:
    def leave(_tx: Transaction) -> None:
        raise SystemExit(3)

    async def run() -> list[str]:
        with pytest.raises(RuntimeError, match="SystemExit"):
            await database.write(leave)
        await database.write(add, "a")
        return await database.read(names)

    assert asyncio.run(run()) == ["a", "default"]


def test_points_of_an_operation_that_raises_are_dropped(database: Database) -> None:
    def log(tx: Transaction, run: int, fails: bool) -> None:
        columns = PointColumns()
        columns.append(f"loss{run}", 1, 1, 0.5)
        points.append(tx, 1, run, columns)
        add(tx, f"p{run}", fails)

    async def run() -> list[tuple[int, ...]]:
        await asyncio.gather(*(database.write(log, n, n == 2) for n in (1, 2, 3)), return_exceptions=True)
        return await database.read(lambda s: s.execute("SELECT run FROM tail ORDER BY run").fetchall())

    assert asyncio.run(run()) == [(1,), (3,)]


def test_a_reader_cannot_write(database: Database) -> None:
    async def run() -> None:
        await database.read(lambda s: s.execute("DELETE FROM project"))

    with pytest.raises(Exception, match=r"read-?only|unavailable|cannot be used"):
        asyncio.run(run())


def test_a_closed_database_refuses_writes_in_words(database: Database) -> None:
    database.close()

    with pytest.raises(Refusal, match="shutting down") as refused:
        database.write_and_wait(add, "late")
    assert refused.value.reason is Reason.UNAVAILABLE


def test_written_records_are_there_after_reopening(database_url: str) -> None:
    first = Database(database_url)
    first.write_and_wait(add, "kept")
    first.close()

    second = Database(database_url)
    assert second.read_and_wait(names) == ["default", "kept"]
    second.close()


def test_a_second_process_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/hub.db"
    database = Database(url)
    program = f"from skyward.hub.store.database import Database; Database({url!r})"
    second = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    database.close()

    assert second.returncode != 0
    assert f"process {os.getpid()} has this database open" in second.stderr


@pytest.mark.parametrize("url", ["mysql://host/name", "sqlite://"])
def test_another_kind_of_database_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="is not a database of the hub"):
        Database(url)


def test_writes_go_on_after_postgresql_restarted(postgres: PostgresServer) -> None:
    url = postgres.new_database()
    database = Database(url)
    database.write_and_wait(add, "before")
    postgres.stop()
    with pytest.raises(Refusal, match="cannot be used now") as refused:
        database.write_and_wait(add, "during")
    with pytest.raises(Refusal, match="cannot be used now"):
        database.read_and_wait(names)
    postgres.start()

    database.write_and_wait(add, "after")
    assert database.read_and_wait(names) == ["after", "before", "default"]
    assert refused.value.reason is Reason.UNAVAILABLE
    database.close()
    postgres.drop_database(url)


def test_two_servers_write_the_same_rows_of_postgresql(postgres: PostgresServer) -> None:
    url = postgres.new_database()
    servers = [Database(url), Database(url)]

    def log(tx: Transaction, step: int) -> None:
        columns = PointColumns()
        for key in range(50):
            columns.append(f"k{(key * 7 + step) % 50}", step, step, float(step))
        points.append(tx, 1, 1, columns)

    async def run() -> None:
        await asyncio.gather(*(servers[step % 2].write(log, step) for step in range(200)))

    asyncio.run(run())
    latest = servers[0].read_and_wait(lambda s: s.execute("SELECT step, count(*) FROM latest GROUP BY step").fetchall())
    for server in servers:
        server.close()
    postgres.drop_database(url)
    assert latest == [(199, 50)]


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        (
            "postgresql://hub:secret@127.0.0.1:9/hub",
            r"'postgresql\+psycopg://hub:\*\*\*@127.0.0.1:9/hub': cannot be used",
        ),
        ("sqlite:///{folder}/junk/hub.db", r"cannot be used \(file is not a database\); name another folder"),
        ("sqlite:////proc/nowhere/hub.db", "data='/proc/nowhere': cannot be written"),
        ("secret", "is not an address; use sqlite:///FILE or postgresql://USER@HOST/NAME"),
        ("mysql://ada:secret@127.0.0.1/hub", r"'mysql://ada:\*\*\*@127.0.0.1/hub': is not a database of the hub"),
    ],
)
def test_a_database_that_cannot_be_used_is_refused_in_words(tmp_path: Path, url: str, problem: str) -> None:
    (tmp_path / "junk").mkdir()
    (tmp_path / "junk" / "hub.db").write_text("this is a letter to a friend and not a database " * 100)

    with pytest.raises(UsageError, match=problem) as refused:
        Database(url.format(folder=tmp_path))

    assert "secret" not in str(refused.value)
